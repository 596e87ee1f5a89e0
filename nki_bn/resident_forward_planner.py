# SPDX-License-Identifier: Apache-2.0
"""Choosing the layout of the forward strategies ``resident`` and ``reread``: candidates, and a closed form of the
timing model to rank them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nki_bn.hardware import load_target, load_timing
from nki_bn.kernels.plan import ResidentForwardPlan
from nki_bn.kernels.resident_fwd_plan import ForwardLayout, forward_layout, forward_size, resident_forward_plan
from nki_bn.kernels.resident_geometry import Extent, extent_of_core
from nki_bn.kernels.sizing import PARTITIONS, SBUF_SLACK_BYTES, ceil_div
from nki_bn.pipeline import Paces
from nki_bn.predict import TIMED
from nki_bn.problem import ForwardProblem
from nki_bn.resident_planner import bands_of, group_columns, group_sizes, split_of

# Chunk widths that are tried, where a group has so many columns: DMA triggers bind below the first of them.
CHUNKS = (800, 1024, 1568, 2048, 3136, 6272)
# Groups whose slots the ring has room for, besides one chunk.
RING_GROUPS = (8, 4, 3, 2, 1)
# Slots for what phase 2 loads and for masks: enough to load a few chunks ahead of a store.
LATE_SLOTS = 6
# Slots of phase 1 where x is loaded again: enough to load ahead of bn_stats.
REREAD_SLOTS = 6


@dataclass(frozen=True)
class ForwardCandidate:
    """A layout that fits, and its predicted time in microseconds."""

    plan: ResidentForwardPlan
    predicted_us: float


def best_resident_forward(
    problem: ForwardProblem, reread: bool, sbuf_bytes: int | None = None
) -> ForwardCandidate | None:
    """The layout of ``resident`` or ``reread`` with the least predicted time, or None if none fits (or on trn1).

    ``sbuf_bytes`` may be used per partition; None stands for all that the target has.
    """
    target = load_target(problem.target)
    # On trn1 a transpose on the Tensor engine is a product with zeros and ones: a NaN would leave its channel.
    if target.generation < 3:
        return None
    budget = (target.sbuf_partition_bytes if sbuf_bytes is None else sbuf_bytes) - SBUF_SLACK_BYTES
    fitting = (plan for plan in candidates(problem, reread) if plan.sbuf_bytes <= budget)
    ranked = (ForwardCandidate(plan, predicted_us(problem, plan)) for plan in fitting)
    return min(ranked, key=lambda candidate: candidate.predicted_us, default=None)


def candidates(problem: ForwardProblem, reread: bool) -> Iterator[ResidentForwardPlan]:
    """The plans that are tried: channels per group, bands, chunk widths, slots."""
    split = split_of(problem)
    shape = problem.extents
    fused = (True, problem.relu != "none", problem.relu == "mask", problem.residual)
    extent = extent_of_core(shape, split, 0, problem.lnc)
    for channels in group_sizes(extent.channels):
        batch_bands, space_bands = bands_of(extent, PARTITIONS // channels)
        group = group_columns(extent, batch_bands, space_bands)
        for chunk in sorted({chunk_of(extent, space_bands, group, wanted) for wanted in CHUNKS}):
            for slots, late in slot_counts(problem, extent, (split, channels, batch_bands, space_bands, chunk), reread):
                layout = ForwardLayout(split, channels, batch_bands, space_bands, chunk, slots)
                choice = layout, late, reread, problem.training, fused
                yield resident_forward_plan(shape, problem.dtype, problem.lnc, *choice)


def slot_counts(
    problem: ForwardProblem, extent: Extent, choices: tuple[str, int, int, int, int], reread: bool
) -> list[tuple[int, int]]:
    """(slots, late slots) that are tried with these channels, bands and chunks."""
    shape = problem.extents
    chunks = forward_size(shape, problem.lnc, ForwardLayout(*choices, 0)).chunks
    total = chunks * ceil_div(extent.channels, choices[1])
    late = min(LATE_SLOTS, total)
    if reread or not problem.training:
        return [(min(REREAD_SLOTS, total), late)]
    return [(max(min(groups * chunks + 1, total), 2), late) for groups in RING_GROUPS]


def chunk_of(extent: Extent, space_bands: int, group: int, wanted: int) -> int:
    """A chunk width near ``wanted``: whole batches of a band, or equal pieces of one."""
    positions: int = max(extent.length // space_bands, 1)
    width = min(wanted, group)
    if width >= positions:
        together = width // positions
        batches: int = ceil_div(group, positions)
        # Equal chunks: as many batches in each as fill as many chunks.
        equal: int = ceil_div(batches, ceil_div(batches, together)) * positions
        return equal
    pieces: int = ceil_div(positions, ceil_div(positions, width))
    return pieces


# From the model's own latencies: a load from its trigger on, beside the transfer; the last turn, each step of which
# waits for the one before, and what bands add to it; what short instructions of a turn take of Vector; the last store
# beside the transfer.
LOAD_NS = 1700.0
LAST_TURN_NS = 2000.0
LAST_BANDS_NS = 2500.0
TURN_VECTOR_NS = 2000.0
STORE_NS = 2200.0
# What Vector waits for in every chunk.
CHUNK_NS = 200.0
# Steps of a turn, one after each bn_stats of the next group; bands add to them.
TURN_STEPS = 12
BAND_STEPS = 5
# Times of the statistics of a chunk that are lost to going chunk by chunk.
PIPELINE_SHARE = 1.2


def predicted_us(problem: ForwardProblem, plan: ResidentForwardPlan) -> float:
    """Modelled time of a plan in microseconds.

    Until the statistics of the last group are made, the chunks that are ``formed`` beside them share the engines with
    them: all but those of the last group, and of as many more as a turn lasts. The rest follows after the last turn.
    """
    rates = ChunkRates.of(problem, plan)
    extent = extent_of_core(plan.shape, plan.split, 0, plan.cores)
    groups: int = ceil_div(extent.channels, plan.group_channels)
    total = groups * group_chunks(plan)
    if not plan.training:
        moved = rates.load + rates.late + rates.store
        return (LOAD_NS + total * max(moved, rates.last) + rates.last + STORE_NS) / 1000
    lag: int = ceil_div(TURN_STEPS + BAND_STEPS * (plan.lane_bands > 1), rates.pieces)
    formed = max(total - group_chunks(plan) - lag, 0)
    return (statistics_part_ns(rates, plan, groups, lag, formed) + last_part_ns(rates, plan, total - formed)) / 1000


def statistics_part_ns(rates: ChunkRates, plan: ResidentForwardPlan, groups: int, lag: int, formed: int) -> float:
    """Until the statistics of the last group are made; the turn of another one lasts ``lag`` chunks."""
    chunks = group_chunks(plan)
    total = groups * chunks
    stored = rates.store + rates.late
    turns = (groups - 1) * (TURN_VECTOR_NS + bands_ns(plan))
    vector = total * (rates.statistics + CHUNK_NS) + formed * rates.vector + turns
    busiest = max(vector, total * rates.load + formed * stored, formed * rates.scalar)
    waits = 0.0
    if not plan.reread and plan.slots < total:
        # A load waits for a store where the ring is too short for a group and the chunks of a turn.
        waits = (groups - 1) * min(max(chunks + lag + 3 - plan.slots, 0), chunks) * (rates.load + stored)
    time: float = LOAD_NS + rates.load + waits + busiest + PIPELINE_SHARE * rates.statistics
    return time


def last_part_ns(rates: ChunkRates, plan: ResidentForwardPlan, left: int) -> float:
    """The last turn, and the ``left`` chunks that are not formed by then."""
    stored = rates.store + rates.late
    turn = LAST_TURN_NS + (plan.lane_bands > 1) * (LAST_BANDS_NS + bands_ns(plan))
    each = max(stored, rates.last)
    time: float = max(turn + group_chunks(plan) * each, left * each) + rates.last + STORE_NS
    return time


def group_chunks(plan: ResidentForwardPlan) -> int:
    """Chunks of a whole group."""
    chunks: int = forward_size(plan.shape, plan.cores, forward_layout(plan)).chunks
    return chunks


def bands_ns(plan: ResidentForwardPlan) -> float:
    """What merging the bands of a group takes of Vector."""
    timing = load_timing(TIMED)
    time: float = plan.lane_bands * timing.vector.bn_aggr.cycles / timing.clock.vector
    return time


@dataclass(frozen=True)
class ChunkRates:
    """Nanoseconds that one chunk takes, and its pieces for bn_stats.

    ``load``, ``late`` (what phase 2 loads) and ``store`` of DMA; ``statistics`` and, while these are made, ``vector``
    and ``scalar`` of the engines for phase 2; ``last`` of the busier engine for phase 2 alone.
    """

    load: float
    late: float
    store: float
    statistics: float
    vector: float
    scalar: float
    last: float
    pieces: int

    @classmethod
    def of(cls, problem: ForwardProblem, plan: ResidentForwardPlan) -> ChunkRates:
        """The mean cost of the chunks of a whole group."""
        extent = extent_of_core(plan.shape, plan.split, 0, plan.cores)
        width = ceil_div(group_columns(extent, plan.batch_bands, plan.space_bands), group_chunks(plan))
        one = tensor_ns(plan, problem.itemsize, width)
        trigger = load_timing(TIMED).dma.spacing
        late = (plan.reread and plan.training) + plan.residual
        return cls(
            max(one, trigger),
            late * max(one, trigger),
            max((1 + plan.need_mask / problem.itemsize) * one, (1 + plan.need_mask) * trigger),
            statistics_ns(width),
            *normalising_ns(plan, width),
            ceil_div(width, load_target(TIMED).bn_stats_columns),
        )


def statistics_ns(width: int) -> float:
    """Vector ns of bn_stats on a chunk, and of merging its two triples per piece."""
    vector = load_timing(TIMED).vector
    pieces = ceil_div(width, load_target(TIMED).bn_stats_columns)
    clock = load_timing(TIMED).clock.vector
    merging: float = 2 * pieces * vector.bn_aggr.cycles / clock
    each: float = width * vector.bn_stats.cycles / clock + pieces * vector.bn_stats.occupancy
    return each + merging


def normalising_ns(plan: ResidentForwardPlan, width: int) -> tuple[float, float, float]:
    """ns of phase 2 on a chunk: of Vector and of Scalar beside statistics, and of Vector without any."""
    timing = load_timing(TIMED)
    vector, scalar = timing.vector, timing.scalar
    paces = Paces(timing, 0)
    pointed = width * vector.plain.cycles / timing.clock.vector + vector.pointer.occupancy
    two_tiles = paces.vector("tensor_tensor", width).busy
    if plan.relu:
        checks = (1 + plan.need_mask) * paces.vector("plain", width).busy
        shift = two_tiles if plan.residual else pointed
        # Each of these instructions waits for the one before.
        waits = 4 * (vector.pointer.latency - vector.plain.occupancy)
        forming = pointed + shift + checks + paces.vector("predicated", width).busy + waits
        return forming, 0.0, forming
    one_pass = width * scalar.activation.cycles / timing.clock.scalar + scalar.activation.occupancy
    added = two_tiles if plan.residual else 0.0
    if plan.dtype == "float32":
        return pointed + added, one_pass, pointed + added
    fast = width * vector.scalar_16bit.cycles / timing.clock.vector + vector.pointer.occupancy
    last = 1.5 * fast + added + vector.pointer.latency
    # Beside statistics Scalar makes the first pass over every other chunk, and GpSimd over the rest where it can.
    shared = 0.0 if plan.dtype == "bfloat16" else fast / 2
    return shared + added, 1.5 * one_pass, last


def tensor_ns(plan: ResidentForwardPlan, itemsize: int, width: int) -> float:
    """ns of moving one tensor of one chunk."""
    extent = extent_of_core(plan.shape, plan.split, 0, plan.cores)
    descriptors = ceil_div(width, max(extent.length // plan.space_bands, 1))
    paces = Paces(load_timing(TIMED), plan.cores - 1)
    return paces.transfer(plan.lane_bands * plan.group_channels, descriptors, width * itemsize).shared
