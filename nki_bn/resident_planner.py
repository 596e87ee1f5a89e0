# SPDX-License-Identifier: Apache-2.0
"""Choosing the layout of the ``resident`` strategy: candidates, a closed form to rank them, predictions of the best."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from nki_bn.hardware import load_target
from nki_bn.kernels.plan import ResidentPlan, total_bytes
from nki_bn.kernels.resident_geometry import (
    Extent,
    GroupSize,
    ResidentLayout,
    extent_of_core,
    group_size,
    resident_buffers,
    resident_plan,
)
from nki_bn.kernels.sizing import CHUNK_COLUMNS, PARTITIONS, SBUF_SLACK_BYTES, ceil_div
from nki_bn.predict import Candidate, predict
from nki_bn.problem import GRADIENTS, BackwardProblem
from nki_bn.resident_estimate import estimated_us

# Narrower chunks than this are bound by what each instruction and each DMA costs beside its elements.
NARROWEST_CHUNK = 392
# Chunk widths that are tried: these times 12*sqrt(columns of the core), from the timing study of this strategy.
CHUNK_FACTORS = (0.5, 1.0, 2.0)
# Groups whose slots the ring has room for, besides one chunk; with one group in flight the phases do not overlap.
RING_GROUPS = 3
# Layouts whose time is predicted: the best by the closed form, then those that are like the best of those but have
# other rings, or other chunks.
PREDICTED = 10
OTHER_RINGS = (2, 4)
OTHER_CHUNKS = (0.7, 1.4)


@dataclass(frozen=True)
class Estimate:
    """A layout that fits, the size of its groups, and its time by the closed form."""

    layout: ResidentLayout
    size: GroupSize
    us: float


def best_resident(problem: BackwardProblem, sbuf_bytes: int | None = None) -> Candidate | None:
    """The candidate with the least predicted time, or None if no layout fits into SBUF (or the target is trn1).

    ``sbuf_bytes`` may be used per partition; None stands for all that the target has.
    """
    found = resident_candidates(problem, sbuf_bytes)
    return found[0] if found else None


def resident_candidates(problem: BackwardProblem, sbuf_bytes: int | None = None) -> list[Candidate]:
    """The best layouts, that with the least predicted time first; arguments as for :func:`best_resident`."""
    budget = _budget(problem, sbuf_bytes)
    ranked = sorted(estimates(problem, budget), key=lambda estimate: estimate.us)
    found = [_candidate(problem, estimate.layout) for estimate in ranked[:PREDICTED]]
    if found:
        best = min(range(len(found)), key=lambda at: found[at].prediction.ns)
        known = {estimate.layout for estimate in ranked[:PREDICTED]}
        others = dict.fromkeys(neighbours(problem, ranked[best], budget))
        found += [_candidate(problem, layout) for layout in others if layout not in known]
    return sorted(found, key=lambda candidate: candidate.prediction.ns)


def likely_resident(problem: BackwardProblem, sbuf_bytes: int) -> ResidentPlan | None:
    """The layout that the closed form ranks first, for those who ask for many problems; None as above."""
    found = list(estimates(problem, _budget(problem, sbuf_bytes)))
    return plan_of(problem, min(found, key=lambda estimate: estimate.us).layout) if found else None


def _budget(problem: BackwardProblem, sbuf_bytes: int | None) -> int:
    whole = load_target(problem.target).sbuf_partition_bytes if sbuf_bytes is None else sbuf_bytes
    return whole - int(SBUF_SLACK_BYTES)


def _candidate(problem: BackwardProblem, layout: ResidentLayout) -> Candidate:
    plan = plan_of(problem, layout)
    return Candidate(plan, predict(plan))


def plan_of(problem: BackwardProblem, layout: ResidentLayout) -> ResidentPlan:
    """The plan of a layout."""
    need = tuple(name in problem.need for name in GRADIENTS)
    plan: ResidentPlan = resident_plan(
        problem.extents, problem.dtype, problem.relu, problem.lnc, layout, problem.residual, problem.training, need
    )
    return plan


def split_of(problem: BackwardProblem) -> str:
    """What the cores divide: channels, which need no exchange; with a single one batches or space."""
    if problem.lnc == 1:
        return "none"
    if problem.channels > 1:
        return "channel"
    if problem.batch % 2 == 0 or problem.spatial == 1:
        return "batch" if problem.batch > 1 else "channel"
    return "spatial"


def estimates(problem: BackwardProblem, budget: int) -> Iterator[Estimate]:
    """All layouts that are tried and fit: channels per group, bands, chunk widths; none for trn1."""
    # On trn1 a transpose on the Tensor engine is a product with zeros and ones: a NaN would leave its channel.
    if load_target(problem.target).generation < 3:
        return
    extent = extent_of_core(problem.extents, split_of(problem), 0, problem.lnc)
    for layout in layouts(problem, extent, budget):
        size = group_size(problem.extents, problem.lnc, layout)
        fitting = with_slots(problem, layout, size, budget, RING_GROUPS)
        if fitting is not None:
            yield Estimate(fitting, size, estimated_us(problem, fitting, size))


def layouts(problem: BackwardProblem, extent: Extent, budget: int) -> Iterator[ResidentLayout]:
    """The layouts that are tried, each once, without slots; those whose groups are too large by far are left out."""
    columns = extent.channels * extent.batches * extent.length / PARTITIONS
    split = split_of(problem)
    for channels in group_sizes(extent.channels):
        batch_bands, space_bands = bands_of(extent, PARTITIONS // channels)
        group = group_columns(extent, batch_bands, space_bands)
        if 2 * group * problem.itemsize > budget:
            continue
        chunks = {chunk_of(extent, space_bands, group, factor * 12 * math.sqrt(columns)) for factor in CHUNK_FACTORS}
        for chunk in sorted(chunks):
            yield ResidentLayout(split, channels, batch_bands, space_bands, chunk, 0)


def with_slots(
    problem: BackwardProblem, layout: ResidentLayout, size: GroupSize, budget: int, groups: int
) -> ResidentLayout | None:
    """The layout with slots for ``groups`` groups and one chunk, or as many as fit; None if one group does not fit."""
    extent = extent_of_core(problem.extents, layout.split, 0, problem.lnc)
    total = size.chunks * ceil_div(extent.channels, layout.group_channels)
    least = max(min(size.chunks + 1, total), 2)
    empty, one = (bytes_of(problem, replace(layout, slots=slots), size) for slots in (0, 1))
    slots = min(max(groups * size.chunks + 1, 2), max(total, 2), (budget - empty) // (one - empty))
    return replace(layout, slots=slots) if slots >= least else None


def bytes_of(problem: BackwardProblem, layout: ResidentLayout, size: GroupSize) -> int:
    """What the plan of a layout takes per partition."""
    owned, other = (
        extent_of_core(problem.extents, layout.split, core, problem.lnc).channels for core in (0, problem.lnc - 1)
    )
    buffers = resident_buffers(
        problem.dtype, problem.relu, problem.residual, layout, size.columns, size.chunks, owned, other
    )
    total: int = total_bytes(buffers)
    return total


def neighbours(problem: BackwardProblem, best: Estimate, budget: int) -> Iterator[ResidentLayout]:
    """The layout with other numbers of slots, and with other chunks."""
    layout = best.layout
    extent = extent_of_core(problem.extents, layout.split, 0, problem.lnc)
    group = group_columns(extent, layout.batch_bands, layout.space_bands)
    chunks = [chunk_of(extent, layout.space_bands, group, factor * best.size.columns) for factor in OTHER_CHUNKS]
    options = [(layout.chunk, groups) for groups in OTHER_RINGS] + [(chunk, RING_GROUPS) for chunk in chunks]
    for chunk, groups in options:
        other = replace(layout, chunk=chunk)
        size = group_size(problem.extents, problem.lnc, other)
        fitting = with_slots(problem, other, size, budget, groups)
        if fitting is not None:
            yield fitting


def group_sizes(channels: int) -> list[int]:
    """Channels per group: powers of two, and what divides the channels of the core evenly."""
    powers = {1 << power for power in range(8) if 1 << power <= channels}
    even = {ceil_div(channels, groups) for groups in range(1, 33)}
    return sorted(size for size in powers | even if size <= PARTITIONS)


def bands_of(extent: Extent, bands: int) -> tuple[int, int]:
    """(batch bands, space bands) with the fewest columns, leftovers included; whole batches where that is equal."""
    options = [
        (batch_bands, min(bands // batch_bands, extent.length))
        for batch_bands in range(min(bands, extent.batches), 0, -1)
    ]
    options += [
        (batch_bands, divisor) for batch_bands, space in options if (divisor := even_part(extent.length, space))
    ]
    return min(options, key=lambda option: group_columns(extent, *option))


def even_part(length: int, most: int) -> int:
    """The largest divisor of ``length`` that is at most ``most``."""
    return max(divisor for divisor in range(1, most + 1) if length % divisor == 0)


def group_columns(extent: Extent, batch_bands: int, space_bands: int) -> int:
    """Columns of a group: those of its main unit and of the leftovers, which run one after the other."""
    batches: int = extent.batches // batch_bands + (extent.batches % batch_bands > 0)
    positions: int = extent.length // space_bands + extent.length % space_bands
    return batches * positions


def chunk_of(extent: Extent, space_bands: int, group: int, wanted: float) -> int:
    """A chunk width near ``wanted``: whole batches of a band, or equal pieces, within the limits."""
    positions: int = max(extent.length // space_bands, 1)
    width = min(max(wanted, NARROWEST_CHUNK), CHUNK_COLUMNS, group)
    if width >= positions:
        return int(width) // positions * positions
    pieces: int = ceil_div(positions, ceil_div(positions, int(width)))
    return pieces
