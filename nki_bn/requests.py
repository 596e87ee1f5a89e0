# SPDX-License-Identifier: Apache-2.0
"""From the arguments of a public function to a request: checked, and in the layout of the kernel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from nki_bn.execute import BackwardInputs, ForwardInputs
from nki_bn.problem import (
    DTYPES,
    OUTPUTS,
    Array,
    BackwardCase,
    BackwardProblem,
    ForwardCase,
    ForwardProblem,
    Problem,
    averaging_factor,
    dtype_name,
    needed_outputs,
    require_column,
    require_eps,
    require_flag,
    require_like,
    require_mask,
    require_statistics,
    require_variance,
    resolve_lnc,
)


@dataclass(frozen=True)
class ForwardRequest:
    """A checked forward: the problem, and the arguments of the kernel."""

    problem: ForwardProblem
    inputs: ForwardInputs


@dataclass(frozen=True)
class BackwardRequest:
    """A checked backward: the problem, and the arguments of the kernel."""

    problem: BackwardProblem
    inputs: BackwardInputs


def prepare_forward(
    case: ForwardCase, lnc: int | None = None, target: str = "trn2", part: bool = False
) -> ForwardRequest:
    """Check the arguments of ``batch_norm_fwd``, raising as there, and bring them into the kernel's layout.

    If x is a ``part`` of a batch, one value per channel is accepted.
    """
    training = require_flag("training", case.training)
    for flag in ("fuse_relu", "save_relu_mask"):
        require_flag(flag, getattr(case, flag))
    problem = ForwardProblem(
        dtype=dtype_name("x", case.x),
        shape=case.x.shape,
        training=training,
        relu=case.relu,
        residual=case.residual is not None,
        lnc=resolve_lnc(lnc, target),
        target=target,
    )
    running_mean, running_var = _running_statistics(case, problem)
    inputs = ForwardInputs(
        x=_as_layout(case.x, problem),
        gamma=_parameter("gamma", case.gamma, 1, problem),
        beta=_parameter("beta", case.beta, 0, problem),
        running_mean=running_mean,
        running_var=running_var,
        residual=_residual(case.residual, problem),
        momentum=averaging_factor(case.momentum, case.num_batches_tracked, training and running_mean is not None),
        eps=require_eps(case.eps, training),
    )
    if not part:
        require_statistics(problem)
    return ForwardRequest(problem, inputs)


def prepare_backward(
    case: BackwardCase,
    need: Iterable[str] = OUTPUTS,
    residual_grad: bool = False,
    precision: str = "high",
    lnc: int | None = None,
    target: str = "trn2",
) -> BackwardRequest:
    """Check the arguments of ``batch_norm_bwd``, raising as there, and bring them into the kernel's layout."""
    training = require_flag("training", case.training)
    relu = case.relu if require_flag("fuse_relu", case.fuse_relu) else "none"
    added = ("dresidual",) if require_flag("residual_grad", residual_grad) else ()
    problem = BackwardProblem(
        dtype=dtype_name("x", case.x),
        shape=case.x.shape,
        training=training,
        relu=relu,
        residual=relu == "recompute" and case.residual is not None,
        lnc=resolve_lnc(lnc, target),
        target=target,
        need=(*_existing(needed_outputs(need), case), *added),
        precision=precision,
    )
    if added and relu == "recompute" and case.residual is None:
        raise ValueError("residual and relu_mask are None; accepted with residual_grad and fuse_relu: one of the two")
    require_column("mean", case.mean, problem.channels)
    require_column("var", case.var, problem.channels)
    require_variance("var", case.var)
    residual = _residual(case.residual, problem)
    inputs = BackwardInputs(
        dy=_like_x("dy", case.dy, problem),
        x=_as_layout(case.x, problem),
        mean=np.ascontiguousarray(case.mean),
        var=np.ascontiguousarray(case.var),
        gamma=_parameter("gamma", case.gamma, 1, problem),
        beta=_parameter("beta", case.beta, 0, problem),
        eps=require_eps(case.eps, training),
        relu_mask=_mask(case.relu_mask, problem),
        residual=residual if problem.residual else None,
    )
    return BackwardRequest(problem, inputs)


def _existing(need: tuple[str, ...], case: BackwardCase) -> tuple[str, ...]:
    """``need`` without the gradients of parameters that the layer does not have."""
    missing = {name for name, parameter in (("dgamma", case.gamma), ("dbeta", case.beta)) if parameter is None}
    return tuple(name for name in need if name not in missing)


def _running_statistics(case: ForwardCase, problem: ForwardProblem) -> tuple[Array | None, Array | None]:
    """Both running statistics, or None twice where the layer has none, which only training accepts."""
    mean, var = case.running_mean, case.running_var
    if mean is None or var is None:
        if mean is None and var is None and problem.training:
            return None, None
        name = "running_mean" if mean is None else "running_var"
        raise ValueError(f"{name} is None; accepted: both running statistics or, in training, neither")
    require_column("running_mean", mean, problem.channels)
    require_column("running_var", var, problem.channels)
    if not problem.training:
        require_variance("running_var", var)
    return np.ascontiguousarray(mean), np.ascontiguousarray(var)


def _residual(residual: Array | None, problem: Problem) -> Array | None:
    """The residual for the kernel, checked whenever given."""
    return None if residual is None else _like_x("residual", residual, problem)


def _like_x(name: str, array: Array, problem: Problem) -> Array:
    require_like(name, array, DTYPES[problem.dtype], problem.shape)
    return _as_layout(array, problem)


def _mask(relu_mask: Array | None, problem: BackwardProblem) -> Array | None:
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
    require_column(name, values, problem.channels)
    return np.ascontiguousarray(values).reshape(-1, 1)


def _as_layout(array: Array, problem: Problem) -> Array:
    return np.ascontiguousarray(array).reshape(problem.layout)
