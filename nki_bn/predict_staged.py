# SPDX-License-Identifier: Apache-2.0
"""What a plan of the strategy ``staged`` would take: the order of kernels/batch_norm_bwd.py, run through a pipeline."""

from __future__ import annotations

from nki_bn.hardware import Timing
from nki_bn.kernels.backward_tensors import needs_input_sums, needs_products, needs_sums
from nki_bn.kernels.plan import BackwardPlan, size_of
from nki_bn.kernels.sizing import PARTIAL_COLUMNS, ceil_div
from nki_bn.pipeline import SCALAR, VECTOR, Prediction
from nki_bn.predict_columns import Columns
from nki_bn.predict_tiles import TileRun, Walk, predict_walk

STAGED_BYTES = 2


def predict_staged(plan: BackwardPlan, timing: Timing) -> Prediction:
    """The prediction for the core with the larger share."""
    return predict_walk(plan, lambda walk: _Run(plan, walk, timing).run())


class _Run(TileRun):
    """One core at work; lists have one time per slot, or per temporary, of its last use by the engine they name."""

    def __init__(self, plan: BackwardPlan, walk: Walk, timing: Timing) -> None:
        super().__init__(plan, walk, timing)
        self.plan = plan
        self.itemsize = size_of(plan.dtype)
        self.staging = any(buffer.name == "staged" for buffer in plan.buffers)
        self.dy_there = [0.0] * self.depth
        self.x_there = [0.0] * self.depth
        self.gradient = [0.0] * self.depth
        self.given = [0.0] * self.depth
        self.dy_free = [0.0] * self.depth
        self.x_free = [0.0] * self.depth
        self.staged_free = [0.0] * self.depth
        self.by_vector = [0.0, 0.0]
        self.by_scalar = [0.0, 0.0]
        self.started = 0.0
        self.scalar_sums = 0.0
        self.vector_sums = 0.0
        self.chunk = 0

    def run(self) -> Prediction:
        """All channel tiles, one after the other."""
        for _ in self.channel_tiles():
            self.gradients()
        return self.pipeline.prediction()

    def gradients(self) -> None:
        """The order of the kernel's ``gradients``."""
        plan, count = self.plan, len(self.walk.tiles)
        columns = self.columns()
        mean, variance, gamma = columns.load(), columns.load(), columns.load()
        beta = columns.load() if plan.relu == "recompute" else None
        self.started = columns.derive(variance, gamma, columns.split(mean), beta)
        moved = max(count - self.depth, 0) if needs_input_sums(plan) else 0
        kept: list[float] = []
        self.chunk = 0
        for at in range(count + self.ahead):
            if at < count:
                self.load_gradient(at)
            if at >= self.ahead:
                done = self.first_phase(at - self.ahead, count)
                if at - self.ahead < moved:
                    kept.append(self.staged_store(at - self.ahead, done))
        sums, dgamma = self.finish_sums(columns) if needs_sums(plan) else (0.0, 0.0)
        if needs_input_sums(plan):
            offset = columns.input_coefficients(dgamma, sums)
            for at in range(moved, count + moved + self.ahead):
                if count <= at < count + moved:
                    self.staged_load(at, at - count, kept[at - count])
                if at - self.ahead >= moved:
                    self.second_phase(at - self.ahead, (at - self.ahead) % count, offset)

    def load_gradient(self, at: int) -> None:
        plan, slot = self.plan, at % self.depth
        elements = self.transfer(at, self.itemsize)
        self.dy_there[slot] = self.x_there[slot] = self.pipeline.load(elements, self.dy_free[slot])
        if needs_products(plan) or plan.relu == "recompute":
            self.x_there[slot] = self.pipeline.load(elements, self.x_free[slot])
        if plan.relu == "mask":
            self.dy_there[slot] = self.pipeline.load(self.transfer(at, 1), self.x_free[slot])
        if plan.residual:
            self.x_there[slot] = self.pipeline.load(elements, self.x_free[slot])

    def first_phase(self, at: int, count: int) -> float:
        """The sums of one tile; when its staged copy is there."""
        plan, slot, widths = self.plan, at % self.depth, self.walk.chunks(at)
        self.mask_gradient(at, widths)
        ready, staged, done = self.gradient[slot], 0.0, 0.0
        for number, width in enumerate(widths):
            if needs_sums(plan):
                staged = self.sum_chunk(slot, width, ready)
                self.close_group(at == count - 1 and number == len(widths) - 1)
                self.chunk += 1
            if plan.need_dx and not plan.training:
                done = self.pipeline.run(
                    SCALAR, self.paces.scalar(width, 1), max(ready, self.given[slot], self.started)
                )
        self.x_free[slot] = max(self.scalar_sums, self.vector_sums, ready)
        self.dy_free[slot] = max(self.x_free[slot], self.given[slot])
        if plan.need_dx and not plan.training:
            self.dy_free[slot] = self.pipeline.store(self.transfer(at, self.itemsize), done)
        return staged

    def mask_gradient(self, at: int, widths: list[int]) -> None:
        plan, slot = self.plan, at % self.depth
        ready = self.dy_there[slot]
        if plan.relu != "none":
            for number, width in enumerate(widths):
                done = self.mask_chunk(width, slot, number % 2)
            ready = done
        self.gradient[slot] = ready
        if plan.need_dresidual:
            self.given[slot] = self.pipeline.store(self.transfer(at, self.itemsize), ready)

    def mask_chunk(self, width: int, slot: int, turn: int) -> float:
        run, ready = self.pipeline.run, self.dy_there[slot]
        if self.plan.relu == "recompute":
            value = run(
                VECTOR, self.paces.vector("pointed", width), max(self.started, self.x_there[slot], self.by_scalar[turn])
            )
            add = self.paces.vector("pointed", width)
            if self.plan.residual:
                add = self.paces.vector("scalar_tensor_tensor", width)
            value = run(VECTOR, add, value)
            self.by_vector[turn] = run(VECTOR, self.paces.vector("plain", width), value)
            ready = max(ready, self.by_vector[turn])
        return run(VECTOR, self.paces.vector("predicated", width), ready)

    def sum_chunk(self, slot: int, width: int, ready: float) -> float:
        mine, other = self.chunk % 2, (self.chunk + 1) % 2
        free = self.staged_free[slot] if self.staging else self.by_vector[mine]
        staged = self.pipeline.run(SCALAR, self.paces.accumulated(width), max(ready, free))
        if not self.staging:
            self.by_scalar[mine] = staged
        self.scalar_sums = staged
        if needs_products(self.plan):
            product = self.paces.vector("scalar_tensor_tensor", width)
            there = max(ready, self.started, self.x_there[slot])
            done = self.pipeline.run(VECTOR, product, max(there, self.by_scalar[other]))
            done = self.pipeline.run(VECTOR, self.paces.vector("reduce", width), done)
            self.vector_sums = self.by_vector[other] = done
        return staged

    def close_group(self, last: bool) -> None:
        """The sums of a group of partials that is full, or the last."""
        filled = self.chunk % PARTIAL_COLUMNS + 1
        if filled == PARTIAL_COLUMNS or last:
            columns = self.columns()
            self.scalar_sums = columns.reduced(filled, self.scalar_sums)
            if needs_products(self.plan):
                self.vector_sums = columns.reduced(filled, self.vector_sums)

    def staged_store(self, at: int, done: float) -> float:
        slot = at % self.depth
        stored = self.staged_free[slot] = self.pipeline.store(self.row(at, STAGED_BYTES), done)
        return stored

    def staged_load(self, visit: int, at: int, kept: float) -> None:
        slot = visit % self.depth
        self.x_there[slot] = self.pipeline.load(self.transfer(at, self.itemsize), self.x_free[slot])
        self.dy_there[slot] = self.pipeline.load(self.row(at, STAGED_BYTES), max(kept, self.staged_free[slot]))

    def finish_sums(self, columns: Columns) -> tuple[float, float]:
        """The turn; when the sum of dy', and dgamma, are there."""
        plan = self.plan
        groups = ceil_div(self.chunk, PARTIAL_COLUMNS)
        sums = columns.reduced(groups, self.scalar_sums)
        products = columns.reduced(groups, self.vector_sums) if needs_products(plan) else columns.vector(0.0)
        for _ in range(1, self.walk.bands):
            sums = products = columns.vector(columns.vector(max(sums, products)), 2)
        for _ in range(1, self.walk.bands):
            sums = products = columns.vector(sums)
        if self.shared:
            sums = products = columns.vector(self.pipeline.exchange(max(sums, products)), 2)
        dgamma = columns.gamma_gradient(sums, products) if needs_products(plan) else 0.0
        rows = Columns(self.pipeline, self.paces, self.channels)
        for needed, ready in ((plan.need_dbeta, sums), (plan.need_dgamma, dgamma)):
            if needed:
                rows.store(ready)
        return sums, dgamma

    def second_phase(self, visit: int, at: int, offset: float) -> None:
        plan, slot, run = self.plan, visit % self.depth, self.pipeline.run
        returned = visit >= len(self.walk.tiles)
        gradient = max(self.dy_there[slot], self.dy_free[slot]) if returned else self.given[slot]
        read = done = 0.0
        for number, width in enumerate(self.walk.chunks(at)):
            turn = number % 2
            free = max(self.x_there[slot], self.by_vector[turn])
            if plan.folded:
                term = read = run(SCALAR, self.paces.scalar(width, 2), max(free, offset))
            else:
                read = run(SCALAR, self.paces.scalar(width, 1), free)
                term = run(SCALAR, self.paces.scalar(width, 2), max(read, offset))
            self.by_scalar[turn] = term
            combine = self.paces.vector("scalar_tensor_tensor", width)
            done = self.by_vector[turn] = run(VECTOR, combine, max(term, gradient))
        self.x_free[slot] = read
        if returned:
            self.staged_free[slot] = done
        self.dy_free[slot] = self.pipeline.store(self.transfer(at, self.itemsize), done)
