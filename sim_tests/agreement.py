# SPDX-License-Identifier: Apache-2.0
"""Running the public functions in the simulator and judging what they return by the table of tolerances."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import nki_bn
from nki_bn import BatchNormForward, execute, verify
from nki_bn.comparison import Comparison
from nki_bn.kernels.plan import ForwardPlan, ResidentForwardPlan
from nki_bn.planner import candidates, plan_backward, plan_forward, plan_two_read
from nki_bn.predict import Plan
from nki_bn.problem import Array, BackwardCase, BackwardProblem, ForwardCase, ForwardProblem
from nki_bn.requests import prepare_backward, prepare_forward
from nki_bn.resident_forward_planner import best_resident_forward
from nki_bn.simulator import RunOptions
from nki_bn.tolerances import Arithmetic


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
    """Assert that the results of the planner's choice agree with the reference, and return them.

    For a part of the cases, drawn by their problem, those of another strategy have to agree, too.
    """
    problem = prepare_forward(case, **{name: call[name] for name in ("lnc", "target") if name in call}).problem
    options = RunOptions(numerics=numerics, accumulate=accumulate)
    plans = (
        [call.get("plan")] if "plan" in call or not problem.count else [*other_plans(problem), plan_forward(problem)]
    )
    for plan in plans:
        outputs = forward_of(case, numerics, accumulate, **call | {"plan": plan})
        assert_forward_ok(case, outputs, verify.arithmetic_of(problem, plan or plan_forward(problem), options))
    return outputs


def other_plans(problem: ForwardProblem) -> list[ForwardPlan | ResidentForwardPlan]:
    """For one problem in eight the plan of ``two_read``, for another one that of ``reread``, if any fits."""
    drawn = crc32(repr(problem).encode()) % 8
    if drawn == 0:
        return [plan_two_read(problem)]
    best = best_resident_forward(problem, reread=True) if drawn == 1 else None
    return [] if best is None else [best.plan]


def assert_forward_ok(case: ForwardCase, outputs: BatchNormForward, arithmetic: Arithmetic) -> None:
    """Assert that the results of a forward agree with the reference."""
    _assert_ok(verify.judge_forward(case, outputs, arithmetic))


def _assert_ok(rows: tuple[Comparison, ...]) -> None:
    assert rows and all(row.ok for row in rows), f"\n{verify.table(rows)}"
