# SPDX-License-Identifier: Apache-2.0
"""A closed form of the time of a ``resident`` layout: too rough to choose by, cheap enough to rank all layouts."""

from __future__ import annotations

from dataclasses import dataclass

from nki_bn.hardware import load_timing
from nki_bn.kernels.resident_geometry import GroupSize, ResidentLayout, extent_of_core
from nki_bn.kernels.sizing import ceil_div
from nki_bn.pipeline import Paces
from nki_bn.predict import TIMED
from nki_bn.problem import BackwardProblem

# From the model's own latencies: the parameters and the first load; a turn (two sums, two transposes, copies, six
# column instructions, each waiting for the one before); the last store.
START_NS = 5600.0
TURN_CHAIN_NS = 4000.0
TURN_VECTOR_NS = 2200.0
END_NS = 1700.0


def estimated_us(problem: BackwardProblem, layout: ResidentLayout, size: GroupSize) -> float:
    """Modelled time in microseconds: the busiest engine per chunk, and the ends of the pipeline.

    The first group is loaded and added up alone, the last one combined and stored alone. Between them both phases share
    the engines, as far as the ring has room for a second group. A turn costs Vector some short instructions, and at the
    end its whole chain of dependent steps.
    """
    rates = ChunkCost.of(problem, layout, size)
    chunks = size.chunks
    owned = extent_of_core(problem.extents, layout.split, 0, problem.lnc).channels
    groups = ceil_div(owned, layout.group_channels)
    first, last = max(rates.load, rates.sums), max(rates.store, rates.combination)
    overlap = min(max(layout.slots - chunks, 0) / chunks, 1.0)
    inner = overlap * max(rates.both, rates.load + rates.store) + (1 - overlap) * (first + last)
    between = (groups - 1) * (chunks * inner + TURN_VECTOR_NS + (1 - overlap) * TURN_CHAIN_NS)
    ends = START_NS + TURN_CHAIN_NS + rates.sums + rates.combination + END_NS
    total: float = chunks * (first + last) + between + ends
    return total / 1000


@dataclass(frozen=True)
class ChunkCost:
    """Nanoseconds that one chunk takes of DMA, and of the busier of Vector and Scalar, in each phase and in both."""

    load: float
    store: float
    sums: float
    combination: float
    both: float

    @classmethod
    def of(cls, problem: BackwardProblem, layout: ResidentLayout, size: GroupSize) -> ChunkCost:
        """The cost of a full chunk of a layout."""
        paces = Paces(load_timing(TIMED), problem.lnc - 1)
        v_sums, s_sums = _sum_engines(problem, paces, size.columns)
        v_end, s_end = _combination_engines(problem, paces, size.columns)
        tensors = 2 + (problem.relu == "mask") / problem.itemsize
        extent = extent_of_core(problem.extents, layout.split, 0, problem.lnc)
        descriptors = ceil_div(size.columns, max(extent.length // layout.space_bands, 1))
        one = paces.transfer(size.lanes, descriptors, size.columns * problem.itemsize).shared
        triggers = paces.timing.dma.spacing
        return cls(
            load=max(tensors * one, 2 * triggers),
            store=max(one, triggers),
            sums=max(v_sums, s_sums),
            combination=max(v_end, s_end),
            both=max(v_sums + v_end, s_sums + s_end, 3 * triggers),
        )


def _sum_engines(problem: BackwardProblem, paces: Paces, width: int) -> tuple[float, float]:
    """Vector and Scalar ns of phase 1: the product on Vector, its sum on Scalar, sum dy' by turns, and the mask."""
    masked = 0.0
    if problem.relu != "none":
        masked = paces.vector("predicated", width).busy
    if problem.relu == "recompute":
        masked += 2 * paces.vector("pointed", width).busy + paces.vector("plain", width).busy
    product = paces.vector("scalar_tensor_tensor", width).busy
    reduced = paces.vector("reduce", width).busy
    return product + 0.5 * reduced + masked, 1.5 * paces.accumulated(width).busy


def _combination_engines(problem: BackwardProblem, paces: Paces, width: int) -> tuple[float, float]:
    """Vector and Scalar ns of phase 2."""
    combined = paces.vector("scalar_tensor_tensor", width).busy
    if problem.itemsize < 4:
        return combined, paces.scalar(width, 2).busy
    return combined + 0.5 * paces.vector("pointed", width).busy, paces.scalar(width, 1).busy + 0.5 * paces.scalar(
        width, 2
    ).busy
