# SPDX-License-Identifier: Apache-2.0
"""Instructions of GpSimd that say where things are in a row: bounds of segments, positions of elements not zero."""

from __future__ import annotations

import numpy as np

from nki_bn.simulator.isa import checks
from nki_bn.simulator.isa.enums import nc_version
from nki_bn.simulator.isa.gather import CORE_PARTITIONS
from nki_bn.simulator.isa.operands import Operands
from nki_bn.simulator.issue import NkiInstruction, issue, raw
from nki_bn.simulator.numerics import Array
from nki_bn.simulator.tensor import NkiTensor, integer, require

_DTYPES = ("float32", "int32")


def sequence_bounds(dst: NkiTensor, segment_ids: NkiTensor, name: str | None = None) -> NkiInstruction:
    """For every element of a row, where the run of equal ids around it starts, and where it ends (one past the last).

    Elements of id 0 are padding and get (n, -1), with n the length of the row.

    Args:
        dst: tile of 1 partition with 2 n elements, the n starts before the n ends; float32 or int32, in SBUF.
        segment_ids: tile of 1 partition with n elements; float32 or int32, in SBUF.

    Raises:
        TypeError: an operand is not a tensor.
        NkiValidationError: a rule above is broken.
    """
    opcode = "sequence_bounds"
    operands = Operands(opcode)
    dst = operands.tile("dst", dst, checks.SBUF)
    ids = operands.tile("segment_ids", segment_ids, checks.SBUF)
    checks.check_dtypes(opcode, _DTYPES, segment_ids=ids, dst=dst)
    require(ids.shape[0] == 1, f"{opcode} segment_ids must have 1 partition, got shape {ids.shape}")
    require(
        dst.shape[0] == 1 and checks.columns(dst) == 2 * checks.columns(ids),
        f"{opcode} dst must have shape (1, 2, {checks.columns(ids)}), got {dst.shape}",
    )
    return issue(opcode, "gpsimd", [dst], [ids, *operands.indices], lambda: [_bounds(raw(ids)[0])], name=name)


def _bounds(ids: Array) -> Array:
    """Starts and ends, int32 of shape (2, n)."""
    length = len(ids)
    changes = np.flatnonzero(ids[1:] != ids[:-1]) + 1
    edges = np.concatenate([[0], changes, [length]])
    run = np.searchsorted(changes, np.arange(length), side="right")
    bounds = np.stack([edges[run], edges[run + 1]])
    return np.where(ids == 0, np.array([[length], [-1]]), bounds).astype(np.int32)


def nonzero_with_count(
    dst: NkiTensor, src: NkiTensor, index_offset: int = 0, padding_val: int = -1, name: str | None = None
) -> NkiInstruction:
    """Positions of the elements that are not zero, and their number, in partitions 0, 16, ... only; from gen3.

    Every such partition of ``dst`` gets the positions plus ``index_offset``, then ``padding_val``, and the count in the
    last element. The other partitions are neither read nor written.

    Args:
        dst: int32 tile in SBUF with the partitions of ``src`` and one element per partition more.
        src: (P, F) tile of float32 or int32 in SBUF.
        index_offset, padding_val: integers.

    Raises:
        TypeError: wrong Python types.
        NkiValidationError: an earlier generation, or a broken rule above.
    """
    opcode = "nonzero_with_count"
    checks.at_least(opcode, nc_version.gen3)
    operands = Operands(opcode)
    dst, src = operands.tile("dst", dst, checks.SBUF), operands.tile("src", src, checks.SBUF)
    checks.check_dtypes(opcode, _DTYPES, src=src)
    checks.check_dtypes(opcode, ("int32",), dst=dst)
    checks.same_partitions(opcode, src=src, dst=dst)
    require(
        checks.columns(dst) == checks.columns(src) + 1,
        f"{opcode} dst must have {checks.columns(src) + 1} elements per partition, one more than src, got shape "
        f"{dst.shape}",
    )
    offset, padding = integer(index_offset, f"{opcode} index_offset"), integer(padding_val, f"{opcode} padding_val")
    rows, results = _first_of_cores(src), _first_of_cores(dst)

    def compute() -> list[Array]:
        return [np.stack([_nonzero(row, offset, padding) for row in raw(rows)])]

    return issue(opcode, "gpsimd", [results], [rows, *operands.indices], compute, name=name)


def _first_of_cores(tensor: NkiTensor) -> NkiTensor:
    """The view of partitions 0, 16, ..., which are all that the cores of GpSimd use."""
    return NkiTensor(
        (-(-tensor.shape[0] // CORE_PARTITIONS), *tensor.shape[1:]),
        tensor.dtype,
        tensor.storage,
        strides=(tensor.strides[0] * CORE_PARTITIONS, *tensor.strides[1:]),
        offset=tensor.offset,
    )


def _nonzero(row: Array, offset: int, padding: int) -> Array:
    found = np.flatnonzero(row)
    result = np.full(len(row) + 1, padding, np.int32)
    result[: len(found)] = found + offset
    result[-1] = len(found)
    return result
