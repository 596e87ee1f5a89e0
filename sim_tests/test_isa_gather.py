# SPDX-License-Identifier: Apache-2.0
"""local_gather, nc_n_gather, sequence_bounds and nonzero_with_count against NumPy, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from instructions import BF16, F32, FP8, Array, computed, execute, record_of, refused, same, values
from launching import nisa, nl

from nki_bn.simulator import UninitializedReadError
from nki_bn.simulator.errors import IndexRangeError

X = values(64, 40)
RNG = np.random.default_rng(11)
SHORT = RNG.integers(0, 40, (64, 3)).astype(np.uint16)
WORDS = RNG.integers(0, 40, (64, 9)).astype(np.uint32)


def snake(index: Array, valid: int | None) -> Array:
    """The indices of the 16 partitions of a core, partition first, cut to the valid ones; one row per partition."""
    rows = [index[16 * (p // 16) + i % 16, i // 16] for p in range(len(index)) for i in range(16 * index.shape[1])]
    return np.array(rows, np.int64).reshape(len(index), -1)[:, :valid]


def local(elements: int = 1, valid: int | None = None) -> Callable[..., Any]:
    return lambda dst, a, index: nisa.local_gather(dst, a, index, elements, valid)


@pytest.mark.parametrize("dtype", [F32, BF16, FP8, np.int32, np.uint8], ids=str)
@pytest.mark.parametrize("valid", [None, 48, 33, 1])
def test_a_core_gathers_by_the_indices_of_its_partitions(dtype: Any, valid: int | None) -> None:
    data = (20 * np.abs(X)).astype(dtype)
    at = snake(SHORT, valid)
    result = computed(local(1, valid), data, SHORT, dtype=np.dtype(dtype).name, shape=at.shape)
    same(result, np.take_along_axis(data, at, 1))


@pytest.mark.parametrize("elements", [1, 2, 4, 8, 16, 32])
def test_several_elements_from_each_index(elements: int) -> None:
    index = (SHORT % (41 - elements)).astype(np.uint16)
    at = snake(index, 20)
    result = computed(local(elements, 20), X.reshape(64, 4, 10), index, shape=(64, 20, elements))
    same(result, np.stack([np.take_along_axis(X, at + e, 1) for e in range(elements)], axis=2))


def test_local_gather_of_one_core_and_its_record() -> None:
    result = execute(local(), X[:16], SHORT[:16], shape=(16, 48))
    same(result.outputs, np.take_along_axis(X[:16], snake(SHORT[:16], None), 1))
    record = record_of(result, "local_gather")
    assert record.engine == "gpsimd" and len(record.reads) == 2


@pytest.mark.parametrize(
    "match, call, data, index, options",
    [
        ("index is uint32; accepted: uint16", local(), X, SHORT.astype(np.uint32), {}),
        ("index has 32 partitions, src_buffer has 64", local(), X, SHORT[:32], {}),
        ("dst has 32 partitions, src_buffer has 64", local(), X, SHORT, {"shape": (32, 48)}),
        ("src_buffer has 24 partitions; accepted: multiples of 16", local(), X[:24], SHORT[:24], {"shape": (24, 48)}),
        (r"num_elem_per_idx must be one of \(1, 2, 4, 8, 16, 32\), got 3", local(3), X, SHORT, {}),
        ("uses 49 indices per core of the 48 in index", local(1, 49), X, SHORT, {}),
        ("uses 0 indices per core", local(1, 0), X, SHORT, {}),
        ("uses 4112 indices per core .* at most 4096", local(), X[:16], np.zeros((16, 257), np.uint16), {}),
        (r"dst must have 48 \* 2 elements per partition", local(2), X, SHORT, {}),
        ("dst must have the dtype of src_buffer, float32, got bfloat16", local(), X, SHORT, {"dtype": "bfloat16"}),
        ("src_buffer is in psum; accepted: sbuf", local(), X, SHORT, {"source": nl.psum}),
        ("dst is in psum; accepted: sbuf", local(), X, SHORT, {"buffer": nl.psum}),
    ],
)
def test_local_gather_refuses(match: str, call: Any, data: Array, index: Array, options: Any) -> None:
    refused(match, call, data, index, **{"shape": (len(data), 48), **options})


def test_local_gather_refuses_types_and_indices_outside() -> None:
    refused("num_elem_per_idx must be an integer, got 1.0", local(1.0), X, SHORT, shape=(64, 48), error=TypeError)  # type: ignore[arg-type]
    refused("num_valid_indices must be an integer", local(1, 1.5), X, SHORT, shape=(64, 2), error=TypeError)  # type: ignore[arg-type]
    outside = SHORT.copy()
    outside[20, 1] = 40
    refused("index 40 is outside the 40 elements", local(), X, outside, shape=(64, 48), error=IndexRangeError)
    # The last of several elements counts.
    outside[20, 1] = 39
    refused("index 40 is outside", local(2), X, outside, shape=(64, 96), error=IndexRangeError)


# --- nc_n_gather -----------------------------------------------------------------------------------------------------


def by_lane(dst: Any, a: Any, indices: Any) -> None:
    nisa.nc_n_gather(dst, a, indices)


@pytest.mark.parametrize("dtype", [F32, BF16, np.int32, np.uint16], ids=str)
def test_a_partition_gathers_from_itself(dtype: Any) -> None:
    data = (1000 * np.abs(X)).astype(dtype)
    result = execute(by_lane, data.reshape(64, 5, 8), WORDS, dtype=np.dtype(dtype).name, shape=(64, 3, 3))
    same(result.outputs.reshape(64, 9), np.take_along_axis(data, WORDS.astype(int), 1))
    record = record_of(result, "nc_n_gather")
    assert record.engine == "gpsimd" and len(record.reads) == 2


def test_gather_in_place_keeps_bits() -> None:
    words = RNG.integers(-(2**31), 2**31, (64, 9)).astype(np.int32)
    at = (WORDS % 9).astype(np.uint32)

    def call(dst: Any, a: Any, indices: Any) -> None:
        nisa.nc_n_gather(a, a, indices)
        nisa.tensor_copy(dst, a)

    same(computed(call, words, at, dtype="int32"), np.take_along_axis(words, at.astype(int), 1))


@pytest.mark.parametrize(
    "match, indices, options",
    [
        ("indices is int32; accepted: uint32", WORDS.astype(np.int32), {}),
        ("indices has 32 partitions, data has 64", WORDS[:32], {}),
        ("dst has 8 elements per partition, indices has 9", WORDS, {"shape": (64, 8)}),
        ("dst must have the dtype of data, float32, got int32", WORDS, {"dtype": "int32"}),
        ("data is in psum; accepted: sbuf", WORDS, {"source": nl.psum}),
        ("dst is in psum; accepted: sbuf", WORDS, {"buffer": nl.psum}),
    ],
)
def test_n_gather_refuses(match: str, indices: Array, options: Any) -> None:
    refused(match, by_lane, X, indices, **{"shape": (64, 9), **options})


def test_n_gather_refuses_indices_outside() -> None:
    refused("index 49 is outside", by_lane, X, WORDS // 40 + np.uint32(49), shape=(64, 9), error=IndexRangeError)


# --- sequence_bounds -------------------------------------------------------------------------------------------------


def bounds(ids: Array) -> Array:
    """Step away from every element while the id stays the same."""
    n = len(ids)
    result = np.empty((2, n))
    for i, value in enumerate(ids):
        start, end = i, i + 1
        while start > 0 and ids[start - 1] == value:
            start -= 1
        while end < n and ids[end] == value:
            end += 1
        result[:, i] = (start, end) if value != 0 else (n, -1)
    return result


SEGMENTS = {
    "runs": [1, 1, 2, 2, 2, 5],
    "padding between and at the ends": [0, 3, 3, 0, 0, 4, 4, 4, 0],
    "an id again after another": [1, 2, 2, 1, 1],
    "all padding": [0, 0, 0],
    "one element": [7],
}


@pytest.mark.parametrize("case", SEGMENTS)
@pytest.mark.parametrize("to", [F32, np.int32], ids=str)
@pytest.mark.parametrize("dtype", [F32, np.int32], ids=str)
def test_bounds_of_segments(case: str, dtype: Any, to: Any) -> None:
    ids = np.array([SEGMENTS[case]], dtype)
    call = lambda dst, a: nisa.sequence_bounds(dst, a)  # noqa: E731
    result = execute(call, ids, dtype=np.dtype(to).name, shape=(1, 2, ids.size))
    same(result.outputs, bounds(ids[0])[None].astype(to))
    record = record_of(result, "sequence_bounds")
    assert record.engine == "gpsimd" and len(record.reads) == 1


def test_long_random_segments() -> None:
    ids = np.sort(RNG.integers(0, 40, (1, 500)), axis=1).astype(np.int32)
    result = computed(lambda dst, a: nisa.sequence_bounds(dst, a), ids, dtype="int32", shape=(1, 2, 500))
    same(result, bounds(ids[0])[None].astype(np.int32))


@pytest.mark.parametrize(
    "match, data, options",
    [
        ("segment_ids must have 1 partition", np.ones((2, 5), F32), {}),
        (r"dst must have shape \(1, 2, 5\), got \(1, 5\)", np.ones((1, 5), F32), {"shape": (1, 5)}),
        (r"dst must have shape \(1, 2, 5\), got \(2, 10\)", np.ones((1, 5), F32), {"shape": (2, 10)}),
        ("segment_ids is uint32; accepted: float32, int32", np.ones((1, 5), np.uint32), {}),
        ("dst is bfloat16; accepted: float32, int32", np.ones((1, 5), F32), {"dtype": "bfloat16"}),
        ("segment_ids is in psum; accepted: sbuf", np.ones((1, 5), F32), {"source": nl.psum}),
        ("dst is in psum; accepted: sbuf", np.ones((1, 5), F32), {"buffer": nl.psum}),
    ],
)
def test_bounds_refuse(match: str, data: Array, options: Any) -> None:
    refused(match, lambda dst, a: nisa.sequence_bounds(dst, a), data, **{"shape": (1, 2, 5), **options})


# --- nonzero_with_count ----------------------------------------------------------------------------------------------


def positions(data: Array, offset: int = 0, padding: int = -1, untouched: int = 99) -> Array:
    """Rows 0, 16, ...: positions, padding, count. All others as they were."""
    result = np.full((len(data), data.shape[1] + 1), untouched, np.int32)
    for row in range(0, len(data), 16):
        found = [i + offset for i, value in enumerate(data[row]) if value != 0]
        result[row] = [*found, *[padding] * (data.shape[1] - len(found)), len(found)]
    return result


def nonzero(**keywords: Any) -> Callable[..., Any]:
    def call(dst: Any, a: Any) -> None:
        nisa.memset(dst, 99)
        nisa.nonzero_with_count(dst, a, **keywords)

    return call


SPARSE = np.where(RNG.random((128, 30)) < 0.4, RNG.integers(-3, 4, (128, 30)), 0)


@pytest.mark.parametrize("dtype", [F32, np.int32], ids=str)
@pytest.mark.parametrize("partitions", [128, 40, 1])
def test_positions_of_what_is_not_zero(dtype: Any, partitions: int) -> None:
    data = SPARSE[:partitions].astype(dtype)
    result = execute(nonzero(), data, dtype="int32", shape=(partitions, 31))
    same(result.outputs, positions(data))
    record = record_of(result, "nonzero_with_count")
    assert record.engine == "gpsimd" and record.reads[0].shape[0] == -(-partitions // 16)


def test_offset_and_padding() -> None:
    data = SPARSE.astype(F32).reshape(128, 5, 6)
    result = computed(nonzero(index_offset=2**24 + 1, padding_val=-7), data, dtype="int32", shape=(128, 31))
    same(result, positions(SPARSE, 2**24 + 1, -7))


def test_only_the_partitions_that_are_used_need_contents() -> None:
    def call(dst: Any, a: Any) -> None:
        rows = nl.ndarray((32, 30), nl.float32)
        for row in rows_written:
            nisa.dma_copy(rows[row : row + 1], a[row : row + 1])
        nonzero()(dst, rows)

    rows_written = (0, 16)
    same(computed(call, SPARSE[:32].astype(F32), dtype="int32", shape=(32, 31)), positions(SPARSE[:32]))
    rows_written = (0, 15)
    refused("never written", call, SPARSE[:32].astype(F32), dtype="int32", shape=(32, 31), error=UninitializedReadError)


@pytest.mark.parametrize(
    "match, data, options",
    [
        ("src is bfloat16; accepted: float32, int32", SPARSE.astype(BF16), {}),
        ("dst is uint32; accepted: int32", SPARSE.astype(F32), {"dtype": "uint32"}),
        ("dst has 64 partitions, src has 128", SPARSE.astype(F32), {"shape": (64, 31)}),
        ("dst must have 31 elements per partition", SPARSE.astype(F32), {"shape": (128, 30)}),
        ("src is in psum; accepted: sbuf", SPARSE.astype(F32), {"source": nl.psum}),
        ("dst is in psum; accepted: sbuf", SPARSE.astype(F32), {"buffer": nl.psum}),
        ("needs gen3 or later, the target is gen2", SPARSE.astype(F32), {"target": "trn1"}),
    ],
)
def test_nonzero_refuses(match: str, data: Array, options: Any) -> None:
    refused(match, nonzero(), data, **{"shape": (128, 31), "dtype": "int32", **options})


def test_nonzero_refuses_types() -> None:
    for key in ("index_offset", "padding_val"):
        refused(
            f"{key} must be an integer, got 0.5",
            nonzero(**{key: 0.5}),
            SPARSE.astype(F32),
            shape=(128, 31),
            dtype="int32",
            error=TypeError,
        )
