# SPDX-License-Identifier: Apache-2.0
"""What the public function accepts, what it refuses, and that it leaves its inputs alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nki_bn
from nki_bn import execute
from nki_bn.cases import Draw
from nki_bn.execute import BackwardInputs
from nki_bn.kernels.plan import BackwardPlan, Buffer
from nki_bn.planner import plan_backward, plan_staged
from nki_bn.problem import LNC_VARIABLE, BackwardProblem

SHAPE = (2, 3, 4)
ONES = np.ones(SHAPE, np.float32)
COLUMN = np.ones(3, np.float32)
MASK = np.ones(SHAPE, np.uint8)


def arguments(**changes: Any) -> dict[str, Any]:
    """Good arguments with some of them changed."""
    return vars(Draw(SHAPE).case()) | changes


@pytest.fixture
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*args: object) -> None:
        raise AssertionError("a kernel ran")

    monkeypatch.setattr(execute, "run_backward", run)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[BackwardInputs, BackwardProblem, BackwardPlan]]:
    """What the kernel would be given; it returns zeros."""
    calls: list[tuple[BackwardInputs, BackwardProblem, BackwardPlan]] = []

    def run(inputs: BackwardInputs, problem: BackwardProblem, plan: BackwardPlan) -> tuple[Any, ...]:
        calls.append((inputs, problem, plan))
        return np.zeros_like(inputs.dy), np.zeros_like(inputs.gamma), np.zeros_like(inputs.gamma)

    monkeypatch.setattr(execute, "run_backward", run)
    return calls


REFUSED = [
    ({"x": ONES.tolist()}, TypeError, "x must be a NumPy array, got list"),
    ({"x": ONES.astype(np.float64)}, TypeError, "x is float64; accepted: float32, float16 .* x.astype"),
    ({"x": ONES.astype(np.int32)}, TypeError, "x is int32; accepted"),
    ({"x": ONES.astype(">f4")}, TypeError, "x is >f4; accepted"),
    ({"x": ONES.astype(np.float16)}, TypeError, "dy is float32; accepted: float16"),
    ({"dy": ONES.astype(np.float64)}, TypeError, "dy is float64; accepted: float32"),
    ({"dy": None}, TypeError, "dy must be a NumPy array, got NoneType"),
    ({"dy": ONES[:1]}, ValueError, r"dy has shape \(1, 3, 4\); accepted: \(2, 3, 4\)"),
    ({"x": np.ones(3, np.float32)}, ValueError, "rank 1; accepted: ranks 2 to 5"),
    ({"x": np.ones((1, 2, 1, 1, 1, 1), np.float32)}, ValueError, "rank 6; accepted: ranks 2 to 5"),
    ({"x": np.ones((2, 0, 4), np.float32)}, ValueError, r"shape \(2, 0, 4\).* C at least 1"),
    ({"mean": COLUMN.astype(np.float64)}, TypeError, "mean is float64; accepted: float32"),
    ({"mean": COLUMN[:2]}, ValueError, r"mean has shape \(2,\); accepted: \(3,\)"),
    ({"mean": np.ma.masked_array(COLUMN)}, TypeError, "mean is a masked array; masked arrays are not accepted"),
    ({"mean": None}, TypeError, "mean must be a NumPy array, got NoneType"),
    ({"var": COLUMN.astype(np.float16)}, TypeError, "var is float16; accepted: float32"),
    ({"var": COLUMN[:, None]}, ValueError, r"var has shape \(3, 1\); accepted: \(3,\)"),
    ({"var": np.array([1, np.nan, -0.5], np.float32)}, ValueError, "var has -0.5; accepted: values from 0 up"),
    ({"gamma": 1.0}, TypeError, "gamma must be a NumPy array, got float"),
    ({"gamma": COLUMN.astype(ml_dtypes.bfloat16)}, TypeError, "gamma is bfloat16; accepted: float32"),
    ({"gamma": np.ones(4, np.float32)}, ValueError, r"gamma has shape \(4,\); accepted: \(3,\)"),
    ({"beta": COLUMN.astype(np.float64)}, TypeError, "beta is float64; accepted: float32"),
    ({"beta": COLUMN[:0]}, ValueError, r"beta has shape \(0,\); accepted: \(3,\)"),
    ({"eps": "1e-5"}, TypeError, "eps must be a real number, got str"),
    ({"eps": True}, TypeError, "eps must be a real number, got bool"),
    ({"eps": 0.0}, ValueError, "eps is 0.0; accepted in training: finite values above 0"),
    ({"eps": -1e-5}, ValueError, "eps is -1e-05"),
    ({"eps": 1e-46}, ValueError, "eps is 1e-46; accepted in training: finite values above 0 in float32"),
    ({"eps": 1e39, "training": False}, ValueError, r"eps is 1e\+39; accepted in eval: finite .* in float32"),
    ({"eps": 10**400}, ValueError, "eps is beyond the range of a float"),
    ({"eps": float("nan")}, ValueError, "eps is nan"),
    ({"eps": float("inf")}, ValueError, "eps is inf"),
    ({"eps": -1e-5, "training": False}, ValueError, "accepted in eval: finite values from 0 up"),
    ({"training": 1}, TypeError, "training must be a bool, got 1"),
    ({"fuse_relu": "mask"}, TypeError, "fuse_relu must be a bool, got 'mask'"),
    ({"fuse_relu": True, "relu_mask": MASK.astype(bool)}, TypeError, "relu_mask is bool; accepted: uint8"),
    ({"fuse_relu": True, "relu_mask": MASK[:1]}, ValueError, "relu_mask has shape"),
    ({"fuse_relu": True, "relu_mask": 2 * MASK}, ValueError, "relu_mask has 2; accepted: 0 and 1"),
    ({"relu_mask": MASK.astype(np.float32)}, TypeError, "relu_mask is float32; accepted: uint8"),
    ({"relu_mask": MASK[..., :1]}, ValueError, "relu_mask has shape"),
    ({"need": "dx"}, TypeError, "need must be an iterable of output names, got 'dx'"),
    ({"need": 3}, TypeError, "need must be an iterable of output names, got 3"),
    ({"need": np.array("dx")}, TypeError, "need must be an iterable .*; accepted names: dx, dgamma, dbeta"),
    ({"need": np.ones(3)}, TypeError, "need must be an iterable .*; accepted names: dx, dgamma, dbeta"),
    ({"need": ("dx", "dy")}, ValueError, "need has 'dy'; accepted names: dx, dgamma, dbeta"),
    ({"residual": ONES.tolist()}, TypeError, "residual must be a NumPy array, got list"),
    ({"residual": ONES.astype(np.float16)}, TypeError, "residual is float16; accepted: float32"),
    ({"residual": ONES[:1], "fuse_relu": True}, ValueError, r"residual has shape \(1, 3, 4\); accepted: \(2, 3, 4\)"),
    ({"residual_grad": True, "fuse_relu": True}, ValueError, "residual and relu_mask are None; accepted with residual"),
    ({"residual_grad": 0}, TypeError, "residual_grad must be a bool, got 0"),
    ({"precision": "fast"}, ValueError, "precision is 'fast' with float32; accepted: 'fast' with 16-bit dtypes"),
    ({"precision": "low"}, ValueError, "precision is 'low'; accepted: high, fast"),
    ({"precision": None}, TypeError, "precision must be a string, got NoneType"),
    ({"lnc": 3}, ValueError, "lnc is 3; accepted on trn2: 1 or 2"),
    ({"lnc": 0}, ValueError, "lnc is 0; accepted on trn2: 1 or 2"),
    ({"lnc": 2, "target": "trn1"}, ValueError, "lnc is 2; accepted on trn1: 1"),
    ({"lnc": 2.0}, TypeError, "lnc must be an int, got float"),
    ({"lnc": True}, TypeError, "lnc must be an int, got bool"),
    ({"target": "trn9"}, ValueError, "target 'trn9' is unknown; accepted: trn1"),
    ({"target": 2}, TypeError, "target must be a string, got int"),
    ({"plan": "staged"}, TypeError, "plan must be a BackwardPlan, a ResidentPlan, a TransposedPlan or None, got str"),
]


@pytest.mark.usefixtures("no_kernel")
@pytest.mark.parametrize(("changes", "error", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_refusals_name_argument_received_and_accepted(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        nki_bn.batch_norm_bwd(**arguments(**changes))


@pytest.mark.usefixtures("no_kernel")
@pytest.mark.parametrize("setting", ["3", "two", ""])
def test_a_bad_lnc_variable_is_named(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setenv(LNC_VARIABLE, setting)
    with pytest.raises(ValueError, match=f"{LNC_VARIABLE} is '{setting}'; accepted on trn2: 1 or 2"):
        nki_bn.batch_norm_bwd(**arguments())


@pytest.mark.usefixtures("no_kernel")
@pytest.mark.parametrize(
    ("made_for", "field"),
    [
        ({"training": False}, "training"),
        ({"relu": "recompute"}, "relu"),
        ({"need": ("dx",)}, "need_dgamma"),
        ({"need": ("dgamma", "dbeta")}, "need_dx"),
        ({"need": ("dx", "dgamma", "dbeta", "dresidual")}, "need_dresidual"),
        ({"shape": (2, 3, 4, 6)}, "shape"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"lnc": 1}, "cores"),
    ],
)
def test_a_plan_for_other_work_is_refused(made_for: dict[str, Any], field: str) -> None:
    plan = plan_backward(BackwardProblem(**{"shape": SHAPE, "dtype": "float32"} | made_for))
    with pytest.raises(ValueError, match=f"plan has {field}="):
        nki_bn.batch_norm_bwd(**arguments(plan=plan))


@pytest.mark.usefixtures("no_kernel")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"folded": True}, "plan has folded=True; accepted for this call: False"),
        ({"bands": 0}, "plan has bands=0; accepted: integers from 1 up"),
        ({"f_tile": -4}, "plan has f_tile=-4; accepted: integers from 1 up"),
        ({"interleave": 1.0}, "plan has interleave=1.0; accepted: integers from 1 up"),
        ({"sbuf_bytes": 4}, "plan has sbuf_bytes=4; accepted: .* the total of its buffers"),
        (
            {"buffers": (Buffer("dy", 1, 2**16, "float32"),), "sbuf_bytes": 2**18},
            "plan has sbuf_bytes=262144; accepted on trn2: at most",
        ),
    ],
)
def test_a_plan_that_cannot_be_right_is_refused(changes: dict[str, Any], message: str) -> None:
    plan = replace(plan_staged(BackwardProblem(SHAPE, "float32")), **changes)
    with pytest.raises(ValueError, match=message):
        nki_bn.batch_norm_bwd(**arguments(plan=plan))


@pytest.mark.parametrize(
    ("setting", "lnc", "target", "expected"),
    [
        (None, None, "trn2", 2),
        (None, None, "trn3", 2),
        (None, None, "trn1", 1),
        ("1", None, "trn2", 1),
        ("2", None, "gen3", 2),
        ("2", 1, "trn2", 1),
    ],
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
    nki_bn.batch_norm_bwd(**arguments(lnc=lnc, target=target))
    assert recorded[0][1].lnc == expected


def test_the_kernel_gets_contiguous_arrays_in_its_layout(recorded: list[Any]) -> None:
    x = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(5, 4, 3, 2).transpose(3, 2, 1, 0)
    mask = np.asfortranarray(x > 7, np.uint8)
    nki_bn.batch_norm_bwd(**arguments(x=x, dy=x[::-1], fuse_relu=True, relu_mask=mask))
    inputs, problem, _ = recorded[0]
    assert inputs.x.shape == problem.layout == (2, 3, 1, 4, 5) and inputs.gamma.shape == (3, 1)
    assert all(array.flags.c_contiguous for array in (inputs.x, inputs.dy, inputs.relu_mask))
    assert np.array_equal(inputs.x[:, :, 0], x) and np.array_equal(inputs.dy[:, :, 0], x[::-1])
    assert np.array_equal(inputs.relu_mask[:, :, 0], mask)


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((2, 3), (2, 3, 1, 1, 1)),
        ((2, 3, 4), (2, 3, 1, 1, 4)),
        ((2, 3, 4, 5), (2, 3, 1, 4, 5)),
        ((2, 3, 4, 5, 6), (2, 3, 4, 5, 6)),
    ],
)
def test_every_rank_has_one_layout(shape: tuple[int, ...], layout: tuple[int, ...]) -> None:
    problem = BackwardProblem(shape, "float32")
    assert problem.layout == layout
    assert (problem.batch, problem.channels, problem.count) == (2, 3, math.prod(shape) // 3)


@pytest.mark.parametrize(
    ("changes", "relu", "mask_passed"),
    [
        ({}, "none", False),
        ({"relu_mask": MASK}, "none", False),
        ({"relu_mask": 7 * MASK}, "none", False),
        ({"fuse_relu": True}, "recompute", False),
        ({"fuse_relu": True, "relu_mask": MASK}, "mask", True),
        ({"fuse_relu": np.bool_(True)}, "recompute", False),
    ],
)
def test_the_mask_is_used_only_under_a_relu(
    recorded: list[Any], changes: dict[str, Any], relu: str, mask_passed: bool
) -> None:
    nki_bn.batch_norm_bwd(**arguments(**changes))
    inputs, problem, plan = recorded[0]
    assert problem.relu == plan.relu == relu and (inputs.relu_mask is not None) == mask_passed


@pytest.mark.parametrize(
    ("changes", "read", "need_dresidual"),
    [
        ({"residual": ONES}, False, False),
        ({"residual": ONES, "residual_grad": True}, False, True),
        ({"residual": ONES, "fuse_relu": True}, True, False),
        ({"residual": ONES, "fuse_relu": True, "residual_grad": True}, True, True),
        ({"residual": ONES, "fuse_relu": True, "relu_mask": MASK, "residual_grad": True}, False, True),
        ({"fuse_relu": True, "relu_mask": MASK, "residual_grad": True}, False, True),
        ({"residual_grad": np.bool_(True)}, False, True),
    ],
)
def test_the_residual_is_passed_on_only_to_recompute_a_mask(
    recorded: list[Any], changes: dict[str, Any], read: bool, need_dresidual: bool
) -> None:
    nki_bn.batch_norm_bwd(**arguments(**changes))
    inputs, problem, plan = recorded[0]
    assert (inputs.residual is not None) == problem.residual == plan.residual == read
    assert ("dresidual" in problem.need) == plan.need_dresidual == need_dresidual


@pytest.mark.parametrize(
    ("changes", "need"),
    [
        ({}, ("dx", "dgamma", "dbeta")),
        ({"need": ["dbeta", "dx", "dbeta"]}, ("dx", "dbeta")),
        ({"gamma": None}, ("dx", "dbeta")),
        ({"beta": None}, ("dx", "dgamma")),
        ({"gamma": None, "beta": None, "need": iter(["dx", "dgamma"])}, ("dx",)),
    ],
)
def test_outputs_that_are_not_needed_are_none(
    recorded: list[Any], changes: dict[str, Any], need: tuple[str, ...]
) -> None:
    outputs = nki_bn.batch_norm_bwd(**arguments(**changes))
    _, problem, plan = recorded[0]
    assert problem.need == need
    names = ("dx", "dgamma", "dbeta")
    assert tuple(name for name, output in zip(names, outputs, strict=True) if output is not None) == need
    assert tuple(name for name in names if getattr(plan, f"need_{name}")) == need


@pytest.mark.usefixtures("no_kernel")
@pytest.mark.parametrize("changes", [{"need": ()}, {"gamma": None, "beta": None, "need": ("dgamma", "dbeta")}])
def test_nothing_needed_runs_nothing(changes: dict[str, Any]) -> None:
    assert nki_bn.batch_norm_bwd(**arguments(**changes)) == (None, None, None)


def test_an_absent_parameter_is_one_or_zero(recorded: list[Any]) -> None:
    nki_bn.batch_norm_bwd(**arguments(gamma=None, beta=None))
    inputs = recorded[0][0]
    assert np.array_equal(inputs.gamma, np.ones((3, 1))) and np.array_equal(inputs.beta, np.zeros((3, 1)))


@pytest.mark.usefixtures("no_kernel")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(0, 3), (0, 3, 4), (2, 3, 0, 5), (0, 3, 2, 2, 2)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_an_empty_batch_gives_an_empty_dx_and_zero_sums(shape: tuple[int, ...], dtype: Any, training: bool) -> None:
    empty = np.zeros(shape, dtype)
    dx, dgamma, dbeta = nki_bn.batch_norm_bwd(**arguments(x=empty, dy=empty, training=training))
    assert dx is not None and dx.shape == shape and dx.dtype == dtype
    for total in (dgamma, dbeta):
        assert total is not None and total.dtype == np.float32 and np.array_equal(total, np.zeros(3))
    *_, dresidual = nki_bn.batch_norm_bwd(**arguments(x=empty, dy=empty, training=training, residual_grad=True))
    assert dresidual is not None and dresidual.shape == shape and dresidual.dtype == dtype


@pytest.mark.parametrize("changes", [{"eps": 0, "training": False}, {"eps": np.float32(1e-3)}, {"eps": 1}])
def test_accepted_eps(recorded: list[Any], changes: dict[str, Any]) -> None:
    nki_bn.batch_norm_bwd(**arguments(**changes))
    assert recorded[0][0].eps == float(changes["eps"]) and type(recorded[0][0].eps) is float


@pytest.mark.parametrize("fuse_relu", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_inputs_are_not_written_to(dtype: str, fuse_relu: bool) -> None:
    given = vars(Draw(SHAPE, dtype).case("mask" if fuse_relu else "none"))
    arrays = {name: value for name, value in given.items() if isinstance(value, np.ndarray)}
    before = {name: value.tobytes() for name, value in arrays.items()}
    for value in arrays.values():
        value.setflags(write=False)
    dx, dgamma, dbeta = nki_bn.batch_norm_bwd(**given)
    assert {name: value.tobytes() for name, value in arrays.items()} == before
    for output, like in ((dx, given["x"]), (dgamma, given["gamma"]), (dbeta, given["beta"])):
        assert output is not None and output.dtype == like.dtype and output.shape == like.shape
        assert not any(np.shares_memory(output, value) for value in arrays.values())


def test_layout_in_memory_does_not_matter() -> None:
    given = vars(Draw((2, 3, 4, 5)).case())
    views = given | {name: np.asfortranarray(given[name]) for name in ("x", "dy")}
    views |= {name: np.repeat(given[name], 2)[::2] for name in ("mean", "var", "gamma", "beta")}
    for plain, strided in zip(nki_bn.batch_norm_bwd(**given), nki_bn.batch_norm_bwd(**views), strict=True):
        assert plain is not None and strided is not None and np.array_equal(plain, strided)
