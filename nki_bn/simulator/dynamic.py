# SPDX-License-Identifier: Apache-2.0
"""Run-time indices of a view: one for all of it, one per row, or offsets along the free dimensions.

Until an instruction takes the view, the memory that holds the indices is not read: it may change before that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from nki_bn.simulator.memory import MemoryRegion
from nki_bn.simulator.nki_object import NKIObject
from nki_bn.simulator.shapes import require

_ROW_DTYPES = ("int32", "uint32")
_OFFSET_DTYPES = ("int16", "int32", "uint16", "uint32")


@dataclass(frozen=True)
class ScalarOffset:
    """``index`` (a register or a one-element tile) times ``stride`` elements is added to the offset.

    ``bound`` is the extent of the indexed dimension of the base tensor.
    """

    index: Any
    stride: int
    bound: int


@dataclass(frozen=True)
class VectorOffset:
    """Row w (along dimension 0) begins ``index[w]`` times ``stride`` elements after the offset.

    ``index`` is a tile in SBUF, read column by column; ``bound`` the extent of dimension 0 of the base tensor.
    """

    index: Any
    stride: int
    bound: int


@dataclass(frozen=True)
class FreeOffsets:
    """Column i (dimension 1) lies at offset ``index[i % G, i // G]``; G depends on the engine.

    ``bound`` is the number of elements per partition that offsets reach.
    """

    index: Any
    bound: int


Dynamic: TypeAlias = ScalarOffset | VectorOffset | FreeOffsets


def scalar_index(index: Any, stride: int, bound: int) -> ScalarOffset:
    """Check the index of a run-time address.

    Raises:
        TypeError: ``index`` is neither a register nor a tile.
        NkiValidationError: a tile is not in SBUF.
    """
    if not isinstance(index, NKIObject):
        raise TypeError(f"a run-time index must be a register or a one-element tile, got {index!r}")
    region = getattr(index, "buffer", MemoryRegion.sbuf)
    require(region is MemoryRegion.sbuf, f"a run-time index is in {region.value}; accepted: sbuf, or a register")
    return ScalarOffset(index, stride, bound)


def row_indices(index: Any, stride: int, bound: int, base: Any) -> VectorOffset:
    """Check indices of rows of the tensor ``base``.

    Raises:
        TypeError: ``index`` is no tensor.
        NkiValidationError: ``base`` is not in HBM, or the indices are not int32 or uint32, not in SBUF or indirect.
    """
    require(not base.buffer.on_chip, f"vector_offset needs a tensor in HBM, got {base!r}")
    _check_tile("vector_offset", index, _ROW_DTYPES)
    return VectorOffset(index, stride, bound)


def free_offsets(index: Any, bound: int, partitions: int) -> FreeOffsets:
    """Check offsets along the free dimensions of a tile of ``partitions``.

    Raises:
        TypeError: ``index`` is no tensor.
        NkiValidationError: it has other partitions, another dtype or place, or run-time indices itself.
    """
    _check_tile("indirect index", index, _OFFSET_DTYPES)
    require(
        index.ndim == 2 and index.shape[0] == partitions,
        f"indirect index must have shape ({partitions}, K), got {index.shape}",
    )
    return FreeOffsets(index, bound)


def _check_tile(what: str, index: Any, accepted: tuple[str, ...]) -> None:
    if not hasattr(index, "buffer"):
        raise TypeError(f"{what} must be a tile in SBUF, got {index!r}")
    require(index.buffer is MemoryRegion.sbuf, f"{what} is in {index.buffer.value}; accepted: sbuf")
    require(index.dtype in accepted, f"{what} is {index.dtype}; accepted: {', '.join(accepted)}")
    require(not index.is_indirect(), f"{what} {index!r} has a run-time index itself")


def check_view(tensor: Any, shape: Sequence[int], strides: Sequence[int], dynamic: Dynamic | None) -> None:
    """Whether a view of ``tensor`` may have this shape and these strides, and take the run-time index ``dynamic``.

    Raises:
        NkiValidationError: it has one already, or the view changes a dimension that takes part in the indirection.
    """
    own = tensor.dynamic
    require(own is None or dynamic is None, "a tensor takes one run-time index only")
    if isinstance(own, VectorOffset):
        require(
            len(shape) > 0 and (shape[0], strides[0]) == (tensor.shape[0], tensor.strides[0]),
            f"dimension 0 of {tensor!r} is selected by a vector of indices: it cannot be sliced, selected or moved",
        )
    if isinstance(own, FreeOffsets):
        require(tuple(shape) == tensor.shape, f"{tensor!r} is indirect: it cannot be sliced, selected or reshaped")
