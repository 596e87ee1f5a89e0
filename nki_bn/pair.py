# SPDX-License-Identifier: Apache-2.0
"""Forward and backward together, the backward on what the forward returned, against torch's float64 autograd.

Nothing is shared with the gradients of ``nki_bn.reference``, which says only how large the terms are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec

import numpy as np

from nki_bn import execute, ops, reference, tolerances
from nki_bn.comparison import Comparison, compare
from nki_bn.planner import plan_backward, plan_forward
from nki_bn.problem import DTYPES, GRADIENTS, Array, BackwardCase, ForwardCase, require_like
from nki_bn.reference import BackwardReference, Float64, Result
from nki_bn.requests import ForwardRequest, prepare_backward, prepare_forward
from nki_bn.simulator import RunOptions
from nki_bn.tolerances import Allowance, Arithmetic
from nki_bn.verify import DEFAULT_OPTIONS, Verification, arithmetic_of


def prepare(case: ForwardCase, dy: Array, lnc: int | None = None, target: str = "trn2") -> ForwardRequest:
    """Check the arguments of the forward, and ``dy``.

    Raises:
        TypeError, ValueError: as ``batch_norm_fwd``; there is no torch to compare with.
    """
    if find_spec("torch") is None:
        raise ValueError(
            "a pair is compared with torch, which is not installed (in a checkout, pip install '.[torch]'); "
            "accepted without it: bwd, fwd, eval"
        )
    request = prepare_forward(case, lnc, target)
    require_like("dy", dy, DTYPES[request.problem.dtype], request.problem.shape)
    return request


def verify_pair(
    case: ForwardCase, dy: Array, request: ForwardRequest, options: RunOptions = DEFAULT_OPTIONS
) -> Verification:
    """Run ``request``, which was prepared from ``case``, then the backward for ``dy`` on what it returned; judge both.

    The residual, if there is one, gets a gradient too.
    """
    lnc, target = request.problem.lnc, request.problem.target
    with execute.simulation(options):
        made = ops.run_forward(request)
        back = backward_case(case, dy, made.mean, made.var, made.relu_mask)
        second = prepare_backward(back, residual_grad=case.residual is not None, lnc=lnc, target=target)
        gradients = ops.run_backward(second)
    narrow = arithmetic_of(request.problem, plan_forward(request.problem), options).narrow
    arithmetic = replace(arithmetic_of(second.problem, plan_backward(second.problem), options), narrow=narrow)
    return Verification(request.problem, arithmetic, judge_pair(case, dy, (made.y, *gradients), arithmetic))


def judge_pair(
    case: ForwardCase, dy: Array, outputs: tuple[Array | None, ...], arithmetic: Arithmetic
) -> tuple[Comparison, ...]:
    """Compare (y, dx, dgamma, dbeta), and dresidual if there, with autograd; None is not judged."""
    wanted = autograd(case, dy)
    allowed = allowances(case, dy, arithmetic)
    return tuple(
        compare(name, got, wanted[name], allowed[name])
        for name, got in zip(("y", *GRADIENTS), outputs, strict=False)
        if got is not None
    )


def backward_case(case: ForwardCase, dy: Array, mean: Array, var: Array, relu_mask: Array | None) -> BackwardCase:
    """The backward of ``case`` for ``dy``, at these statistics."""
    relu = (case.eps, case.fuse_relu, relu_mask)
    return BackwardCase(dy, case.x, mean, var, case.gamma, case.beta, *relu, case.training, case.residual)


def autograd(case: ForwardCase, dy: Array) -> dict[str, Float64]:
    """y and its gradients for ``dy`` by torch in float64, under their names in ``GRADIENTS``."""
    import torch

    given = {"dx": case.x, "dgamma": case.gamma, "dbeta": case.beta, "dresidual": case.residual}
    wide = {name: torch.from_numpy(array.astype(np.float64)) for name, array in given.items() if array is not None}
    leaves = {name: tensor.requires_grad_() for name, tensor in wide.items()}
    mean, var = (
        None if values is None or case.training else torch.from_numpy(values.astype(np.float64))
        for values in (case.running_mean, case.running_var)
    )
    parameters = leaves.get("dgamma"), leaves.get("dbeta")
    y = torch.nn.functional.batch_norm(leaves["dx"], mean, var, *parameters, training=case.training, eps=case.eps)
    if "dresidual" in leaves:
        y = y + leaves["dresidual"]
    y = torch.relu(y) if case.fuse_relu else y
    gradients = torch.autograd.grad(y, list(leaves.values()), torch.from_numpy(dy.astype(np.float64)))
    return {"y": y.detach().numpy()} | {name: g.numpy() for name, g in zip(leaves, gradients, strict=True)}


@np.errstate(all="ignore")
def allowances(case: ForwardCase, dy: Array, arithmetic: Arithmetic) -> dict[str, Allowance]:
    """Those of forward and backward at exact statistics, and what the forward's statistics may be off in addition."""
    exact = _at_exact_statistics(case, dy)
    z = reference.pre_activation(case.x, exact.mean, exact.var, case.gamma, case.beta, case.eps, case.residual)
    mask = z.value > 0 if case.fuse_relu else None
    want = reference.batch_norm_bwd(dy, case.x, exact.mean, exact.var, case.gamma, case.eps, mask, case.training)
    drift = _drift(exact, arithmetic)
    moved = drift.of_normalised(want.normalised)
    error = _forward_error(exact, z, arithmetic) + _magnitude(case.gamma, moved) * moved
    undecided = (np.abs(z.value) < error) & case.fuse_relu
    allowed = tolerances.backward(exact, want, arithmetic, undecided)
    dgamma = drift.rstd * want.dgamma.scale + drift.mean * np.abs(want.dbeta.value)
    dx = _moved_dx(want, drift, moved, dgamma)
    return allowed | {
        "y": tolerances.everywhere(error),
        "dgamma": replace(allowed["dgamma"], error=allowed["dgamma"].error + dgamma),
        "dx": replace(allowed["dx"], error=allowed["dx"].error + dx),
    }


def _at_exact_statistics(case: ForwardCase, dy: Array) -> BackwardCase:
    if case.training:
        return backward_case(case, dy, *reference.statistics(case.x), None)
    assert case.running_mean is not None and case.running_var is not None
    return backward_case(case, dy, case.running_mean, case.running_var, None)


@dataclass(frozen=True)
class _Drift:
    """How far float32 statistics may be from exact ones: the mean in deviations, rstd relatively; [C] each."""

    mean: Float64
    rstd: Float64

    def of_normalised(self, normalised: Float64) -> Float64:
        """What it moves (x - mean)*rstd by, like x."""
        moved: Float64 = np.abs(normalised) * reference.column(self.rstd, normalised)
        return moved + reference.column(self.mean, normalised)


def _drift(case: BackwardCase, arithmetic: Arithmetic) -> _Drift:
    if not case.training:
        return _Drift(np.zeros(case.x.shape[1]), np.zeros(case.x.shape[1]))
    allowed = tolerances.statistics(case.x, case.mean, case.var, arithmetic)
    errors = {}
    for name, value in (("mean", case.mean), ("var", case.var)):
        error = allowed[name].error
        errors[name] = error + tolerances.half_unit(np.abs(value) + error, np.dtype(np.float32))
    # 1/sqrt(1 - e) - 1: what rstd gains when the variance loses the share e of itself.
    share = np.minimum(errors["var"] / (case.var + case.eps), 0.99)
    rstd = 1 / np.sqrt(1 - share) - 1
    return _Drift(errors["mean"] / np.sqrt(case.var + case.eps) * (1 + rstd), rstd)


def _forward_error(case: BackwardCase, z: Result, arithmetic: Arithmetic) -> Float64:
    low = tolerances.low_part(case.mean, case.var, case.eps, arithmetic)
    error = tolerances.pre_activation_error(z, case.gamma, low, arithmetic)
    if arithmetic.narrow:
        error += tolerances.narrow_error(case.x, case.mean, case.var, case.gamma, case.eps)
    return error


def _magnitude(gamma: Array | None, like: Float64) -> Float64:
    return np.ones(1) if gamma is None else np.abs(reference.column(gamma, like))


def _moved_dx(want: BackwardReference, drift: _Drift, moved: Float64, dgamma: Float64) -> Float64:
    """What the drift moves dx by: its factor, each normalised value, and dgamma, which moves by ``dgamma``."""
    slope = moved * reference.column(np.abs(want.dgamma.value), moved)
    slope = slope + (np.abs(want.normalised) + moved) * reference.column(dgamma, moved)
    grown = 1 + reference.column(drift.rstd, moved)
    count = max(1, moved.size // moved.shape[1])
    error: Float64 = reference.column(drift.rstd, moved) * want.dx.scale + np.abs(want.factor) * grown * slope / count
    return error
