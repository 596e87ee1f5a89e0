# SPDX-License-Identifier: Apache-2.0
"""What a plan of the strategy ``resident`` would take: the order of kernels/resident_bwd.py, run through a pipeline.

The methods have the names and the order of the kernel's functions: what changes there changes here.
"""

from __future__ import annotations

from nki_bn.hardware import Timing
from nki_bn.kernels.backward_phases import needs_input_sums, needs_products, needs_sums
from nki_bn.kernels.plan import ResidentPlan, size_of
from nki_bn.kernels.resident_geometry import Extent, Step, extent_of_core, steps_of
from nki_bn.kernels.sizing import ceil_div
from nki_bn.pipeline import SCALAR, TENSOR, VECTOR, Paces, Pipeline, Prediction, Transfer
from nki_bn.predict_columns import COLUMN_BYTES, Columns

# Groups that are run at least when there are more, and chunks; half of them more tell what further groups add.
GROUPS = 4
CHUNKS = 40


def predict_resident(plan: ResidentPlan, timing: Timing) -> Prediction:
    """The prediction for the slower core: the one with the larger share, unless the other's leaves more leftovers."""
    first, last = (extent_of_core(plan.shape, plan.split, core, plan.cores) for core in (0, plan.cores - 1))
    found = _predicted(plan, first, timing)
    if (first.batches, first.length) == (last.batches, last.length):
        return found
    return max(found, _predicted(plan, last, timing), key=lambda prediction: prediction.ns)


def _predicted(plan: ResidentPlan, extent: Extent, timing: Timing) -> Prediction:
    """The prediction for a core that owns ``extent``."""
    groups = ceil_div(extent.channels, plan.group_channels)
    paces = Paces(timing, plan.cores - 1)
    few = max(GROUPS, ceil_div(CHUNKS, chunks_of_group(plan)))
    more = few // 2
    if groups <= few + more:
        return _Run(plan, extent, groups, paces).run()
    short = _Run(plan, _shortened(plan, extent, few), groups, paces).run()
    long = _Run(plan, _shortened(plan, extent, few + more), groups, paces).run()
    return long.prolonged(short, long, (groups - few - more) / more)


def chunks_of_group(plan: ResidentPlan) -> int:
    """Chunks of a group, on the core that has more."""
    columns: int = next(buffer.columns for buffer in plan.buffers if buffer.name == "partials")
    return columns


def _shortened(plan: ResidentPlan, extent: Extent, groups: int) -> Extent:
    """As many channels as ``groups`` groups have, the last of them like the last of all."""
    last = (extent.channels - 1) % plan.group_channels + 1
    channels = (groups - 1) * plan.group_channels + last
    return Extent(extent.channel, channels, extent.batch, extent.batches, extent.start, extent.length)


class _Run:
    """One core at work; a list has one time per chunk, counted over all groups."""

    def __init__(self, plan: ResidentPlan, extent: Extent, groups: int, paces: Paces) -> None:
        self.plan = plan
        self.paces = paces
        self.pipeline = Pipeline(paces.timing)
        self.extent = extent
        self.shared = plan.split in ("batch", "spatial")
        self.first = extent.batch == 0 and extent.start == 0
        self.groups = groups
        self.steps: list[Step] = steps_of(extent, plan.group_channels, plan.batch_bands, plan.space_bands, plan.chunk)
        self.widths = [step.tile.width() for step in self.steps]
        self.itemsize = size_of(plan.dtype)
        self.dy_there: list[float] = []
        self.x_there: list[float] = []
        self.masked: list[float] = []
        self.given: list[float] = []
        self.products: list[float] = []
        self.summed: list[float] = []
        self.termed: list[float] = []
        self.combined: list[float] = []
        self.finished: list[float] = []
        self.stored: list[float] = []
        self.product_read: list[float] = []
        self.copied = 0.0
        self.started = 0.0
        self.ready = 0
        self.cleared = 0.0, 0.0
        self.gradient_sums = 0.0
        self.product_sums = 0.0
        self.finished_sums = (0.0, 0.0)
        self.coefficients: dict[int, float] = {}

    def run(self) -> Prediction:
        """The order of ``resident_gradients``."""
        steps, plan = self.steps, self.plan
        self.started = self.start_blocks()
        for at, step in enumerate(steps):
            self.load_ahead()
            while len(self.dy_there) <= at:
                self.finish_chunk()
                self.load_ahead()
            self.make_terms()
            self.start_sums(at)
            self.finish_chunk()
            self.end_sums(at)
            if step.last:
                self.turn(step)
            if step.last or not needs_input_sums(plan):
                self.ready = at + 1
        while plan.need_dx and len(self.stored) < len(steps):
            self.make_terms()
            self.finish_chunk()
        if needs_sums(plan):
            self.store_blocks()
        return self.pipeline.prediction()

    def blocks(self) -> list[tuple[int, int]]:
        """(channels, groups) of all whole groups, and of a smaller last one."""
        size, channels = self.plan.group_channels, self.extent.channels
        last = (channels - 1) % size + 1
        if last == size or self.groups == 1:
            return [(min(size, channels), self.groups)]
        return [(size, self.groups - 1), (last, 1)]

    def start_blocks(self) -> float:
        """The columns of all groups; when phase 1 can use them."""
        lanes, ready = self.plan.lane_bands, 0.0
        for channels, groups in self.blocks():
            columns = Columns(self.pipeline, self.paces, lanes * channels, groups)
            ready = max(ready, columns.start(self.plan.relu == "recompute"))
        return ready

    def store_blocks(self) -> None:
        """dbeta and dgamma, which only one core has to write where both have the same channels."""
        if self.shared and not self.first:
            return
        for channels, groups in self.blocks():
            columns = Columns(self.pipeline, self.paces, channels, groups)
            for needed, ready in zip((self.plan.need_dbeta, self.plan.need_dgamma), self.finished_sums, strict=True):
                if needed:
                    columns.store(ready)

    def transfer(self, at: int, itemsize: int) -> Transfer:
        step = self.steps[at]
        length, batches = step.tile.length, step.tile.batches
        whole = self.plan.shape[1] == 1 and length == self.plan.shape[2]
        return self.paces.transfer(step.unit.lanes(), 1 if whole else batches, length * batches * itemsize)

    def load_ahead(self) -> None:
        plan, slots = self.plan, self.plan.slots
        while len(self.dy_there) < len(self.steps) and (
            len(self.dy_there) < slots or len(self.dy_there) - slots < self.stored_chunks() - 1
        ):
            at = len(self.dy_there)
            elements, ready = self.transfer(at, self.itemsize), self.slot_free(at - slots)
            dy = x = self.pipeline.load(elements, ready)
            if needs_products(plan) or plan.relu == "recompute":
                x = self.pipeline.load(elements, ready)
            if plan.relu == "mask":
                dy = self.pipeline.load(self.transfer(at, 1), ready)
            if plan.residual:
                x = self.pipeline.load(elements, ready)
            self.dy_there.append(dy)
            self.x_there.append(x)

    def slot_free(self, at: int) -> float:
        """When the slot of a chunk can be loaded again."""
        if at < 0:
            return 0.0
        return self.stored[at] if self.plan.need_dx else self.summed[at]

    def stored_chunks(self) -> int:
        return len(self.stored) if self.plan.need_dx else self.ready

    def start_sums(self, at: int) -> None:
        plan, run = self.plan, self.pipeline.run
        width, dy, x = self.widths[at], self.dy_there[at], max(self.x_there[at], self.started)
        free = self.last(self.product_read, 2)
        if plan.relu == "recompute":
            value = run(VECTOR, self.paces.vector("pointed", width), max(x, free))
            add = (
                self.paces.vector("scalar_tensor_tensor", width)
                if plan.residual
                else self.paces.vector("pointed", width)
            )
            value = run(VECTOR, add, value)
            dy = max(dy, run(VECTOR, self.paces.vector("plain", width), value))
        if plan.relu != "none":
            dy = run(VECTOR, self.paces.vector("predicated", width), dy)
        self.masked.append(dy)
        # dx takes the place of dy' only when that is stored as the gradient of the residual.
        self.given.append(self.pipeline.store(self.transfer(at, self.itemsize), dy) if plan.need_dresidual else 0.0)
        if needs_products(plan):
            pace = self.paces.vector("scalar_tensor_tensor", width)
            self.products.append(run(VECTOR, pace, max(dy, x, free)))

    def last(self, times: list[float], back: int) -> float:
        return times[-back] if len(times) >= back else 0.0

    def end_sums(self, at: int) -> None:
        plan, step = self.plan, self.steps[at]
        if not needs_sums(plan):
            self.summed.append(self.masked[at])
            return
        width, run = self.widths[at], self.pipeline.run
        if step.partial == 0 and plan.ragged:
            zero = self.paces.vector("memset", chunks_of_group(plan))
            self.cleared = run(VECTOR, zero), run(VECTOR, zero)
        gradient = max(self.masked[at], self.cleared[0])
        if at % 2 == 0:
            done = run(VECTOR, self.paces.vector("reduce", width), gradient)
        else:
            done = run(SCALAR, self.paces.accumulated(width), gradient)
        self.gradient_sums = max(self.gradient_sums, done)
        if needs_products(plan):
            self.product_sums = run(SCALAR, self.paces.accumulated(width), max(self.products[at], self.cleared[1]))
            self.product_read.append(self.product_sums)
        self.summed.append(max(self.gradient_sums, self.product_sums))

    def turn(self, step: Step) -> None:
        plan = self.plan
        if not needs_sums(plan):
            return
        channels = step.unit.extent.channels
        columns = Columns(self.pipeline, self.paces, plan.lane_bands * channels)
        count = step.partial + 1
        sums = columns.reduced(count, self.gradient_sums)
        products = columns.reduced(count, self.product_sums) if needs_products(plan) else columns.vector(0.0)
        if plan.lane_bands > 1 or self.shared:
            sums = products = self.combine_lanes(columns, channels, max(sums, products))
        dgamma = columns.gamma_gradient(sums, products) if needs_products(plan) else 0.0
        self.finished_sums = sums, dgamma
        if needs_input_sums(plan):
            offset = columns.input_coefficients(dgamma, sums)
            if not plan.folded:
                offset = columns.negated_coefficients(dgamma, offset)
            self.coefficients[step.group] = offset

    def combine_lanes(self, columns: Columns, channels: int, sums: float) -> float:
        run, strided = self.pipeline.run, self.paces.timing.strided
        lanes = columns.lanes
        rows = run(TENSOR, self.paces.transposed(lanes), sums)
        # Bands of one channel lie far apart: Vector reads them at half its rate.
        slow = strided.factor if COLUMN_BYTES * channels >= strided.bytes else 1
        sums = columns.reduced(round(lanes * slow), rows)
        if self.shared:
            sums = columns.vector(self.pipeline.exchange(sums), 2)
        by_lane = run(VECTOR, self.paces.vector("plain", lanes), sums)
        back = run(TENSOR, self.paces.transposed(2), by_lane)
        return columns.vector(back)

    def make_terms(self) -> None:
        if not needs_input_sums(self.plan):
            return
        while len(self.termed) < self.ready and len(self.termed) <= len(self.combined) + 1:
            at = len(self.termed)
            free = self.combined[at - 3] if at >= 3 else 0.0
            if self.plan.folded:
                ready, pace = self.coefficients[self.steps[at].group], self.paces.scalar(self.widths[at], 2)
            else:
                ready, pace = self.started, self.paces.scalar(self.widths[at], 1)
                free = self.finished[at - 3] if at >= 3 else 0.0
            self.termed.append(self.pipeline.run(SCALAR, pace, max(ready, free)))

    def finish_chunk(self) -> None:
        plan = self.plan
        if not plan.need_dx:
            return
        behind = 0 if plan.folded or not plan.training else 1
        if len(self.combined) < self.ready:
            self.make_terms()
            self.combine(len(self.combined))
            if len(self.combined) - behind <= len(self.stored):
                return
        if len(self.stored) < len(self.combined):
            self.store_chunk(len(self.stored))

    def combine(self, at: int) -> None:
        width = self.widths[at]
        if not self.plan.training:
            ready = max(self.masked[at], self.given[at], self.started)
            self.combined.append(self.pipeline.run(SCALAR, self.paces.scalar(width, 1), ready))
            return
        pace = self.paces.vector("scalar_tensor_tensor", width)
        ready = max(self.termed[at], self.coefficients[self.steps[at].group])
        if self.plan.folded:
            ready = max(ready, self.given[at])
        self.combined.append(self.pipeline.run(VECTOR, pace, ready))

    def store_chunk(self, at: int) -> None:
        plan, done = self.plan, self.combined[at]
        if plan.training and not plan.folded:
            width, done = self.widths[at], max(done, self.given[at])
            if at % 2 == 0:
                done = self.pipeline.run(SCALAR, self.paces.scalar(width, 2), done)
            else:
                done = self.pipeline.run(VECTOR, self.paces.vector("pointed", width), done)
        self.finished.append(done)
        self.stored.append(self.pipeline.store(self.transfer(at, self.itemsize), done))
