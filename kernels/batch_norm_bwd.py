# SPDX-License-Identifier: Apache-2.0
"""Batch-norm backward: gradients of input, scale, shift and residual; the plan says by which strategy."""

from typing import Any

import nki
import nki.language as nl

from nki_bn.kernels.backward_tensors import BackwardTensors
from nki_bn.kernels.plan import BackwardPlan, ResidentPlan, TransposedPlan
from nki_bn.kernels.replicas import Replicas, check_replicas, total_of
from nki_bn.kernels.resident_bwd import resident_gradients
from nki_bn.kernels.sizing import staged_plan
from nki_bn.kernels.staged_bwd import staged_gradients
from nki_bn.kernels.tiling import check_made_for, flattened, output
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
    replicas: Replicas | None = None,
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
        replicas: those that share the batch, of which the tensors are this one's part, and the statistics those of all.
            dx is then that of the whole batch; dgamma and dbeta are this replica's own sums.

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
        replicas,
    )
    check_replicas(replicas, batch * depth * height * width, plan.training)
    count = total_of(replicas, batch * depth * height * width)
    if plan.strategy == "resident" or plan.strategy == "reread":
        resident_gradients(tensors, flat, plan, eps, count)
    elif plan.strategy == "transposed":
        transposed_gradients(tensors, plan, eps, count)
    else:
        staged_gradients(tensors, flat, plan, eps, count)
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
