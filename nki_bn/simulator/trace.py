# SPDX-License-Identifier: Apache-2.0
"""What a run leaves behind: one record per instruction, with engine, operands as byte patterns, and source line."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

from nki_bn.simulator import dtypes
from nki_bn.simulator.gathered import around
from nki_bn.simulator.memory import MemoryRegion
from nki_bn.simulator.tensor import NkiTensor

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


@dataclass(frozen=True, slots=True)
class Source:
    """The line of user code that issued an instruction."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def caller() -> Source:
    """The innermost line outside this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return Source(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


@dataclass(frozen=True, slots=True)
class Access:
    """One operand: a strided pattern of bytes.

    ``memory`` numbers the byte array (one per SBUF, PSUM and HBM tensor); ``offset`` and ``strides`` are logical bytes
    in it, so that on chip the partition is ``offset // pitch``. ``pitch`` is 0 in HBM. Through run-time indices,
    ``around`` is the shape, with the same strides, of all places that they can lead to; else it is empty.
    """

    region: MemoryRegion
    memory: int
    tensor: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    pitch: int
    around: tuple[int, ...] = ()

    @property
    def places(self) -> tuple[int, ...]:
        """Shape of the bytes that may be touched."""
        return self.around or self.shape

    @property
    def nbytes(self) -> int:
        """Bytes that the pattern touches (repeats counted)."""
        return prod(self.shape) * dtypes.size_of(self.dtype)

    @property
    def columns(self) -> int:
        """Elements per partition on chip; all elements in HBM."""
        return prod(self.shape[1:]) if self.region.on_chip else prod(self.shape)

    @property
    def extent(self) -> tuple[int, int]:
        """First and one past the last logical byte of the pattern in its memory."""
        reach = sum(stride * (size - 1) for stride, size in zip(self.strides, self.places, strict=True))
        return self.offset, self.offset + reach + dtypes.size_of(self.dtype)

    def run_bytes(self) -> int:
        """Length of the contiguous runs the pattern falls into (what one DMA descriptor can move)."""
        run = dtypes.size_of(self.dtype)
        first = 1 if self.region.on_chip or self.around else 0
        for size, stride in list(zip(self.shape, self.strides, strict=True))[: first - 1 if first else None : -1]:
            if size != 1 and stride != run:
                break
            run *= size
        return run

    @classmethod
    def of(cls, tensor: NkiTensor) -> Access:
        """The bytes that ``tensor`` looks at."""
        storage = tensor.storage
        return cls(
            storage.region,
            storage.bank.serial,
            storage.name,
            tensor.byte_offset(),
            tensor.shape,
            tensor.byte_strides(),
            tensor.dtype,
            storage.pitch,
            around(tensor),
        )


@dataclass(slots=True)
class Record:
    """One executed instruction. ``attributes`` holds what else decides its time (op, flags, table, ranks).

    ``after`` has the indices of records it has to wait for because the kernel says so; ``loops`` the device loops
    around it, outermost first.
    """

    index: int
    core: int
    opcode: str
    engine: str
    writes: tuple[Access, ...]
    reads: tuple[Access, ...]
    source: Source
    name: str | None = None
    attributes: dict[str, Any] = field(default_factory=dict)
    after: list[int] = field(default_factory=list)
    loops: tuple[int, ...] = ()


@dataclass
class Trace:
    """All records of a run, in program order per core."""

    records: list[Record] = field(default_factory=list)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    def count(self, opcode: str) -> int:
        """Number of instructions of one kind."""
        return sum(record.opcode == opcode for record in self.records)
