# SPDX-License-Identifier: Apache-2.0
"""Gathers of the GpSimd engine: elements of a partition, picked by indices that lie in SBUF."""

from __future__ import annotations

import numpy as np

from nki_bn.simulator.errors import IndexRangeError
from nki_bn.simulator.isa import checks
from nki_bn.simulator.isa.operands import Operands
from nki_bn.simulator.issue import NkiInstruction, issue, raw
from nki_bn.simulator.numerics import Array
from nki_bn.simulator.tensor import NkiTensor, integer, require

# Partitions that one of the eight cores of GpSimd is connected to.
CORE_PARTITIONS = 16
_ELEMENTS = (1, 2, 4, 8, 16, 32)
_MOST_INDICES = 4096


def local_gather(
    dst: NkiTensor,
    src_buffer: NkiTensor,
    index: NkiTensor,
    num_elem_per_idx: int = 1,
    num_valid_indices: int | None = None,
    name: str | None = None,
) -> NkiInstruction:
    """Pick the same elements from the 16 partitions of every GpSimd core: ``dst[p, i, e] = src_buffer[p, at[i] + e]``.

    A core's indices ``at`` lie in its own 16 partitions of ``index``, in a snake: index i in partition ``i % 16`` and
    column ``i // 16``. They count the flattened free elements of ``src_buffer``; ``e`` runs over
    ``num_elem_per_idx`` elements.

    Args:
        dst: tile of the dtype of ``src_buffer`` with num_valid_indices * num_elem_per_idx elements per partition.
        src_buffer: tile of P partitions, a multiple of 16; any dtype.
        index: (P, K) tile of uint16.
        num_elem_per_idx: 1, 2, 4, 8, 16 or 32.
        num_valid_indices: how many indices of every core are used, at most 4096; None means all 16 K.

    All three tiles lie in SBUF.

    Raises:
        TypeError: wrong Python types.
        IndexRangeError: an index leads outside ``src_buffer``.
        NkiValidationError: a rule above is broken.
    """
    opcode = "local_gather"
    operands = Operands(opcode)
    dst, source, index = (
        operands.tile(key, value, checks.SBUF)
        for key, value in (("dst", dst), ("src_buffer", src_buffer), ("index", index))
    )
    checks.check_dtypes(opcode, ("uint16",), index=index)
    checks.same_dtype(opcode, src_buffer=source, dst=dst)
    for argument, tensor in (("index", index), ("dst", dst)):
        checks.same_partitions(opcode, src_buffer=source, **{argument: tensor})
    require(
        source.shape[0] % CORE_PARTITIONS == 0,
        f"{opcode} src_buffer has {source.shape[0]} partitions; accepted: multiples of {CORE_PARTITIONS}",
    )
    elements = integer(num_elem_per_idx, f"{opcode} num_elem_per_idx")
    require(elements in _ELEMENTS, f"{opcode} num_elem_per_idx must be one of {_ELEMENTS}, got {elements}")
    valid = _valid_indices(num_valid_indices, CORE_PARTITIONS * checks.columns(index))
    require(
        checks.columns(dst) == valid * elements,
        f"{opcode} dst must have {valid} * {elements} elements per partition, got shape {dst.shape}",
    )

    def compute() -> list[Array]:
        groups = raw(index).reshape(-1, CORE_PARTITIONS, checks.columns(index))
        starts = groups.transpose(0, 2, 1).reshape(len(groups), -1)[:, :valid].astype(np.int64)
        at = (starts[:, :, None] + np.arange(elements)).reshape(len(groups), -1)
        return [_take(opcode, source, at.repeat(CORE_PARTITIONS, axis=0))]

    return issue(opcode, "gpsimd", [dst], [source, index, *operands.indices], compute, name=name)


def _valid_indices(given: int | None, available: int) -> int:
    valid = available if given is None else integer(given, "local_gather num_valid_indices")
    require(
        1 <= valid <= available and valid <= _MOST_INDICES,
        f"local_gather uses {valid} indices per core of the {available} in index; accepted: 1 to all of them, at most "
        f"{_MOST_INDICES}",
    )
    return valid


def nc_n_gather(dst: NkiTensor, data: NkiTensor, indices: NkiTensor, name: str | None = None) -> NkiInstruction:
    """Pick elements within every partition: ``dst[p, i] = data[p, indices[p, i]]``, free dimensions flattened.

    Args:
        dst: tile of the dtype of ``data`` with the partitions and elements per partition of ``indices``.
        data: (P, F) tile of any dtype.
        indices: (P, K) tile of uint32.

    All three tiles lie in SBUF.

    Raises:
        TypeError: an operand is not a tensor.
        IndexRangeError: an index leads outside ``data``.
        NkiValidationError: a rule above is broken.
    """
    opcode = "nc_n_gather"
    operands = Operands(opcode)
    dst, data, indices = (
        operands.tile(key, value, checks.SBUF) for key, value in (("dst", dst), ("data", data), ("indices", indices))
    )
    checks.check_dtypes(opcode, ("uint32",), indices=indices)
    checks.same_dtype(opcode, data=data, dst=dst)
    checks.same_partitions(opcode, data=data, indices=indices)
    checks.same_layout(opcode, indices=indices, dst=dst)

    def compute() -> list[Array]:
        return [_take(opcode, data, raw(indices).astype(np.int64))]

    return issue(opcode, "gpsimd", [dst], [data, indices, *operands.indices], compute, name=name)


def _take(opcode: str, source: NkiTensor, at: Array) -> Array:
    """Elements ``at`` (partitions, elements) of every partition of ``source``."""
    size = checks.columns(source)
    if at.max() >= size:
        raise IndexRangeError(f"{opcode} index {at.max()} is outside the {size} elements per partition of {source!r}")
    return np.take_along_axis(raw(source), at, axis=1)
