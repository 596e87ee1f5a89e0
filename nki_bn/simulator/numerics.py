# SPDX-License-Identifier: Apache-2.0
"""Arithmetic that all engines share: casts, rounding of pointer operands, order of summation."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]

# Significant bits of a per-partition operand in the pessimistic mode: measured on trn2, x*scale is good to 2^-18.
POINTER_BITS = 18


def to_float32(values: Array) -> Float32:
    """``values`` as float32, the format in which Vector, Scalar and GpSimd compute; always a fresh array."""
    return values.astype(np.float32)


def cast(values: Array, dtype: np.dtype[Any]) -> Array:
    """``values`` rounded to ``dtype`` as an engine writes them.

    float -> integer rounds to nearest even and saturates (NaN becomes 0); float -> narrower float rounds to nearest
    even, beyond the range to infinity (or NaN where the format has none).
    """
    if values.dtype == dtype:
        return values
    if values.dtype.kind == "b":
        return values.astype(dtype)
    if values.dtype.kind in "iu":
        values = values.astype(np.float32)
    if dtype.kind in "iu":
        return _to_integer(values, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(dtype)


def _to_integer(values: Array, dtype: np.dtype[Any]) -> Array:
    # The limits of 8 and 16 bits are exact in float32, those of 32 bits are not.
    limits, wide = np.iinfo(dtype), np.float32 if dtype.itemsize < 4 else np.float64
    rounded = np.asarray(np.rint(values, dtype=wide, casting="unsafe"))
    np.clip(rounded, limits.min, limits.max, out=rounded)
    rounded[np.isnan(rounded)] = 0
    return rounded.astype(dtype)


def round_significant(values: Float32, bits: int) -> Float32:
    """``values`` rounded to ``bits`` significant bits, ties to even; NaN and infinities pass."""
    drop = 24 - bits
    raw = np.ascontiguousarray(values).view(np.uint32)
    finite = np.isfinite(values)
    half = np.uint32((1 << (drop - 1)) - 1)
    odd = (raw >> np.uint32(drop)) & np.uint32(1)
    with np.errstate(over="ignore"):
        rounded = ((raw + half + odd) >> np.uint32(drop)) << np.uint32(drop)
    return np.where(finite, rounded, raw).astype(np.uint32).view(np.float32).reshape(values.shape)


def sum_columns(values: Float32, order: str) -> Float32:
    """Float32 sum over the last axis, kept with size 1.

    ``order`` is ``"pairwise"`` (NumPy's blocked order) or ``"sequential"`` (one running float32 accumulator, the worst
    order hardware may use).
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if order == "sequential":
            # A cumulative sum cannot be reordered: its last column is the sequential sum.
            running: Float32 = np.cumsum(values, axis=-1, dtype=np.float32)
            return running[..., -1:]
        total: Float32 = np.ascontiguousarray(values).sum(axis=-1, dtype=np.float32, keepdims=True)
        return total
