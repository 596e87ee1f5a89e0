# SPDX-License-Identifier: Apache-2.0
"""Shapes and patterns of names: what the view methods of tensors compute with."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import prod
from typing import Any

from nki_bn.simulator.errors import NkiValidationError


def require(condition: bool, message: str) -> None:
    """Raise :class:`NkiValidationError` with ``message`` unless ``condition`` holds."""
    if not condition:
        raise NkiValidationError(message)


def integer(value: Any, what: str) -> int:
    """``value`` as an int; TypeError if it is none, or a bool."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{what} must be an integer, got {value!r}")
    return operator.index(value)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of a packed row-major ``shape``."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


def put(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    """``values`` with ``value`` at position ``at``."""
    return (*values[:at], value, *values[at + 1 :])


def infer(given: tuple[int, ...], total: int, old: tuple[int, ...]) -> tuple[int, ...]:
    """The shape ``given`` for ``total`` elements of a tensor of shape ``old``, its -1 (one at most) filled in.

    Raises:
        TypeError: a size is no integer.
        NkiValidationError: it does not hold that many elements.
    """
    sizes = tuple(integer(size, "a size of a shape") for size in given)
    require(sizes.count(-1) <= 1, f"shape {sizes} has more than one -1")
    known = prod(size for size in sizes if size != -1)
    if -1 in sizes and known and total % known == 0:
        sizes = put(sizes, sizes.index(-1), total // known)
    require(
        prod(sizes) == total and all(size > 0 for size in sizes),
        f"shape {sizes} does not hold the {total} elements of {old}",
    )
    return sizes


def flat(pattern: tuple[Any, ...]) -> list[str]:
    """The names of a pattern of :meth:`NkiTensor.rearrange`, in order."""
    return [name for item in pattern for name in (item if isinstance(item, tuple) else (item,))]
