# SPDX-License-Identifier: Apache-2.0
"""tensor_reduce, tensor_scalar_reduce and tensor_partition_reduce: values against NumPy, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instructions import (
    ARITHMETIC,
    BF16,
    BUFFERS,
    F32,
    computed,
    execute,
    in_psum,
    op,
    pointer,
    record_of,
    refused,
    same,
    values,
    written,
)
from launching import nisa, nl

CMD = nisa.reduce_cmd
X = values(64, 24)
COLUMN = values(64, 1, seed=2)
# Rows whose sums are exact in float32, whatever the order of addition, and powers of two for products.
WHOLE = np.random.default_rng(4).integers(-8, 9, (64, 24)).astype(F32)
POWERS = (2.0 ** np.random.default_rng(5).integers(-2, 3, (64, 24))).astype(F32)
BITS = np.random.default_rng(6).integers(0, 2**16, (64, 24)).astype(np.uint16)

REDUCTIONS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "add": (WHOLE, np.sum),
    "multiply": (POWERS, np.prod),
    "maximum": (X, np.max),
    "minimum": (X, np.min),
    "max": (X, np.max),
    "min": (X, np.min),
    "subtract": (WHOLE, lambda a, axis: 2 * a.take(0, axis) - a.sum(axis)),
    "logical_and": (WHOLE, lambda a, axis: np.all(a != 0, axis)),
    "logical_or": (WHOLE, lambda a, axis: np.any(a != 0, axis)),
    "logical_xor": (WHOLE, lambda a, axis: (a != 0).sum(axis) % 2),
}
BITWISE = {"bitwise_and": np.bitwise_and, "bitwise_or": np.bitwise_or, "bitwise_xor": np.bitwise_xor}


def reduce(*positional: Any, **keywords: Any) -> Callable[..., Any]:
    return lambda dst, data: nisa.tensor_reduce(dst, positional[0], data, *positional[1:], **keywords)


# --- tensor_reduce ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("accumulate", ["pairwise", "sequential"])
@pytest.mark.parametrize("negate", [False, True])
def test_tensor_reduce(name: str, accumulate: str, negate: bool) -> None:
    data, function = REDUCTIONS[name]
    expected = function(data, axis=1).astype(F32)[:, None]
    result = computed(reduce(op(name), 1, negate), data, shape=(64, 1), accumulate=accumulate)
    same(result, -expected if negate else expected)


@pytest.mark.parametrize("name", BITWISE)
@pytest.mark.parametrize("dtype", [np.uint16, np.int16], ids=str)
@pytest.mark.parametrize("accumulate", ["pairwise", "sequential"])
def test_tensor_reduce_bits(name: str, dtype: Any, accumulate: str) -> None:
    data = (BITS | 0x8001).view(dtype) if name == "bitwise_and" else BITS.view(dtype)
    result = computed(reduce(op(name), 1), data, dtype=np.dtype(dtype).name, shape=(64, 1), accumulate=accumulate)
    same(result, BITWISE[name].reduce(data, axis=1, keepdims=True))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_axes_are_trailing_dimensions(free: list[int], data: Any) -> None:
    first = data.draw(st.integers(1, len(free)))
    axes: Any = list(range(first, len(free) + 1))
    array = np.random.default_rng(7).integers(-50, 50, (32, *free)).astype(F32)
    expected = array.sum(axis=tuple(axes))
    spelled = data.draw(st.sampled_from([axes, tuple(reversed(axes)), [axis - array.ndim for axis in axes]]))
    keepdims = data.draw(st.booleans())
    shape = array.sum(axis=tuple(axes), keepdims=True).shape if keepdims else (32, *(free[: first - 1] or [1]))
    spelled = spelled[0] if len(axes) == 1 and data.draw(st.booleans()) else spelled
    result = computed(reduce(nl.add, spelled, keepdims=keepdims), array, shape=shape)
    same(result, expected.reshape(shape))


@pytest.mark.parametrize("dtype", [np.int16, np.uint8, np.int32, np.float16, BF16], ids=str)
def test_tensor_reduce_sums_in_float32_and_casts(dtype: Any) -> None:
    data = np.abs(10 * X).astype(dtype)
    expected = data.astype(np.float64).sum(1, keepdims=True)
    name = np.dtype(dtype).name
    np.testing.assert_allclose(computed(reduce(nl.add, 1), data, shape=(64, 1)), expected, rtol=1e-6)
    same(computed(reduce(nl.maximum, 1), data, shape=(64, 1), dtype=name), data.max(1, keepdims=True))
    rounded = computed(reduce(nl.add, 1), data, shape=(64, 1), dtype=name).astype(float)
    whole = np.dtype(dtype).kind in "iu"
    wanted = written(expected.astype(F32), dtype).astype(float)
    np.testing.assert_allclose(rounded, wanted, rtol=0 if whole else 2**-7)


@pytest.mark.parametrize("source", BUFFERS)
@pytest.mark.parametrize("buffer", BUFFERS)
def test_tensor_reduce_reads_and_writes_psum(source: Any, buffer: Any) -> None:
    same(
        computed(reduce(nl.add, [2]), WHOLE.reshape(64, 4, 6), shape=(64, 4), source=source, buffer=buffer),
        WHOLE.reshape(64, 4, 6).sum(2),
    )


def test_tensor_reduce_of_views_and_into_its_own_input() -> None:
    def call(dst: Any, data: Any) -> None:
        nisa.tensor_reduce(data[:, 0:1], nl.add, data, 1)
        nisa.tensor_copy(dst, data)

    expected = WHOLE.copy()
    expected[:, 0] = WHOLE.sum(1)
    same(computed(call, WHOLE), expected)
    same(
        computed(
            lambda dst, d: nisa.tensor_reduce(dst, nl.add, d.permute((0, 2, 1)), 2),
            WHOLE.reshape(64, 4, 6),
            shape=(64, 6),
        ),
        WHOLE.reshape(64, 4, 6).sum(1),
    )
    same(
        computed(lambda dst, d: nisa.tensor_reduce(dst, nl.add, d[:, 1:24:3], 1), WHOLE, shape=(64, 1)),
        WHOLE[:, 1::3].sum(1, keepdims=True),
    )


def test_order_of_summation() -> None:
    data = np.concatenate([np.full((1, 1), 2.0**24, F32), np.ones((1, 127), F32)], axis=1)
    assert computed(reduce(nl.add, 1), data, shape=(1, 1), accumulate="sequential") == 2.0**24
    assert computed(reduce(nl.add, 1), data, shape=(1, 1), accumulate="pairwise") > 2.0**24 + 64


def test_sums_do_not_depend_on_the_layout_of_their_input() -> None:
    data = values(8, 4, 200, seed=9)
    swapped = np.ascontiguousarray(data.transpose(0, 2, 1))
    plain = computed(reduce(nl.add, 2), data, shape=(8, 4))
    viewed = computed(lambda dst, d: nisa.tensor_reduce(dst, nl.add, d.permute((0, 2, 1)), 2), swapped, shape=(8, 4))
    same(viewed, plain)


def test_nan_stays_in_its_partition() -> None:
    data = X.copy()
    data[3, 4] = np.nan
    for name in ("add", "maximum", "minimum"):
        assert np.flatnonzero(np.isnan(computed(reduce(op(name), 1), data, shape=(64, 1)))).tolist() == [3]


def test_tensor_reduce_records() -> None:
    record = record_of(execute(reduce(nl.add, 1, True), X, shape=(64, 1)), "tensor_reduce")
    assert record.engine == "vector" and record.attributes == {"op": "add", "negate": True}


CUBE = WHOLE.reshape(64, 4, 6)


@pytest.mark.parametrize("axis", [0, (0, 1, 2), 1, (1,), 3, (2, 2), -3, (1, 3), -4])
def test_tensor_reduce_refuses_axes(axis: Any) -> None:
    refused("must be the last free dimensions of shape .64, 4, 6.", reduce(nl.add, axis), CUBE, shape=(64, 6))


@pytest.mark.parametrize("axis", [(), None, 1.0, "1", True, (1, None)])
def test_tensor_reduce_refuses_what_is_no_axis(axis: Any) -> None:
    refused("axis must be an integer or a tuple", reduce(nl.add, axis), CUBE, shape=(64, 6), error=TypeError)


@pytest.mark.parametrize(
    "name",
    [
        "equal",
        "greater",
        "less",
        "left_shift",
        "right_shift",
        "power",
        "abs",
        "invert",
        "rsqrt",
        "abs_max",
        "bypass",
        "average",
    ],
)
def test_tensor_reduce_refuses_operators(name: str) -> None:
    refused(f"op nl.{name} is not accepted", reduce(op(name), 1), X, shape=(64, 1))


def test_tensor_reduce_refuses_operands() -> None:
    refused("dst must have 64 partitions of 4 elements, got shape .64, 24.", reduce(nl.add, 2), CUBE, shape=(64, 24))
    refused("dst must have 64 partitions of 1 elements, got shape .32, 1.", reduce(nl.add, 1), X, shape=(32, 1))
    refused("data is float32; bitvec operators take integer dtypes", reduce(nl.bitwise_or, 1), X, shape=(64, 1))
    refused("dst is float32; bitvec operators take integer dtypes", reduce(nl.bitwise_or, 1), BITS, shape=(64, 1))
    refused("negate is for arithmetic operators", reduce(nl.bitwise_or, 1, True), BITS, shape=(64, 1), dtype="uint16")
    refused("op must be an operator of nki.language", reduce(np.add, 1), X, shape=(64, 1), error=TypeError)
    refused("op must be an operator of nki.language", reduce(nl.sum, 1), X, shape=(64, 1), error=TypeError)


# --- tensor_scalar_reduce --------------------------------------------------------------------------------------------

IDENTITY = {"add": 0.0, "multiply": 1.0, "maximum": -np.inf, "minimum": np.inf}
# Data whose sums and products come out exactly.
EXACT = {"add": WHOLE, "multiply": POWERS, "maximum": X, "minimum": X}


def column(dtype: str = "float32", rows: int = 64) -> Any:
    return nl.ndarray((rows, 1), dtype)


def folded(name: str, data: Any, start: Any) -> Any:
    result = np.broadcast_to(start, (len(data), 1)).astype(F32)
    for index in range(data.shape[1]):
        result = ARITHMETIC[name](result, data[:, index : index + 1]).astype(F32)
    return result


@pytest.mark.parametrize("name", IDENTITY)
@pytest.mark.parametrize("accumulate", ["pairwise", "sequential"])
def test_tensor_scalar_reduce_commands(name: str, accumulate: str) -> None:
    def call(dst: Any, data: Any, init: Any) -> list[Any]:
        read = [column() for _ in range(5)]

        def run(factor: float, result: Any, command: Any, **keywords: Any) -> None:
            nisa.tensor_scalar_reduce(dst, data, nl.multiply, factor, op(name), result, reduce_cmd=command, **keywords)

        nisa.tensor_scalar_reduce(dst, data, nl.multiply, 2.0, op(name), read[0])
        run(0.5, read[1], CMD.reduce)
        run(1.0, read[2], CMD.load_reduce, reduce_init=4)
        run(1.0, None, CMD.load_reduce, reduce_init=init)
        run(1.0, read[3], CMD.reduce, reduce_res_negate=True)
        run(1.0, read[4], CMD.reduce)
        return read

    data, init = EXACT[name], POWERS[:, :1].copy()
    dst, *read = computed(call, data, init, accumulate=accumulate)
    first = folded(name, data * F32(2), IDENTITY[name])
    fourth = folded(name, data, folded(name, data, init))
    second, third = folded(name, data * F32(0.5), first), folded(name, data, 4.0)
    expected = [first, second, third, -fourth, folded(name, data, fourth)]
    for actual, wanted in zip(read, expected, strict=True):
        same(actual, wanted)
    same(dst, data)


@pytest.mark.parametrize("name", ["add", "subtract", "multiply", "maximum", "greater", "equal"])
def test_tensor_scalar_reduce_first_stage(name: str) -> None:
    def call(dst: Any, data: Any, operand: Any) -> list[Any]:
        read = [column(), column(), nl.ndarray(dst.shape, nl.float32)]
        nisa.tensor_scalar_reduce(dst, data, op(name), operand, nl.add, read[0])
        nisa.tensor_scalar_reduce(read[2], data, op(name), 3, nl.add, read[1])
        return read

    operand = WHOLE[:, :1].copy()
    dst, total, second, other = computed(call, WHOLE, operand)
    for tile, sums, wanted in (
        (dst, total, ARITHMETIC[name](WHOLE, operand)),
        (other, second, ARITHMETIC[name](WHOLE, F32(3))),
    ):
        same(tile, wanted.astype(F32))
        same(sums, wanted.astype(F32).sum(1, keepdims=True))


@pytest.mark.parametrize("name, alias", [("maximum", "max"), ("minimum", "min")])
def test_reductions_by_the_names_of_tile_functions(name: str, alias: str) -> None:
    def call(dst: Any, data: Any) -> list[Any]:
        result = column()
        nisa.tensor_scalar_reduce(dst, data, nl.abs, None, op(alias), result)
        return [result]

    same(computed(call, X)[1], {"maximum": np.max, "minimum": np.min}[name](np.abs(X), axis=1, keepdims=True))


def test_the_reduction_sees_float32_before_the_cast() -> None:
    data = np.full((2, 4), 1, F32)

    def call(dst: Any, a: Any) -> list[Any]:
        whole, half = column(rows=2), column("bfloat16", 2)
        nisa.tensor_scalar_reduce(dst, a, nl.add, 2**-10, nl.add, whole)
        nisa.tensor_scalar_reduce(dst, a, nl.add, 2**-10, nl.add, half)
        return [whole, half]

    dst, whole, half = computed(call, data, dtype="bfloat16")
    same(dst, data.astype(BF16))
    same(whole, np.full((2, 1), 4 + 2**-8, F32))
    same(half, np.full((2, 1), 4, BF16))


def test_a_result_inside_the_destination_is_written_last_and_psum_works() -> None:
    def call(dst: Any, data: Any) -> None:
        nisa.tensor_scalar_reduce(dst, data, nl.add, 1, nl.add, dst[:, 5:6])

    expected = WHOLE + 1
    expected[:, 5] = (WHOLE + 1).sum(1)
    for options in ({}, {"source": nl.psum}, {"buffer": nl.psum}):
        same(computed(call, WHOLE, **options), expected)


def test_lanes_of_the_vector_bank_and_independence_from_the_scalar_bank() -> None:
    def call(dst: Any, data: Any) -> list[Any]:
        result = column()
        nisa.tensor_scalar_reduce(dst, data, nl.add, 0, nl.add)
        nisa.activation(dst, nl.copy, data, reduce_op=nl.add, reduce_cmd=CMD.reset_reduce)
        nisa.tensor_scalar_reduce(dst[32:64], data[0:32], nl.add, 0, nl.add, reduce_cmd=CMD.reduce)
        nisa.tensor_scalar_reduce(dst[0:3], data[0:3], nl.multiply, 0, nl.add)
        nisa.tensor_scalar_reduce(dst, data, nl.multiply, 0, nl.add, result, reduce_cmd=CMD.reduce)
        return [result]

    sums = WHOLE.sum(1, keepdims=True)
    sums[32:] += sums[:32]
    sums[:3] = 0
    same(computed(call, WHOLE)[1], sums)


def test_one_accumulator_runs_through_several_instructions_in_sequence() -> None:
    def call(dst: Any, a: Any, b: Any) -> list[Any]:
        result = column(rows=1)
        nisa.tensor_scalar_reduce(dst[:, 0:1], a, nl.add, 0, nl.add)
        nisa.tensor_scalar_reduce(dst[:, 1:17], b, nl.add, 0, nl.add, result, reduce_cmd=CMD.reduce)
        return [result]

    arrays = np.full((1, 1), 2.0**24, F32), np.ones((1, 16), F32)
    assert computed(call, *arrays, shape=(1, 17), accumulate="sequential")[1] == 2.0**24
    assert computed(call, *arrays, shape=(1, 17), accumulate="pairwise")[1] == 2.0**24 + 16


def test_tensor_scalar_reduce_pointers_and_record() -> None:
    def call(dst: Any, data: Any, operand: Any) -> list[Any]:
        result = column()
        nisa.tensor_scalar_reduce(
            dst, data, nl.multiply, operand, nl.maximum, result, reduce_cmd=CMD.load_reduce, reduce_init=operand
        )
        return [result]

    result = execute(call, X, COLUMN, numerics="trn2")
    dst, maximum = result.outputs
    same(dst, X * pointer(COLUMN))
    same(maximum, np.maximum((X * pointer(COLUMN)).max(1, keepdims=True), pointer(COLUMN)))
    record = record_of(result, "tensor_scalar_reduce")
    assert record.engine == "vector" and len(record.reads) == 3 and len(record.writes) == 2
    assert record.attributes == {
        "ops": ("multiply",),
        "pointers": 2,
        "reduce_op": "maximum",
        "reduce_cmd": "load_reduce",
        "read_out": True,
    }


@pytest.mark.parametrize(
    "match, arguments, keywords, dtype",
    [
        (
            "reduce_op nl.subtract is not accepted; accepted: add, multiply, maximum, minimum",
            (nl.add, 1, nl.subtract),
            {},
            "float32",
        ),
        ("reduce_op nl.logical_or is not accepted", (nl.add, 1, nl.logical_or), {}, "float32"),
        ("reduce_op nl.bitwise_or is not accepted", (nl.add, 1, nl.bitwise_or), {}, "int32"),
        ("op0 nl.bitwise_or is a bitvec operator", (nl.bitwise_or, 1, nl.add), {}, "int32"),
        ("op0 nl.rsqrt does not exist on vector", (nl.rsqrt, 0, nl.add), {}, "float32"),
        ("op0 nl.abs is unary", (nl.abs, 1, nl.add), {}, "float32"),
        ("op0 nl.square needs gen4", (nl.square, 0, nl.add), {}, "float32"),
        ("reduce_cmd idle is not accepted", (nl.add, 1, nl.add), {"reduce_cmd": CMD.idle}, "float32"),
        ("reduce_cmd reset is not accepted", (nl.add, 1, nl.add), {"reduce_cmd": CMD.reset}, "float32"),
        (
            "reduce_init belongs to reduce_cmd load_reduce, got 0.0 with reset_reduce",
            (nl.add, 1, nl.add),
            {"reduce_init": 0.0},
            "float32",
        ),
        (
            "reduce_init belongs to reduce_cmd load_reduce, got None",
            (nl.add, 1, nl.add),
            {"reduce_cmd": CMD.load_reduce},
            "float32",
        ),
        ("reverse0 is not supported", (nl.subtract, 1, nl.add), {"reverse0": True}, "float32"),
    ],
)
def test_tensor_scalar_reduce_refuses(match: str, arguments: Any, keywords: Any, dtype: str) -> None:
    refused(
        match,
        lambda dst, d: nisa.tensor_scalar_reduce(dst, d, *arguments, **keywords),
        WHOLE.astype(dtype),
        dtype=dtype,
    )


def test_tensor_scalar_reduce_refuses_operands() -> None:
    refused(
        "operand0 must be float32, got bfloat16",
        lambda dst, d, c: nisa.tensor_scalar_reduce(dst, d, nl.add, c, nl.add),
        X,
        COLUMN.astype(BF16),
    )
    refused(
        "reduce_init must be float32, got bfloat16",
        lambda dst, d, c: nisa.tensor_scalar_reduce(
            dst, d, nl.add, 1, nl.add, reduce_cmd=CMD.load_reduce, reduce_init=c
        ),
        X,
        COLUMN.astype(BF16),
    )
    refused(
        r"reduce_res must have shape \(64, 1\), got \(64, 24\)",
        lambda dst, d: nisa.tensor_scalar_reduce(dst, d, nl.add, 1, nl.add, d),
        X,
    )
    refused(
        "reduce_cmd must be a member",
        lambda dst, d: nisa.tensor_scalar_reduce(dst, d, nl.add, 1, nl.add, reduce_cmd="reduce"),
        X,
        error=TypeError,
    )
    refused(
        "dst has 12 elements per partition, data has 24",
        lambda dst, d: nisa.tensor_scalar_reduce(dst, d, nl.add, 1, nl.add),
        X,
        shape=(64, 12),
    )


def test_gen4_has_more_unary_operators() -> None:
    for operator, expected in ((nl.square, X * X), (nl.relu, np.maximum(X, 0))):
        same(
            computed(lambda dst, d, f=operator: nisa.tensor_scalar_reduce(dst, d, f, None, nl.add), X, target="trn3"),
            expected,
        )


# --- tensor_partition_reduce -----------------------------------------------------------------------------------------


def partition_reduce(operator: Any) -> Callable[..., Any]:
    return lambda dst, data: nisa.tensor_partition_reduce(dst, operator, data)


@pytest.mark.parametrize(
    "name, function", [("add", np.sum), ("average", np.mean), ("max", np.max), ("maximum", np.max)]
)
@pytest.mark.parametrize("accumulate", ["pairwise", "sequential"])
def test_tensor_partition_reduce(name: str, function: Any, accumulate: str) -> None:
    result = execute(partition_reduce(op(name)), WHOLE.reshape(64, 4, 6), shape=(1, 24), accumulate=accumulate)
    same(result.outputs, function(WHOLE, axis=0, keepdims=True).astype(F32))
    record = record_of(result, "tensor_partition_reduce")
    assert record.engine == "gpsimd" and record.attributes == {"op": "maximum" if "max" in name else name}


def test_tensor_partition_reduce_casts_and_keeps_bits() -> None:
    data = (7 * X).astype(BF16)
    same(
        computed(partition_reduce(nl.max), data, shape=(1, 24), dtype="int8"),
        written(data.astype(F32).max(0, keepdims=True), np.int8),
    )
    for name in ("bitwise_and", "bitwise_or"):
        bits = BITS | 0x8001 if name == "bitwise_and" else BITS
        same(
            computed(partition_reduce(op(name)), bits, shape=(1, 24), dtype="uint16"),
            BITWISE[name].reduce(bits, axis=0, keepdims=True),
        )


def test_tensor_partition_reduce_refuses() -> None:
    for name in ("minimum", "multiply", "bitwise_xor", "subtract", "logical_or"):
        refused(f"op nl.{name} is not accepted", partition_reduce(op(name)), BITS, shape=(1, 24), dtype="uint16")
    refused("dst must have 1 partition of 24 elements, got shape .64, 24.", partition_reduce(nl.add), X)
    refused("dst must have 1 partition of 24 elements, got shape .1, 12.", partition_reduce(nl.add), X, shape=(1, 12))
    refused("data is in psum; accepted: sbuf", partition_reduce(nl.add), X, shape=(1, 24), source=nl.psum)
    refused("dst is in psum; accepted: sbuf", partition_reduce(nl.add), X, shape=(1, 24), buffer=nl.psum)
    refused("data is float32; bitvec", partition_reduce(nl.bitwise_or), X, shape=(1, 24))
    refused("op must be an operator", partition_reduce(np.add), X, shape=(1, 24), error=TypeError)
    refused("data is in psum", lambda dst, d: nisa.tensor_partition_reduce(dst, nl.add, in_psum(d)), X, shape=(1, 24))
