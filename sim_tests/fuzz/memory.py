# SPDX-License-Identifier: Apache-2.0
"""Tensors as NKI sees them, in NumPy: bytes, which of them were written, and views as lists of positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from nki_bn.simulator.dtypes import ALL_DTYPES

Array = npt.NDArray[Any]
# A view: names of the methods that make it from a tensor, with their arguments.
Path = tuple[tuple[str, tuple[Any, ...]], ...]


class Refused(Exception):
    """A rule is broken: the simulator has to refuse."""


@dataclass(frozen=True)
class Tile:
    """A tensor of a program: ``place`` is "sbuf", "psum" or "hbm"; ``seed`` None leaves it unwritten."""

    shape: tuple[int, ...]
    dtype: str
    place: str
    seed: int | None

    @property
    def on_chip(self) -> bool:
        """Whether the first dimension is that of partitions."""
        return self.place != "hbm"


@dataclass
class Memory:
    """What a tile holds: bytes in the order of its elements, and whether each was written."""

    tile: Tile
    data: Array = field(init=False)
    known: Array = field(init=False)

    def __post_init__(self) -> None:
        size = int(np.prod(self.tile.shape)) * ALL_DTYPES[self.tile.dtype].itemsize
        self.data, self.known = np.zeros(size, np.uint8), np.zeros(size, np.bool_)


@dataclass(frozen=True)
class View:
    """Elements of a memory, as ``dtype``: their numbers in it, in the shape of the view."""

    memory: Memory
    index: Array
    dtype: str
    outside: bool = False

    @property
    def rows(self) -> Array:
        """The numbers as (partitions, elements per partition)."""
        return self.index.reshape(self.index.shape[0], -1)

    @property
    def start(self) -> int:
        """The first partition."""
        return int(self.index.flat[0]) // self.row

    @property
    def row(self) -> int:
        """Elements of a partition of the tile."""
        return len(self.memory.data) // self.itemsize // self.memory.tile.shape[0]

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return ALL_DTYPES[self.dtype].itemsize

    def read(self) -> Array:
        """The elements.

        Raises:
            Refused: one lies outside, or was never written.
        """
        if self.outside or not self.memory.known.reshape(-1, self.itemsize)[self.index].all():
            raise Refused
        return self.memory.data.view(ALL_DTYPES[self.dtype])[self.index]

    def write(self, values: Array, mask: Array | None = None) -> None:
        """Set the elements (those in ``mask``) to ``values``, paired in row-major order."""
        chosen = self.index.reshape(-1) if mask is None else self.index.reshape(-1)[mask.reshape(-1)]
        given = values.reshape(-1) if mask is None else values.reshape(-1)[mask.reshape(-1)]
        self.memory.data.view(ALL_DTYPES[self.dtype])[chosen] = given
        self.memory.known.reshape(-1, self.itemsize)[chosen] = True


def view_of(memory: Memory, path: Path) -> View:
    """The view that ``path`` makes of all of a tile.

    Raises:
        Refused: a step of it is not allowed.
    """
    shape = memory.tile.shape
    view = View(memory, np.arange(int(np.prod(shape))).reshape(shape), memory.tile.dtype)
    for name, arguments in path:
        view = _STEPS[name](view, *arguments)
    return view


def _with(view: View, index: Array) -> View:
    return View(view.memory, index, view.dtype, view.outside)


def _getitem(view: View, key: tuple[slice, ...]) -> View:
    for size, item in zip(view.index.shape, key, strict=False):
        if not 0 <= item.start < item.stop <= size or item.step < 1:
            raise Refused
    if view.memory.tile.on_chip and key[0].step != 1:
        raise Refused
    return _with(view, view.index[key])


def _free(view: View, *dims: int) -> None:
    if view.memory.tile.on_chip and 0 in dims:
        raise Refused


def _permute(view: View, dims: tuple[int, ...]) -> View:
    if view.memory.tile.on_chip and dims[0] != 0:
        raise Refused
    return _with(view, view.index.transpose(dims))


def _select(view: View, dim: int, at: int) -> View:
    _free(view, dim)
    return _with(view, np.take(view.index, at, dim))


def _expand_dim(view: View, dim: int) -> View:
    _free(view, dim)
    return _with(view, np.expand_dims(view.index, dim))


def _broadcast(view: View, dim: int, size: int) -> View:
    _free(view, dim)
    if view.index.shape[dim] != 1:
        raise Refused
    return _with(view, np.repeat(view.index, size, dim))


def _reshape_dim(view: View, dim: int, sizes: tuple[int, ...]) -> View:
    shape = view.index.shape
    if int(np.prod(sizes)) != shape[dim]:
        raise Refused
    return _with(view, view.index.reshape((*shape[:dim], *sizes, *shape[dim + 1 :])))


def _reshape(view: View, shape: tuple[int, ...]) -> View:
    if int(np.prod(shape)) != view.index.size or (view.memory.tile.on_chip and shape[0] != view.index.shape[0]):
        raise Refused
    return _with(view, view.index.reshape(shape))


def _view(view: View, dtype: str) -> View:
    old, new = view.itemsize, ALL_DTYPES[dtype].itemsize
    if old >= new:
        parts = old // new
        index = (view.index[..., None] * parts + np.arange(parts)).reshape(*view.index.shape[:-1], -1)
    else:
        parts = new // old
        if view.index.shape[-1] % parts:
            raise Refused
        groups = view.index.reshape(*view.index.shape[:-1], -1, parts)
        if not (groups == groups[..., :1] + np.arange(parts)).all() or (groups[..., 0] % parts).any():
            raise Refused
        index = groups[..., 0] // parts
    return View(view.memory, index, dtype, view.outside)


def _ap(view: View, pattern: Sequence[Sequence[int]], offset: int) -> View:
    index = np.full((), int(view.index.flat[0]) + offset)
    for stride, count in pattern:
        index = index[..., None] + stride * np.arange(count)
    total, row = len(view.memory.data) // view.itemsize, view.row
    outside = bool((index < 0).any() or (index >= total).any())
    if view.memory.tile.on_chip:
        if pattern[0][1] > 1 and pattern[0][0] != row:
            raise Refused
        within = index.reshape(index.shape[0], -1) // row
        outside |= bool((within != within[:, :1]).any())
    return View(view.memory, index, view.dtype, outside)


_STEPS: dict[str, Any] = {
    "__getitem__": _getitem,
    "permute": _permute,
    "select": _select,
    "expand_dim": _expand_dim,
    "broadcast": _broadcast,
    "reshape_dim": _reshape_dim,
    "reshape": _reshape,
    "view": _view,
    "ap": _ap,
}
# Where NumPy can make what a strided view cannot, a refusal is right as well.
MAY_NEED_A_COPY = ("reshape", "view")
