# SPDX-License-Identifier: Apache-2.0
"""Running the public functions in the simulator and judging what they return by the table of tolerances."""

from __future__ import annotations

from typing import Any

import nki_bn
from nki_bn import BatchNormForward, execute, verify
from nki_bn.comparison import Comparison
from nki_bn.kernels.plan import ForwardPlan, ResidentForwardPlan
from nki_bn.planner import plan_backward, plan_forward, plan_staged, plan_two_read
from nki_bn.problem import Array, BackwardCase, ForwardCase, ForwardProblem
from nki_bn.requests import prepare_backward, prepare_forward
from nki_bn.resident_forward_planner import best_resident_forward
from nki_bn.simulator import RunOptions


def outputs_of(case: BackwardCase, numerics: str = "trn2", accumulate: str = "pairwise", **call: Any) -> list[Array]:
    """(dx, dgamma, dbeta) of a strict run; ``call`` are further arguments of ``batch_norm_bwd``."""
    with execute.simulation(RunOptions(numerics=numerics, accumulate=accumulate)):
        outputs = nki_bn.batch_norm_bwd(**vars(case), **call)
    return list(outputs)  # type: ignore[arg-type]


def assert_agrees(case: BackwardCase, numerics: str = "trn2", accumulate: str = "pairwise", **call: Any) -> list[Array]:
    """Assert that the outputs of the planner's choice and of ``staged`` agree with the reference; return the former."""
    problem = prepare_backward(case, **call).problem
    options = RunOptions(numerics=numerics, accumulate=accumulate)
    plans = (plan_staged(problem), plan_backward(problem)) if problem.count else (None,)
    for plan in plans:
        outputs = outputs_of(case, numerics, accumulate, **{"plan": plan} | call)
        arithmetic = verify.arithmetic_of(problem, plan or plan_backward(problem), options)
        _assert_ok(verify.judge_backward(case, outputs, arithmetic))
    return outputs


def forward_of(
    case: ForwardCase, numerics: str = "trn2", accumulate: str = "pairwise", **call: Any
) -> BatchNormForward:
    """The results of a strict run; ``call`` are further arguments of ``batch_norm_fwd``."""
    with execute.simulation(RunOptions(numerics=numerics, accumulate=accumulate)):
        return nki_bn.batch_norm_fwd(**vars(case), **call)


def assert_forward_agrees(
    case: ForwardCase, numerics: str = "trn2", accumulate: str = "pairwise", **call: Any
) -> BatchNormForward:
    """Assert that the results of all strategies agree with the reference; return those of the planner's choice."""
    problem = prepare_forward(case, **{name: call[name] for name in ("lnc", "target") if name in call}).problem
    options = RunOptions(numerics=numerics, accumulate=accumulate)
    for plan in forward_plans(problem) if problem.count and "plan" not in call else [call.get("plan")]:
        outputs = forward_of(case, numerics, accumulate, **{"plan": plan} | call)
        arithmetic = verify.arithmetic_of(problem, plan or plan_forward(problem), options)
        _assert_ok(verify.judge_forward(case, outputs, arithmetic))
    return outputs


def forward_plans(problem: ForwardProblem) -> list[ForwardPlan | ResidentForwardPlan]:
    """The plans of all strategies that fit; the last of them is the planner's choice, as a test holds."""
    resident = [best.plan for reread in (True, False) if (best := best_resident_forward(problem, reread)) is not None]
    return [plan_two_read(problem), *resident]


def _assert_ok(rows: tuple[Comparison, ...]) -> None:
    assert rows and all(row.ok for row in rows), f"\n{verify.table(rows)}"
