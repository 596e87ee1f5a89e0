# SPDX-License-Identifier: Apache-2.0
"""max8, nc_find_index8 and nc_match_replace8 against NumPy, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from instructions import BF16, BUFFERS, F32, Array, computed, execute, record_of, refused, same, values, written
from launching import nisa, nl

from nki_bn.simulator import UninitializedReadError

X = values(64, 40)
ALL_ONES = 2**32 - 1


def largest(data: Array) -> Array:
    """The 8 largest of every row, descending."""
    return -np.sort(-data.astype(F32), axis=1)[:, :8]


def find(data: Array, vals: Array) -> Array:
    """The n-th of equal values is looked for at the n-th place that holds it."""
    result = np.full(vals.shape, ALL_ONES, np.int64)
    for lane, column in np.ndindex(*vals.shape):
        places = np.flatnonzero(data[lane] == vals[lane, column])
        before = int((vals[lane, :column] == vals[lane, column]).sum())
        if before < len(places):
            result[lane, column] = places[before]
    return result


def replace(data: Array, vals: Array, imm: float) -> tuple[Array, Array]:
    """Values from the last to the first, each at the first place left."""
    result, found = data.copy(), np.full(vals.shape, ALL_ONES, np.int64)
    for lane in range(len(data)):
        left = set(range(data.shape[1]))
        for column in reversed(range(8)):
            place = min((i for i in left if data[lane, i] == vals[lane, column]), default=None)
            if place is not None:
                left.remove(place)
                result[lane, place], found[lane, column] = imm, place
    return result, found


def repeated(*shape: int) -> Array:
    """Few different numbers, so that most of them repeat."""
    return np.random.default_rng(5).integers(-4, 4, shape).astype(F32)


# --- max8 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [X, repeated(64, 40), X[:, :8], values(3, 16384), -np.abs(X)], ids=lambda x: x.shape)
def test_the_largest_descend_and_duplicates_stay(data: Array) -> None:
    same(computed(lambda dst, a: nisa.max8(dst, a), data, shape=(len(data), 8)), largest(data))


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bfloat16"])
def test_the_largest_are_cast(dtype: str) -> None:
    data = (30 * X).astype(BF16)
    result = computed(lambda dst, a: nisa.max8(dst, a), data, dtype=dtype, shape=(64, 8))
    same(result, written(largest(data), BF16 if dtype == "bfloat16" else dtype))


@pytest.mark.parametrize("source", BUFFERS)
@pytest.mark.parametrize("buffer", BUFFERS)
def test_max8_reads_and_writes_both_memories(source: Any, buffer: Any) -> None:
    result = execute(
        lambda dst, a: nisa.max8(dst, a), X.reshape(64, 4, 10), shape=(64, 8), source=source, buffer=buffer
    )
    same(result.outputs, largest(X))
    record = record_of(result, "max8")
    assert record.engine == "vector" and len(record.reads) == len(record.writes) == 1


def test_max8_in_place() -> None:
    def call(dst: Any, a: Any) -> None:
        nisa.max8(a[:, 3:11], a)
        nisa.tensor_copy(dst, a)

    expected = X.copy()
    expected[:, 3:11] = largest(X)
    same(computed(call, X), expected)


@pytest.mark.parametrize(
    "match, data, options",
    [
        ("src must have 8 to 16384 elements per partition, got 7", X[:, :7], {}),
        ("src must have 8 to 16384 elements per partition, got 16385", np.zeros((1, 16385), F32), {}),
        ("src must have at most 3 dimensions, got shape", X.reshape(64, 2, 2, 10), {}),
        (r"dst must have shape \(64, 8\), got \(64, 16\)", X, {"shape": (64, 16)}),
        (r"dst must have shape \(64, 8\), got \(64, 2, 4\)", X, {"shape": (64, 2, 4)}),
        (r"dst must have shape \(64, 8\), got \(32, 8\)", X, {"shape": (32, 8)}),
    ],
)
def test_max8_refuses(match: str, data: Array, options: Any) -> None:
    refused(match, lambda dst, a: nisa.max8(dst, a), data, **{"shape": (len(data), 8), **options})


def test_max8_refuses_types_places_and_unwritten_elements() -> None:
    refused("src must be a tensor", lambda dst, a: nisa.max8(dst, 1.0), X, error=TypeError)
    refused("src must be a tensor", lambda dst, a: nisa.max8(dst, None), X, error=TypeError)
    refused(
        "src is in shared_hbm; accepted: sbuf or psum",
        lambda dst, a: nisa.max8(dst, nl.ndarray((64, 8), nl.float32, buffer=nl.shared_hbm)),
        X,
    )
    refused(
        "max8 at .*never written",
        lambda dst, a: nisa.max8(dst, nl.ndarray((64, 8), nl.float32)),
        X,
        shape=(64, 8),
        error=UninitializedReadError,
    )


# --- nc_find_index8 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.uint32, np.uint16], ids=str)
@pytest.mark.parametrize("data", [X, repeated(64, 40), repeated(64, 8)], ids=lambda x: x.shape)
def test_values_are_found(data: Array, dtype: Any) -> None:
    """Missing ones too: the values of the second half look for numbers that are not there."""
    vals = largest(data)
    vals[32:, 1::3] += 0.5
    call = lambda dst, a, v: nisa.nc_find_index8(dst, a, v)  # noqa: E731
    expected = np.minimum(find(data, vals), np.iinfo(dtype).max).astype(dtype)
    assert (expected == np.iinfo(dtype).max).any()
    same(computed(call, data, vals, dtype=np.dtype(dtype).name, shape=(64, 8)), expected)


def test_values_of_other_dtypes_and_ranks_are_found() -> None:
    data = repeated(64, 40).astype(BF16)
    vals = np.tile(np.arange(8, dtype=np.int32), (64, 1))
    result = execute(
        lambda dst, a, v: nisa.nc_find_index8(dst, a, v),
        data.reshape(64, 4, 10),
        vals.reshape(64, 2, 4),
        dtype="uint32",
        shape=(64, 8),
        source=nl.psum,
        buffer=nl.psum,
    )
    same(result.outputs, find(data.astype(F32), vals).astype(np.uint32))
    record = record_of(result, "nc_find_index8")
    assert record.engine == "vector" and len(record.reads) == 2


def test_one_value_broadcast_is_found_at_every_occurrence() -> None:
    data = repeated(64, 40)

    def call(dst: Any, a: Any, top: Any) -> None:
        nisa.nc_find_index8(dst, a, top.ap([[1, 64], [0, 8]]))

    top = data.max(1, keepdims=True)
    expected = find(data, np.repeat(top, 8, axis=1)).astype(np.uint32)
    assert (np.diff(expected[:, :2].astype(np.int64)) > 0).all()
    same(computed(call, data, top, dtype="uint32", shape=(64, 8)), expected)


def test_nan_is_nowhere() -> None:
    data = np.full((4, 9), np.nan, F32)
    call = lambda dst, a, v: nisa.nc_find_index8(dst, a, v)  # noqa: E731
    same(
        computed(call, data, data[:, :8], dtype="uint32", shape=(4, 8)),
        np.full((4, 8), ALL_ONES, np.uint32),
    )


@pytest.mark.parametrize(
    "match, vals, dtype, shape",
    [
        ("vals must have 64 partitions of 8 elements", X[:, :9], "uint32", (64, 8)),
        ("vals must have 64 partitions of 8 elements", X[:32, :8], "uint32", (64, 8)),
        ("dst must have 64 partitions of 8 elements", X[:, :8], "uint32", (64, 7)),
        ("dst must have 64 partitions of 8 elements", X[:, :8], "uint32", (32, 8)),
        ("dst is int32; accepted: uint32, uint16", X[:, :8], "int32", (64, 8)),
        ("dst is float32; accepted: uint32, uint16", X[:, :8], "float32", (64, 8)),
    ],
)
def test_find_refuses(match: str, vals: Array, dtype: str, shape: Any) -> None:
    refused(match, lambda dst, a, v: nisa.nc_find_index8(dst, a, v), X, vals, dtype=dtype, shape=shape)


# --- nc_match_replace8 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [X, repeated(64, 40), repeated(64, 8)], ids=lambda x: x.shape)
def test_values_are_replaced(data: Array) -> None:
    vals = largest(data)
    vals[32:, 1::3] += 0.5

    def call(dst: Any, a: Any, v: Any) -> list[Any]:
        indices = nl.ndarray((64, 8), nl.uint32)
        nisa.nc_match_replace8(dst, a, v, float("-inf"), dst_idx=indices)
        return [indices]

    result, indices = computed(call, data, vals)
    expected, found = replace(data, vals, -np.inf)
    same(result, expected)
    same(indices, found.astype(np.uint32))


def test_equal_values_take_their_places_from_the_back() -> None:
    data = np.array([[5, 7, 7, 1, 7, 7, 7, 7, 7, 7]], F32)
    vals = np.array([[5, 7, 7, 7, 7, 7, 7, 7]], F32)

    def call(dst: Any, a: Any, v: Any) -> list[Any]:
        indices = nl.ndarray((1, 8), nl.uint16)
        nisa.nc_match_replace8(dst, a, v, -2.5, indices)
        return [indices]

    result, indices = computed(call, data, vals)
    same(indices, np.array([[0, 8, 7, 6, 5, 4, 2, 1]], np.uint16))
    same(result, np.array([[-2.5, -2.5, -2.5, 1, -2.5, -2.5, -2.5, -2.5, -2.5, 7]], F32))


def test_top_24_in_rounds_in_place() -> None:
    """How top-k kernels use the pair, over the same tile again and again."""
    data = np.random.default_rng(1).permutation(64 * 40).reshape(64, 40).astype(F32)

    def call(dst: Any, a: Any) -> list[Any]:
        indices = nl.ndarray((64, 24), nl.uint32)
        for start in range(0, 24, 8):
            part = nl.ds(start, 8)
            nisa.max8(dst[:, part], a)
            nisa.nc_match_replace8(a, a, dst[:, part], float("-inf"), dst_idx=indices[:, part])
        return [indices]

    result, indices = computed(call, data, shape=(64, 24))
    order = np.argsort(-data, axis=1)[:, :24]
    same(result, np.take_along_axis(data, order, 1))
    same(indices, order.astype(np.uint32))


def test_replacing_keeps_bits_or_casts() -> None:
    words = np.array([[2**24 + 1, 2**31 - 1, -5, 7, 1, 2, 3, 4]], np.int32)
    vals = np.full((1, 8), 7.0, F32)
    call = lambda dst, a, v: nisa.nc_match_replace8(dst, a, v, 300.5)  # noqa: E731
    same(computed(call, words, vals, dtype="int32"), np.array([[2**24 + 1, 2**31 - 1, -5, 300, 1, 2, 3, 4]], np.int32))
    same(computed(call, words, vals, dtype="uint8"), np.array([[255, 255, 0, 255, 1, 2, 3, 4]], np.uint8))
    result = execute(call, X, X[:, :8], source=nl.psum, buffer=nl.psum)
    same(result.outputs, np.concatenate([np.full((64, 8), 300.5, F32), X[:, 8:]], axis=1))
    record = record_of(result, "nc_match_replace8")
    assert record.engine == "vector" and len(record.reads) == 2 and len(record.writes) == 1


@pytest.mark.parametrize(
    "match, vals, indices, options",
    [
        ("vals must have 64 partitions of 8 elements", X[:, :9], None, {}),
        ("dst has 20 elements per partition, data has 40", X[:, :8], None, {"shape": (64, 20)}),
        ("dst has 32 partitions, data has 64", X[:, :8], None, {"shape": (32, 40)}),
        ("dst_idx must have 64 partitions of 8 elements", X[:, :8], ((64, 9), "uint32"), {}),
        ("dst_idx is int32; accepted: uint32, uint16", X[:, :8], ((64, 8), "int32"), {}),
    ],
)
def test_replace_refuses(match: str, vals: Array, indices: Any, options: Any) -> None:
    def call(dst: Any, a: Any, v: Any) -> None:
        nisa.nc_match_replace8(dst, a, v, 0.0, None if indices is None else nl.ndarray(*indices))

    refused(match, call, X, vals, **options)


def test_replace_refuses_types() -> None:
    refused(
        "imm must be a number, got None", lambda d, a: nisa.nc_match_replace8(d, a, a, None), X[:, :8], error=TypeError
    )
    refused("dst_idx must be a tensor", lambda d, a: nisa.nc_match_replace8(d, a, a, 0.0, 1), X[:, :8], error=TypeError)
