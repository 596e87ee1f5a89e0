# SPDX-License-Identifier: Apache-2.0
"""One core at work on a plan of ``resident`` or ``reread``, in the order of kernels/resident_bwd.py.

The methods have the names and the order of the kernel's functions: what changes there changes here.
"""

from __future__ import annotations

from nki_bn.kernels.backward_tensors import needs_input_sums, needs_products, needs_sums
from nki_bn.kernels.resident_bwd import first_jobs
from nki_bn.kernels.resident_geometry import Step, store_parts
from nki_bn.kernels.resident_layout import group_size, layout_of
from nki_bn.kernels.resident_stages import (
    helped_jobs,
    may_leave_partials,
    vector_adds,
    vector_ends,
    vector_terms,
)
from nki_bn.kernels.resident_turn import turn_pace, turn_steps
from nki_bn.kernels.sizing import BANK_COLUMNS, ceil_div
from nki_bn.kernels.tensor_work import COMBINATION_BANKS
from nki_bn.pipeline import SCALAR, TENSOR, VECTOR, Prediction
from nki_bn.predict_columns import COLUMN_BYTES, Columns, mask_passes
from nki_bn.predict_resident_state import CoreState


class CoreRun(CoreState):
    """One core at work: what it issues, when its engines do it."""

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
        self.column_pace = ceil_div(len(self.steps), max(first_jobs(self.jobs) - 2, 1))
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
            self.make_gradient(at)
        if not job.sums:
            self.end_sums(at - 1)
            self.end_turn()
        self.prepare_ahead()
        if job.sums:
            self.free_sums(job.step.group)
            if self.plan.tensor_sums:
                self.sum_gradient(at)
            self.multiply(at)
            if not self.plan.tensor_sums:
                self.sum_gradient(at)
            self.take_turn_steps()
        else:
            self.products.append(0.0)

    def free_sums(self, group: int) -> None:
        if self.turn is not None and self.turned == 0 and group > self.turn[0].group + 1:
            self.take_turn_step()

    def make_gradient(self, at: int) -> None:
        plan, run, job = self.plan, self.pipeline.run, self.jobs[at]
        width, dy, visit = self.widths[at], self.dy_there[job.visit], job.visit
        ahead = 0.0
        if plan.relu == "recompute":
            if len(self.gates) <= visit:
                self.gates.append(self.gate_chunk(visit, self.scale_chunk(visit)))
            dy = max(dy, self.gates[visit])
            if 0 < visit < len(self.dy_there) - 1 and self.in_first_block(self.visits[visit + 1].step):
                ahead = self.scale_chunk(visit + 1)
        if plan.relu != "none":
            dy = run(VECTOR, self.paces.vector("predicated", width * job.step.sets), dy)
        if ahead:
            self.gates.append(self.gate_chunk(visit + 1, ahead))
        self.masked.append(dy)
        # dx takes the place of dy' only when that is stored as the gradient of the residual.
        stored = plan.need_dresidual and job.sums
        self.given.append(self.pipeline.store(self.transfer(job.step, self.itemsize), dy) if stored else 0.0)

    def scale_chunk(self, visit: int) -> float:
        step, ready = self.visits[visit].step, max(self.x_there[visit], self.started)
        for _ in range(step.sets):
            ready = self.pipeline.run(VECTOR, self.paces.vector("pointed", step.tile.width()), ready)
        return ready

    def gate_chunk(self, visit: int, ready: float) -> float:
        step = self.visits[visit].step
        for _ in range(step.sets):
            for kind in mask_passes(self.plan.residual):
                ready = self.pipeline.run(VECTOR, self.paces.vector(kind, step.tile.width()), ready)
        return ready

    def in_first_block(self, step: Step) -> bool:
        return bool(min(self.whole.channels, self.plan.set_channels) == step.unit.extent.channels)

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
            if may_leave_partials(plan) and job.step.group > 1 and first:
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
            if needs_products(plan):
                self.product_read[at] = self.sum_product(at)
                self.product_sums = max(self.product_sums, self.product_read[at])
            if job.last and job.step.last:
                self.start_turn(at)

    def sum_product(self, at: int) -> float:
        width, ready = self.widths[at], self.products[at]
        if self.plan.tensor_sums:
            return self._added(at, True, ready)
        if vector_ends(at, len(self.jobs)):
            return self.pipeline.run(VECTOR, self.paces.vector("reduce", width), ready)
        return self.pipeline.run(SCALAR, self.paces.accumulated(width), ready)

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
        if later == 0 and not self.combines:
            chances = self.ready - len(self.combined)
            if self.plan.folded:
                self.hold = 0
        self.pace = turn_pace(self.plan, self.turns_rows(step), chances)

    def turns_rows(self, step: Step) -> bool:
        return self.bands(step.unit.extent.channels) > 1 and not self.plan.tensor_sums

    def take_turn_steps(self) -> None:
        if self.derived < len(self.steps):
            for _ in range(min(self.column_pace, len(self.steps) - self.derived)):
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
        second = {3: needs_input_sums(self.plan), 6: True, 7: self.combines, 8: self.combines}.get(number, False)
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
        kinds = 1 + needs_products(plan)
        if kinds == 1:
            columns.vector(0.0)
        if plan.tensor_sums:
            used = min(plan.slice, step.widest)
            pairs = BANK_COLUMNS // (2 * plan.slice)
            for bank in range(ceil_div(sets, pairs)):
                done = columns.reduced(kinds * min(pairs, sets - bank * pairs) * used, ready)
            return done
        return columns.reduced(kinds * sets * (step.partial + 1), ready)

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
