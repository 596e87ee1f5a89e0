# SPDX-License-Identifier: Apache-2.0
"""tensor_tensor and tensor_scalar: every operator against NumPy, and what they refuse."""

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
    FP8,
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
# Zeros, ties and equal elements, for comparisons and logic.
FEW = np.random.default_rng(3).integers(-2, 3, (64, 24)).astype(F32)
FEW2 = np.random.default_rng(4).integers(-2, 3, (64, 24)).astype(F32)

def tensor_tensor(name: str, /, **keywords: Any) -> Callable[..., Any]:
    return lambda dst, a, b: nisa.tensor_tensor(dst, a, b, op(name), **keywords)


def tensor_scalar(*positional: Any, **keywords: Any) -> Callable[..., Any]:
    return lambda dst, data, *columns: nisa.tensor_scalar(dst, data, *positional, *columns, **keywords)


# --- tensor_tensor ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARITHMETIC)
def test_tensor_tensor_computes_in_float32(name: str) -> None:
    for a, b in ((X, Y), (FEW, FEW2)):
        same(computed(tensor_tensor(name), a, b), ARITHMETIC[name](a, b).astype(F32))


@pytest.mark.parametrize("name", ["add", "multiply", "greater"])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.float16, BF16, FP8, F32], ids=str)
def test_tensor_tensor_casts_to_the_destination(name: str, dtype: Any) -> None:
    a, b = (100 * X).astype(BF16), (100 * Y).astype(np.int16)
    with np.errstate(over="ignore"):
        expected = written(ARITHMETIC[name](a.astype(F32), b.astype(F32)), dtype)
        same(computed(tensor_tensor(name), a, b, dtype=np.dtype(dtype).name), expected)


def test_ties_round_to_even_and_integers_saturate() -> None:
    a = np.array([[0.5, 1.5, 2.5, -0.5, 126.5, 127.5, 300, -300, np.inf, -np.inf]], F32)
    expected = np.array([[0, 2, 2, 0, 126, 127, 127, -128, 127, -128]], np.int8)
    same(computed(tensor_tensor("add"), a, np.zeros_like(a), dtype="int8"), expected)


@pytest.mark.parametrize("name", BITVEC)
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32], ids=str)
def test_bitvec_operators_work_on_bits(name: str, dtype: Any) -> None:
    rng, width = np.random.default_rng(5), np.dtype(dtype).itemsize
    bits = rng.integers(0, 2 ** (8 * width), (64, 24), dtype=np.uint64).astype(f"u{width}")
    other = rng.integers(0, 8, (64, 24)).astype(f"u{width}") if "shift" in name else np.flip(bits)
    result = execute(tensor_tensor(name), bits.view(dtype), other.view(dtype), dtype=np.dtype(dtype).name)
    same(result.outputs, BITVEC[name](bits, other).view(dtype))
    assert record_of(result, "tensor_tensor").engine == "vector"


def test_right_shift_is_logical() -> None:
    same(computed(tensor_tensor("right_shift"), np.array([[-2]], np.int32), np.array([[1]], np.int32), dtype="int32"),
         np.array([[2**31 - 1]], np.int32))


WORDS = np.array([[2**24 + 1, -(2**24) - 1, 2**31 - 1, -(2**31), 7, -7]], np.int32)
OTHERS = np.array([[2, 2, 1, -1, -3, 2**20 + 1]], np.int32)


@pytest.mark.parametrize("name", ARITHMETIC)
@pytest.mark.parametrize("dtype", [np.int32, np.uint32], ids=str)
def test_words_are_exact_on_gpsimd_and_wrap(name: str, dtype: Any) -> None:
    a, b = WORDS.view(dtype), OTHERS.view(dtype)
    result = execute(tensor_tensor(name), a, b, dtype=np.dtype(dtype).name)
    with np.errstate(over="ignore"):
        same(result.outputs, ARITHMETIC[name](a, b).astype(dtype))
    assert record_of(result, "tensor_tensor").engine == "gpsimd"


def test_words_are_float32_on_vector_and_in_psum() -> None:
    expected = written(WORDS.astype(F32) + OTHERS.astype(F32), np.int32)
    for options, engine in (({}, nisa.engine.vector), ({"source": nl.psum}, nisa.engine.unknown),
                            ({"buffer": nl.psum}, nisa.engine.unknown)):
        result = execute(tensor_tensor("add", engine=engine), WORDS, OTHERS, dtype="int32", **options)
        same(result.outputs, expected)
        assert {r.engine for r in result.trace if r.opcode == "tensor_tensor"} == {"vector"}
    assert expected[0, 0] != WORDS[0, 0] + OTHERS[0, 0]
    same(computed(tensor_tensor("add"), WORDS, OTHERS), (WORDS.astype(F32) + OTHERS.astype(F32)))


def test_power_runs_on_gpsimd() -> None:
    base, exponent = np.abs(X) + F32(0.5), np.round(Y * 2)
    result = execute(tensor_tensor("power"), base, exponent)
    np.testing.assert_allclose(result.outputs, np.power(base.astype(float), exponent.astype(float)), rtol=1e-6)
    assert record_of(result, "tensor_tensor").engine == "gpsimd"
    same(computed(tensor_tensor("power"), np.full((2, 2), 3, np.int32), np.full((2, 2), 4, np.int32), dtype="int32"),
         np.full((2, 2), 81, np.int32))


def test_magnitude_operators_return_the_signed_original_and_the_right_one_on_a_tie() -> None:
    a, b = np.array([[3, -3, 2, -2, 2]], F32), np.array([[-2, 2, 3, 2, -2]], F32)
    same(computed(tensor_tensor("abs_max"), a, b, target="trn3"), np.array([[3, -3, 3, 2, -2]], F32))
    same(computed(tensor_tensor("abs_min"), a, b, target="trn3"), np.array([[-2, 2, 2, 2, -2]], F32))


@pytest.mark.parametrize("source", BUFFERS)
@pytest.mark.parametrize("buffer", BUFFERS)
def test_tensor_tensor_reads_and_writes_psum(source: Any, buffer: Any) -> None:
    same(computed(tensor_tensor("subtract"), X, Y, source=source, buffer=buffer), X - Y)


def test_ranks_may_differ_and_views_may_be_strided() -> None:
    same(computed(tensor_tensor("subtract"), X.reshape(64, 4, 6), Y.reshape(64, 2, 3, 4), shape=(64, 24)), X - Y)
    same(computed(lambda dst, a, b: nisa.tensor_tensor(dst, a[:, 0:24:2], b[:, 1:24:2], nl.add), X, Y,
                  shape=(64, 12)), X[:, ::2] + Y[:, 1::2])
    same(computed(lambda dst, a, b: nisa.tensor_tensor(dst, a, b.broadcast(1, 24), nl.add), X, COLUMN), X + COLUMN)
    same(computed(lambda dst, a, b: nisa.tensor_tensor(dst, a, b.permute((0, 2, 1)), nl.add), X,
                  Y.reshape(64, 4, 6)), X + Y.reshape(64, 4, 6).transpose(0, 2, 1).reshape(64, 24))


@pytest.mark.parametrize("name", ["add", "subtract"])
def test_destinations_may_be_operands(name: str) -> None:
    def call(dst: Any, a: Any, b: Any) -> list[Any]:
        nisa.tensor_tensor(a, a, b, op(name))
        nisa.tensor_tensor(b, a, b, op(name))
        nisa.tensor_tensor(dst, b, b, op(name))
        return [a, b]

    first = ARITHMETIC[name](X, Y)
    second = ARITHMETIC[name](first, Y)
    for actual, expected in zip(computed(call, X, Y), (ARITHMETIC[name](second, second), first, second), strict=True):
        same(actual, expected)


def test_overlapping_shifted_destination_sees_the_old_values() -> None:
    def call(dst: Any, a: Any) -> list[Any]:
        nisa.tensor_tensor(a[:, 1:24], a[:, 0:23], a[:, 0:23], nl.add)
        nisa.tensor_copy(dst, a)
        return []

    same(computed(call, X), np.concatenate([X[:, :1], X[:, :23] + X[:, :23]], axis=1))


def test_other_partitions_may_be_written() -> None:
    def call(dst: Any, a: Any, b: Any) -> None:
        nisa.memset(dst, 0.0)
        nisa.tensor_tensor(dst[32:64], a[0:32], b[32:64], nl.add)

    same(computed(call, X, Y), np.concatenate([np.zeros((32, 24), F32), X[:32] + Y[32:]]))


def test_nan_stays_in_its_element_and_passes_maximum() -> None:
    a, b = X.copy(), Y.copy()
    a[3, 5], b[7, 2] = np.nan, np.nan
    for name in ("add", "maximum", "minimum"):
        result = computed(tensor_tensor(name), a, b)
        assert np.argwhere(np.isnan(result)).tolist() == [[3, 5], [7, 2]]
    same(computed(tensor_tensor("greater"), a, b), (a > b).astype(F32))


def test_tensor_tensor_records_its_operator() -> None:
    record = record_of(execute(tensor_tensor("add", name="sum"), X, Y), "tensor_tensor")
    assert (record.engine, record.name, record.attributes) == ("vector", "sum", {"op": "add"})
    assert len(record.reads) == 2 and len(record.writes) == 1


INTS = np.ones((4, 8), np.int32)


@pytest.mark.parametrize("match, name, keywords, arrays, options", [
    ("op nl.abs is unary", "abs", {}, (X, Y), {}),
    ("op nl.invert is unary", "invert", {}, (INTS, INTS), {"dtype": "int32"}),
    ("op nl.exp is not an ALU operator", "exp", {}, (X, Y), {}),
    ("op nl.divide is not an ALU operator", "divide", {}, (X, Y), {}),
    ("op nl.abs_max needs gen4", "abs_max", {}, (X, Y), {}),
    ("cannot run on engine scalar", "add", {"engine": nisa.engine.scalar}, (X, Y), {}),
    ("cannot run on engine tensor", "add", {"engine": nisa.engine.tensor}, (X, Y), {}),
    ("cannot run on engine gpsimd", "maximum", {"engine": nisa.engine.gpsimd}, (X, Y), {}),
    ("cannot run on engine vector", "power", {"engine": nisa.engine.vector}, (X, Y), {}),
    ("cannot run on engine gpsimd", "bitwise_or", {"engine": nisa.engine.gpsimd}, (INTS, INTS), {"dtype": "int32"}),
    ("on gpsimd has an operand in psum", "add", {"engine": nisa.engine.gpsimd}, (X, Y), {"buffer": nl.psum}),
    ("on gpsimd has an operand in psum", "power", {}, (X, Y), {"source": nl.psum}),
    ("on gpsimd has an operand in psum", "power", {}, (X, Y), {"buffer": nl.psum}),
    ("data2 is float32; bitvec", "bitwise_or", {}, (INTS, np.ones((4, 8), F32)), {"dtype": "int32"}),
    ("dst is float32; bitvec", "bitwise_or", {}, (INTS, INTS), {}),
    ("dst is int8, data1 is int32", "bitwise_or", {}, (INTS, INTS), {"dtype": "int8"}),
    ("data2 has 32 partitions, data1 has 64", "add", {}, (X, Y[:32]), {}),
    ("data2 has 12 elements per partition, data1 has 24", "add", {}, (X, Y[:, :12]), {}),
    ("data2 has 1 elements per partition", "add", {}, (X, COLUMN), {}),
    ("dst has 23 elements per partition", "add", {}, (X, Y), {"shape": (64, 23)}),
])
def test_tensor_tensor_refuses(match: str, name: str, keywords: Any, arrays: Any, options: Any) -> None:
    refused(match, tensor_tensor(name, **keywords), *arrays, **options)


def test_tensor_tensor_refuses_wrong_types_and_places() -> None:
    refused("data1 and data2 are both in psum",
            lambda dst, a, b: nisa.tensor_tensor(dst, in_psum(a), in_psum(b), nl.add), X, Y)
    refused("op must be an operator of nki.language", lambda dst, a, b: nisa.tensor_tensor(dst, a, b, np.add), X, Y,
            error=TypeError)
    refused("engine must be a member", lambda dst, a, b: nisa.tensor_tensor(dst, a, b, nl.add, engine=5), X, Y,
            error=TypeError)
    refused("data2 must be a tensor", lambda dst, a: nisa.tensor_tensor(dst, a, 1.0, nl.add), X, error=TypeError)

    def with_hbm(dst: Any, a: Any) -> None:
        nisa.tensor_tensor(dst, a, nl.ndarray(a.shape, a.dtype, buffer=nl.private_hbm), nl.add)

    refused("data2 is in private_hbm; accepted: sbuf or psum", with_hbm, X)
    refused("unexpected keyword", lambda dst, a: nisa.tensor_tensor(dst, a, a, nl.add, mask=None), X, error=TypeError)


# --- tensor_scalar ---------------------------------------------------------------------------------------------------


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
            same(computed(lambda dst, d, c: nisa.tensor_scalar(dst, d, op(name), c, reverse), data, column),
                 function(*pair).astype(F32))


EXACT = ["add", "subtract", "multiply", "maximum", "minimum", "greater", "less_equal", "equal"]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(EXACT), st.sampled_from(EXACT), st.booleans(), st.booleans(),
       st.one_of(st.none(), st.floats(-4, 4, width=32)), st.one_of(st.none(), st.floats(-4, 4, width=32)))
def test_two_stages_follow_each_other_in_float32(first: str, second: str, reverse0: bool, reverse1: bool,
                                                 operand0: float | None, operand1: float | None) -> None:
    """None stands for a column."""

    def call(dst: Any, data: Any, a: Any, b: Any) -> None:
        nisa.tensor_scalar(dst, data, op(first), a if operand0 is None else operand0, reverse0,
                           op(second), b if operand1 is None else operand1, reverse1)

    def stage(name: str, tile: Any, operand: Any, reverse: bool) -> Any:
        return ARITHMETIC[name](*((operand, tile) if reverse else (tile, operand))).astype(F32)

    other = values(64, 1, seed=6)
    middle = stage(first, X, COLUMN if operand0 is None else F32(operand0), reverse0)
    expected = stage(second, middle, other if operand1 is None else F32(operand1), reverse1)
    same(computed(call, X, COLUMN, other), expected)


def test_the_intermediate_is_not_rounded_to_the_destination() -> None:
    same(computed(tensor_scalar(nl.multiply, 1.001, op1=nl.subtract, operand1=1.0), np.full((1, 4), 1, BF16),
                  dtype="bfloat16"), (np.full((1, 4), 1.001, F32) - F32(1)).astype(BF16))


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
    same(computed(tensor_scalar(op(name), 5), bits.view(dtype), **keywords),
         BITVEC[name](bits, bits.dtype.type(5)).view(dtype))
    same(computed(tensor_scalar(op(name), 3, True), (bits % 8).view(dtype), **keywords),
         BITVEC[name](bits.dtype.type(3), bits % 8).view(dtype))
    same(computed(lambda dst, d, c: nisa.tensor_scalar(dst, d, op(name), c, op1=nl.invert), bits.view(dtype),
                  column.view(dtype), **keywords), (~BITVEC[name](bits, column)).view(dtype))


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
    same(computed(lambda dst, d, c: nisa.tensor_scalar(d, d, nl.add, c) and nisa.tensor_copy(dst, d), X, COLUMN),
         X + COLUMN)


def test_pointer_operands_have_18_bits_on_trn2_and_numbers_have_24() -> None:
    column = F32(1) + np.full((4, 1), 2**-20, F32)
    data = np.ones((4, 3), F32)
    whole, short = np.broadcast_to(column, (4, 3)), np.ones((4, 3), F32)

    def call(dst: Any, data: Any, column: Any) -> None:
        nisa.tensor_scalar(dst, data, nl.multiply, column)

    same(computed(call, data, column, numerics="ideal"), whole)
    same(computed(call, data, column, numerics="trn2"), short)
    for numerics in ("ideal", "trn2"):
        same(computed(tensor_scalar(nl.multiply, float(column[0, 0])), data, numerics=numerics), whole)
        same(computed(tensor_tensor("multiply"), data, np.ascontiguousarray(whole), numerics=numerics), whole)


@pytest.mark.parametrize("reverse", [False, True])
def test_pointer_operands_are_rounded_to_nearest(reverse: bool) -> None:
    def call(dst: Any, data: Any, a: Any, b: Any) -> None:
        nisa.tensor_scalar(dst, data, nl.subtract, a, reverse, nl.multiply, b)

    other = values(64, 1, seed=8)
    difference = pointer(COLUMN) - X if reverse else X - pointer(COLUMN)
    same(computed(call, X, COLUMN, other, numerics="trn2"), difference * pointer(other))
    assert (pointer(COLUMN) != COLUMN).any()


@pytest.mark.parametrize("target, names, accepted", [
    ("trn2", ("multiply", "add"), True), ("trn2", ("multiply",), True), ("trn2", ("add",), True),
    ("trn2", ("add", "multiply"), False), ("trn2", ("subtract",), False), ("trn2", ("multiply", "subtract"), False),
    ("trn1", ("multiply", "add"), False), ("trn3", ("add", "multiply"), True), ("trn3", ("maximum",), False),
])
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
    result = execute(lambda dst, d, c: nisa.tensor_scalar(dst, d, nl.subtract, c, op1=nl.multiply, operand1=2.0),
                     X, COLUMN)
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


@pytest.mark.parametrize("match, positional, keywords, options", [
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
])
def test_tensor_scalar_refuses(match: str, positional: Any, keywords: Any, options: Any) -> None:
    options = dict(options)
    ints = options.pop("ints", False)
    options.setdefault("dtype", options.pop("to", "int32" if ints else "float32"))
    refused(match, tensor_scalar(*positional, **keywords), INTS if ints else X, **options)


@pytest.mark.parametrize("match, column", [
    ("operand0 must be float32, got bfloat16", HALF),
    (r"operand0 must have shape \(64, 1\), got \(64, 2\)", Y[:, :2]),
    (r"operand0 must have shape \(64, 1\), got \(32, 1\)", COLUMN[:32]),
])
def test_tensor_scalar_refuses_columns(match: str, column: Any) -> None:
    refused(match, lambda dst, d, c: nisa.tensor_scalar(dst, d, nl.add, c), X, np.ascontiguousarray(column))


def test_tensor_scalar_refuses_wrong_operands() -> None:
    def column_bits(dst: Any, data: Any, column: Any) -> None:
        nisa.tensor_scalar(dst, data, nl.bitwise_and, column)

    refused("operand0 is int8, data is int32: bitvec operators do not cast",
            column_bits, INTS, np.ones((4, 1), np.int8), dtype="int32")
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
