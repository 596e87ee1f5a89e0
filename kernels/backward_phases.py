# SPDX-License-Identifier: Apache-2.0
"""The two phases of the backward over the tiles of one channel tile; see batch_norm_bwd.py for the whole."""

from dataclasses import dataclass
from typing import Any

import nki.isa as nisa
import nki.language as nl

from nki_bn.kernels.columns import (
    BETA,
    DGAMMA,
    GAMMA,
    HI,
    MEAN,
    MINUS_HI,
    OFFSET,
    SCALE,
    SLOPE,
    SUMS,
    VAR,
    column,
    column_tile,
    combine_bands,
    exchange_sums,
    gamma_gradient,
    load_column,
    reciprocal_root,
    scale_and_shift,
    split_mean,
)
from nki_bn.kernels.elementwise import passed, pre_activation
from nki_bn.kernels.plan import BackwardPlan, ResidentPlan, TransposedPlan, allocate
from nki_bn.kernels.sizing import CHUNK_COLUMNS
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
)


@dataclass(frozen=True)
class BackwardTensors(nl.NKIObject):
    """Tensors of a launch in HBM: elements as [B, C, S], columns as they came; None where there is none."""

    dy: nl.NkiTensor
    x: nl.NkiTensor
    means: nl.NkiTensor
    variances: nl.NkiTensor
    gamma: nl.NkiTensor
    beta: nl.NkiTensor
    mask: nl.NkiTensor
    residual: nl.NkiTensor
    dx: nl.NkiTensor
    dgamma: nl.NkiTensor
    dbeta: nl.NkiTensor
    dresidual: nl.NkiTensor


@dataclass(frozen=True)
class BackwardWork(nl.NKIObject):
    """What a core works with: its share, the plan, and the SBUF tiles that live through the launch."""

    share: Share
    plan: BackwardPlan
    dy_slots: list[nl.NkiTensor]
    x_slots: list[nl.NkiTensor]
    staged_slots: list[nl.NkiTensor]
    mask_slots: list[nl.NkiTensor]
    residual_slots: list[nl.NkiTensor]
    temporaries: list[nl.NkiTensor]


@dataclass(frozen=True)
class ChannelTile(nl.NKIObject):
    """Up to 128 channels: where they lie, their columns, and their partial sums of dy' and of dy'*(x - hi)."""

    place: Place
    columns: nl.NkiTensor
    partials: list[nl.NkiTensor]
    totals: list[nl.NkiTensor]


def allocate_work(flat: tuple[int, int, int], plan: BackwardPlan) -> BackwardWork:
    """The slots and temporaries of the plan's list."""
    partitions = min(flat[1], nl.tile_size.pmax) * plan.bands
    return BackwardWork(
        share_of_core(flat, plan.split),
        plan,
        allocate(plan.buffers, "dy", partitions),
        allocate(plan.buffers, "x", partitions),
        allocate(plan.buffers, "staged", partitions),
        allocate(plan.buffers, "mask", partitions),
        allocate(plan.buffers, "residual", partitions),
        allocate(plan.buffers, "work", partitions),
    )


def start_channel_tile(tensors: BackwardTensors, work: BackwardWork, index: int, eps: float) -> ChannelTile:
    """Load the columns of one channel tile and derive what phase 1 needs."""
    plan = work.plan
    place = place_of(work.share, plan.bands, index, tensors.means.shape[0])
    columns = column_tile(allocate(plan.buffers, "columns", place.partitions)[0], place.partitions, 1)
    flag = allocate(plan.buffers, "flag", place.partitions)[0][:, 0:1]
    rows = nl.ds(place.channel, place.channels)
    load_column(columns, MEAN, tensors.means[rows], plan.bands)
    load_column(columns, VAR, tensors.variances[rows], plan.bands)
    load_column(columns, GAMMA, tensors.gamma[rows, :], plan.bands)
    if plan.relu == "recompute":
        load_column(columns, BETA, tensors.beta[rows, :], plan.bands)
    reciprocal_root(columns, flag, eps)
    split_mean(columns)
    scale_and_shift(columns, plan.relu == "recompute")
    partials = allocate(plan.buffers, "partials", place.partitions)
    totals = allocate(plan.buffers, "totals", place.partitions)
    return ChannelTile(place, columns, partials, totals)


def needs_input_sums(plan: BackwardPlan | ResidentPlan | TransposedPlan) -> bool:
    """Whether dx needs the sums over the data."""
    return plan.training and plan.need_dx


def needs_products(plan: BackwardPlan | ResidentPlan | TransposedPlan) -> bool:
    """Whether the sum of dy'*(x - hi) is used."""
    return plan.need_dgamma or needs_input_sums(plan)


def needs_sums(plan: BackwardPlan | ResidentPlan | TransposedPlan) -> bool:
    """Whether any of the two sums is used."""
    return plan.need_dbeta or needs_products(plan)


def first_phase(
    tensors: BackwardTensors, work: BackwardWork, group: ChannelTile, tiles: list[Tile], at: int, chunk: int
) -> int:
    """Mask dy of tile ``at``, stage it and add up; returns the number of chunks summed so far."""
    plan = work.plan
    tile = tiles[at]
    dy = slot_tile(work.dy_slots, at, group.place, tile)
    x = slot_tile(work.x_slots, at, group.place, tile)
    mask_gradient(tensors, work, group, tile, at)
    chunks = chunks_of(tile, CHUNK_COLUMNS)
    for i in range(len(chunks)):
        if needs_sums(plan):
            staged = staged_part(work, group, tile, at, chunks[i], chunk)
            last = at == len(tiles) - 1 and i == len(chunks) - 1
            sum_chunk(work, group, part(dy, chunks[i]), part(x, chunks[i]), staged, chunk)
            close_group(group.partials[0], group.totals[0], chunk, last)
            if needs_products(plan):
                close_group(group.partials[1], group.totals[1], chunk, last)
            chunk += 1
        if plan.need_dx and not plan.training:
            dx = part(dy, chunks[i])
            nisa.activation(dst=dx, op=nl.copy, data=dx, scale=column(group.columns, SCALE))
    if plan.need_dx and not plan.training:
        store_tile(tensors.dx, dy, group.place, tile)
    return chunk


def load_gradient(tensors: BackwardTensors, work: BackwardWork, group: ChannelTile, tile: Tile, at: int) -> None:
    """Load dy of a tile, and x, mask and residual where they are used."""
    plan = work.plan
    load_tile(slot_tile(work.dy_slots, at, group.place, tile), tensors.dy, group.place, tile)
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
        pre_activation(value, x, residual, group.columns)
        passed(mask, value)
    nisa.select_reduce(dst=dy, predicate=mask, on_true=dy, on_false=0.0)


def temporary(work: BackwardWork, group: ChannelTile, turn: int, chunk: Chunk) -> nl.NkiTensor:
    """One of two float32 scratch tiles, by turns, as wide as the chunk."""
    return work.temporaries[turn % 2][0 : group.place.partitions, 0 : chunk.length]


def staged_part(work: BackwardWork, group: ChannelTile, tile: Tile, at: int, chunk: Chunk, turn: int) -> nl.NkiTensor:
    """Where Scalar's copy of dy' goes: the staged slot, or scratch if no tile leaves its slot."""
    if len(work.staged_slots) > 0:
        return part(slot_tile(work.staged_slots, at, group.place, tile), chunk)
    return temporary(work, group, turn, chunk)


def sum_chunk(
    work: BackwardWork, group: ChannelTile, dy: nl.NkiTensor, x: nl.NkiTensor, staged: nl.NkiTensor, chunk: int
) -> None:
    """Partial sums of dy' (Scalar, which makes the staged copy) and of dy'*(x - hi) (Vector) over one chunk."""
    nisa.activation(
        dst=staged,
        op=nl.copy,
        data=dy,
        reduce_op=nl.add,
        reduce_res=partial_at(group.partials[0], chunk),
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )
    if needs_products(work.plan):
        product = work.temporaries[(chunk + 1) % 2][0 : group.place.partitions, 0 : x.shape[1]]
        nisa.scalar_tensor_tensor(
            dst=product, data=x, op0=nl.subtract, operand0=column(group.columns, HI), op1=nl.multiply, operand1=dy
        )
        add_columns(partial_at(group.partials[1], chunk), product)


def finish_sums(tensors: BackwardTensors, work: BackwardWork, group: ChannelTile, chunks: int) -> None:
    """The sums over all partials, bands and cores; dbeta and dgamma to HBM."""
    plan = work.plan
    columns = group.columns
    total_of(column(columns, SUMS), group.totals[0], chunks)
    if needs_products(plan):
        total_of(column(columns, SUMS + 1), group.totals[1], chunks)
    else:
        nisa.memset(dst=column(columns, SUMS + 1), value=0.0)
    combine_bands(columns, group.place.channels, plan.bands)
    shared = plan.split == "batch" or plan.split == "spatial"
    if shared:
        exchange_sums(columns)
    if needs_products(plan):
        gamma_gradient(columns)
    if not shared or nl.program_id(0) == 0:
        channels = group.place.channels
        rows = nl.ds(group.place.channel, channels)
        if plan.need_dbeta:
            nisa.dma_copy(dst=tensors.dbeta[rows, :], src=column(columns, SUMS)[0:channels, :])
        if plan.need_dgamma:
            nisa.dma_copy(dst=tensors.dgamma[rows, :], src=column(columns, DGAMMA)[0:channels, :])


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
    tensors: BackwardTensors, work: BackwardWork, group: ChannelTile, tile: Tile, at: int, gradient: nl.NkiTensor
) -> None:
    """dx of a tile of which slot ``at`` holds x, and ``gradient`` dy' (in the slot of dy, or staged)."""
    dx = slot_tile(work.dy_slots, at, group.place, tile)
    x = slot_tile(work.x_slots, at, group.place, tile)
    chunks = chunks_of(tile, CHUNK_COLUMNS)
    for i in range(len(chunks)):
        term = temporary(work, group, i, chunks[i])
        input_term(term, part(x, chunks[i]), group.columns, work.plan.folded)
        nisa.scalar_tensor_tensor(
            dst=part(dx, chunks[i]),
            data=part(gradient, chunks[i]),
            op0=nl.multiply,
            operand0=column(group.columns, SCALE),
            op1=nl.subtract,
            operand1=term,
        )
    store_tile(tensors.dx, dx, group.place, tile)


def input_term(term: nl.NkiTensor, x: nl.NkiTensor, columns: nl.NkiTensor, folded: bool) -> None:
    """term = slope*(x - hi) + offset in float32; ``folded``: slope*x + offset with another offset.

    Folding errs by 2^-17 of slope*|mean|, which is 1/256 (bfloat16) or 1/32 (float16) of half a unit of x itself; for
    float32 it would be 256 units.
    """
    data = x
    if not folded:
        nisa.activation(dst=term, op=nl.copy, data=x, bias=column(columns, MINUS_HI))
        data = term
    nisa.activation(dst=term, op=nl.copy, data=data, scale=column(columns, SLOPE), bias=column(columns, OFFSET))
