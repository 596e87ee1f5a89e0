# SPDX-License-Identifier: Apache-2.0
"""The eight largest values of every partition, and where given values are: what top-k is built from, on Vector."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from nki_bn.simulator.isa import alu, checks
from nki_bn.simulator.isa.operands import Operands
from nki_bn.simulator.issue import NkiInstruction, issue, raw
from nki_bn.simulator.numerics import Array, Float32, cast
from nki_bn.simulator.tensor import NkiTensor, require

_VALUES = 8
_MOST = 16384
_MAX_RANK = 3
_INDEX_DTYPES = ("uint32", "uint16")
# The index of a value that is nowhere; written to uint16 it saturates to all ones too.
_MISSING = np.uint32(0xFFFFFFFF)


def max8(dst: NkiTensor, src: NkiTensor, name: str | None = None) -> NkiInstruction:
    """The 8 largest values of every partition, descending, duplicates kept; NaN (undocumented) counts as largest.

    Values are compared as float32 and cast to the dtype of ``dst``.

    Args:
        dst: (P, 8) tile in SBUF or PSUM.
        src: tile in SBUF or PSUM of at most three dimensions, with 8 to 16384 elements per partition.

    Raises:
        TypeError: an operand is not a tensor.
        NkiValidationError: a rule above is broken.
    """
    operands = Operands("max8")
    dst, src = operands.tile("dst", dst), operands.tile("src", src)
    require(src.ndim <= _MAX_RANK, f"max8 src must have at most {_MAX_RANK} dimensions, got shape {src.shape}")
    require(
        _VALUES <= checks.columns(src) <= _MOST,
        f"max8 src must have {_VALUES} to {_MOST} elements per partition, got {checks.columns(src)}",
    )
    require(
        dst.shape == (src.shape[0], _VALUES),
        f"max8 dst must have shape ({src.shape[0]}, {_VALUES}), got {dst.shape}",
    )

    def compute() -> list[Array]:
        largest = np.partition(alu.read(src), -_VALUES, axis=1)[:, -_VALUES:]
        return [np.sort(largest, axis=1)[:, ::-1]]

    return issue("max8", "vector", [dst], [src, *operands.indices], compute, name=name)


def nc_find_index8(dst: NkiTensor, data: NkiTensor, vals: NkiTensor, name: str | None = None) -> NkiInstruction:
    """For each of 8 values per partition, the index of its first occurrence in ``data``; all ones if there is none.

    Equal values get successive occurrences, ascending. Values are compared as float32, so NaN is never found.

    Args:
        dst: tile of 8 uint32 or uint16 per partition in SBUF or PSUM.
        data: (P, F) tile in SBUF or PSUM; indices count its flattened free elements.
        vals: tile of 8 elements per partition in SBUF or PSUM.

    Raises:
        TypeError: an operand is not a tensor.
        NkiValidationError: a rule above is broken.
    """
    operands = Operands("nc_find_index8")
    dst, data, vals = (operands.tile(key, value) for key, value in (("dst", dst), ("data", data), ("vals", vals)))
    _check_eight("nc_find_index8", data, vals=vals, dst=dst)
    checks.check_dtypes("nc_find_index8", _INDEX_DTYPES, dst=dst)

    def compute() -> list[Array]:
        return [_match(alu.read(data), alu.read(vals), range(_VALUES))[0]]

    return issue("nc_find_index8", "vector", [dst], [data, vals, *operands.indices], compute, name=name)


def nc_match_replace8(
    dst: NkiTensor,
    data: NkiTensor,
    vals: NkiTensor,
    imm: Any,
    dst_idx: NkiTensor | None = None,
    name: str | None = None,
) -> NkiInstruction:
    """``data`` with the first occurrence of each of 8 values per partition replaced by ``imm``.

    The values are taken from the last to the first, and no element is replaced twice: of equal values the last gets
    the first occurrence. ``dst_idx`` gets the indices of what was replaced; all ones where a value was not found.
    Elements keep their bits when ``dst`` has the dtype of ``data``, else they go through float32.

    Args:
        dst, data: (P, F) tiles in SBUF or PSUM, any dtypes.
        vals: tile of 8 elements per partition in SBUF or PSUM, compared with ``data`` as float32.
        imm: number.
        dst_idx: None, or tile of 8 uint32 or uint16 per partition.

    Raises:
        TypeError: wrong Python types.
        NkiValidationError: a rule above is broken.
    """
    opcode = "nc_match_replace8"
    operands = Operands(opcode)
    dst, data = operands.pair(dst, data)
    vals = operands.tile("vals", vals)
    indices = [] if dst_idx is None else [operands.tile("dst_idx", dst_idx)]
    _check_eight(opcode, data, vals=vals)
    for tile in indices:
        _check_eight(opcode, data, dst_idx=tile)
        checks.check_dtypes(opcode, _INDEX_DTYPES, dst_idx=tile)
    checks.number(opcode, "imm", imm)

    def compute() -> list[Array]:
        found, replaced = _match(alu.read(data), alu.read(vals), reversed(range(_VALUES)))
        values = raw(data) if data.dtype == dst.dtype else alu.read(data)
        return [np.where(replaced, cast(np.asarray(imm, np.float32), values.dtype), values), found][: 1 + len(indices)]

    return issue(opcode, "vector", [dst, *indices], [data, vals, *operands.indices], compute, name=name)


def _check_eight(opcode: str, data: NkiTensor, **tensors: NkiTensor) -> None:
    """The tensors have the partitions of ``data`` and 8 elements in each."""
    for argument, tensor in tensors.items():
        require(
            tensor.shape[0] == data.shape[0] and checks.columns(tensor) == _VALUES,
            f"{opcode} {argument} must have {data.shape[0]} partitions of {_VALUES} elements, got shape {tensor.shape}",
        )


def _match(data: Float32, vals: Float32, order: Iterable[int]) -> tuple[Array, Array]:
    """Indices of the values, taken in ``order``, each at the first element that equals it and is not yet taken; and a
    mask of the elements taken."""
    found = np.full(vals.shape, _MISSING, np.uint32)
    taken = np.zeros(data.shape, np.bool_)
    lanes = np.arange(len(data))
    for column in order:
        equal = (data == vals[:, column : column + 1]) & ~taken
        first = equal.argmax(axis=1)
        hit = equal[lanes, first]
        found[hit, column] = first[hit]
        taken[lanes[hit], first[hit]] = True
    return found, taken
