# SPDX-License-Identifier: Apache-2.0
"""dma_compute: sums of tensors, also into rows that indices choose; limits, refusals, time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from launching import launch, load, nisa, nl, outputs, store
from timelines import DMA, close, hbm, records, tile

from nki_bn.simulator import NkiValidationError, UninitializedReadError
from nki_bn.simulator.errors import IndexRangeError
from nki_bn.simulator.timing.dma import issuer_of, transfer_of

RNG = np.random.default_rng(6)
BF16 = np.dtype(ml_dtypes.bfloat16)
SKIP = nisa.oob_mode.skip
X = RNG.normal(size=(6, 10)).astype(np.float32)
TABLE = RNG.normal(size=(20, 10)).astype(np.float32)
ROWS = RNG.permutation(20)[:6].astype(np.uint32)[:, None]


@pytest.mark.parametrize("count", [1, 2, 3, 16])
def test_sums_in_float32_in_the_order_of_the_sources(count: int) -> None:
    arrays = [(RNG.normal(size=(6, 10)) * 10.0 ** (place % 7)).astype(np.float32) for place in range(count)]

    def kernel(*tensors: Any) -> Any:
        out = nl.ndarray((6, 10), nl.float32, buffer=nl.shared_hbm)
        nisa.dma_compute(dst=out, srcs=list(tensors), reduce_op=nl.add, scales=[1.0] * count)
        return out

    expected = arrays[0]
    for array in arrays[1:]:
        expected = expected + array
    np.testing.assert_array_equal(outputs(kernel, *arrays), expected)


def test_operands_lie_anywhere_have_any_shape_and_dtype() -> None:
    small, integers = X.astype(BF16), RNG.integers(-100, 100, (60,)).astype(np.int16)

    def kernel(x: Any, y: Any, z: Any) -> Any:
        dst = nl.ndarray((5, 12), nl.bfloat16)
        nisa.dma_compute(dst, [x, load(y), z], nl.add)
        return store(dst)

    total = X + small.astype(np.float32) + integers.astype(np.float32).reshape(6, 10)
    np.testing.assert_array_equal(outputs(kernel, X, small, integers), total.astype(BF16).reshape(5, 12))


def test_integers_saturate_after_the_float32_sum() -> None:
    bytes_ = np.array([[200, 100, 3]], np.uint8)

    def kernel(x: Any) -> Any:
        out = nl.ndarray((1, 3), nl.uint8, buffer=nl.shared_hbm)
        nisa.dma_compute(out, [x, x], nl.add)
        return out

    np.testing.assert_array_equal(outputs(kernel, bytes_), [[255, 200, 6]])


def test_a_destination_may_be_a_source() -> None:
    out = X.copy()
    launch(lambda o, y: nisa.dma_compute(o, [y, o], nl.add), out, X)
    np.testing.assert_array_equal(out, X + X)


def scatter_add(out: Any, x: Any, rows: Any, **options: Any) -> None:
    index = load(rows)
    nisa.dma_compute(out.vector_select(0, index), [out.vector_select(0, index), load(x)], nl.add, **options)


def scatter_add_reversed(out: Any, x: Any, rows: Any, **options: Any) -> None:
    index = load(rows)
    view = out.ap([[10, 6], [1, 10]], vector_offset=index)
    nisa.dma_compute(view, [load(x), view], nl.add, **options)


@pytest.mark.parametrize("kernel", [scatter_add, scatter_add_reversed])
def test_adds_to_scattered_rows(kernel: Any) -> None:
    out, expected = TABLE.copy(), TABLE.copy()
    launch(kernel, out, X, ROWS)
    expected[ROWS[:, 0]] += X
    np.testing.assert_array_equal(out, expected)


def gather_add(table: Any, x: Any, rows: Any, **options: Any) -> Any:
    dst = load(x)
    nisa.dma_compute(dst, [dst, table.vector_select(0, load(rows))], nl.add, **options)
    return store(dst)


def test_adds_gathered_rows() -> None:
    np.testing.assert_array_equal(outputs(gather_add, TABLE, X, ROWS), X + TABLE[ROWS[:, 0]])


def test_rows_out_of_range_raise_or_stay() -> None:
    rows = ROWS.copy()
    rows[[1, 4], 0] = 20, 2**31
    inside = [0, 2, 3, 5]
    for kernel in (gather_add, scatter_add):
        with pytest.raises(IndexRangeError, match="index 20 of row 1 is out of range for 20 rows"):
            launch(kernel, TABLE.copy(), X, rows)
    expected = X.copy()
    expected[inside] += TABLE[rows[inside, 0]]
    np.testing.assert_array_equal(outputs(lambda *t: gather_add(*t, oob_mode=SKIP), TABLE, X, rows), expected)
    out, expected = TABLE.copy(), TABLE.copy()
    launch(lambda *t: scatter_add(*t, oob_mode=SKIP), out, X, rows)
    expected[rows[inside, 0]] += X[inside]
    np.testing.assert_array_equal(out, expected)
    launch(lambda *t: scatter_add(*t, oob_mode=SKIP), out, X, rows * 0 + 99)
    np.testing.assert_array_equal(out, expected)


def test_equal_indices_break_the_promise_unless_they_are_skipped() -> None:
    rows = ROWS.copy()
    rows[3] = rows[0]
    for kernel in (gather_add, scatter_add):
        with pytest.raises(NkiValidationError, match="unique_indices is True, but .* equal indices"):
            launch(kernel, TABLE.copy(), X, rows)
    rows[[0, 3]] = 77
    launch(lambda *t: scatter_add(*t, oob_mode=SKIP), TABLE.copy(), X, rows)


def refused(match: str, call: Callable[..., Any], error: type[Exception] = NkiValidationError) -> None:
    with pytest.raises(error, match=match):
        launch(lambda x, table, rows: call(x, table, load(rows)), X, TABLE, ROWS)


def compute(dst: Any, *srcs: Any, op: Any = nl.add, **options: Any) -> None:
    nisa.dma_compute(dst, list(srcs), op, **options)


def fresh(x: Any, buffer: Any = nl.sbuf) -> Any:
    return nl.ndarray(x.shape, x.dtype, buffer=buffer)


def test_refuses_other_arithmetic() -> None:
    refused(
        "reduce_op nl.multiply is not accepted; accepted: add", lambda x, t, i: compute(fresh(x), x, op=nl.multiply)
    )
    refused("scales must be 1.0 for each of 2", lambda x, t, i: compute(fresh(x), x, x, scales=[1.0, 2.0]))
    refused("scales must be 1.0 for each of 2", lambda x, t, i: compute(fresh(x), x, x, scales=[1.0]))
    refused("scales must be a list", lambda x, t, i: compute(fresh(x), x, scales=1.0), TypeError)
    # The order of arguments of release 0.2.
    refused("reduce_op must be an operator", lambda x, t, i: nisa.dma_compute(fresh(x), [x], [1.0], nl.add), TypeError)
    refused("unique_indices must be True", lambda x, t, i: compute(fresh(x), x, unique_indices=False))


def test_refuses_other_operands() -> None:
    refused("srcs must be 1 to 16 tensors, got 17", lambda x, t, i: compute(fresh(x), *[x] * 17))
    refused("srcs must be 1 to 16 tensors, got 0", lambda x, t, i: compute(fresh(x)))
    refused("srcs must be a list", lambda x, t, i: nisa.dma_compute(fresh(x), x, nl.add), TypeError)
    refused("srcs\\[1\\] has 200 elements, dst has 60", lambda x, t, i: compute(fresh(x), x, t))
    refused("dst is in psum", lambda x, t, i: compute(fresh(x, nl.psum), x))
    refused("srcs\\[0\\] is in psum", lambda x, t, i: compute(fresh(x), fresh(x, nl.psum)))
    scalar = lambda t: t.ap([[10, 6], [1, 10]], scalar_offset=nisa.register_alloc(0))  # noqa: E731
    refused("srcs\\[0\\] has a scalar run-time index", lambda x, t, i: compute(fresh(x), scalar(t)))
    refused("dst has a scalar run-time index", lambda x, t, i: compute(scalar(t), x))
    refused("oob_mode must be a member", lambda x, t, i: compute(fresh(x), x, oob_mode=1), TypeError)
    refused("skip needs a source with a run-time index", lambda x, t, i: compute(fresh(x), x, oob_mode=SKIP))


def test_refuses_other_forms_with_indices() -> None:
    rows = lambda t, i: t.vector_select(0, i)  # noqa: E731
    refused("takes 2 sources, got 3", lambda x, t, i: compute(rows(t, i), rows(t, i), load(x), load(x)))
    refused("on one source, got 2", lambda x, t, i: compute(rows(t, i), rows(t, i), rows(t, i)))
    refused("on one source, got 0", lambda x, t, i: compute(rows(t, i), load(x), load(x)))
    refused("adds to what dst holds", lambda x, t, i: compute(fresh(x), load(x), rows(t, i)))
    other = lambda i: store(i)  # noqa: E731 - the same values in another tile
    refused("adds to what dst holds", lambda x, t, i: compute(rows(t, i), rows(t, load(other(i))), load(x)))
    refused("in sbuf", lambda x, t, i: compute(rows(t, i), rows(t, i), x))
    refused("in sbuf", lambda x, t, i: compute(x, x, rows(t, i)))


def test_sources_have_to_be_written() -> None:
    with pytest.raises(UninitializedReadError, match="dma_compute .* never written"):
        launch(lambda x: compute(fresh(x), x, fresh(x)), X)


def test_the_trace_and_the_time_of_a_static_sum() -> None:
    """Two loads and one store of each row: descriptors and bytes of both sources, the destination once."""

    def kernel(x: Any, y: Any, out: Any) -> None:
        nisa.dma_compute(out, [x, y], nl.add)
        nisa.dma_compute(tile(256), [x, y], nl.add)

    copied, summed = records(kernel, *[hbm(128, 256)] * 3)
    size = 128 * 256 * 4
    issuer, transfer = issuer_of(copied), transfer_of(copied, DMA)
    assert not issuer.software and transfer is not None
    assert (transfer.direction, transfer.nbytes, transfer.hbm_bytes) == ("hbm copy", 2 * size, 3 * size)
    transfer = transfer_of(summed, DMA)
    assert transfer is not None and (transfer.direction, transfer.hbm_bytes) == ("load", 2 * size)
    assert close(transfer.work, [2 * 8 * (DMA.descriptor + 1024 / DMA.rate)] * 16)


def test_adding_to_chosen_rows_is_issued_by_gpsimd() -> None:
    def kernel(out: Any, x: Any, rows: Any) -> None:
        scatter_add(out, x, rows)

    record = records(kernel, hbm(20, 10), hbm(6, 10), hbm(6, 1, dtype="uint32"))[-1]
    assert issuer_of(record).software and record.writes[0].around == (20, 10)
