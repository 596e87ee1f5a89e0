# SPDX-License-Identifier: Apache-2.0
"""iota and affine_select against NumPy, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instructions import BF16, F32, FP8, computed, execute, op, record_of, refused, same, values, written
from launching import nisa, nl

X = values(64, 24)
ONE = np.zeros((64, 1), F32)
COMPARISONS: dict[str, Callable[[Any], Any]] = {
    "equal": lambda a: a == 0,
    "not_equal": lambda a: a != 0,
    "less": lambda a: a < 0,
    "less_equal": lambda a: a <= 0,
    "greater": lambda a: a > 0,
    "greater_equal": lambda a: a >= 0,
}


def affine(partitions: int, pattern: list[list[int]], offset: int = 0, multiplier: int = 0) -> Any:
    """offset + partition * multiplier + sum of index * step, one row per partition."""
    rows = [
        [
            offset + p * multiplier + sum(i * step for i, (step, _) in zip(index, pattern, strict=True))
            for index in np.ndindex(*[count for _, count in pattern])
        ]
        for p in range(partitions)
    ]
    return np.array(rows, np.int64)


def iota(*positional: Any, **keywords: Any) -> Callable[..., Any]:
    return lambda dst, *_: nisa.iota(dst, *positional, **keywords)


PAIRS = st.tuples(st.integers(-5, 5), st.integers(1, 4))


@settings(max_examples=40, deadline=None)
@given(st.lists(PAIRS, min_size=1, max_size=4), st.integers(-100, 100), st.integers(-7, 7), st.sampled_from([1, 5, 64]))
def test_iota(pattern: list[tuple[int, int]], offset: int, multiplier: int, partitions: int) -> None:
    pairs = [list(pair) for pair in pattern]
    expected = affine(partitions, pairs, offset, multiplier)
    result = computed(iota(pairs, offset, multiplier), ONE[:partitions], dtype="int32", shape=expected.shape)
    same(result, expected.astype(np.int32))


@pytest.mark.parametrize(
    "dtype", [np.int8, np.uint8, np.int16, np.uint16, np.uint32, np.float16, BF16, F32, FP8], ids=str
)
def test_iota_casts(dtype: Any) -> None:
    expected = affine(64, [[3, 2], [1, 12]], 5, 4)
    result = computed(
        iota([[3, 2], [1, 12]], offset=5, channel_multiplier=4), ONE, dtype=np.dtype(dtype).name, shape=(64, 4, 6)
    )
    same(result.reshape(64, 24), written(expected, dtype))


def test_iota_is_int32() -> None:
    same(
        computed(iota([[1, 3]], 2**24), ONE, dtype="int32", shape=(64, 3)),
        np.tile(np.arange(2**24, 2**24 + 3, dtype=np.int32), (64, 1)),
    )
    same(
        computed(iota([[1, 3]], 2**31 - 2), ONE[:1], dtype="uint32", shape=(1, 3)),
        np.array([[2**31 - 2, 2**31 - 1, 2**31]], np.uint32),
    )
    same(
        computed(iota([[1, 2]], 2**31 - 1), ONE[:1], dtype="int32", shape=(1, 2)),
        np.array([[2**31 - 1, -(2**31)]], np.int32),
    )


def test_partitions_count_from_the_destination() -> None:
    def call(dst: Any, a: Any) -> None:
        nisa.memset(dst, 0)
        nisa.iota(dst[32:64], [[1, 2]], channel_multiplier=10)

    same(computed(call, ONE, dtype="int32", shape=(64, 2))[32:], affine(32, [[1, 2]], 0, 10).astype(np.int32))


def test_registers_are_offsets() -> None:
    def call(dst: Any, index: Any, a: Any) -> list[Any]:
        register = nisa.register_alloc(None)
        nisa.register_load(register, index)
        nisa.iota(dst, [[1, 24]], register)
        masked = nl.ndarray((1, 24), nl.float32)
        nisa.affine_select(masked, [[1, 24]], 0, a, 0.0, nl.equal, offset=register)
        return [masked]

    ramp, masked = computed(call, np.array([[-7]], np.int32), X[:1], dtype="int32", shape=(1, 24))
    same(ramp, np.arange(-7, 17, dtype=np.int32)[None])
    same(masked, np.where(np.arange(24) == 7, X[:1], F32(0)))


@pytest.mark.parametrize(
    "match, arguments, shape",
    [
        ("pattern must have at most 4 pairs", ([[1, 1]] * 5,), (64, 1)),
        ("has 6 elements, dst has 24 per partition", ([[1, 6]],), (64, 24)),
        ("has 0 elements", ([[1, 0]],), (64, 24)),
        (r"pairs \[step, count\], got \[\[1, 2, 3\]\]", ([[1, 2, 3]],), (64, 24)),
    ],
)
def test_iota_refuses(match: str, arguments: Any, shape: Any) -> None:
    refused(match, iota(*arguments), ONE, shape=shape)


def test_iota_refuses_types_and_places() -> None:
    refused("dst is in psum; accepted: sbuf", iota([[1, 24]]), X, buffer=nl.psum)
    refused("must be integers, got 0.5", iota([[0.5, 24]]), X, error=TypeError)
    refused("must be integers, got 1.0", iota([[1, 24]], 1.0), X, error=TypeError)
    refused("must be integers, got None", iota([[1, 24]], 0, None), X, error=TypeError)
    refused("pattern must be a list of pairs", iota([1, 24]), X, error=TypeError)
    refused("dst must be a tensor", lambda dst, a: nisa.iota(None, [[1, 24]]), X, error=TypeError)
    refused("used as an index before it was set", iota([[1, 24]], nisa.VirtualRegister()), X)


# --- affine_select ---------------------------------------------------------------------------------------------------


def select(*positional: Any, **keywords: Any) -> Callable[..., Any]:
    """affine_select with on_true_tile, the third argument, left out."""
    return lambda dst, a: nisa.affine_select(dst, *positional[:2], a, *positional[2:], **keywords)


@pytest.mark.parametrize("name", COMPARISONS)
def test_affine_select(name: str) -> None:
    pattern, offset, multiplier = [[-1, 24]], 3, 2
    mask = COMPARISONS[name](affine(64, pattern, offset, multiplier))
    call = select(pattern, multiplier, -9984.5, op(name), offset=offset)
    same(computed(call, X), np.where(mask, X, F32(-9984.5)))


def test_the_default_comparison_is_equality() -> None:
    mask = affine(64, [[-1, 24]], 0, 1) == 0
    result = execute(lambda dst, a: nisa.affine_select(dst, [[-1, 24]], 1, a, 0.0), X)
    same(result.outputs, np.where(mask, X, F32(0)))
    record = record_of(result, "affine_select")
    assert record.engine == "gpsimd" and record.attributes == {"op": "equal"} and len(record.reads) == 1


def test_the_comparison_is_exact_beyond_24_bits() -> None:
    call = lambda dst, a: nisa.affine_select(dst, [[1, 3]], 0, a, 0.0, nl.equal, offset=-1)  # noqa: E731
    same(computed(call, np.ones((1, 3), F32)), np.array([[0, 1, 0]], F32))
    big = lambda dst, a: nisa.affine_select(dst, [[2**24 + 1, 2]], -(2**24), a, 0.0, nl.equal)  # noqa: E731
    same(computed(big, np.ones((2, 2), F32)), np.array([[1, 0], [0, 0]], F32))


def test_equal_dtypes_keep_bits_others_go_through_float32() -> None:
    words = np.array([[2**24 + 1, 2**31 - 1, -5, 7]], np.int32)
    call = lambda dst, a: nisa.affine_select(dst, [[1, 4]], 0, a, 300.5, nl.less, offset=-3)  # noqa: E731
    same(computed(call, words, dtype="int32"), np.array([[2**24 + 1, 2**31 - 1, -5, 300]], np.int32))
    same(computed(call, words, dtype="uint32"), np.array([[2**24, 2**31, 0, 300]], np.uint32))
    same(computed(call, words, dtype="int8"), np.array([[127, 127, -5, 127]], np.int8))
    same(computed(call, words), np.array([[2**24, 2**31, -5, 300.5]], F32))
    nan = np.array([[0x7FC01234, 1, 2, 3]], np.int32).view(F32)
    assert computed(call, nan).view(np.int32)[0, 0] == 0x7FC01234


def test_affine_select_in_place_and_of_other_ranks() -> None:
    def call(dst: Any, a: Any) -> None:
        nisa.affine_select(a, [[6, 4], [1, 6]], -1, a, 1.0, nl.greater)
        nisa.tensor_copy(dst, a)

    mask = affine(64, [[6, 4], [1, 6]], 0, -1) > 0
    same(computed(call, X.reshape(64, 4, 6), shape=(64, 24)), np.where(mask, X, F32(1)))


@pytest.mark.parametrize(
    "match, arguments, options",
    [
        ("cmp_op nl.add is no comparison", ([[1, 24]], 0, 0.0, nl.add), {}),
        ("cmp_op nl.logical_and is no comparison", ([[1, 24]], 0, 0.0, nl.logical_and), {}),
        ("has 12 elements, dst has 24 per partition", ([[1, 12]], 0, 0.0), {}),
        ("at most 4 pairs", ([[1, 1]] * 5, 0, 0.0), {}),
        ("on_true_tile is in psum; accepted: sbuf", ([[1, 24]], 0, 0.0), {"source": nl.psum}),
        ("dst is in psum; accepted: sbuf", ([[1, 24]], 0, 0.0), {"buffer": nl.psum}),
        ("dst has 12 elements per partition, on_true_tile has 24", ([[1, 24]], 0, 0.0), {"shape": (64, 12)}),
        ("dst has 32 partitions, on_true_tile has 64", ([[1, 24]], 0, 0.0), {"shape": (32, 24)}),
    ],
)
def test_affine_select_refuses(match: str, arguments: Any, options: Any) -> None:
    refused(match, select(*arguments), X, **options)


def test_affine_select_refuses_types() -> None:
    refused("on_false_value must be a number, got None", select([[1, 24]], 0, None), X, error=TypeError)
    refused("cmp_op must be an operator", select([[1, 24]], 0, 0.0, "equal"), X, error=TypeError)
    # The order of early releases, with offset third.
    refused(
        "on_true_tile must be a tensor",
        lambda dst, a: nisa.affine_select(dst, [[1, 24]], 0, 0, a, 0.0),
        X,
        error=TypeError,
    )
