# SPDX-License-Identifier: Apache-2.0
"""What a plan of the forward strategy ``two_read`` would take: the order of kernels/batch_norm_fwd.py, run through a
pipeline. Training updates running statistics."""

from __future__ import annotations

from nki_bn.hardware import Timing
from nki_bn.kernels.plan import ForwardPlan, size_of
from nki_bn.kernels.sizing import GROUP_PIECES, STATS_COLUMNS, ceil_div
from nki_bn.pipeline import SCALAR, VECTOR, Prediction
from nki_bn.predict_columns import Columns
from nki_bn.predict_tiles import TileRun, Walk, predict_walk


def predict_two_read(plan: ForwardPlan, timing: Timing) -> Prediction:
    """The prediction for the core with the larger share."""
    return predict_walk(plan, lambda walk: _Run(plan, walk, timing).run())


class _Run(TileRun):
    """One core at work; lists have one time per slot or temporary."""

    def __init__(self, plan: ForwardPlan, walk: Walk, timing: Timing) -> None:
        super().__init__(plan, walk, timing)
        self.plan = plan
        self.itemsize = size_of(plan.dtype)
        self.x_there = [0.0] * self.depth
        self.x_free = [0.0] * self.depth
        self.mask_free = [0.0] * self.depth
        self.residual_there = [0.0] * self.depth
        self.residual_free = [0.0] * self.depth
        self.temporary_read = [0.0, 0.0]

    def run(self) -> Prediction:
        """All channel tiles, one after the other."""
        for _ in self.channel_tiles():
            self.normalise()
        return self.pipeline.prediction()

    def normalise(self) -> None:
        """The order of the kernel's ``normalise``."""
        plan, count = self.plan, len(self.walk.tiles)
        columns = self.columns()
        moved = count
        if plan.training:
            mean = variance = self.make_statistics(columns)
            moved = max(count - self.depth, 0)
            rows = Columns(self.pipeline, self.paces, self.channels)
            rows.store_statistics(mean, max(rows.load(), rows.load()))
        else:
            mean, variance = columns.load(), columns.load()
        if plan.need_y:
            gamma, beta = columns.load(), columns.load()
            ready = columns.coefficients(mean, variance, gamma, beta)
            for at in range(moved, count + moved + self.ahead):
                if at < count + moved:
                    self.load_for_normalising(at, at % count, at < count)
                if at - self.ahead >= moved:
                    self.normalise_tile(at - self.ahead, (at - self.ahead) % count, ready)

    def make_statistics(self, columns: Columns) -> float:
        """Phase 1 and the turn; when mean and variance are there."""
        count, piece, sums = len(self.walk.tiles), 0, 0.0
        for at in range(count + self.ahead):
            if at < count:
                slot = at % self.depth
                self.x_there[slot] = self.pipeline.load(self.transfer(at, self.itemsize), self.x_free[slot])
            if at >= self.ahead:
                slot, widths = (at - self.ahead) % self.depth, self.walk.chunks(at - self.ahead, STATS_COLUMNS)
                for number, width in enumerate(widths):
                    stats = self.paces.vector("bn_stats", width)
                    sums = self.x_free[slot] = self.pipeline.run(VECTOR, stats, self.x_there[slot])
                    last = at - self.ahead == count - 1 and number == len(widths) - 1
                    if last or piece % GROUP_PIECES == GROUP_PIECES - 1:
                        # bn_stats gives two triples, of even and of odd columns.
                        sums = columns.merge(2 * (piece % GROUP_PIECES + 1), sums)
                    piece += 1
        return self.finish_moments(columns, columns.merge(ceil_div(piece, GROUP_PIECES), sums))

    def finish_moments(self, columns: Columns, moments: float) -> float:
        for _ in range(1, self.walk.bands):
            moments = columns.vector(moments)
        moments = columns.aggregate(self.walk.bands, moments)
        for _ in range(1, self.walk.bands):
            moments = columns.vector(moments)
        if self.shared:
            moments = columns.exchange_moments(moments)
        return moments

    def load_for_normalising(self, visit: int, at: int, resident: bool) -> None:
        slot, elements = visit % self.depth, self.transfer(at, self.itemsize)
        if not resident:
            self.x_there[slot] = self.pipeline.load(elements, self.x_free[slot])
        if self.plan.residual:
            self.residual_there[slot] = self.pipeline.load(elements, self.residual_free[slot])

    def normalise_tile(self, visit: int, at: int, ready: float) -> None:
        slot, passed = visit % self.depth, 0.0
        y = 0.0
        for number, width in enumerate(self.walk.chunks(at)):
            value = self.pre_activation(slot, width, max(ready, self.temporary_read[number % 2]))
            if self.plan.need_mask:
                passed = self.plain(width, max(value, self.mask_free[slot]))
            if self.plan.relu:
                zero = self.plain(width, value)
                select = self.paces.vector("predicated", width)
                y = self.pipeline.run(VECTOR, select, zero)
            else:
                y = self.temporary_read[number % 2] = self.pipeline.run(SCALAR, self.paces.scalar(width), value)
        self.x_free[slot] = self.pipeline.store(self.transfer(at, self.itemsize), y)
        if self.plan.need_mask:
            self.mask_free[slot] = self.pipeline.store(self.transfer(at, 1), passed)

    def plain(self, width: int, ready: float) -> float:
        return self.pipeline.run(VECTOR, self.paces.vector("plain", width), ready)

    def pre_activation(self, slot: int, width: int, ready: float) -> float:
        run = self.pipeline.run
        value = run(VECTOR, self.paces.vector("pointed", width), max(ready, self.x_there[slot]))
        if self.plan.residual:
            add = self.paces.vector("scalar_tensor_tensor", width)
            value = self.residual_free[slot] = run(VECTOR, add, max(value, self.residual_there[slot]))
            return value
        return run(VECTOR, self.paces.vector("pointed", width), value)
