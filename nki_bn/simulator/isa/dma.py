# SPDX-License-Identifier: Apache-2.0
"""DMA instructions: copies and transposes between HBM and SBUF."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nki_bn.simulator import dtypes
from nki_bn.simulator.dynamic import VectorOffset
from nki_bn.simulator.errors import IndexRangeError
from nki_bn.simulator.isa import checks, enums
from nki_bn.simulator.isa.dma_rows import Rows, check_descriptors, check_skip, check_vector, has_vector
from nki_bn.simulator.issue import NkiInstruction, index_tiles, issue, settle
from nki_bn.simulator.memory import MemoryRegion
from nki_bn.simulator.storing import Result
from nki_bn.simulator.tensor import NkiTensor, require

DMA_REGIONS = (MemoryRegion.sbuf, MemoryRegion.private_hbm, MemoryRegion.shared_hbm)

# The one permutation of every rank.
_TRANSPOSED_AXES = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}


def dma_copy(
    dst: NkiTensor,
    src: NkiTensor,
    priority: int | None = None,
    oob_mode: enums.oob_mode = enums.oob_mode.error,
    dge_mode: enums.dge_mode | int = enums.dge_mode.unknown,
    engine: enums.engine = enums.engine.unknown,
    name: str | None = None,
) -> NkiInstruction:
    """Copy ``src`` to ``dst``, both in HBM or SBUF, any shapes with equally many elements (paired in row-major order).

    Equal dtypes are copied bit by bit; otherwise values go through float32 (``dge_mode.hwdge`` refuses that). One of
    the two may have a ``vector_offset`` with an index per row: rows of ``src`` are gathered, or rows of ``dst``
    scattered (of equal indices, which is undocumented, the last one stays). With ``oob_mode.skip`` a run-time index out
    of range drops the copy, or that row of it; else it is an error.

    Raises:
        TypeError: an operand is no tensor, an enumeration argument no member.
        NkiValidationError: an operand in PSUM, element counts that differ, a mode the target or the operands rule out.
        IndexRangeError: a run-time index is out of range.
    """
    dst, src = _operands("dma_copy", dst, src)
    mode = _dge("dma_copy", dge_mode)
    oob_mode = checks.member("dma_copy", "oob_mode", oob_mode, enums.oob_mode)
    check_descriptors("dma_copy", mode, dst, src)
    check_vector("dma_copy", dst)
    check_vector("dma_copy", src)
    check_priority("dma_copy", priority)
    _check_issuer(engine, mode)
    require(
        dst.size == src.size,
        f"dma_copy dst has {dst.size} elements (shape {dst.shape}), src has {src.size} (shape {src.shape})",
    )
    require(
        mode is not enums.dge_mode.hwdge or dst.dtype == src.dtype,
        f"dma_copy with dge_mode.hwdge moves raw bytes: dst is {dst.dtype}, src is {src.dtype}",
    )
    details = {"dge_mode": mode.name, "issuer": engine.name, "priority": priority}
    return _transfer("dma_copy", dst, src, None, oob_mode, name, details)


def dma_transpose(
    dst: NkiTensor,
    src: NkiTensor,
    axes: Sequence[int] | None = None,
    priority: int | None = None,
    dge_mode: enums.dge_mode | int = enums.dge_mode.unknown,
    oob_mode: enums.oob_mode = enums.oob_mode.error,
    name: str | None = None,
) -> NkiInstruction:
    """Transpose ``src`` (HBM or SBUF) into ``dst`` (an SBUF tile) bit by bit.

    The permutation follows from the rank: (1, 0), (2, 1, 0) or (3, 1, 2, 0); ``axes`` may only repeat it. The shape of
    ``dst`` is the permuted shape of ``src`` exactly. A destination in HBM is refused: SBUF is what the reference says.
    Rows of ``src`` may be gathered by a ``vector_offset`` tile, read column by column; with ``oob_mode.skip`` those out
    of range leave ``dst`` as it was.

    Raises:
        TypeError: an operand is no tensor, ``axes`` no sequence, an enumeration argument no member.
        NkiValidationError: another permutation, shape, dtype or mode.
    """
    op = "dma_transpose"
    dst, src = _operands(op, dst, src)
    checks.tile(op, "dst", dst, checks.SBUF)
    order = _permutation(src, axes)
    expected = tuple(src.shape[axis] for axis in order)
    require(dst.shape == expected, f"{op} dst must have shape {expected} for src {src.shape}, got {dst.shape}")
    require(dst.dtype == src.dtype, f"{op} dst must have the dtype of src, {src.dtype}, got {dst.dtype}")
    mode = _dge(op, dge_mode)
    gathers = has_vector(src)
    require(gathers or mode is not enums.dge_mode.swdge, f"{op} with dge_mode.swdge needs a src with a vector_offset")
    check_skip(op, checks.member(op, "oob_mode", oob_mode, enums.oob_mode), "src", src)
    check_descriptors(op, mode, src)
    if mode is enums.dge_mode.hwdge:
        _check_hardware_transpose(src)
    if gathers:
        _check_gathered_transpose(src)
    check_priority(op, priority)
    details = {"dge_mode": mode.name, "priority": priority, "axes": order}
    return _transfer(op, dst, src, order, oob_mode, name, details)


def _operands(op: str, dst: Any, src: Any) -> tuple[NkiTensor, NkiTensor]:
    return checks.tile(op, "dst", dst, DMA_REGIONS), checks.tile(op, "src", src, DMA_REGIONS)


def _transfer(
    op: str,
    dst: NkiTensor,
    src: NkiTensor,
    order: tuple[int, ...] | None,
    oob_mode: enums.oob_mode,
    name: str | None,
    details: dict[str, Any],
) -> NkiInstruction:
    """Settle run-time indices and move the elements, axes permuted by ``order``; or record that nothing moved."""
    indices = [*index_tiles(dst), *index_tiles(src)]
    skip = oob_mode is enums.oob_mode.skip
    try:
        to, source = settle(dst, skip=skip), settle(src, skip=skip)
    except IndexRangeError:
        if not skip:
            raise
        return _skipped(op, indices, name, details)
    rows = Rows.of(to, source)
    if not rows.moved:
        return _skipped(op, indices, name, details)

    def compute() -> list[Result]:
        return [rows.result(to, rows.read(source), order)]

    return issue(op, "dma", [to], [source, *indices], compute, name=name, **details)


def _skipped(op: str, indices: list[NkiTensor], name: str | None, details: dict[str, Any]) -> NkiInstruction:
    return issue(op, "dma", [], indices, lambda: [], name=name, skipped=True, **details)


def _dge(op: str, given: Any) -> enums.dge_mode:
    """The mode; its number is accepted too, because public kernels write it."""
    by_number = {item.value: item for item in enums.dge_mode}
    mode = by_number.get(given, given) if type(given) is int else given
    checked = checks.member(op, "dge_mode", mode, enums.dge_mode)
    if checked is enums.dge_mode.hwdge:
        checks.at_least(f"{op} with dge_mode.hwdge", enums.nc_version.gen3)
    return checked


def check_priority(op: str, priority: Any) -> None:
    """A priority is None, or 0 to 3 on gen4 and later."""
    if priority is None:
        return
    require(type(priority) is int and 0 <= priority <= 3, f"{op} priority must be 0, 1, 2 or 3, got {priority!r}")
    checks.at_least(f"{op} priority", enums.nc_version.gen4)


def _check_issuer(engine: Any, mode: enums.dge_mode) -> None:
    engine = checks.member("dma_copy", "engine", engine, enums.engine)
    if engine is enums.engine.unknown:
        return
    require(
        mode is enums.dge_mode.hwdge, f"dma_copy engine {engine.name} needs dge_mode.hwdge, got dge_mode.{mode.name}"
    )
    require(
        engine in (enums.engine.sync, enums.engine.scalar), f"dma_copy engine must be sync or scalar, got {engine.name}"
    )


def _permutation(src: NkiTensor, axes: Sequence[int] | None) -> tuple[int, ...]:
    require(src.ndim in _TRANSPOSED_AXES, f"dma_transpose src must have 2, 3 or 4 dimensions, got shape {src.shape}")
    order = _TRANSPOSED_AXES[src.ndim]
    if axes is not None and not isinstance(axes, Sequence | np.ndarray):
        raise TypeError(f"dma_transpose axes must be a sequence of dimensions or None, got {axes!r}")
    require(axes is None or tuple(axes) == order, f"dma_transpose axes must be {order} for src {src.shape}, got {axes}")
    return order


def _check_hardware_transpose(src: NkiTensor) -> None:
    """The limits of the hardware's descriptor generator."""
    what = f"dma_transpose with dge_mode.hwdge of src {src.shape} {src.dtype}"
    require(dtypes.size_of(src.dtype) == 2, f"{what}: the dtype must have 2 bytes")
    require(src.shape[-1] <= 128, f"{what}: the last dimension must be at most 128")
    first = (16,) if src.ndim == 2 else (1, 2, 4, 8, 16)
    require(src.shape[0] in first, f"{what}: the first dimension must be one of {first}")
    require(
        src.ndim == 2 or src.shape[0] * src.shape[-2] % 16 == 0,
        f"{what}: the product of the first and the last but one dimension must be a multiple of 16",
    )


def _check_gathered_transpose(src: NkiTensor) -> None:
    """The limits of a transpose of gathered rows, whose descriptors GpSimd builds."""
    assert isinstance(src.dynamic, VectorOffset)
    index, what = src.dynamic.index, f"dma_transpose of gathered src {src.shape} {src.dtype}"
    checks.at_least(what, enums.nc_version.gen3)
    require(dtypes.size_of(src.dtype) == 2, f"{what}: the dtype must have 2 bytes")
    # The last dimension becomes partitions, at most 128.
    require(src.shape[0] % 16 == 0, f"{what}: the first dimension must be a multiple of 16")
    require(src.ndim != 4 or 1 in src.shape[1:3], f"{what}: one of the two dimensions in the middle must be 1")
    what = f"{what}: vector_offset {index.shape} {index.dtype}"
    require(index.ndim == 2 and index.dtype == "uint32", f"{what} must have 2 dimensions and be uint32")
    require(16 <= index.shape[0] <= 128 and index.shape[0] % 16 == 0, f"{what} must have 16, 32, ... or 128 partitions")
    require(index.shape[1] == 1 or index.shape[0] == 128, f"{what} must have 128 partitions, or 1 column")
    require(index.size >= src.shape[0], f"{what} must have at least {src.shape[0]} elements")
