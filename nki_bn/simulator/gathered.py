# SPDX-License-Identifier: Apache-2.0
"""Tensors whose elements lie where run-time indices said: rows of an HBM tensor, or columns of a tile."""

from __future__ import annotations

import numpy as np

from nki_bn.simulator import dtypes
from nki_bn.simulator.dynamic import FreeOffsets, VectorOffset
from nki_bn.simulator.errors import IndexRangeError, UnsupportedError
from nki_bn.simulator.numerics import Array
from nki_bn.simulator.shapes import require
from nki_bn.simulator.tensor import NkiTensor


class Gathered(NkiTensor):
    """The elements ``at`` (an index of NumPy arrays) of ``whole``, a strided view of all that indices can reach.

    Arrays of it are copies: :meth:`put` writes them back. ``kept`` says which rows of the view that was asked for are
    here (None: all of them).
    """

    def __init__(self, view: NkiTensor, whole: NkiTensor, at: tuple[Array, ...], kept: Array | None = None) -> None:
        rows = view.shape[0] if kept is None else int(kept.sum())
        super().__init__((rows, *view.shape[1:]), view.dtype, view.storage, strides=view.strides, offset=view.offset)
        self.whole = whole
        self.at = at
        self.kept = kept

    @property
    def reach(self) -> tuple[int, ...]:
        """Shape of all places, in the strides of this view, that the indices can lead to."""
        return self.whole.shape

    def array(self) -> Array:
        """The elements, copied."""
        return np.asarray(self.whole.array()[self.at])

    def shadow(self) -> Array:
        """The shadow bytes of the elements, copied; the last axis counts the bytes of an element."""
        return np.asarray(self._all_shadow()[self.at])

    def begun(self) -> Array:
        """Of a tile in PSUM: whether each element was written through this tile, copied."""
        return np.asarray(self.whole.begun()[self.at])

    def put(self, array: Array | None = None, shadow: Array | None = None, begun: Array | None = None) -> None:
        """Write copies back. Where two indices are equal the later element stays."""
        if array is not None:
            self.whole.array()[self.at] = array
        if shadow is not None:
            self._all_shadow()[self.at] = shadow
        if begun is not None:
            self.whole.begun()[self.at] = begun

    def _all_shadow(self) -> Array:
        return self.whole.shadow().reshape((*self.whole.shape, dtypes.size_of(self.dtype)), copy=False)


def gather_rows(view: NkiTensor, chosen: VectorOffset, indices: Array, *, skip: bool) -> Gathered:
    """``view``, whose row w begins at row ``indices[w]``; with ``skip`` the rows that are out of range are left out.

    Raises:
        NkiValidationError: there are fewer indices than rows.
        IndexRangeError: an index is out of range and not skipped.
    """
    rows = view.shape[0]
    require(indices.size >= rows, f"{view!r} has {rows} rows, vector_offset {chosen.index!r} only {indices.size}")
    wanted = indices.T.reshape(-1)[:rows].astype(np.int64)
    limit = _rows_inside(view, chosen)
    inside = (wanted >= 0) & (wanted < limit)
    if not (skip or inside.all()):
        raise IndexRangeError(
            f"run-time index {wanted[~inside][0]} of row {int(np.argmin(inside))} is out of range for {limit} rows of "
            f"{view!r}"
        )
    whole = NkiTensor(
        (max(limit, 1), *view.shape[1:]), view.dtype, view.storage, strides=view.strides, offset=view.offset
    )
    return Gathered(view, whole, (wanted[inside],), None if inside.all() else inside)


def _rows_inside(view: NkiTensor, chosen: VectorOffset) -> int:
    """How many rows of the base tensor a row of ``view`` can begin at without leaving the storage."""
    row = sum(stride * (size - 1) for stride, size in zip(view.strides[1:], view.shape[1:], strict=True))
    elements = view.storage.size * dtypes.size_of(view.storage.dtype) // dtypes.size_of(view.dtype)
    return min(chosen.bound, (elements - 1 - view.offset - row) // chosen.stride + 1)


def gather_columns(view: NkiTensor, chosen: FreeOffsets, index: Array, group: int) -> Gathered:
    """``view``, whose column i lies at offset ``index[i % group, i // group]`` of the free elements.

    Raises:
        NkiValidationError: ``index`` holds too few offsets.
        IndexRangeError: an offset is out of range.
        UnsupportedError: groups of partitions hold different offsets; which of them count is undocumented.
    """
    partitions, count = view.shape
    column = np.arange(count)
    rows, columns = column % group, column // group
    require(
        int(rows.max()) < index.shape[0] and int(columns.max()) < index.shape[1],
        f"{view!r} takes {count} offsets from groups of {group} partitions; index {chosen.index!r} has too few",
    )
    offsets = index[rows, columns].astype(np.int64)
    _check_groups(index, group, rows, columns)
    if not ((offsets >= 0) & (offsets < chosen.bound)).all():
        raise IndexRangeError(
            f"run-time offsets from {offsets.min()} to {offsets.max()} of {view!r}; accepted: 0 to {chosen.bound - 1}"
        )
    whole = NkiTensor((partitions, chosen.bound), view.dtype, view.storage, strides=view.strides, offset=view.offset)
    return Gathered(view, whole, (np.arange(partitions)[:, None], offsets[None, :]))


def _check_groups(index: Array, group: int, rows: Array, columns: Array) -> None:
    for first in range(group, len(index), group):
        here = first + rows < len(index)
        if not (index[first + rows[here], columns[here]] == index[rows[here], columns[here]]).all():
            raise UnsupportedError(
                f"indirect index differs between partitions 0 and {first} on: which group of {group} partitions gives "
                "the offsets is undocumented, so this simulator executes equal groups only"
            )


def around(tensor: NkiTensor) -> tuple[int, ...]:
    """The shape of all places that the indices of ``tensor`` can lead to; empty if it has none."""
    return tensor.reach if isinstance(tensor, Gathered) else ()
