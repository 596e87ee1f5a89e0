# SPDX-License-Identifier: Apache-2.0
"""Choosing the layout of the ``resident`` strategy: candidates, and a closed form of the timing model to rank them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from nki_bn.hardware import Cost, Timing, load_target, load_timing
from nki_bn.kernels.plan import ResidentForwardPlan, ResidentPlan
from nki_bn.kernels.resident_geometry import (
    Extent,
    ResidentLayout,
    extent_of_core,
    group_size,
    resident_plan,
)
from nki_bn.kernels.sizing import CHUNK_COLUMNS, SBUF_SLACK_BYTES, ceil_div
from nki_bn.problem import GRADIENTS, BackwardProblem, Problem

PARTITIONS = 128
# The one target with timing parameters; plans for trn3 are ranked by them too.
TIMED = "trn2"
# Narrower chunks than this are bound by what each instruction and each DMA costs beside its elements.
NARROWEST_CHUNK = 392
# Chunk widths that are tried: these times 12*sqrt(columns of the core), from the timing study of this strategy.
CHUNK_FACTORS = (0.5, 1.0, 2.0)
# Groups whose slots the ring has room for, besides one chunk; with one group in flight the phases do not overlap.
RING_GROUPS = (3, 2, 1)


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, and its predicted time in microseconds."""

    plan: ResidentPlan
    predicted_us: float


def best_resident(problem: BackwardProblem, sbuf_bytes: int | None = None) -> Candidate | None:
    """The layout with the least predicted time, or None if no layout fits into SBUF (or the target is trn1).

    ``sbuf_bytes`` may be used per partition; None stands for all that the target has.
    """
    target = load_target(problem.target)
    # On trn1 a transpose on the Tensor engine is a product with zeros and ones: a NaN would leave its channel.
    if target.generation < 3:
        return None
    budget = (target.sbuf_partition_bytes if sbuf_bytes is None else sbuf_bytes) - SBUF_SLACK_BYTES
    best: Candidate | None = None
    for layout in layouts(problem):
        plan = plan_of(problem, layout)
        if plan.sbuf_bytes <= budget:
            candidate = Candidate(plan, predicted_us(problem, plan))
            if best is None or candidate.predicted_us < best.predicted_us:
                best = candidate
    return best


def plan_of(problem: BackwardProblem, layout: ResidentLayout) -> ResidentPlan:
    """The plan of a layout."""
    shape = problem.batch, problem.channels, problem.spatial
    need = tuple(name in problem.need for name in GRADIENTS)
    plan: ResidentPlan = resident_plan(
        shape, problem.dtype, problem.relu, problem.lnc, layout, problem.residual, problem.training, need
    )
    return plan


def split_of(problem: Problem) -> str:
    """What the cores divide: channels, which need no exchange; with a single one batches or space."""
    if problem.lnc == 1:
        return "none"
    if problem.channels > 1:
        return "channel"
    if problem.batch % 2 == 0 or problem.spatial == 1:
        return "batch" if problem.batch > 1 else "channel"
    return "spatial"


def layouts(problem: BackwardProblem) -> Iterator[ResidentLayout]:
    """The layouts that are tried: channels per group, bands, chunk widths, slots."""
    split = split_of(problem)
    shape = problem.batch, problem.channels, problem.spatial
    extent = extent_of_core(shape, split, 0, problem.lnc)
    columns = extent.channels * extent.batches * extent.length / PARTITIONS
    for channels in group_sizes(extent.channels):
        batch_bands, space_bands = bands_of(extent, PARTITIONS // channels)
        group = group_columns(extent, batch_bands, space_bands)
        for factor in CHUNK_FACTORS:
            chunk = chunk_of(extent, space_bands, group, factor * 12 * math.sqrt(columns))
            layout = ResidentLayout(split, channels, batch_bands, space_bands, chunk, 0)
            chunks = group_size(shape, problem.lnc, layout).chunks
            for groups in RING_GROUPS:
                slots = min(groups * chunks + 1, chunks * ceil_div(extent.channels, channels))
                yield replace(layout, slots=max(slots, 2))


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


def predicted_us(problem: BackwardProblem, plan: ResidentPlan) -> float:
    """Modelled time of a plan in microseconds: the busiest engine per chunk, and the ends of the pipeline.

    The first group is loaded and added up alone, the last one combined and stored alone. Between them both phases share
    the engines, as far as the ring has room for a second group. A turn costs Vector some short instructions, and at the
    end its whole chain of dependent steps.
    """
    rates = ChunkCost.of(problem, plan)
    chunks, groups = chunk_counts(problem, plan)
    first, last = max(rates.load, rates.sums), max(rates.store, rates.combination)
    overlap = min(max(plan.slots - chunks, 0) / chunks, 1.0)
    inner = overlap * max(rates.both, rates.load + rates.store) + (1 - overlap) * (first + last)
    between = (groups - 1) * (chunks * inner + TURN_VECTOR_NS + (1 - overlap) * TURN_CHAIN_NS)
    ends = START_NS + TURN_CHAIN_NS + rates.sums + rates.combination + END_NS
    total: float = chunks * (first + last) + between + ends
    return total / 1000


# From the model's own latencies: the parameters and the first load; a turn (two sums, two transposes, copies, six
# column instructions, each waiting for the one before); the last store.
START_NS = 5600.0
TURN_CHAIN_NS = 4000.0
TURN_VECTOR_NS = 2200.0
END_NS = 1700.0


@dataclass(frozen=True)
class ChunkCost:
    """Nanoseconds that one chunk takes of DMA, and of the busier of Vector and Scalar, in each phase and in both."""

    load: float
    store: float
    sums: float
    combination: float
    both: float

    @classmethod
    def of(cls, problem: BackwardProblem, plan: ResidentPlan) -> ChunkCost:
        """The cost of a full chunk of a plan."""
        width = next(buffer.columns for buffer in plan.buffers if buffer.name == "dy")
        v_sums, s_sums = _sum_engines(problem, width)
        v_end, s_end = _combination_engines(plan, width)
        tensors = 2 + (problem.relu == "mask") / problem.itemsize
        one = tensor_ns(plan, problem.itemsize, width)
        triggers = load_timing(TIMED).dma.spacing
        return cls(
            load=max(tensors * one, 2 * triggers),
            store=max(one, triggers),
            sums=max(v_sums, s_sums),
            combination=max(v_end, s_end),
            both=max(v_sums + v_end, s_sums + s_end, 3 * triggers),
        )


def _sum_engines(problem: BackwardProblem, width: int) -> tuple[float, float]:
    """Vector and Scalar ns of phase 1: the product on Vector, its sum on Scalar, sum dy' by turns, and the mask."""
    timing = load_timing(TIMED)
    vector, scalar = timing.vector, timing.scalar
    product = vector_ns(timing, vector.scalar_tensor_tensor, width)
    reduced = vector_ns(timing, vector.reduce, width)
    added = scalar_ns(timing, scalar.activation, width) + scalar.read_out.occupancy
    masked = 0.0
    if problem.relu != "none":
        masked = vector_ns(timing, vector.tensor_tensor, width)
    if problem.relu == "recompute":
        masked += vector_ns(timing, vector.pointer, width) + 2 * vector_ns(timing, vector.plain, width)
    return product + 0.5 * reduced + masked, 1.5 * added


def _combination_engines(plan: ResidentPlan, width: int) -> tuple[float, float]:
    """Vector and Scalar ns of phase 2."""
    timing = load_timing(TIMED)
    vector, scalar = timing.vector, timing.scalar
    combined = vector_ns(timing, vector.scalar_tensor_tensor, width)
    term = scalar_ns(timing, scalar.activation, width) + scalar.extra_pointer.occupancy
    if plan.folded:
        return combined, term
    affine = width * vector.plain.cycles / timing.clock.vector + vector.pointer.occupancy
    return combined + 0.5 * affine, term + 0.5 * term


def vector_ns(timing: Timing, cost: Cost, width: int) -> float:
    """ns that a Vector instruction on ``width`` columns takes."""
    return width * cost.cycles / timing.clock.vector + cost.occupancy


def scalar_ns(timing: Timing, cost: Cost, width: int) -> float:
    return width * cost.cycles / timing.clock.scalar + cost.occupancy


def tensor_ns(plan: ResidentPlan | ResidentForwardPlan, itemsize: int, width: int) -> float:
    """ns of moving one tensor of one chunk: by the DMA engines' descriptors, or by the core's share of HBM."""
    timing = load_timing(TIMED)
    lanes = plan.lane_bands * plan.group_channels
    extent = extent_of_core(plan.shape, plan.split, 0, plan.cores)
    run = min(width, max(extent.length // plan.space_bands, 1)) * itemsize
    descriptors = width * itemsize / run
    engine: float = ceil_div(lanes, timing.dma.engines) * (
        descriptors * timing.dma.descriptor + width * itemsize / timing.dma.rate
    )
    share = timing.hbm.pair / 2 if plan.cores == 2 else timing.roofline.peak
    shared: float = lanes * width * itemsize / share
    return max(engine, shared)


def chunk_counts(problem: BackwardProblem, plan: ResidentPlan) -> tuple[int, int]:
    """(chunks per group, groups) of the larger core."""
    extent = extent_of_core(plan.shape, plan.split, 0, plan.cores)
    partials = next(buffer.columns for buffer in plan.buffers if buffer.name == "partials")
    return partials, ceil_div(extent.channels, plan.group_channels)
