# SPDX-License-Identifier: Apache-2.0
"""Batch-norm forward: training, with statistics of the batch, or with given statistics; residual and ReLU fused.

Strategy ``two_read``: two phases over the data of one channel tile, channels on partitions.

    phase 1, per tile:  load x       Vector  bn_stats on pieces of 512 columns
    turn:               bn_aggr over pieces, groups, bands, cores; running statistics; scale and shift per channel
    phase 2, per tile:  the tiles that are still in their slots first, then load x
                        Vector  (x - hi)*scale + shift [+ residual], the ReLU's mask, y
                        store y and mask

With given statistics there is no phase 1. Strategies ``resident`` and ``reread`` are described in resident_fwd.py.
"""

from typing import Any

import nki
import nki.language as nl

from nki_bn.kernels.forward_phases import (
    ForwardTensors,
    ForwardWork,
    allocate_work,
    coefficients,
    load_for_normalising,
    load_statistics,
    make_statistics,
    normalise_tile,
    start_channel_tile,
    writes_columns,
)
from nki_bn.kernels.plan import ForwardPlan, ResidentForwardPlan, TransposedForwardPlan
from nki_bn.kernels.replicas import Replicas, check_replicas, total_of
from nki_bn.kernels.resident_fwd import normalise_groups
from nki_bn.kernels.running import load_running, store_statistics
from nki_bn.kernels.sizing import two_read_plan
from nki_bn.kernels.tiling import check_made_for, flattened, output, tiles_ahead, tiles_of
from nki_bn.kernels.transposed_fwd import transposed_forward


@nki.jit
def batch_norm_fwd(
    x_in: nl.NkiTensor,
    gamma: nl.NkiTensor,
    beta: nl.NkiTensor,
    means: nl.NkiTensor | None = None,
    variances: nl.NkiTensor | None = None,
    running_mean: nl.NkiTensor | None = None,
    running_var: nl.NkiTensor | None = None,
    residual: nl.NkiTensor | None = None,
    momentum: float = 0.1,
    eps: float = 1e-5,
    fuse_relu: bool = False,
    plan: ForwardPlan | ResidentForwardPlan | TransposedForwardPlan | None = None,
    replicas: Replicas | None = None,
) -> Any:
    """Normalise, scale and shift; add a residual and apply a ReLU if asked.

    Dimensions: B batches, C channels, D, H, W space; N = B*D*H*W values per channel.

    Args:
        x_in: [B, C, D, H, W] in HBM, float32, bfloat16 or float16.
        gamma: [C, 1] float32.
        beta: [C, 1] float32.
        means: [C] float32, or None to make the statistics from x (training).
        variances: [C] float32, biased; given if means is.
        running_mean: [C] float32; updated into a new tensor, in training only. Not accepted beside means.
        running_var: [C] float32; updated with the unbiased variance.
        residual: as x_in; added before the ReLU.
        momentum: weight of the batch in the running statistics.
        eps: added to the variance.
        fuse_relu: a ReLU follows.
        plan: how to do it; None sizes the kernel by the largest of strategy two_read that fits.
        replicas: those that share the batch, of which x_in is this one's part; with them a plan is needed.

    Returns:
        y (dtype of x), mean and variance [C] float32, new running mean and variance [C] float32, relu mask (uint8, 1
        where the value before rounding is above 0), in shared HBM. None for what is not made: with given statistics
        all but y and the mask, running statistics that were not passed, what the plan does not need.

    Precision: statistics and the value under the ReLU in float32.
    """
    check_arguments(x_in, gamma, beta, residual, eps, fuse_relu)
    check_statistics(x_in.shape[1], means, variances, running_mean, running_var)
    batch, channels, depth, height, width = x_in.shape
    flat = (batch, channels, depth * height * width)
    training = means == None
    if plan == None:
        budget = nl.tile_size.sbuf_fmax_bytes
        plan = two_read_plan(
            flat, x_in.dtype, nl.num_programs(0), budget, training, (True, True), fuse_relu, residual != None
        )
    check_made_for(plan, flat, x_in.dtype)
    assert plan.training == training, f"the plan is made for training={plan.training}, the arguments say {training}"
    assert plan.relu == fuse_relu, f"the plan is made for relu={plan.relu}, the arguments say {fuse_relu}"
    tracked = training and running_mean != None
    count = batch * depth * height * width
    check_replicas(replicas, count, training)
    assert not tracked or total_of(replicas, count) > 1, "running_var needs more than one value per channel"
    y = output(plan.need_y, x_in.shape, x_in.dtype, "y")
    mask = output(plan.need_mask, x_in.shape, nl.uint8, "relu_mask")
    mean_out = output(training, (channels,), nl.float32, "mean")
    var_out = output(training, (channels,), nl.float32, "var")
    running_mean_out = output(tracked, (channels,), nl.float32, "running_mean_out")
    running_var_out = output(tracked, (channels,), nl.float32, "running_var_out")
    tensors = ForwardTensors(
        x_in.reshape(flat),
        gamma,
        beta,
        means,
        variances,
        flattened(residual, flat),
        running_mean,
        running_var,
        flattened(y, flat),
        flattened(mask, flat),
        mean_out,
        var_out,
        running_mean_out,
        running_var_out,
        replicas,
    )
    if plan.strategy == "transposed":
        transposed_forward(tensors, plan, momentum, eps)
    elif plan.strategy == "two_read":
        work = allocate_work(flat, plan)
        for i in range(work.share.first, work.share.last):
            normalise(tensors, work, i, momentum, eps)
    else:
        normalise_groups(tensors, flat, plan, momentum, eps)
    return y, mean_out, var_out, running_mean_out, running_var_out, mask


def check_arguments(
    x_in: nl.NkiTensor,
    gamma: nl.NkiTensor,
    beta: nl.NkiTensor,
    residual: nl.NkiTensor | None,
    eps: float,
    fuse_relu: bool,
) -> None:
    """The kernel's own refusal of arguments that it would misread."""
    assert len(x_in.shape) == 5, f"x_in must be [B, C, D, H, W], got shape {x_in.shape}"
    assert x_in.dtype == nl.float32 or x_in.dtype == nl.bfloat16 or x_in.dtype == nl.float16, (
        f"x_in must be float32, bfloat16 or float16, got {x_in.dtype}"
    )
    channels = x_in.shape[1]
    assert gamma.shape == (channels, 1), f"gamma must have shape ({channels}, 1), got {gamma.shape}"
    assert beta.shape == (channels, 1), f"beta must have shape ({channels}, 1), got {beta.shape}"
    assert gamma.dtype == nl.float32 and beta.dtype == nl.float32, "gamma and beta must be float32"
    assert eps >= 0, f"eps must not be negative, got {eps}"
    assert isinstance(fuse_relu, bool), f"fuse_relu must be True or False, got {fuse_relu}"
    if residual != None:
        assert residual.shape == x_in.shape, f"residual must have the shape of x_in {x_in.shape}, got {residual.shape}"
        assert residual.dtype == x_in.dtype, f"residual must have the dtype of x_in {x_in.dtype}, got {residual.dtype}"


def check_statistics(
    channels: int,
    means: nl.NkiTensor | None,
    variances: nl.NkiTensor | None,
    running_mean: nl.NkiTensor | None,
    running_var: nl.NkiTensor | None,
) -> None:
    """The statistics come in pairs, given ones or running ones, of one value per channel."""
    assert (means == None) == (variances == None), "means and variances must be given together or not at all"
    assert (running_mean == None) == (running_var == None), (
        "running_mean and running_var must be given together or not at all"
    )
    assert means == None or running_mean == None, "running_mean and running_var are not accepted with given means"
    names = ("means", "variances", "running_mean", "running_var")
    columns = (means, variances, running_mean, running_var)
    for i in range(4):
        column = columns[i]
        if column != None:
            assert column.shape == (channels,), f"{names[i]} must have shape ({channels},), got {column.shape}"
            assert column.dtype == nl.float32, f"{names[i]} must be float32, got {column.dtype}"


def normalise(tensors: ForwardTensors, work: ForwardWork, index: int, momentum: float, eps: float) -> None:
    """Both phases for the channels of one tile."""
    plan = work.plan
    group = start_channel_tile(tensors, work, index)
    tiles = tiles_of(work.share, plan.bands, plan.f_tile)
    moved = len(tiles)
    if plan.training:
        make_statistics(tensors, work, group, tiles)
        moved = len(tiles) - min(len(tiles), plan.interleave)
        if writes_columns(plan):
            place = group.place
            load_running(tensors, group.columns, place.channel, place.channels, 1, False)
            store_statistics(tensors, group.columns, momentum, place.channel, place.channels)
    else:
        load_statistics(tensors, group)
    if plan.need_y:
        coefficients(tensors, group, eps)
        # The visit after the last tile is to tile 0: the slots go on round, and the resident tiles come first.
        ahead = tiles_ahead(plan.interleave)
        for at in range(moved, len(tiles) + moved + ahead):
            if at < len(tiles) + moved:
                load_for_normalising(tensors, work, group, tiles[at % len(tiles)], at, at < len(tiles))
            if at - ahead >= moved:
                normalise_tile(tensors, work, group, tiles[(at - ahead) % len(tiles)], at - ahead)
