# SPDX-License-Identifier: Apache-2.0
"""range_select against NumPy, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from instructions import BF16, F32, computed, execute, op, record_of, refused, same, values
from launching import nisa, nl

CMD = nisa.reduce_cmd
LOWEST = np.finfo(F32).min
X = values(64, 24)
LOW = np.random.default_rng(1).integers(-2, 14, (64, 1)).astype(F32)
HIGH = np.random.default_rng(2).integers(10, 30, (64, 1)).astype(F32)
COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "equal": lambda a, b: a == b,
    "less": lambda a, b: a < b,
    "less_equal": lambda a, b: a <= b,
    "greater": lambda a, b: a > b,
    "greater_equal": lambda a, b: a >= b,
}


def select(first: str = "greater_equal", second: str = "less", **keywords: Any) -> Callable[..., Any]:
    return lambda dst, a, low, high: nisa.range_select(dst, a, op(first), op(second), low, high, **keywords)


def selected(first: str, second: str, data: Any = X, start: int = 0) -> Any:
    index = start + np.arange(24)[None]
    return np.where(COMPARISONS[first](index, LOW) & COMPARISONS[second](index, HIGH), data.astype(F32), LOWEST)


@pytest.mark.parametrize("first", COMPARISONS)
@pytest.mark.parametrize("second", COMPARISONS)
def test_ranges(first: str, second: str) -> None:
    same(computed(select(first, second), X, LOW, HIGH), selected(first, second))


@pytest.mark.parametrize("start", [-7, 9])
def test_positions_count_from_the_start_over_all_free_dimensions(start: int) -> None:
    result = computed(select(range_start=start), X.reshape(64, 4, 6), LOW, HIGH, shape=(64, 24))
    same(result, selected("greater_equal", "less", start=start))


def test_bounds_are_compared_with_all_bits() -> None:
    """Also where other values per partition lose some: positions are exact up to 2^24."""
    start = 2**23 + 1
    low, high = np.full((64, 1), start + 3, F32), np.full((64, 1), start + 9, F32)
    expected = np.where((np.arange(24) >= 3) & (np.arange(24) < 9), X, LOWEST)
    same(computed(select(range_start=start), X, low, high, numerics="trn2"), expected)


def test_the_fill_of_a_narrow_destination_is_infinite_and_the_maximum_is_not() -> None:
    low, high = np.full((64, 1), 30, F32), HIGH

    def call(dst: Any, a: Any, low: Any, high: Any) -> list[Any]:
        top = nl.ndarray((64, 1), nl.float32)
        nisa.range_select(dst, a, nl.greater_equal, nl.less, low, high, reduce_res=top)
        return [top]

    dst, top = computed(call, X.astype(BF16), low, high, dtype="bfloat16")
    same(dst, np.full((64, 24), -np.inf, F32).astype(BF16))
    same(top, np.full((64, 1), LOWEST, F32))


def test_the_maximum_accumulates() -> None:
    other = values(64, 24, seed=3)

    def call(dst: Any, a: Any, b: Any, low: Any, high: Any) -> list[Any]:
        one, two = nl.ndarray((64, 1), nl.float32), nl.ndarray((64, 1), nl.float32)
        nisa.range_select(dst, a, nl.greater_equal, nl.less, low, high, CMD.reset_reduce, one, nl.maximum)
        nisa.range_select(dst, b, nl.greater_equal, nl.less, low, high, CMD.reduce, two, range_start=4)
        return [one, two]

    dst, one, two = computed(call, X, other, LOW, HIGH)
    first, second = selected("greater_equal", "less"), selected("greater_equal", "less", other, 4)
    same(dst, second)
    same(one, first.max(1, keepdims=True))
    same(two, np.maximum(first, second).max(1, keepdims=True))


def test_in_place_in_psum_with_the_lowest_number_spelled_out() -> None:
    def call(dst: Any, a: Any, low: Any, high: Any) -> None:
        nisa.range_select(a, a, nl.greater_equal, nl.less, low, high, on_false_value=-3.4028235e38)
        nisa.tensor_copy(dst, a)

    result = execute(call, X, LOW, HIGH, source=nl.psum)
    same(result.outputs, selected("greater_equal", "less"))
    record = record_of(result, "range_select")
    assert record.engine == "vector" and len(record.reads) == 3
    assert record.attributes == {
        "ops": ("greater_equal", "less"),
        "pointers": 2,
        "reduce_op": "maximum",
        "reduce_cmd": "reset_reduce",
        "read_out": False,
    }


@pytest.mark.parametrize(
    "match, keywords",
    [
        ("comp_op0 nl.not_equal is not accepted; accepted: equal, less", {"first": "not_equal"}),
        ("comp_op1 nl.add is not accepted", {"second": "add"}),
        ("on_false_value must be the smallest float32 number.*got 0.0", {"on_false_value": 0.0}),
        ("on_false_value must be the smallest float32 number.*got -inf", {"on_false_value": -np.inf}),
        ("on_false_value must be the smallest float32 number.*got -1e\\+39", {"on_false_value": -1e39}),
        ("reduce_op nl.add is not accepted; accepted: maximum", {"reduce_op": nl.add}),
        ("reduce_cmd idle is not accepted; accepted: reset_reduce, reduce", {"reduce_cmd": CMD.idle}),
        ("reduce_cmd load_reduce is not accepted", {"reduce_cmd": CMD.load_reduce}),
        ("range_start 16777200 with 24 elements per partition leaves the integers", {"range_start": 2**24 - 16}),
        ("needs gen3 or later, the target is gen2", {"target": "trn1"}),
    ],
)
def test_refuses(match: str, keywords: Any) -> None:
    options = {key: keywords.pop(key) for key in ("target",) if key in keywords}
    refused(match, select(**keywords), X, LOW, HIGH, **options)


@pytest.mark.parametrize(
    "match, data, low, options",
    [
        ("on_true_tile is int32; accepted: float8_e4m3", X.astype(np.int32), LOW, {}),
        ("bound0 must be float32, got bfloat16", X, LOW.astype(BF16), {}),
        (r"bound0 must have shape \(64, 1\), got \(64, 2\)", X, np.tile(LOW, 2), {}),
        (r"bound0 must have shape \(64, 1\), got \(32, 1\)", X, LOW[:32], {}),
        ("dst has 12 elements per partition, on_true_tile has 24", X, LOW, {"shape": (64, 12)}),
        ("dst has 32 partitions, on_true_tile has 64", X, LOW, {"shape": (32, 24)}),
    ],
)
def test_refuses_operands(match: str, data: Any, low: Any, options: Any) -> None:
    refused(match, select(), data, low, HIGH, **options)


def test_refuses_types() -> None:
    bound = lambda dst, a, low, high: nisa.range_select(dst, a, nl.less, nl.less, 3.0, high)  # noqa: E731
    refused(r"bound0 must be a tile of shape \(64, 1\), got 3.0", bound, X, LOW, HIGH, error=TypeError)
    refused("range_start must be an integer, got 1.5", select(range_start=1.5), X, LOW, HIGH, error=TypeError)
    refused("on_false_value must be a number", select(on_false_value=None), X, LOW, HIGH, error=TypeError)
    refused("reduce_cmd must be a member", select(reduce_cmd=3), X, LOW, HIGH, error=TypeError)
    refused(
        r"reduce_res must have shape \(64, 1\), got \(64, 2\)",
        lambda dst, a, low, high: nisa.range_select(
            dst, a, nl.less, nl.less, low, high, reduce_res=nl.ndarray((64, 2), nl.float32)
        ),
        X,
        LOW,
        HIGH,
    )
