# SPDX-License-Identifier: Apache-2.0
"""Batch-norm backward: gradients of input, scale, shift and residual.

Strategy ``staged``: two phases over the data of one channel tile, channels on partitions.

    phase 1, per tile:  load dy, x (mask)      dy' = dy where the ReLU let it through
                        Scalar  staged = bf16(dy'), sum dy'
                        Vector  sum dy'*(x - hi)
                        store staged, except for the last `interleave` tiles, which stay in their slots
    turn:               bands and cores add their sums; dbeta, dgamma, slope and offset per channel
    phase 2, per tile:  the resident tiles first, with dy' as it is; then load x, staged
                        Scalar  t = slope*(x - hi) + offset
                        Vector  dx = scale*dy' - t, in the slot of dy
                        store dx

Both phases use the same rotating slots. With frozen statistics dx = scale*dy' needs no sums, so phase 1 stores it.
"""

from typing import Any

import nki
import nki.language as nl

from nki_bn.kernels.backward_phases import (
    BackwardTensors,
    BackwardWork,
    ChannelTile,
    allocate_work,
    finish_sums,
    first_phase,
    load_gradient,
    needs_input_sums,
    needs_sums,
    second_phase,
    staged_load,
    staged_store,
    start_channel_tile,
)
from nki_bn.kernels.columns import input_coefficients
from nki_bn.kernels.plan import BackwardPlan, ResidentPlan, TransposedPlan
from nki_bn.kernels.resident_bwd import resident_gradients
from nki_bn.kernels.sizing import staged_plan
from nki_bn.kernels.tiling import Tile, check_made_for, flattened, output, slot_tile, tiles_ahead, tiles_of
from nki_bn.kernels.transposed_bwd import transposed_gradients


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
    plan: BackwardPlan | ResidentPlan | TransposedPlan | None = None,
    residual: nl.NkiTensor | None = None,
) -> Any:
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
        residual: as dy; what the forward added before the ReLU, read only when the mask is recomputed.

    Returns:
        dx (dtype of dy), dgamma and dbeta [C, 1] float32, in shared HBM, and the gradient of the residual (dtype of
        dy) when the plan asks for it; None for what the plan does not need.

    Precision: sums and coefficients in float32; the dy' of tiles that leave SBUF is staged in bfloat16.
    """
    check_arguments(dy, x_in, means, variances, gamma, beta)
    assert eps >= 0, f"eps must not be negative, got {eps}"
    relu = relu_mode_of(fuse_relu, relu_mask, dy)
    batch, channels, depth, height, width = dy.shape
    flat = (batch, channels, depth * height * width)
    with_residual = relu == "recompute" and residual != None
    if plan == None:
        plan = staged_plan(flat, dy.dtype, relu, nl.num_programs(0), nl.tile_size.sbuf_fmax_bytes, with_residual)
    check_made_for(plan, flat, dy.dtype)
    check_plan(plan, relu, with_residual)
    dx = output(plan.need_dx, dy.shape, dy.dtype, "dx")
    dgamma = output(plan.need_dgamma, (channels, 1), nl.float32, "dgamma")
    dbeta = output(plan.need_dbeta, (channels, 1), nl.float32, "dbeta")
    dresidual = output(plan.need_dresidual, dy.shape, dy.dtype, "dresidual")
    tensors = BackwardTensors(
        dy.reshape(flat),
        x_in.reshape(flat),
        means,
        variances,
        gamma,
        beta,
        flattened(relu_mask, flat),
        flattened(residual, flat),
        flattened(dx, flat),
        dgamma,
        dbeta,
        flattened(dresidual, flat),
    )
    count = batch * depth * height * width
    if plan.strategy == "resident":
        resident_gradients(tensors, flat, plan, eps, count)
    elif plan.strategy == "transposed":
        transposed_gradients(tensors, plan, eps, count)
    else:
        work = allocate_work(flat, plan)
        for i in range(work.share.first, work.share.last):
            gradients(tensors, work, i, eps, count)
    if plan.need_dresidual:
        return dx, dgamma, dbeta, dresidual
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
    """How the ReLU is known: "none", "mask" or "recompute"."""
    if not fuse_relu:
        return "none"
    if relu_mask == None:
        return "recompute"
    assert relu_mask.shape == dy.shape, f"relu_mask must have the shape of dy {dy.shape}, got {relu_mask.shape}"
    assert relu_mask.dtype == nl.uint8, f"relu_mask must be uint8, got {relu_mask.dtype}"
    return "mask"


def check_plan(plan: BackwardPlan | ResidentPlan | TransposedPlan, relu: str, with_residual: bool) -> None:
    """The plan is one for these arguments."""
    assert plan.relu == relu, f"the plan is made for relu {plan.relu}, the arguments ask for {relu}"
    assert plan.residual == with_residual, (
        f"the plan is made for residual {plan.residual}, the arguments ask for {with_residual}"
    )


def gradients(tensors: BackwardTensors, work: BackwardWork, index: int, eps: float, count: int) -> None:
    """Both phases for the channels of one tile; ``count`` is N."""
    plan = work.plan
    group = start_channel_tile(tensors, work, index, eps)
    tiles = tiles_of(work.share, plan.bands, plan.f_tile)
    resident = min(len(tiles), plan.interleave)
    moved = 0
    if needs_input_sums(plan):
        moved = len(tiles) - resident
    staged_hbm = None
    if moved > 0:
        staged_hbm = nl.ndarray((group.place.partitions, tiles[moved].column), dtype=nl.bfloat16, buffer=nl.private_hbm)
    ahead = tiles_ahead(plan.interleave)
    chunk = 0
    for i in range(len(tiles) + ahead):
        if i < len(tiles):
            load_gradient(tensors, work, group, tiles[i], i)
        if i >= ahead:
            chunk = first_phase(tensors, work, group, tiles, i - ahead, chunk)
            if i - ahead < moved:
                staged_store(work, group, tiles[i - ahead], i - ahead, staged_hbm)
    if needs_sums(plan):
        finish_sums(tensors, work, group, chunk)
    if needs_input_sums(plan):
        input_coefficients(group.columns, count, plan.folded)
        # The visit after the last tile is to tile 0: the slots go on round, and the resident tiles come first.
        for at in range(moved, len(tiles) + moved + ahead):
            if at >= len(tiles) and at < len(tiles) + moved:
                staged_load(tensors, work, group, tiles[at - len(tiles)], at, staged_hbm)
            if at - ahead >= moved:
                visit(tensors, work, group, tiles, at - ahead)


def visit(tensors: BackwardTensors, work: BackwardWork, group: ChannelTile, tiles: list[Tile], at: int) -> None:
    """Phase 2 of the tile in slot ``at``: one that never left it, or past the last tile one that came back."""
    tile = tiles[at % len(tiles)]
    slots = work.dy_slots
    if at >= len(tiles):
        slots = work.staged_slots
    second_phase(tensors, work, group, tile, at, slot_tile(slots, at, group.place, tile))
