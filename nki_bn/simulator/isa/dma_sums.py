# SPDX-License-Identifier: Apache-2.0
"""Arithmetic inside the DMA engines: sums of tensors in HBM and SBUF, also into rows that indices choose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nki_bn.simulator.isa import alu, checks, enums
from nki_bn.simulator.isa.dma import DMA_REGIONS
from nki_bn.simulator.isa.dma_rows import Rows, check_skip, check_vector, has_vector, indices_of, static
from nki_bn.simulator.issue import NkiInstruction, index_tiles, issue, settle
from nki_bn.simulator.numerics import to_float32
from nki_bn.simulator.storing import Result
from nki_bn.simulator.tensor import NkiTensor, require

_OP = "dma_compute"
_MOST_SOURCES = 16


def dma_compute(
    dst: NkiTensor,
    srcs: Sequence[NkiTensor],
    reduce_op: Any,
    scales: Sequence[float] | None = None,
    unique_indices: bool = True,
    oob_mode: enums.oob_mode = enums.oob_mode.error,
    name: str | None = None,
) -> NkiInstruction:
    """``dst`` = the sum of ``srcs``, in float32 in their order, cast to the dtype of ``dst``; all in HBM or SBUF.

    Shapes are free, the numbers of elements equal. With a ``vector_offset`` there are two forms, each of two sources:
    ``dst`` in HBM and one source are the same rows, to which the other source, in SBUF, is added; or ``dst`` in SBUF is
    one source, to which rows in HBM are added. Rows that ``oob_mode.skip`` leaves out stay as they are.

    Args:
        srcs: 1 to 16 tensors.
        reduce_op: ``nl.add``.
        scales: None, or 1.0 for every source.
        unique_indices: True: indices that are moved differ from each other, which is checked.

    Raises:
        TypeError: wrong Python types.
        NkiValidationError: a rule above is broken; an operand has a scalar run-time index.
        IndexRangeError: an index is out of range and ``oob_mode`` is error.
    """
    checks.tile(_OP, "dst", dst, DMA_REGIONS)
    if not isinstance(srcs, (list, tuple)):
        raise TypeError(f"{_OP} srcs must be a list of tensors, got {srcs!r}")
    require(1 <= len(srcs) <= _MOST_SOURCES, f"{_OP} srcs must be 1 to {_MOST_SOURCES} tensors, got {len(srcs)}")
    for position, source in enumerate(srcs):
        _check_source(f"srcs[{position}]", source, dst)
    alu.find_reduction(_OP, "reduce_op", reduce_op, ("add",))
    _check_scales(scales, len(srcs))
    static(_OP, "dst", dst)
    require(unique_indices is True, f"{_OP} unique_indices must be True, got {unique_indices!r}")
    oob_mode = checks.member(_OP, "oob_mode", oob_mode, enums.oob_mode)
    check_skip(_OP, oob_mode, "source", _indirect(dst, srcs))
    return _sum(dst, srcs, oob_mode is enums.oob_mode.skip, name)


def _check_source(argument: str, source: Any, dst: NkiTensor) -> None:
    checks.tile(_OP, argument, source, DMA_REGIONS)
    require(source.size == dst.size, f"{_OP} {argument} has {source.size} elements, dst has {dst.size}")
    static(_OP, argument, source)


def _check_scales(scales: Sequence[float] | None, sources: int) -> None:
    if scales is None:
        return
    if not isinstance(scales, (list, tuple)):
        raise TypeError(f"{_OP} scales must be a list of numbers or None, got {scales!r}")
    require(
        len(scales) == sources and all(scale == 1 for scale in scales),
        f"{_OP} scales must be 1.0 for each of {sources} sources, got {scales!r}",
    )


def _indirect(dst: NkiTensor, srcs: Sequence[NkiTensor]) -> NkiTensor:
    """The operand with a vector of indices, ``dst`` if none has one; checked to be one of the two forms."""
    gathered = [source for source in srcs if has_vector(source)]
    if not gathered and not has_vector(dst):
        return dst
    require(len(srcs) == 2, f"{_OP} with a vector_offset takes 2 sources, got {len(srcs)}")
    require(len(gathered) == 1, f"{_OP} with a vector_offset has it on one source, got {len(gathered)}")
    plain = next(source for source in srcs if source is not gathered[0])
    mine, other = (gathered[0], plain) if has_vector(dst) else (plain, gathered[0])
    require(_same(dst, mine), f"{_OP} with a vector_offset adds to what dst holds: {mine!r} is not {dst!r}")
    tile = other if has_vector(dst) else dst
    require(not has_vector(tile) and tile.buffer in checks.SBUF, f"{_OP} with a vector_offset needs {tile!r} in sbuf")
    check_vector(_OP, gathered[0])
    return gathered[0]


def _same(one: NkiTensor, other: NkiTensor) -> bool:
    """Whether two views are the same elements, run-time indices included."""
    if (one.storage, one.dtype, one.offset, one.shape, one.strides) != (
        other.storage,
        other.dtype,
        other.offset,
        other.shape,
        other.strides,
    ):
        return False
    if one.dynamic is None or other.dynamic is None:
        return one.dynamic is other.dynamic
    return _same(one.dynamic.index, other.dynamic.index)


def _sum(dst: NkiTensor, srcs: Sequence[NkiTensor], skip: bool, name: str | None) -> NkiInstruction:
    tiles = [tile for tensor in (dst, *srcs) for tile in index_tiles(tensor)]
    details: dict[str, Any] = {"dge_mode": "swdge" if tiles else "none"}
    to, sources = settle(dst, skip=skip), [settle(source, skip=skip) for source in srcs]
    rows = Rows.of(*sources)
    if not rows.moved:
        return issue(_OP, "dma", [], tiles, lambda: [], name=name, skipped=True, **details)

    def compute() -> list[Result]:
        for moved in indices_of(*sources):
            require(len(np.unique(moved)) == len(moved), f"{_OP} unique_indices is True, but {dst!r} has equal indices")
        total = to_float32(rows.read(sources[0])).reshape(-1)
        for source in sources[1:]:
            total = total + to_float32(rows.read(source)).reshape(-1)
        return [rows.result(to, total.reshape(rows.moved, -1))]

    return issue(_OP, "dma", [to], [*sources, *tiles], compute, name=name, sources=len(sources), **details)
