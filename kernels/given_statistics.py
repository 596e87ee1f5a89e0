# SPDX-License-Identifier: Apache-2.0
"""Kernels that take statistics or sums made elsewhere: what data-parallel replicas need between their reductions.

    local moments       batch_norm_fwd without y           mean, variance of the shard
    variance_around     variance of the shard around the global mean
    forward             batch_norm_fwd with means and variances given
    local sums          batch_norm_bwd without dx          dgamma, dbeta of the shard, at the global statistics
    input_gradient      dx of the shard from reduced dgamma and dbeta

With one replica each gives the bits of the plain kernels.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from nki_bn.kernels.backward_phases import (
    BackwardWork,
    ChannelTile,
    allocate_work,
    channel_tile,
    load_beside_dy,
    load_dy,
    mask_gradient,
    second_phase,
    start_columns,
)
from nki_bn.kernels.backward_tensors import BackwardTensors
from nki_bn.kernels.batch_norm_bwd import check_arguments, check_plan, relu_mode_of
from nki_bn.kernels.columns import (
    DGAMMA,
    MEAN,
    SCRATCH,
    SUMS,
    VAR,
    column,
    input_coefficients,
    load_column,
    store_column,
)
from nki_bn.kernels.forward_phases import ForwardTensors, make_statistics, writes_columns
from nki_bn.kernels.forward_phases import allocate_work as allocate_forward
from nki_bn.kernels.forward_phases import start_channel_tile as start_forward
from nki_bn.kernels.plan import BackwardPlan, ForwardPlan
from nki_bn.kernels.tiling import check_made_for, flattened, output, slot_tile, tiles_of


@nki.jit
def variance_around(x_in: nl.NkiTensor, centers: nl.NkiTensor, plan: ForwardPlan) -> nl.NkiTensor:
    """Mean of (x - center)^2 per channel, as var + (mean - center)^2.

    Args:
        x_in: [B, C, D, H, W] in HBM.
        centers: [C] float32.
        plan: a ForwardPlan of training without y.

    Returns:
        [C] float32 in shared HBM.
    """
    batch, channels, depth, height, width = x_in.shape
    flat = (batch, channels, depth * height * width)
    assert centers.shape == (channels,), f"centers must have shape ({channels},), got {centers.shape}"
    check_made_for(plan, flat, x_in.dtype)
    assert plan.training and not plan.need_y, "the plan must be one of training that does not need y"
    result = nl.ndarray((channels,), dtype=nl.float32, buffer=nl.shared_hbm, name="variance_around")
    x = x_in.reshape(flat)
    tensors = ForwardTensors(x, None, None, None, None, None, None, None, None, None, None, result, None, None)
    work = allocate_forward(flat, plan)
    for i in range(work.share.first, work.share.last):
        group = start_forward(tensors, work, i)
        make_statistics(tensors, work, group, tiles_of(work.share, plan.bands, plan.f_tile))
        distance = column(group.columns, SCRATCH)
        load_column(group.columns, SCRATCH, centers[nl.ds(group.place.channel, group.place.channels)], plan.bands)
        nisa.tensor_tensor(dst=distance, data1=column(group.columns, MEAN), data2=distance, op=nl.subtract)
        nisa.tensor_tensor(dst=distance, data1=distance, data2=distance, op=nl.multiply)
        nisa.tensor_tensor(dst=distance, data1=column(group.columns, VAR), data2=distance, op=nl.add)
        if writes_columns(plan):
            store_column(result, group.columns, SCRATCH, group.place.channel, group.place.channels)
    return result


@nki.jit
def input_gradient(
    dy: nl.NkiTensor,
    x_in: nl.NkiTensor,
    means: nl.NkiTensor,
    variances: nl.NkiTensor,
    gamma: nl.NkiTensor,
    beta: nl.NkiTensor,
    dgamma: nl.NkiTensor,
    dbeta: nl.NkiTensor,
    count: int,
    plan: BackwardPlan,
    eps: float = 1e-5,
    fuse_relu: bool = False,
    relu_mask: nl.NkiTensor | None = None,
    residual: nl.NkiTensor | None = None,
) -> nl.NkiTensor:
    """dx of batch norm from sums that are given: those of ``count`` values per channel, of which these are a part.

    Args:
        dy, x_in, means, variances, gamma, beta, eps, fuse_relu, relu_mask, residual: as for batch_norm_bwd, with the
            statistics of all values.
        dgamma: [C, 1] float32, sum of dy'*(x - mean)*rstd over all values.
        dbeta: [C, 1] float32, sum of dy' over all values.
        count: number of all values per channel.
        plan: the BackwardPlan of training that needs dx.

    Returns:
        dx (shape and dtype of dy) in shared HBM.
    """
    check_arguments(dy, x_in, means, variances, gamma, beta)
    relu = relu_mode_of(fuse_relu, relu_mask, dy)
    check_plan(plan, relu, relu == "recompute" and residual != None)
    assert plan.training and plan.need_dx, "the plan must be one of training that needs dx"
    batch, channels, depth, height, width = dy.shape
    flat = (batch, channels, depth * height * width)
    check_made_for(plan, flat, dy.dtype)
    dx = output(True, dy.shape, dy.dtype, "dx")
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
        None,
    )
    work = allocate_work(flat, plan, eps)
    for i in range(work.share.first, work.share.last):
        start_columns(tensors, work, i)
        group = channel_tile(tensors, work, i)
        rows = nl.ds(group.place.channel, group.place.channels)
        load_column(group.columns, DGAMMA, dgamma[rows, :], plan.bands)
        load_column(group.columns, SUMS, dbeta[rows, :], plan.bands)
        input_coefficients(group.columns, count, plan.folded)
        for j in range(len(work.tiles)):
            load_dy(tensors, work, group, work.tiles[j], j)
            load_beside_dy(tensors, work, group, work.tiles[j], j)
            mask_gradient(tensors, work, group, work.tiles[j], j)
            gradient = gradient_of(work, group, j)
            second_phase(tensors, work, group, work.tiles[j], j, gradient, False)
    return dx


def gradient_of(work: BackwardWork, group: ChannelTile, at: int) -> nl.NkiTensor:
    """dy' of tile ``at``, rounded to bfloat16 if the plain kernel would stage it."""
    dy = slot_tile(work.dy_slots, at, group.place, work.tiles[at])
    if at >= len(work.tiles) - work.plan.interleave:
        return dy
    staged = slot_tile(work.staged_slots, at, group.place, work.tiles[at])
    nisa.activation(dst=staged, op=nl.copy, data=dy)
    return staged
