# SPDX-License-Identifier: Apache-2.0
"""The launch of a kernel for a problem, with tensors made by whoever runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nki_bn.planner import Plan
from nki_bn.problem import BackwardProblem, Problem

EPS = 1e-5
MOMENTUM = 0.1

# Makes a tensor of a shape and a dtype.
Make = Callable[[tuple[int, ...], str], Any]


@dataclass(frozen=True)
class Launch:
    """``kernel`` with its arguments, for ``lnc`` cores."""

    kernel: Any
    arguments: tuple[Any, ...]
    lnc: int


def launch_of(problem: Problem, plan: Plan, make: Make) -> Launch:
    """The launch that solves ``problem`` as ``plan`` says."""
    if isinstance(problem, BackwardProblem):
        return _backward(problem, plan, make)
    return _forward(problem, plan, make)


def _backward(problem: Problem, plan: Plan, make: Make) -> Launch:
    from nki_bn.kernels.batch_norm_bwd import batch_norm_bwd

    tensors = (make(problem.layout, problem.dtype), make(problem.layout, problem.dtype))
    mask = make(problem.layout, "uint8") if problem.relu == "mask" else None
    columns = (*_rows(problem, make), *_columns(problem, make))
    arguments = (*tensors, *columns, EPS, problem.relu != "none", mask, plan, _residual(problem, make))
    return Launch(batch_norm_bwd, arguments, problem.lnc)


def _forward(problem: Problem, plan: Plan, make: Make) -> Launch:
    from nki_bn.kernels.batch_norm_fwd import batch_norm_fwd

    running, absent = _rows(problem, make), (None, None)
    statistics = (*absent, *running) if problem.training else (*running, *absent)
    tensors = (make(problem.layout, problem.dtype), *_columns(problem, make), *statistics)
    numbers = (MOMENTUM, EPS, problem.relu != "none")
    return Launch(batch_norm_fwd, (*tensors, _residual(problem, make), *numbers, plan), problem.lnc)


def _residual(problem: Problem, make: Make) -> Any:
    return make(problem.layout, problem.dtype) if problem.residual else None


def _rows(problem: Problem, make: Make) -> tuple[Any, Any]:
    """Mean and variance."""
    return make((problem.channels,), "float32"), make((problem.channels,), "float32")


def _columns(problem: Problem, make: Make) -> tuple[Any, Any]:
    """gamma and beta."""
    return make((problem.channels, 1), "float32"), make((problem.channels, 1), "float32")
