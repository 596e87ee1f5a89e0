# SPDX-License-Identifier: Apache-2.0
"""The forward strategies ``resident`` and ``reread``, forced, on the smallest shapes that take their paths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from agreement import assert_forward_ok, forward_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nki_bn import BatchNormForward, ForwardProblem, tolerances, verify
from nki_bn.bench.modelled import ModelTimer
from nki_bn.cases import Draw
from nki_bn.kernels.plan import ForwardPlan, ResidentForwardPlan
from nki_bn.kernels.resident_fwd_plan import ForwardLayout, resident_forward_plan
from nki_bn.planner import candidates, plan_forward
from nki_bn.problem import DTYPES, RELU_MODES, ForwardCase
from nki_bn.requests import prepare_forward
from nki_bn.resident_forward_planner import best_resident_forward
from nki_bn.simulator import RunOptions

STRATEGIES = ("resident", "reread")


def plan_for(case: ForwardCase, strategy: str, layout: ForwardLayout, lnc: int = 1) -> ResidentForwardPlan:
    """The plan of one layout, with three slots for phase 2."""
    problem = prepare_forward(case, lnc).problem
    shape = problem.batch, problem.channels, problem.spatial
    fused = (True, problem.relu != "none", problem.relu == "mask", problem.residual)
    choices = layout, 3, strategy == "reread", problem.training, fused
    plan: ResidentForwardPlan = resident_forward_plan(shape, problem.dtype, lnc, *choices)
    return plan


def check(
    case: ForwardCase, plan: ResidentForwardPlan, numerics: str = "trn2", accumulate: str = "pairwise"
) -> BatchNormForward:
    """Assert that a run under this plan agrees with the reference; return its results."""
    outputs = forward_of(case, numerics, accumulate, plan=plan, lnc=plan.cores)
    problem = prepare_forward(case, plan.cores).problem
    options = RunOptions(numerics=numerics, accumulate=accumulate)
    assert_forward_ok(case, outputs, verify.arithmetic_of(problem, plan, options))
    return outputs


# Bands of batches that are ragged, of space, of both; one band; a smaller last group; one value per band.
LAYOUTS = [
    ((5, 7, 31), ForwardLayout("none", 3, 2, 1, 31, 7)),
    ((5, 7, 31), ForwardLayout("none", 7, 1, 4, 8, 13)),
    ((5, 7, 31), ForwardLayout("none", 4, 2, 5, 6, 9)),
    ((5, 7, 31), ForwardLayout("none", 7, 1, 1, 62, 4)),
    ((4, 3, 1100), ForwardLayout("none", 2, 2, 1, 1100, 3)),
    ((4, 129), ForwardLayout("none", 32, 4, 1, 1, 2)),
    ((1, 1, 6), ForwardLayout("none", 1, 1, 6, 1, 2)),
]


@pytest.mark.parametrize("relu", RELU_MODES)
@pytest.mark.parametrize(("shape", "layout"), LAYOUTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(dtype: str, strategy: str, shape: tuple[int, ...], layout: ForwardLayout, relu: str) -> None:
    case = Draw(shape, dtype, mean=2).forward(relu, residual=relu == "mask")
    check(case, plan_for(case, strategy, layout))


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("split", ["channel", "batch", "spatial"])
def test_two_cores(split: str, strategy: str, training: bool, residual: bool) -> None:
    """Uneven shares: the moments of the larger one count for more."""
    case = Draw((5, 3, 7), "bfloat16", mean=1).forward("none", training, residual=residual)
    layout = ForwardLayout(split, 2, 2, 3, 4, 8)
    check(case, plan_for(case, strategy, layout, lnc=2))


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_short_rings(data: st.DataObject) -> None:
    """Plans for as little SBUF as they may have: the chunks of phase 1 wait for those of phase 2."""
    draw = data.draw
    shape = (draw(st.integers(2, 6)), draw(st.sampled_from([1, 2, 5, 33])), draw(st.integers(1, 90)))
    modes = draw(st.sampled_from(["trn2", "ideal"])), draw(st.sampled_from(["pairwise", "sequential"]))
    draws = Draw(shape, draw(st.sampled_from(list(DTYPES))), mean=draw(st.sampled_from([0.0, 5.0])))
    case = draws.forward(draw(st.sampled_from(RELU_MODES)), draw(st.booleans()), residual=draw(st.booleans()))
    problem = prepare_forward(case, draw(st.sampled_from([1, 2]))).problem
    budget = draw(st.integers(1200, 6000))
    best = best_resident_forward(problem, draw(st.booleans()), budget)
    assume(best is not None)
    assert best is not None and best.plan.sbuf_bytes <= budget
    check(case, best.plan, *modes)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ratio", [1e3, 1e6])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mean_far_above_the_deviation(dtype: str, ratio: float, strategy: str) -> None:
    """At 1e6 the 16-bit formats do not tell the values apart: the channel is constant, or nearly so."""
    scale = 1e-3 if dtype == "float16" else 1.0
    case = Draw((4, 3, 50), dtype, mean=ratio * scale, std=scale).forward()
    check(case, plan_for(case, strategy, ForwardLayout("none", 2, 2, 2, 25, 9)))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_channel(value: float, dtype: str, strategy: str) -> None:
    case = Draw((4, 4, 6), dtype).forward("none")
    plan = plan_for(case, strategy, ForwardLayout("none", 4, 2, 3, 2, 6))
    clean = check(case, plan)
    x = case.x.copy()
    x[1, 2, 3] = value
    got = check(replace(case, x=x), plan)
    others = [0, 1, 3]
    assert np.array_equal(got.y[:, others], clean.y[:, others]) and not np.isfinite(got.y[:, 2].astype(float)).any()
    assert np.array_equal(got.var[others], clean.var[others]) and not np.isfinite(got.var[2])


@pytest.mark.parametrize("training", [True, False])
def test_float16_differences_beyond_the_largest_number(training: bool) -> None:
    """x - hi up to 1.2e5, above the 65504 that float16 ends with; and a given mean beyond it."""
    case = Draw((8, 2, 16), "float16").forward("none", training)
    x = np.full(case.x.shape, 6e4, np.float16)
    x[0, :, 0] = -6e4
    if not training:
        mean, var = np.array([1e5, -5e4], np.float32), np.array([1e9, 4e9], np.float32)
        case = replace(case, running_mean=mean, running_var=var)
    got = check(replace(case, x=x), plan_for(case, "resident", ForwardLayout("none", 2, 4, 2, 8, 9)))
    assert np.isfinite(got.y).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_difference_is_rounded_only_far_from_the_mean(dtype: str) -> None:
    x = np.array([[3.0, 5.0, 100.0]]).astype(DTYPES[dtype]).reshape(1, 1, 3)
    column = np.array([4.0], np.float32)
    error = tolerances.narrow_error(x, column, column, None, 0.0)
    assert error[0, 0, 0] == error[0, 0, 1] == 0
    bits = 8 if dtype == "bfloat16" else 11
    # 100 - 4 lies between 64 and 128: half a unit is 64*2^-bits, and rstd is 1/2.
    assert error[0, 0, 2] == 64 * 2.0**-bits / 2


@pytest.mark.parametrize("training", [True, False])
def test_the_planner_takes_resident_where_it_fits(training: bool) -> None:
    """In training, where ``two_read`` reads again what SBUF lacks; ``reread`` only where a group does not fit."""
    problem = ForwardProblem((32, 64, 784), "float32", training)
    offered = {candidate.plan.strategy for candidate in candidates(problem)}
    assert offered == {"resident", "two_read"} and (plan_forward(problem).strategy == "resident" or not training)
    # One channel of 2^24 values on each core: 512 KiB of a partition.
    large = {candidate.plan.strategy for candidate in candidates(replace(problem, shape=(2**13, 2, 2**11)))}
    assert large == {"reread" if training else "resident", "two_read"}
    first = replace(problem, target="trn1", lnc=1)
    assert best_resident_forward(first, reread=False) is None and isinstance(plan_forward(first), ForwardPlan)


@pytest.mark.parametrize(("strategy", "elements"), [("resident", 2), ("reread", 3)])
def test_bytes_per_element(strategy: str, elements: int) -> None:
    """x once or twice, y once; beside them what is per channel."""
    problem = ForwardProblem((8, 4, 4096), "bfloat16", lnc=1)
    best = best_resident_forward(problem, strategy == "reread")
    assert best is not None and best.plan.strategy == strategy
    moved: Any = ModelTimer().time(problem, best.plan).hbm_bytes
    assert 0 <= moved - elements * 2 * 8 * 4 * 4096 < 4 * 4096
