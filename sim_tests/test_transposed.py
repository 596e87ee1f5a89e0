# SPDX-License-Identifier: Apache-2.0
"""The strategy ``transposed``, forced on small odd shapes: results, order of work, modelled time, planning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_relu_mask import at_the_kink

from nki_bn import execute, ops, planner, verify
from nki_bn.bench.modelled import ModelTimer
from nki_bn.bench.roofline import minimum_bytes
from nki_bn.bench.strategies import PLANNED, plan_of, strategies_of
from nki_bn.bench.timers import Figures
from nki_bn.cases import Draw
from nki_bn.kernels.plan import TransposedForwardPlan, TransposedPlan
from nki_bn.kernels.transposed_layout import TransposedLayout, bank_columns, tile_rows
from nki_bn.kernels.transposed_schedule import DEPTH, Scope, steps_of
from nki_bn.pair import backward_case
from nki_bn.problem import DTYPES, RELU_MODES, Array, BackwardCase, BackwardProblem, ForwardCase, ForwardProblem
from nki_bn.requests import prepare_backward, prepare_forward
from nki_bn.simulator import RunOptions
from nki_bn.transposed_planner import best_transposed, estimated_us
from nki_bn.transposed_planner import plan_of as plan_of_layout

NUMERICS = ("trn2", "ideal")
Problem = BackwardProblem | ForwardProblem


def forced(problem: Problem, **choices: Any) -> Any:
    """The planner's best plan of the strategy, with some of its choices replaced."""
    best = best_transposed(problem)
    assert best is not None
    plan = best.plan
    layout = TransposedLayout(plan.split, plan.group_blocks, plan.tiles, plan.positions, plan.slots, plan.reload)
    return plan_of_layout(problem, replace(layout, **choices))


def backward(case: BackwardCase, options: RunOptions, choices: dict[str, Any], **call: Any) -> list[Any]:
    """The outputs of a forced plan in a strict run, all within their tolerances."""
    request = prepare_backward(case, **call)
    plan = forced(request.problem, **choices)
    with execute.simulation(options):
        outputs = ops.run_backward(request, plan)
    rows = verify.judge_backward(case, outputs, verify.arithmetic_of(request.problem, plan, options))
    assert rows and all(row.ok for row in rows), f"\n{verify.table(rows)}"
    return list(outputs)


def forward(case: ForwardCase, options: RunOptions, choices: dict[str, Any], lnc: int = 2) -> ops.BatchNormForward:
    """Likewise for the forward."""
    request = prepare_forward(case, lnc, "trn2")
    plan = forced(request.problem, **choices)
    with execute.simulation(options):
        outputs = ops.run_forward(request, plan)
    rows = verify.judge_forward(case, outputs, verify.arithmetic_of(request.problem, plan, options))
    assert rows and all(row.ok for row in rows), f"\n{verify.table(rows)}"
    return outputs


# Each with what it is there for: shape, cores, choices of the plan.
LAYOUTS = {
    "one block, a ragged last tile": ((300, 70), 1, {}),
    "blocks of unequal cores, a smaller last block, groups": ((131, 515), 2, {"group_blocks": 1}),
    "a group of two blocks and one of one": ((140, 300), 1, {"group_blocks": 2}),
    "positions, several chunks, a tight ring": ((600, 140, 2), 1, {"group_blocks": 1, "tiles": 1, "slots": 9}),
    "read twice": ((400, 150, 3), 1, {"group_blocks": 1, "tiles": 1, "slots": 2, "reload": True}),
    "batches divided": ((301, 20, 2), 2, {"split": "batch"}),
    "batches divided, read twice": ((601, 20, 2), 2, {"split": "batch", "tiles": 1, "slots": 2, "reload": True}),
    "tiles of few batches": ((80, 5, 7, 7), 2, {}),
    "positions divided": ((9, 6, 100), 2, {}),
    "one channel, one core without work": ((7, 1), 2, {"split": "channel"}),
}
# Every dtype and every kind of ReLU.
KINDS = [("bfloat16", "none"), ("float32", "mask"), ("float16", "recompute")]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("dtype", "relu"), KINDS)
def test_gradients(dtype: str, relu: str, name: str) -> None:
    shape, lnc, choices = LAYOUTS[name]
    case = Draw(shape, dtype, 0.7, 1.3).case(relu, residual=relu == "recompute")
    backward(case, RunOptions(numerics="trn2"), choices, lnc=lnc, residual_grad=relu != "none")


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("dtype", "relu"), KINDS)
def test_outputs(dtype: str, relu: str, name: str) -> None:
    shape, lnc, choices = LAYOUTS[name]
    case = Draw(shape, dtype, 0.7, 1.3).forward(relu, residual=relu == "mask")
    forward(case, RunOptions(numerics="trn2"), choices, lnc)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("relu", RELU_MODES)
@pytest.mark.parametrize("residual", [True, False])
def test_exact_operands_sequential_sums_and_frozen_statistics(residual: bool, relu: str, training: bool) -> None:
    options = RunOptions(numerics="ideal", accumulate="sequential")
    draw = Draw((141, 130, 3), "float16", 0.7, 1.3)
    case = draw.case(relu, training, residual=residual and relu != "none")
    backward(case, options, {}, residual_grad=residual and relu != "none")
    forward(draw.forward(relu, training, residual=residual), options, {})


@pytest.mark.parametrize(("training", "reload"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("relu", ["none", "mask"])
@pytest.mark.parametrize("need", [("dx",), ("dgamma",), ("dbeta",), ("dresidual",), ("dgamma", "dbeta")])
def test_outputs_that_are_not_needed_change_nothing(
    need: tuple[str, ...], reload: bool, relu: str, training: bool
) -> None:
    case = Draw((300, 130)).case(relu, training)
    choices = {"tiles": 1, "slots": 2, "reload": True, "group_blocks": 1} if reload else {}
    names = ("dx", "dgamma", "dbeta", "dresidual")
    options, residual = RunOptions(numerics="trn2"), "dresidual" in need
    whole = dict(zip(names, backward(case, options, choices, lnc=1, residual_grad=residual), strict=False))
    part = tuple(name for name in need if name != "dresidual")
    some = dict(zip(names, backward(case, options, choices, lnc=1, need=part, residual_grad=residual), strict=False))
    assert all(np.array_equal(some[name], whole[name]) for name in need)
    assert all(some[name] is None for name in some if name not in need)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 300),
    st.integers(1, 280),
    st.integers(1, 7),
    st.sampled_from(sorted(DTYPES)),
    st.sampled_from(RELU_MODES),
    st.sampled_from(NUMERICS),
    st.integers(1, 2),
)
def test_any_shape(batch: int, channels: int, spatial: int, dtype: str, relu: str, numerics: str, lnc: int) -> None:
    draw = Draw((batch, channels, spatial), dtype, 0.7, 1.3)
    options = RunOptions(numerics=numerics)
    backward(draw.case(relu), options, {}, lnc=lnc)
    if batch * spatial > 1:
        forward(draw.forward(relu), options, {}, lnc)


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("ratio", [1e3, 1e6])
@pytest.mark.parametrize("relu", RELU_MODES)
def test_a_mean_far_above_the_deviation(relu: str, ratio: float, numerics: str) -> None:
    draw = Draw((150, 9), mean=ratio)
    backward(draw.case(relu), RunOptions(numerics=numerics), {})
    forward(draw.forward(relu), RunOptions(numerics=numerics), {})


@pytest.mark.parametrize("value", [0.0, -3000.1, 5000.7])
def test_a_constant_channel(value: float) -> None:
    """x - mean is 0: y is beta to within gamma*ulp(mean)/sqrt(eps) and 2^-18 of it, and dgamma is as small."""
    drawn = Draw((150, 3, 2)).forward()
    x = drawn.x.copy()
    x[:, 1] = value
    case = replace(drawn, x=x)
    made = forward(case, RunOptions(numerics="trn2"), {})
    assert case.beta is not None and case.gamma is not None
    beta, gamma = float(case.beta[1]), float(case.gamma[1])
    error = abs(gamma) * float(np.spacing(np.float32(abs(value)))) / np.sqrt(case.eps) + 2.0**-18 * abs(beta)
    assert np.abs(made.y[:, 1].astype(np.float64) - beta).max() <= error
    backward(backward_case(case, Draw((150, 3, 2)).gradient(), made.mean, made.var, None), RunOptions(), {})


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("relu", RELU_MODES)
def test_what_is_not_finite_stays_in_its_channel(relu: str, value: float, training: bool) -> None:
    """All other channels have the bits they have without it, and with frozen statistics all other elements."""
    clean = Draw((150, 140, 2), "bfloat16").case(relu, training)
    dy, x = clean.dy.copy(), clean.x.copy()
    dy[3, 1, 1] = x[4, 1, 0] = value
    spoilt = replace(clean, dy=dy, x=x)
    options = RunOptions(numerics="trn2")
    call = {"lnc": 1}
    before, after = backward(clean, options, {}, **call), run_unjudged(spoilt, options, **call)
    others = np.arange(140) != 1
    assert np.array_equal(after[0][:, others], before[0][:, others])
    assert all(np.array_equal(after[i][others], before[i][others]) for i in (1, 2))
    assert not np.isfinite(after[1][1].astype(np.float64))
    if not training and relu != "recompute":
        same = np.ones(dy.shape, np.bool_)
        same[3, 1, 1] = False
        assert np.array_equal(after[0][same], before[0][same])


def run_unjudged(case: BackwardCase, options: RunOptions, **call: Any) -> list[Any]:
    """The outputs of a forced plan, whatever they are."""
    request = prepare_backward(case, **call)
    with execute.simulation(options):
        return list(ops.run_backward(request, forced(request.problem)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("numerics", NUMERICS)
def test_all_strategies_have_the_same_mask(numerics: str, residual: bool, dtype: str) -> None:
    """Saved by either forward, recomputed by this backward and by staged: bit for bit, at the kink of the ReLU."""
    case = at_the_kink(Draw((99, 33), dtype, 0.7, 1.3), numerics, residual, training=False)
    request = prepare_forward(case, 2, "trn2")
    assert isinstance(request.problem, ForwardProblem)
    with execute.simulation(RunOptions(numerics=numerics)):
        saved = [
            ops.run_forward(request, plan).relu_mask
            for plan in (forced(request.problem), planner.plan_two_read(request.problem))
        ]
    assert saved[0] is not None and np.array_equal(saved[0], saved[1]) and 0.2 < saved[0].mean() < 0.8
    again = backward_case(case, np.ones_like(case.x), np.array(case.running_mean), np.array(case.running_var), None)
    for made in recomputed(again, numerics, residual):
        assert np.array_equal(made, saved[0])


def recomputed(case: BackwardCase, numerics: str, residual: bool) -> list[Array]:
    """The mask in this strategy and in ``staged``, seen in the gradient of the residual, or in dx of a dy of ones."""
    request = prepare_backward(case, residual_grad=residual, lnc=1)
    made = []
    with execute.simulation(RunOptions(numerics=numerics)):
        for plan in (forced(request.problem), planner.plan_staged(request.problem)):
            outputs = ops.run_backward(request, plan)
            seen = outputs[3] if residual else outputs[0]
            assert seen is not None
            made.append(seen != 0)
    return made


@given(
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 7),
    st.integers(1, 12),
    st.sampled_from([(True, True, True), (True, False, True), (True, True, False), (False, False, True)]),
    st.booleans(),
)
def test_the_order_of_work(
    blocks: int, together: int, chunks: int, extra: int, kinds: tuple[bool, bool, bool], masks: bool
) -> None:
    """Every job once; none before what it needs was finished three steps earlier; no slot loaded before it is free."""
    firsts, turns, seconds = kinds
    for reload in (False, True) if turns and seconds else (False,):
        slots = extra + 1 if reload or not turns else chunks + extra
        scope = Scope(blocks, together, chunks, slots, masks, firsts, turns and seconds, seconds, reload)
        steps = steps_of(scope)
        jobs = [step for step in steps if step.kind != "load"]
        started = {(step.kind, step.visit, step.block): at for at, step in enumerate(jobs) if step.kind != "idle"}
        assert len(started) == len([step for step in jobs if step.kind != "idle"])
        counts = [sum(kind == name for kind, _, _ in started) for name in ("first", "second", "mask", "turn")]
        wanted = [firsts * chunks * blocks, seconds * chunks * blocks]
        assert counts[:2] == wanted and counts[2] == masks * (1 + reload) * chunks * blocks
        last = {step.visit: at for at, step in enumerate(jobs) if step.kind != "idle"}
        turned = {step.group: at for at, step in enumerate(jobs) if step.kind == "turn"}
        job = 0
        loaded = 0
        for step in steps:
            if step.kind == "load":
                assert step.visit == loaded and (loaded < slots or last[loaded - slots] + DEPTH <= job)
                loaded += 1
                continue
            if step.kind in ("first", "second", "mask"):
                assert step.visit < loaded
                assert step.kind == "mask" or not masks or started["mask", step.visit, step.block] + DEPTH <= job
                assert step.kind != "second" or not scope.turns or turned[step.group] + DEPTH <= job
            job += 1
        assert loaded == scope.visits()


def modelled(problem: Problem, strategy: str = PLANNED) -> Figures:
    return ModelTimer().time(problem, plan_of(problem, strategy))


@pytest.mark.parametrize(
    "problem", [BackwardProblem((4096, 1024), "bfloat16"), ForwardProblem((4096, 1024), "bfloat16")]
)
def test_rows_take_less_than_100_us_and_their_bytes(problem: Problem) -> None:
    plan = planner.plan(problem)
    assert isinstance(plan, TransposedPlan | TransposedForwardPlan) and not plan.reload
    figures = modelled(problem)
    assert figures.time_us < 100 and figures.hbm_bytes <= 1.02 * minimum_bytes(problem)


def test_the_forward_takes_no_longer_than_the_backward() -> None:
    for shape in ((4096, 1024), (1024, 512, 4)):
        forward, backward = (modelled(kind(shape, "bfloat16")).time_us for kind in (ForwardProblem, BackwardProblem))
        assert forward <= backward


def test_what_does_not_fit_is_read_twice() -> None:
    """dy and x twice, dx once: 20 bytes per element of float32."""
    problem = BackwardProblem((1 << 16, 64), "float32", lnc=1)
    plan = planner.plan(problem)
    assert isinstance(plan, TransposedPlan) and plan.reload
    figures = modelled(problem)
    assert 1 <= figures.hbm_bytes / (20 * 64 * 2**16) <= 1.02


# Few and many batches and channels, all short rows; few rows, where other strategies are faster.
SHAPES = [(64, 96), (512, 200), (256, 256, 3), (96, 128, 7), (16, 24, 5), (1, 64)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_planner_takes_it_only_where_it_is_faster(shape: tuple[int, ...], dtype: str) -> None:
    # Running statistics need more than one value per channel: a single example takes given ones.
    training = shape[0] > 1
    for problem, op in ((BackwardProblem(shape, dtype), "bwd"), (ForwardProblem(shape, dtype, training), "fwd")):
        if planner.plan(problem).strategy == "transposed":
            chosen = modelled(problem).time_us
            # The planner does not read twice what can stay in SBUF, be it for a tenth of a microsecond.
            others = [other for other in strategies_of(op) if other != "reread"]
            assert all(chosen <= modelled(problem, other).time_us for other in others)


@pytest.mark.parametrize("shape", [(512, 200), (2048, 256, 3), (700, 128, 7), (4096, 64), (256, 2048)])
@pytest.mark.parametrize("relu", ["none", "mask"])
def test_the_closed_form_is_within_half(relu: str, shape: tuple[int, ...]) -> None:
    """It only ranks layouts; the best by it are predicted."""
    problems: tuple[Problem, ...] = (
        BackwardProblem(shape, "bfloat16", relu=relu),
        ForwardProblem(shape, "float32", relu=relu),
    )
    for problem in problems:
        best = best_transposed(problem)
        assert best is not None
        time = ModelTimer().time(problem, best.plan).time_us
        assert 1 / 2 < estimated_us(problem, best.plan) / time < 3 / 2


@pytest.mark.parametrize("problem", [BackwardProblem, ForwardProblem])
def test_trn1_keeps_to_the_other_strategies_and_trn3_does_not(problem: type[Problem]) -> None:
    assert best_transposed(problem((4096, 256), "bfloat16", lnc=1, target="trn1")) is None
    assert planner.plan(problem((4096, 256), "bfloat16", lnc=1, target="trn1")).strategy in ("staged", "two_read")
    assert planner.plan(problem((4096, 256), "bfloat16", target="trn3")).strategy == "transposed"


def test_a_tile_with_its_positions_fits_into_a_bank() -> None:
    for dtype in DTYPES:
        assert all(0 < tile_rows(s, dtype) * s <= bank_columns(dtype) for s in range(1, 65))
        assert tile_rows(1, dtype) == 128
    with pytest.raises(AssertionError, match="a bank takes at most 512 positions, got 513"):
        tile_rows(513, "float32")


def test_sizes_are_refused_that_make_no_plan() -> None:
    case = Draw((16, 4)).case()
    plan = forced(prepare_backward(case).problem)
    with pytest.raises(ValueError, match="plan has group_blocks=0; accepted: integers from 1 up"):
        ops.run_backward(prepare_backward(case), replace(plan, group_blocks=0))
