# SPDX-License-Identifier: Apache-2.0
"""New tensors: uninitialised, filled and constant ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nki_bn.simulator import dtypes
from nki_bn.simulator.isa import dma, movement
from nki_bn.simulator.machine import current_core
from nki_bn.simulator.memory import MemoryRegion
from nki_bn.simulator.numerics import Array
from nki_bn.simulator.tensor import MAX_DIMS, NkiTensor, require

sbuf = MemoryRegion.sbuf
psum = MemoryRegion.psum
private_hbm = MemoryRegion.private_hbm
hbm = private_hbm
shared_hbm = MemoryRegion.shared_hbm


def is_sbuf(buffer: MemoryRegion) -> bool:
    """Whether ``buffer`` is SBUF."""
    return buffer is sbuf


def is_psum(buffer: MemoryRegion) -> bool:
    """Whether ``buffer`` is PSUM."""
    return buffer is psum


def is_on_chip(buffer: MemoryRegion) -> bool:
    """Whether ``buffer`` is SBUF or PSUM."""
    return buffer in (sbuf, psum)


def is_hbm(buffer: MemoryRegion) -> bool:
    """Whether ``buffer`` is device memory, private or shared."""
    return buffer in (private_hbm, shared_hbm)


def ndarray(
    shape: Sequence[int],
    dtype: Any,
    buffer: MemoryRegion = sbuf,
    name: str | None = "",
    address: tuple[int, int] | None = None,
) -> NkiTensor:
    """A new tensor with undefined contents.

    Args:
        shape: at least two dimensions on chip (the partitions first, at most 128), at least one in HBM, at most five.
        dtype: an NKI dtype.
        buffer: ``nl.sbuf``, ``nl.psum``, ``nl.hbm``, ``nl.private_hbm`` or ``nl.shared_hbm``.
        name: label in messages and traces, unique in a kernel; None is no name.
        address: (partition, byte in the partition) of an on-chip tensor; without it the simulator finds a place.

    Raises:
        TypeError: an argument is of the wrong kind (strings name no buffers).
        NkiValidationError: the shape or the address breaks a rule of the memory.
        OutOfMemoryError: there is no room.
    """
    if not isinstance(buffer, MemoryRegion):
        raise TypeError(f"ndarray buffer must be a memory region such as nl.sbuf, got {buffer!r}")
    if name is not None and not isinstance(name, str):
        raise TypeError(f"ndarray name must be a string, got {name!r}")
    sizes = _check_shape(shape, buffer)
    place = None if address is None else _check_address(address)
    return current_core().allocate(sizes, dtypes.normalize(dtype), buffer, name or "", place)


def _check_shape(shape: Sequence[int], buffer: MemoryRegion) -> tuple[int, ...]:
    if not isinstance(shape, (tuple, list)) or not all(_is_integer(size) for size in shape):
        raise TypeError(f"ndarray shape must be a tuple of integers, got {shape!r}")
    least = 2 if buffer.on_chip else 1
    require(
        least <= len(shape) <= MAX_DIMS,
        f"ndarray shape {tuple(shape)} has {len(shape)} dimensions; {buffer.value} takes {least} to {MAX_DIMS}",
    )
    require(min(shape) >= 1, f"ndarray shape {tuple(shape)}: every size must be at least 1")
    return tuple(int(size) for size in shape)


def _check_address(address: Any) -> tuple[int, int]:
    if not isinstance(address, (tuple, list)) or len(address) != 2 or not all(_is_integer(part) for part in address):
        raise TypeError(f"ndarray address must be (partition, byte), got {address!r}")
    return int(address[0]), int(address[1])


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def full(shape: Sequence[int], fill_value: float, dtype: Any, buffer: MemoryRegion = sbuf, name: str = "") -> NkiTensor:
    """A new tensor filled with a number (in HBM by a DMA from a constant)."""
    tensor = ndarray(shape, dtype, buffer, name)
    if tensor.buffer.on_chip:
        movement.memset(tensor, fill_value)
        return tensor
    element = shared_constant(np.full(1, fill_value, dtypes.to_numpy(tensor.dtype)))
    dma.dma_copy(tensor, element.ap([[0, size] for size in tensor.shape]))
    return tensor


def zeros(shape: Sequence[int], dtype: Any, buffer: MemoryRegion = sbuf, name: str = "") -> NkiTensor:
    """A new tensor filled with 0."""
    return full(shape, 0, dtype, buffer, name)


def ones(shape: Sequence[int], dtype: Any, buffer: MemoryRegion = sbuf, name: str = "") -> NkiTensor:
    """A new tensor filled with 1."""
    return full(shape, 1, dtype, buffer, name)


def empty_like(x: NkiTensor, dtype: Any = None, buffer: MemoryRegion | None = None, name: str = "") -> NkiTensor:
    """A new tensor with undefined contents and the shape of ``x``, by default of its dtype and in its memory."""
    return ndarray(x.shape, dtype or x.dtype, buffer or x.buffer, name)


def zeros_like(x: NkiTensor, dtype: Any = None, buffer: MemoryRegion | None = None, name: str = "") -> NkiTensor:
    """A new tensor of 0 with the shape of ``x``, by default of its dtype and in its memory."""
    return zeros(x.shape, dtype or x.dtype, buffer or x.buffer, name)


def shared_constant(constant: Array | str) -> NkiTensor:
    """A shared HBM tensor with the values of a NumPy array, or of the ``.npy`` file at a path; one for all cores.

    Raises:
        TypeError: the argument is neither, or its dtype has no NKI counterpart.
        NkiValidationError: the array is empty or has no dimension.
    """
    values = np.load(constant) if isinstance(constant, str) else constant
    if not isinstance(values, np.ndarray):
        raise TypeError(f"shared_constant takes a NumPy array or the path of an .npy file, got {constant!r}")
    require(values.ndim >= 1 and values.size >= 1, f"shared_constant got an array of shape {values.shape}")
    dtype = dtypes.normalize(values.dtype)
    run = current_core().run
    # The first core stands for the launch: all cores see what it keeps.
    kept = run.cores[0].constants
    key = "shared_constant", values.shape, dtype, values.tobytes()
    if key not in kept:
        kept[key] = run.adopt(np.array(values, order="C"), dtype, "constant", shared_hbm)
    return kept[key]


def shared_identity_matrix(n: int, dtype: Any = "uint8", dst: NkiTensor | None = None) -> NkiTensor:
    """An ``n`` x ``n`` identity matrix in SBUF: one per size and dtype and core, or written into ``dst``.

    Raises:
        NkiValidationError: ``n`` is not in 1..128, or ``dst`` has another shape.
    """
    core = current_core()
    require(1 <= n <= core.run.target.partitions, f"shared_identity_matrix n must be 1 to 128, got {n!r}")
    name = dtypes.normalize(dtype) if dst is None else dst.dtype
    key = "identity", n, name
    if dst is None and key in core.constants:
        return core.constants[key]
    matrix = ndarray((n, n), name) if dst is None else dst
    require(matrix.shape == (n, n), f"shared_identity_matrix dst has shape {matrix.shape}, not {(n, n)}")
    dma.dma_copy(matrix, shared_constant(np.eye(n, dtype=dtypes.to_numpy(name))))
    if dst is None:
        core.constants[key] = matrix
    return matrix
