# SPDX-License-Identifier: Apache-2.0
"""The functions on NumPy arrays, forward and backward: odd memory, odd values and odd arguments."""

from __future__ import annotations

import fractions
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

import nki_bn
from fuzz.surface import Surface, check_refusal
from nki_bn import verify
from nki_bn.cases import Draw
from nki_bn.planner import plan_backward, plan_forward
from nki_bn.problem import Array, BackwardCase, ForwardCase
from nki_bn.requests import prepare_backward, prepare_forward

SHAPES = ((2, 3, 4), (5, 1), (1, 2, 3, 3), (2, 130, 2), (3, 2, 2, 1, 2), (0, 3, 4), (2, 3, 0), (1, 3), (4, 3, 1))
COLUMNS = ("gamma", "beta", "running_mean", "running_var", "mean", "var")
# Columns from here on may overflow float32 in scale and shift.
LARGE = 1e30
# Not arguments of the case, but of the call.
WAYS = ("lnc", "target", "need", "residual_grad", "precision", "plan")


def layouts() -> st.SearchStrategy[Callable[[Array], Array]]:
    """The same elements in other memory."""

    def padded(array: Array) -> Array:
        wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1] + 1), array.dtype)
        wide[..., 1::2] = array
        return wide[..., 1::2]

    def unaligned(array: Array) -> Array:
        made = np.frombuffer(b"\0" + array.tobytes(), np.uint8)[1:].view(array.dtype) if array.size else array
        return made.reshape(array.shape)

    def locked(array: Array) -> Array:
        made = array.copy()
        made.flags.writeable = False
        return made

    return st.sampled_from(
        [lambda a: a, np.asfortranarray, padded, unaligned, locked, lambda a: np.ascontiguousarray(a[::-1])[::-1]]
    )


def odd_values(shape: tuple[int, ...]) -> st.SearchStrategy[Any]:
    """What an argument should not be, or might be after all."""
    channels = shape[1]
    dtypes = [np.float64, np.float16, ml_dtypes.bfloat16, np.int32, np.bool_, np.complex64, ">f4", "U3", object]
    arrays = [np.ones(some, dtype) for some in (shape, (channels,)) for dtype in dtypes]
    arrays += [np.ones(some, np.float32) for some in ((), (channels + 1,), (1, channels), (1,) * 6, shape[::-1])]
    arrays += [np.full(channels, value, np.float32) for value in (np.nan, np.inf, -1.0, 0.0, 1e-45, 3e38)]
    arrays += [np.full(shape, value, np.float32) for value in (np.nan, np.inf, 3e38, 0.0)]
    arrays += [np.ma.masked_array(np.ones(channels, np.float32)), np.ones(shape, np.uint8), np.full(shape, 2, np.uint8)]
    numbers = [0, 1, 2, -1, 0.0, 0.5, -0.1, 1e-5, 1e-50, 1e39, 10**400, 2**63, np.nan, np.inf, True, np.float64(0.25)]
    numbers += [np.float32(1e-3), np.int64(2), np.bool_(False), fractions.Fraction(1, 3), 1 + 2j]
    others = [
        None,
        "x",
        "dx",
        "trn1",
        "gen3",
        "fast",
        b"x",
        [],
        [1.0],
        (),
        ("dx",),
        {"dx"},
        {},
        object(),
        print,
        range(3),
    ]
    return st.sampled_from([*arrays, *numbers, *others])


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    """Forward or backward, its arguments by name, and which of them are odd."""
    shape, relu = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(["none", "mask", "recompute"]))
    mean, std = draw(st.sampled_from([0.0, 3.0, -200.0])), draw(st.sampled_from([1.0, 1e-3, 40.0]))
    how = Draw(shape, draw(st.sampled_from(["float32", "float16", "bfloat16"])), mean, std, draw(st.integers(0, 9)))
    training = draw(st.booleans())
    side = draw(st.sampled_from(["fwd", "bwd"]))
    given = relu, training, draw(st.sampled_from([1e-5, 1e-3])), draw(st.booleans())
    with np.errstate(all="ignore"):
        made = dict(vars(how.forward(*given) if side == "fwd" else how.case(*given)))
    ways = WAYS[:2] + WAYS[5:] if side == "fwd" else WAYS
    made |= {"lnc": draw(st.sampled_from([None, 1, 2]))}
    if side == "bwd":
        made["need"] = draw(st.sampled_from([("dx", "dgamma", "dbeta"), ("dx",), ("dgamma",), ()]))
        made["precision"] = draw(st.sampled_from(["high", "high", "fast"]))
    for name, value in made.items():
        if isinstance(value, np.ndarray):
            made[name] = draw(layouts())(value)
    odd = tuple(draw(st.lists(st.sampled_from(sorted({*made, *ways})), max_size=2, unique=True)))
    return side, made | {name: draw(odd_values(shape)) for name in odd}, odd


def check_call(example: tuple[str, dict[str, Any], tuple[str, ...]]) -> None:
    """Right results, or a documented refusal, and inputs that are as they were."""
    side, arguments, odd = example
    before = {name: _snapshot(value) for name, value in arguments.items()}
    function = nki_bn.batch_norm_fwd if side == "fwd" else nki_bn.batch_norm_bwd
    try:
        with np.errstate(all="ignore"):
            made = function(**arguments)
    except Exception as error:
        check_refusal(error, {*arguments, *WAYS, "dtype", "shape"})
    else:
        assert "plan" not in odd or arguments["plan"] is None
        if not _may_overflow(arguments):
            _judge(side, arguments, made)
    assert {name: _snapshot(value) for name, value in arguments.items()} == before


def _may_overflow(arguments: dict[str, Any]) -> bool:
    """Whether scale and shift, or partial sums, may overflow float32: then nothing is judged (docs/numerics.md)."""
    columns = [arguments[name] for name in COLUMNS if isinstance(arguments.get(name), np.ndarray)]
    if not all((np.abs(column.astype(np.float64)) < LARGE).all() for column in columns):
        return True
    if "dy" not in arguments:
        return False
    dy, x, mean = (arguments[name].astype(np.float64) for name in ("dy", "x", "mean"))
    with np.errstate(all="ignore"):
        terms = np.abs(dy) * np.maximum(np.abs(x - mean.reshape(-1, *[1] * (x.ndim - 2))), 1)
        sums = terms.sum(axis=(0, *range(2, x.ndim)))
    # A value that is not finite spoils its channel anyhow, which is judged.
    return bool((np.isfinite(sums) & (sums > np.finfo(np.float32).max)).any())


def _snapshot(value: Any) -> Any:
    return (value.dtype.str, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else id(value)


def _judge(side: str, arguments: dict[str, Any], made: Any) -> None:
    """By the reference and the table of tolerances; an empty batch has nothing to judge but shapes."""
    fields = {name: value for name, value in arguments.items() if name not in WAYS}
    # The reference takes floats; what the functions take are any real numbers.
    fields |= {name: float(fields[name]) for name in ("eps", "momentum") if fields.get(name) is not None}
    ways = {name: value for name, value in arguments.items() if name in WAYS and name != "plan"}
    with np.errstate(all="ignore"):
        if side == "fwd":
            forward = ForwardCase(**fields)
            problem: Any = prepare_forward(forward, **ways).problem
            assert made.y.shape == forward.x.shape and made.y.dtype == forward.x.dtype
            if problem.count:
                rows = verify.judge_forward(
                    forward, made, verify.arithmetic_of(problem, plan_forward(problem), OPTIONS)
                )
                assert all(row.ok for row in rows), f"\n{verify.table(rows)}"
            return
        case = BackwardCase(**fields)
        problem = prepare_backward(case, **ways).problem
        assert [value is not None for value in made[:3]] == [name in problem.need for name in ("dx", "dgamma", "dbeta")]
        if problem.count and problem.need:
            rows = verify.judge_backward(case, made, verify.arithmetic_of(problem, plan_backward(problem), OPTIONS))
            assert all(row.ok for row in rows), f"\n{verify.table(rows)}"


OPTIONS = verify.DEFAULT_OPTIONS
SURFACE = Surface(calls(), check_call)
