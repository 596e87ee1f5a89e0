# SPDX-License-Identifier: Apache-2.0
"""Batch statistics on Vector: counted moments of a tile, and their aggregation."""

from __future__ import annotations

import numpy as np

from nki_bn.simulator.isa import alu, checks
from nki_bn.simulator.isa.operands import Operands
from nki_bn.simulator.issue import NkiInstruction, issue
from nki_bn.simulator.machine import current_core
from nki_bn.simulator.numerics import Array, Float32, sum_columns
from nki_bn.simulator.tensor import NkiTensor, require

_MOMENTS = 3


def bn_stats(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> NkiInstruction:
    """Count, mean and sum of squared deviations of the even and of the odd elements of every partition.

    Six values per partition: (count, mean, count * variance) of elements 0, 2, 4, ... and of elements 1, 3, 5, ...; the
    variance is that of the population. With one element the odd triple is (0, 0, 0). The mean of equal values is
    exactly that value, and a sum of squares is never negative.

    Args:
        dst: (P, 6) tile in SBUF or PSUM; keep it float32.
        data: (P, F) tile in SBUF or PSUM, any dtype, F at most 512.

    Raises:
        TypeError: an operand is not a tensor.
        NkiValidationError: a shape or place is wrong.
    """
    operands = Operands("bn_stats")
    dst, data = operands.tile("dst", dst), operands.tile("data", data)
    _check_result("bn_stats", dst, data, 2 * _MOMENTS)
    most = current_core().run.target.bn_stats_columns
    require(
        checks.columns(data) <= most, f"bn_stats data has {checks.columns(data)} elements per partition, at most {most}"
    )

    def compute() -> list[Array]:
        values = alu.read(data)
        return [np.concatenate([*_moments(values[:, 0::2]), *_moments(values[:, 1::2])], axis=1)]

    return issue("bn_stats", "vector", [dst], [data, *operands.indices], compute, name=name)


def _check_result(instruction: str, dst: NkiTensor, data: NkiTensor, columns: int) -> None:
    require(
        dst.shape[0] == data.shape[0] and checks.columns(dst) == columns,
        f"{instruction} dst must have {data.shape[0]} partitions of {columns} elements, got shape {dst.shape}",
    )


def _sum(values: Float32) -> Float32:
    return sum_columns(values, current_core().options.accumulate)


def _moments(values: Float32) -> tuple[Float32, Float32, Float32]:
    """Count, mean and sum of squared deviations of each row, as columns."""
    count = np.full((values.shape[0], 1), values.shape[1], np.float32)
    if values.shape[1] == 0:
        return count, count, count
    # Deviations from the first element: equal values have none, so their mean comes out exactly.
    first = values[:, :1]
    deviations = values - first
    offset = _sum(deviations) / count
    deviations -= offset
    np.square(deviations, out=deviations)
    return count, first + offset, _sum(deviations)


def bn_aggr(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> NkiInstruction:
    """Mean and population variance of every partition from any number of (count, mean, count * variance) triples.

    With N the sum of counts: mean = sum(count * mean) / N, variance = (sum(count * variance) + sum(count * (mean_i -
    mean)^2)) / N, in float32. Triples of count 0 contribute nothing, whatever else they hold; equal means give exactly
    that mean. Without any element (N = 0) both results are NaN; the documentation leaves that case open.

    Args:
        dst: (P, 2) tile in SBUF or PSUM: mean, variance.
        data: (P, 3 * T) tile in SBUF or PSUM.

    Raises:
        TypeError: an operand is not a tensor.
        NkiValidationError: a shape or place is wrong.
    """
    operands = Operands("bn_aggr")
    dst, data = operands.tile("dst", dst), operands.tile("data", data)
    _check_result("bn_aggr", dst, data, 2)
    require(
        checks.columns(data) % _MOMENTS == 0,
        f"bn_aggr data has {checks.columns(data)} elements per partition, which is not a multiple of {_MOMENTS}",
    )

    def compute() -> list[Array]:
        return [_aggregate(alu.read(data))]

    return issue("bn_aggr", "vector", [dst], [data, *operands.indices], compute, name=name)


def _aggregate(triples: Float32) -> Float32:
    count, mean, squares = triples[:, 0::3], triples[:, 1::3], triples[:, 2::3]
    filled = count != 0
    total = _sum(count)
    # Deviations from the first mean that counts, so that equal means come out exactly.
    first = np.take_along_axis(mean, np.argmax(filled, axis=1)[:, None], axis=1)
    deviations = np.where(filled, mean - first, np.float32(0))
    offset = _sum(count * deviations) / total
    deviations -= offset
    spread = _sum(np.where(filled, squares, np.float32(0))) + _sum(count * np.square(deviations))
    return np.concatenate([first + offset, spread / total], axis=1)
