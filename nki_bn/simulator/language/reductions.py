# SPDX-License-Identifier: Apache-2.0
"""Reductions over free dimensions, and the functions built on them."""

from __future__ import annotations

from math import prod as product
from typing import Any

from nki_bn.simulator.isa import movement, reductions, tensor_engine
from nki_bn.simulator.language import math as ops
from nki_bn.simulator.language.creation import ndarray, psum
from nki_bn.simulator.language.math import Wrapper
from nki_bn.simulator.language.tiles import tile_operand
from nki_bn.simulator.tensor import NkiTensor, require

Axis = int | tuple[int, ...] | list[int]


def _axes(name: str, x: NkiTensor, axis: Axis) -> tuple[int, ...]:
    """``axis`` as increasing dimensions; they must be the last ones and not the partitions."""
    given = tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
    dims = tuple(sorted(dim % x.ndim if -x.ndim <= dim < x.ndim else dim for dim in given))
    require(
        len(dims) > 0 and dims[0] > 0 and dims == tuple(range(dims[0], x.ndim)),
        f"{name} axis must be the last free dimensions of shape {x.shape}, got {axis!r}",
    )
    return dims


def _reduced(x: NkiTensor, dims: tuple[int, ...], keepdims: bool) -> tuple[int, ...]:
    kept = x.shape[: dims[0]]
    if keepdims:
        return (*kept, *[1] * len(dims))
    # On chip two dimensions stay.
    return kept if len(kept) > 1 else (*kept, 1)


def _reduce(op: Wrapper, name: str, x: NkiTensor, axis: Axis, dtype: Any, keepdims: bool) -> NkiTensor:
    dims = _axes(name, tile_operand(name, "x", x), axis)
    result = ndarray(_reduced(x, dims, keepdims), x.dtype if dtype is None else dtype)
    reductions.tensor_reduce(result, op=op, data=x, axis=dims, keepdims=keepdims)
    return result


def sum(x: NkiTensor, axis: Axis, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Sum over trailing free dimensions, in float32."""
    return _reduce(ops.add, "sum", x, axis, dtype, keepdims)


def prod(x: NkiTensor, axis: Axis, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Product over trailing free dimensions, in float32."""
    return _reduce(ops.multiply, "prod", x, axis, dtype, keepdims)


def max(x: NkiTensor, axis: Axis, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Largest value over trailing free dimensions."""
    return _reduce(ops.maximum, "max", x, axis, dtype, keepdims)


def min(x: NkiTensor, axis: Axis, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Smallest value over trailing free dimensions."""
    return _reduce(ops.minimum, "min", x, axis, dtype, keepdims)


# Some descriptions of instructions say nl.max and nl.min where they mean the binary operators.
max.nki_op = "maximum"  # type: ignore[attr-defined]
min.nki_op = "minimum"  # type: ignore[attr-defined]


def all(x: NkiTensor, axis: Axis, dtype: Any = None) -> NkiTensor:
    """1.0 where every value (0 or 1) over trailing free dimensions is true, else 0.0."""
    return _reduce(ops.logical_and, "all", x, axis, dtype, keepdims=False)


def mean(x: NkiTensor, axis: Axis, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Mean over trailing free dimensions, with float32 intermediates."""
    total = sum(x, axis, "float32", keepdims)
    n = x.size // total.size
    return ops.multiply(total, 1.0 / n, dtype=x.dtype if dtype is None else dtype)


def var(x: NkiTensor, axis: Axis, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Population variance over trailing free dimensions; ``keepdims`` has no effect, the dimensions stay."""
    centred = _subtract_rows(x, mean(x, axis, "float32", keepdims=True))
    return mean(ops.square(centred), axis, x.dtype if dtype is None else dtype, keepdims=True)


def _rows(column: NkiTensor, shape: tuple[int, ...]) -> NkiTensor:
    """``column`` (trailing sizes 1) as a view of ``shape``."""
    for dim, size in enumerate(shape):
        if column.shape[dim] != size:
            column = column.broadcast(dim, size)
    return column


def _subtract_rows(x: NkiTensor, column: NkiTensor) -> NkiTensor:
    return ops.subtract(x, _rows(column, x.shape), dtype="float32")


def softmax(x: NkiTensor, axis: Axis = -1, dtype: Any = None) -> NkiTensor:
    """Softmax over trailing free dimensions, with float32 intermediates."""
    powers = ops.exp(_subtract_rows(x, max(x, axis, "float32", keepdims=True)))
    inverse = ops.reciprocal(sum(powers, axis, keepdims=True))
    return ops.multiply(powers, _rows(inverse, x.shape), dtype=x.dtype if dtype is None else dtype)


def rms_norm(
    x: NkiTensor, w: NkiTensor, axis: Axis, n: int, epsilon: float = 1e-6, dtype: Any = None, compute_dtype: Any = None
) -> NkiTensor:
    """x / sqrt(sum(x*x) / n + epsilon) * w over trailing free dimensions; ``w`` has the shape of ``x``."""
    inner = "float32" if compute_dtype is None else compute_dtype
    squares = sum(ops.multiply(x, x, dtype=inner), axis, "float32", keepdims=True)
    shifted = ops.add(ops.multiply(squares, 1.0 / n), epsilon)
    scaled = ops.multiply(x, _rows(ops.rsqrt(shifted), x.shape), dtype=inner)
    return ops.multiply(scaled, w, dtype=x.dtype if dtype is None else dtype)


def where(condition: NkiTensor, x: NkiTensor, y: NkiTensor, dtype: Any = None) -> NkiTensor:
    """``x`` where ``condition`` holds, else ``y``: three tiles of one shape, the condition of 1.0 and 0.0."""
    for argument, value in (("condition", condition), ("x", x), ("y", y)):
        tile_operand("where", argument, value)
        require(
            value.shape == condition.shape, f"where {argument} has shape {value.shape}, condition {condition.shape}"
        )
    result_dtype = x.dtype if dtype is None else dtype
    result = ops.copy(y, result_dtype)
    movement.tensor_copy_predicated(result, ops.copy(x, result_dtype), ops.copy(condition, "uint8"))
    return result


def matmul(x: NkiTensor, y: NkiTensor, transpose_x: bool = False) -> NkiTensor:
    """x.T @ y as a new float32 PSUM tile: ``x`` (K, M) and ``y`` (K, N) in SBUF. Only ``transpose_x=True`` works."""
    require(transpose_x, "matmul works with transpose_x=True only (x of shape (K, M)), as on hardware")
    columns = product(tile_operand("matmul", "y", y).shape[1:])
    result = ndarray((product(tile_operand("matmul", "x", x).shape[1:]), columns), "float32", buffer=psum)
    tensor_engine.nc_matmul(result, stationary=x, moving=y)
    return result
