# SPDX-License-Identifier: Apache-2.0
"""A closed form of the time of a ``resident`` or ``reread`` layout of the forward: too rough to choose by, cheap enough
to rank all layouts."""

from __future__ import annotations

from dataclasses import dataclass

from nki_bn.hardware import load_target, load_timing
from nki_bn.kernels.resident_fwd_plan import ForwardLayout
from nki_bn.kernels.resident_geometry import Extent
from nki_bn.kernels.resident_layout import GroupSize
from nki_bn.kernels.sizing import ceil_div
from nki_bn.pipeline import Paces
from nki_bn.predict import TIMED, timed_paces
from nki_bn.problem import ForwardProblem

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


@dataclass(frozen=True)
class Ring:
    """What the time depends on beside rates: groups of so many chunks, slots, bands; x is loaded again or not."""

    groups: int
    chunks: int
    slots: int
    bands: int
    reread: bool


def estimated_us(rates: ChunkRates, ring: Ring, training: bool) -> float:
    """Modelled time in microseconds.

    Until the statistics of the last group are made, the chunks that are ``formed`` beside them share the engines with
    them: all but those of the last group, and of as many more as a turn lasts. The rest follows after the last turn.
    """
    total = ring.groups * ring.chunks
    if not training:
        moved = rates.load + rates.late + rates.store
        return (LOAD_NS + total * max(moved, rates.last) + rates.last + STORE_NS) / 1000
    lag: int = ceil_div(TURN_STEPS + BAND_STEPS * (ring.bands > 1), rates.pieces)
    formed = max(total - ring.chunks - lag, 0)
    return (statistics_part_ns(rates, ring, lag, formed) + last_part_ns(rates, ring, total - formed)) / 1000


def statistics_part_ns(rates: ChunkRates, ring: Ring, lag: int, formed: int) -> float:
    """Until the statistics of the last group are made; the turn of another one lasts ``lag`` chunks."""
    total = ring.groups * ring.chunks
    stored = rates.store + rates.late
    turns = (ring.groups - 1) * (TURN_VECTOR_NS + bands_ns(ring.bands))
    vector = total * (rates.statistics + CHUNK_NS) + formed * rates.vector + turns
    busiest = max(vector, total * rates.load + formed * stored, formed * rates.scalar)
    waits = 0.0
    if not ring.reread and ring.slots < total:
        # A load waits for a store where the ring is too short for a group and the chunks of a turn.
        late = min(max(ring.chunks + lag + 3 - ring.slots, 0), ring.chunks)
        waits = (ring.groups - 1) * late * (rates.load + stored)
    return LOAD_NS + rates.load + waits + busiest + PIPELINE_SHARE * rates.statistics


def last_part_ns(rates: ChunkRates, ring: Ring, left: int) -> float:
    """The last turn, and the ``left`` chunks that are not formed by then."""
    turn = LAST_TURN_NS + (ring.bands > 1) * (LAST_BANDS_NS + bands_ns(ring.bands))
    each = max(rates.store + rates.late, rates.last)
    return max(turn + ring.chunks * each, left * each) + rates.last + STORE_NS


def bands_ns(bands: int) -> float:
    """What merging the bands of a group takes of Vector."""
    timing = load_timing(TIMED)
    return bands * timing.vector.bn_aggr.cycles / timing.clock.vector


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
    def of(
        cls, problem: ForwardProblem, layout: ForwardLayout, size: GroupSize, extent: Extent, reread: bool
    ) -> ChunkRates:
        """The mean cost of the chunks of a whole group."""
        paces = timed_paces(problem.lnc - 1)
        width = ceil_div(size.set_columns, size.chunks)
        runs = ceil_div(width, max(extent.length // layout.space_bands, 1))
        one = paces.transfer(size.lanes, runs, width * problem.itemsize).shared
        trigger = paces.timing.dma.spacing
        late = (reread and problem.training) + problem.residual
        mask = problem.relu == "mask"
        return cls(
            max(one, trigger),
            late * max(one, trigger),
            max((1 + mask / problem.itemsize) * one, (1 + mask) * trigger),
            statistics_ns(paces, size.columns) * width / size.columns,
            *normalising_ns(paces, problem, width),
            ceil_div(width, load_target(TIMED).bn_stats_columns),
        )


def statistics_ns(paces: Paces, width: int) -> float:
    """Vector ns of bn_stats on a chunk, and of merging its two triples per piece."""
    vector, clock = paces.timing.vector, paces.timing.clock.vector
    pieces: int = ceil_div(width, load_target(TIMED).bn_stats_columns)
    return pieces * (paces.vector("bn_stats", width / pieces).busy + 2 * vector.bn_aggr.cycles / clock)


def normalising_ns(paces: Paces, problem: ForwardProblem, width: int) -> tuple[float, float, float]:
    """ns of phase 2 on a chunk: of Vector and of Scalar beside statistics, and of Vector without any."""
    vector = paces.timing.vector
    pointed = paces.vector("pointed", width).busy
    two_tiles = paces.vector("tensor_tensor", width).busy
    if problem.relu != "none":
        checks = (1 + (problem.relu == "mask")) * paces.vector("plain", width).busy
        shift = two_tiles if problem.residual else pointed
        # Each of these instructions waits for the one before.
        waits = 4 * (vector.pointer.latency - vector.plain.occupancy)
        forming = pointed + shift + checks + paces.vector("predicated", width).busy + waits
        return forming, 0.0, forming
    one_pass = paces.scalar(width).busy
    added = two_tiles if problem.residual else 0.0
    if problem.dtype == "float32":
        return pointed + added, one_pass, pointed + added
    fast = paces.vector("pointed_16bit", width).busy
    # Beside statistics Scalar makes the first pass over every other chunk, and GpSimd over the rest where it can.
    shared = 0.0 if problem.dtype == "bfloat16" else fast / 2
    return shared + added, 1.5 * one_pass, 1.5 * fast + added + vector.pointer.latency
