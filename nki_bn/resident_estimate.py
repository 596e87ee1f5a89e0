# SPDX-License-Identifier: Apache-2.0
"""A closed form of the time of a ``resident`` layout: too rough to choose by, cheap enough to rank all layouts."""

from __future__ import annotations

from dataclasses import dataclass

from nki_bn.kernels.resident_geometry import extent_of_core
from nki_bn.kernels.resident_layout import BackwardTask, GroupSize, ResidentLayout, slice_of
from nki_bn.kernels.sizing import BANK_COLUMNS, ceil_div
from nki_bn.pipeline import Paces
from nki_bn.predict import timed_paces
from nki_bn.predict_columns import mask_passes

# From the model's own latencies: the first load; a turn (sums, two transposes, and column instructions, each waiting
# for the one before); the last store.
START_NS = 4400.0
TURN_CHAIN_NS = 3500.0
TURN_VECTOR_NS = 1100.0
# What a turn with transposes holds up the other work in a group of a single chunk. It is spread over the chunks of the
# next group: with so many more nothing is held up.
TURN_STALL_NS = 1500.0
SPREAD_CHUNKS = 5
# Groups whose slots a ring has room for, besides one chunk.
RING_GROUPS = 4
# Chunks that are on their way in or out, or between engines, beside those of the two groups under way: with fewer slots
# the phases do not overlap, and then loads and stores wait as well.
PASSING_CHUNKS = 7
SERIAL = 1.5
END_NS = 2800.0
# Instructions of a chunk: DMAs, product, sums, combination; and of a turn.
JOB_INSTRUCTIONS = 8
TURN_INSTRUCTIONS = 16
# Shares of engines are counted in eighths of the chunks.
EIGHTHS = 8


def estimated_us(task: BackwardTask, layout: ResidentLayout, size: GroupSize, strategy: str) -> float:
    """Modelled time in microseconds: the busiest engine per group, and the ends of the pipeline.

    The first group is loaded and added up alone, the last one combined and stored alone. Between them both phases share
    the engines, as far as the ring has room for a second group. A turn costs Vector some short instructions, and at the
    end its whole chain of dependent steps. Phases of ``reread`` come one after the other.
    """
    rates = GroupCost.of(task, layout, size, strategy)
    owned = extent_of_core(task.shape, layout.split, 0, task.cores).channels
    groups = owned / (layout.set_channels * layout.group_sets)
    overlap = min(max(layout.slots - size.chunks, 0) / (size.chunks + PASSING_CHUNKS), 1.0)
    stall = 0.0 if layout.tensor_sums else TURN_STALL_NS * max(1 - (size.chunks - 1) / SPREAD_CHUNKS, 0.0)
    serial = SERIAL * (rates.first + rates.last + TURN_CHAIN_NS)
    inner = overlap * (rates.both + stall) + (1 - overlap) * serial
    if strategy == "reread":
        inner = rates.first + rates.last + TURN_CHAIN_NS
    ends = START_NS + TURN_CHAIN_NS + END_NS
    total: float = rates.first + rates.last + max(groups - 1, 0) * inner + ends
    return total / 1000


def estimated_instructions(task: BackwardTask, layout: ResidentLayout, size: GroupSize) -> float:
    """Instructions of a core: of all jobs, with their share of DMAs, and of turns."""
    owned = extent_of_core(task.shape, layout.split, 0, task.cores).channels
    sets = owned / layout.set_channels
    job: float = JOB_INSTRUCTIONS
    if layout.tensor_sums:
        share = layout.eighths / EIGHTHS
        job += 2 * ceil_div(size.widest, slice_of(size.widest, size.set_columns))
        job += share * (3 * ceil_div(size.widest, BANK_COLUMNS))
    return float(sets * (size.set_columns / size.widest * job + TURN_INSTRUCTIONS / layout.group_sets))


def wanted_slots(chunks: int) -> int:
    """Slots for a group of ``chunks`` chunks beyond which more do not help."""
    return max(RING_GROUPS * chunks + 1, 2 * chunks + PASSING_CHUNKS + 2)


@dataclass(frozen=True)
class GroupCost:
    """ns that a group takes of the busiest engine (or of DMA): in phase 1, in phase 2, and in both together."""

    first: float
    last: float
    both: float

    @classmethod
    def of(cls, task: BackwardTask, layout: ResidentLayout, size: GroupSize, strategy: str) -> GroupCost:
        """The cost of a full group of a layout."""
        paces = timed_paces(task.cores - 1)
        jobs = size.set_columns / size.widest * layout.group_sets
        first = _sum_engines(task, layout, size, paces)
        last = _combination_engines(task, layout, size, paces)
        # Vector, the first in either list, does the turn.
        together = [jobs * (one + other) for one, other in zip(first, last, strict=True)]
        together[0] += TURN_VECTOR_NS
        itemsize = 4 if task.dtype == "float32" else 2
        tensors = 2 + (task.relu == "mask") / itemsize
        extent = extent_of_core(task.shape, layout.split, 0, task.cores)
        descriptors = ceil_div(size.columns, max(extent.length // layout.space_bands, 1))
        one = paces.transfer(size.lanes, descriptors, size.columns * itemsize).shared
        moved = size.set_columns * layout.group_sets / size.columns
        trigger = paces.timing.dma.spacing
        again = 2 if strategy == "reread" else 0
        return cls(
            first=max(jobs * max(first), moved * max(tensors * one, 2 * trigger)),
            last=max(jobs * max(last), (1 + again) * moved * max(one, trigger)),
            both=max(*together, moved * max((tensors + 1) * one, 3 * trigger)),
        )


def _sum_engines(
    task: BackwardTask, layout: ResidentLayout, size: GroupSize, paces: Paces
) -> tuple[float, float, float]:
    """ns of Vector, Scalar and Tensor in phase 1 of a job: product, sums, mask."""
    width = size.widest
    vector = paces.vector("scalar_tensor_tensor", width).busy
    if task.relu != "none":
        vector += paces.vector("predicated", width).busy
    if task.relu == "recompute":
        vector += sum(paces.vector(name, width).busy for name in ("pointed", *mask_passes(task.residual)))
    if layout.tensor_sums:
        some = slice_of(size.widest, size.set_columns)
        wide = task.dtype == "float32"
        products = paces.products(width, some, 1, wide).busy + paces.products(width, some, 1, True).busy
        share = width / size.set_columns
        return vector + share * paces.vector("reduce", 2 * some).busy, 0.0, products
    by_vector = layout.eighths / EIGHTHS
    vector += by_vector * paces.vector("reduce", width).busy
    return vector, (2 - by_vector) * paces.accumulated(width).busy, 0.0


def _combination_engines(
    task: BackwardTask, layout: ResidentLayout, size: GroupSize, paces: Paces
) -> tuple[float, float, float]:
    """ns of Vector, Scalar and Tensor in phase 2 of a job."""
    width = size.widest
    kind = "scalar_tensor_tensor_16bit" if task.fast else "scalar_tensor_tensor"
    vector = paces.vector(kind, width).busy
    if not task.folded():
        half = 0.5 * paces.vector("pointed", width).busy
        return vector + half, paces.scalar(width, 1).busy + 0.5 * paces.scalar(width, 2).busy, 0.0
    scalar = paces.scalar(width, 2).busy
    if not layout.tensor_sums:
        by_vector = layout.term_eighths / EIGHTHS
        term = paces.vector("pointed_16bit" if task.fast else "pointed", width).busy
        return vector + by_vector * term, (1 - by_vector) * scalar, 0.0
    share = layout.eighths / EIGHTHS
    banks = ceil_div(width, BANK_COLUMNS)
    emptied = banks * paces.emptied(width / banks).busy + 2 * paces.scalar(128, 1).busy
    products = paces.products(width, ceil_div(width, banks), 3, False).busy
    return (1 - share) * vector, (1 - share) * scalar + share * emptied, share * products
