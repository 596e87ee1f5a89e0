# SPDX-License-Identifier: Apache-2.0
"""The Tensor engine: matrix products of SBUF tiles into PSUM."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nki_bn.simulator import dtypes
from nki_bn.simulator.dynamic import FreeOffsets
from nki_bn.simulator.isa import checks, enums
from nki_bn.simulator.isa.operands import Operands
from nki_bn.simulator.issue import NkiInstruction, float32, issue, raw
from nki_bn.simulator.machine import current_core
from nki_bn.simulator.memory import WRITTEN
from nki_bn.simulator.numerics import Array, Float32
from nki_bn.simulator.tensor import NkiTensor, require

_SIDE = 128
_OP = "nc_matmul"
_WIDE = ("float32", "tfloat32")
_LEGACY_FP8 = ("float8_e4m3", "float8_e5m2")
_INPUTS = (*_WIDE, "bfloat16", "float16", *_LEGACY_FP8)


@dataclass(frozen=True)
class _Sizes:
    """Contraction rows (partitions), columns of the stationary and of the moving operand, rows of the array in use."""

    rows: int
    stationary: int
    moving: int
    tile_rows: int


def nc_matmul(
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    is_stationary_onezero: bool = False,
    is_moving_onezero: bool = False,
    is_transpose: bool = False,
    accumulate: bool | None = None,
    tile_position: Sequence[int] = (),
    tile_size: Sequence[int] = (),
    perf_mode: enums.matmul_perf_mode = enums.matmul_perf_mode.none,
    name: str | None = None,
) -> NkiInstruction:
    """``dst`` (M, N) in PSUM = ``stationary`` (K, M) transposed times ``moving`` (K, N), both in SBUF.

    Free dimensions are flattened. Products and sums are float32. ``accumulate`` False overwrites, True adds to what a
    product left there, None does what every location needs: overwrite the first write after allocation, add later ones.
    With ``is_transpose`` (gen3 and later) ``moving`` is the identity and bits are moved, not multiplied. The onezero
    flags change time only.

    Raises:
        TypeError: an operand is no tensor, ``perf_mode`` no member, ``accumulate`` no bool or None.
        NkiValidationError: places, shapes, dtypes, tiling or modes break a rule of the target.
    """
    operands = Operands(_OP)
    _check_indirect(is_transpose, tile_position, stationary=stationary, moving=moving, dst=dst)
    stationary = operands.indirect_matrix("stationary", stationary, checks.SBUF)
    moving = operands.indirect_matrix("moving", moving, checks.SBUF)
    dst = operands.indirect_matrix("dst", dst, checks.PSUM, stationary)
    mode = checks.member(_OP, "perf_mode", perf_mode, enums.matmul_perf_mode)
    double = mode is enums.matmul_perf_mode.double_row
    if accumulate is not None and not isinstance(accumulate, (bool, np.bool_)):
        raise TypeError(f"{_OP} accumulate must be True, False or None, got {accumulate!r}")
    moves_bits = bool(is_transpose) and checks.version() >= enums.nc_version.gen3
    _check_dtypes(dst, stationary, moving, moves_bits)
    if double:
        _check_double_row(stationary, moving)
    sizes = _sizes(stationary, moving, _tile_rows(tile_position, tile_size), 2 if double else 1)
    _check_sizes(dst, sizes)
    require(not (moves_bits and accumulate), f"{_OP} accumulate must be None or False with is_transpose")
    adding = False if moves_bits else _adding(dst, accumulate)

    def compute() -> list[Array]:
        if moves_bits:
            return [_moved(stationary, moving)]
        return [_accumulated(dst, _product(stationary, moving, double), adding)]

    reads = [stationary, moving, *operands.indices, *([dst] if accumulate else [])]
    return issue(
        _OP,
        "tensor",
        [dst],
        reads,
        compute,
        name=name,
        accumulate=accumulate,
        rows=sizes.rows,
        tile_rows=sizes.tile_rows,
        is_transpose=bool(is_transpose),
        perf_mode=mode.name,
        stationary_onezero=bool(is_stationary_onezero),
        moving_onezero=bool(is_moving_onezero),
    )


def transpose_product(data: NkiTensor) -> Float32:
    """``data`` (P, F) transposed by a product with the identity, as gen2 does it: NaN and infinity spread."""
    values = float32(data)
    return values.T @ np.eye(len(values), dtype=np.float32)


def _check_indirect(is_transpose: bool, tile_position: Sequence[int], **given: NkiTensor) -> None:
    """What an operand with offsets along its free dimensions excludes."""
    for label, tensor in given.items():
        if not isinstance(getattr(tensor, "dynamic", None), FreeOffsets):
            continue
        what = f"{_OP} with an indirect {label}"
        require(label == "dst" or tensor.dtype not in _WIDE, f"{what} of {tensor.dtype}; accepted: 16 bits or float8")
        require(label != "moving" or not is_transpose, f"{what} cannot be a transpose")
        require(tuple(tile_position or ()) in ((), (0, 0)), f"{what} takes no tile_position, got {tile_position}")


def _check_dtypes(dst: NkiTensor, stationary: NkiTensor, moving: NkiTensor, moves_bits: bool) -> None:
    version = checks.version()
    accepted = (*_INPUTS, "float8_e4m3fn") if version >= enums.nc_version.gen4 else _INPUTS
    pair = stationary.dtype, moving.dtype
    for label, dtype in zip(("stationary", "moving"), pair, strict=True):
        require(dtype in accepted, f"{_OP} {label} is {dtype}; accepted on {version.name}: {', '.join(accepted)}")
    require(
        (pair[0] in _WIDE) == (pair[1] in _WIDE),
        f"{_OP} pairs float32 or tfloat32 only with float32 or tfloat32, got {pair[0]} and {pair[1]}",
    )
    require(set(pair) != {"float8_e4m3", "float8_e4m3fn"}, f"{_OP} cannot mix float8_e4m3 with float8_e4m3fn")
    results = ["float32"]
    if version >= enums.nc_version.gen4:
        results.append("bfloat16")
    if moves_bits:
        results.append(stationary.dtype)
    require(dst.dtype in results, f"{_OP} dst is {dst.dtype}; accepted here: {', '.join(dict.fromkeys(results))}")


def _check_double_row(stationary: NkiTensor, moving: NkiTensor) -> None:
    checks.at_least(f"{_OP} with perf_mode double_row", enums.nc_version.gen3)
    for label, tensor in (("stationary", stationary), ("moving", moving)):
        require(
            tensor.dtype.startswith("float8_"),
            f"{_OP} with double_row takes float8 operands, {label} is {tensor.dtype}",
        )
        require(
            tensor.ndim >= 3 and tensor.shape[1] == 2,
            f"{_OP} with double_row takes {label} of shape (K, 2, ...), got {tensor.shape}",
        )


def _tile_rows(position: Sequence[int], size: Sequence[int]) -> int:
    """Rows of the array that the product may use."""
    given = tuple(position or ()), tuple(size or ())
    if given == ((), ()):
        return _SIDE
    what = f"{_OP} tile_position {given[0]} with tile_size {given[1]}"
    require(len(given[0]) == len(given[1]) == 2, f"{what}: give both, as pairs (row, column)")
    (start, column), (rows, columns) = given
    accepted = (64, _SIDE) if checks.version() is enums.nc_version.gen2 else (32, 64, _SIDE)
    require(rows in accepted, f"{what}: row tiles have {', '.join(map(str, accepted))} rows")
    require(
        start % rows == 0 and 0 <= start < _SIDE, f"{what}: the first row must be a multiple of {rows} below {_SIDE}"
    )
    if (column, columns) != (0, _SIDE):
        # Prose of the documentation tiles columns too, the parameters rule it out; public kernels do it.
        require(not current_core().options.strict, f"{what}: columns are not tiled, give column 0 and size {_SIDE}")
        require(columns in accepted and column % columns == 0 and 0 <= column < _SIDE, f"{what}: no such columns")
    return int(rows)


def _sizes(stationary: NkiTensor, moving: NkiTensor, tile_rows: int, packed: int) -> _Sizes:
    require(
        stationary.shape[0] == moving.shape[0],
        f"{_OP} moving has {moving.shape[0]} partitions, stationary has {stationary.shape[0]}",
    )
    return _Sizes(
        stationary.shape[0], checks.columns(stationary) // packed, checks.columns(moving) // packed, tile_rows
    )


def _check_sizes(dst: NkiTensor, sizes: _Sizes) -> None:
    target = current_core().run.target
    later = checks.version() >= enums.nc_version.gen4
    # From gen4 on a product may fill all banks, so narrower elements allow more columns; before, one bank.
    most = target.matmul_moving_columns * (4 // dtypes.size_of(dst.dtype) if later else 1)
    require(
        sizes.rows <= sizes.tile_rows,
        f"{_OP} contracts over {sizes.rows} partitions, the tile has {sizes.tile_rows} rows",
    )
    require(sizes.stationary <= _SIDE, f"{_OP} stationary has {sizes.stationary} columns, at most {_SIDE}")
    require(sizes.moving <= most, f"{_OP} moving has {sizes.moving} columns, at most {most} on {target.name}")
    require(
        (dst.shape[0], checks.columns(dst)) == (sizes.stationary, sizes.moving),
        f"{_OP} dst must have shape ({sizes.stationary}, {sizes.moving}), got {dst.shape}",
    )
    if not later:
        first = dst.address[1]
        last = first + sum(
            stride * (size - 1) for stride, size in zip(dst.byte_strides()[1:], dst.shape[1:], strict=True)
        )
        require(
            first // target.psum_bank_bytes == last // target.psum_bank_bytes,
            f"{_OP} dst covers bytes {first} to {last} of a partition: more than one bank of {target.psum_bank_bytes}",
        )


def _moved(stationary: NkiTensor, moving: NkiTensor) -> Array:
    values = float32(moving)
    require(
        values.shape[0] == values.shape[1] and bool((values == np.eye(len(values), dtype=np.float32)).all()),
        f"{_OP} with is_transpose needs an identity as moving, got {moving!r} with other values",
    )
    return raw(stationary).T


def _product(stationary: NkiTensor, moving: NkiTensor, double: bool) -> Float32:
    left, right = float32(stationary), float32(moving)
    if double:
        # The contraction runs over partitions and the leading free dimension of 2.
        left, right = left.reshape(2 * len(left), -1), right.reshape(2 * len(right), -1)
    return left.T @ right


def _adding(dst: NkiTensor, accumulate: bool | None) -> bool | Array:
    """Where a product adds to what is in ``dst``: everywhere, nowhere, or in some of its elements."""
    options = current_core().options
    if accumulate and not options.dry and not options.strict and not (dst.shadow() & WRITTEN).all():
        warnings.warn(f"{_OP} accumulates onto {dst!r}, which nothing has written", stacklevel=3)
    if accumulate is not None or options.dry:
        return bool(accumulate)
    begun = dst.begun().reshape(dst.shape[0], -1)
    return bool(begun.all()) if begun.all() or not begun.any() else begun.copy()


def _accumulated(dst: NkiTensor, product: Float32, adding: bool | Array) -> Float32:
    if adding is False:
        return product
    if adding is True:
        return product + float32(dst)
    return np.where(adding, product + float32(dst), product)
