# SPDX-License-Identifier: Apache-2.0
"""Rounding to integers and trigonometry: functions that no single instruction computes."""

from __future__ import annotations

import math
from typing import Any

from nki_bn.simulator.isa import movement, scalar
from nki_bn.simulator.language import math as ops
from nki_bn.simulator.language.tiles import empty_result, tile_operand
from nki_bn.simulator.operators import operator
from nki_bn.simulator.tensor import NkiTensor

# Float32 values from here on are integers.
_ALL_INTEGER = 2.0**23

# pi / 2 in three parts: the products of the first two with integers below 2**16 are exact in float32.
_QUARTER_HIGH = 1.5703125
_QUARTER_MIDDLE = float.fromhex("0x1.fap-12")
_QUARTER_LOW = math.pi / 2 - _QUARTER_HIGH - _QUARTER_MIDDLE


def _nearest(x: NkiTensor) -> NkiTensor:
    """Float32 tile of ``x`` rounded to the nearest integer (a write to int32 does that); |x| below 2**31."""
    return ops.copy(ops.copy(x, "int32"), "float32")


@operator
def floor(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Elementwise largest integer not above x."""
    tile_operand("floor", "x", x)
    nearest = _nearest(x)
    lower = ops.subtract(nearest, ops.greater(nearest, x, dtype="float32"))
    # Larger values (infinities too) and NaN are their own floor, and do not fit into an int32.
    result = ops.copy(x, "float32")
    movement.tensor_copy_predicated(result, lower, ops.less(ops.abs(result), _ALL_INTEGER, dtype="uint8"))
    return ops.copy(result, x.dtype if dtype is None else dtype)


@operator
def ceil(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Elementwise smallest integer not below x."""
    tile_operand("ceil", "x", x)
    lower = floor(ops.multiply(x, -1.0, dtype="float32"))
    return ops.multiply(lower, -1.0, dtype=x.dtype if dtype is None else dtype)


@operator
def trunc(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Elementwise nearest integer towards zero."""
    size = floor(ops.abs(tile_operand("trunc", "x", x), dtype="float32"))
    return ops.multiply(size, ops.sign(x, dtype="float32"), dtype=x.dtype if dtype is None else dtype)


def _sine(x: NkiTensor, ahead: int, dtype: Any) -> NkiTensor:
    """sin(x + ahead * pi / 2), the argument reduced to [-pi, pi]: the activation is wrong outside."""
    turns = _nearest(ops.add(ops.multiply(x, 1 / (2 * math.pi), dtype="float32"), ahead / 4))
    quarters = ops.subtract(ops.multiply(turns, 4.0), float(ahead))
    reduced = x
    for part in (_QUARTER_HIGH, _QUARTER_MIDDLE, _QUARTER_LOW):
        reduced = ops.subtract(reduced, ops.multiply(quarters, part), dtype="float32")
    inside = ops.maximum(ops.minimum(reduced, math.pi), -math.pi)
    result = empty_result(x, dtype)
    scalar.activation(result, op=sin, data=inside)
    return result


@operator
def sin(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Elementwise sine, for any |x| below 1e5 (as an activation operator: for x in [-pi, pi])."""
    return _sine(tile_operand("sin", "x", x), 0, dtype)


@operator
def cos(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Elementwise cosine, for any |x| below 1e5."""
    return _sine(tile_operand("cos", "x", x), 1, dtype)


@operator
def tan(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Elementwise tangent, for any |x| below 1e5."""
    sine, cosine = sin(x, dtype="float32"), cos(x, dtype="float32")
    return ops.multiply(sine, ops.reciprocal(cosine), dtype=x.dtype if dtype is None else dtype)
