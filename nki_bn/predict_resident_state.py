# SPDX-License-Identifier: Apache-2.0
"""What one core has done of a plan of ``resident`` or ``reread``, and its columns: those of all its channels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from nki_bn.kernels.backward_tensors import needs_input_sums
from nki_bn.kernels.plan import ResidentPlan, size_of
from nki_bn.kernels.resident_bwd import jobs_of, stages_behind, visits_of
from nki_bn.kernels.resident_geometry import Extent, Step
from nki_bn.kernels.resident_layout import plan_steps
from nki_bn.kernels.resident_stages import DRAINED_GROUPS
from nki_bn.kernels.resident_turn import combines_by_tensor
from nki_bn.kernels.sizing import PARTITIONS
from nki_bn.kernels.turned_columns import are_turned
from nki_bn.pipeline import GPSIMD, TENSOR, VECTOR, Paces, Pipeline, Transfer
from nki_bn.predict_columns import Columns


def chunk_transfer(paces: Paces, shape: tuple[int, int, int], step: Step, itemsize: int) -> Transfer:
    """The DMA of a chunk of a [B, C, S] tensor."""
    elements = step.tile.length * step.tile.batches * step.sets
    return paces.transfer(step.unit.lanes(), runs_of(shape, step), elements * itemsize)


def runs_of(shape: tuple[int, int, int], step: Step) -> int:
    """Pieces of a partition that lie apart in memory."""
    batches = step.tile.batches
    apart = shape[1] > 1 and (batches > 1 or step.unit.extent.channels > 1)
    return 1 if step.tile.length == shape[2] and not apart else batches * step.sets


class CoreState:
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
        self.column_pace = 1
        self.steps: list[Callable[[], None]] = []
        self.started = self.centered = 0.0
        self.gradient_sums = self.product_sums = 0.0
        self.turn: tuple[Step, list[float]] | None = None
        self.turned = self.pace = self.after = 0
        self.coefficients: dict[int, float] = {}
        self.dbeta = self.dgamma = 0.0

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

        share = (2, 1, 1) if needs_input_sums(self.plan) else ()
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
