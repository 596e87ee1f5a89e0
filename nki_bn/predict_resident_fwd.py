# SPDX-License-Identifier: Apache-2.0
"""What a plan of the forward strategies ``resident`` and ``reread`` would take: the order of kernels/resident_fwd.py.

The methods have the names and the order of the kernel's functions: what changes there changes here. Training updates
running statistics.
"""

from __future__ import annotations

from dataclasses import replace

from nki_bn.hardware import Timing
from nki_bn.kernels.columns import ROOT_STEPS, SHIFT_STEPS
from nki_bn.kernels.plan import ResidentForwardPlan, size_of
from nki_bn.kernels.resident_fwd import AHEAD_COLUMNS, BOTH_PASSES, FIRST_LOADS, HALF_A_PASS, ONE_PASS, STEPS_AT_THE_END
from nki_bn.kernels.resident_fwd_plan import forward_layout, forward_size, forward_steps
from nki_bn.kernels.resident_geometry import Extent, Step, extent_of_core, store_parts
from nki_bn.kernels.resident_moments import (
    BAND_STEPS,
    MINUS_HI_STEP,
    bands_in_use,
    coefficient_steps,
    is_narrow,
    lane_steps,
    units_of_core,
)
from nki_bn.kernels.sizing import STATS_COLUMNS, ceil_div
from nki_bn.pipeline import GPSIMD, SCALAR, TENSOR, VECTOR, Duration, Paces, Pipeline, Prediction
from nki_bn.predict_columns import Columns, mask_passes
from nki_bn.predict_resident import fewer_chunks, shortened
from nki_bn.predict_resident_state import chunk_transfer

# Groups that are run at least when there are more, and chunks beside those that the ring holds; half of them more tell
# what further groups add.
GROUPS = 6
CHUNKS = 40
# Chunks of a group above which a part of them is run and prolonged, as with ``reread``. Every chunk takes four
# instructions or more, so that such a plan is above the ceiling and is judged by their number alone.
LONG_GROUP = 5000


def predict_resident_forward(plan: ResidentForwardPlan, timing: Timing) -> Prediction:
    """The prediction for the slower core: the one with the larger share, unless the other's leaves more leftovers."""
    first, last = (extent_of_core(plan.shape, plan.split, core, plan.cores) for core in (0, plan.cores - 1))
    found = _predicted(plan, first, timing)
    if (first.batches, first.length) == (last.batches, last.length):
        return found
    return max(found, _predicted(plan, last, timing), key=lambda prediction: prediction.ns)


def _predicted(plan: ResidentForwardPlan, extent: Extent, timing: Timing) -> Prediction:
    """The prediction for a core that owns ``extent``."""
    bands = plan.batch_bands, plan.space_bands
    in_part = plan.reread or _chunks_of_group(plan, extent) > LONG_GROUP
    parts = fewer_chunks(extent, bands, bands, plan.chunk) if in_part else None
    if parts is None:
        return _over_groups(plan, extent, timing)
    short, long = (_over_groups(plan, part, timing) for part in parts.extents)
    return long.prolonged(short, long, parts.times)


def _over_groups(plan: ResidentForwardPlan, extent: Extent, timing: Timing) -> Prediction:
    """The prediction for all groups of a core that owns ``extent``."""
    channels = plan.group_channels
    groups = ceil_div(extent.channels, channels)
    paces = Paces(timing, plan.cores - 1)
    chunks = _chunks_of_group(plan, extent)
    few = max(GROUPS, ceil_div(CHUNKS + plan.slots, chunks))
    # An even number, since engines take turns with chunks.
    few += few % 2
    more = few // 2 + few // 2 % 2
    if groups <= few + more:
        return _Run(plan, extent, extent, paces).run()
    short = _Run(plan, shortened(extent, few, channels), extent, paces).run()
    long = _Run(plan, shortened(extent, few + more, channels), extent, paces).run()
    return long.prolonged(short, long, (groups - few - more) / more)


def _chunks_of_group(plan: ResidentForwardPlan, extent: Extent) -> int:
    """The chunks of a whole group of a core that owns ``extent``."""
    shape = extent.batches, plan.shape[1], extent.length
    chunks: int = forward_size(shape, 1, replace(forward_layout(plan), split="none")).chunks
    return chunks


class _Run:
    """One core at work; a list has one time per chunk, a dict one per group. ``whole`` is all that the core owns."""

    def __init__(self, plan: ResidentForwardPlan, extent: Extent, whole: Extent, paces: Paces) -> None:
        self.plan, self.paces, self.extent, self.whole = plan, paces, extent, whole
        self.pipeline = Pipeline(paces.timing)
        self.shared = plan.split in ("batch", "spatial")
        self.writes = not self.shared or (extent.batch == 0 and extent.start == 0)
        self.steps = forward_steps(plan, extent)
        self.bands = bands_in_use(extent, plan)
        self.narrow = is_narrow(plan)
        self.itemsize = size_of(plan.dtype)
        # By chunk: when x, and what is loaded late, is there; when statistics have read x; when y and the mask are
        # formed, what was loaded late is read, y and mask are in HBM.
        self.x_there: list[float] = []
        self.late_there: list[float] = []
        self.added: list[float] = []
        self.formed: list[list[float]] = []
        self.masked: list[list[float]] = []
        self.late_read: list[float] = []
        self.stored: list[float] = []
        self.mask_stored: list[float] = []
        self.values_read = [0.0, 0.0]
        self.centred: dict[int, float] = {}
        # By group: when the moments of its lanes were merged, when its coefficients can be used.
        self.merged: dict[int, float] = {}
        self.coefficients: dict[int, float] = {}
        self.ready = self.pieces = self.turn_pieces = self.turn_end = self.turned = 0
        self.turning = -1
        self.chain = self.parameters = self.running = self.sums = self.statistics = self.minus_hi = 0.0

    def run(self) -> Prediction:
        """The order of ``normalise_groups``."""
        plan, count = self.plan, len(self.steps)
        if plan.training:
            self.start_turns()
            for _ in range(min(FIRST_LOADS, plan.slots, count)):
                self.load_next()
        self.start_columns()
        if plan.training:
            for at in range(count):
                self.make_room()
                self.add_chunk(at)
                self.form_chunk()
                if self.steps[at].last:
                    self.start_turn(at)
            while self.turning >= 0:
                self.form_chunk()
                for _ in range(STEPS_AT_THE_END):
                    self.advance_turn()
        else:
            self.added, self.ready = [0.0] * count, count
        while plan.need_y and len(self.stored) < count:
            self.load_ahead()
            self.form_chunk()
        if plan.training and self.writes:
            for channels, sets in self.blocks():
                self.store_statistics(channels, sets)
        return self.pipeline.prediction()

    def blocks(self) -> list[tuple[int, int]]:
        """(channels, groups) of all whole groups, and of a smaller last one."""
        whole, rest = divmod(self.whole.channels, self.plan.group_channels)
        found = [(self.plan.group_channels, whole)] if whole else []
        return [*found, (rest, 1)] if rest else found

    def columns(self, channels: int, sets: int) -> Columns:
        return Columns(self.pipeline, self.paces, channels, sets, channels == 1)

    def start_turns(self) -> None:
        """GpSimd writes the numbers of values."""
        runs = len({unit.lanes() for unit in units_of_core(self.extent, self.plan)})
        for columns in (2 * self.bands, *(self.bands,) * (2 * runs)):
            self.pipeline.run(GPSIMD, self.paces.gpsimd(columns))

    def start_columns(self) -> None:
        plan = self.plan
        for number, (channels, sets) in enumerate(self.blocks()):
            banded = self.columns(channels * self.bands, sets)
            if plan.need_y:
                self.parameters = max(self.parameters, banded.load(), banded.load())
            if not plan.training:
                self.chain = max(banded.load(), banded.load())
                for step in range(coefficient_steps(plan)):
                    self.coefficient_step(banded, step)
                given = range(number * len(self.steps), self.steps[-1].group + 1)
                groups = given if number else range(self.steps[-1].group + 1)
                self.coefficients |= dict.fromkeys(groups, self.chain)
            elif self.writes:
                rows = self.columns(channels, sets)
                self.running = max(rows.load_aside(), rows.load_aside())

    def load_ahead(self) -> None:
        plan, count, stored = self.plan, len(self.steps), len(self.stored)
        free = len(self.added) if plan.reread or not plan.need_y else stored - 1
        if not plan.reread or plan.training:
            while len(self.x_there) < count and (
                len(self.x_there) < plan.slots or len(self.x_there) - plan.slots < free
            ):
                self.load_next()
        if plan.need_y:
            while len(self.late_there) < len(self.added) and (
                len(self.late_there) < plan.late_slots or len(self.late_there) - plan.late_slots < stored - 1
            ):
                self.load_late(len(self.late_there))

    def load_next(self) -> None:
        plan, at = self.plan, len(self.x_there)
        free = 0.0
        if at >= plan.slots:
            free = self.added[at - plan.slots] if plan.reread or not plan.need_y else self.stored[at - plan.slots]
        self.x_there.append(self.load(at, free))

    def load_late(self, at: int) -> None:
        plan, there, before = self.plan, 0.0, at - self.plan.late_slots
        if plan.reread:
            there = self.load(at, self.stored[before] if before >= 0 else 0.0)
        if plan.residual:
            there = self.load(at, self.late_read[before] if before >= 0 else 0.0)
        self.late_there.append(there)

    def load(self, at: int, free: float) -> float:
        return self.pipeline.load(chunk_transfer(self.paces, self.plan.shape, self.steps[at], self.itemsize), free)

    def make_room(self) -> None:
        self.load_ahead()
        while len(self.x_there) <= len(self.added):
            assert len(self.stored) < self.ready or self.turning >= 0, "a group does not fit into the ring of slots"
            while len(self.formed) == self.ready and self.turning >= 0:
                self.advance_turn()
            self.form_chunk()
            self.load_ahead()

    def add_chunk(self, at: int) -> None:
        step = self.steps[at]
        width, ready = step.tile.width(), self.x_there[at]
        if step.partial == 0:
            self.pieces = 0
            if self.plan.ragged:
                columns = next(buffer.columns for buffer in self.plan.buffers if buffer.name == "pieces")
                free = self.merged.get(step.group - 2, 0.0)
                ready = max(ready, self.pipeline.run(GPSIMD, self.paces.gpsimd(columns), free))
        pieces = ceil_div(width, STATS_COLUMNS)
        columns = ceil_div(width, pieces)
        for start in range(0, width, columns):
            stats = self.paces.vector("bn_stats", min(columns, width - start))
            self.sums = self.pipeline.run(VECTOR, stats, ready)
            self.pieces += 1
            self.advance_turn()
        self.added.append(self.sums)

    def start_turn(self, at: int) -> None:
        while self.turning >= 0:
            self.advance_turn()
        self.turning, self.turned = self.steps[at].group, 0
        self.turn_pieces, self.turn_end, self.chain = self.pieces, at + 1, self.sums
        self.advance_turn()

    def advance_turn(self) -> None:
        if self.turning < 0:
            return
        channels = self.steps[self.turn_end - 1].unit.extent.channels
        self.turn_step(self.columns(channels * self.bands, 1), channels, self.turned)
        self.turned += 1
        if self.turned == self.moment_steps(channels) + (coefficient_steps(self.plan) if self.plan.need_y else 0):
            self.coefficients[self.turning] = self.chain
            self.turning, self.ready = -1, self.turn_end

    def moment_steps(self, channels: int) -> int:
        if self.bands > 1 or self.shared:
            return int(BAND_STEPS)
        whole = self.whole.channels // self.plan.group_channels if channels == self.plan.group_channels else 1
        return int(lane_steps(whole))

    def turn_step(self, columns: Columns, channels: int, number: int) -> None:
        merges = self.bands > 1 or self.shared
        first = self.moment_steps(channels)
        if number == 0:
            self.chain = self.merged[self.turning] = self.aggregate(2 * self.turn_pieces, self.chain)
        if number < first and merges:
            self.band_step(channels, number)
        elif 0 < number < first:
            self.chain = columns.vector(self.chain)
        elif number >= first:
            self.coefficient_step(columns, number - first)
            if number >= first + MINUS_HI_STEP:
                self.centre_ahead()
        if number == first - 1:
            self.statistics = max(self.statistics, self.chain)

    def centre_ahead(self) -> None:
        plan, at = self.plan, self.ready
        if plan.dtype != "bfloat16" or not self.narrow or plan.reread or len(self.added) < len(self.steps):
            return
        width = self.steps[at].tile.width()
        if at == 0 and not self.centred and width <= AHEAD_COLUMNS:
            self.centred[at] = self.subtract(width, max(self.minus_hi, self.added[at]), 0, BOTH_PASSES)

    def aggregate(self, triples: int, ready: float) -> float:
        return self.pipeline.run(VECTOR, self.paces.vector("bn_aggr", triples), ready)

    def transpose(self, columns: int, times: int = 1) -> None:
        """``times`` transposes; Tensor loads the weights of all but the first beside the one before."""
        self.chain = self.pipeline.run(TENSOR, self.paces.transposed(columns), self.chain)
        first = self.paces.transposed(columns)
        clock = self.paces.timing.clock.tensor
        least = self.paces.timing.floor_cycles / clock
        hidden = self.paces.timing.tensor.weight_load_cycles / clock * self.paces.timing.tensor.cold_factor
        busy = max(first.busy - hidden, least)
        for _ in range(1, times):
            self.chain = self.pipeline.run(TENSOR, Duration(busy, first.visible - hidden))

    def read_psum(self, columns: int) -> None:
        """Vector reads what Tensor wrote."""
        self.chain = self.pipeline.run(VECTOR, self.paces.vector("tensor_tensor", columns), self.chain)

    def band_step(self, channels: int, number: int) -> None:
        lanes = channels * self.bands
        if number == 0:
            self.transpose(lanes)
        elif number == 1:
            self.read_psum(lanes)
            self.transpose(2, self.bands)
        elif number == 3:
            self.read_psum(2 * self.bands)
        elif number == 4:
            self.chain = self.aggregate(self.bands, self.chain)
            if self.shared:
                self.exchange_moments(channels)
            self.transpose(channels)
        elif number == 5:
            self.read_psum(lanes)
            self.transpose(2)
        elif number == 6:
            self.read_psum(2)

    def exchange_moments(self, channels: int) -> None:
        columns = self.columns(channels, 1)
        self.chain = columns.vector(self.chain)
        self.pipeline.run(VECTOR, self.paces.vector("memset", 1))
        self.chain = self.pipeline.exchange(columns.vector(self.chain))
        self.chain = self.aggregate(2, self.chain)

    def coefficient_step(self, columns: Columns, number: int) -> None:
        before = self.chain
        if number == 1:
            self.chain = self.pipeline.run(GPSIMD, self.paces.gpsimd(columns.groups), before)
        elif number == ROOT_STEPS - 1:
            predicated = self.paces.vector("predicated", columns.groups)
            self.chain = self.pipeline.run(VECTOR, predicated, before)
        elif number < ROOT_STEPS + SHIFT_STEPS:
            ready = max(before, self.parameters) if number >= ROOT_STEPS else before
            self.chain = columns.vector(ready, 1 if number == 0 else 2)
        if number == ROOT_STEPS - 2:
            self.chain = columns.vector(before)
        if self.narrow:
            self.narrow_step(columns, number, before)
        elif number == 0:
            columns.split(before)

    def narrow_step(self, columns: Columns, number: int, before: float) -> None:
        if number < 2 and (number == 1 or self.plan.training):
            self.pipeline.run(GPSIMD, self.paces.gpsimd(columns.groups), before)
        elif number < 4:
            self.minus_hi = columns.vector(before, 2 if number == 2 else 1)
        if self.plan.dtype == "float16":
            if number == 4:
                columns.vector(before)
            elif number == ROOT_STEPS + SHIFT_STEPS:
                self.chain = columns.vector(before, 2)
                self.chain = columns.vector(columns.vector(before), 2)

    def form_chunk(self) -> None:
        if not self.plan.need_y:
            self.stored = [0.0] * self.ready
            return
        if len(self.formed) < self.ready:
            self.load_ahead()
            self.normalise_chunk(len(self.formed), self.scalar_part())
            if len(self.formed) - 1 <= len(self.stored):
                return
        if len(self.stored) < len(self.formed):
            self.store_chunk(len(self.stored))

    def scalar_part(self) -> int:
        if len(self.added) < len(self.steps):
            return int(BOTH_PASSES if self.plan.dtype == "bfloat16" else ONE_PASS + len(self.formed) % 2)
        return int(ONE_PASS if self.turning >= 0 else HALF_A_PASS)

    def parts(self, at: int) -> list[Step]:
        parts: list[Step] = store_parts(self.steps[at], 0, at == len(self.steps) - 1)
        return parts

    def normalise_chunk(self, at: int, by_scalar: int) -> None:
        plan, step = self.plan, self.steps[at]
        there = self.late_there[at] if plan.reread else max(self.x_there[at], self.added[at])
        ready = max(self.coefficients[step.group], there)
        late = self.late_there[at] if plan.residual else 0.0
        formed, masked, read = [], [], 0.0
        for part in self.parts(at):
            width = part.tile.width()
            if plan.relu:
                done, mask, read = self.rectify(at, width, ready, late)
            else:
                centred = self.centred[at] if at in self.centred else self.subtract(width, ready, at, by_scalar)
                done, mask = self.shift(at, width, max(centred, ready), late, by_scalar), 0.0
                read = done
            formed.append(done)
            masked.append(mask)
        self.formed.append(formed)
        self.masked.append(masked)
        self.late_read.append(read)

    def shift(self, at: int, width: int, value: float, late: float, by_scalar: int) -> float:
        """y from x - hi."""
        if self.plan.residual:
            shifted = self.add_shift(width, max(value, self.values_read[at % 2]), False)
            self.values_read[at % 2] = self.vector("tensor_tensor", width, max(shifted, late))
            return self.values_read[at % 2]
        shared = width // 2 if self.narrow and by_scalar == HALF_A_PASS else 0
        done = self.add_shift(shared, value, True) if shared else 0.0
        return max(done, self.add_shift(width - shared, value, False))

    def rectify(self, at: int, width: int, ready: float, late: float) -> tuple[float, float, float]:
        """When y through the ReLU is there, the mask, and when what was loaded late is read."""
        plan = self.plan
        value = self.vector("pointed", width, ready)
        kind = "scalar_tensor_tensor" if plan.residual else "pointed"
        value = self.vector(kind, width, max(value, late))
        free = self.mask_stored[at - plan.late_slots] if plan.need_mask and at >= plan.late_slots else 0.0
        mask = self.vector(mask_passes(plan.residual)[-1], width, max(value, free)) if plan.need_mask else 0.0
        return self.vector("predicated", width, self.vector("plain", width, value)), mask, value

    def subtract(self, width: int, ready: float, at: int, by_scalar: int) -> float:
        """The kernel's ``subtract_mean`` and ``subtract_beside``."""
        if not self.narrow:
            return self.vector("pointed", width, ready)
        if by_scalar != BOTH_PASSES:
            return self.vector("pointed_16bit", width, ready)
        if self.plan.dtype == "bfloat16" and at % self.plan.scalar_turns:
            return self.pipeline.run(GPSIMD, self.paces.gpsimd(width, 2), ready)
        pointers = 2 if self.plan.dtype == "float16" else 1
        return self.pipeline.run(SCALAR, self.paces.scalar(width, pointers), ready)

    def add_shift(self, width: int, ready: float, on_vector: bool) -> float:
        if on_vector:
            return self.vector("pointed_16bit", width, ready)
        return self.pipeline.run(SCALAR, self.paces.scalar(width, 2 if self.narrow else 1), ready)

    def vector(self, name: str, width: int, ready: float) -> float:
        return self.pipeline.run(VECTOR, self.paces.vector(name, width), ready)

    def store_chunk(self, at: int) -> None:
        ended = mask = 0.0
        for part, formed, masked in zip(self.parts(at), self.formed[at], self.masked[at], strict=True):
            ended = self.store(part, self.itemsize, formed)
            mask = self.store(part, 1, masked) if self.plan.need_mask else 0.0
        self.stored.append(ended)
        self.mask_stored.append(mask)

    def store(self, step: Step, itemsize: int, ready: float) -> float:
        return self.pipeline.store(chunk_transfer(self.paces, self.plan.shape, step, itemsize), ready)

    def store_statistics(self, channels: int, sets: int) -> None:
        self.columns(channels, sets).store_statistics(self.statistics, self.running, aside=True)
