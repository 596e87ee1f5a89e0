# SPDX-License-Identifier: Apache-2.0
"""The choice between candidates, its limits, and its refusals."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest

import nki_bn
from nki_bn import fitting, planner, predict, predict_resident_fwd, transposed_planner
from nki_bn.explanation import explain
from nki_bn.hardware import load_target
from nki_bn.kernels.plan import BackwardPlan, total_bytes
from nki_bn.kernels.sizing import PARTITIONS, SBUF_SLACK_BYTES, STATS_COLUMNS
from nki_bn.pipeline import Pipeline
from nki_bn.planner import candidates, plan, plan_staged, plan_two_read, remembered_candidates
from nki_bn.predict import INSTRUCTIONS
from nki_bn.problem import GRADIENTS, BackwardProblem, ForwardProblem, Problem
from nki_bn.resident_planner import best_resident
from nki_bn.transposed_planner import SHORT_ROW

LAYERS = ((32, 64, 56, 56), (32, 1024, 14, 14), (32, 2048, 7, 7), (256, 4096), (2, 32, 64, 128, 128), (1, 3, 5))
# Operations of all candidates of a problem together: a Python operation is about 2 microseconds.
MOST_OPERATIONS = 30_000
# Where statistics are given, groups below ``LONG_GROUP`` chunks are run to their end.
MOST_WITH_STATISTICS = 100_000


@pytest.fixture(autouse=True)
def forget() -> Any:
    """No candidates from another test, which may have changed how they are made."""
    remembered_candidates.cache_clear()
    yield
    remembered_candidates.cache_clear()


@pytest.mark.parametrize("shape", LAYERS)
def test_the_fastest_candidate_is_chosen(shape: tuple[int, ...]) -> None:
    problem = BackwardProblem(shape, "bfloat16", lnc=2)
    found = candidates(problem)
    # What is tried beside staged has to be faster by more than predictions are good.
    times = [
        candidate.prediction.ns * (1 - planner.DOUBT * (candidate.plan.strategy == "staged")) for candidate in found
    ]
    assert times == sorted(times) and plan(problem) == found[0].plan
    strategies = {"staged", "resident"} | ({"transposed"} if problem.spatial < SHORT_ROW else set())
    assert strategies == {candidate.plan.strategy for candidate in found}
    assert len({repr(candidate.plan) for candidate in found}) == len(found)


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Counts the operations of all predictions."""
    steps = itertools.count()
    finish = Pipeline._finish

    def counted(pipeline: Pipeline, done: float) -> float:
        next(steps)
        return finish(pipeline, done)

    monkeypatch.setattr(Pipeline, "_finish", counted)
    return steps


@pytest.mark.parametrize("shape", [*LAYERS, (1, 1000003), (64, 64, 1024, 1024), (4096, 1024, 7, 7), (1, 1, 2**33)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_planning_is_bounded(shape: tuple[int, ...], dtype: str, operations: Any) -> None:
    """However large the problem, only so many plans are predicted, in only so many operations."""
    found = candidates(BackwardProblem(shape, dtype, lnc=1))
    transposed = [candidate for candidate in found if candidate.plan.strategy == "transposed"]
    assert len(transposed) <= transposed_planner.PREDICTED
    assert next(operations) <= MOST_OPERATIONS


@pytest.mark.parametrize("shape", [(10**11, 1), (10**11, 8), (10**9, 1, 100), (10**8, 64), (3, 4, 10**9)])
def test_planning_a_forward_with_given_statistics_is_bounded(shape: tuple[int, ...], operations: Any) -> None:
    """Nothing has to stay in SBUF there, so that a channel of any length fits."""
    assert candidates(ForwardProblem(shape, "bfloat16", training=False, lnc=1))
    assert next(operations) <= MOST_WITH_STATISTICS


def test_a_part_of_a_long_group_tells_what_all_of_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = plan(ForwardProblem((4, 2, 16000, 8000), "bfloat16", training=False, lnc=1))
    whole = predict.predict(chosen)
    monkeypatch.setattr(predict_resident_fwd, "LONG_GROUP", 100)
    part = predict.predict(chosen)
    assert part.steps < whole.steps / 20 and part.ns == pytest.approx(whole.ns, rel=1e-3)
    assert part.instructions == pytest.approx(whole.instructions, rel=1e-3)


@pytest.mark.parametrize("shape", LAYERS)
def test_all_candidates_fit(shape: tuple[int, ...]) -> None:
    budget = load_target("trn2").sbuf_partition_bytes - SBUF_SLACK_BYTES
    for candidate in candidates(BackwardProblem(shape, "float32", lnc=2)):
        assert candidate.plan.sbuf_bytes == total_bytes(candidate.plan.buffers) <= budget


def test_long_programs_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = BackwardProblem((32, 64, 56, 56), "bfloat16", lnc=2)
    free = candidates(problem)
    shorter = [other for other in free if other.prediction.instructions < free[0].prediction.instructions]
    ceiling = max(other.prediction.instructions for other in shorter)
    monkeypatch.setattr(planner, "INSTRUCTIONS", ceiling)
    remembered_candidates.cache_clear()
    held = candidates(problem)
    assert held[0].plan == shorter[0].plan != free[0].plan
    assert free[0].plan in [other.plan for other in held[1:]]


def test_the_shortest_program_is_taken_when_all_are_too_long() -> None:
    found = candidates(BackwardProblem((64, 64, 1024, 1024), "float32", lnc=2))
    counts = [candidate.prediction.instructions for candidate in found]
    assert counts[0] > INSTRUCTIONS and counts == sorted(counts)


def test_small_layers_take_the_strategy_that_is_faster() -> None:
    strategies = {plan(BackwardProblem(shape, "float32", lnc=2)).strategy for shape in ((2, 1, 9), (32, 64, 56, 56))}
    assert strategies == {"staged", "resident"}


def test_trn1_has_no_resident_plan() -> None:
    problem = BackwardProblem((8, 16, 8, 8), "float32", target="trn1", lnc=1)
    assert best_resident(problem) is None and isinstance(plan(problem), BackwardPlan)


@pytest.mark.parametrize(
    "problem",
    [
        BackwardProblem((1, 1, 2**40), "float32"),
        BackwardProblem((2**40, 1), "float32", lnc=1),
        ForwardProblem((1, 1, 2**40), "bfloat16"),
        ForwardProblem((2**30, 1, 2**12), "float32", relu="mask"),
    ],
)
def test_what_does_not_fit_is_refused(problem: Problem) -> None:
    with pytest.raises(ValueError, match="does not fit into 212984 bytes of SBUF") as refusal:
        plan(problem)
    message = str(refusal.value)
    assert str(problem.shape) in message and "largest: " in message
    # The shape it offers does fit, and twice of it does not.
    batch, channels, spatial = eval(message.rpartition(" as of ")[2])
    kind = type(problem)
    smaller = kind((batch, channels, spatial), problem.dtype, relu=problem.relu, lnc=problem.lnc)
    larger = (2 * batch, channels, spatial) if batch > 1 else (1, channels, 2 * spatial)
    limit = load_target("trn2").sbuf_partition_bytes
    assert fitting.fits(smaller, limit)
    assert not fitting.fits(kind(larger, problem.dtype, relu=problem.relu, lnc=problem.lnc), limit)


def test_a_budget_that_nothing_fits_into_is_refused() -> None:
    with pytest.raises(ValueError, match=r"does not fit into 300 bytes.*more SBUF; no part of this shape fits"):
        plan_staged(BackwardProblem((2, 3, 8, 8), "float32"), 300)
    with pytest.raises(ValueError, match="does not fit into 300 bytes"):
        plan_two_read(ForwardProblem((2, 3, 8, 8), "float32"), 300)
    assert best_resident(BackwardProblem((2, 3, 8, 8), "float32"), 300) is None


def test_other_things_are_refused() -> None:
    with pytest.raises(TypeError, match="problem must be a ForwardProblem or a BackwardProblem, got Problem"):
        plan(Problem((2, 3), "float32"))
    # Without a hash, as an array that is taken for a problem.
    for ask in (plan, explain):
        with pytest.raises(TypeError, match="problem must be a ForwardProblem or a BackwardProblem, got ndarray"):
            ask(np.zeros((2, 3), np.float32))  # type: ignore[operator]
    for ask in (plan, explain, plan_staged):
        with pytest.raises(ValueError, match=r"x has shape \(0, 3\), so no kernel .*; accepted: sizes from 1 up"):
            ask(BackwardProblem((0, 3), "float32"))  # type: ignore[operator]


@pytest.mark.parametrize("shape", [(1, 8), (1, 3, 1, 1)])
def test_what_the_op_refuses_has_no_plan(shape: tuple[int, ...]) -> None:
    """One value per channel, of which a backward and given statistics make sense."""
    ones = np.ones(shape[1], np.float32)
    with pytest.raises(ValueError, match="1 value per channel.*accepted in training: more than 1") as refused:
        nki_bn.batch_norm_fwd(np.ones(shape, np.float32), ones, ones)
    for ask in (plan, explain):
        with pytest.raises(ValueError, match=re.escape(str(refused.value))):
            ask(ForwardProblem(shape, "float32"))  # type: ignore[operator]
    assert plan(BackwardProblem(shape, "float32")) and plan(ForwardProblem(shape, "float32", training=False))


@pytest.mark.parametrize("setting", ["trn1", "trn3", "nonsense"])
def test_the_environment_does_not_matter(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = (BackwardProblem((4, 300, 8, 8), "bfloat16", lnc=2), ForwardProblem((4, 300, 8, 8), "bfloat16", lnc=2))
    before = [plan(problem) for problem in problems]
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", setting)
    remembered_candidates.cache_clear()
    assert [plan(problem) for problem in problems] == before


@pytest.mark.parametrize("name", ["trn1", "trn2", "trn3"])
def test_constants_of_kernels_are_those_of_the_targets(name: str) -> None:
    target = load_target(name)
    assert (PARTITIONS, STATS_COLUMNS) == (target.partitions, target.bn_stats_columns)


def test_every_strategy_has_an_order_to_predict() -> None:
    plans = (
        plan_staged(BackwardProblem((2, 3, 4), "float32")),
        plan_two_read(ForwardProblem((2, 3, 4), "float32")),
        *(
            getattr(best, "plan", None)
            for best in (
                best_resident(BackwardProblem((2, 3, 4), "float32")),
                best_resident(BackwardProblem((2, 3, 4), "float32"), strategy="reread"),
                transposed_planner.best_transposed(ForwardProblem((2, 3, 4), "float32")),
            )
        ),
    )
    assert {chosen.strategy for chosen in plans if chosen is not None} == set(predict._ORDERS)
    assert nki_bn.plan is plan


def test_fewer_outputs_take_the_layout_of_all() -> None:
    """So that each output has the same bits whatever else is needed."""
    for shape in LAYERS:
        whole = plan(BackwardProblem(shape, "bfloat16", lnc=2))
        for need in (("dx",), ("dgamma", "dbeta"), ("dx", "dgamma", "dbeta", "dresidual")):
            part = plan(BackwardProblem(shape, "bfloat16", lnc=2, need=need))
            assert [getattr(part, f"need_{name}") for name in GRADIENTS] == [name in need for name in GRADIENTS]
            # A staged plan without dx has no staged gradient to keep.
            outputs = {f"need_{name}" for name in GRADIENTS} | {"buffers", "sbuf_bytes"}
            mine, theirs = (vars(chosen).items() for chosen in (part, whole))
            assert {item for item in mine if item[0] not in outputs} == {i for i in theirs if i[0] not in outputs}
