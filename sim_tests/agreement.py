# SPDX-License-Identifier: Apache-2.0
"""Running the public function in the simulator and judging what it returns by the table of tolerances."""

from __future__ import annotations

from typing import Any

import nki_bn
from nki_bn import execute, ops, verify
from nki_bn.planner import plan_backward
from nki_bn.problem import Array, BackwardCase
from nki_bn.simulator import RunOptions


def outputs_of(case: BackwardCase, numerics: str = "trn2", accumulate: str = "pairwise", **call: Any) -> list[Array]:
    """(dx, dgamma, dbeta) of a strict run; ``call`` are further arguments of ``batch_norm_bwd``."""
    with execute.simulation(RunOptions(numerics=numerics, accumulate=accumulate)):
        outputs = nki_bn.batch_norm_bwd(**vars(case), **call)
    return list(outputs)  # type: ignore[arg-type]


def assert_agrees(case: BackwardCase, numerics: str = "trn2", accumulate: str = "pairwise", **call: Any) -> list[Array]:
    """Assert that the outputs agree with the reference, and return them."""
    outputs = outputs_of(case, numerics, accumulate, **call)
    problem = ops.prepare(case, **call).problem
    options = RunOptions(numerics=numerics, accumulate=accumulate)
    arithmetic = verify.arithmetic_of(problem, plan_backward(problem), options)
    rows = verify.judge_backward(case, outputs, arithmetic)
    assert rows and all(row.ok for row in rows), f"\n{verify.table(rows)}"
    return outputs
