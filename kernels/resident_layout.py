# SPDX-License-Identifier: Apache-2.0
"""From a layout to a plan of the ``resident`` strategies: what a group takes, and the buffers."""

from dataclasses import dataclass

import nki.language as nl

from nki_bn.kernels.columns import COLUMN_COUNT
from nki_bn.kernels.plan import Buffer, ResidentPlan, total_bytes
from nki_bn.kernels.resident_geometry import Extent, count_tiles, extent_of_core, sets_together, units_of
from nki_bn.kernels.sizing import BANK_COLUMNS, PARTITIONS, ceil_div

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
    chunk: int
    slots: int
    tensor_sums: bool
    eighths: int


def layout_of(plan: ResidentPlan) -> ResidentLayout:
    """The free choices of a plan."""
    return ResidentLayout(
        plan.split,
        plan.set_channels,
        plan.group_sets,
        plan.batch_bands,
        plan.space_bands,
        plan.chunk,
        plan.slots,
        plan.tensor_sums,
        plan.eighths,
    )


@dataclass(frozen=True)
class GroupSize(nl.NKIObject):
    """What a group takes on either core, at most: partitions, columns per slot, chunks per set, chunks.

    ``set_columns``: columns of a set, ``widest``: of one of its chunks; ``ragged``: some chunks take fewer partitions.
    """

    lanes: int
    columns: int
    set_chunks: int
    chunks: int
    set_columns: int
    widest: int
    ragged: bool


def group_size(shape: tuple[int, int, int], cores: int, layout: ResidentLayout) -> GroupSize:
    """The :class:`GroupSize` of a layout."""
    channels = min(layout.set_channels, extent_of_core(shape, layout.split, 0, cores).channels)
    lanes = 0
    fewest = PARTITIONS
    columns = 0
    set_chunks = 0
    chunks = 0
    set_columns = 0
    widest = 0
    for core in range(cores):
        extent = extent_of_core(shape, layout.split, core, cores)
        sets = min(layout.group_sets, ceil_div(extent.channels, channels))
        units = units_of(
            Extent(0, channels, 0, extent.batches, 0, extent.length), layout.batch_bands, layout.space_bands
        )
        own_set_chunks = 0
        own_chunks = 0
        own_columns = 0
        for i in range(len(units)):
            lanes = max(lanes, units[i].lanes())
            fewest = min(fewest, units[i].lanes())
            tiles, width = count_tiles(units[i], layout.chunk)
            together = sets_together(tiles, width, layout.chunk, sets, channels)
            own_set_chunks += tiles + 1
            own_chunks += tiles * ceil_div(sets, together)
            columns = max(columns, together * width)
            widest = max(widest, width)
            own_columns += units[i].batches() * units[i].positions()
        set_chunks = max(set_chunks, own_set_chunks)
        chunks = max(chunks, own_chunks)
        set_columns = max(set_columns, own_columns)
    return GroupSize(lanes, columns, set_chunks, chunks, set_columns, widest, fewest < lanes)


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
    channels = min(layout.set_channels, owned)
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
        size.lanes // channels,
        size.ragged,
        layout.chunk,
        layout.slots,
        layout.tensor_sums,
        slice_of(size.widest, size.set_columns),
        layout.eighths,
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
    buffers.append(Buffer("columns", 1, COLUMN_COUNT * whole, nl.float32))
    buffers.append(Buffer("flag", 1, whole, nl.uint8))
    if has_last_block(owned, in_set) or has_last_block(other, in_set):
        buffers.append(Buffer("last columns", 1, COLUMN_COUNT, nl.float32))
        buffers.append(Buffer("last flag", 1, 1, nl.uint8))
    return buffers


def has_last_block(channels: int, set_channels: int) -> bool:
    """Whether some sets are whole and one is not."""
    return channels > set_channels and channels % set_channels > 0
