# SPDX-License-Identifier: Apache-2.0
"""Every kernel and strategy at the smallest shape that has ragged parts, for the simulator and for a device alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from nki_bn import execute, ops, reference, requests, tolerances, verify
from nki_bn.bench.launches import EPS
from nki_bn.bench.modelled import ModelTimer
from nki_bn.bench.record import OPERATIONS, Case
from nki_bn.bench.strategies import plan_of, problem_of, strategies_of
from nki_bn.bench.timers import Timer
from nki_bn.bench.workloads import load_model
from nki_bn.cases import Draw
from nki_bn.comparison import Comparison, compare, half_unit
from nki_bn.problem import GRADIENTS, RELU_MODES, Array, BackwardCase, BackwardProblem, ForwardCase
from nki_bn.tolerances import Allowance

# 40 channels divide no quadrant of partitions, 63 positions no chunk; transposed kernels take rows.
IMAGES, ROWS = (3, 40, 7, 9), (70, 40)
MEAN = 1.0


def cases() -> Iterator[Case]:
    """Every operation with each of its strategies, on one core and two, both dtypes, the ReLU modes in turn."""
    for op in OPERATIONS:
        # With given statistics nothing is read twice.
        strategies = [name for name in strategies_of(op) if (op, name) != ("eval", "reread")]
        for turn, strategy in enumerate(strategies):
            for lnc in (1, 2):
                for dtype in ("float32", "bfloat16"):
                    shape = ROWS if strategy == "transposed" else IMAGES
                    relu = RELU_MODES[(turn + lnc + (dtype == "float32")) % len(RELU_MODES)]
                    layer = "x".join(map(str, shape[1:]))
                    yield Case("test", layer, 1, op, shape, dtype, relu, "high", lnc, "trn2", strategy)


def name_of(case: Case) -> str:
    """What the tests call it."""
    return f"{case.op}-{case.strategy}-{case.dtype}-{case.relu}-lnc{case.lnc}"


CASES = {name_of(case): case for case in cases()}
# A layer that is long enough for a fixed cost to matter little, per operation.
LARGE = {
    f"{op}-large": Case("test", "256x56x56", 1, op, (32, 256, 56, 56), "bfloat16", "none", "high", 2, "trn2", "planned")
    for op in OPERATIONS
}
MODELS = ("cifar8", "resnet18", "mlp")
LAYERS = {
    f"{op}-{model}-{layer.name}": Case(
        model, layer.name, 1, op, layer.shape(16), "bfloat16", "none", "high", 2, "trn2", "planned"
    )
    for model in MODELS
    for layer in load_model(model).layers
    for op in OPERATIONS
}


def all_results() -> dict[str, Array]:
    """The outputs of all cases, as ``name/output``."""
    return {f"{name}/{key}": values for name in CASES for key, values in results(name).items()}


def results(name: str) -> dict[str, Array]:
    """The outputs of a case by name, on whatever nki is in use; strict where that is the embedded simulator."""
    case = CASES[name]
    problem = problem_of(case)
    plan, drawn = plan_of(problem, case.strategy), drawn_for(case)
    with execute.simulation(verify.DEFAULT_OPTIONS):
        if isinstance(drawn, BackwardCase):
            gradients = ops.run_backward(requests.prepare_backward(drawn, lnc=case.lnc, target=case.target), plan)
            return dict(zip(GRADIENTS, gradients, strict=False))  # type: ignore[arg-type]
        outputs = ops.run_forward(requests.prepare_forward(drawn, case.lnc, case.target), plan)
        return {key: value for key, value in outputs._asdict().items() if value is not None}


def drawn_for(case: Case) -> BackwardCase | ForwardCase:
    """The inputs of a case."""
    draw = Draw(case.shape, case.dtype, MEAN)
    if case.op == "bwd":
        return draw.case(case.relu, eps=EPS)
    return draw.forward(case.relu, case.op == "fwd", EPS)


def judged(name: str, got: dict[str, Array]) -> tuple[Comparison, ...]:
    """``got`` against the float64 reference, by the table of tolerances."""
    case = CASES[name]
    problem, drawn = problem_of(case), drawn_for(case)
    arithmetic = verify.arithmetic_of(problem, plan_of(problem, case.strategy), verify.DEFAULT_OPTIONS)
    if isinstance(drawn, BackwardCase):
        return verify.judge_backward(drawn, [got.get(key) for key in GRADIENTS], arithmetic)
    fields = {key: got.get(key) for key in ops.BatchNormForward._fields}
    return verify.judge_forward(drawn, ops.BatchNormForward(**fields), arithmetic)  # type: ignore[arg-type]


def differences(name: str, got: dict[str, Array], other: dict[str, Array]) -> list[Comparison]:
    """Two runs of one case: each may be off the reference by what the table allows, so they may differ by twice that.

    Of a forward y is compared, which besides moves with its statistics: by gamma*rstd per unit of the mean, and by
    half of gamma*x_hat per share of the variance, |x_hat| being at most 8 in these cases.
    """
    case = CASES[name]
    problem, drawn = problem_of(case), drawn_for(case)
    arithmetic = verify.arithmetic_of(problem, plan_of(problem, case.strategy), verify.DEFAULT_OPTIONS)
    allowed: dict[str, Allowance] = {}
    if isinstance(drawn, BackwardCase):
        assert isinstance(problem, BackwardProblem)
        mask, undecided = drawn.relu_mask, np.zeros(drawn.x.shape, np.bool_)
        if drawn.relu == "recompute":
            z = reference.pre_activation(drawn.x, drawn.mean, drawn.var, drawn.gamma, drawn.beta, drawn.eps)
            mask, undecided = z.value > 0, tolerances.near_kink(drawn, z, arithmetic)
        given = (drawn.dy, drawn.x, drawn.mean, drawn.var, drawn.gamma, drawn.eps, mask, drawn.training)
        allowed = tolerances.backward(drawn, reference.batch_norm_bwd(*given), arithmetic, undecided)
    else:
        given_statistics = other["mean"], other["var"]
        shared = (drawn.x, drawn.gamma, drawn.beta, drawn.eps, drawn.fuse_relu, None, given_statistics)
        error = tolerances.forward(drawn, reference.batch_norm_fwd(*shared), arithmetic)
        moved = np.abs(got["mean"] - other["mean"]) / np.sqrt(other["var"] + drawn.eps)
        moved = moved + np.abs(got["var"] - other["var"]) / (other["var"] + drawn.eps) * 4
        allowed = {"y": tolerances.everywhere(error + reference.column(moved * np.abs(drawn.gamma), drawn.x))}
    return [_compared(key, got[key], other[key], allowed[key]) for key in got if key in allowed]


def _compared(name: str, got: Array, other: Array, allowed: Allowance) -> Comparison:
    want = other.astype(np.float64)
    twice = replace(allowed, error=2 * allowed.error + half_unit(np.abs(want), got.dtype))
    return compare(name, got, want, twice)


def modelled_times() -> dict[str, Array]:
    """Microseconds of the cases of ``LARGE`` by the timing model; the embedded simulator only."""
    return {name: np.array(time_us(case, ModelTimer())) for name, case in LARGE.items()}


def time_us(case: Case, timer: Timer) -> float:
    """The time of a case."""
    problem = problem_of(case)
    time = timer.time(problem, plan_of(problem, case.strategy)).time_us
    assert time is not None
    return time
