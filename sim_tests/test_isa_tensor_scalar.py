# SPDX-License-Identifier: Apache-2.0
"""tensor_scalar: every operator against NumPy, and what it refuses."""

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
    BITVEC,
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

X, Y = values(64, 24), values(64, 24, seed=1)
COLUMN = values(64, 1, seed=2)
INTS = np.ones((4, 8), np.int32)
# Zeros, ties and equal elements, for comparisons and logic.
FEW = np.random.default_rng(3).integers(-2, 3, (64, 24)).astype(F32)
FEW2 = np.random.default_rng(4).integers(-2, 3, (64, 24)).astype(F32)


def tensor_scalar(*positional: Any, **keywords: Any) -> Callable[..., Any]:
    return lambda dst, data, *columns: nisa.tensor_scalar(dst, data, *positional, *columns, **keywords)


@pytest.mark.parametrize("name", ARITHMETIC)
@pytest.mark.parametrize("reverse", [False, True])
def test_tensor_scalar_with_numbers_and_columns(name: str, reverse: bool) -> None:
    function = ARITHMETIC[name]
    columns = (COLUMN, np.round(COLUMN))
    for data in (X, FEW):
        for operand in (0, 1, -0.3, np.float32(0.7)):
            pair = (F32(operand), data) if reverse else (data, F32(operand))
            same(computed(tensor_scalar(op(name), operand, reverse), data), function(*pair).astype(F32))
        for column in columns:
            pair = (column, data) if reverse else (data, column)
            same(
                computed(lambda dst, d, c: nisa.tensor_scalar(dst, d, op(name), c, reverse), data, column),
                function(*pair).astype(F32),
            )


EXACT = ["add", "subtract", "multiply", "maximum", "minimum", "greater", "less_equal", "equal"]


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(EXACT),
    st.sampled_from(EXACT),
    st.booleans(),
    st.booleans(),
    st.one_of(st.none(), st.floats(-4, 4, width=32)),
    st.one_of(st.none(), st.floats(-4, 4, width=32)),
)
def test_two_stages_follow_each_other_in_float32(
    first: str, second: str, reverse0: bool, reverse1: bool, operand0: float | None, operand1: float | None
) -> None:
    """None stands for a column."""

    def call(dst: Any, data: Any, a: Any, b: Any) -> None:
        nisa.tensor_scalar(
            dst,
            data,
            op(first),
            a if operand0 is None else operand0,
            reverse0,
            op(second),
            b if operand1 is None else operand1,
            reverse1,
        )

    def stage(name: str, tile: Any, operand: Any, reverse: bool) -> Any:
        return ARITHMETIC[name](*((operand, tile) if reverse else (tile, operand))).astype(F32)

    other = values(64, 1, seed=6)
    middle = stage(first, X, COLUMN if operand0 is None else F32(operand0), reverse0)
    expected = stage(second, middle, other if operand1 is None else F32(operand1), reverse1)
    same(computed(call, X, COLUMN, other), expected)


def test_the_intermediate_is_not_rounded_to_the_destination() -> None:
    same(
        computed(
            tensor_scalar(nl.multiply, 1.001, op1=nl.subtract, operand1=1.0), np.full((1, 4), 1, BF16), dtype="bfloat16"
        ),
        (np.full((1, 4), 1.001, F32) - F32(1)).astype(BF16),
    )


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint16, np.int32, np.float16, BF16], ids=str)
def test_tensor_scalar_casts_any_dtypes(dtype: Any) -> None:
    data = (50 * X).astype(dtype) if np.dtype(dtype).kind != "u" else np.abs(50 * X).astype(dtype)
    expected = written(data.astype(F32) * F32(1.7) + F32(3), dtype)
    same(computed(tensor_scalar(nl.multiply, 1.7, op1=nl.add, operand1=3), data, dtype=np.dtype(dtype).name), expected)


def test_integers_above_24_bits_lose_bits_as_numbers_are_float32() -> None:
    data = np.array([[2**24]], np.int32)
    same(computed(tensor_scalar(nl.add, 1), data, dtype="int32"), data)


def test_unary_operators_take_none_or_zero() -> None:
    for operand in (None, 0, 0.0):
        same(computed(tensor_scalar(nl.abs, operand), X), np.abs(X))
    same(computed(tensor_scalar(nl.subtract, 1.0, op1=nl.abs), X), np.abs(X - F32(1)))
    same(computed(tensor_scalar(nl.square, None), X, target="trn3"), X * X)
    same(computed(tensor_scalar(nl.relu, 0), X, target="trn3"), np.maximum(X, 0))


@pytest.mark.parametrize("engine", [nisa.engine.unknown, nisa.engine.gpsimd])
def test_rsqrt_runs_on_gpsimd(engine: Any) -> None:
    data = np.concatenate([np.abs(COLUMN), np.array([[1e-38], [4], [0]], F32)])
    result = execute(tensor_scalar(nl.rsqrt, 0.0, engine=engine), data)
    with np.errstate(divide="ignore"):
        same(result.outputs, (1 / np.sqrt(data.astype(np.float64))).astype(F32))
    assert record_of(result, "tensor_scalar").engine == "gpsimd"
    shifted = computed(tensor_scalar(nl.add, 1e-5, op1=nl.rsqrt, operand1=0.0), data)
    same(shifted, (1 / np.sqrt((data + F32(1e-5)).astype(np.float64))).astype(F32))


@pytest.mark.parametrize("name", BITVEC)
@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int32, np.uint32], ids=str)
def test_tensor_scalar_bitvec(name: str, dtype: Any) -> None:
    width = np.dtype(dtype).itemsize
    bits = np.random.default_rng(7).integers(0, 2 ** (8 * width), (32, 6), dtype=np.uint64).astype(f"u{width}")
    column = (bits[:, :1] % 8).astype(bits.dtype)
    keywords = {"dtype": np.dtype(dtype).name}
    same(
        computed(tensor_scalar(op(name), 5), bits.view(dtype), **keywords),
        BITVEC[name](bits, bits.dtype.type(5)).view(dtype),
    )
    same(
        computed(tensor_scalar(op(name), 3, True), (bits % 8).view(dtype), **keywords),
        BITVEC[name](bits.dtype.type(3), bits % 8).view(dtype),
    )
    same(
        computed(
            lambda dst, d, c: nisa.tensor_scalar(dst, d, op(name), c, op1=nl.invert),
            bits.view(dtype),
            column.view(dtype),
            **keywords,
        ),
        (~BITVEC[name](bits, column)).view(dtype),
    )


def test_bitvec_numbers_are_bit_patterns() -> None:
    data = np.array([[0x0F0F0F0F, -1]], np.int32)
    for mask in (-16, 0xFFFFFFF0):
        same(computed(tensor_scalar(nl.bitwise_and, mask), data, dtype="int32"), data & -16)


@pytest.mark.parametrize("source", BUFFERS)
@pytest.mark.parametrize("buffer", BUFFERS)
def test_tensor_scalar_and_its_columns_in_psum(source: Any, buffer: Any) -> None:
    def call(dst: Any, data: Any, column: Any) -> None:
        nisa.tensor_scalar(dst, data, nl.subtract, in_psum(column), op1=nl.multiply, operand1=column)

    same(computed(call, X, COLUMN, source=source, buffer=buffer), (X - COLUMN) * COLUMN)


def test_columns_of_a_tile_and_ranks() -> None:
    def call(dst: Any, data: Any, columns: Any) -> None:
        nisa.tensor_scalar(dst, data, nl.subtract, columns[:, 3], op1=nl.multiply, operand1=columns[:, 2:3])

    same(computed(call, X.reshape(64, 4, 6), Y, shape=(64, 24)), (X - Y[:, 3:4]) * Y[:, 2:3])
    same(
        computed(lambda dst, d, c: nisa.tensor_scalar(d, d, nl.add, c) and nisa.tensor_copy(dst, d), X, COLUMN),
        X + COLUMN,
    )


def test_pointer_operands_have_18_bits_on_trn2_and_numbers_have_24() -> None:
    column = F32(1) + np.full((4, 1), 2**-20, F32)
    data = np.ones((4, 3), F32)
    whole, short = np.broadcast_to(column, (4, 3)), np.ones((4, 3), F32)

    def call(dst: Any, data: Any, column: Any) -> None:
        nisa.tensor_scalar(dst, data, nl.multiply, column)

    same(computed(call, data, column, numerics="ideal"), whole)
    same(computed(call, data, column, numerics="trn2"), short)

    def product(dst: Any, a: Any, b: Any) -> None:
        nisa.tensor_tensor(dst, a, b, nl.multiply)

    for numerics in ("ideal", "trn2"):
        same(computed(tensor_scalar(nl.multiply, float(column[0, 0])), data, numerics=numerics), whole)
        same(computed(product, data, np.ascontiguousarray(whole), numerics=numerics), whole)


@pytest.mark.parametrize("reverse", [False, True])
def test_pointer_operands_are_rounded_to_nearest(reverse: bool) -> None:
    def call(dst: Any, data: Any, a: Any, b: Any) -> None:
        nisa.tensor_scalar(dst, data, nl.subtract, a, reverse, nl.multiply, b)

    other = values(64, 1, seed=8)
    difference = pointer(COLUMN) - X if reverse else X - pointer(COLUMN)
    same(computed(call, X, COLUMN, other, numerics="trn2"), difference * pointer(other))
    assert (pointer(COLUMN) != COLUMN).any()


@pytest.mark.parametrize(
    "target, names, accepted",
    [
        ("trn2", ("multiply", "add"), True),
        ("trn2", ("multiply",), True),
        ("trn2", ("add",), True),
        ("trn2", ("add", "multiply"), False),
        ("trn2", ("subtract",), False),
        ("trn2", ("multiply", "subtract"), False),
        ("trn1", ("multiply", "add"), False),
        ("trn3", ("add", "multiply"), True),
        ("trn3", ("maximum",), False),
    ],
)
def test_tensor_scalar_on_the_scalar_engine(target: str, names: tuple[str, ...], accepted: bool) -> None:
    keywords = {"op1": op(names[1]), "operand1": 0.5} if len(names) > 1 else {}
    call = tensor_scalar(op(names[0]), 2.0, engine=nisa.engine.scalar, **keywords)
    if not accepted:
        refused("cannot run on engine scalar", call, X, target=target)
        return
    result = execute(call, X, target=target)
    expected = ARITHMETIC[names[0]](X, F32(2))
    same(result.outputs, ARITHMETIC[names[1]](expected, F32(0.5)) if len(names) > 1 else expected)
    assert record_of(result, "tensor_scalar").engine == "scalar"


def test_tensor_scalar_records_operators_pointers_and_columns() -> None:
    result = execute(
        lambda dst, d, c: nisa.tensor_scalar(dst, d, nl.subtract, c, op1=nl.multiply, operand1=2.0), X, COLUMN
    )
    record = record_of(result, "tensor_scalar")
    assert record.engine == "vector" and record.attributes == {"ops": ("subtract", "multiply"), "pointers": 1}
    assert [access.shape for access in record.reads] == [(64, 24), (64, 1)]


def test_columns_chosen_at_run_time_are_read_with_their_index() -> None:
    def call(dst: Any, data: Any, table: Any, index: Any) -> None:
        column = table.ap([[24, 64], [1, 1]], scalar_offset=index, indirect_dim=1)
        nisa.tensor_scalar(dst, data, nl.add, column)

    result = execute(call, X, Y, np.array([[5]], np.int32))
    same(result.outputs, X + Y[:, 5:6])
    assert [access.shape for access in record_of(result, "tensor_scalar").reads] == [(64, 24), (64, 1), (1, 1)]


HALF = COLUMN.astype(BF16)


@pytest.mark.parametrize(
    "match, positional, keywords, options",
    [
        ("op0 nl.abs is unary: operand0 must be None or 0, got 1", (nl.abs, 1), {}, {}),
        ("op0 nl.add needs operand0", (nl.add, None), {}, {}),
        ("op1 nl.add needs operand1", (nl.add, 1.0), {"op1": nl.add}, {}),
        ("operand1 is given without op1", (nl.add, 1.0), {"operand1": 1.0}, {}),
        ("must both be arithmetic or both bitvec", (nl.bitwise_and, 1), {"op1": nl.add, "operand1": 1}, {"ints": True}),
        ("op0 nl.bitwise_and needs an integer operand0, got 1.5", (nl.bitwise_and, 1.5), {}, {"ints": True}),
        ("data is float32; bitvec operators take integer dtypes only", (nl.bitwise_and, 1), {}, {}),
        ("dst is float32; bitvec operators take integer", (nl.bitwise_and, 1), {}, {"ints": True, "to": "float32"}),
        ("cannot run on engine gpsimd", (nl.add, 1.0), {"engine": nisa.engine.gpsimd}, {}),
        ("cannot run on engine gpsimd", (nl.bitwise_and, 1), {"engine": nisa.engine.gpsimd}, {"ints": True}),
        ("cannot run on engine scalar", (nl.bitwise_and, 1), {"engine": nisa.engine.scalar}, {"ints": True}),
        ("cannot run on engine vector", (nl.rsqrt, 0.0), {"engine": nisa.engine.vector}, {}),
        ("cannot run on engine tensor", (nl.add, 1.0), {"engine": nisa.engine.tensor}, {}),
        ("rsqrt runs on gpsimd; accepted beside it", (nl.subtract, 1.0), {"op1": nl.rsqrt}, {}),
        ("op0 nl.power does not exist on vector", (nl.power, 2.0), {}, {}),
        ("op0 nl.square needs gen4 or later, the target is gen3", (nl.square, None), {}, {}),
        ("op0 nl.relu needs gen4 or later", (nl.relu, None), {}, {"target": "trn1"}),
        ("op0 nl.reciprocal is not an ALU operator", (nl.reciprocal, None), {}, {}),
        ("op0 nl.sigmoid is not an ALU operator", (nl.sigmoid, None), {}, {}),
    ],
)
def test_tensor_scalar_refuses(match: str, positional: Any, keywords: Any, options: Any) -> None:
    options = dict(options)
    ints = options.pop("ints", False)
    options.setdefault("dtype", options.pop("to", "int32" if ints else "float32"))
    refused(match, tensor_scalar(*positional, **keywords), INTS if ints else X, **options)


@pytest.mark.parametrize(
    "match, column",
    [
        ("operand0 must be float32, got bfloat16", HALF),
        (r"operand0 must have shape \(64, 1\), got \(64, 2\)", Y[:, :2]),
        (r"operand0 must have shape \(64, 1\), got \(32, 1\)", COLUMN[:32]),
    ],
)
def test_tensor_scalar_refuses_columns(match: str, column: Any) -> None:
    refused(match, lambda dst, d, c: nisa.tensor_scalar(dst, d, nl.add, c), X, np.ascontiguousarray(column))


def test_tensor_scalar_refuses_wrong_operands() -> None:
    def column_bits(dst: Any, data: Any, column: Any) -> None:
        nisa.tensor_scalar(dst, data, nl.bitwise_and, column)

    refused(
        "operand0 is int8, data is int32: bitvec operators do not cast",
        column_bits,
        INTS,
        np.ones((4, 1), np.int8),
        dtype="int32",
    )
    refused("operand0 is float32; bitvec", column_bits, INTS, np.ones((4, 1), F32), dtype="int32")
    refused("operand0 must be a number or a column", tensor_scalar(nl.add, "1"), X, error=TypeError)
    refused("operand0 must be a number or a column", tensor_scalar(nl.add, True), X, error=TypeError)
    refused("op0 must be an operator", tensor_scalar("add", 1.0), X, error=TypeError)
    refused("dst has 12 elements per partition, data has 24", tensor_scalar(nl.add, 1.0), X, shape=(64, 12))
    refused("on gpsimd has .*psum.; accepted: sbuf", tensor_scalar(nl.rsqrt, 0.0), X, source=nl.psum)
    refused("on gpsimd has .*psum.; accepted: sbuf", tensor_scalar(nl.rsqrt, 0.0), X, buffer=nl.psum)


def test_more_than_128_partitions_are_refused() -> None:
    def call(dst: Any, a: Any) -> None:
        wide = nl.ndarray((256, 24), nl.float32, buffer=nl.private_hbm)
        nisa.tensor_scalar(dst, wide, nl.add, 1.0)

    refused("data is in private_hbm", call, X)
    refused("partition dimension 256 exceeds maximum 128", lambda dst, a: nl.ndarray((256, 4), nl.float32), X)
