# SPDX-License-Identifier: Apache-2.0
"""scalar_tensor_tensor, the scans and reciprocal: values against NumPy, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
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
X, Y = values(64, 24), values(64, 24, seed=1)
COLUMN = values(64, 1, seed=2)
HALF = COLUMN.astype(BF16)
INTS = np.ones((4, 8), np.int32)

# --- scalar_tensor_tensor --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["add", "subtract", "multiply", "maximum", "greater"])
@pytest.mark.parametrize("second", ["add", "subtract", "multiply", "minimum", "less"])
@pytest.mark.parametrize("reverse0, reverse1", [(False, False), (True, False), (False, True)])
def test_scalar_tensor_tensor(first: str, second: str, reverse0: bool, reverse1: bool) -> None:
    def call(dst: Any, data: Any, tile: Any, column: Any) -> list[Any]:
        other = nl.ndarray(data.shape, nl.float32)
        nisa.scalar_tensor_tensor(dst, data, op(first), column, op(second), tile, reverse0, reverse1)
        nisa.scalar_tensor_tensor(other, data, op(first), 0.75, op(second), tile, reverse0=reverse0, reverse1=reverse1)
        return [other]

    for actual, operand in zip(computed(call, X, Y, COLUMN), (COLUMN, F32(0.75)), strict=True):
        middle = ARITHMETIC[first](*((operand, X) if reverse0 else (X, operand))).astype(F32)
        same(actual, ARITHMETIC[second](*((Y, middle) if reverse1 else (middle, Y))).astype(F32))


def test_scalar_tensor_tensor_dtypes_places_and_unary() -> None:
    data, tile = (10 * X).astype(BF16), (10 * Y).astype(np.int16)

    def call(dst: Any, d: Any, t: Any, c: Any) -> None:
        nisa.scalar_tensor_tensor(dst, d, nl.subtract, c, nl.multiply, t)

    column = HALF.astype(F32)
    for options in ({}, {"source": nl.psum}, {"buffer": nl.psum}):
        same(
            computed(call, data, tile, HALF, dtype="float16", **options),
            ((data.astype(F32) - column) * tile.astype(F32)).astype(np.float16),
        )
    same(
        computed(
            lambda dst, d, t: (
                nisa.scalar_tensor_tensor(d, d, nl.abs, None, nl.multiply, t) and nisa.tensor_copy(dst, d)
            ),
            X,
            Y.reshape(64, 4, 6),
        ),
        np.abs(X) * Y,
    )
    same(computed(call, X, Y, COLUMN, numerics="trn2"), (X - pointer(COLUMN)) * Y)


def test_scalar_tensor_tensor_records_operators() -> None:
    result = execute(
        lambda dst, d, t, c: nisa.scalar_tensor_tensor(dst, d, nl.subtract, c, nl.multiply, t), X, Y, COLUMN
    )
    record = record_of(result, "scalar_tensor_tensor")
    assert record.engine == "vector" and record.attributes == {"ops": ("subtract", "multiply"), "pointers": 1}
    assert [access.shape for access in record.reads] == [(64, 24), (64, 24), (64, 1)]


@pytest.mark.parametrize(
    "match, first, operand0, second, dtype",
    [
        ("op0 nl.bitwise_and is a bitvec operator", nl.bitwise_and, 1, nl.add, "int32"),
        ("op1 nl.bitwise_and is a bitvec operator", nl.add, 1, nl.bitwise_and, "int32"),
        ("op1 nl.abs is unary", nl.add, 1, nl.abs, "float32"),
        ("op1 nl.rsqrt does not exist on vector", nl.add, 1, nl.rsqrt, "float32"),
        ("op0 nl.power does not exist on vector", nl.power, 1, nl.add, "float32"),
        ("op0 nl.add needs operand0", nl.add, None, nl.add, "float32"),
    ],
)
def test_scalar_tensor_tensor_refuses(match: str, first: Any, operand0: Any, second: Any, dtype: str) -> None:
    refused(
        match,
        lambda dst, d: nisa.scalar_tensor_tensor(dst, d, first, operand0, second, d),
        INTS.astype(dtype),
        dtype=dtype,
    )


def test_scalar_tensor_tensor_refuses_operands() -> None:
    refused(
        "data and operand1 are both in psum",
        lambda dst, a, b: nisa.scalar_tensor_tensor(dst, in_psum(a), nl.add, 1.0, nl.add, in_psum(b)),
        X,
        Y,
    )
    refused(
        "operand1 must be a tensor",
        lambda dst, a: nisa.scalar_tensor_tensor(dst, a, nl.add, 1.0, nl.add, 2.0),
        X,
        error=TypeError,
    )
    refused(
        "operand1 has 1 elements per partition, data has 24",
        lambda dst, a, c: nisa.scalar_tensor_tensor(dst, a, nl.add, 1.0, nl.add, c),
        X,
        COLUMN,
    )


# --- tensor_scalar_cumulative ----------------------------------------------------------------------------------------

IDENTITY = {"add": 0.0, "subtract": 0.0, "multiply": 1.0, "maximum": -np.inf, "minimum": np.inf}


def cumulated(name: str, terms: Any, start: Any) -> Any:
    """reg = op(term, reg), column by column, in float32."""
    reg, columns = np.broadcast_to(start, (len(terms), 1)).astype(F32), []
    for column in range(terms.shape[1]):
        reg = ARITHMETIC[name](terms[:, column : column + 1], reg).astype(F32)
        columns.append(reg)
    return np.concatenate(columns, axis=1)


@pytest.mark.parametrize("second", IDENTITY)
@pytest.mark.parametrize("first", ["add", "subtract", "multiply", "maximum", "less"])
def test_cumulative_starts_from_the_identity(first: str, second: str) -> None:
    def call(dst: Any, src: Any, column: Any) -> list[Any]:
        other = nl.ndarray(src.shape, nl.float32)
        nisa.tensor_scalar_cumulative(dst, src, op(first), op(second), column)
        nisa.tensor_scalar_cumulative(other, src, op(first), op(second), 0.5)
        return [other]

    for actual, operand in zip(computed(call, X, COLUMN), (COLUMN, F32(0.5)), strict=True):
        terms = ARITHMETIC[first](X, operand).astype(F32)
        same(actual, cumulated(second, terms, IDENTITY[second]))


@pytest.mark.parametrize("second", IDENTITY)
def test_cumulative_loads_and_goes_on(second: str) -> None:
    def call(dst: Any, src: Any, column: Any) -> list[Any]:
        number, more = nl.ndarray(src.shape, nl.float32), nl.ndarray(src.shape, nl.float32)
        nisa.tensor_scalar_cumulative(number, src, nl.multiply, op(second), 1.0, 2.5, CMD.load_reduce)
        nisa.tensor_scalar_cumulative(dst, src, nl.multiply, op(second), 1.0, column, reduce_cmd=CMD.load_reduce)
        nisa.tensor_scalar_cumulative(more, src, nl.multiply, op(second), 1.0, reduce_cmd=CMD.reduce)
        return [number, more]

    from_column, from_number, more = computed(call, X, COLUMN)
    same(from_number, cumulated(second, X, F32(2.5)))
    same(from_column, cumulated(second, X, COLUMN))
    same(more, cumulated(second, X, from_column[:, -1:]))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.float16, BF16, F32], ids=str)
def test_cumulative_keeps_float32_whatever_the_dtypes(dtype: Any) -> None:
    src = np.abs(3 * X).astype(dtype)
    call = lambda dst, src: nisa.tensor_scalar_cumulative(dst, src, nl.multiply, nl.add, 0.3)  # noqa: E731
    expected = cumulated("add", src.astype(F32) * F32(0.3), 0.0)
    for options in ({}, {"source": nl.psum}, {"buffer": nl.psum}):
        same(computed(call, src, dtype=np.dtype(dtype).name, **options), written(expected, dtype))


def test_cumulative_pointers_and_record() -> None:
    def call(dst: Any, src: Any, column: Any) -> None:
        nisa.tensor_scalar_cumulative(dst, src, nl.multiply, nl.add, column, column, CMD.load_reduce)

    result = execute(call, X, COLUMN, numerics="trn2")
    same(result.outputs, cumulated("add", X * pointer(COLUMN), pointer(COLUMN)))
    record = record_of(result, "tensor_scalar_cumulative")
    assert record.engine == "vector" and len(record.reads) == 3
    assert record.attributes == {
        "ops": ("multiply", "add"),
        "pointers": 2,
        "reduce_op": "add",
        "reduce_cmd": "load_reduce",
        "read_out": False,
    }


@pytest.mark.parametrize(
    "match, arguments, keywords, dtype",
    [
        ("op1 nl.logical_and is not accepted", (nl.add, nl.logical_and, 1.0), {}, "float32"),
        ("op1 nl.greater is not accepted", (nl.add, nl.greater, 1.0), {}, "float32"),
        ("op0 nl.bitwise_and is a bitvec operator", (nl.bitwise_and, nl.add, 1), {}, "int8"),
        ("reduce_cmd idle is not accepted", (nl.add, nl.add, 1.0), {"reduce_cmd": CMD.idle}, "float32"),
        ("reduce_cmd reset is not accepted", (nl.add, nl.add, 1.0), {"reduce_cmd": CMD.reset}, "float32"),
        ("imm1 belongs to reduce_cmd load_reduce, got 1.0", (nl.add, nl.add, 1.0, 1.0), {}, "float32"),
        ("imm1 belongs to .* load_reduce, got None", (nl.add, nl.add, 1.0), {"reduce_cmd": CMD.load_reduce}, "float32"),
        ("src is int32; accepted", (nl.add, nl.add, 1.0), {}, "int32"),
        ("src is uint32; accepted", (nl.add, nl.add, 1.0), {}, "uint32"),
        ("op0 nl.add needs imm0", (nl.add, nl.add, None), {}, "float32"),
    ],
)
def test_cumulative_refuses(match: str, arguments: Any, keywords: Any, dtype: str) -> None:
    refused(
        match,
        lambda dst, src: nisa.tensor_scalar_cumulative(dst, src, *arguments, **keywords),
        INTS.astype(dtype),
        dtype=dtype,
    )


def test_cumulative_refuses_operands() -> None:
    refused(
        "dst is int32; accepted",
        lambda dst, src: nisa.tensor_scalar_cumulative(dst, src, nl.add, nl.add, 1.0),
        X,
        dtype="int32",
    )
    refused(
        "imm0 must be float32, got bfloat16",
        lambda dst, src, c: nisa.tensor_scalar_cumulative(dst, src, nl.add, nl.add, c),
        X,
        HALF,
    )
    for match, keywords in (
        ("reduce_cmd must be a member", {"reduce_cmd": 3}),
        ("unexpected keyword", {"reverse0": True}),
    ):
        refused(
            match,
            lambda dst, src, k=keywords: nisa.tensor_scalar_cumulative(dst, src, nl.add, nl.add, 1.0, **k),
            X,
            error=TypeError,
        )


# --- tensor_tensor_scan ----------------------------------------------------------------------------------------------


def scanned(first: str, second: str, start: Any, reverse0: bool, reverse1: bool) -> Any:
    carry, columns = np.broadcast_to(start, (64, 1)).astype(F32), []
    for i in range(X.shape[1]):
        a, b = X[:, i : i + 1], Y[:, i : i + 1]
        inner = ARITHMETIC[first](*((carry, a) if reverse0 else (a, carry))).astype(F32)
        carry = ARITHMETIC[second](*((b, inner) if reverse1 else (inner, b))).astype(F32)
        columns.append(carry)
    return np.concatenate(columns, axis=1)


@pytest.mark.parametrize("first", ["multiply", "subtract", "maximum", "greater"])
@pytest.mark.parametrize("second", ["add", "subtract", "minimum"])
@pytest.mark.parametrize("reverse0, reverse1", [(False, False), (True, False), (False, True)])
def test_scan(first: str, second: str, reverse0: bool, reverse1: bool) -> None:
    def call(dst: Any, a: Any, b: Any, column: Any) -> list[Any]:
        other = nl.ndarray(a.shape, nl.float32)
        nisa.tensor_tensor_scan(dst, a, b, column, op(first), op(second), reverse0, reverse1)
        nisa.tensor_tensor_scan(other, a, b, 0.5, op(first), op(second), reverse0=reverse0, reverse1=reverse1)
        return [other]

    from_column, from_number = computed(call, X, Y, COLUMN)
    same(from_column, scanned(first, second, COLUMN, reverse0, reverse1))
    same(from_number, scanned(first, second, F32(0.5), reverse0, reverse1))


def test_scans_chain_by_the_last_column() -> None:
    def call(dst: Any, a: Any, b: Any) -> None:
        nisa.tensor_tensor_scan(dst[:, :10], a[:, :10], b[:, :10], 0.0, nl.multiply, nl.add)
        nisa.tensor_tensor_scan(dst[:, 10:], a[:, 10:], b[:, 10:], dst[:, 9:10], nl.multiply, nl.add)

    same(computed(call, X, Y), scanned("multiply", "add", 0.0, False, False))


def test_scan_carries_float32_reads_psum_and_rounds_pointers() -> None:
    def call(dst: Any, a: Any, b: Any, column: Any) -> None:
        nisa.tensor_tensor_scan(dst, a, b, column, nl.multiply, nl.add)

    expected = scanned("multiply", "add", COLUMN, False, False)
    same(computed(call, X, Y, COLUMN, dtype="bfloat16"), expected.astype(BF16))
    for options in ({"source": nl.psum}, {"buffer": nl.psum}):
        same(computed(call, X, Y, COLUMN, **options), expected)
    result = execute(call, X, Y, COLUMN, numerics="trn2")
    same(result.outputs, scanned("multiply", "add", pointer(COLUMN), False, False))
    record = record_of(result, "tensor_tensor_scan")
    assert record.engine == "vector" and record.attributes == {"ops": ("multiply", "add"), "pointers": 1}


@pytest.mark.parametrize(
    "match, first, second",
    [
        ("op0 nl.abs is unary", nl.abs, nl.add),
        ("op1 nl.abs is unary", nl.add, nl.abs),
        ("op0 nl.bitwise_or is a bitvec operator", nl.bitwise_or, nl.add),
        ("op1 nl.power does not exist on vector", nl.add, nl.power),
    ],
)
def test_scan_refuses(match: str, first: Any, second: Any) -> None:
    refused(match, lambda dst, a: nisa.tensor_tensor_scan(dst, a, a, 0.0, first, second), X)


def test_scan_refuses_operands() -> None:
    refused(
        "data0 and data1 are both in psum",
        lambda dst, a, b: nisa.tensor_tensor_scan(dst, in_psum(a), in_psum(b), 0.0, nl.multiply, nl.add),
        X,
        Y,
    )
    refused(
        "data1 has 32 partitions",
        lambda dst, a, b: nisa.tensor_tensor_scan(dst, a, b, 0.0, nl.multiply, nl.add),
        X,
        Y[:32],
    )

    def start_from(dst: Any, a: Any, initial: Any = None) -> None:
        nisa.tensor_tensor_scan(dst, a, a, initial, nl.multiply, nl.add)

    refused("initial must be float32, got bfloat16", start_from, X, HALF)
    refused(r"initial must have shape \(64, 1\), got \(64, 24\)", start_from, X, Y)
    refused("initial must be a number", start_from, X, error=TypeError)


# --- reciprocal ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", BUFFERS)
@pytest.mark.parametrize("buffer", BUFFERS)
def test_reciprocal(source: Any, buffer: Any) -> None:
    data = X.copy()
    data[0, :3] = 0, np.inf, np.nan
    with np.errstate(divide="ignore"):
        same(computed(nisa.reciprocal, data, source=source, buffer=buffer), F32(1) / data)


def test_reciprocal_casts_in_place_and_keeps_ranks_apart() -> None:
    data = (np.abs(10 * X) + 1).astype(np.int16)
    same(
        computed(nisa.reciprocal, data, dtype="bfloat16", shape=(64, 2, 12)),
        (F32(1) / data.astype(F32)).astype(BF16).reshape(64, 2, 12),
    )
    same(computed(lambda dst, d: nisa.reciprocal(d, d) and nisa.tensor_copy(dst, d), X), F32(1) / X)
    assert record_of(execute(nisa.reciprocal, X), "reciprocal").engine == "vector"


def test_reciprocal_refuses() -> None:
    refused("dst has 12 elements per partition, data has 24", nisa.reciprocal, X, shape=(64, 12))
    refused("dst has 32 partitions, data has 64", nisa.reciprocal, X, shape=(32, 24))
    refused("data must be a tensor", lambda dst, d: nisa.reciprocal(dst, 2.0), X, error=TypeError)
    refused("unexpected keyword", lambda dst, d: nisa.reciprocal(dst, d, engine=nisa.engine.vector), X, error=TypeError)
