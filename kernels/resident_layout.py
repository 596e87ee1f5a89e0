# SPDX-License-Identifier: Apache-2.0
"""From a layout to a plan of the ``resident`` strategies: what a group takes, and the buffers."""

from dataclasses import dataclass

import nki.language as nl

from nki_bn.kernels.columns import COLUMN_COUNT
from nki_bn.kernels.plan import Buffer, ResidentPlan, total_bytes
from nki_bn.kernels.resident_geometry import (
    Extent,
    Step,
    count_tiles,
    extent_of_core,
    set_of,
    sets_together,
    steps_in_bands,
    units_of,
)
from nki_bn.kernels.sizing import BANK_COLUMNS, PARTITIONS, ceil_div
from nki_bn.kernels.turned_columns import are_turned, kinds_of

# Columns of PSUM that a partial sum of Tensor may take, by the width of a set: the wider the sets, the less it costs
# Vector to add up wide ones; the wider the partial sums, the fewer instructions.
NARROW_SLICE = 64
SLICE_SHARE = 64


@dataclass(frozen=True)
class ResidentLayout(nl.NKIObject):
    """The free choices of a resident plan; see :class:`ResidentPlan`."""

    split: str
    set_channels: int
    group_sets: int
    batch_bands: int
    space_bands: int
    last_batch_bands: int
    last_space_bands: int
    chunk: int
    slots: int
    tensor_sums: bool
    eighths: int
    term_eighths: int
    short_start: bool
    short_end: bool


def layout_of(plan: ResidentPlan) -> ResidentLayout:
    """The free choices of a plan."""
    return ResidentLayout(
        plan.split,
        plan.set_channels,
        plan.group_sets,
        plan.batch_bands,
        plan.space_bands,
        plan.last_batch_bands,
        plan.last_space_bands,
        plan.chunk,
        plan.slots,
        plan.tensor_sums,
        plan.eighths,
        plan.term_eighths,
        plan.short_start,
        plan.short_end,
    )


def plan_steps(plan: ResidentPlan, extent: Extent) -> list[Step]:
    """All chunks of a core with this extent."""
    widths = (plan.batch_bands, plan.space_bands, plan.chunk)
    last_widths = (plan.last_batch_bands, plan.last_space_bands, plan.chunk)
    return steps_in_bands(
        extent, plan.set_channels, plan.group_sets, widths, last_widths, plan.short_start, plan.short_end
    )


@dataclass(frozen=True)
class SetSize(nl.NKIObject):
    """What sets side by side take on one core: bands in use, and of these the fewest that a chunk takes.

    ``columns``: of a slot, ``chunks``: of one set, ``all_chunks``: of all sets, ``set_columns``: of one set,
    ``widest``: of one of its chunks.
    """

    bands: int
    fewest: int
    columns: int
    chunks: int
    all_chunks: int
    set_columns: int
    widest: int


@dataclass(frozen=True)
class GroupSize(nl.NKIObject):
    """What a group takes on either core, at most; fields as in :class:`SetSize`.

    ``lanes``: partitions, ``last_bands``: those of a last set with fewer channels, ``set_chunks``: chunks of a set,
    ``chunks``: of a group, ``ragged``: some chunks take fewer partitions than their set.
    """

    lanes: int
    bands: int
    last_bands: int
    columns: int
    set_chunks: int
    chunks: int
    set_columns: int
    widest: int
    ragged: bool


def set_size(extent: Extent, sets: int, bands: tuple[int, int], chunk: int) -> SetSize:
    """The :class:`SetSize` of ``sets`` sets with the channels of this extent."""
    units = units_of(extent, bands[0], bands[1])
    most = 0
    fewest = PARTITIONS
    columns = 0
    chunks = 0
    all_chunks = 0
    set_columns = 0
    widest = 0
    for i in range(len(units)):
        in_use = units[i].lanes() // extent.channels
        most = max(most, in_use)
        fewest = min(fewest, in_use)
        tiles, width = count_tiles(units[i], chunk)
        together = sets_together(tiles, width, chunk, sets, extent.channels)
        chunks += tiles
        all_chunks += tiles * ceil_div(sets, together)
        columns = max(columns, together * width)
        widest = max(widest, width)
        set_columns += units[i].batches() * units[i].positions()
    return SetSize(most, fewest, columns, chunks, all_chunks, set_columns, widest)


def group_size(shape: tuple[int, int, int], cores: int, layout: ResidentLayout) -> GroupSize:
    """The :class:`GroupSize` of a layout."""
    sizes: list[SetSize] = []
    bands = 1
    last_bands = 1
    lanes = 0
    for core in range(cores):
        extent = extent_of_core(shape, layout.split, core, cores)
        sets = extent.channels // layout.set_channels
        rest = extent.channels % layout.set_channels
        if sets > 0:
            part = set_of(extent, 0, layout.set_channels)
            main = set_size(part, min(sets, layout.group_sets), (layout.batch_bands, layout.space_bands), layout.chunk)
            sizes.append(main)
            bands = max(bands, main.bands)
            lanes = max(lanes, main.bands * layout.set_channels)
        if rest > 0:
            part = set_of(extent, sets, layout.set_channels)
            last = set_size(part, 1, (layout.last_batch_bands, layout.last_space_bands), layout.chunk)
            sizes.append(last)
            last_bands = max(last_bands, last.bands)
            lanes = max(lanes, last.bands * rest)
    columns = 0
    set_chunks = 0
    chunks = 0
    widest = 0
    ragged = False
    for i in range(len(sizes)):
        columns = max(columns, sizes[i].columns)
        set_chunks = max(set_chunks, sizes[i].chunks)
        chunks = max(chunks, sizes[i].all_chunks)
        widest = max(widest, sizes[i].widest)
        ragged = ragged or sizes[i].fewest < sizes[i].bands
    if layout.short_start:
        # The first chunk of all may be cut in two, and has a set of its own; so may the last one.
        set_chunks += 1
        chunks += 2
    if layout.short_end:
        set_chunks += 1
        chunks += 2
    return GroupSize(lanes, bands, last_bands, columns, set_chunks, chunks, sizes[0].set_columns, widest, ragged)


def slice_of(widest: int, set_columns: int) -> int:
    """Columns of a partial sum of Tensor: of two per set, as many as fit into a bank of PSUM side by side."""
    most = NARROW_SLICE
    while most * SLICE_SHARE < set_columns and 4 * most <= BANK_COLUMNS:
        most = most * 2
    return ceil_div(widest, ceil_div(widest, most))


@dataclass(frozen=True)
class BackwardTask(nl.NKIObject):
    """What is asked of a backward.

    Attributes:
        shape: (batches, channels, positions).
        dtype: of x and dy.
        cores: 1 or 2.
        relu: "none", "mask" or "recompute".
        residual: the residual is read, to recompute the mask.
        training: statistics are those of the batch.
        need: (dx, dgamma, dbeta, dresidual).
        fast: the x-term of dx may be held in the output dtype.
    """

    shape: tuple[int, int, int]
    dtype: str
    cores: int
    relu: str
    residual: bool
    training: bool
    need: tuple[bool, ...]
    fast: bool

    def folded(self) -> bool:
        """Whether the mean of x enters dx through a constant."""
        return self.dtype != nl.float32

    def has_terms(self) -> bool:
        """Whether dx has an x-term."""
        return self.training and self.need[0]


def resident_plan(task: BackwardTask, layout: ResidentLayout, strategy: str = "resident") -> ResidentPlan:
    """The plan of one layout. Whether it fits into SBUF is for the caller to see."""
    owned = extent_of_core(task.shape, layout.split, 0, task.cores).channels
    other = extent_of_core(task.shape, layout.split, task.cores - 1, task.cores).channels
    channels = layout.set_channels
    size = group_size(task.shape, task.cores, layout)
    buffers = resident_buffers(task, layout, size, (channels, owned, other))
    return ResidentPlan(
        strategy,
        task.shape,
        task.dtype,
        task.cores,
        layout.split,
        channels,
        layout.group_sets,
        layout.batch_bands,
        layout.space_bands,
        layout.last_batch_bands,
        layout.last_space_bands,
        size.bands,
        size.last_bands,
        size.ragged,
        layout.chunk,
        layout.slots,
        layout.tensor_sums,
        slice_of(size.widest, size.set_columns),
        layout.eighths,
        layout.term_eighths,
        layout.short_start,
        layout.short_end,
        task.fast and task.folded(),
        task.relu,
        task.residual,
        task.training,
        task.folded(),
        task.need[0],
        task.need[1],
        task.need[2],
        task.need[3],
        tuple(buffers),
        total_bytes(buffers),
    )


def resident_buffers(
    task: BackwardTask, layout: ResidentLayout, size: GroupSize, channels: tuple[int, int, int]
) -> list[Buffer]:
    """What is allocated; ``channels`` of a set, of core 0, of the last core."""
    slots = layout.slots
    columns = size.columns
    in_set, owned, other = channels
    lanes = PARTITIONS
    buffers = [Buffer("dy", slots, columns, task.dtype), Buffer("x", slots, columns, task.dtype)]
    if task.relu != "none":
        buffers.append(Buffer("mask", slots, columns, nl.uint8))
    if task.residual:
        buffers.append(Buffer("residual", slots, columns, task.dtype))
    width = size.widest
    if task.relu == "recompute":
        buffers.append(Buffer("values", 2, width, nl.float32))
    buffers.append(Buffer("products", 3, width, nl.float32))
    term = nl.float32
    if task.fast and task.folded():
        term = task.dtype
    buffers.append(Buffer("terms", 3, width, term))
    if layout.tensor_sums:
        buffers.append(Buffer("ones", 1, lanes, task.dtype))
        if task.dtype != nl.float32:
            buffers.append(Buffer("wide ones", 1, lanes, nl.float32))
        if layout.eighths > 0 and task.folded() and task.has_terms():
            buffers.append(Buffer("identity", 1, lanes, nl.bfloat16))
            buffers.append(Buffer("diagonals", 3, 2 * lanes, nl.bfloat16))
    else:
        buffers.append(Buffer("copies", 1, width, nl.bfloat16))
        buffers.append(Buffer("partials", 2, 2 * layout.group_sets * size.set_chunks, nl.float32))
    buffers.append(Buffer("turn", 3, max(lanes, 2 * layout.group_sets), nl.float32))
    whole = max(owned // in_set, 1)
    if are_turned(whole, in_set):
        buffers.append(Buffer("rows", 1, kinds_of(task.relu) * in_set, nl.float32))
    buffers.append(Buffer("columns", 1, COLUMN_COUNT * whole, nl.float32))
    buffers.append(Buffer("flag", 1, whole, nl.uint8))
    if has_last_block(owned, in_set) or has_last_block(other, in_set):
        buffers.append(Buffer("last columns", 1, COLUMN_COUNT, nl.float32))
        buffers.append(Buffer("last flag", 1, 1, nl.uint8))
    return buffers


def has_last_block(channels: int, set_channels: int) -> bool:
    """Whether some sets are whole and one is not."""
    return channels > set_channels and channels % set_channels > 0
