# SPDX-License-Identifier: Apache-2.0
"""tensor_tensor: every operator against NumPy, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
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
    same(
        computed(tensor_tensor("right_shift"), np.array([[-2]], np.int32), np.array([[1]], np.int32), dtype="int32"),
        np.array([[2**31 - 1]], np.int32),
    )


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
    for options, engine in (
        ({}, nisa.engine.vector),
        ({"source": nl.psum}, nisa.engine.unknown),
        ({"buffer": nl.psum}, nisa.engine.unknown),
    ):
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
    same(
        computed(tensor_tensor("power"), np.full((2, 2), 3, np.int32), np.full((2, 2), 4, np.int32), dtype="int32"),
        np.full((2, 2), 81, np.int32),
    )


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
    same(
        computed(lambda dst, a, b: nisa.tensor_tensor(dst, a[:, 0:24:2], b[:, 1:24:2], nl.add), X, Y, shape=(64, 12)),
        X[:, ::2] + Y[:, 1::2],
    )
    same(computed(lambda dst, a, b: nisa.tensor_tensor(dst, a, b.broadcast(1, 24), nl.add), X, COLUMN), X + COLUMN)
    same(
        computed(lambda dst, a, b: nisa.tensor_tensor(dst, a, b.permute((0, 2, 1)), nl.add), X, Y.reshape(64, 4, 6)),
        X + Y.reshape(64, 4, 6).transpose(0, 2, 1).reshape(64, 24),
    )


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


@pytest.mark.parametrize(
    "match, name, keywords, arrays, options",
    [
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
    ],
)
def test_tensor_tensor_refuses(match: str, name: str, keywords: Any, arrays: Any, options: Any) -> None:
    refused(match, tensor_tensor(name, **keywords), *arrays, **options)


def test_tensor_tensor_refuses_wrong_types_and_places() -> None:
    refused(
        "data1 and data2 are both in psum",
        lambda dst, a, b: nisa.tensor_tensor(dst, in_psum(a), in_psum(b), nl.add),
        X,
        Y,
    )
    refused(
        "op must be an operator of nki.language",
        lambda dst, a, b: nisa.tensor_tensor(dst, a, b, np.add),
        X,
        Y,
        error=TypeError,
    )
    refused(
        "engine must be a member",
        lambda dst, a, b: nisa.tensor_tensor(dst, a, b, nl.add, engine=5),
        X,
        Y,
        error=TypeError,
    )
    refused("data2 must be a tensor", lambda dst, a: nisa.tensor_tensor(dst, a, 1.0, nl.add), X, error=TypeError)

    def with_hbm(dst: Any, a: Any) -> None:
        nisa.tensor_tensor(dst, a, nl.ndarray(a.shape, a.dtype, buffer=nl.private_hbm), nl.add)

    refused("data2 is in private_hbm; accepted: sbuf or psum", with_hbm, X)
    refused("unexpected keyword", lambda dst, a: nisa.tensor_tensor(dst, a, a, nl.add, mask=None), X, error=TypeError)
