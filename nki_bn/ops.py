# SPDX-License-Identifier: Apache-2.0
"""The public functions: NumPy arrays in, NumPy arrays out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from nki_bn import execute
from nki_bn.execute import ForwardInputs
from nki_bn.hardware import load_target
from nki_bn.kernels.plan import (
    BackwardPlan,
    ForwardPlan,
    ResidentForwardPlan,
    ResidentPlan,
    TransposedForwardPlan,
    TransposedPlan,
    total_bytes,
)
from nki_bn.planner import plan_backward, plan_forward
from nki_bn.problem import GRADIENTS, OUTPUTS, Array, BackwardCase, ForwardCase, ForwardProblem, Problem
from nki_bn.requests import BackwardRequest, ForwardRequest, prepare_backward, prepare_forward


class BatchNormForward(NamedTuple):
    """What ``batch_norm_fwd`` returns, all of it in new arrays.

    Attributes:
        y: like x.
        mean, var: [C] float32, what x was normalised with: those of the batch (var biased) in training, the running
            ones in eval. They are what ``batch_norm_bwd`` takes.
        running_mean, running_var: [C] float32, the running statistics after this batch: moved in training, as given in
            eval, None where none were given.
        relu_mask: uint8 like x, 1 where the fused ReLU let the value pass; None without one or if it is not saved.
    """

    y: Array
    mean: Array
    var: Array
    running_mean: Array | None
    running_var: Array | None
    relu_mask: Array | None


def batch_norm_fwd(
    x: Array,
    gamma: Array | None,
    beta: Array | None,
    running_mean: Array | None = None,
    running_var: Array | None = None,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    training: bool = True,
    fuse_relu: bool = False,
    residual: Array | None = None,
    *,
    num_batches_tracked: int | None = None,
    save_relu_mask: bool = True,
    lnc: int | None = None,
    target: str = "trn2",
    plan: ForwardPlan | ResidentForwardPlan | TransposedForwardPlan | None = None,
) -> BatchNormForward:
    """Batch norm, then the residual is added, then a ReLU. No input is written to, and none has to be contiguous.

    Args:
        x: [B, C, ...] of rank 2 to 5, float32, float16 or ml_dtypes.bfloat16.
        gamma, beta: [C] float32, or None for 1 and 0.
        running_mean, running_var: [C] float32; both or neither in training, both in eval, where they are what x is
            normalised with. running_var is that of unbiased variances.
        momentum: weight of this batch in the running statistics, any finite number; None takes the plain average over
            all batches and needs ``num_batches_tracked``.
        eps: added to the variance; above 0 in training, from 0 up in eval.
        training: normalise with the statistics of the batch (True) or with the running ones (False).
        fuse_relu: end in a ReLU; NaN stays NaN.
        residual: like x; added before the ReLU.
        num_batches_tracked: how many batches the running statistics have seen, without this one.
        save_relu_mask: return the mask of the ReLU. It is that of the values before they are rounded to the dtype of y.
        lnc: physical cores to use; None is NEURON_LOGICAL_NC_CONFIG, else as many as the target's logical core has.
        target: "trn1", "trn2", "trn3" or an alias.
        plan: how to do it, from ``plan``; None lets the planner choose.

    Returns:
        A BatchNormForward. An empty batch, as in torch, gives an empty y and leaves the running statistics as they are;
        its own mean and variance are given as 0.

    Raises:
        TypeError: an argument is of the wrong type or dtype.
        ValueError: an argument has a wrong value or shape; in training there is only one value per channel.
    """
    statistics = (running_mean, running_var, momentum, eps, training)
    case = ForwardCase(x, gamma, beta, *statistics, fuse_relu, residual, num_batches_tracked, save_relu_mask)
    return run_forward(prepare_forward(case, lnc, target), plan)


def batch_norm_bwd(
    dy: Array,
    x: Array,
    mean: Array,
    var: Array,
    gamma: Array | None,
    beta: Array | None,
    eps: float = 1e-5,
    fuse_relu: bool = False,
    relu_mask: Array | None = None,
    *,
    residual: Array | None = None,
    training: bool = True,
    need: Iterable[str] = OUTPUTS,
    residual_grad: bool = False,
    precision: str = "high",
    lnc: int | None = None,
    target: str = "trn2",
    plan: BackwardPlan | ResidentPlan | TransposedPlan | None = None,
) -> tuple[Array | None, ...]:
    """Gradients of batch norm. No input is written to, and none has to be contiguous.

    Args:
        dy: gradient of the output, like x.
        x: [B, C, ...] of rank 2 to 5, float32, float16 or ml_dtypes.bfloat16: the input of the forward.
        mean, var: [C] float32, the statistics the forward normalised with; var is the biased variance.
        gamma, beta: [C] float32, or None where the layer has no such parameter (1 and 0, and no gradient). beta is read
            only when a mask is recomputed.
        eps: that of the forward; above 0 in training, from 0 up in eval.
        fuse_relu: the forward ended in a ReLU.
        relu_mask: uint8 0 or 1, like x: where that ReLU let the value pass. Without it the mask is recomputed from x,
            and from the residual if the forward added one. Checked whenever given, ignored when fuse_relu is False.
        residual: like x, what the forward added before the ReLU. Checked whenever given, read only when the mask is
            recomputed: a layer with a residual and a fused ReLU has to give this or the mask.
        training: the statistics are those of the batch (True) or running ones (False).
        need: the outputs to compute, of "dx", "dgamma" and "dbeta".
        residual_grad: return the gradient of the residual as well.
        precision: "high", or "fast" for float16 and bfloat16: the term of dx that depends on x may be rounded to the
            dtype of x before dx is, which errs by up to half a unit in the last place of that term, beside the half
            unit of dx. In float16 that term must not exceed 65504.
        lnc: physical cores to use; None is NEURON_LOGICAL_NC_CONFIG, else as many as the target's logical core has.
        target: "trn1", "trn2", "trn3" or an alias.
        plan: how to do it, from ``plan``; None lets the planner choose.

    Returns:
        (dx, dgamma, dbeta), with residual_grad (dx, dgamma, dbeta, dresidual): dx and dresidual like dy, dgamma and
        dbeta [C] float32. dresidual is dy where the ReLU let the value pass and 0 elsewhere; without a ReLU it is dy.
        An output that is not needed is None. An empty batch gives an empty dx and zero sums.

    Raises:
        TypeError: an argument is of the wrong type or dtype.
        ValueError: an argument has a wrong value or shape; precision is "fast" for float32.
    """
    case = BackwardCase(dy, x, mean, var, gamma, beta, eps, fuse_relu, relu_mask, training, residual)
    return run_backward(prepare_backward(case, need, residual_grad, precision, lnc, target), plan)


def run_forward(
    request: ForwardRequest, plan: ForwardPlan | ResidentForwardPlan | TransposedForwardPlan | None = None
) -> BatchNormForward:
    """The results of a checked forward, in the caller's shapes."""
    problem, inputs = request.problem, request.inputs
    asked = {"training": problem.training, "relu": problem.relu != "none", "residual": problem.residual}
    _check_plan(
        plan,
        (ForwardPlan, ResidentForwardPlan, TransposedForwardPlan),
        problem,
        asked | {"need_y": True, "need_mask": problem.relu == "mask"},
    )
    if problem.count:
        y, *statistics, mask = execute.run_forward(inputs, problem, plan or plan_forward(problem))
    else:
        y, *statistics, mask = _empty_forward(inputs, problem)
    if not problem.training:
        statistics = [np.array(values) for values in (inputs.running_mean, inputs.running_var) * 2]
    y, mask = (None if array is None else array.reshape(problem.shape) for array in (y, mask))
    return BatchNormForward._make((y, *statistics, mask))


def run_backward(
    request: BackwardRequest, plan: BackwardPlan | ResidentPlan | TransposedPlan | None = None
) -> tuple[Array | None, ...]:
    """The outputs of a checked backward, in the caller's shapes; the fourth only if it is needed."""
    problem, inputs = request.problem, request.inputs
    asked = {"training": problem.training, "relu": problem.relu, "residual": problem.residual}
    asked |= {"folded": problem.dtype != "float32"} | {f"need_{name}": name in problem.need for name in GRADIENTS}
    _check_plan(plan, (BackwardPlan, ResidentPlan, TransposedPlan), problem, asked)
    if getattr(plan, "fast", False) and problem.precision != "fast":
        raise ValueError("plan has fast=True; accepted for this call: False, or precision 'fast'")
    outputs: Iterable[Array | None] = map(np.zeros_like, (inputs.dy, inputs.gamma, inputs.beta, inputs.dy))
    if problem.need and problem.count:
        outputs = execute.run_backward(inputs, problem, plan or plan_backward(problem))
    names = GRADIENTS if "dresidual" in problem.need else OUTPUTS
    shapes = (problem.shape, (problem.channels,), (problem.channels,), problem.shape)
    return tuple(
        None if output is None or name not in problem.need else output.reshape(shape)
        for name, output, shape in zip(names, outputs, shapes, strict=False)
    )


def _empty_forward(inputs: ForwardInputs, problem: ForwardProblem) -> tuple[Any, ...]:
    """What the kernel returns, for a batch without values: it counts 0 in every average."""
    mean, var = np.zeros((2, problem.channels), np.float32)
    running = (None if values is None else values.copy() for values in (inputs.running_mean, inputs.running_var))
    mask = np.zeros(problem.layout, np.uint8) if problem.relu == "mask" else None
    return np.zeros_like(inputs.x), mean, var, *running, mask


def _check_plan(plan: Any, kinds: tuple[type, ...], problem: Problem, asked: dict[str, Any]) -> None:
    """Refuse a ``plan`` (None passes) that is not made for the ``problem``, or does not do what is ``asked``."""
    if plan is None:
        return
    if not isinstance(plan, kinds):
        names = ", a ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"plan must be a {names} or None, got {type(plan).__name__}")
    shape = problem.batch, problem.channels, problem.spatial
    made_for = {"shape": shape, "dtype": problem.dtype, "cores": problem.lnc}
    for field, value in (made_for | asked).items():
        if getattr(plan, field) != value:
            raise ValueError(f"plan has {field}={getattr(plan, field)}; accepted for this call: {value}")
    _check_sizes(plan, problem.target)


def _check_sizes(plan: Any, target: str) -> None:
    """Refuse a ``plan`` that contradicts itself, or does not fit into SBUF of the ``target``."""
    # Each strategy has some of them.
    resident = (
        "set_channels",
        "group_sets",
        "batch_bands",
        "space_bands",
        "chunk",
        "slots",
        "late_slots",
        "scalar_turns",
    )
    for field in ("bands", "f_tile", "interleave", "group_channels", *resident, "group_blocks", "tiles", "positions"):
        size = getattr(plan, field, 1)
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"plan has {field}={size!r}; accepted: integers from 1 up")
    total, capacity = total_bytes(plan.buffers), load_target(target).sbuf_partition_bytes
    if plan.sbuf_bytes != total:
        raise ValueError(f"plan has sbuf_bytes={plan.sbuf_bytes}; accepted: {total}, the total of its buffers")
    if total > capacity:
        raise ValueError(f"plan has sbuf_bytes={total}; accepted on {target}: at most {capacity}")
