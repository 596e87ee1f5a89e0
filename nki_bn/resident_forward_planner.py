# SPDX-License-Identifier: Apache-2.0
"""Choosing the layout of the forward strategies ``resident`` and ``reread``: candidates, a closed form to rank them,
predictions of the best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from nki_bn.hardware import Target, load_target
from nki_bn.kernels.plan import ResidentForwardPlan, total_bytes
from nki_bn.kernels.resident_fwd_plan import (
    ForwardLayout,
    forward_buffers,
    forward_layout,
    forward_size,
    resident_forward_plan,
)
from nki_bn.kernels.resident_geometry import Extent, extent_of_core
from nki_bn.kernels.resident_layout import GroupSize
from nki_bn.kernels.sizing import PARTITIONS, SBUF_SLACK_BYTES, ceil_div
from nki_bn.predict import MOST_STEPS, Candidate, predict
from nki_bn.problem import ForwardProblem
from nki_bn.resident_forward_estimate import ChunkRates, Ring, estimated_us
from nki_bn.resident_planner import bands_of, group_columns, group_sizes, split_of

# Chunk widths that are tried, where a group has so many columns: DMA triggers bind below the first of them.
CHUNKS = (800, 1024, 1568, 2048, 2400, 3136, 6272)
# Groups whose slots the ring has room for, besides one chunk.
RING_GROUPS = (8, 4, 3, 2, 1)
# Slots for what phase 2 loads and for masks: enough to load a few chunks ahead of a store.
LATE_SLOTS = 6
# Slots of phase 1 where x is loaded again: enough to load ahead of bn_stats.
REREAD_SLOTS = 6
# Layouts whose time is predicted: the best by the closed form, as many as have so many chunks together.
PREDICTED = 6
PREDICTED_CHUNKS = 400
LEAST_PREDICTED = 2
# Scalar subtracts the mean in one of so many chunks, GpSimd in the others.
SCALAR_TURNS = (2, 3)


@dataclass(frozen=True)
class Estimate:
    """A layout that fits, and its time by the closed form."""

    layout: ForwardLayout
    chunks: int
    us: float


def best_resident_forward(problem: ForwardProblem, reread: bool, sbuf_bytes: int | None = None) -> Candidate | None:
    """The layout of ``resident`` or ``reread`` with the least predicted time, or None if none fits (or on trn1).

    ``sbuf_bytes`` may be used per partition; None stands for all that the target has.
    """
    found = resident_forward_candidates(problem, reread, sbuf_bytes)
    return found[0] if found else None


def resident_forward_candidates(
    problem: ForwardProblem, reread: bool, sbuf_bytes: int | None = None
) -> list[Candidate]:
    """The best layouts, that with the least predicted time first; arguments as for :func:`best_resident_forward`."""
    search = search_of(problem, reread, sbuf_bytes)
    if search is None:
        return []
    found: list[Candidate] = []
    chunks = 0
    for estimate in sorted(search.estimates(), key=lambda estimate: estimate.us)[:PREDICTED]:
        steps = sum(candidate.prediction.steps for candidate in found)
        if len(found) < LEAST_PREDICTED or (chunks < PREDICTED_CHUNKS and steps < MOST_STEPS // 2):
            layouts = search.shares(estimate.layout)
            found += [search.candidate(layout) for layout in layouts]
            chunks += len(layouts) * estimate.chunks
    if found and problem.training:
        found += search.short(min(found, key=lambda candidate: candidate.prediction.ns))
    return sorted(found, key=lambda candidate: candidate.prediction.ns)


def likely_resident_forward(problem: ForwardProblem, reread: bool, sbuf_bytes: int) -> ResidentForwardPlan | None:
    """The layout that is the best by the closed form alone."""
    search = search_of(problem, reread, sbuf_bytes)
    best = None if search is None else min(search.estimates(), key=lambda estimate: estimate.us, default=None)
    return None if search is None or best is None else search.plan(best.layout)


def search_of(problem: ForwardProblem, reread: bool, sbuf_bytes: int | None) -> Search | None:
    """The search of a problem; None on trn1."""
    target = load_target(problem.target)
    # On trn1 a transpose on the Tensor engine is a product with zeros and ones: a NaN would leave its channel.
    return Search(problem, reread, _budget(target, sbuf_bytes)) if target.generation >= 3 else None


def _budget(target: Target, sbuf_bytes: int | None) -> int:
    whole = target.sbuf_partition_bytes if sbuf_bytes is None else sbuf_bytes
    return whole - int(SBUF_SLACK_BYTES)


def short_started(problem: ForwardProblem, plan: ResidentForwardPlan) -> ResidentForwardPlan:
    """A plan of the problem with a short start in place of a whole first chunk, whether it fits into SBUF or not."""
    return Search(problem, plan.reread, _budget(load_target(problem.target), None)).shortened(plan)


class Search:
    """The layouts that are tried for a problem within a budget of SBUF."""

    def __init__(self, problem: ForwardProblem, reread: bool, budget: int) -> None:
        self.problem, self.reread, self.budget = problem, reread, budget
        self.shape = problem.extents
        self.split = split_of(problem)
        self.extent = extent_of_core(self.shape, self.split, 0, problem.lnc)
        self.other = extent_of_core(self.shape, self.split, problem.lnc - 1, problem.lnc)
        self.fused = (True, problem.relu != "none", problem.relu == "mask", problem.residual)

    def candidate(self, layout: ForwardLayout) -> Candidate:
        """The plan of a layout with its prediction."""
        plan = self.plan(layout)
        return Candidate(plan, predict(plan))

    def shares(self, layout: ForwardLayout) -> list[ForwardLayout]:
        """The layout with the shares of Scalar and GpSimd that are tried, where both subtract the mean."""
        if self.problem.dtype != "bfloat16" or self.problem.relu != "none" or not self.problem.training:
            return [layout]
        return [replace(layout, scalar_turns=turns) for turns in SCALAR_TURNS]

    def short(self, best: Candidate) -> list[Candidate]:
        """The best plan with a short start, which has a chunk more, if that fits."""
        assert isinstance(best.plan, ResidentForwardPlan), "the search has forward plans only"
        plan = self.shortened(best.plan)
        return [Candidate(plan, predict(plan))] if plan.sbuf_bytes <= self.budget else []

    def shortened(self, plan: ResidentForwardPlan) -> ResidentForwardPlan:
        """The plan with a short start, which takes a slot more."""
        layout = forward_layout(plan)
        return self.plan(replace(layout, slots=layout.slots + 1, short_start=True))

    def plan(self, layout: ForwardLayout) -> ResidentForwardPlan:
        """The plan of a layout."""
        size = forward_size(self.shape, self.problem.lnc, layout)
        choice = layout, self._late_slots(layout, size), self.reread, self.problem.training, self.fused
        plan: ResidentForwardPlan = resident_forward_plan(self.shape, self.problem.dtype, self.problem.lnc, *choice)
        return plan

    def estimates(self) -> Iterator[Estimate]:
        """All layouts that are tried and fit: channels per group, bands, chunk widths, slots."""
        for channels in group_sizes(self.extent.channels):
            bands = bands_of(self.extent, PARTITIONS // channels)
            group = group_columns(self.extent, *bands)
            if self.reread or not self.problem.training or group * self.problem.itemsize <= self.budget:
                for chunk in self._chunks(bands[1], group):
                    yield from self._rings(ForwardLayout(self.split, channels, *bands, chunk, 0))

    def _chunks(self, space_bands: int, group: int) -> list[int]:
        """Chunks of equal widths, and of as many batches as fit."""
        return sorted(
            {chunk_of(self.extent, space_bands, group, wanted, equal) for wanted in CHUNKS for equal in (True, False)}
        )

    def _rings(self, layout: ForwardLayout) -> Iterator[Estimate]:
        """A layout with the best number of slots that fits, if any does."""
        problem = self.problem
        size = forward_size(self.shape, problem.lnc, layout)
        groups = ceil_div(self.extent.channels, layout.group_channels)
        rates = ChunkRates.of(problem, layout, size, self.extent, self.reread)
        empty, one = (self._bytes(replace(layout, slots=slots), size) for slots in (0, 1))
        fitting = (self.budget - empty) // (one - empty) if one > empty else 0
        found = []
        for slots in self._slot_counts(size.chunks, groups, fitting):
            ring = Ring(groups, size.chunks, slots, size.bands, self.reread)
            us = estimated_us(rates, ring, problem.training)
            found.append(Estimate(replace(layout, slots=slots), groups * size.chunks, us))
        if found:
            yield min(found, key=lambda estimate: (estimate.us, -estimate.layout.slots))

    def _slot_counts(self, chunks: int, groups: int, fitting: int) -> list[int]:
        total = chunks * groups
        if self.reread or not self.problem.training:
            counts = {min(REREAD_SLOTS, total)}
        else:
            counts = {max(min(many * chunks + 1, total), 2) for many in RING_GROUPS}
        return sorted(slots for slots in counts if slots <= fitting)

    def _late_slots(self, layout: ForwardLayout, size: GroupSize) -> int:
        total: int = size.chunks * ceil_div(self.extent.channels, layout.group_channels)
        return min(LATE_SLOTS, total)

    def _bytes(self, layout: ForwardLayout, size: GroupSize) -> int:
        owned = self.extent.channels, self.other.channels
        late = self._late_slots(layout, size)
        total: int = total_bytes(
            forward_buffers(
                self.problem.dtype, layout, late, size, self.reread, self.problem.training, self.fused, owned
            )
        )
        return total


def chunk_of(extent: Extent, space_bands: int, group: int, wanted: int, equal: bool) -> int:
    """A chunk width near ``wanted``: whole batches of a band, ``equal`` numbers of them or not; or pieces of one."""
    positions: int = max(extent.length // space_bands, 1)
    width = min(wanted, group)
    if width >= positions:
        together = width // positions
        batches: int = ceil_div(group, positions)
        count: int = ceil_div(batches, ceil_div(batches, together)) if equal else together
        return count * positions
    pieces: int = ceil_div(positions, ceil_div(positions, width))
    return pieces
