# SPDX-License-Identifier: Apache-2.0
"""The two phases of the backward over the tiles of one channel tile; see staged_bwd.py for the whole."""

from dataclasses import dataclass
from typing import Any

import nki.isa as nisa
import nki.language as nl

from nki_bn.kernels.backward_tensors import BackwardTensors, needs_input_sums, needs_products, needs_sums
from nki_bn.kernels.column_blocks import Block, block_of, load_block, set_columns, start_block
from nki_bn.kernels.columns import (
    HI,
    LOCAL,
    MINUS_HI,
    OFFSET,
    RECEIVED,
    SCALE,
    SLOPE,
    SUMS,
    column,
    column_tile,
    combine_bands,
    exchange_sums,
    gamma_gradient,
    repeat_in_bands,
    split_mean,
)
from nki_bn.kernels.elementwise import recompute_mask
from nki_bn.kernels.plan import BackwardPlan, allocate
from nki_bn.kernels.replicas import Replicas, add_over_replicas
from nki_bn.kernels.sizing import BLOCK_TILES, CHUNK_COLUMNS
from nki_bn.kernels.sums import add_columns, close_group, partial_at, total_of
from nki_bn.kernels.tiling import (
    Chunk,
    Place,
    Share,
    Tile,
    chunks_of,
    load_tile,
    part,
    place_of,
    share_of_core,
    slot_tile,
    store_tile,
    tiles_of,
)


@dataclass(frozen=True)
class BackwardWork(nl.NKIObject):
    """What a core works with: its share, its tiles, the plan, and what lives in SBUF through the launch."""

    share: Share
    tiles: list[Tile]
    plan: BackwardPlan
    dy_slots: list[nl.NkiTensor]
    x_slots: list[nl.NkiTensor]
    staged_slots: list[nl.NkiTensor]
    mask_slots: list[nl.NkiTensor]
    residual_slots: list[nl.NkiTensor]
    temporaries: list[nl.NkiTensor]
    copies: list[nl.NkiTensor]
    partials: list[nl.NkiTensor]
    totals: list[nl.NkiTensor]
    blocks: list[Block]
    eps: float


@dataclass(frozen=True)
class ChannelTile(nl.NKIObject):
    """Up to 128 channels: where they lie, their columns, and their partial sums of dy' and of dy'*(x - hi)."""

    place: Place
    columns: nl.NkiTensor
    partials: list[nl.NkiTensor]
    totals: list[nl.NkiTensor]


def allocate_work(flat: tuple[int, int, int], plan: BackwardPlan, eps: float) -> BackwardWork:
    """The slots, temporaries and columns of the plan's list."""
    partitions = min(flat[1], nl.tile_size.pmax) * plan.bands
    share = share_of_core(flat, plan.split)
    return BackwardWork(
        share,
        tiles_of(share, plan.bands, plan.f_tile),
        plan,
        allocate(plan.buffers, "dy", partitions),
        allocate(plan.buffers, "x", partitions),
        allocate(plan.buffers, "staged", partitions),
        allocate(plan.buffers, "mask", partitions),
        allocate(plan.buffers, "residual", partitions),
        allocate(plan.buffers, "work", partitions),
        allocate(plan.buffers, "copy", partitions),
        allocate(plan.buffers, "partials", partitions),
        allocate(plan.buffers, "totals", partitions),
        allocate_blocks(share, flat[1], plan),
        eps,
    )


def allocate_blocks(share: Share, channels: int, plan: BackwardPlan) -> list[Block]:
    """The blocks of a core's channel tiles, of which two have their columns in SBUF at a time."""
    partitions = min(channels, nl.tile_size.pmax) * plan.bands
    sets = allocate(plan.buffers, "columns", partitions)
    flag = allocate(plan.buffers, "flag", partitions)[0]
    blocks: list[Block] = []
    first = share.first
    while first < share.last:
        place = place_of(share, plan.bands, first, channels)
        alike = (channels - place.channel) // place.channels
        groups = min(share.last - first, BLOCK_TILES, alike)
        lanes = place.partitions
        columns = column_tile(sets[len(blocks) % len(sets)], lanes, groups)
        blocks.append(Block(first, groups, place.channel, place.channels, lanes, columns, flag[0:lanes, 0:groups]))
        first += groups
    return blocks


def channel_tile(tensors: BackwardTensors, work: BackwardWork, index: int) -> ChannelTile:
    """The place, columns and sums of one channel tile."""
    place = place_of(work.share, work.plan.bands, index, tensors.means.shape[0])
    partials: list[nl.NkiTensor] = []
    totals: list[nl.NkiTensor] = []
    for i in range(2):
        partials.append(work.partials[i][0 : place.partitions, :])
        totals.append(work.totals[i][0 : place.partitions, :])
    return ChannelTile(place, set_columns(block_of(work.blocks, index), index), partials, totals)


def start_columns(tensors: BackwardTensors, work: BackwardWork, index: int) -> None:
    """Make the columns of the block that starts with channel tile ``index``, if one does."""
    for i in range(len(work.blocks)):
        if work.blocks[i].first == index:
            load_block(tensors, work.plan, work.blocks[i])
            split_mean(work.blocks[i].columns)
            start_block(work.plan, work.blocks[i], work.eps)


def first_phase(
    tensors: BackwardTensors, work: BackwardWork, group: ChannelTile, tile: Tile, at: int, chunk: int, stays: bool
) -> int:
    """Mask dy of the tile in slot ``at``, stage it and add up; returns the number of chunks summed so far.

    Of a tile that ``stays`` in its slot, x - hi is kept if phase 2 needs it.
    """
    plan = work.plan
    dy = slot_tile(work.dy_slots, at, group.place, tile)
    x = slot_tile(work.x_slots, at, group.place, tile)
    mask_gradient(tensors, work, group, tile, at)
    chunks = chunks_of(tile, CHUNK_COLUMNS)
    for i in range(len(chunks)):
        if needs_sums(plan):
            staged = staged_part(work, group, tile, at, chunks[i])
            sum_gradient(group, part(dy, chunks[i]), staged, chunk)
            if needs_products(plan):
                sum_product(work, group, part(dy, chunks[i]), part(x, chunks[i]), chunk)
            if stays and not plan.folded:
                center(part(x, chunks[i]), part(x, chunks[i]), group.columns)
            chunk += 1
        if plan.need_dx and not plan.training:
            dx = part(dy, chunks[i])
            nisa.activation(dst=dx, op=nl.copy, data=dx, scale=column(group.columns, SCALE))
    if plan.need_dx and not plan.training:
        store_tile(tensors.dx, dy, group.place, tile)
    return chunk


def load_dy(tensors: BackwardTensors, work: BackwardWork, group: ChannelTile, tile: Tile, at: int) -> None:
    """Load dy of a tile."""
    load_tile(slot_tile(work.dy_slots, at, group.place, tile), tensors.dy, group.place, tile)


def load_beside_dy(tensors: BackwardTensors, work: BackwardWork, group: ChannelTile, tile: Tile, at: int) -> None:
    """Load x, mask and residual of a tile where they are used."""
    plan = work.plan
    if needs_products(plan) or plan.relu == "recompute":
        load_tile(slot_tile(work.x_slots, at, group.place, tile), tensors.x, group.place, tile)
    if plan.relu == "mask":
        load_tile(slot_tile(work.mask_slots, at, group.place, tile), tensors.mask, group.place, tile)
    if plan.residual:
        load_tile(slot_tile(work.residual_slots, at, group.place, tile), tensors.residual, group.place, tile)


def mask_gradient(tensors: BackwardTensors, work: BackwardWork, group: ChannelTile, tile: Tile, at: int) -> None:
    """Make dy' of dy, in its slot; store it if it is asked for."""
    if work.plan.relu != "none":
        chunks = chunks_of(tile, CHUNK_COLUMNS)
        for i in range(len(chunks)):
            mask_chunk(work, group, tile, at, chunks[i], i)
    if work.plan.need_dresidual:
        store_tile(tensors.dresidual, slot_tile(work.dy_slots, at, group.place, tile), group.place, tile)


def mask_chunk(work: BackwardWork, group: ChannelTile, tile: Tile, at: int, chunk: Chunk, turn: int) -> None:
    """dy' = dy where the ReLU let the value through, else 0."""
    dy = part(slot_tile(work.dy_slots, at, group.place, tile), chunk)
    mask = part(slot_tile(work.mask_slots, at, group.place, tile), chunk)
    if work.plan.relu == "recompute":
        x = part(slot_tile(work.x_slots, at, group.place, tile), chunk)
        residual = None
        if work.plan.residual:
            residual = part(slot_tile(work.residual_slots, at, group.place, tile), chunk)
        value = temporary(work, group, turn, chunk)
        recompute_mask(mask, value, x, residual, group.columns)
    nisa.select_reduce(dst=dy, predicate=mask, on_true=dy, on_false=0.0)


def temporary(work: BackwardWork, group: ChannelTile, turn: int, chunk: Chunk) -> nl.NkiTensor:
    """One of two float32 scratch tiles, by turns, as wide as the chunk."""
    return work.temporaries[turn % 2][0 : group.place.partitions, 0 : chunk.length]


def staged_part(work: BackwardWork, group: ChannelTile, tile: Tile, at: int, chunk: Chunk) -> nl.NkiTensor:
    """Where Scalar's copy of dy' goes: the staged slot, or scratch if no tile leaves its slot."""
    if len(work.staged_slots) > 0:
        return part(slot_tile(work.staged_slots, at, group.place, tile), chunk)
    return work.copies[0][0 : group.place.partitions, 0 : chunk.length]


def sum_gradient(group: ChannelTile, dy: nl.NkiTensor, staged: nl.NkiTensor, chunk: int) -> None:
    """Partial sum of dy' over one chunk, by Scalar, which makes the staged copy."""
    nisa.activation(
        dst=staged,
        op=nl.copy,
        data=dy,
        reduce_op=nl.add,
        reduce_res=partial_at(group.partials[0], chunk),
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )
    close_group(group.partials[0], group.totals[0], chunk + 1)


def sum_product(work: BackwardWork, group: ChannelTile, dy: nl.NkiTensor, x: nl.NkiTensor, chunk: int) -> None:
    """Partial sum of dy'*(x - hi) over one chunk, by Vector."""
    product = work.temporaries[chunk % 2][0 : group.place.partitions, 0 : x.shape[1]]
    hi = column(group.columns, HI)
    nisa.scalar_tensor_tensor(dst=product, data=x, op0=nl.subtract, operand0=hi, op1=nl.multiply, operand1=dy)
    add_columns(partial_at(group.partials[1], chunk), product)
    close_group(group.partials[1], group.totals[1], chunk + 1)


def finish_sums(work: BackwardWork, group: ChannelTile, chunks: int, replicas: Replicas | None) -> None:
    """The sums over all partials, bands, cores and replicas, and dgamma."""
    plan = work.plan
    columns = group.columns
    total_of(column(columns, SUMS), group.partials[0], group.totals[0], chunks)
    if needs_products(plan):
        total_of(column(columns, SUMS + 1), group.partials[1], group.totals[1], chunks)
    else:
        nisa.memset(dst=column(columns, SUMS + 1), value=0.0)
    combine_bands(columns, group.place.channels, plan.bands)
    if plan.split == "batch" or plan.split == "spatial":
        exchange_sums(columns)
    if replicas != None and needs_input_sums(plan):
        synchronise_sums(replicas, columns, group.place.channels, plan.bands)
    if needs_products(plan):
        gamma_gradient(columns)


def synchronise_sums(replicas: Replicas, columns: nl.NkiTensor, channels: int, bands: int) -> None:
    """Keep the sums of this replica, and put those of all in their place."""
    sums = columns[:, SUMS : SUMS + 2, 0]
    received = columns[0:channels, RECEIVED : RECEIVED + 2, 0]
    nisa.tensor_copy(dst=columns[:, LOCAL : LOCAL + 2, 0], src=sums)
    add_over_replicas(replicas, sums[0:channels, :], received)
    nisa.tensor_copy(dst=sums[0:channels, :], src=received)
    repeat_in_bands(sums, channels, bands)


def staged_store(work: BackwardWork, group: ChannelTile, tile: Tile, at: int, staged_hbm: Any) -> None:
    """Write the staged gradient of a tile that will not stay in its slot."""
    staged = slot_tile(work.staged_slots, at, group.place, tile)
    nisa.dma_copy(dst=staged_hbm[:, nl.ds(tile.column, tile.width())], src=staged)


def staged_load(
    tensors: BackwardTensors, work: BackwardWork, group: ChannelTile, tile: Tile, at: int, staged_hbm: Any
) -> None:
    """Bring x and the staged gradient of a tile into slot ``at``."""
    load_tile(slot_tile(work.x_slots, at, group.place, tile), tensors.x, group.place, tile)
    staged = slot_tile(work.staged_slots, at, group.place, tile)
    nisa.dma_copy(dst=staged, src=staged_hbm[:, nl.ds(tile.column, tile.width())])


def second_phase(
    tensors: BackwardTensors,
    work: BackwardWork,
    group: ChannelTile,
    tile: Tile,
    at: int,
    gradient: nl.NkiTensor,
    centred: bool,
) -> None:
    """dx of a tile of which slot ``at`` holds x, and ``gradient`` dy' (in the slot of dy, or staged).

    ``centred``: x - hi stands in the place of x.
    """
    dx = slot_tile(work.dy_slots, at, group.place, tile)
    x = slot_tile(work.x_slots, at, group.place, tile)
    chunks = chunks_of(tile, CHUNK_COLUMNS)
    for i in range(len(chunks)):
        term = temporary(work, group, i, chunks[i])
        input_term(term, part(x, chunks[i]), group.columns, work.plan.folded or centred)
        nisa.scalar_tensor_tensor(
            dst=part(dx, chunks[i]),
            data=part(gradient, chunks[i]),
            op0=nl.multiply,
            operand0=column(group.columns, SCALE),
            op1=nl.subtract,
            operand1=term,
        )
    store_tile(tensors.dx, dx, group.place, tile)


def center(dst: nl.NkiTensor, x: nl.NkiTensor, columns: nl.NkiTensor) -> None:
    """dst = x - hi, by Scalar."""
    nisa.activation(dst=dst, op=nl.copy, data=x, bias=column(columns, MINUS_HI))


def input_term(term: nl.NkiTensor, x: nl.NkiTensor, columns: nl.NkiTensor, ready: bool) -> None:
    """term = slope*(x - hi) + offset in float32; ``ready``: slope*x + offset, for x that is centred or folded.

    Folding, with another offset, errs by 2^-17 of slope*|mean|, which is 1/256 (bfloat16) or 1/32 (float16) of half a
    unit of x itself; for float32 it would be 256 units.
    """
    data = x
    if not ready:
        center(term, x, columns)
        data = term
    nisa.activation(dst=term, op=nl.copy, data=data, scale=column(columns, SLOPE), bias=column(columns, OFFSET))
