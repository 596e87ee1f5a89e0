# SPDX-License-Identifier: Apache-2.0
"""What ``batch_norm_fwd`` accepts, what it refuses, and that it leaves its inputs alone."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nki_bn
from nki_bn import ForwardProblem, execute
from nki_bn.cases import Draw
from nki_bn.execute import ForwardInputs
from nki_bn.planner import plan_forward, plan_staged
from nki_bn.predict import Plan
from nki_bn.problem import LNC_VARIABLE, BackwardProblem

SHAPE = (2, 3, 4)
ONES = np.ones(SHAPE, np.float32)
COLUMN = np.ones(3, np.float32)
NEGATIVE = np.array([1, np.nan, -0.5], np.float32)


def arguments(**changes: Any) -> dict[str, Any]:
    """Good arguments with some of them changed."""
    return vars(Draw(SHAPE).forward("mask", residual=True)) | changes


@pytest.fixture
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*args: object) -> None:
        raise AssertionError("a kernel ran")

    monkeypatch.setattr(execute, "run_forward", run)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ForwardInputs, ForwardProblem, Plan]]:
    """What the kernel would be given; it returns zeros."""
    calls: list[tuple[ForwardInputs, ForwardProblem, Plan]] = []

    def run(inputs: ForwardInputs, problem: ForwardProblem, plan: Plan) -> tuple[Any, ...]:
        calls.append((inputs, problem, plan))
        columns = np.zeros((4, problem.channels), np.float32)
        return np.zeros_like(inputs.x), *columns, np.zeros_like(inputs.x, np.uint8)

    monkeypatch.setattr(execute, "run_forward", run)
    return calls


REFUSED = [
    ({"x": ONES.tolist()}, TypeError, "x must be a NumPy array, got list"),
    ({"x": ONES.astype(np.float64)}, TypeError, "x is float64; accepted: float32, float16 .* x.astype"),
    ({"x": ONES.astype(np.int32)}, TypeError, "x is int32; accepted"),
    ({"x": ONES.astype(">f4")}, TypeError, "x is >f4; accepted"),
    ({"x": np.ones(3, np.float32)}, ValueError, "rank 1; accepted: ranks 2 to 5"),
    ({"x": np.ones((1, 2, 1, 1, 1, 1), np.float32)}, ValueError, "rank 6; accepted: ranks 2 to 5"),
    ({"x": np.ones((2, 0, 4), np.float32)}, ValueError, r"shape \(2, 0, 4\).* C at least 1"),
    (
        {"x": ONES[:1, :, :1], "residual": None},
        ValueError,
        r"x has 1 value per channel, shape \(1, 3, 1\); accepted in training: more than 1",
    ),
    (
        {"x": np.ones((1, 3), np.float32), "residual": None, "running_mean": None, "running_var": None},
        ValueError,
        r"x has 1 value per channel, shape \(1, 3\); accepted in training: more than 1",
    ),
    ({"x": np.ma.masked_array(ONES)}, TypeError, "x is a masked array; masked arrays are not accepted"),
    ({"gamma": 1.0}, TypeError, "gamma must be a NumPy array, got float"),
    ({"gamma": COLUMN.astype(ml_dtypes.bfloat16)}, TypeError, "gamma is bfloat16; accepted: float32"),
    ({"gamma": np.ones(4, np.float32)}, ValueError, r"gamma has shape \(4,\); accepted: \(3,\)"),
    ({"beta": COLUMN.astype(np.float64)}, TypeError, "beta is float64; accepted: float32"),
    ({"beta": COLUMN[:0]}, ValueError, r"beta has shape \(0,\); accepted: \(3,\)"),
    ({"running_mean": COLUMN.astype(np.float64)}, TypeError, "running_mean is float64; accepted: float32"),
    ({"running_mean": COLUMN[:2]}, ValueError, r"running_mean has shape \(2,\); accepted: \(3,\)"),
    ({"running_mean": [0, 0, 0]}, TypeError, "running_mean must be a NumPy array, got list"),
    ({"running_var": COLUMN.astype(np.float16)}, TypeError, "running_var is float16; accepted: float32"),
    ({"running_var": COLUMN[:, None]}, ValueError, r"running_var has shape \(3, 1\); accepted: \(3,\)"),
    ({"running_mean": None}, ValueError, "running_mean is None; accepted: both .* or, in training, neither"),
    ({"running_var": None}, ValueError, "running_var is None; accepted: both .* or, in training, neither"),
    ({"running_mean": None, "training": False}, ValueError, "running_mean is None; accepted: both"),
    ({"running_var": None, "training": False}, ValueError, "running_var is None; accepted: both"),
    ({"running_mean": None, "running_var": None, "training": False}, ValueError, "running_mean is None; accepted"),
    ({"running_var": NEGATIVE, "training": False}, ValueError, "running_var has -0.5; accepted: values from 0 up"),
    ({"momentum": "0.1"}, TypeError, "momentum must be a real number, got str"),
    ({"momentum": True}, TypeError, "momentum must be a real number, got bool"),
    ({"momentum": float("nan")}, ValueError, "momentum is nan; accepted: finite values and None"),
    ({"momentum": -float("inf")}, ValueError, "momentum is -inf; accepted: finite values and None"),
    ({"momentum": 1e39}, ValueError, r"momentum is 1e\+39; accepted: finite values and None, in float32"),
    ({"momentum": 10**400}, ValueError, "momentum is beyond the range of a float; accepted: finite values"),
    ({"num_batches_tracked": 10**400}, ValueError, r"num_batches_tracked is 2\*\*63 or more; accepted: integers"),
    ({"momentum": None}, ValueError, "num_batches_tracked is None; accepted with momentum=None: the number of"),
    ({"momentum": None, "num_batches_tracked": -1}, ValueError, "num_batches_tracked is -1; accepted: integers"),
    ({"momentum": None, "num_batches_tracked": 1.0}, TypeError, "num_batches_tracked must be .* got float"),
    ({"num_batches_tracked": True}, TypeError, "num_batches_tracked must be an int or None, got bool"),
    ({"eps": "1e-5"}, TypeError, "eps must be a real number, got str"),
    ({"eps": 0.0}, ValueError, "eps is 0.0; accepted in training: finite values above 0"),
    ({"eps": 10**400, "training": False}, ValueError, "eps is beyond the range of a float; accepted: finite values"),
    ({"eps": float("nan")}, ValueError, "eps is nan"),
    ({"eps": -1e-5, "training": False}, ValueError, "accepted in eval: finite values from 0 up"),
    ({"training": 1}, TypeError, "training must be a bool, got 1"),
    ({"fuse_relu": "mask"}, TypeError, "fuse_relu must be a bool, got 'mask'"),
    ({"save_relu_mask": None}, TypeError, "save_relu_mask must be a bool, got None"),
    ({"save_relu_mask": 0, "fuse_relu": False}, TypeError, "save_relu_mask must be a bool, got 0"),
    ({"residual": ONES.tolist()}, TypeError, "residual must be a NumPy array, got list"),
    ({"residual": ONES.astype(np.float16)}, TypeError, "residual is float16; accepted: float32"),
    ({"residual": ONES[:1]}, ValueError, r"residual has shape \(1, 3, 4\); accepted: \(2, 3, 4\)"),
    ({"lnc": 3}, ValueError, "lnc is 3; accepted on trn2: 1 or 2"),
    ({"lnc": 2, "target": "trn1"}, ValueError, "lnc is 2; accepted on trn1: 1"),
    ({"lnc": 2.0}, TypeError, "lnc must be an int, got float"),
    ({"target": "trn9"}, ValueError, "target 'trn9' is unknown; accepted: trn1"),
    ({"target": 2}, TypeError, "target must be a string, got int"),
    (
        {"plan": "two_read"},
        TypeError,
        "plan must be a ForwardPlan, a ResidentForwardPlan, a TransposedForwardPlan or None, got str",
    ),
    (
        {"plan": plan_staged(BackwardProblem(SHAPE, "float32"))},
        TypeError,
        "a TransposedForwardPlan or None, got BackwardPlan",
    ),
]


@pytest.mark.usefixtures("no_kernel")
@pytest.mark.parametrize(("changes", "error", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_refusals_name_argument_received_and_accepted(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    given = arguments(**changes)
    before = {name: value.tobytes() for name, value in given.items() if isinstance(value, np.ndarray)}
    with pytest.raises(error, match=message):
        nki_bn.batch_norm_fwd(**given)
    assert {name: given[name].tobytes() for name in before} == before


@pytest.mark.usefixtures("no_kernel")
@pytest.mark.parametrize(
    ("made_for", "field"),
    [
        ({"training": False}, "training"),
        ({"relu": "none"}, "relu"),
        ({"relu": "recompute"}, "need_mask"),
        ({"residual": False}, "residual"),
    ],
)
def test_a_plan_for_other_work_is_refused(made_for: dict[str, Any], field: str) -> None:
    plan = plan_forward(ForwardProblem(SHAPE, "float32", **({"relu": "mask", "residual": True} | made_for)))
    with pytest.raises(ValueError, match=f"plan has {field}="):
        nki_bn.batch_norm_fwd(**arguments(plan=plan))


@pytest.mark.parametrize(
    ("setting", "lnc", "target", "expected"),
    [(None, None, "trn2", 2), (None, None, "trn1", 1), ("1", None, "trn2", 1), ("2", 1, "trn2", 1)],
)
def test_cores(
    monkeypatch: pytest.MonkeyPatch,
    recorded: list[Any],
    setting: str | None,
    lnc: int | None,
    target: str,
    expected: int,
) -> None:
    monkeypatch.delenv(LNC_VARIABLE, raising=False)
    if setting is not None:
        monkeypatch.setenv(LNC_VARIABLE, setting)
    nki_bn.batch_norm_fwd(**arguments(lnc=lnc, target=target))
    assert recorded[0][1].lnc == expected


def test_the_kernel_gets_contiguous_arrays_in_its_layout(recorded: list[Any]) -> None:
    x = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(5, 4, 3, 2).transpose(3, 2, 1, 0)
    columns = {name: np.arange(6, dtype=np.float32)[::2] for name in ("running_mean", "running_var")}
    nki_bn.batch_norm_fwd(**arguments(x=x, residual=x[::-1], **columns))
    inputs, problem, _ = recorded[0]
    assert inputs.x.shape == problem.layout == (2, 3, 1, 4, 5) and inputs.gamma.shape == (3, 1)
    assert all(array.flags.c_contiguous for array in (inputs.x, inputs.residual, inputs.running_mean))
    assert np.array_equal(inputs.x[:, :, 0], x) and np.array_equal(inputs.residual[:, :, 0], x[::-1])
    assert np.array_equal(inputs.running_var, [0, 2, 4])


@pytest.mark.parametrize(
    ("changes", "relu"),
    [
        ({}, "mask"),
        ({"save_relu_mask": False}, "recompute"),
        ({"fuse_relu": False}, "none"),
        ({"fuse_relu": np.bool_(True), "save_relu_mask": np.bool_(False)}, "recompute"),
    ],
)
@pytest.mark.parametrize("residual", [None, ONES])
def test_problem_and_plan_say_what_is_asked(
    recorded: list[Any], changes: dict[str, Any], relu: str, residual: Any
) -> None:
    nki_bn.batch_norm_fwd(**arguments(residual=residual, **changes))
    _, problem, plan = recorded[0]
    assert problem.relu == relu and problem.residual == plan.residual == (residual is not None)
    assert plan.relu == (relu != "none") and plan.need_mask == (relu == "mask") and plan.need_y


@pytest.mark.parametrize(
    ("changes", "weight"),
    [
        ({}, 0.1),
        ({"momentum": np.float32(0.5)}, 0.5),
        ({"momentum": -3}, -3.0),
        ({"momentum": None, "num_batches_tracked": 0}, 1.0),
        ({"momentum": None, "num_batches_tracked": np.int64(3)}, 0.25),
        ({"momentum": 0.2, "num_batches_tracked": 3}, 0.2),
    ],
)
def test_weight_of_a_batch(recorded: list[Any], changes: dict[str, Any], weight: float) -> None:
    nki_bn.batch_norm_fwd(**arguments(**changes))
    assert recorded[0][0].momentum == weight and type(recorded[0][0].momentum) is float


@pytest.mark.parametrize("changes", [{"training": False}, {"running_mean": None, "running_var": None}])
def test_the_number_of_batches_is_needed_only_where_it_counts(recorded: list[Any], changes: dict[str, Any]) -> None:
    nki_bn.batch_norm_fwd(**arguments(momentum=None, **changes))
    assert len(recorded) == 1


@pytest.mark.parametrize("training", [True, False])
def test_variances_that_pass(training: bool) -> None:
    """NaN in eval spoils its own channel; in training the running variance is averaged, whatever it is."""
    running_var = NEGATIVE if training else np.abs(NEGATIVE)
    got = nki_bn.batch_norm_fwd(**arguments(running_var=running_var, training=training))
    assert np.isnan(got.y).all((0, 2)).tolist() == [False, not training, False]
    assert got.running_var is not None and np.isnan(got.running_var).tolist() == [False, True, False]


def test_an_absent_parameter_is_one_or_zero(recorded: list[Any]) -> None:
    nki_bn.batch_norm_fwd(**arguments(gamma=None, beta=None))
    inputs = recorded[0][0]
    assert np.array_equal(inputs.gamma, np.ones((3, 1))) and np.array_equal(inputs.beta, np.zeros((3, 1)))


@pytest.mark.usefixtures("no_kernel")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(0, 3), (0, 3, 4), (2, 3, 0, 5), (0, 3, 2, 2, 2)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_an_empty_batch_leaves_the_running_statistics_alone(shape: tuple[int, ...], dtype: Any, training: bool) -> None:
    empty = np.zeros(shape, dtype)
    given = arguments(x=empty, residual=empty, training=training, momentum=None, num_batches_tracked=0)
    got = nki_bn.batch_norm_fwd(**given)
    assert got.relu_mask is not None and got.y.shape == got.relu_mask.shape == shape
    assert got.y.dtype == dtype and got.relu_mask.dtype == np.uint8
    for name in ("mean", "var"):
        running = getattr(got, f"running_{name}")
        assert np.array_equal(running, given[f"running_{name}"])
        assert not np.shares_memory(running, given[f"running_{name}"])
        assert np.array_equal(getattr(got, name), np.zeros(3) if training else running)
    bare = nki_bn.batch_norm_fwd(empty, None, None)
    assert bare.running_mean is None and bare.running_var is None and bare.relu_mask is None


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("relu", ["none", "mask"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_inputs_are_not_written_to(dtype: str, relu: str, training: bool) -> None:
    given = vars(Draw(SHAPE, dtype).forward(relu, training, residual=True))
    arrays = {name: value for name, value in given.items() if isinstance(value, np.ndarray)}
    before = {name: value.tobytes() for name, value in arrays.items()}
    for value in arrays.values():
        value.setflags(write=False)
    got = nki_bn.batch_norm_fwd(**given)
    assert {name: value.tobytes() for name, value in arrays.items()} == before
    outputs = [output for output in got if output is not None]
    assert got.y.dtype == given["x"].dtype and all(output.dtype == np.float32 for output in outputs[1:5])
    for output in outputs:
        assert output.flags.writeable and not any(np.shares_memory(output, value) for value in arrays.values())


def test_layout_in_memory_does_not_matter() -> None:
    given = vars(Draw((2, 3, 4, 5)).forward("mask", residual=True))
    columns = ("gamma", "beta", "running_mean", "running_var")
    views = given | {name: np.asfortranarray(given[name]) for name in ("x", "residual")}
    views |= {name: np.repeat(given[name], 2)[::2] for name in columns}
    for plain, strided in zip(nki_bn.batch_norm_fwd(**given), nki_bn.batch_norm_fwd(**views), strict=True):
        assert plain is not None and strided is not None and np.array_equal(plain, strided)


def test_results_have_names_and_an_order() -> None:
    got = nki_bn.batch_norm_fwd(**arguments())
    y, mean, var, running_mean, running_var, relu_mask = got
    assert y is got.y and mean is got.mean and var is got.var and relu_mask is got.relu_mask
    assert running_mean is got.running_mean and running_var is got.running_var
