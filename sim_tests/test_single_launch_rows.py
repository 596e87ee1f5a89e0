# SPDX-License-Identifier: Apache-2.0
"""Synchronised steps of one launch with short rows: the strategy ``transposed`` exchanges with replicas too."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from single_steps import Step, run_and_judge
from test_transposed import forced

from nki_bn.predict import Candidate, predict
from nki_bn.problem import BackwardProblem, ForwardProblem, Problem
from nki_bn.simulator.timing import model
from nki_bn.synchronised import MODES, launches
from nki_bn.synchronised.launches import Exchange, backward_plans, dry_trace, forward_plans, meetings

BF16 = ml_dtypes.bfloat16

STEPS: dict[str, tuple[Step, dict[str, Any]]] = {
    "three blocks at once, the last of 44 channels": (
        Step((40, 24), 300, (), BF16, "one_round", 1, "mask", True),
        {"group_blocks": 3},
    ),
    "blocks by twos, channels divided, an empty replica": (
        Step((20, 0, 24), 600, (2,), np.float32, "two_round", 2, "recompute"),
        {"group_blocks": 2},
    ),
    "batches divided": (Step((9, 8), 5, (3,), np.float16, "one_round", 2, "mask"), {"split": "batch"}),
    "batches divided, an empty replica": (Step((9, 0, 9), 5, (), BF16, "two_round", 2), {"split": "batch"}),
    "read again": (Step((300, 7), 3, (2,), np.float32, "two_round", 1), {"reload": True, "slots": 1, "tiles": 1}),
    "a mean of a thousand deviations": (Step((20, 3, 9), 4, (), np.float32, "one_round", 1, mean=2e3), {}),
    "a mean of a million deviations": (Step((20, 3, 9), 4, (2,), np.float32, "two_round", 2, mean=2e6), {}),
    "eight replicas": (Step((3, 1, 0, 2, 5, 1, 1, 3), 7, (2, 3), BF16, "two_round", 1, "recompute", True), {}),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_that_of_the_global_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step, choices = STEPS[name]

    def only(problem: Problem, *_: int) -> list[Candidate]:
        plan = forced(problem, **choices)
        return [Candidate(plan, predict(plan))]

    monkeypatch.setattr(launches, "exchanging_candidates", only)
    monkeypatch.setattr(launches, "candidates", only)
    run_and_judge(step)


@pytest.mark.parametrize("mode", MODES)
def test_a_group_of_blocks_has_one_exchange(mode: str) -> None:
    """All blocks of a group in one collective: 384 channels are three in the two-round step, and two in the other."""
    forward, backward = ForwardProblem((256, 384), "bfloat16", lnc=1), BackwardProblem((256, 384), "bfloat16", lnc=1)
    exchange = Exchange((forward.count,) * 4, mode)
    plans = forward_plans([forward] * 4, exchange)[0], backward_plans([backward] * 4, exchange)[0]
    assert all(plan.strategy == "transposed" and plan.group_blocks == 3 for plan in plans)
    met = [meetings(problem, plan, mode, 4) for problem, plan in zip((forward, backward), plans, strict=True)]
    wanted = ((128, 3), (128, 3)) if mode == "two_round" else ((128, 9),)
    assert met == [(wanted,), (((128, 6),),)]
    assert sum(len(core) for found in met for core in found) == {"two_round": 3, "one_round": 2}[mode]


def test_exchanges_count_in_the_choice() -> None:
    """Rows of single values: ``resident`` is faster but for its exchanges, four groups of which each core has."""
    problem = ForwardProblem((32, 512), "bfloat16", lnc=2)
    exchange = Exchange((problem.count,) * 16, "two_round")
    chosen = forward_plans([problem] * 16, exchange)[0]
    found = launches._fitting(problem, launches.exchanging_candidates(problem, 190_000), 0)
    assert found[0].plan.strategy == "resident" and chosen.strategy == "transposed"
    slower, faster = (model(dry_trace(problem, plan, "two_round", 16)).total for plan in (found[0].plan, chosen))
    assert faster < slower
