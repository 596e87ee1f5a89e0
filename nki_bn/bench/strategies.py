# SPDX-License-Identifier: Apache-2.0
"""From a case to its problem, and from the name of a strategy to a plan."""

from __future__ import annotations

from collections.abc import Callable

from nki_bn import planner
from nki_bn.bench.record import Case
from nki_bn.hardware import load_target
from nki_bn.predict import Plan
from nki_bn.problem import BackwardProblem, ForwardProblem, Problem
from nki_bn.resident_forward_planner import best_resident_forward, likely_resident_forward
from nki_bn.resident_planner import best_resident
from nki_bn.transposed_planner import best_transposed

PLANNED = "planned"
BASELINES = ("staged", "two_read")


def strategies_of(op: str) -> tuple[str, ...]:
    """The strategies that an operation has; the planner's own choice is the last."""
    if op == "bwd":
        return "staged", "resident", "reread", "transposed", PLANNED
    return "two_read", "resident", "reread", "transposed", PLANNED


def problem_of(case: Case) -> Problem:
    """The problem of a case.

    Raises:
        TypeError, ValueError: as :class:`Problem`; the operation does not have the strategy or the precision.
    """
    if case.strategy not in strategies_of(case.op):
        accepted = ", ".join(strategies_of(case.op))
        raise ValueError(f"strategy {case.strategy!r} is none of op {case.op}; accepted: {accepted}")
    if case.op == "bwd":
        return BackwardProblem(
            case.shape, case.dtype, relu=case.relu, lnc=case.lnc, target=case.target, precision=case.precision
        )
    if case.precision != "high":
        raise ValueError(f"precision is {case.precision!r}; accepted with op {case.op}: high")
    training = case.op == "fwd"
    return ForwardProblem(case.shape, case.dtype, training, case.relu, lnc=case.lnc, target=case.target)


def plan_of(problem: Problem, strategy: str) -> Plan:
    """The plan of a strategy for a problem: of ``resident`` the fastest that was predicted.

    Raises:
        ValueError: nothing fits.
    """
    if strategy == PLANNED:
        return planner.plan(problem)
    best = None
    if strategy == "resident" and isinstance(problem, BackwardProblem):
        best = best_resident(problem)
    elif strategy in ("resident", "reread") and isinstance(problem, ForwardProblem):
        best = best_resident_forward(problem, strategy == "reread")
    if best is not None:
        return best.plan
    return sized(problem, strategy, load_target(problem.target).sbuf_partition_bytes)


def sized(problem: Problem, strategy: str, sbuf_bytes: int) -> Plan:
    """A plan of a strategy (not ``planned``) in as many bytes of SBUF per partition.

    Raises:
        ValueError: nothing fits.
    """
    return _SIZING[strategy](problem, sbuf_bytes)


def _staged(problem: Problem, sbuf_bytes: int) -> Plan:
    assert isinstance(problem, BackwardProblem), "staged is a strategy of the backward"
    return planner.plan_staged(problem, sbuf_bytes)


def _forward(problem: ForwardProblem, strategy: str, sbuf_bytes: int) -> Plan:
    chosen = likely_resident_forward(problem, strategy == "reread", sbuf_bytes)
    if chosen is None:
        raise ValueError(f"no layout of {strategy} fits into {sbuf_bytes} bytes of SBUF per partition")
    return chosen


def _transposed(problem: Problem, sbuf_bytes: int) -> Plan:
    assert isinstance(problem, BackwardProblem | ForwardProblem), "transposed is a strategy of forward and backward"
    best = best_transposed(problem, sbuf_bytes)
    if best is None:
        raise ValueError(f"no layout of transposed fits into {sbuf_bytes} bytes of SBUF per partition")
    return best.plan


def _resident(problem: Problem, sbuf_bytes: int, strategy: str = "resident") -> Plan:
    if isinstance(problem, ForwardProblem):
        return _forward(problem, strategy, sbuf_bytes)
    assert isinstance(problem, BackwardProblem), f"{strategy} is a strategy of the forward and the backward"
    best = best_resident(problem, sbuf_bytes, strategy)
    if best is None:
        raise ValueError(f"no layout of {strategy} fits into {sbuf_bytes} bytes of SBUF per partition")
    return best.plan


def _reread(problem: Problem, sbuf_bytes: int) -> Plan:
    return _resident(problem, sbuf_bytes, "reread")


def _two_read(problem: Problem, sbuf_bytes: int) -> Plan:
    assert isinstance(problem, ForwardProblem), "two_read is a strategy of the forward"
    return planner.plan_two_read(problem, sbuf_bytes)


_SIZING: dict[str, Callable[[Problem, int], Plan]] = {
    "staged": _staged,
    "resident": _resident,
    "reread": _reread,
    "transposed": _transposed,
    "two_read": _two_read,
}
