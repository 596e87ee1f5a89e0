# SPDX-License-Identifier: Apache-2.0
"""Writing the results of an instruction into memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nki_bn.simulator.numerics import Array, cast


@dataclass
class Masked:
    """A result of which only the elements with ``mask`` are written; a ``fixed`` one does not depend on values."""

    values: Array
    mask: Array
    fixed: bool = False


Result = Array | Masked


def store(array: Array, result: Result) -> None:
    """Write a result into the memory of a tensor, rounded to its dtype."""
    values = result.values if isinstance(result, Masked) else result
    values = cast(np.asarray(values), array.dtype).reshape(array.shape)
    mask = result.mask.reshape(array.shape) if isinstance(result, Masked) else None
    if overlaps_itself(array):
        _store_in_order(array, values, mask)
    elif mask is None:
        array[...] = values
    else:
        np.copyto(array, values, where=mask)


def overlaps_itself(array: Array) -> bool:
    """Whether two elements of a view may be the same one in memory: not if each stride steps over all inner ones."""
    reach = 0
    for stride, size in sorted(zip(array.strides, array.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _store_in_order(array: Array, values: Array, mask: Array | None = None) -> None:
    """Set the elements (those in ``mask``) one by one: of several values for one element the last one stays."""
    places: Array = np.zeros((), np.intp)
    for stride, size in zip(array.strides, array.shape, strict=True):
        places = places[..., None] + np.arange(size) * (stride // array.itemsize)
    # As unsigned integers: NumPy makes no such views of the dtypes that it does not have itself.
    bits = f"u{array.itemsize}"
    line = np.lib.stride_tricks.as_strided(array.view(bits), (int(places.max()) + 1,), (array.itemsize,))
    chosen: Any = ... if mask is None else mask
    line[places[chosen].reshape(-1)] = values.view(bits)[chosen].reshape(-1)
