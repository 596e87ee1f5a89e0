# SPDX-License-Identifier: Apache-2.0
"""What a plan of the strategy ``transposed`` would take: the kernels' own list of steps, run through a pipeline.

The methods have the names and the order of the functions in kernels/transposed_bwd.py and kernels/transposed_fwd.py:
what changes there changes here.
"""

from __future__ import annotations

from functools import partial

from nki_bn.hardware import Timing
from nki_bn.kernels import transposed_bwd, transposed_fwd
from nki_bn.kernels.backward_tensors import needs_input_sums, needs_products, needs_sums
from nki_bn.kernels.plan import TransposedForwardPlan, TransposedPlan
from nki_bn.kernels.resident_geometry import Extent, extent_of_core
from nki_bn.kernels.sizing import GROUP_PIECES, ceil_div
from nki_bn.kernels.transposed_blocks import Ground, Rows
from nki_bn.kernels.transposed_layout import block_size, piece_widths, row_chunks
from nki_bn.kernels.transposed_schedule import Scope, Step, odd_one, run_steps, steps_of, works_alone
from nki_bn.pipeline import SCALAR, VECTOR, Paces, Prediction
from nki_bn.predict_columns import Columns, mask_passes
from nki_bn.predict_rows import RowRun, shortened
from nki_bn.predict_tiles import extrapolated

# Jobs and chunks that are run at least when there are more, and further ones to see what each adds: even numbers of
# chunks, since engines share work by turns.
JOBS = 32
FEW_GROUPS, MORE_GROUPS = 3, 2
FEW_CHUNKS, MORE_CHUNKS = 16, 4


def predict_transposed(plan: TransposedPlan | TransposedForwardPlan, timing: Timing) -> Prediction:
    """The prediction for the slower core: the one with the larger share, unless the other's has more chunks."""
    first, last = (extent_of_core(plan.shape, plan.split, core, plan.cores) for core in (0, plan.cores - 1))
    # A core without work leaves all of HBM to the other.
    busy = plan.cores if last.channels * last.batches else 1
    found = _predicted(plan, first, Paces(timing, busy - 1))
    if busy == 1 or (first.channels, first.batches) == (last.channels, last.batches):
        return found
    other = _predicted(plan, last, Paces(timing, busy - 1))
    return max(found, other, key=lambda prediction: prediction.ns)


def _predicted(plan: TransposedPlan | TransposedForwardPlan, extent: Extent, paces: Paces) -> Prediction:
    """The prediction for a core that owns ``extent``, extrapolated where it has many groups or chunks."""
    chunks = row_chunks(extent, plan.tiles, plan.positions, plan.dtype)
    ground = Ground(extent, chunks, block_size(plan.shape, plan.split, plan.cores), [])
    scope: Scope = _scope_of(plan, ground)

    def over_chunks(count: int) -> Prediction:
        few = max(FEW_GROUPS, ceil_div(JOBS, count * scope.group_blocks))
        return extrapolated(partial(_run, plan, ground, scope, paces, count), scope.groups(), few, MORE_GROUPS)

    return extrapolated(over_chunks, scope.chunks, FEW_CHUNKS, MORE_CHUNKS)


def _scope_of(plan: TransposedPlan | TransposedForwardPlan, ground: Ground) -> Scope:
    """What the core has to do, as the kernel sees it."""
    if isinstance(plan, TransposedPlan):
        return transposed_bwd.scope_of(plan, ground)
    return transposed_fwd.scope_of(plan, ground)


def _run(
    plan: TransposedPlan | TransposedForwardPlan, ground: Ground, scope: Scope, paces: Paces, chunks: int, groups: int
) -> Prediction:
    """The prediction for the first ``groups`` groups and so many chunks."""
    part = shortened(ground, scope, groups, chunks)
    if isinstance(plan, TransposedPlan):
        return _Backward(plan, *part, paces).predicted()
    return _Forward(plan, *part, paces).predicted()


class _Backward(RowRun):
    """One core at work on gradients."""

    def __init__(self, plan: TransposedPlan, ground: Ground, scope: Scope, paces: Paces) -> None:
        super().__init__(plan, ground, scope, paces, ("dy", "x", "mask", "residual"), ("wide", "narrow"))
        self.plan = plan
        # When hi and what is derived from the parameters is there, for full blocks and for a smaller one.
        self.centered: dict[bool, float] = {}
        self.started: dict[bool, float] = {}
        # Of two groups by turns: when both sums are there.
        self.sums = [[0.0, 0.0], [0.0, 0.0]]
        # By group, and likewise.
        self.coefficients: dict[tuple[int, bool], float] = {}
        self.dgamma = 0.0

    def predicted(self) -> Prediction:
        """The order of ``transposed_gradients``."""
        plan = self.plan
        x = needs_products(plan) or plan.relu == "recompute"
        beside = self.beside(1 + x + plan.residual + (plan.relu == "mask") / self.itemsize)
        for columns in self.all_blocks():
            mean, variance, gamma = (columns.load_beside(beside) for _ in range(3))
            beta = columns.load_beside(beside) if plan.relu == "recompute" else None
            smaller = columns.lanes < self.ground.size
            self.centered[smaller] = columns.split(mean)
            self.started[smaller] = columns.derive(variance, gamma, self.centered[smaller], beta)
        run_steps(self, steps_of(self.scope))
        if needs_sums(self.plan) and (self.first_core or not self.shared):
            for columns in self.all_blocks():
                for needed in (self.plan.need_dbeta, self.plan.need_dgamma):
                    if needed:
                        columns.store_aside(self.dgamma)
        return self.pipeline.prediction()

    def load(self, step: Step) -> None:
        plan, rows = self.plan, self.rows_of(step)
        self.load_rows("dy", step.visit, rows, self.itemsize)
        if needs_products(plan) or plan.relu == "recompute":
            self.load_rows("x", step.visit, rows, self.itemsize)
        if plan.relu == "mask":
            self.load_rows("mask", step.visit, rows, 1)
        if plan.residual:
            self.load_rows("residual", step.visit, rows, self.itemsize)

    def start(self, step: Step, at: int) -> None:
        if step.kind == "mask" and self.plan.relu == "recompute":
            rows = self.rows_of(step)
            self.turn_in("x bank", at, "x", step.visit, rows)
            if self.plan.residual:
                self.turn_in("other bank", at, "residual", step.visit, rows)
        if step.kind == "first":
            self.start_first(step, at, self.rows_of(step))
        if step.kind == "second":
            self.start_second(step, at, self.rows_of(step))

    def middle(self, step: Step, at: int) -> None:
        if step.kind == "mask" and self.plan.relu == "recompute":
            self.recompute_block(step, at, self.rows_of(step))
        if step.kind == "first" and needs_products(self.plan):
            width = self.rows_of(step).chunk.columns()
            work = self.paces.vector_psum("scalar_tensor_tensor", width)
            tiles = (self.ring("x bank", at), self.ring("narrow", at))
            self.run(VECTOR, work, tiles, (self.ring("wide", at),), self.centered[self.smaller(step.block)])
        if step.kind == "second":
            self.combine(step, at, self.rows_of(step))

    def finish(self, step: Step, at: int) -> None:
        if step.kind == "mask":
            self.apply_mask(step, at, self.rows_of(step))
        if step.kind == "first" and needs_products(self.plan):
            self.sum_product(step, at, self.rows_of(step))
        if step.kind == "turn":
            for columns in self.blocks_of(step):
                self.coefficients[step.group, columns.lanes < self.ground.size] = self.finish_sums(step, columns)
        if step.kind == "second":
            rows = self.rows_of(step)
            by_scalar = self.plan.folded and works_alone(self.scope, step) and odd_one(step)
            self.turn_out("dy", step.visit, at, self.ring("narrow", at), rows, by_scalar, self.itemsize)
            if step.last:
                self.store_rows("dy", step.visit, rows, self.itemsize)

    def start_first(self, step: Step, at: int, rows: Rows) -> None:
        if needs_products(self.plan):
            self.turn_in("x bank", at, "x", step.visit, rows)
        dy = self.turn_in("other bank", at, "dy", step.visit, rows)
        work = self.paces.accumulated(rows.chunk.columns(), True)
        self.sums[step.group % 2][0] = self.run(SCALAR, work, (dy,), (self.ring("narrow", at),))

    def sum_product(self, step: Step, at: int, rows: Rows) -> None:
        width, product = rows.chunk.columns(), self.ring("wide", at)
        if odd_one(step) and (works_alone(self.scope, step) or not self.plan.folded):
            done = self.run(VECTOR, self.paces.vector("reduce", width), (product,), ())
        else:
            done = self.run(SCALAR, self.paces.accumulated(width), (product,), (product,))
        self.sums[step.group % 2][1] = max(self.sums[step.group % 2][1], done)

    def recompute_block(self, step: Step, at: int, rows: Rows) -> None:
        width, value = rows.chunk.columns(), self.ring("wide", at)
        ready, mask = self.started[self.smaller(step.block)], self.ring("narrow", at)
        if self.plan.residual:
            self.pre_activation(at, width, True, ready)
            self.run(VECTOR, self.paces.vector("plain", width), (value,), (mask,))
        else:
            self.scaled(at, width, ready)
            self.run(VECTOR, self.paces.vector("pointed", width), (value,), (mask,))

    def apply_mask(self, step: Step, at: int, rows: Rows) -> None:
        plan, chunk = self.plan, rows.chunk
        if plan.relu == "recompute":
            self.turn_out("mask", step.visit, at, self.ring("narrow", at), rows, True, 1)
        if plan.relu != "none":
            slow = self.slow(rows, chunk.length, self.itemsize, False)
            work = self.paces.vector("predicated", chunk.tiles * chunk.length * rows.count * slow)
            dy, mask = self.slot("dy", step.visit, rows), self.slot("mask", step.visit, rows)
            self.run(VECTOR, work, (dy, mask), (dy,))
        if plan.need_dresidual and step.last and not step.again:
            self.store_rows("dy", step.visit, rows, self.itemsize)

    def finish_sums(self, step: Step, columns: Columns) -> float:
        plan = self.plan
        sums, products = self.sums[step.group % 2]
        own = columns.reduced(columns.groups * self.scope.chunks, sums)
        if needs_products(plan):
            products = columns.reduced(columns.groups * self.scope.chunks, products)
        else:
            products = self.pipeline.run(VECTOR, self.paces.vector("memset", columns.groups))
        for _ in range(columns.groups if self.shared else 0):
            own = products = columns.vector(self.pipeline.exchange(max(own, products)), 2)
        done = own
        if needs_products(plan):
            done = columns.gamma_gradient(own, products)
        self.dgamma = max(self.dgamma, done)
        return columns.input_coefficients(done, own) if needs_input_sums(plan) else done

    def start_second(self, step: Step, at: int, rows: Rows) -> None:
        self.turn_in("other bank", at, "dy", step.visit, rows)
        if not self.plan.training:
            return
        width, term, smaller = rows.chunk.columns(), self.ring("wide", at), self.smaller(step.block)
        x, ready = self.turn_in("x bank", at, "x", step.visit, rows), self.coefficients[step.group, smaller]
        if self.plan.folded:
            self.run(SCALAR, self.paces.emptied(width), (x,), (term,), ready)
        else:
            self.run(SCALAR, self.paces.emptied(width, 1), (x,), (term,), self.centered[smaller])
            self.run(SCALAR, self.paces.scalar(width, 2), (term,), (term,), ready)

    def combine(self, step: Step, at: int, rows: Rows) -> None:
        width, dy, dx = rows.chunk.columns(), self.ring("other bank", at), self.ring("narrow", at)
        if self.plan.training:
            work = self.paces.vector_psum("scalar_tensor_tensor", width)
            self.run(VECTOR, work, (dy, self.ring("wide", at)), (dx,))
        else:
            self.run(SCALAR, self.paces.emptied(width, 1), (dy,), (dx,), self.started[self.smaller(step.block)])


class _Forward(RowRun):
    """One core at work on results."""

    def __init__(self, plan: TransposedForwardPlan, ground: Ground, scope: Scope, paces: Paces) -> None:
        tiles = ("wide", "narrow", "gate", "stopped")
        super().__init__(plan, ground, scope, paces, ("x", "residual", "mask"), tiles)
        self.plan = plan
        self.widths = piece_widths(ground.chunks)
        self.first_piece = [len(piece_widths(ground.chunks[:chunk])) for chunk in range(len(ground.chunks) + 1)]
        self.moments = self.loaded = 0.0
        # For full blocks and for a smaller one: when scale and shift are there, with given statistics and by group.
        self.started: dict[bool, float] = {}
        self.coefficients: dict[tuple[int, bool], float] = {}

    def predicted(self) -> Prediction:
        """The order of ``transposed_forward``."""
        for columns in self.all_blocks():
            gamma, self.loaded = columns.load(), columns.load()
            if not self.plan.training:
                mean, variance = columns.load(), columns.load()
                done = columns.coefficients(mean, variance, gamma, self.loaded)
                self.started[columns.lanes < self.ground.size] = done
        run_steps(self, steps_of(self.scope))
        if self.plan.training and (self.first_core or not self.shared):
            for columns in self.all_blocks():
                running = max(columns.load(), columns.load())
                columns.store_statistics(self.moments, running)
        return self.pipeline.prediction()

    def load(self, step: Step) -> None:
        rows = self.rows_of(step)
        self.load_rows("x", step.visit, rows, self.itemsize)
        if self.plan.residual and (step.again or not self.scope.reload):
            self.load_rows("residual", step.visit, rows, self.itemsize)

    def start(self, step: Step, at: int) -> None:
        if step.kind in ("first", "second"):
            rows = self.rows_of(step)
            self.turn_in("x bank", at, "x", step.visit, rows)
            if self.plan.residual and step.kind == "second":
                self.turn_in("other bank", at, "residual", step.visit, rows)

    def middle(self, step: Step, at: int) -> None:
        if step.kind == "first":
            self.add_moments(step, at, self.rows_of(step))
        if step.kind == "second":
            self.normalise(step, at, self.rows_of(step))

    def finish(self, step: Step, at: int) -> None:
        if step.kind == "turn":
            for columns in self.blocks_of(step):
                done = columns.coefficients(self.moments, self.moments, self.loaded, self.loaded)
                self.coefficients[step.group, columns.lanes < self.ground.size] = done
        if step.kind == "second":
            self.store_results(step, at, self.rows_of(step))

    def add_moments(self, step: Step, at: int, rows: Rows) -> None:
        x, columns = self.ring("x bank", at), Columns(self.pipeline, self.paces, rows.count)
        done = 0.0
        for piece in range(self.first_piece[step.chunk], self.first_piece[step.chunk + 1]):
            done = self.run(VECTOR, self.paces.vector_psum("bn_stats", self.widths[piece]), (x,), ())
            filled, last = piece % GROUP_PIECES + 1, piece == len(self.widths) - 1
            if len(self.widths) > GROUP_PIECES and (filled == GROUP_PIECES or last):
                # bn_stats gives two triples, of even and of odd columns.
                done = columns.merge(2 * filled, done)
        if step.chunk == self.scope.chunks - 1:
            self.moments = self.finish_block(columns, done)

    def finish_block(self, columns: Columns, ready: float) -> float:
        """Mean and variance of a block; when they are there."""
        if len(self.widths) > GROUP_PIECES:
            moments = columns.aggregate(1, columns.merge(ceil_div(len(self.widths), GROUP_PIECES), ready))
        else:
            moments = columns.aggregate(2 * len(self.widths), ready)
        return columns.exchange_moments(moments) if self.shared else moments

    def normalise(self, step: Step, at: int, rows: Rows) -> None:
        plan, width, smaller = self.plan, rows.chunk.columns(), self.smaller(step.block)
        ready = self.coefficients[step.group, smaller] if plan.training else self.started[smaller]
        y, value = self.ring("narrow", at), self.ring("wide", at)
        if not plan.relu and not plan.residual:
            self.scaled(at, width, ready)
            self.run(SCALAR, self.paces.scalar(width, 1), (value,), (y,), ready)
            return
        self.pre_activation(at, width, plan.residual, ready)
        if plan.need_mask:
            name = mask_passes(plan.residual)[-1]
            self.run(VECTOR, self.paces.vector(name, width), (value,), (self.ring("gate", at),))
        if plan.relu:
            zero = self.ring("stopped", at)
            self.run(VECTOR, self.paces.vector("plain", width), (value,), (zero,))
            self.run(VECTOR, self.paces.vector("predicated", width), (zero, value), (y,))
        else:
            self.run(SCALAR, self.paces.scalar(width), (value,), (y,))

    def store_results(self, step: Step, at: int, rows: Rows) -> None:
        self.turn_out("x", step.visit, at, self.ring("narrow", at), rows, True, self.itemsize)
        if self.plan.need_mask:
            self.turn_out("mask", step.visit, at + 1, self.ring("gate", at), rows, True, 1)
        if step.last:
            self.store_rows("x", step.visit, rows, self.itemsize)
            if self.plan.need_mask:
                self.store_rows("mask", step.visit, rows, 1)
