# SPDX-License-Identifier: Apache-2.0
"""The public functions: NumPy arrays in, NumPy arrays out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nki_bn import execute
from nki_bn.execute import BackwardInputs
from nki_bn.kernels.plan import BackwardPlan
from nki_bn.planner import plan_backward
from nki_bn.problem import (
    DTYPES,
    OUTPUTS,
    Array,
    BackwardCase,
    Problem,
    dtype_name,
    needed_outputs,
    require_eps,
    require_flag,
    require_like,
    require_mask,
    require_statistics,
    resolve_lnc,
)

Gradients = tuple[Array | None, Array | None, Array | None]


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
    plan: BackwardPlan | None = None,
) -> Gradients:
    """Gradients of batch norm. No input is written to, and none has to be contiguous.

    Args:
        dy: gradient of the output, like x.
        x: [B, C, ...] of rank 2 to 5, float32, float16 or ml_dtypes.bfloat16: the input of the forward.
        mean, var: [C] float32, the statistics the forward normalised with; var is the biased variance.
        gamma, beta: [C] float32, or None where the layer has no such parameter (1 and 0, and no gradient). beta is read
            only when a mask is recomputed.
        eps: that of the forward; above 0 in training, from 0 up in eval.
        fuse_relu: the forward ended in a ReLU.
        relu_mask: uint8 0 or 1, like x: where that ReLU let the value pass. Without it the mask is recomputed from x.
            Checked whenever given, ignored when fuse_relu is False.
        residual, residual_grad: not built yet.
        training: the statistics are those of the batch (True) or running ones (False).
        need: the outputs to compute, of "dx", "dgamma" and "dbeta".
        precision: "high"; "fast" is not built yet.
        lnc: physical cores to use; None is NEURON_LOGICAL_NC_CONFIG, else as many as the target's logical core has.
        target: "trn1", "trn2", "trn3" or an alias.
        plan: how to do it, from ``plan_backward``; None lets the planner choose.

    Returns:
        (dx, dgamma, dbeta): dx like dy, dgamma and dbeta [C] float32. An output that is not needed is None. An empty
        batch gives an empty dx and zero sums.

    Raises:
        TypeError: an argument is of the wrong type or dtype.
        ValueError: an argument has a wrong value or shape.
        NotImplementedError: residual, residual_grad or precision="fast" is asked for.
    """
    _refuse_residual(residual, residual_grad)
    case = BackwardCase(dy, x, mean, var, gamma, beta, eps, fuse_relu, relu_mask, training)
    request = prepare(case, need, precision, lnc, target)
    return run(request, plan)


@dataclass(frozen=True)
class BackwardRequest:
    """A checked backward: the problem, and the arguments of the kernel."""

    problem: Problem
    inputs: BackwardInputs


def prepare(
    case: BackwardCase,
    need: Iterable[str] = OUTPUTS,
    precision: str = "high",
    lnc: int | None = None,
    target: str = "trn2",
) -> BackwardRequest:
    """Check the arguments of ``batch_norm_bwd``, raising as there, and bring them into the kernel's layout."""
    training = require_flag("training", case.training)
    problem = Problem(
        dtype=dtype_name("x", case.x),
        shape=case.x.shape,
        training=training,
        relu=case.relu if require_flag("fuse_relu", case.fuse_relu) else "none",
        need=_existing(needed_outputs(need), case),
        precision=precision,
        lnc=resolve_lnc(lnc, target),
        target=target,
    )
    require_statistics(case.mean, case.var, problem.channels)
    inputs = BackwardInputs(
        dy=_like_x("dy", case.dy, DTYPES[problem.dtype], problem),
        x=_as_layout(case.x, problem),
        mean=np.ascontiguousarray(case.mean),
        var=np.ascontiguousarray(case.var),
        gamma=_parameter("gamma", case.gamma, 1, problem),
        beta=_parameter("beta", case.beta, 0, problem),
        eps=require_eps(case.eps, training),
        relu_mask=_mask(case.relu_mask, problem),
    )
    return BackwardRequest(problem, inputs)


def run(request: BackwardRequest, plan: BackwardPlan | None = None) -> Gradients:
    """The outputs of a checked backward, in the caller's shapes."""
    problem, inputs = request.problem, request.inputs
    plan = _check_plan(plan, problem)
    if problem.need and problem.count:
        dx, dgamma, dbeta = execute.run_backward(inputs, problem, plan or plan_backward(problem))
    else:
        zeros = np.zeros(problem.channels, np.float32)
        dx, dgamma, dbeta = np.zeros_like(inputs.dy), zeros, zeros.copy()
    sums = (problem.channels,)
    return (
        dx.reshape(problem.shape) if dx is not None and "dx" in problem.need else None,
        dgamma.reshape(sums) if dgamma is not None and "dgamma" in problem.need else None,
        dbeta.reshape(sums) if dbeta is not None and "dbeta" in problem.need else None,
    )


def _existing(need: tuple[str, ...], case: BackwardCase) -> tuple[str, ...]:
    """``need`` without the gradients of parameters that the layer does not have."""
    missing = {name for name, parameter in (("dgamma", case.gamma), ("dbeta", case.beta)) if parameter is None}
    return tuple(name for name in need if name not in missing)


def _like_x(name: str, array: Array, dtype: np.dtype[Any], problem: Problem) -> Array:
    require_like(name, array, dtype, problem.shape)
    return _as_layout(array, problem)


def _mask(relu_mask: Array | None, problem: Problem) -> Array | None:
    """The mask for the kernel: checked whenever given, None unless it is used."""
    if relu_mask is None:
        return None
    used = problem.relu == "mask"
    require_mask(relu_mask, problem.shape, used)
    return _as_layout(relu_mask, problem) if used else None


def _parameter(name: str, values: Array | None, absent: float, problem: Problem) -> Array:
    """gamma or beta as [C, 1] float32."""
    if values is None:
        return np.full((problem.channels, 1), absent, np.float32)
    require_like(name, values, DTYPES["float32"], (problem.channels,))
    return np.ascontiguousarray(values).reshape(-1, 1)


def _as_layout(array: Array, problem: Problem) -> Array:
    return np.ascontiguousarray(array).reshape(problem.layout)


def _refuse_residual(residual: Array | None, residual_grad: bool) -> None:
    if residual is not None:
        raise NotImplementedError("residual is not built yet; accepted: None")
    if require_flag("residual_grad", residual_grad):
        raise NotImplementedError("residual_grad is not built yet; accepted: False")


def _check_plan(plan: BackwardPlan | None, problem: Problem) -> BackwardPlan | None:
    """``plan`` if it does what ``problem`` asks."""
    if plan is None:
        return None
    if not isinstance(plan, BackwardPlan):
        raise TypeError(f"plan must be a BackwardPlan or None, got {type(plan).__name__}")
    asked = {"training": problem.training, "relu": problem.relu}
    asked |= {f"need_{name}": name in problem.need for name in OUTPUTS}
    for field, value in asked.items():
        if getattr(plan, field) != value:
            raise ValueError(f"plan has {field}={getattr(plan, field)}; accepted for this call: {value}")
    return plan
