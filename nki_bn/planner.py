# SPDX-License-Identifier: Apache-2.0
"""From a problem to a plan: how a kernel will work, decided on the host."""

from __future__ import annotations

from typing import TypeAlias

from nki_bn.hardware import load_target
from nki_bn.kernels.plan import BackwardPlan, ForwardPlan, ResidentForwardPlan, ResidentPlan
from nki_bn.kernels.sizing import staged_plan, two_read_plan
from nki_bn.problem import GRADIENTS, BackwardProblem, ForwardProblem, Problem
from nki_bn.resident_forward_planner import best_resident_forward
from nki_bn.resident_planner import best_resident

Plan: TypeAlias = ForwardPlan | ResidentForwardPlan | BackwardPlan | ResidentPlan


def plan(problem: Problem) -> Plan:
    """The plan of a forward or a backward pass.

    Raises:
        TypeError: the problem is neither a ForwardProblem nor a BackwardProblem.
        ValueError: a size is 0, so that there is nothing to plan.
    """
    if isinstance(problem, ForwardProblem):
        return plan_forward(problem)
    if isinstance(problem, BackwardProblem):
        return plan_backward(problem)
    raise TypeError(f"problem must be a ForwardProblem or a BackwardProblem, got {type(problem).__name__}")


def plan_forward(problem: ForwardProblem) -> ForwardPlan | ResidentForwardPlan:
    """The plan of a forward pass: the best ``resident`` one that fits, else ``reread``, else ``two_read``."""
    for reread in (False, True) if problem.count else ():
        best = best_resident_forward(problem, reread)
        if best is not None:
            return best.plan
    return plan_two_read(problem)


def plan_two_read(problem: ForwardProblem, sbuf_bytes: int | None = None) -> ForwardPlan:
    """The plan of a forward pass of strategy ``two_read``: the widest tiles that fit into SBUF.

    ``sbuf_bytes`` may be used per partition; None stands for all that the target has.
    """
    chosen: ForwardPlan = two_read_plan(
        _extents(problem),
        problem.dtype,
        problem.lnc,
        _budget(problem, sbuf_bytes),
        training=problem.training,
        need=(True, problem.relu == "mask"),
        relu=problem.relu != "none",
        residual=problem.residual,
    )
    return chosen


def plan_backward(problem: BackwardProblem) -> BackwardPlan | ResidentPlan:
    """The plan of a backward pass: the best layout of ``resident`` if one fits, else ``staged``."""
    best = best_resident(problem) if problem.count else None
    return plan_staged(problem) if best is None else best.plan


def plan_staged(problem: BackwardProblem, sbuf_bytes: int | None = None) -> BackwardPlan:
    """The plan of a backward pass of strategy ``staged``: the widest tiles that fit into SBUF, as for ``two_read``."""
    chosen: BackwardPlan = staged_plan(
        _extents(problem),
        problem.dtype,
        problem.relu,
        problem.lnc,
        _budget(problem, sbuf_bytes),
        residual=problem.residual,
        training=problem.training,
        need=tuple(name in problem.need for name in GRADIENTS),
    )
    return chosen


def _extents(problem: Problem) -> tuple[int, int, int]:
    if not problem.count:
        raise ValueError(f"problem has shape {problem.shape}; accepted for a plan: sizes from 1 up")
    return problem.batch, problem.channels, problem.spatial


def _budget(problem: Problem, sbuf_bytes: int | None) -> int:
    return load_target(problem.target).sbuf_partition_bytes if sbuf_bytes is None else sbuf_bytes
