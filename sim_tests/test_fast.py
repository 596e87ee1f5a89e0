# SPDX-License-Identifier: Apache-2.0
"""``precision="fast"``: the x-term of dx in the dtype of x, within its tolerance and no further."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from agreement import assert_agrees, outputs_of

from nki_bn import verify
from nki_bn.cases import Draw
from nki_bn.cli import main
from nki_bn.kernels.plan import ResidentPlan
from nki_bn.kernels.resident_layout import BackwardTask, ResidentLayout, resident_plan
from nki_bn.planner import candidates, plan, plan_staged
from nki_bn.predict import predict
from nki_bn.problem import RELU_MODES, BackwardCase, BackwardProblem
from nki_bn.resident_planner import best_resident
from nki_bn.tolerances import Arithmetic, half_unit

SIXTEEN_BITS = ("float16", "bfloat16")
NEED = (True, True, True, False)


def planned(case: BackwardCase, tensor: bool, fast: bool = True, training: bool = True) -> ResidentPlan:
    """A plan whose sums are made by Tensor or not, in several groups and chunks."""
    shape = case.x.shape[0], case.x.shape[1], int(np.prod(case.x.shape[2:]))
    sets, channels, eighths = (2, 1, 4) if tensor else (1, 2, 3)
    layout = ResidentLayout(
        split="none",
        set_channels=channels,
        group_sets=sets,
        batch_bands=2,
        space_bands=4,
        last_batch_bands=2,
        last_space_bands=4,
        chunk=40,
        slots=12,
        tensor_sums=tensor,
        eighths=eighths,
        term_eighths=0,
        short_start=False,
        short_end=False,
    )
    task = BackwardTask(shape, case.x.dtype.name, 1, case.relu, False, training, NEED, fast)
    chosen: ResidentPlan = resident_plan(task, layout)
    return chosen


def following_x(dtype: str) -> BackwardCase:
    """dy is x without its mean, so that dx is all but 0 and its x-term is as large as dy."""
    case = Draw((4, 6, 80), dtype, mean=0.5).case()
    mean = case.mean[:, None]
    return replace(case, dy=(case.x.astype(np.float32) - mean).astype(case.x.dtype))


@pytest.mark.parametrize("numerics", ["trn2", "ideal"])
@pytest.mark.parametrize("relu", RELU_MODES)
@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_fast_agrees(dtype: str, relu: str, numerics: str) -> None:
    for shape in ((4, 6, 80), (3, 5, 7), (2, 1), (1, 130, 3)):
        assert_agrees(Draw(shape, dtype, mean=1).case(relu), numerics, precision="fast")


@pytest.mark.parametrize("tensor", [True, False])
@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_the_x_term_is_rounded_and_nothing_else(dtype: str, tensor: bool) -> None:
    """The sums keep their bits; dx needs the tolerance of fast where its x-term is large, and has no need of more."""
    case = following_x(dtype)
    high = outputs_of(case, lnc=1, plan=planned(case, tensor, fast=False))
    fast = outputs_of(case, lnc=1, plan=planned(case, tensor), precision="fast")
    assert np.array_equal(high[1], fast[1]) and np.array_equal(high[2], fast[2])
    arithmetic = Arithmetic(dtype, tensor=tensor)
    assert not verify.judge_backward(case, fast, arithmetic)[0].ok
    assert verify.judge_backward(case, fast, replace(arithmetic, fast=True))[0].ok
    assert verify.judge_backward(case, high, arithmetic)[0].ok
    moved = np.abs(np.float64(fast[0]) - np.float64(high[0]))
    terms = np.abs(np.float64(case.dy)) * np.abs(np.float64(case.gamma))[:, None] / np.sqrt(case.var)[:, None]
    # Half a unit of the x-term, which is about the other term here, and the roundings of both dx.
    assert 0 < moved.max() and np.all(moved <= 4 * half_unit(1.1 * terms + 0.1, case.x.dtype))


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_without_an_x_term_fast_changes_nothing(dtype: str) -> None:
    case = Draw((4, 6, 80), dtype).case(training=False)
    high, fast = (planned(case, False, value, training=False) for value in (False, True))
    outputs = outputs_of(case, lnc=1, plan=high), outputs_of(case, lnc=1, plan=fast, precision="fast")
    assert all(np.array_equal(first, second) for first, second in zip(*outputs, strict=True))


def test_fast_is_planned_and_predicted() -> None:
    for shape in ((32, 64, 56, 56), (32, 512, 28, 28)):
        high, fast = (BackwardProblem(shape, "bfloat16", precision=precision) for precision in ("high", "fast"))
        chosen = plan(fast)
        assert isinstance(chosen, ResidentPlan) and chosen.fast and not getattr(plan(high), "fast", True)
        assert predict(chosen).ns < predict(plan(high)).ns
        assert all(candidate.plan.strategy == "staged" or candidate.plan.fast for candidate in candidates(fast))


def test_fast_is_refused_where_it_means_nothing() -> None:
    with pytest.raises(ValueError, match="precision is 'fast' with float32; accepted: 'fast' with 16-bit dtypes"):
        BackwardProblem((2, 3), "float32", precision="fast")
    case = Draw((4, 6, 80), "bfloat16").case()
    with pytest.raises(ValueError, match="plan has fast=True; accepted for this call: False, or precision 'fast'"):
        outputs_of(case, lnc=1, plan=planned(case, False))


def test_high_plans_are_taken_by_fast_calls() -> None:
    """They are more exact than has to be."""
    case = Draw((4, 6, 80), "bfloat16").case()
    problem = BackwardProblem(case.x.shape, "bfloat16", lnc=1)
    best = best_resident(problem)
    assert best is not None
    for chosen in (plan_staged(problem), best.plan):
        same = outputs_of(case, lnc=1, plan=chosen, precision="fast"), outputs_of(case, lnc=1, plan=chosen)
        assert all(np.array_equal(first, second) for first, second in zip(*same, strict=True))


@pytest.mark.parametrize("command", [["verify", "--op", "bwd"], ["plan"]])
def test_commands_know_fast(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--shape", "32,64,28,28", "--precision", "fast"]
    assert main([*command, *shape, "--dtype", "bfloat16"]) == 0
    assert ", fast" in capsys.readouterr().out.splitlines()[0]
    with pytest.raises(SystemExit) as stop:
        main([*command, *shape, "--dtype", "float32"])
    assert stop.value.code == 2 and "'fast' with float32" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["verify", "--op", "pair"], ["plan", "--op", "fwd"]])
def test_commands_refuse_fast_without_a_backward_alone(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*command, "--shape", "2,3,4", "--dtype", "bfloat16", "--precision", "fast"])
    assert stop.value.code == 2 and "--precision fast cannot go with --op" in capsys.readouterr().err
