# SPDX-License-Identifier: Apache-2.0
"""How the ``transposed`` strategy lays data out: rows as they lie in memory, cut into blocks of channels.

An example is a row of C*S contiguous elements. Slots hold rows, batch on partitions: some tiles of up to 128 batches,
some positions of all channels of a group. The Tensor engine turns one tile of a block of channels at a time, so that
channels lie on partitions where per-channel work is done, and turns the results back.
"""

from dataclasses import dataclass

import nki.language as nl

from nki_bn.kernels.columns import COLUMN_COUNT
from nki_bn.kernels.plan import Buffer, TransposedForwardPlan, TransposedPlan, size_of, total_bytes
from nki_bn.kernels.resident_geometry import Extent, extent_of_core
from nki_bn.kernels.resident_layout import has_last_block
from nki_bn.kernels.sizing import GROUP_PIECES, PARTITIONS, STATS_COLUMNS, ceil_div

# PSUM of a partition: 8 banks of this many bytes; a transpose writes into one bank.
BANK_BYTES = 2048
# Work tiles of a kind, and pairs of banks: a job uses its own through three steps.
STAGES = 3


@dataclass(frozen=True)
class RowChunk(nl.NKIObject):
    """What a slot holds of every channel: ``tiles`` tiles of ``rows`` batches, ``length`` positions."""

    batch: int
    tiles: int
    rows: int
    start: int
    length: int

    def columns(self) -> int:
        """Values per channel."""
        return self.tiles * self.rows * self.length


@dataclass(frozen=True)
class TransposedLayout(nl.NKIObject):
    """The free choices of a transposed plan."""

    split: str
    group_blocks: int
    tiles: int
    positions: int
    slots: int
    reload: bool


@dataclass(frozen=True)
class TransposedSize(nl.NKIObject):
    """What a layout takes on either core, at most.

    channels per block; full blocks of a core, blocks per group; columns per slot, columns per block of a slot,
    chunks and pieces of bn_stats per group; whether a core has a smaller last block.
    """

    channels: int
    whole: int
    group_blocks: int
    slot_columns: int
    columns: int
    chunks: int
    pieces: int
    last_block: bool


def row_chunks(extent: Extent, tiles: int, positions: int, dtype: str) -> list[RowChunk]:
    """The chunks of a core's share, of at most ``tiles`` tiles and ``positions`` positions; smaller tiles last."""
    chunks: list[RowChunk] = []
    lanes = tile_rows(positions, dtype)
    whole = extent.batches // lanes
    rest = extent.batches % lanes
    for i in range(ceil_div(extent.length, positions)):
        start = extent.start + i * positions
        length = min(positions, extent.length - i * positions)
        for j in range(ceil_div(whole, tiles)):
            count = min(tiles, whole - j * tiles)
            chunks.append(RowChunk(extent.batch + j * tiles * lanes, count, lanes, start, length))
        if rest > 0:
            chunks.append(RowChunk(extent.batch + whole * lanes, 1, rest, start, length))
    return chunks


def tile_rows(positions: int, dtype: str) -> int:
    """Batches per tile: all partitions, or as many as one bank takes with so many positions."""
    assert positions <= bank_columns(dtype), f"a bank takes at most {bank_columns(dtype)} positions, got {positions}"
    return min(PARTITIONS, bank_columns(dtype) // positions)


def bank_columns(dtype: str) -> int:
    """Elements of one PSUM bank per partition."""
    return BANK_BYTES // size_of(dtype)


def block_size(shape: tuple[int, int, int], split: str, cores: int) -> int:
    """Channels per block."""
    return min(PARTITIONS, extent_of_core(shape, split, 0, cores).channels)


def transposed_size(shape: tuple[int, int, int], dtype: str, cores: int, layout: TransposedLayout) -> TransposedSize:
    """The :class:`TransposedSize` of a layout."""
    extent = extent_of_core(shape, layout.split, 0, cores)
    channels = block_size(shape, layout.split, cores)
    group_blocks = min(layout.group_blocks, ceil_div(extent.channels, channels))
    chunks = 0
    columns = 0
    widest = 0
    pieces = 0
    last_block = False
    for core in range(cores):
        own = extent_of_core(shape, layout.split, core, cores)
        last_block = last_block or has_last_block(own.channels, channels)
        parts = row_chunks(own, layout.tiles, layout.positions, dtype)
        chunks = max(chunks, len(parts))
        pieces = max(pieces, len(piece_widths(parts)))
        for i in range(len(parts)):
            columns = max(columns, parts[i].columns())
            widest = max(widest, parts[i].tiles * parts[i].length)
    slot = widest * min(group_blocks * channels, extent.channels)
    return TransposedSize(
        channels, extent.channels // channels, group_blocks, slot, columns, chunks, pieces, last_block
    )


def piece_widths(chunks: list[RowChunk]) -> list[int]:
    """Columns of each piece that ``bn_stats`` takes of a channel, in order."""
    widths: list[int] = []
    most = STATS_COLUMNS
    for i in range(len(chunks)):
        columns = chunks[i].columns()
        for j in range(ceil_div(columns, most)):
            widths.append(min(most, columns - j * most))
    return widths


def transposed_plan(
    shape: tuple[int, int, int],
    dtype: str,
    relu: str,
    cores: int,
    layout: TransposedLayout,
    residual: bool = False,
    training: bool = True,
    need: tuple[bool, ...] = (True, True, True, False),
) -> TransposedPlan:
    """The backward plan of one layout; arguments as for ``staged_plan``. Whether it fits is for the caller to see."""
    size = transposed_size(shape, dtype, cores, layout)
    buffers = [
        Buffer("dy", layout.slots, size.slot_columns, dtype),
        Buffer("x", layout.slots, size.slot_columns, dtype),
    ]
    if residual:
        buffers.append(Buffer("residual", layout.slots, size.slot_columns, dtype))
    buffers.append(Buffer("wide", STAGES, size.columns, nl.float32))
    buffers.append(Buffer("narrow", STAGES, size.columns, dtype))
    buffers.append(Buffer("partials", 4, size.group_blocks * size.chunks, nl.float32))
    if relu != "none":
        buffers.append(Buffer("mask", layout.slots, size.slot_columns, nl.uint8))
    add_column_buffers(buffers, size)
    return TransposedPlan(
        "transposed",
        shape,
        dtype,
        cores,
        layout.split,
        size.group_blocks,
        layout.tiles,
        layout.positions,
        layout.slots,
        layout.reload,
        relu,
        residual,
        training,
        dtype != nl.float32,
        need[0],
        need[1],
        need[2],
        need[3],
        tuple(buffers),
        total_bytes(buffers),
    )


def transposed_forward_plan(
    shape: tuple[int, int, int],
    dtype: str,
    cores: int,
    layout: TransposedLayout,
    training: bool = True,
    need: tuple[bool, ...] = (True, True),
    relu: bool = False,
    residual: bool = False,
) -> TransposedForwardPlan:
    """The forward plan of one layout; arguments as for ``two_read_plan``. Whether it fits is for the caller to see."""
    size = transposed_size(shape, dtype, cores, layout)
    save_mask = relu and need[1]
    buffers = [Buffer("x", layout.slots, size.slot_columns, dtype)]
    if residual:
        buffers.append(Buffer("residual", layout.slots, size.slot_columns, dtype))
    buffers.append(Buffer("wide", STAGES, size.columns, nl.float32))
    buffers.append(Buffer("narrow", STAGES, size.columns, dtype))
    if save_mask:
        buffers.append(Buffer("gate", STAGES, size.columns, dtype))
    if training:
        buffers.append(Buffer("pieces", 2 * size.group_blocks, 6 * min(size.pieces, GROUP_PIECES), nl.float32))
        if size.pieces > GROUP_PIECES:
            buffers.append(Buffer("groups", 2 * size.group_blocks, 3 * ceil_div(size.pieces, GROUP_PIECES), nl.float32))
        # One triple per core.
        buffers.append(Buffer("parts", 2, 6, nl.float32))
    if relu:
        buffers.append(Buffer("stopped", STAGES, size.columns, nl.uint8))
    if save_mask:
        buffers.append(Buffer("mask", layout.slots, size.slot_columns, nl.uint8))
    add_column_buffers(buffers, size)
    return TransposedForwardPlan(
        "transposed",
        shape,
        dtype,
        cores,
        layout.split,
        size.group_blocks,
        layout.tiles,
        layout.positions,
        layout.slots,
        layout.reload,
        relu,
        residual,
        training,
        need[0],
        save_mask,
        tuple(buffers),
        total_bytes(buffers),
    )


def add_column_buffers(buffers: list[Buffer], size: TransposedSize) -> None:
    """Append the columns of all blocks of equally many channels, and of a smaller last one."""
    buffers.append(Buffer("columns", 1, COLUMN_COUNT * size.whole, nl.float32))
    buffers.append(Buffer("flag", 1, size.whole, nl.uint8))
    if size.last_block:
        buffers.append(Buffer("last columns", 1, COLUMN_COUNT, nl.float32))
        buffers.append(Buffer("last flag", 1, 1, nl.uint8))
