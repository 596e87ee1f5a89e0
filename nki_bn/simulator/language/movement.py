# SPDX-License-Identifier: Apache-2.0
"""Moving data: loads, stores, transposes that allocate their result."""

from __future__ import annotations

from typing import Any

from nki_bn.simulator import dtypes
from nki_bn.simulator.isa import checks, dma, gather, movement
from nki_bn.simulator.isa.enums import engine
from nki_bn.simulator.language.creation import hbm, is_hbm, ndarray, psum
from nki_bn.simulator.language.math import copy
from nki_bn.simulator.language.tiles import tile_operand
from nki_bn.simulator.tensor import NkiTensor, require


def _hbm_operand(name: str, argument: str, value: Any) -> NkiTensor:
    if not isinstance(value, NkiTensor):
        raise TypeError(f"{name} {argument} must be a tensor, got {value!r}")
    require(is_hbm(value.buffer), f"{name} {argument} is in {value.buffer.value}; accepted: {hbm.value} or shared_hbm")
    return value


def load(src: NkiTensor, dtype: Any = None) -> NkiTensor:
    """A new SBUF tile with the values of an HBM tensor of two or more dimensions."""
    _hbm_operand("load", "src", src)
    tile = ndarray(src.shape, dtype or src.dtype)
    dma.dma_copy(tile, src)
    return tile


def store(dst: NkiTensor, value: NkiTensor) -> None:
    """Copy an SBUF tile to HBM (a tile in PSUM is refused: ``nl.copy`` it first)."""
    dma.dma_copy(_hbm_operand("store", "dst", dst), tile_operand("store", "value", value))


def load_transpose2d(src: NkiTensor, dtype: Any = None) -> NkiTensor:
    """A new SBUF tile of shape (N, M) with the transpose of an HBM tensor of shape (M, N)."""
    rows, columns = _two_dims("load_transpose2d", _hbm_operand("load_transpose2d", "src", src))
    tile = ndarray((columns, rows), src.dtype)
    dma.dma_transpose(tile, src)
    return tile if dtype is None or dtypes.normalize(dtype) == src.dtype else copy(tile, dtype)


def transpose(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """A new PSUM tile of shape (N, M) with the transpose of an SBUF tile of shape (M, N), by the Tensor engine."""
    rows, columns = _two_dims("transpose", tile_operand("transpose", "x", x))
    data = x if dtype is None or dtypes.normalize(dtype) == x.dtype else copy(x, dtype)
    result = ndarray((columns, rows), data.dtype, buffer=psum)
    movement.nc_transpose(result, data, engine=engine.tensor)
    return result


def _two_dims(name: str, tensor: NkiTensor) -> tuple[int, int]:
    require(tensor.ndim == 2, f"{name} takes a tensor of two dimensions, got shape {tensor.shape}")
    rows, columns = tensor.shape
    return rows, columns


def expand_dims(x: NkiTensor, axis: int) -> NkiTensor:
    """The view of ``x`` with a dimension of size 1 inserted at ``axis``."""
    return x.expand_dim(axis)


def gather_flattened(data: NkiTensor, indices: NkiTensor, axis: int = 0, dtype: Any = None) -> NkiTensor:
    """A new SBUF tile with, per partition, the elements of the flattened row of ``data`` at ``indices`` (uint32).

    ``axis`` must be 0: what another one would mean is undocumented.

    Raises:
        NkiValidationError: a tile is not in SBUF, the partitions differ, or an index is out of range.
    """
    require(axis == 0, f"gather_flattened axis must be 0, got {axis!r}")
    checks.tile("gather_flattened", "data", data, checks.SBUF)
    checks.tile("gather_flattened", "indices", indices, checks.SBUF)
    result = ndarray(indices.shape, data.dtype)
    gather.nc_n_gather(result, data, indices)
    return result if dtype is None or dtypes.normalize(dtype) == data.dtype else copy(result, dtype)
