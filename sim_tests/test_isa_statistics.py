# SPDX-License-Identifier: Apache-2.0
"""bn_stats and bn_aggr against float64, on the inputs that break naive formulas, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instructions import BF16, BUFFERS, F32, computed, execute, record_of, refused, same, values
from launching import nisa, nl

EPS = 2.0**-24


def stats(data: Any, **options: Any) -> Any:
    return computed(nisa.bn_stats, data, shape=(len(data), 6), **options)


def aggregate(triples: Any, **options: Any) -> Any:
    return computed(nisa.bn_aggr, triples, shape=(len(triples), 2), **options)


def moments(data: Any) -> Any:
    """The six values in float64."""
    columns = []
    for parity in (0, 1):
        lane = data[:, parity::2].astype(np.float64)
        empty = np.zeros(len(data))
        columns += [
            np.full(len(data), lane.shape[1]),
            lane.mean(1) if lane.size else empty,
            lane.var(1) * lane.shape[1] if lane.size else empty,
        ]
    return np.stack(columns, axis=1)


def whole(data: Any, piece: int = 512, **options: Any) -> Any:
    """Mean and variance of rows of any length, in pieces."""

    def call(dst: Any, tile: Any) -> None:
        starts = range(0, tile.shape[1], piece)
        triples = nl.ndarray((tile.shape[0], 6 * len(starts)), nl.float32)
        for index, start in enumerate(starts):
            nisa.bn_stats(triples[:, 6 * index : 6 * index + 6], tile[:, start : min(start + piece, tile.shape[1])])
        nisa.bn_aggr(dst, triples)

    return computed(call, data, shape=(len(data), 2), **options)


@pytest.mark.parametrize("columns", [1, 2, 3, 4, 5, 24, 511, 512])
@pytest.mark.parametrize("accumulate", ["pairwise", "sequential"])
def test_bn_stats_of_even_and_odd_elements(columns: int, accumulate: str) -> None:
    data = values(64, columns, scale=3) + F32(5)
    result, expected = stats(data, accumulate=accumulate), moments(data)
    same(result[:, [0, 3]], expected[:, [0, 3]].astype(F32))
    np.testing.assert_allclose(result, expected, rtol=columns * EPS, atol=1e-5)


def test_without_a_second_element_the_odd_triple_is_zero() -> None:
    same(stats(np.array([[7.25], [-3]], F32)), np.array([[1, 7.25, 0, 0, 0, 0], [1, -3, 0, 0, 0, 0]], F32))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.float16, BF16], ids=str)
def test_bn_stats_of_any_dtype(dtype: Any) -> None:
    data = np.abs(20 * values(64, 30)).astype(dtype)
    np.testing.assert_allclose(stats(data), moments(data), rtol=1e-5)
    same(stats(data, dtype="bfloat16"), stats(data).astype(BF16))


@pytest.mark.parametrize("source", BUFFERS)
@pytest.mark.parametrize("buffer", BUFFERS)
def test_bn_stats_in_psum(source: Any, buffer: Any) -> None:
    data = values(64, 24)
    same(stats(data, source=source, buffer=buffer), stats(data))


def test_bn_stats_of_ranks_and_strided_views() -> None:
    data = values(64, 24)
    same(stats(data.reshape(64, 4, 6)), stats(data))
    same(
        computed(lambda dst, d: nisa.bn_stats(dst, d[:, 1:24:3]), data, shape=(64, 6)),
        stats(np.ascontiguousarray(data[:, 1::3])),
    )
    same(
        computed(lambda dst, d: nisa.bn_stats(dst, d.permute((0, 2, 1))), data.reshape(64, 4, 6), shape=(64, 2, 3)),
        stats(np.ascontiguousarray(data.reshape(64, 4, 6).transpose(0, 2, 1))).reshape(64, 2, 3),
    )


@settings(max_examples=60, deadline=None)
@given(st.floats(-(2.0**100), 2.0**100, width=32), st.integers(1, 512), st.sampled_from(["pairwise", "sequential"]))
def test_equal_values_have_exactly_that_mean_and_no_variance(value: float, columns: int, accumulate: str) -> None:
    data = np.full((2, columns), value, F32)
    result = stats(data, accumulate=accumulate)
    assert (result[:, 1] == F32(value)).all() and (result[:, [2, 5]] == 0).all()
    assert columns == 1 or (result[:, 4] == F32(value)).all()
    same(aggregate(result, accumulate=accumulate), np.array([[value, 0]] * 2, F32))


@pytest.mark.parametrize("value", [1.0, 7.3, 3000.1, 5000.7, 1e10, -0.1, 65504.0])
@pytest.mark.parametrize("columns", [1537, 2000])
def test_constant_rows_of_several_pieces(value: float, columns: int) -> None:
    same(whole(np.full((4, columns), value, F32)), np.array([[value, 0]] * 4, F32))


@pytest.mark.parametrize(
    "mean, spread", [(0, 1), (1000, 0.1), (1e4, 0.01), (1e6, 1), (-3, 1e-6), (0, 1e-15), (0, 1e15)]
)
@pytest.mark.parametrize("accumulate", ["pairwise", "sequential"])
def test_variance_survives_a_large_mean(mean: float, spread: float, accumulate: str) -> None:
    data = (mean + spread * np.random.default_rng(3).normal(size=(16, 1300))).astype(F32)
    exact = data.astype(np.float64)
    result = whole(data, accumulate=accumulate)
    assert (result[:, 1] >= 0).all()
    np.testing.assert_allclose(result[:, 0], exact.mean(1), rtol=4 * EPS, atol=64 * EPS * spread)
    # The mean itself is rounded: at most one unit of it enters the deviations, squared.
    np.testing.assert_allclose(result[:, 1], exact.var(1), rtol=1e-4, atol=(abs(mean) * 2 * EPS) ** 2)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 64), st.floats(-10, 10), st.floats(-10, 10))
def test_sums_of_squares_are_never_negative(seed: int, columns: int, mean: float, log_spread: float) -> None:
    data = (10.0**mean + 10.0**log_spread * np.random.default_rng(seed).normal(size=(4, columns))).astype(F32)
    result = stats(data)
    assert (result[:, [2, 5]] >= 0).all() and (aggregate(result)[:, 1] >= 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_lane(bad: float) -> None:
    data = values(64, 24)
    expected = stats(data)
    data[5, 4] = bad
    result = stats(data)
    assert not np.isfinite(result[5, 1:3]).any()
    kept = np.ones((64, 6), bool)
    kept[5, 1:3] = False
    same(result[kept], expected[kept])
    total = aggregate(result)
    assert np.flatnonzero(~np.isfinite(total).all(1)).tolist() == [5]


def test_sequential_sums_lose_what_pairwise_sums_keep() -> None:
    # 255 deviations of 1 after one of 2^24: a single running sum cannot see them.
    data = np.zeros((1, 512), F32)
    data[0, 2], data[0, 4:512:2] = 2.0**24, 1
    exact = moments(data)[0, 1]
    errors = {order: abs(stats(data, accumulate=order)[0, 1] - exact) for order in ("pairwise", "sequential")}
    assert errors["pairwise"] < 0.25 < errors["sequential"]


# --- bn_aggr ---------------------------------------------------------------------------------------------------------


def merged(triples: Any) -> Any:
    """The documented formula in float64."""
    count, mean, squares = (triples[:, part::3].astype(np.float64) for part in range(3))
    total = count.sum(1, keepdims=True)
    center = (count * mean).sum(1, keepdims=True) / total
    return np.concatenate(
        [center, (squares.sum(1, keepdims=True) + (count * (mean - center) ** 2).sum(1, keepdims=True)) / total], axis=1
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(0, 10**6), st.sampled_from(["pairwise", "sequential"]))
def test_bn_aggr_merges_triples(parts: int, seed: int, accumulate: str) -> None:
    rng = np.random.default_rng(seed)
    triples = np.empty((8, 3 * parts), F32)
    triples[:, 0::3] = rng.integers(1, 1000, (8, parts))
    triples[:, 1::3] = rng.normal(size=(8, parts))
    triples[:, 2::3] = rng.random((8, parts)) * triples[:, 0::3]
    np.testing.assert_allclose(aggregate(triples, accumulate=accumulate), merged(triples), rtol=1e-5, atol=1e-6)


def test_pieces_agree_with_the_whole_row() -> None:
    data = values(32, 1300, scale=2) + F32(1)
    exact = data.astype(np.float64)
    for piece in (512, 100, 7):
        np.testing.assert_allclose(whole(data, piece), np.stack([exact.mean(1), exact.var(1)], 1), rtol=1e-5)


def test_empty_triples_contribute_nothing() -> None:
    full = np.array([[3, 100.25, 2, 5, 101, 4]], F32)
    for empty in ([0, 0, 0], [0, 1e30, 7], [0, np.nan, np.nan], [0, np.inf, 1]):
        for at in (0, 3, 6):
            triples = np.concatenate([full[:, :at], [empty], full[:, at:]], axis=1).astype(F32)
            same(aggregate(triples), aggregate(full))


def test_without_any_element_the_result_is_nan_in_that_lane_only() -> None:
    result = aggregate(np.array([[0, 0, 0, 0, 0, 0], [2, 1, 0, 0, 0, 0]], F32))
    assert np.isnan(result[0]).all()
    same(result[1], np.array([1, 0], F32))


def test_equal_means_give_exactly_that_mean() -> None:
    counts = np.random.default_rng(8).integers(0, 7, (16, 20)).astype(F32)
    counts[:, 3] = 1
    triples = np.zeros((16, 60), F32)
    triples[:, 0::3], triples[:, 1::3] = counts, F32(0.1)
    triples[:, 1::3][counts == 0] = 0
    same(aggregate(triples), np.array([[0.1, 0]] * 16, F32))


def test_bn_aggr_casts_reads_psum_and_any_rank() -> None:
    triples = stats(values(64, 24, seed=3))
    expected = aggregate(triples)
    same(aggregate(triples, dtype="bfloat16"), expected.astype(BF16))
    same(aggregate(triples, source=nl.psum, buffer=nl.psum), expected)
    same(aggregate(triples.reshape(64, 2, 3)), expected)
    same(aggregate(triples.astype(BF16)), aggregate(triples.astype(BF16).astype(F32)))


def test_records() -> None:
    data = values(64, 24)
    for call, opcode, columns in ((nisa.bn_stats, "bn_stats", 6), (nisa.bn_aggr, "bn_aggr", 2)):
        record = record_of(execute(call, data, shape=(64, columns)), opcode)
        assert (record.engine, len(record.reads), record.reads[0].columns) == ("vector", 1, 24)


@pytest.mark.parametrize(
    "call, match, shape, data",
    [
        (nisa.bn_stats, "data has 513 elements per partition, at most 512", (4, 6), values(4, 513)),
        (nisa.bn_stats, "dst must have 4 partitions of 6 elements, got shape .4, 5.", (4, 5), values(4, 8)),
        (nisa.bn_stats, "dst must have 4 partitions of 6 elements, got shape .3, 6.", (3, 6), values(4, 8)),
        (nisa.bn_aggr, "data has 8 elements per partition, which is not a multiple of 3", (4, 2), values(4, 8)),
        (nisa.bn_aggr, "dst must have 4 partitions of 2 elements, got shape .4, 3.", (4, 3), values(4, 6)),
        (nisa.bn_aggr, "dst must have 4 partitions of 2 elements, got shape .8, 2.", (8, 2), values(4, 6)),
    ],
)
def test_refusals(call: Any, match: str, shape: Any, data: Any) -> None:
    refused(match, call, data, shape=shape)


def test_refused_types_and_places() -> None:
    for call, columns in ((nisa.bn_stats, 6), (nisa.bn_aggr, 2)):
        refused(
            "data must be a tensor",
            lambda dst, d, f=call: f(dst, None),
            values(4, 6),
            shape=(4, columns),
            error=TypeError,
        )
        refused(
            "data is in private_hbm",
            lambda dst, d, f=call: f(dst, nl.ndarray((4, 6), nl.float32, buffer=nl.private_hbm)),
            values(4, 6),
            shape=(4, columns),
        )
