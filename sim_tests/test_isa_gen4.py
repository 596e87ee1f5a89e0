# SPDX-License-Identifier: Apache-2.0
"""exponential and activate2: values against NumPy, accumulators, limits; refused before gen4."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from instructions import BF16, F32, computed, op, refused, same, values, written
from launching import nisa, nl

TRN3 = {"target": "trn3"}
CMD = nisa.reduce_cmd
X = values(64, 24, seed=1)
COLUMN = values(64, 1, seed=2)
OTHER = values(64, 1, seed=3)


def exp(x: Any) -> Any:
    """Of float32 arguments, in float64, rounded once."""
    return np.exp(np.asarray(x, F32).astype(np.float64)).astype(F32)


def close(actual: Any, expected: Any) -> None:
    """Sums of 24 float32 values in any order."""
    bound = 24 * 2.0**-24
    np.testing.assert_allclose(actual, expected, rtol=bound, atol=bound * np.abs(expected).max())


# --- exponential --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e5m2", "int16", "uint8"])
def test_exponentials_of_differences(dtype: str) -> None:
    result = computed(lambda d, x: nisa.exponential(d, x, max_value=0.5), X, dtype=dtype, **TRN3)
    same(result, written(exp(X - F32(0.5)), getattr(ml_dtypes, dtype, None) or np.dtype(dtype)))


@pytest.mark.parametrize("dtype", [BF16, np.int32, np.uint32, np.int8])
def test_exponential_reads_any_documented_dtype(dtype: Any) -> None:
    data = np.abs(X * 3).astype(dtype)
    result = computed(lambda d, x, m: nisa.exponential(d, x, max_value=m), data, COLUMN, dtype="float32", **TRN3)
    same(result, exp(data.astype(F32) - COLUMN))


def test_exponential_accumulates() -> None:
    def call(dst: Any, x: Any, largest: Any, start: Any) -> list[Any]:
        sums = [nl.ndarray((64, 1), nl.float32) for _ in range(4)]
        nisa.exponential(dst, x, largest, sums[0], CMD.reset_reduce)
        nisa.exponential(dst, x, largest, None, CMD.reduce)
        nisa.exponential(dst, x, largest, sums[1], CMD.reduce)
        nisa.exponential(dst, x, largest, sums[2], CMD.load_reduce, start)
        nisa.exponential(dst, x, largest, sums[3], CMD.load_reduce, reduce_init=2.5)
        return sums

    _, first, third, loaded, number = computed(call, X, COLUMN, OTHER, **TRN3)
    total = exp(X - COLUMN).astype(np.float64).sum(1, keepdims=True)
    close(first, total)
    close(third, 3 * total)
    close(loaded, OTHER + total)
    close(number, 2.5 + total)


def test_an_idle_exponential_leaves_nothing_to_rely_on() -> None:
    def call(dst: Any, x: Any) -> list[Any]:
        out = nl.ndarray((64, 1), nl.float32)
        nisa.exponential(dst, x, reduce_cmd=CMD.reset_reduce)
        nisa.exponential(dst, x, reduce_res=out)
        return [out]

    assert np.isnan(computed(call, X, **TRN3)[1]).all()


def test_limits_of_exponential() -> None:
    run = nisa.exponential
    refused("exponential needs gen4 or later, the target is gen3", run, X)
    refused("dst is uint32; accepted", run, X, dtype="uint32", **TRN3)
    refused("src is tfloat32", lambda d, x: run(d, nl.ndarray((64, 24), nl.tfloat32)), X, **TRN3)
    refused("at most 4 dimensions", lambda d, x: run(d, x.reshape((64, 2, 2, 2, 3))), X, **TRN3)
    refused("max_value must have shape \\(64, 1\\)", lambda d, x: run(d, x, max_value=x), X, **TRN3)
    refused("max_value must be float32", lambda d, x, m: run(d, x, max_value=m), X, COLUMN.astype(BF16), **TRN3)
    refused("reduce_cmd reset is not accepted", lambda d, x: run(d, x, reduce_cmd=CMD.reset), X, **TRN3)
    refused("reduce_init belongs to reduce_cmd load_reduce", lambda d, x: run(d, x, reduce_init=1.0), X, **TRN3)
    whole = lambda d, x: run(d, x, reduce_res=nl.ndarray((64, 1), nl.int32))  # noqa: E731
    refused("reduce_res must be of a float dtype", whole, X, **TRN3)
    refused("dst has 23 elements per partition, src has 24", lambda d, x: run(d[:, 1:], x), X, **TRN3)


# --- activate2 ----------------------------------------------------------------------------------------------------

STAGES = {
    ("multiply", "add"): lambda x, a, b: x * a + b,
    ("multiply", "subtract"): lambda x, a, b: x * a - b,
    ("multiply", "bypass"): lambda x, a, b: x * a,
    ("add", "bypass"): lambda x, a, b: x + a,
    ("subtract", "bypass"): lambda x, a, b: x - a,
    ("bypass", "bypass"): lambda x, a, b: x,
}


@pytest.mark.parametrize("ops", STAGES)
@pytest.mark.parametrize("tiles", [False, True])
def test_two_stages_before_the_function(ops: tuple[str, str], tiles: bool) -> None:
    def call(dst: Any, x: Any, a: Any, b: Any) -> None:
        imms = (a, b) if tiles else (1.5, -0.25)
        nisa.activate2(dst, nl.relu, x, *imms, op(ops[0]), op(ops[1]))

    a, b = (COLUMN, OTHER) if tiles else (F32(1.5), F32(-0.25))
    same(computed(call, X, COLUMN, OTHER, **TRN3), np.maximum(STAGES[ops](X, a, b), F32(0)))


def test_stages_reverse() -> None:
    call = lambda d, x: nisa.activate2(  # noqa: E731
        d, nl.copy, x, 3.0, 2.0, nl.multiply, nl.subtract, reverse0=True, reverse1=True
    )
    same(computed(call, X, **TRN3), F32(2) - X * F32(3))
    call = lambda d, x: nisa.activate2(d, nl.exp, x, 3.0, 0.0, nl.subtract, nl.bypass, reverse0=True)  # noqa: E731
    same(computed(call, X, **TRN3), exp(F32(3) - X))


@pytest.mark.parametrize("tile", [False, True])
def test_the_slope_of_prelu_is_a_parameter(tile: bool) -> None:
    def call(dst: Any, x: Any, slope: Any) -> None:
        nisa.activate2(dst, nl.prelu, x, 0, 0, nl.bypass, nl.bypass, relu_param=slope if tile else 0.25)

    slope = COLUMN if tile else F32(0.25)
    same(computed(call, X, COLUMN, **TRN3), np.where(X > 0, X, X * slope))


MAGNITUDES = np.array([[1, -3, 2, 3], [-4, 4, 0.5, -0.5], [5, 1, -1, 2]], F32)


@pytest.mark.parametrize(
    ("name", "once", "twice"),
    [
        ("add", [3, 0, 7], [6, 0, 14]),
        ("maximum", [3, 4, 5], [3, 4, 5]),
        ("minimum", [-3, -4, -1], [-3, -4, -1]),
        # Of equal magnitudes the second operand stays, so the last one.
        ("abs_max", [3, 4, 5], [3, 4, 5]),
        ("abs_min", [1, -0.5, -1], [1, -0.5, -1]),
    ],
)
@pytest.mark.parametrize("order", ["pairwise", "sequential"])
def test_reductions(name: str, once: list[float], twice: list[float], order: str) -> None:
    def call(dst: Any, x: Any) -> list[Any]:
        outs = [nl.ndarray((3, 1), nl.float32) for _ in range(2)]
        fixed = (nl.copy, x, 0, 0, nl.bypass, nl.bypass)
        nisa.activate2(dst, *fixed, reduce_op=op(name), reduce_res=outs[0], reduce_cmd=CMD.reset_reduce)
        nisa.activate2(dst, *fixed, reduce_op=op(name), reduce_res=outs[1], reduce_cmd=CMD.reduce)
        return outs

    _, first, second = computed(call, MAGNITUDES, accumulate=order, **TRN3)
    same(first[:, 0], np.array(once, F32))
    same(second[:, 0], np.array(twice, F32))


def test_reset_and_idle() -> None:
    def call(dst: Any, x: Any) -> list[Any]:
        outs = [nl.ndarray((3, 1), nl.float32) for _ in range(3)]
        fixed = (nl.copy, x, 0, 0, nl.bypass, nl.bypass)
        nisa.activate2(dst, *fixed, reduce_op=nl.add, reduce_cmd=CMD.reset_reduce)
        nisa.activate2(dst, *fixed, reduce_res=outs[0])
        nisa.activate2(dst, *fixed, reduce_op=nl.add, reduce_res=outs[1], reduce_cmd=CMD.reset)
        nisa.activate2(dst, *fixed, reduce_op=nl.minimum, reduce_res=outs[2], reduce_cmd=CMD.reset)
        return outs

    _, idle, zero, infinite = computed(call, MAGNITUDES, **TRN3)
    same(idle[:, 0], np.array([3, 0, 7], F32))
    assert not zero.any() and (infinite == math.inf).all()


def test_limits_of_activate2() -> None:
    def run(**changes: Any) -> Any:
        given = {"op": nl.exp, "imm0": 1.0, "imm1": 0.0, "op0": nl.multiply, "op1": nl.add, **changes}
        return lambda d, x, a, b: nisa.activate2(d, data=x, **given)

    arrays = (X, COLUMN, OTHER.astype(BF16))
    refused("activate2 needs gen4 or later, the target is gen3", run(), *arrays)
    for first, second in (("add", "add"), ("bypass", "add"), ("maximum", "bypass"), ("multiply", "multiply")):
        refused(
            f"are nl.{first} and nl.{second}; accepted: multiply and add",
            run(op0=op(first), op1=op(second)),
            *arrays,
            **TRN3,
        )
    refused("is not an activation function", run(op=nl.cos), *arrays, **TRN3)
    refused("reduce_op nl.multiply is not accepted", run(reduce_op=nl.multiply), *arrays, **TRN3)
    refused(
        "reduce_cmd load_reduce is not accepted", run(reduce_op=nl.add, reduce_cmd=CMD.load_reduce), *arrays, **TRN3
    )
    refused("reduce_cmd reduce needs a reduce_op", run(reduce_cmd=CMD.reduce), *arrays, **TRN3)
    mixed = lambda d, x, a, b: nisa.activate2(d, nl.exp, x, a, b, nl.multiply, nl.add)  # noqa: E731
    refused("imm0 and imm1 must have one dtype, got bfloat16, float32", mixed, *arrays, **TRN3)
    wide = lambda d, x, a, b: nisa.activate2(d, nl.exp, x, x, 0, nl.multiply, nl.add)  # noqa: E731
    refused("imm0 must have shape \\(64, 1\\)", wide, *arrays, **TRN3)
    refused(
        "dst has 23 elements per partition, data has 24", lambda d, x, a, b: run()(d[:, 1:], x, a, b), *arrays, **TRN3
    )
