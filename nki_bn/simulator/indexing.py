# SPDX-License-Identifier: Apache-2.0
"""Indexing a tensor with integers, slices and an ellipsis: which view that is."""

from __future__ import annotations

from typing import Any

import numpy as np

from nki_bn.simulator.errors import NkiValidationError
from nki_bn.simulator.shapes import integer, require

Sizes = tuple[int, ...]


def indexed(key: Any, shape: Sizes, strides: Sizes, offset: int, *, on_chip: bool) -> tuple[list[int], list[int], int]:
    """Shape, strides and offset of ``tensor[key]``. On chip two dimensions stay, in HBM one.

    Raises:
        TypeError: a key is neither an integer nor a slice nor Ellipsis.
        NkiValidationError: too many keys, one out of range, an empty slice, strided partitions.
    """
    sizes: list[int] = []
    steps: list[int] = []
    dropped = strides[-1], 1
    for dim, item in enumerate(_expand(key if isinstance(key, tuple) else (key,), shape)):
        size, stride = shape[dim], strides[dim]
        if isinstance(item, slice):
            start, count, step = _bounds(item, dim, shape, on_chip)
            offset += start * stride
            sizes.append(count)
            steps.append(stride * step)
            continue
        require(-size <= item < size, f"index {item} is out of range for dimension {dim} of shape {shape}")
        offset += item % size * stride
        if dim == 0 and on_chip:
            sizes.append(1)
            steps.append(stride)
        dropped = stride, 1
    if len(sizes) < (2 if on_chip else 1):
        sizes.append(dropped[1])
        steps.append(dropped[0])
    return sizes, steps, offset


def _expand(keys: tuple[Any, ...], shape: Sizes) -> list[Any]:
    """One key per dimension."""
    for item in keys:
        if isinstance(item, bool) or not (item is Ellipsis or isinstance(item, (int, np.integer, slice))):
            raise TypeError(f"{item!r} cannot index a tensor; accepted: integers, slices, nl.ds and Ellipsis")
    given = [item for item in keys if item is not Ellipsis]
    require(len(keys) - len(given) <= 1, "at most one Ellipsis indexes a tensor")
    require(len(given) <= len(shape), f"{len(given)} indices for shape {shape}")
    at = keys.index(Ellipsis) if Ellipsis in keys else len(keys)
    return [*keys[:at], *[slice(None)] * (len(shape) - len(given)), *keys[at + 1 :]]


def _bounds(item: slice, dim: int, shape: Sizes, on_chip: bool) -> tuple[int, int, int]:
    """Start, count and step."""
    size = shape[dim]
    step = 1 if item.step is None else integer(item.step, "the step of a slice")
    start = 0 if item.start is None else integer(item.start, "the start of a slice")
    stop = size if item.stop is None else integer(item.stop, "the stop of a slice")
    start, stop = start + size * (start < 0), stop + size * (stop < 0)
    fault = ""
    if step < 1:
        fault = ": the step must be at least 1"
    elif not 0 <= start < stop <= size:
        fault = " is empty or out of range"
    elif step > 1 and dim == 0 and on_chip:
        fault = ": partitions cannot be strided"
    if fault:
        raise NkiValidationError(
            f"slice [{item.start}:{item.stop}:{item.step}] of dimension {dim} of shape {shape}{fault}"
        )
    return start, -(-(stop - start) // step), step
