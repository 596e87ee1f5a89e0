# SPDX-License-Identifier: Apache-2.0
"""Moving data in the ``transposed`` strategy: rows between HBM and slots, blocks between slots and PSUM.

Rows are (batch, tile, channel, position) in a slot. A turned block is (channel, columns), columns in the order
position, tile, batch. On trn2 a transpose moves bits, so that a NaN stays in its channel and in its example.
"""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_bn.kernels.column_blocks import Block
from nki_bn.kernels.columns import column_tile
from nki_bn.kernels.plan import Buffer, TransposedForwardPlan, TransposedPlan, allocate
from nki_bn.kernels.resident_geometry import Extent, extent_of_core
from nki_bn.kernels.sizing import ceil_div
from nki_bn.kernels.transposed_layout import STAGES, RowChunk, bank_columns, block_size, row_chunks
from nki_bn.kernels.transposed_schedule import Scope, Step, blocks_of

# Banks for results on the way back.
RESULT_BANKS = 2


@dataclass(frozen=True)
class Banks(nl.NKIObject):
    """All of PSUM, a tile per bank: for each job under way x and another tensor, and results on the way back."""

    x: list[nl.NkiTensor]
    other: list[nl.NkiTensor]
    result: list[nl.NkiTensor]


def allocate_banks(dtype: str) -> Banks:
    """The banks, for elements of ``dtype``."""
    return Banks(add_banks(dtype, STAGES), add_banks(dtype, STAGES), add_banks(dtype, RESULT_BANKS))


def add_banks(dtype: str, count: int) -> list[nl.NkiTensor]:
    """``count`` PSUM tiles of a bank each."""
    banks: list[nl.NkiTensor] = []
    for _ in range(count):
        banks.append(nl.ndarray((nl.tile_size.pmax, bank_columns(dtype)), dtype=dtype, buffer=nl.psum))
    return banks


def allocate_blocks(plan: TransposedPlan | TransposedForwardPlan, extent: Extent) -> list[Block]:
    """The channels of a core: its full blocks together, and a smaller one that may be left."""
    size = block_size(plan.shape, plan.split, plan.cores)
    blocks: list[Block] = []
    whole = extent.channels // size
    rest = extent.channels % size
    if whole > 0:
        add_block(blocks, plan.buffers, extent.channel, 0, whole, size)
    if rest > 0:
        add_block(blocks, plan.buffers, extent.channel + whole * size, whole, 1, rest)
    return blocks


def add_block(
    blocks: list[Block], buffers: tuple[Buffer, ...], channel: int, first: int, count: int, channels: int
) -> None:
    """Append ``count`` blocks of ``channels`` channels, from ``channel`` and block number ``first`` on."""
    prefix = ""
    if len(blocks) > 0:
        prefix = "last "
    tile = allocate(buffers, prefix + "columns", nl.tile_size.pmax)[0]
    flag = allocate(buffers, prefix + "flag", nl.tile_size.pmax)[0][0:channels, 0:count]
    blocks.append(Block(first, count, channel, channels, channels, column_tile(tile, channels, count), flag))


@dataclass(frozen=True)
class Ground(nl.NKIObject):
    """Where a core works: its share, the chunks of rows that every group has, channels per block, columns of all."""

    extent: Extent
    chunks: list[RowChunk]
    size: int
    blocks: list[Block]


def ground_of(plan: TransposedPlan | TransposedForwardPlan) -> Ground:
    """The :class:`Ground` of this core."""
    extent = extent_of_core(plan.shape, plan.split, nl.program_id(0), nl.num_programs(0))
    chunks = row_chunks(extent, plan.tiles, plan.positions, plan.dtype)
    return Ground(extent, chunks, block_size(plan.shape, plan.split, plan.cores), allocate_blocks(plan, extent))


@dataclass(frozen=True)
class Rows(nl.NKIObject):
    """What a step is about: a chunk of rows, the channels of its group, and those of its block in the group."""

    chunk: RowChunk
    channel: int
    channels: int
    first: int
    count: int


def rows_of(ground: Ground, scope: Scope, step: Step) -> Rows:
    """The :class:`Rows` of a step."""
    start = step.group * scope.group_blocks * ground.size
    channels = min(blocks_of(scope, step.group) * ground.size, ground.extent.channels - start)
    first = (step.block - step.group * scope.group_blocks) * ground.size
    return Rows(
        ground.chunks[step.chunk], ground.extent.channel + start, channels, first, min(ground.size, channels - first)
    )


def block_columns(ground: Ground, block: int) -> nl.NkiTensor:
    """The columns of block number ``block``, as (channels, columns, 1)."""
    for i in range(len(ground.blocks)):
        found = ground.blocks[i]
        if block >= found.first and block < found.first + found.sets:
            return found.columns[:, :, block - found.first : block - found.first + 1]
    assert False, f"there is no block {block}"


def slot_rows(slots: list[nl.NkiTensor], visit: int, rows: Rows) -> nl.NkiTensor:
    """The part of a slot (of a ring) that a visit fills, as (batch, tile, channel, position)."""
    chunk = rows.chunk
    shape = (chunk.rows, chunk.tiles, rows.channels, chunk.length)
    width = chunk.tiles * rows.channels * chunk.length
    return slots[visit % len(slots)][0 : chunk.rows, 0:width].reshape(shape)


def block_rows(slots: list[nl.NkiTensor], visit: int, rows: Rows) -> nl.NkiTensor:
    """The part of that which belongs to the block of a step."""
    return slot_rows(slots, visit, rows)[:, :, nl.ds(rows.first, rows.count), :]


def rows_view(tensor: nl.NkiTensor, rows: Rows) -> nl.NkiTensor:
    """The same elements in a [B, C, S] tensor in HBM."""
    chunk = rows.chunk
    batches = nl.ds(chunk.batch, chunk.tiles * chunk.rows)
    part = tensor[batches, nl.ds(rows.channel, rows.channels), nl.ds(chunk.start, chunk.length)]
    return part.reshape_dim(0, (chunk.tiles, chunk.rows)).permute((1, 0, 2, 3))


def load_rows(slots: list[nl.NkiTensor], tensor: nl.NkiTensor, visit: int, rows: Rows) -> None:
    """Fill a slot, in one DMA."""
    nisa.dma_copy(dst=slot_rows(slots, visit, rows), src=rows_view(tensor, rows))


def store_rows(tensor: nl.NkiTensor, slots: list[nl.NkiTensor], visit: int, rows: Rows) -> None:
    """Write a slot to where it belongs, in one DMA."""
    nisa.dma_copy(dst=rows_view(tensor, rows), src=slot_rows(slots, visit, rows))


def turned_part(tiles: list[nl.NkiTensor], at: int, rows: Rows) -> nl.NkiTensor:
    """The part of a tile (of a ring) that holds a turned block, as (channel, columns)."""
    return tiles[at % len(tiles)][0 : rows.count, 0 : rows.chunk.columns()]


def ring(tiles: list[nl.NkiTensor], at: int) -> nl.NkiTensor:
    """The tile of a ring that job number ``at`` uses."""
    return tiles[at % len(tiles)]


def turn_in(banks: list[nl.NkiTensor], at: int, slots: list[nl.NkiTensor], visit: int, rows: Rows) -> nl.NkiTensor:
    """A block of rows in its slot to its turned form in a bank (of a ring), which is returned."""
    chunk = rows.chunk
    block = block_rows(slots, visit, rows)
    turned = turned_part(banks, at, rows)
    for position in range(chunk.length):
        for tile in range(chunk.tiles):
            column = (position * chunk.tiles + tile) * chunk.rows
            nisa.nc_transpose(dst=turned[:, nl.ds(column, chunk.rows)], data=block[:, tile, :, position])
    return turned


def turn_out(
    slots: list[nl.NkiTensor],
    visit: int,
    banks: list[nl.NkiTensor],
    at: int,
    turned: nl.NkiTensor,
    rows: Rows,
    by_scalar: bool,
) -> None:
    """A turned block in SBUF back to rows in a slot, by way of banks from number ``at`` on; Vector or Scalar copies."""
    engine = nisa.engine.vector
    if by_scalar:
        engine = nisa.engine.scalar
    chunk = rows.chunk
    together = min(banks[0].shape[1] // (chunk.tiles * rows.count), chunk.length)
    for i in range(ceil_div(chunk.length, together)):
        start = i * together
        length = min(together, chunk.length - start)
        result = ring(banks, at + i)[0 : chunk.rows, 0 : length * chunk.tiles * rows.count]
        for j in range(length * chunk.tiles):
            data = turned[:, nl.ds((start * chunk.tiles + j) * chunk.rows, chunk.rows)]
            nisa.nc_transpose(dst=result[:, nl.ds(j * rows.count, rows.count)], data=data)
        nisa.tensor_copy(
            dst=block_rows(slots, visit, rows)[:, :, :, nl.ds(start, length)].permute((0, 3, 1, 2)),
            src=result.reshape((chunk.rows, length, chunk.tiles, rows.count)),
            engine=engine,
        )
