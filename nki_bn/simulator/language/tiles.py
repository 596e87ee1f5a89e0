# SPDX-License-Identifier: Apache-2.0
"""The tiles that functions of ``nki.language`` take and return: checked, allocated, brought to one shape, assigned."""

from __future__ import annotations

from typing import Any

from nki_bn.simulator import dtypes
from nki_bn.simulator.isa import dma, movement
from nki_bn.simulator.isa.enums import engine
from nki_bn.simulator.language.creation import ndarray
from nki_bn.simulator.machine import current_core
from nki_bn.simulator.tensor import NkiTensor, require

# Partitions that one nc_stream_shuffle mask covers.
_QUADRANT = 32


def tile_operand(name: str, argument: str, value: Any) -> NkiTensor:
    """``value`` if it is an on-chip tensor.

    Raises:
        TypeError: it is no tensor.
        NkiValidationError: it is in HBM.
    """
    if not isinstance(value, NkiTensor):
        raise TypeError(f"{name} {argument} must be a tile, got {value!r}")
    require(value.buffer.on_chip, f"{name} {argument} is in {value.buffer.value}: load it first")
    return value


def empty_result(x: NkiTensor, dtype: Any) -> NkiTensor:
    """A new SBUF tile with the shape of ``x``, by default of its dtype."""
    return ndarray(x.shape, x.dtype if dtype is None else dtype)


def copied(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """A new SBUF tile with the values of ``x``, by Vector."""
    result = empty_result(x, dtype)
    movement.tensor_copy(result, x, engine=engine.vector)
    return result


def broadcast_to(x: NkiTensor, shape: tuple[int, ...], dtype: Any = None) -> NkiTensor:
    """A new SBUF tile of ``shape`` in which dimensions of ``x`` of size 1 are repeated; ``x`` if nothing changes."""
    tile_operand("broadcast_to", "x", x)
    sizes = tuple(shape)
    fits = len(sizes) == x.ndim and all(old in (1, new) for old, new in zip(x.shape, sizes, strict=True))
    require(fits, f"broadcast_to: shape {x.shape} does not broadcast to {sizes} (ranks must be equal)")
    if sizes == x.shape:
        return x if dtype is None or dtypes.normalize(dtype) == x.dtype else copied(x, dtype)
    rows = _over_partitions(x, sizes[0])
    for dim in range(1, x.ndim):
        if rows.shape[dim] != sizes[dim]:
            rows = rows.broadcast(dim, sizes[dim])
    return copied(rows, dtype)


def _over_partitions(x: NkiTensor, partitions: int) -> NkiTensor:
    """``x``, or its only partition repeated ``partitions`` times (quadrant by quadrant)."""
    if x.shape[0] == partitions:
        return x
    most = current_core().run.target.partitions
    require(partitions <= most, f"broadcast_to: {partitions} partitions exceed the maximum of {most}")
    result = ndarray((most, *x.shape[1:]), x.dtype)
    for start in range(0, partitions, _QUADRANT):
        movement.nc_stream_shuffle(result[start : start + _QUADRANT], x, shuffle_mask=[0] * _QUADRANT)
    return result[:partitions]


def aligned(x: NkiTensor, y: NkiTensor) -> tuple[NkiTensor, NkiTensor]:
    """Two tiles for an elementwise function: in a lenient run dimensions of size 1 are repeated, as older simulators of
    the vendor did; no current document promises it, so strict runs leave them as they are (and the instruction
    refuses)."""
    if x.ndim != y.ndim or x.shape == y.shape or current_core().options.strict:
        return x, y
    if any(one != other and 1 not in (one, other) for one, other in zip(x.shape, y.shape, strict=True)):
        return x, y
    shape = tuple(map(max, x.shape, y.shape))
    return broadcast_to(x, shape), broadcast_to(y, shape)


def assign(target: NkiTensor, value: Any) -> None:
    """What ``target[...] = value`` does in a lenient run: a copy, by a DMA where HBM is involved; a number fills.

    Raises:
        TypeError: ``value`` is neither a tensor nor a number.
    """
    if not isinstance(value, NkiTensor):
        movement.memset(target, value)
    elif target.buffer.on_chip and value.buffer.on_chip:
        movement.tensor_copy(target, value)
    else:
        dma.dma_copy(target, value)
