# SPDX-License-Identifier: Apache-2.0
"""Running the public functions in the simulator and judging what they return by the table of tolerances."""

from __future__ import annotations

from typing import Any

import nki_bn
from nki_bn import BatchNormForward, execute, verify
from nki_bn.comparison import Comparison
from nki_bn.planner import candidates, plan_backward, plan_forward
from nki_bn.predict import Plan
from nki_bn.problem import Array, BackwardCase, BackwardProblem, ForwardCase
from nki_bn.requests import prepare_backward, prepare_forward
from nki_bn.simulator import RunOptions


def outputs_of(case: BackwardCase, numerics: str = "trn2", accumulate: str = "pairwise", **call: Any) -> list[Array]:
    """(dx, dgamma, dbeta) of a strict run; ``call`` are further arguments of ``batch_norm_bwd``."""
    with execute.simulation(RunOptions(numerics=numerics, accumulate=accumulate)):
        outputs = nki_bn.batch_norm_bwd(**vars(case), **call)
    return list(outputs)  # type: ignore[arg-type]


def assert_agrees(case: BackwardCase, numerics: str = "trn2", accumulate: str = "pairwise", **call: Any) -> list[Array]:
    """Assert that every strategy agrees with the reference; return the outputs of the planner's choice."""
    problem = prepare_backward(case, **call).problem
    options = RunOptions(numerics=numerics, accumulate=accumulate)
    for plan in strategies_of(problem) if problem.count else (None,):
        outputs = outputs_of(case, numerics, accumulate, **{"plan": plan} | call)
        arithmetic = verify.arithmetic_of(problem, plan or plan_backward(problem), options)
        _assert_ok(verify.judge_backward(case, outputs, arithmetic))
    return outputs


def strategies_of(problem: BackwardProblem) -> list[Plan]:
    """The fastest plan of each strategy that fits, the planner's choice last."""
    fastest = {candidate.plan.strategy: candidate.plan for candidate in reversed(candidates(problem))}
    chosen = candidates(problem)[0].plan
    return [plan for plan in fastest.values() if plan != chosen] + [chosen]


def forward_of(
    case: ForwardCase, numerics: str = "trn2", accumulate: str = "pairwise", **call: Any
) -> BatchNormForward:
    """The results of a strict run; ``call`` are further arguments of ``batch_norm_fwd``."""
    with execute.simulation(RunOptions(numerics=numerics, accumulate=accumulate)):
        return nki_bn.batch_norm_fwd(**vars(case), **call)


def assert_forward_agrees(
    case: ForwardCase, numerics: str = "trn2", accumulate: str = "pairwise", **call: Any
) -> BatchNormForward:
    """Assert that the results agree with the reference, and return them."""
    outputs = forward_of(case, numerics, accumulate, **call)
    problem = prepare_forward(case, **call).problem
    options = RunOptions(numerics=numerics, accumulate=accumulate)
    arithmetic = verify.arithmetic_of(problem, plan_forward(problem), options)
    _assert_ok(verify.judge_forward(case, outputs, arithmetic))
    return outputs


def _assert_ok(rows: tuple[Comparison, ...]) -> None:
    assert rows and all(row.ok for row in rows), f"\n{verify.table(rows)}"
