# SPDX-License-Identifier: Apache-2.0
"""Batch-norm backward: gradients of input, scale and shift.

Strategy ``staged``: two phases over the data of one channel tile, channels on partitions.

    phase 1, per tile:  load dy, x (mask)      dy' = dy where the ReLU let it through
                        Scalar  staged = bf16(dy'), sum dy'
                        Vector  sum dy'*(x - hi)
                        store staged, except for the last `interleave` tiles, which stay in their slots
    turn:               bands and cores add their sums; dbeta, dgamma, slope and offset per channel
    phase 2, per tile:  the resident tiles first, then load x, staged
                        Scalar  t = slope*(x - hi) + offset
                        Vector  dx = scale*staged - t, in the slot of dy
                        store dx

Both phases use the same rotating slots. With frozen statistics dx = scale*dy' needs no sums, so phase 1 stores it.
"""

from dataclasses import dataclass
from typing import Any

import nki
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
    SHIFT,
    SLOPE,
    SUMS,
    VAR,
    column,
    combine_bands,
    exchange_sums,
    gamma_gradient,
    input_coefficients,
    load_column,
    reciprocal_root,
    scale_and_shift,
    split_mean,
)
from nki_bn.kernels.plan import CHUNK_COLUMNS, PARTIAL_COLUMNS, BackwardPlan, ceil_div, find_buffer, staged_plan
from nki_bn.kernels.tiling import Share, Tile, share_of_core, tile_view, tiles_of


@dataclass(frozen=True)
class Launch(nl.NKIObject):
    """Tensors of a launch as [B, C, S] in HBM, and what is the same for all channel tiles."""

    dy: nl.NkiTensor
    x: nl.NkiTensor
    means: nl.NkiTensor
    variances: nl.NkiTensor
    gamma: nl.NkiTensor
    beta: nl.NkiTensor
    mask: nl.NkiTensor
    dx: nl.NkiTensor
    dgamma: nl.NkiTensor
    dbeta: nl.NkiTensor
    eps: float
    count: int


@dataclass(frozen=True)
class Work(nl.NKIObject):
    """What a core works with: its share, the plan, and the SBUF tiles that live through the launch."""

    share: Share
    plan: BackwardPlan
    dy_slots: list[nl.NkiTensor]
    x_slots: list[nl.NkiTensor]
    staged_slots: list[nl.NkiTensor]
    mask_slots: list[nl.NkiTensor]
    temporaries: list[nl.NkiTensor]


@dataclass(frozen=True)
class ChannelTile(nl.NKIObject):
    """Up to 128 channels: partition = band*channels + channel, and the columns that belong to them."""

    channel: int
    channels: int
    partitions: int
    columns: nl.NkiTensor
    flag: nl.NkiTensor
    partials: list[nl.NkiTensor]
    totals: list[nl.NkiTensor]


@nki.jit
def batch_norm_bwd(
    dy: nl.NkiTensor,
    x_in: nl.NkiTensor,
    means: nl.NkiTensor,
    variances: nl.NkiTensor,
    gamma: nl.NkiTensor,
    beta: nl.NkiTensor,
    eps: float = 1e-5,
    fuse_relu: bool = False,
    relu_mask: nl.NkiTensor | None = None,
    plan: BackwardPlan | None = None,
) -> tuple[Any, Any, Any]:
    """Gradients of batch norm, optionally through a fused ReLU.

    Dimensions: B batches, C channels, D, H, W space; N = B*D*H*W values per channel.

    Args:
        dy: [B, C, D, H, W] in HBM, float32, bfloat16 or float16; gradient of the output.
        x_in: as dy; input of the forward.
        means: [C] float32; statistics of the forward.
        variances: [C] float32, biased.
        gamma: [C, 1] float32.
        beta: [C, 1] float32; read only when the ReLU mask is recomputed.
        eps: the forward's.
        fuse_relu: a ReLU follows the batch norm.
        relu_mask: [B, C, D, H, W] uint8, 1 where the ReLU let through; None recomputes it.
        plan: a BackwardPlan; None sizes the kernel by the largest that fits.

    Returns:
        dx (dtype of dy), dgamma and dbeta [C, 1] float32, in shared HBM; None for what the plan does not need.

    Precision: sums and coefficients in float32; dy' is staged in bfloat16 between the phases.
    """
    check_arguments(dy, x_in, means, variances, gamma, beta)
    relu_mode = relu_mode_of(fuse_relu, relu_mask, dy)
    batch, channels, depth, height, width = dy.shape
    flat = (batch, channels, depth * height * width)
    if plan == None:
        plan = staged_plan(flat, dy.dtype, relu_mode, nl.num_programs(0), nl.tile_size.sbuf_fmax_bytes)
    assert plan.relu == relu_mode, f"plan is made for relu {plan.relu}, the arguments ask for {relu_mode}"
    dx = output(plan.need_dx, dy.shape, dy.dtype, "dx")
    dgamma = output(plan.need_dgamma, (channels, 1), nl.float32, "dgamma")
    dbeta = output(plan.need_dbeta, (channels, 1), nl.float32, "dbeta")
    launch = Launch(
        dy.reshape(flat), x_in.reshape(flat), means, variances, gamma, beta, flattened(relu_mask, flat),
        flattened(dx, flat), dgamma, dbeta, eps, batch * depth * height * width,
    )
    work = allocate_work(flat, plan)
    for i in range(work.share.first, work.share.last):
        channel_tile_gradients(launch, work, i)
    return dx, dgamma, dbeta


def check_arguments(
    dy: nl.NkiTensor,
    x_in: nl.NkiTensor,
    means: nl.NkiTensor,
    variances: nl.NkiTensor,
    gamma: nl.NkiTensor,
    beta: nl.NkiTensor,
) -> None:
    """The kernel's own refusal of arguments that it would misread."""
    assert len(dy.shape) == 5, f"dy must be [B, C, D, H, W], got shape {dy.shape}"
    assert x_in.shape == dy.shape, f"x_in must have the shape of dy {dy.shape}, got {x_in.shape}"
    assert x_in.dtype == dy.dtype, f"x_in must have the dtype of dy {dy.dtype}, got {x_in.dtype}"
    assert dy.dtype == nl.float32 or dy.dtype == nl.bfloat16 or dy.dtype == nl.float16, (
        f"dy must be float32, bfloat16 or float16, got {dy.dtype}"
    )
    channels = dy.shape[1]
    assert means.shape == (channels,), f"means must have shape ({channels},), got {means.shape}"
    assert variances.shape == (channels,), f"variances must have shape ({channels},), got {variances.shape}"
    assert gamma.shape == (channels, 1), f"gamma must have shape ({channels}, 1), got {gamma.shape}"
    assert beta.shape == (channels, 1), f"beta must have shape ({channels}, 1), got {beta.shape}"
    assert means.dtype == nl.float32 and variances.dtype == nl.float32, "means and variances must be float32"
    assert gamma.dtype == nl.float32 and beta.dtype == nl.float32, "gamma and beta must be float32"


def relu_mode_of(fuse_relu: bool, relu_mask: nl.NkiTensor | None, dy: nl.NkiTensor) -> str:
    """ "none", "mask" or "recompute"."""
    if not fuse_relu:
        return "none"
    if relu_mask == None:
        return "recompute"
    assert relu_mask.shape == dy.shape, f"relu_mask must have the shape of dy {dy.shape}, got {relu_mask.shape}"
    assert relu_mask.dtype == nl.uint8, f"relu_mask must be uint8, got {relu_mask.dtype}"
    return "mask"


def output(needed: bool, shape: tuple[int, ...], dtype: str, name: str) -> nl.NkiTensor | None:
    """A result tensor in shared HBM, or None."""
    if not needed:
        return None
    return nl.ndarray(shape, dtype=dtype, buffer=nl.shared_hbm, name=name)


def flattened(tensor: nl.NkiTensor | None, flat: tuple[int, int, int]) -> nl.NkiTensor | None:
    """A tensor as [B, C, S]; None stays None."""
    if tensor == None:
        return None
    return tensor.reshape(flat)


def allocate_work(flat: tuple[int, int, int], plan: BackwardPlan) -> Work:
    """The slots and temporaries of the plan's list."""
    partitions = min(flat[1], nl.tile_size.pmax) * plan.bands
    return Work(
        share_of_core(flat, plan.split),
        plan,
        allocate(plan, "dy", partitions),
        allocate(plan, "x", partitions),
        allocate(plan, "staged", partitions),
        allocate(plan, "mask", partitions),
        allocate(plan, "work", partitions),
    )


def allocate(plan: BackwardPlan, name: str, partitions: int) -> list[nl.NkiTensor]:
    """The SBUF tiles of one buffer of the plan (none if the plan does not have it)."""
    tiles: list[nl.NkiTensor] = []
    buffer = find_buffer(plan, name)
    if buffer == None:
        return tiles
    for _ in range(buffer.count):
        tiles.append(nl.ndarray((partitions, buffer.columns), dtype=buffer.dtype, buffer=nl.sbuf))
    return tiles


def channel_tile_gradients(launch: Launch, work: Work, index: int) -> None:
    """Both phases for the channels of one tile."""
    group = start_channel_tile(launch, work, index)
    tiles = tiles_of(work.share, work.plan.bands, work.plan.f_tile)
    staged_hbm = None
    if work.plan.training and work.plan.need_dx and len(tiles) > work.plan.interleave:
        staged_hbm = nl.ndarray(
            (group.partitions, tiles[-1].column + tiles[-1].width()), dtype=nl.bfloat16, buffer=nl.private_hbm
        )
    with_sums = needs_sums(work.plan)
    chunk = 0
    for i in range(len(tiles)):
        chunk = first_phase(launch, work, group, tiles, i, staged_hbm, chunk)
    if with_sums:
        finish_sums(launch, work, group, chunk)
    if work.plan.training and work.plan.need_dx:
        input_coefficients(group.columns, launch.count, launch.x.dtype != nl.float32)
        resident = min(len(tiles), work.plan.interleave)
        for i in range(len(tiles) - resident, len(tiles)):
            second_phase(launch, work, group, tiles, i, i, staged_hbm)
        for i in range(len(tiles) - resident):
            second_phase(launch, work, group, tiles, i, len(tiles) + i, staged_hbm)


def needs_sums(plan: BackwardPlan) -> bool:
    """Whether the two sums over the data are used."""
    return plan.need_dgamma or plan.need_dbeta or (plan.training and plan.need_dx)


def needs_x(plan: BackwardPlan) -> bool:
    """Whether phase 1 reads x."""
    return plan.need_dgamma or plan.relu == "recompute" or (plan.training and plan.need_dx)


def start_channel_tile(launch: Launch, work: Work, index: int) -> ChannelTile:
    """Load the columns of one channel tile and derive what phase 1 needs."""
    plan = work.plan
    channel = index * nl.tile_size.pmax
    channels = min(nl.tile_size.pmax, launch.means.shape[0] - channel)
    partitions = channels * plan.bands
    columns = allocate(plan, "columns", partitions)[0]
    flag = allocate(plan, "flag", partitions)[0][:, 0:1]
    rows = nl.ds(channel, channels)
    load_column(columns, MEAN, launch.means[rows], plan.bands)
    load_column(columns, VAR, launch.variances[rows], plan.bands)
    load_column(columns, GAMMA, launch.gamma[rows, :], plan.bands)
    if plan.relu == "recompute":
        load_column(columns, BETA, launch.beta[rows, :], plan.bands)
    reciprocal_root(columns, flag, launch.eps)
    split_mean(columns)
    scale_and_shift(columns, plan.relu == "recompute")
    partials = allocate(plan, "partials", partitions)
    totals = allocate(plan, "totals", partitions)
    return ChannelTile(channel, channels, partitions, columns, flag, partials, totals)


def slot_tile(slots: list[nl.NkiTensor], at: int, group: ChannelTile, tile: Tile) -> nl.NkiTensor:
    """The columns of a slot that hold ``tile``."""
    return slots[at % len(slots)][0 : group.partitions, 0 : tile.width()]


def load_tile(dst: nl.NkiTensor, tensor: nl.NkiTensor, work: Work, group: ChannelTile, tile: Tile) -> None:
    """Fill an SBUF tile from a [B, C, S] tensor, all bands in one DMA."""
    view = tile_view(tensor, work.share, work.plan.bands, group.channel, group.channels, tile)
    nisa.dma_copy(dst=dst, src=view)


def store_tile(tensor: nl.NkiTensor, src: nl.NkiTensor, work: Work, group: ChannelTile, tile: Tile) -> None:
    """Write an SBUF tile to a [B, C, S] tensor, all bands in one DMA."""
    view = tile_view(tensor, work.share, work.plan.bands, group.channel, group.channels, tile)
    nisa.dma_copy(dst=view, src=src)


def first_phase(
    launch: Launch,
    work: Work,
    group: ChannelTile,
    tiles: list[Tile],
    at: int,
    staged_hbm: Any,
    chunk: int,
) -> int:
    """Load tile ``at``, mask dy, stage it and add up; returns the number of chunks summed so far."""
    plan = work.plan
    tile = tiles[at]
    dy = slot_tile(work.dy_slots, at, group, tile)
    x = slot_tile(work.x_slots, at, group, tile)
    load_tile(dy, launch.dy, work, group, tile)
    if needs_x(plan):
        load_tile(x, launch.x, work, group, tile)
    if plan.relu != "none":
        mask = slot_tile(work.mask_slots, at, group, tile)
        if plan.relu == "mask":
            load_tile(mask, launch.mask, work, group, tile)
    for i in range(ceil_div(tile.width(), CHUNK_COLUMNS)):
        part = nl.ds(i * CHUNK_COLUMNS, min(CHUNK_COLUMNS, tile.width() - i * CHUNK_COLUMNS))
        if plan.relu == "recompute":
            recompute_mask(work, group, x[:, part], mask[:, part], chunk)
        if plan.relu != "none":
            nisa.select_reduce(dst=dy[:, part], predicate=mask[:, part], on_true=dy[:, part], on_false=0.0)
        if plan.training and plan.need_dx:
            staged = slot_tile(work.staged_slots, at, group, tile)[:, part]
        else:
            staged = temporary(work, group, chunk, dy[:, part])
        if needs_sums(plan):
            sum_chunk(work, group, dy[:, part], x[:, part], staged, chunk)
        if plan.need_dx and not plan.training:
            scale = column(group.columns, SCALE)
            nisa.activation(dst=dy[:, part], op=nl.copy, data=dy[:, part], scale=scale)
        chunk += 1
    finish_first_phase(launch, work, group, tiles, at, staged_hbm)
    return chunk


def finish_first_phase(
    launch: Launch, work: Work, group: ChannelTile, tiles: list[Tile], at: int, staged_hbm: Any,
) -> None:
    """Store what phase 1 leaves of a tile: the staged gradient, or dx itself with frozen statistics."""
    plan = work.plan
    tile = tiles[at]
    if plan.need_dx and not plan.training:
        store_tile(launch.dx, slot_tile(work.dy_slots, at, group, tile), work, group, tile)
    if plan.need_dx and plan.training and at < len(tiles) - plan.interleave:
        staged = slot_tile(work.staged_slots, at, group, tile)
        nisa.dma_copy(dst=staged_hbm[:, nl.ds(tile.column, tile.width())], src=staged)


def temporary(work: Work, group: ChannelTile, turn: int, like: nl.NkiTensor) -> nl.NkiTensor:
    """One of two float32 scratch tiles, by turns, as large as ``like``."""
    return work.temporaries[turn % 2][0 : group.partitions, 0 : like.shape[1]]


def recompute_mask(work: Work, group: ChannelTile, x: nl.NkiTensor, mask: nl.NkiTensor, chunk: int) -> None:
    """mask = y > 0 with y = (x - hi)*scale + shift, as the forward computes it before rounding."""
    columns = group.columns
    y = temporary(work, group, chunk, x)
    nisa.tensor_scalar(
        dst=y, data=x, op0=nl.subtract, operand0=column(columns, HI), op1=nl.multiply,
        operand1=column(columns, SCALE),
    )
    nisa.tensor_scalar(
        dst=mask, data=y, op0=nl.add, operand0=column(columns, SHIFT), op1=nl.greater, operand1=0.0
    )


def sum_chunk(
    work: Work, group: ChannelTile, dy: nl.NkiTensor, x: nl.NkiTensor, staged: nl.NkiTensor, chunk: int,
) -> None:
    """Partial sums of dy' (Scalar, which makes the staged copy) and of dy'*(x - hi) (Vector) over one chunk."""
    at = chunk % PARTIAL_COLUMNS
    nisa.activation(
        dst=staged, op=nl.copy, data=dy, reduce_op=nl.add, reduce_res=column(group.partials[0], at),
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )
    if needs_products(work.plan):
        product = temporary(work, group, chunk + 1, x)
        nisa.scalar_tensor_tensor(
            dst=product, data=x, op0=nl.subtract, operand0=column(group.columns, HI), op1=nl.multiply, operand1=dy
        )
        nisa.tensor_reduce(dst=column(group.partials[1], at), op=nl.add, data=product, axis=1)
    if at == PARTIAL_COLUMNS - 1:
        add_partials(work.plan, group, chunk)


def needs_products(plan: BackwardPlan) -> bool:
    """Whether the sum of dy'*(x - hi) is used."""
    return plan.need_dgamma or (plan.training and plan.need_dx)


def add_partials(plan: BackwardPlan, group: ChannelTile, chunk: int) -> None:
    """Add the partials of the group of chunks that ends with ``chunk``."""
    count = chunk % PARTIAL_COLUMNS + 1
    at = chunk // PARTIAL_COLUMNS
    add_columns(column(group.totals[0], at), group.partials[0][:, 0:count])
    if needs_products(plan):
        add_columns(column(group.totals[1], at), group.partials[1][:, 0:count])


def add_columns(dst: nl.NkiTensor, data: nl.NkiTensor) -> None:
    """dst = sum of the columns of data."""
    nisa.tensor_reduce(dst=dst, op=nl.add, data=data, axis=1)


def finish_sums(launch: Launch, work: Work, group: ChannelTile, chunks: int) -> None:
    """The sums over all partials, bands and cores; dbeta and dgamma to HBM."""
    plan = work.plan
    columns = group.columns
    if chunks % PARTIAL_COLUMNS != 0:
        add_partials(plan, group, chunks - 1)
    count = ceil_div(chunks, PARTIAL_COLUMNS)
    add_columns(column(columns, SUMS), group.totals[0][:, 0:count])
    if needs_products(plan):
        add_columns(column(columns, SUMS + 1), group.totals[1][:, 0:count])
    else:
        nisa.memset(dst=column(columns, SUMS + 1), value=0.0)
    combine_bands(columns, group.channels, plan.bands)
    shared = plan.split == "batch" or plan.split == "spatial"
    if shared:
        exchange_sums(columns)
    if needs_products(plan):
        gamma_gradient(columns)
    if not shared or nl.program_id(0) == 0:
        rows = nl.ds(group.channel, group.channels)
        if plan.need_dbeta:
            nisa.dma_copy(dst=launch.dbeta[rows, :], src=column(columns, SUMS)[0 : group.channels, :])
        if plan.need_dgamma:
            nisa.dma_copy(dst=launch.dgamma[rows, :], src=column(columns, DGAMMA)[0 : group.channels, :])


def second_phase(
    launch: Launch,
    work: Work,
    group: ChannelTile,
    tiles: list[Tile],
    at: int,
    slot: int,
    staged_hbm: Any,
) -> None:
    """dx of tile ``at``, which is in its slot already or is loaded into ``slot``."""
    tile = tiles[at]
    dx = slot_tile(work.dy_slots, slot, group, tile)
    x = slot_tile(work.x_slots, slot, group, tile)
    staged = slot_tile(work.staged_slots, slot, group, tile)
    if slot >= len(tiles):
        load_tile(x, launch.x, work, group, tile)
        nisa.dma_copy(dst=staged, src=staged_hbm[:, nl.ds(tile.column, tile.width())])
    for i in range(ceil_div(tile.width(), CHUNK_COLUMNS)):
        part = nl.ds(i * CHUNK_COLUMNS, min(CHUNK_COLUMNS, tile.width() - i * CHUNK_COLUMNS))
        term = input_term(work, group, x[:, part], i)
        nisa.scalar_tensor_tensor(
            dst=dx[:, part], data=staged[:, part], op0=nl.multiply, operand0=column(group.columns, SCALE),
            op1=nl.subtract, operand1=term,
        )
    store_tile(launch.dx, dx, work, group, tile)


def input_term(work: Work, group: ChannelTile, x: nl.NkiTensor, chunk: int) -> nl.NkiTensor:
    """t = slope*(x - hi) + offset in float32; for 16-bit x folded into slope*x + offset.

    Folding errs by 2^-17 of slope*|mean|, which is 1/256 (bfloat16) or 1/32 (float16) of half a unit of x itself; for
    float32 it would be 256 units.
    """
    columns = group.columns
    term = temporary(work, group, chunk, x)
    if x.dtype == nl.float32:
        nisa.activation(dst=term, op=nl.copy, data=x, bias=column(columns, MINUS_HI))
        x = term
    nisa.activation(
        dst=term, op=nl.copy, data=x, scale=column(columns, SLOPE), bias=column(columns, OFFSET)
    )
    return term
