# SPDX-License-Identifier: Apache-2.0
"""Moving and filling on-chip tiles: copies, constants, shuffles of partitions, transposes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nki_bn.simulator import dtypes
from nki_bn.simulator.isa import checks, enums
from nki_bn.simulator.isa.operands import Operands
from nki_bn.simulator.isa.tensor_engine import transpose_product
from nki_bn.simulator.issue import NkiInstruction, issue, raw
from nki_bn.simulator.machine import check_start
from nki_bn.simulator.memory import MemoryRegion
from nki_bn.simulator.numerics import Array
from nki_bn.simulator.storing import Masked
from nki_bn.simulator.tensor import NkiTensor, integer, require

_QUADRANT = 32
# A mask entry of nc_stream_shuffle that leaves the partition as it is.
_UNMODIFIED = 255
# Largest side of a transpose on each engine.
_TRANSPOSE_SIDE = {enums.engine.tensor: 128, enums.engine.vector: _QUADRANT}


def tensor_copy(
    dst: NkiTensor,
    src: NkiTensor,
    engine: enums.engine = enums.engine.unknown,
    name: str | None = None,
) -> NkiInstruction:
    """Copy an on-chip tile to another of as many partitions and elements per partition.

    Equal dtypes are copied bit by bit, others go through float32. ``engine`` is vector (the default), scalar (not on
    gen2) or gpsimd (no PSUM).

    Raises:
        TypeError: an operand is no tensor, ``engine`` no member.
        NkiValidationError: layouts differ, the engine cannot do it, a tile is in HBM.
    """
    operands = Operands("tensor_copy")
    dst, src = operands.pair(dst, src, "src", indirect=True)
    chosen = checks.pick_engine(
        "tensor_copy", engine, enums.engine.vector, (enums.engine.vector, enums.engine.scalar, enums.engine.gpsimd)
    )
    if chosen is enums.engine.scalar:
        checks.at_least("tensor_copy on engine scalar", enums.nc_version.gen3)
    _no_psum_on_gpsimd("tensor_copy", chosen, dst=dst, src=src)
    return issue("tensor_copy", chosen.name, [dst], [src, *operands.indices], lambda: [src.array()], name=name)


def tensor_copy_predicated(
    dst: NkiTensor,
    src: NkiTensor | float,
    predicate: NkiTensor,
    reverse_pred: bool = False,
    name: str | None = None,
) -> NkiInstruction:
    """Copy those elements of ``src`` (a tile of the dtype of ``dst``, or a number) whose predicate is not zero.

    ``predicate`` is uint8, uint16 or uint32; ``reverse_pred`` copies where it is zero. The rest of ``dst`` stays.

    Raises:
        TypeError: an operand is neither tensor nor number.
        NkiValidationError: layouts or dtypes differ, the predicate is signed or a float, both inputs are in PSUM.
    """
    op = "tensor_copy_predicated"
    operands = Operands(op)
    dst, predicate = operands.pair(dst, predicate, "predicate", indirect=True)
    require(
        predicate.dtype in ("uint8", "uint16", "uint32"),
        f"{op} predicate must be uint8, uint16 or uint32, got {predicate.dtype}",
    )
    reads = [predicate]
    if isinstance(src, NkiTensor):
        src = operands.tile("src", src)
        checks.same_layout(op, dst=dst, src=src)
        checks.same_dtype(op, dst=dst, src=src)
        checks.not_both_psum(op, src=src, predicate=predicate)
        reads.append(src)
    else:
        constant = _constant(op, "src", src, dst)

    def compute() -> list[Masked]:
        mask = (raw(predicate) != 0) ^ bool(reverse_pred)
        values = raw(src) if isinstance(src, NkiTensor) else np.broadcast_to(constant, mask.shape)
        return [Masked(values, mask)]

    return issue(op, "vector", [dst], [*reads, *operands.indices], compute, name=name)


def memset(
    dst: NkiTensor,
    value: float,
    engine: enums.engine = enums.engine.unknown,
    name: str | None = None,
) -> NkiInstruction:
    """Fill an on-chip tile with a compile-time constant.

    A tile of integers takes an integer in its range, a tile of floats any number, a packed tile 0. ``engine`` is vector
    (the default) or gpsimd (no PSUM).

    Raises:
        TypeError: ``value`` is no number, ``dst`` no tensor.
        NkiValidationError: the value does not fit the dtype; the engine cannot write there; ``dst`` is in HBM.
    """
    operands = Operands("memset")
    dst = operands.tile("dst", dst)
    constant = _constant("memset", "value", value, dst)
    chosen = checks.pick_engine("memset", engine, enums.engine.vector, (enums.engine.vector, enums.engine.gpsimd))
    _no_psum_on_gpsimd("memset", chosen, dst=dst)
    return issue(
        "memset", chosen.name, [dst], operands.indices, lambda: [np.broadcast_to(constant, dst.shape)], name=name
    )


def nc_stream_shuffle(
    dst: NkiTensor,
    src: NkiTensor,
    shuffle_mask: Sequence[int],
    name: str | None = None,
) -> NkiInstruction:
    """Move partitions inside every group of 32: ``dst[32*q + i] = src[32*q + shuffle_mask[i]]``, bit by bit.

    ``shuffle_mask`` has 32 entries, 0 to 31, or 255 for a partition of ``dst`` that stays as it is. ``dst`` may
    be ``src``.

    Raises:
        TypeError: an operand is no tensor, the mask no sequence of integers.
        NkiValidationError: mask, dtypes, elements per partition or first partitions break a rule, or the mask reads a
            partition that ``src`` does not have.
    """
    op = "nc_stream_shuffle"
    operands = Operands(op)
    dst, src = operands.tile("dst", dst), operands.tile("src", src)
    checks.same_dtype(op, src=src, dst=dst)
    require(
        checks.columns(dst) == checks.columns(src),
        f"{op} dst has {checks.columns(dst)} elements per partition, src has {checks.columns(src)}",
    )
    active = -(-max(src.shape[0], dst.shape[0]) // _QUADRANT) * _QUADRANT
    for label, tensor in (("dst", dst), ("src", src)):
        check_start(tensor.address[0], active, f"{op} {label}")
    kept, sources = _routes(shuffle_mask, dst.shape[0], src.shape[0])

    def compute() -> list[Masked]:
        mask = np.broadcast_to(~kept[:, None], (dst.shape[0], checks.columns(dst)))
        return [Masked(raw(src)[sources], mask, fixed=True)]

    return issue(op, "vector", [dst], [src, *operands.indices], compute, name=name)


def nc_transpose(
    dst: NkiTensor,
    data: NkiTensor,
    engine: enums.engine = enums.engine.unknown,
    name: str | None = None,
) -> NkiInstruction:
    """Swap partitions and (flattened) free dimensions: ``data`` (P, F) to ``dst`` (F, P).

    The Tensor engine reads SBUF and writes PSUM, sides up to 128; the Vector engine reads and writes both, sides up to
    32. Without ``engine`` a transpose from SBUF to PSUM runs on the Tensor engine. ``dst`` has the dtype of ``data``;
    the Tensor engine also writes low-precision data to a float32 tile, as public kernels do. Bits are kept, except on
    gen2, whose Tensor engine multiplies with an identity: there a NaN spreads.

    Raises:
        TypeError: an operand is no tensor, ``engine`` no member.
        NkiValidationError: shape, size, dtype or place break a rule.
    """
    op = "nc_transpose"
    operands = Operands(op)
    dst, data = operands.tile("dst", dst), operands.tile("data", data)
    by_place = data.buffer is MemoryRegion.sbuf and dst.buffer is MemoryRegion.psum
    chosen = checks.pick_engine(
        op, engine, enums.engine.tensor if by_place else enums.engine.vector, (enums.engine.tensor, enums.engine.vector)
    )
    on_tensor = chosen is enums.engine.tensor
    require(
        by_place or not on_tensor,
        f"{op} on engine tensor reads sbuf and writes psum; data is in {data.buffer.value}, dst in {dst.buffer.value}",
    )
    expected, side = (checks.columns(data), data.shape[0]), _TRANSPOSE_SIDE[chosen]
    require(max(expected) <= side, f"{op} on engine {chosen.name} takes at most {side} x {side}, got data {data.shape}")
    require(
        (dst.shape[0], checks.columns(dst)) == expected,
        f"{op} dst must have shape {expected} for data {data.shape}, got {dst.shape}",
    )
    widened = on_tensor and dst.dtype == "float32" and data.dtype in dtypes.LOW_PRECISION
    require(dst.dtype == data.dtype or widened, f"{op} dst must have the dtype of data, {data.dtype}, got {dst.dtype}")
    real_product = on_tensor and checks.version() is enums.nc_version.gen2

    def compute() -> list[Array]:
        return [transpose_product(data) if real_product else raw(data).T]

    return issue(op, chosen.name, [dst], [data, *operands.indices], compute, name=name)


def _no_psum_on_gpsimd(op: str, chosen: enums.engine, **tensors: NkiTensor) -> None:
    if chosen is enums.engine.gpsimd:
        for label, tensor in tensors.items():
            require(
                tensor.buffer is not MemoryRegion.psum, f"{op} {label} is in psum, which engine gpsimd cannot access"
            )


def _constant(op: str, argument: str, value: Any, dst: NkiTensor) -> Array:
    """``value`` as one element of ``dst``, if it is of the class of its dtype."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{op} {argument} must be a number, got {value!r}")
    element = dst.storage.element_type(dst.dtype)
    what = f"{op} {argument} {value!r} for a {dst.dtype} tile"
    if dtypes.is_packed(dst.dtype):
        require(value == 0, f"{what}: packed dtypes take 0 only")
        return np.zeros((), element)
    if dtypes.is_integer(dst.dtype):
        require(isinstance(value, (int, np.integer)), f"{what}: integer dtypes take integers")
        limits = np.iinfo(element)
        require(bool(limits.min <= value <= limits.max), f"{what}: accepted are {limits.min} to {limits.max}")
        return np.asarray(value, element)
    with np.errstate(over="ignore"):
        # Engines hold constants as float32.
        return np.asarray(np.float32(value)).astype(element)


def _routes(shuffle_mask: Sequence[int], to: int, given: int) -> tuple[Array, Array]:
    """For each of ``to`` partitions: whether it stays, and the source partition (0 where it stays)."""
    if not isinstance(shuffle_mask, Sequence | np.ndarray):
        raise TypeError(f"nc_stream_shuffle shuffle_mask must be a sequence of 32 integers, got {shuffle_mask!r}")
    require(
        len(shuffle_mask) == _QUADRANT, f"nc_stream_shuffle shuffle_mask must have 32 entries, got {len(shuffle_mask)}"
    )
    mask = np.array([integer(entry, "an entry of nc_stream_shuffle shuffle_mask") for entry in shuffle_mask])
    legal = ((mask >= 0) & (mask < _QUADRANT)) | (mask == _UNMODIFIED)
    require(bool(legal.all()), f"nc_stream_shuffle shuffle_mask entries are 0 to 31 or 255, got {list(shuffle_mask)}")
    partitions = np.arange(to)
    entries = mask[partitions % _QUADRANT]
    kept = entries == _UNMODIFIED
    sources = np.where(kept, 0, partitions // _QUADRANT * _QUADRANT + entries)
    require(
        bool((sources < given).all()),
        f"nc_stream_shuffle reads partition {int(sources.max())} of src, which has {given} partitions",
    )
    return kept, sources
