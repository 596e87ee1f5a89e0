# SPDX-License-Identifier: Apache-2.0
"""One core at work on a plan of ``resident`` or ``reread``, in the order of kernels/resident_bwd.py.

The methods have the names and the order of the kernel's functions: what changes there changes here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from nki_bn.kernels.backward_tensors import needs_input_sums, needs_products, needs_sums
from nki_bn.kernels.plan import ResidentPlan, size_of
from nki_bn.kernels.resident_bwd import jobs_of, stages_behind, visits_of
from nki_bn.kernels.resident_geometry import Extent, Step, store_parts
from nki_bn.kernels.resident_layout import group_size, layout_of, plan_steps
from nki_bn.kernels.resident_stages import DRAINED_GROUPS, helped_jobs, vector_adds, vector_terms
from nki_bn.kernels.resident_turn import combines_by_tensor, turn_pace, turn_steps
from nki_bn.kernels.sizing import BANK_COLUMNS, PARTITIONS, ceil_div
from nki_bn.kernels.tensor_work import COMBINATION_BANKS
from nki_bn.kernels.turned_columns import are_turned
from nki_bn.pipeline import GPSIMD, SCALAR, TENSOR, VECTOR, Paces, Pipeline, Prediction, Transfer
from nki_bn.predict_columns import COLUMN_BYTES, Columns


def chunk_transfer(paces: Paces, shape: tuple[int, int, int], step: Step, itemsize: int) -> Transfer:
    """The DMA of a chunk of a [B, C, S] tensor."""
    elements = step.tile.length * step.tile.batches * step.sets
    return paces.transfer(step.unit.lanes(), runs_of(shape, step), elements * itemsize)


def runs_of(shape: tuple[int, int, int], step: Step) -> int:
    """Pieces of a partition that lie apart in memory."""
    batches = step.tile.batches
    apart = shape[1] > 1 and (batches > 1 or step.unit.extent.channels > 1)
    return 1 if step.tile.length == shape[2] and not apart else batches * step.sets


class CoreRun:
    """One core at work; a list has one time per visit or job of the kernel. ``whole`` is all that the core owns."""

    def __init__(self, plan: ResidentPlan, extent: Extent, whole: Extent, paces: Paces) -> None:
        self.plan, self.paces, self.extent, self.whole = plan, paces, extent, whole
        self.pipeline = Pipeline(paces.timing)
        self.shared = plan.split in ("batch", "spatial")
        self.first = extent.batch == 0 and extent.start == 0
        steps = plan_steps(plan, extent)
        self.visits = visits_of(steps, plan)
        self.jobs = jobs_of(self.visits)
        self.widths = [job.step.tile.width() for job in self.jobs]
        self.drained = steps[-1].group - DRAINED_GROUPS if steps else 0
        self.itemsize = size_of(plan.dtype)
        self.behind = stages_behind(plan)
        self.combines = combines_by_tensor(plan)
        self.fast = plan.dtype if plan.fast else None
        # By visit.
        self.dy_there: list[float] = []
        self.x_there: list[float] = []
        self.masked: list[float] = []
        self.given: list[float] = []
        self.stored: list[float] = []
        # By job.
        self.products: list[float] = []
        self.product_read: list[float] = []
        self.prepared: list[float] = []
        self.combined: list[float] = []
        self.banks: list[tuple[int, float, int]] = []
        self.emptied: list[float] = []
        self.finished: list[float] = []
        self.summed = self.ready = self.derived = self.hold = 0
        # Columns that come turned, but for the mean.
        self.others = 0
        self.steps: list[Callable[[], None]] = []
        self.started = self.centered = 0.0
        self.gradient_sums = self.product_sums = 0.0
        self.turn: tuple[Step, list[float]] | None = None
        self.turned = self.pace = self.after = 0
        self.coefficients: dict[int, float] = {}
        self.dbeta = self.dgamma = 0.0

    def run(self) -> Prediction:
        """The order of ``resident_gradients``."""
        self.allocate_work()
        if self.visits:
            self.load_ahead(0)
        columns = [self._loaded_columns(channels, sets) for channels, sets in self.blocks()]
        for at, (block, there) in enumerate(columns):
            self.steps += self.column_steps(block, there, at > 0)
        if self.plan.relu == "recompute" or not self.plan.training:
            self.end_columns()
        for at, job in enumerate(self.jobs):
            self.begin_job(at)
            self.finish_job()
            self.end_sums(at - 1)
            if not job.sums:
                self.ready = at + 1
        self.end_sums(len(self.jobs) - 1)
        while self.turn is not None and len(self.combined) < self.ready:
            self.finish_job()
        self.end_turn()
        while len(self.finished) < len(self.jobs):
            self.finish_job()
        if needs_sums(self.plan):
            self.store_blocks()
        return self.pipeline.prediction()

    def allocate_work(self) -> None:
        """What is filled before anything is loaded."""
        filled = {"partials", "ones", "wide ones"}
        for buffer in self.plan.buffers:
            if buffer.name in filled:
                for _ in range(buffer.count):
                    self.pipeline.run(VECTOR, self.paces.vector("memset", buffer.columns))
        if self.combines:
            self.pipeline.run(GPSIMD, self.paces.gpsimd(PARTITIONS))

    def blocks(self) -> list[tuple[int, int]]:
        """(channels, sets) of all whole sets, and of a smaller last one."""
        whole, rest = divmod(self.whole.channels, self.plan.set_channels)
        found = [(self.plan.set_channels, whole)] if whole else []
        return [*found, (rest, 1)] if rest else found

    def bands(self, channels: int) -> int:
        """Bands that sets of this many channels use."""
        last = channels < self.plan.set_channels
        return int(self.plan.last_lane_bands if last else self.plan.lane_bands)

    def _loaded_columns(self, channels: int, sets: int) -> tuple[Columns, list[float]]:
        columns = Columns(self.pipeline, self.paces, self.bands(channels) * channels, sets, channels == 1)
        count = 4 if self.plan.relu == "recompute" else 3
        # The first is beside the chunks that begin gently.
        visits = [self.visits[min(2 * at, len(self.visits) - 1)] for at in range(count)]
        turned = are_turned(sets, channels)
        loaded = Columns(self.pipeline, self.paces, sets, channels, True) if turned else columns
        there = [loaded.load_aside(self.run_of(visit.step)) for visit in visits]
        if turned:
            there = [self.pipeline.run(TENSOR, self.paces.transposed(sets), ready) for ready in there]
            there[0] = columns.vector(there[0])
            self.others = (count - 1) * sets
        if self.centered == 0.0:
            self.centered = columns.split(there[0])
        return columns, there

    def column_steps(self, columns: Columns, there: list[float], later: bool) -> list[Callable[[], None]]:
        """The steps that derive the columns of a block from what is loaded; each waits for the one before."""
        done = [there[1]]

        def step(*kinds: int) -> None:
            """Instructions on one or two columns each, and what they leave for the next step."""
            before = done[-1]
            for kind in kinds:
                done.append(columns.vector(before, kind))
            self.started = max(self.started, done[-1])

        def root() -> None:
            done.append(self.pipeline.run(GPSIMD, self.paces.gpsimd(columns.groups), done[-1]))

        def scale() -> None:
            done.append(max(done[-1], *there[2:]))
            step(*(2,) * (len(there) - 2 + (len(there) > 3)))

        def first() -> None:
            if later:
                self.centered = max(self.centered, columns.split(there[0]))
            elif self.others:
                work = self.paces.vector("plain", self.others)
                there[1:] = [self.pipeline.run(VECTOR, work, max(there[1:]))] * len(there[1:])
                done.append(there[1])
            step(1)

        share = (1, 1) if needs_input_sums(self.plan) else ()
        return [
            first,
            root,
            partial(step, 2),
            partial(step, 2),
            partial(step, 2, 1),
            partial(step, 1),
            scale,
            partial(step, *share),
        ]

    def take_column_step(self) -> None:
        self.steps[self.derived]()
        self.derived += 1

    def end_columns(self) -> None:
        while self.derived < len(self.steps):
            self.take_column_step()

    def store_blocks(self) -> None:
        """dbeta and dgamma, which only one core has to write where both have the same channels."""
        if self.shared and not self.first:
            return
        for channels, sets in self.blocks():
            columns = Columns(self.pipeline, self.paces, channels, sets, channels == 1)
            for needed, ready in ((self.plan.need_dbeta, self.dbeta), (self.plan.need_dgamma, self.dgamma)):
                if needed:
                    columns.store_aside(ready)

    def transfer(self, step: Step, itemsize: int) -> Transfer:
        return chunk_transfer(self.paces, self.plan.shape, step, itemsize)

    def run_of(self, step: Step) -> float:
        """ns of one such piece on a DMA engine."""
        dma = self.paces.timing.dma
        nbytes = step.tile.length * step.tile.batches * step.sets * self.itemsize / runs_of(self.plan.shape, step)
        return float(dma.descriptor + nbytes / dma.rate)

    def load_ahead(self, at: int) -> None:
        self.load_into_free(1)
        while len(self.dy_there) <= at:
            if len(self.finished) == self.ready and self.jobs[self.summed].visit < at:
                self.end_sums(self.summed)
            if len(self.finished) == self.ready:
                self.end_turn()
            assert len(self.finished) < self.ready, "a group does not fit into the ring of slots"
            self.finish_job()
            self.load_into_free(0)

    def load_into_free(self, behind: int) -> None:
        plan, slots = self.plan, self.plan.slots
        while len(self.dy_there) < len(self.visits) and (
            len(self.dy_there) < slots or len(self.dy_there) - slots < len(self.stored) - behind
        ):
            at = len(self.dy_there)
            step = self.visits[at].step
            elements, ready = self.transfer(step, self.itemsize), self.stored[at - slots] if at >= slots else 0.0
            dy = x = self.pipeline.load(elements, ready)
            if needs_products(plan) or plan.relu == "recompute":
                x = self.pipeline.load(elements, ready)
            if plan.relu == "mask":
                dy = self.pipeline.load(self.transfer(step, 1), ready)
            if plan.residual:
                x = self.pipeline.load(elements, ready)
            self.dy_there.append(dy)
            self.x_there.append(x)

    def begin_job(self, at: int) -> None:
        job = self.jobs[at]
        if self.turn is None:
            self.ready = max(self.ready, self.after)
        if job.number == 0:
            self.load_ahead(job.visit)
            if job.step.unit.extent.channels < self.plan.set_channels:
                self.end_columns()
            self.mask_chunk(at)
        if not job.sums:
            self.end_sums(at - 1)
            self.end_turn()
        self.prepare_ahead()
        if job.sums:
            if self.plan.tensor_sums:
                self.free_accumulators(job.step.group)
                self.sum_gradient(at)
            self.multiply(at)
            self.take_turn_steps()
        else:
            self.products.append(0.0)

    def free_accumulators(self, group: int) -> None:
        if self.turn is not None and self.turned == 0 and group > self.turn[0].group + 1:
            self.take_turn_step()

    def mask_chunk(self, at: int) -> None:
        plan, run, job = self.plan, self.pipeline.run, self.jobs[at]
        width, dy, x = self.widths[at], self.dy_there[job.visit], max(self.x_there[job.visit], self.started)
        if plan.relu == "recompute":
            for _ in range(job.step.sets):
                value = run(VECTOR, self.paces.vector("pointed", width), x)
                kind = "scalar_tensor_tensor" if plan.residual else "pointed"
                value = run(VECTOR, self.paces.vector(kind, width), value)
                dy = max(dy, run(VECTOR, self.paces.vector("plain", width), value))
        if plan.relu != "none":
            dy = run(VECTOR, self.paces.vector("predicated", width * job.step.sets), dy)
        self.masked.append(dy)
        # dx takes the place of dy' only when that is stored as the gradient of the residual.
        stored = plan.need_dresidual and job.sums
        self.given.append(self.pipeline.store(self.transfer(job.step, self.itemsize), dy) if stored else 0.0)

    def multiply(self, at: int) -> None:
        visit = self.jobs[at].visit
        ready = max(self.masked[visit], self.x_there[visit], self.centered)
        if needs_products(self.plan):
            ready = max(ready, self.product_read[at - 3] if at >= 3 else 0.0)
            ready = self.pipeline.run(VECTOR, self.paces.vector("scalar_tensor_tensor", self.widths[at]), ready)
        self.products.append(ready)

    def sum_gradient(self, at: int) -> None:
        plan, job = self.plan, self.jobs[at]
        if not needs_sums(plan):
            return
        ready, width = self.masked[job.visit], self.widths[at]
        if plan.tensor_sums:
            done = self._added(at, plan.dtype == "float32", ready)
        else:
            first = job.step.partial == 0 and job.step.first_set + job.number == job.step.group_first
            if plan.ragged and job.step.group > 1 and first:
                size = group_size(plan.shape, plan.cores, layout_of(plan))
                ready = max(ready, self.pipeline.run(VECTOR, self.paces.vector("memset", 2 * size.set_chunks)))
            if vector_adds(plan, job.step.group, at) or at >= len(self.jobs) - helped_jobs(len(self.jobs)):
                done = self.pipeline.run(VECTOR, self.paces.vector("reduce", width), ready)
            else:
                done = self.pipeline.run(SCALAR, self.paces.accumulated(width), ready)
        self.gradient_sums = max(self.gradient_sums, done)

    def _added(self, at: int, wide: bool, ready: float) -> float:
        used = min(self.plan.slice, self.jobs[at].step.widest)
        return self.pipeline.multiply(self.paces.products(self.widths[at], used, 1, wide), ready)

    def end_sums(self, at: int) -> None:
        if at < self.summed or at >= len(self.jobs):
            return
        self.summed = at + 1
        plan, job = self.plan, self.jobs[at]
        self.product_read.append(0.0)
        if not job.sums:
            return
        if not job.gradient or not needs_input_sums(plan):
            self.ready = max(self.ready, at + 1)
        if needs_sums(plan):
            if not plan.tensor_sums:
                self.sum_gradient(at)
            if needs_products(plan):
                self.product_sums = (
                    self._added(at, True, self.products[at])
                    if plan.tensor_sums
                    else self.pipeline.run(SCALAR, self.paces.accumulated(self.widths[at]), self.products[at])
                )
                self.product_read[at] = self.product_sums
            if job.last and job.step.last:
                self.start_turn(at)

    def start_turn(self, at: int) -> None:
        self.end_columns()
        self.end_turn()
        step = self.jobs[at].step
        self.turn = step, [max(self.gradient_sums, self.product_sums)]
        self.turned, self.after, self.hold = 0, at + 1, 1
        later = 0
        while at + later + 1 < len(self.jobs) and self.jobs[at + later + 1].step.group == step.group + 1:
            later += 1
        chances = 2 * later
        if later == 0 and not self.plan.folded:
            chances = self.ready - len(self.combined)
        self.pace = turn_pace(self.plan, self.turns_rows(step), chances)

    def turns_rows(self, step: Step) -> bool:
        return self.bands(step.unit.extent.channels) > 1 and not self.plan.tensor_sums

    def take_turn_steps(self) -> None:
        if self.derived < len(self.steps):
            self.take_column_step()
            return
        if self.hold > 0:
            self.hold -= 1
            return
        due = self.pace
        while due > 0:
            due -= 1
            if self.turn is not None and self.turned < 2 and self.turns_rows(self.turn[0]):
                due = 0
            self.take_turn_step()

    def take_turn_step(self) -> None:
        if self.turn is not None:
            self.turn_step(*self.turn)
            self.turned += 1
            if self.turned == turn_steps(self.plan):
                self.coefficients[self.turn[0].group] = self.turn[1][-1]
                self.turn = None

    def end_turn(self) -> None:
        while self.turn is not None:
            self.take_turn_step()
        self.ready = max(self.ready, self.after)

    def turn_step(self, step: Step, done: list[float]) -> None:
        """One step; the last of ``done`` is when the one before can be used."""
        number = self.turned
        lanes = self.bands(step.unit.extent.channels) * step.unit.extent.channels
        columns = Columns(self.pipeline, self.paces, lanes, step.group_sets)
        if number < 3:
            self.dbeta = self.sums_step(step, columns, done[-1], number)
            done.append(self.dbeta)
            return
        second = {3: needs_input_sums(self.plan), 7: self.combines, 8: self.combines}.get(number, False)
        done.append(columns.vector(done[-1], 2))
        if second:
            columns.vector(done[-2], 2)
        if number == 5:
            self.dgamma = max(self.dgamma, done[-1])

    def sums_step(self, step: Step, columns: Columns, ready: float, number: int) -> float:
        channels = step.unit.extent.channels
        by_rows = self.turns_rows(step)
        if number == 0:
            ready = self.own_sums(step, columns, ready)
            return self.pipeline.run(TENSOR, self.paces.transposed(columns.lanes), ready) if by_rows else ready
        if not by_rows:
            return columns.vector(self.pipeline.exchange(ready), 2) if number == 1 and self.shared else ready
        if number == 1:
            # Bands of one channel lie far apart: Vector reads them at half its rate.
            strided = self.paces.timing.strided
            slow = strided.factor if COLUMN_BYTES * channels >= strided.bytes else 1
            ready = columns.reduced(round(columns.lanes * slow), ready)
            if self.shared:
                ready = columns.vector(self.pipeline.exchange(ready), 2)
            return self.pipeline.run(TENSOR, self.paces.transposed(2 * step.group_sets), ready)
        return columns.vector(ready)

    def own_sums(self, step: Step, columns: Columns, ready: float) -> float:
        plan, sets = self.plan, step.group_sets
        if plan.tensor_sums:
            used = min(plan.slice, step.widest)
            pairs = BANK_COLUMNS // (2 * plan.slice)
            for bank in range(ceil_div(sets, pairs)):
                done = columns.reduced(2 * min(pairs, sets - bank * pairs) * used, ready)
            return done
        chunks = step.partial + 1
        if needs_products(plan):
            return columns.reduced(2 * sets * chunks, ready)
        columns.vector(0.0)
        return columns.reduced(sets * chunks, ready)

    def on_tensor(self, at: int) -> bool:
        if not self.combines or self.jobs[at].step.group > self.drained:
            return False
        return bool(at * self.plan.eighths % 8 < self.plan.eighths)

    def prepare_ahead(self) -> None:
        while len(self.prepared) < self.ready and len(self.prepared) <= len(self.combined) + 1:
            self.prepared.append(self.prepare(len(self.prepared)))

    def prepare(self, at: int) -> float:
        plan, job = self.plan, self.jobs[at]
        if not job.gradient or not needs_input_sums(plan):
            return 0.0
        free = self.combined[at - 3] if at >= 3 else 0.0
        if self.on_tensor(at):
            ready = max(self.coefficients[job.step.group], free)
            pace = self.paces.scalar(job.step.unit.lanes(), 1)
            self.pipeline.run(SCALAR, pace, ready)
            return self.pipeline.run(SCALAR, pace, ready)
        if vector_terms(plan, self.jobs[-1].step.group - job.step.group, at):
            kind = "pointed_16bit" if self.fast else "pointed"
            ready = max(self.coefficients[job.step.group], free)
            return self.pipeline.run(VECTOR, self.paces.vector(kind, self.widths[at]), ready)
        if plan.folded:
            ready, pace = max(self.coefficients[job.step.group], free), self.paces.scalar(self.widths[at], 2)
        else:
            free = self.finished[at - 3] if at >= 3 else 0.0
            ready, pace = max(self.centered, self.x_there[job.visit], free), self.paces.scalar(self.widths[at], 1)
        return self.pipeline.run(SCALAR, pace, ready)

    def finish_job(self) -> None:
        if len(self.combined) < self.ready:
            self.prepare_ahead()
            at = len(self.combined)
            if self.jobs[at].gradient:
                self.combined.append(self.combine(at))
                self.take_turn_steps()
            else:
                self.combined.append(0.0)
            if len(self.combined) - self.behind <= len(self.finished):
                return
        if len(self.finished) < len(self.combined):
            self.end_job(len(self.finished))

    def combine(self, at: int) -> float:
        plan, job, width = self.plan, self.jobs[at], self.widths[at]
        if not plan.training:
            ready = max(self.masked[job.visit], self.given[job.visit], self.started)
            return self.pipeline.run(SCALAR, self.paces.scalar(width, 1), ready)
        ready = max(self.prepared[at], self.coefficients[job.step.group])
        if self.on_tensor(at):
            return self.combine_on_tensor(at, ready)
        if plan.folded:
            ready = max(ready, self.given[job.visit])
        name = "scalar_tensor_tensor_16bit" if self.fast else "scalar_tensor_tensor"
        parts = store_parts(job.step, job.number, job.visit == len(self.visits) - 1)
        widths = [step.tile.width() for step in parts] if len(parts) > 1 else [width]
        for part in widths:
            done = self.pipeline.run(VECTOR, self.paces.vector(name, part), ready)
        return done

    def combine_on_tensor(self, at: int, ready: float) -> float:
        banks = ceil_div(self.widths[at], BANK_COLUMNS)
        while len(self.emptied) < len(self.banks) and len(self.banks) - len(self.emptied) + banks > COMBINATION_BANKS:
            self.empty_bank()
        part = ceil_div(self.widths[at], banks)
        done = ready
        for _ in range(banks):
            free = self.emptied[len(self.banks) - COMBINATION_BANKS] if len(self.banks) >= COMBINATION_BANKS else 0.0
            done = self.pipeline.multiply(self.paces.products(part, part, 3, False), max(ready, free))
            self.banks.append((at, done, part))
        return done

    def empty_bank(self) -> float:
        job, done, width = self.banks[len(self.emptied)]
        done = self.pipeline.run(SCALAR, self.paces.emptied(width), max(done, self.given[self.jobs[job].visit]))
        self.emptied.append(done)
        return done

    def end_job(self, at: int) -> None:
        plan, job, width = self.plan, self.jobs[at], self.widths[at]
        done = self.combined[at]
        while len(self.emptied) < len(self.banks) and self.banks[len(self.emptied)][0] <= at:
            done = self.empty_bank()
        parts = store_parts(job.step, job.number, job.visit == len(self.visits) - 1) if job.gradient else []
        if job.gradient and plan.training and not plan.folded:
            for piece in range(max(len(parts), 1)):
                part = parts[piece].tile.width() if len(parts) > 1 else width
                done = max(done, self.given[job.visit])
                if (at + piece) % 2 == 0:
                    done = self.pipeline.run(SCALAR, self.paces.scalar(part, 2), done)
                else:
                    done = self.pipeline.run(VECTOR, self.paces.vector("pointed", part), done)
        self.finished.append(done)
        ended = 0.0
        for step in parts:
            ended = self.pipeline.store(self.transfer(step, self.itemsize), done)
        if job.last:
            free = max(self.gradient_sums, self.product_sums, self.masked[job.visit])
            self.stored.append(ended if job.gradient else free)
