# SPDX-License-Identifier: Apache-2.0
"""select_reduce: values against NumPy, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from instructions import (
    BF16,
    F32,
    computed,
    execute,
    in_psum,
    pointer,
    record_of,
    refused,
    same,
    values,
    written,
)
from launching import nisa, nl

from nki_bn.simulator import UninitializedReadError

CMD = nisa.reduce_cmd
X, Y = values(64, 24), values(64, 24, seed=1)
COLUMN = values(64, 1, seed=2)
HALF = COLUMN.astype(BF16)
INTS = np.ones((4, 8), np.int32)


MASK = X > 0.3


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16], ids=str)
@pytest.mark.parametrize("reverse", [False, True])
def test_select(dtype: Any, reverse: bool) -> None:
    predicate = MASK.astype(dtype) * 3

    def call(dst: Any, on_true: Any, mask: Any, column: Any) -> list[Any]:
        other = nl.ndarray(dst.shape, dst.dtype)
        nisa.select_reduce(dst, mask, on_true, column, reverse_pred=reverse)
        nisa.select_reduce(other, mask, on_true, -7.25, reverse_pred=reverse)
        return [other]

    chosen = ~MASK if reverse else MASK
    for actual, operand in zip(computed(call, X, predicate, COLUMN), (COLUMN, F32(-7.25)), strict=True):
        same(actual, np.where(chosen, X, operand))


def test_select_casts_places_and_ranks() -> None:
    data = (5 * X).astype(BF16)

    def call(dst: Any, on_true: Any, mask: Any) -> None:
        nisa.select_reduce(dst, mask, on_true, 1.4)

    for options in ({}, {"source": nl.psum}, {"buffer": nl.psum}):
        same(
            computed(call, data, MASK.reshape(64, 4, 6).astype(np.uint8), dtype="int16", **options),
            written(np.where(MASK, data.astype(F32), F32(1.4)), np.int16),
        )


@pytest.mark.parametrize("maximum", [nl.maximum, nl.max])
def test_select_keeps_the_maximum(maximum: Any) -> None:
    def call(dst: Any, on_true: Any, mask: Any, other: Any) -> list[Any]:
        one, two = nl.ndarray((64, 1), nl.float32), nl.ndarray((64, 1), nl.bfloat16)
        nisa.select_reduce(dst, mask, on_true, -9.0, one, CMD.reset_reduce, maximum)
        nisa.select_reduce(dst, mask, other, -9.0, two, CMD.reduce)
        return [one, two]

    dst, one, two = computed(call, X, MASK.astype(np.uint8), Y, dtype="bfloat16")
    first, second = np.where(MASK, X, F32(-9)), np.where(MASK, Y, F32(-9))
    same(one, first.max(1, keepdims=True))
    same(two, np.maximum(first, second).max(1, keepdims=True).astype(BF16))
    same(dst, second.astype(BF16))


@pytest.mark.parametrize("strict", [True, False])
def test_after_an_idle_select_accumulators_are_unknown(strict: bool) -> None:
    def call(dst: Any, on_true: Any, mask: Any) -> list[Any]:
        result = nl.ndarray((64, 1), nl.float32)
        nisa.select_reduce(dst, mask, on_true, 0.0, reduce_cmd=CMD.reset_reduce)
        nisa.select_reduce(dst, mask, on_true, 0.0)
        nisa.select_reduce(dst, mask, on_true, 0.0, result, CMD.reduce)
        return [result]

    result = computed(call, X, MASK.astype(np.uint8), strict=strict)[1]
    assert np.isnan(result).all() == strict


def test_select_pointers_and_record() -> None:
    def call(dst: Any, on_true: Any, mask: Any, column: Any) -> None:
        nisa.select_reduce(dst, mask, on_true, column)

    result = execute(call, X, MASK.astype(np.uint8), COLUMN, numerics="trn2")
    same(result.outputs, np.where(MASK, X, pointer(COLUMN)))
    record = record_of(result, "select_reduce")
    assert record.engine == "vector" and len(record.reads) == 3
    assert record.attributes == {"pointers": 1, "reduce_op": "maximum", "reduce_cmd": "idle", "read_out": False}


PREDICATE = MASK.astype(np.uint8)


@pytest.mark.parametrize(
    "match, data, predicate, keywords",
    [
        ("predicate is int32; accepted", X, MASK.astype(np.int32), {}),
        ("predicate is float32; accepted", X, X, {}),
        ("on_true is int32; accepted", X.astype(np.int32), PREDICATE, {}),
        ("on_true is uint32; accepted", X.astype(np.int32).view(np.uint32), PREDICATE, {}),
        ("predicate has 12 elements per partition, on_true has 24", X, PREDICATE[:, :12], {}),
        ("reduce_op nl.add is not accepted; accepted: maximum", X, PREDICATE, {"reduce_op": nl.add}),
        ("reduce_cmd load_reduce is not accepted", X, PREDICATE, {"reduce_cmd": CMD.load_reduce}),
        ("reduce_cmd reset is not accepted", X, PREDICATE, {"reduce_cmd": CMD.reset}),
    ],
)
def test_select_refuses(match: str, data: Any, predicate: Any, keywords: Any) -> None:
    refused(match, lambda dst, a, m: nisa.select_reduce(dst, m, a, 0.0, **keywords), data, predicate)


def test_select_refuses_operands() -> None:
    refused(
        "on_true and predicate are both in psum",
        lambda dst, a, m: nisa.select_reduce(dst, in_psum(m), in_psum(a), 0.0),
        X,
        PREDICATE,
    )
    refused(
        "reduce_res with reduce_cmd idle would read unknown contents",
        lambda dst, a, m: nisa.select_reduce(dst, m, a, 0.0, nl.ndarray((64, 1), nl.float32)),
        X,
        PREDICATE,
    )
    refused(
        "reduce_res is int32; accepted",
        lambda dst, a, m: nisa.select_reduce(dst, m, a, 0.0, nl.ndarray((64, 1), nl.int32), CMD.reduce),
        X,
        PREDICATE,
    )
    refused(
        r"reduce_res must have shape \(64, 1\), got \(64, 2\)",
        lambda dst, a, m: nisa.select_reduce(dst, m, a, 0.0, nl.ndarray((64, 2), nl.float32), CMD.reduce),
        X,
        PREDICATE,
    )
    refused(
        "on_false must be a number",
        lambda dst, a, m: nisa.select_reduce(dst, m, a, None),
        X,
        PREDICATE,
        error=TypeError,
    )
    refused(
        "on_true is tfloat32; accepted",
        lambda dst, a, m: nisa.select_reduce(dst, m, nl.ndarray((64, 24), nl.tfloat32), 0.0),
        X,
        PREDICATE,
    )


def test_unwritten_operands_are_reported() -> None:
    def call(dst: Any, data: Any) -> None:
        nisa.tensor_tensor_scan(dst, data, data, nl.ndarray((64, 1), nl.float32), nl.multiply, nl.add)

    refused("tensor_tensor_scan at .*never written", call, X, error=UninitializedReadError)


def test_without_low_precision_nothing_is_rounded() -> None:
    def call(dst: Any, data: Any, column: Any) -> None:
        nisa.tensor_scalar(dst, data, nl.multiply, 1.001)
        nisa.scalar_tensor_tensor(dst, dst, nl.subtract, column, nl.multiply, dst)
        nisa.reciprocal(dst, dst)

    data, column = X.astype(BF16), HALF
    middle = data.astype(F32) * F32(1.001)
    exact = F32(1) / ((middle - column.astype(F32)) * middle)
    same(computed(call, data, column, dtype="bfloat16", precise_fp=False), exact)
    assert (computed(call, data, column, dtype="bfloat16").astype(F32) != exact).any()
    bits = np.arange(24, dtype=np.uint16).reshape(4, 6)
    same(
        computed(lambda dst, d: nisa.tensor_scalar(dst, d, nl.bitwise_xor, 5), bits, dtype="uint16", precise_fp=False),
        bits ^ np.uint16(5),
    )
