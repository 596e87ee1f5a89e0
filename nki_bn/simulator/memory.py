# SPDX-License-Identifier: Apache-2.0
"""Physical memory: byte arrays for SBUF, PSUM and HBM, a shadow byte per byte, and the on-chip allocator.

Logical addresses are those of the hardware. With low precision switched off (``NKI_PRECISE_FP=0``) every logical byte
has four bytes of storage, so that a two-byte element can hold a float32 at its own address.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from nki_bn.simulator import dtypes
from nki_bn.simulator.errors import NkiValidationError, OutOfMemoryError
from nki_bn.simulator.numerics import Array

# Bits of a shadow byte. READ and WRITTEN by a core are kept for shared HBM only, and cleared by barriers.
WRITTEN = 1
READ_BY = (4, 16)
WRITTEN_BY = (8, 32)
TOUCHED_BY = (READ_BY[0] | WRITTEN_BY[0], READ_BY[1] | WRITTEN_BY[1])

# Automatic placements start at multiples of this many bytes, so that every element is aligned.
ALIGNMENT = 4
# Bytes between the rows of a scratchpad. Without them the rows of a tile would share the sets of the host's caches.
_PADDING = 64


class MemoryRegion(Enum):
    """Where a tensor lives; ``on_chip`` says whether the region has partitions (SBUF and PSUM)."""

    sbuf = "sbuf"
    psum = "psum"
    private_hbm = "private_hbm"
    shared_hbm = "shared_hbm"

    def __init__(self, value: str) -> None:
        # An attribute and no property: it is asked for several times per operand.
        self.on_chip = value in ("sbuf", "psum")


class Bank:
    """A byte array with its shadow; ``scale`` bytes of storage per logical byte."""

    _serial = itertools.count()

    def __init__(self, data: Array, scale: int, shadow: Array | None = None) -> None:
        self.data = data
        self.scale = scale
        self.shadow = np.zeros(data.size // scale, np.uint8) if shadow is None else shadow
        self.serial = next(Bank._serial)

    def release(self) -> None:
        """Let go of the bytes."""
        self.data = self.shadow = np.zeros(0, np.uint8)


# Arrays of released scratchpads by size and scale: what the data are does not matter, the shadows are clear.
_SPARE: dict[tuple[int, int], list[tuple[Array, Array]]] = defaultdict(list)
_MOST_SPARE = 4


def _bank(size: int, scale: int) -> Bank:
    """A bank of ``size`` logical bytes of which none counts as written."""
    try:
        data, shadow = _SPARE[size * scale, scale].pop()
    except IndexError:
        return Bank(np.zeros(size * scale, np.uint8), scale)
    return Bank(data, scale, shadow)


@dataclass(frozen=True)
class Reserved:
    """Memory of a scratchpad that stays, and what an earlier run had in it: ``placed`` tiles (size, start) in order,
    and at most ``high_water`` bytes of a partition in use."""

    bank: Bank
    placed: Sequence[tuple[int, int]]
    high_water: int


@dataclass(frozen=True)
class _Placed:
    """A live tile of a scratchpad: bytes [start, end) of every partition."""

    start: int
    end: int
    label: str
    automatic: bool


class Scratchpad:
    """SBUF or PSUM of one core: ``partitions`` rows of ``row_bytes`` logical bytes, and the tiles that live there.

    ``placed`` lists all tiles (size, start) in order. In ``reserved`` memory they are placed as they were, whatever
    lives.
    """

    def __init__(
        self,
        region: MemoryRegion,
        partitions: int,
        row_bytes: int,
        bank_bytes: int,
        scale: int,
        reserved: Reserved | None = None,
    ) -> None:
        self.region = region
        self.partitions = partitions
        self.row_bytes = row_bytes
        self.bank_bytes = bank_bytes
        self.pitch = row_bytes + _PADDING
        self._reserved = reserved
        self.bank = _bank(partitions * self.pitch, scale) if reserved is None else reserved.bank
        self.placed: list[tuple[int, int]] = []
        self._used = row_bytes, 0
        self._live: dict[int, _Placed] = {}
        self._keys = itertools.count()
        self._automatic_bytes = 0
        self._chosen_end = 0
        self.high_water = 0 if reserved is None else reserved.high_water

    @property
    def live_bytes(self) -> int:
        """Bytes per partition in use: automatic tiles that live, plus all up to the end of the last chosen address."""
        return self._automatic_bytes + self._chosen_end

    def place(self, storage: Storage, size: int, address: int | None) -> int:
        """Reserve ``size`` bytes per partition for ``storage``, until it is garbage; returns the byte offset."""
        if self._reserved is not None:
            start = self._as_before(self._reserved.placed, size, storage.label)
        else:
            start = self._find(size, storage.label) if address is None else self._check(size, address, storage.label)
            self._keep(storage, start, size, address is None)
        self.placed.append((size, start))
        self._used = min(self._used[0], start), max(self._used[1], start + size)
        if address is None:
            # New memory. A tile at a chosen address may share bytes with a live one on purpose: what was written stays.
            rows = self.bank.shadow.reshape(self.partitions, self.pitch)
            rows[storage.partition : storage.partition + storage.shape[0], start : start + size] = 0
        return start

    def _keep(self, storage: Storage, start: int, size: int, automatic: bool) -> None:
        """The tile lives until its storage is garbage."""
        key = next(self._keys)
        self._live[key] = _Placed(start, start + size, storage.label, automatic)
        weakref.finalize(storage, self._release, key).atexit = False
        if automatic:
            self._automatic_bytes += size
        else:
            self._chosen_end = max(self._chosen_end, start + size)
        self.high_water = max(self.high_water, self.live_bytes)

    def _as_before(self, placed: Sequence[tuple[int, int]], size: int, label: str) -> int:
        at = len(self.placed)
        if at >= len(placed) or placed[at][0] != size:
            before = f"{placed[at][0]} bytes per partition" if at < len(placed) else "none"
            raise NkiValidationError(
                f"{label} needs {size} bytes per partition of {self.region.value}, in the last launch with such "
                f"arguments tile {at} needed {before}: a kernel that is replayed depends on its arguments alone"
            )
        return placed[at][1]

    def release(self) -> None:
        """Let go of the bytes, for the next scratchpad of this size: large arrays take longer to make than to clear."""
        if self._reserved is not None:
            start, end = self._used
            self.bank.shadow.reshape(self.partitions, self.pitch)[:, start:end] = 0
            return
        if len(_SPARE[self.bank.data.size, self.bank.scale]) < _MOST_SPARE:
            start, end = self._used
            self.bank.shadow.reshape(self.partitions, self.pitch)[:, start:end] = 0
            _SPARE[self.bank.data.size, self.bank.scale].append((self.bank.data, self.bank.shadow))
        self.bank.release()

    def _release(self, key: int) -> None:
        tile = self._live.pop(key)
        if tile.automatic:
            self._automatic_bytes -= tile.end - tile.start

    def _find(self, size: int, label: str) -> int:
        for low, high in self._gaps():
            start = self._fit(low, high, size)
            if start is not None:
                return start
        raise OutOfMemoryError(
            f"{label} needs {size} bytes per partition of {self.region.value}, which has {self.row_bytes}; "
            f"live tiles: {self._describe()}"
        )

    def _gaps(self) -> Iterator[tuple[int, int]]:
        # From the top downwards: kernels that choose addresses start at 0.
        high = self.row_bytes
        for tile in sorted(self._live.values(), key=lambda tile: -tile.end):
            if tile.end < high:
                yield tile.end, high
            high = min(high, tile.start)
        if high > 0:
            yield 0, high

    def _fit(self, low: int, high: int, size: int) -> int | None:
        start = (high - size) // ALIGNMENT * ALIGNMENT
        if self.region is MemoryRegion.psum:
            # A tile stays inside a bank, a larger one starts with a bank.
            bank = start // self.bank_bytes * self.bank_bytes
            if start + size > bank + self.bank_bytes or size > self.bank_bytes:
                start = bank if size > self.bank_bytes else (bank + self.bank_bytes - size) // ALIGNMENT * ALIGNMENT
        return start if start >= low else None

    def _check(self, size: int, address: int, label: str) -> int:
        if address < 0 or address + size > self.row_bytes:
            raise OutOfMemoryError(
                f"{label} at byte {address} ends at {address + size}, but a partition of {self.region.value} has "
                f"{self.row_bytes} bytes"
            )
        if self.region is MemoryRegion.psum and address % self.bank_bytes:
            raise NkiValidationError(f"{label}: PSUM addresses are multiples of {self.bank_bytes}, got {address}")
        for tile in self._live.values():
            if tile.automatic and tile.start < address + size and address < tile.end:
                raise NkiValidationError(f"{label} at byte {address} overlaps {tile.label}, which has no address")
        return address

    def _describe(self) -> str:
        tiles = sorted(self._live.values(), key=lambda tile: tile.start - tile.end)
        return ", ".join(f"{tile.label} [{tile.start}, {tile.end})" for tile in tiles[:8]) or "none"


class Storage:
    """What all views of one tensor share: a bank, the place in it, and the original shape.

    ``place`` is what finds a place for a tile that has none yet: in lenient runs tiles get theirs when they are used.
    ``base`` is the logical byte offset of element 0; on chip ``pitch`` is the distance between partitions and
    ``row_bytes`` the bytes of the tile in each. ``begun`` marks, in PSUM, where this tile was written, byte by byte:
    there a matmul without ``accumulate`` adds. It belongs to the tile, not to the bytes: tiles that take turns at one
    address each begin their own sum.
    """

    def __init__(self, region: MemoryRegion, shape: tuple[int, ...], dtype: str, name: str) -> None:
        self.region = region
        self.shape = shape
        self.dtype = dtype
        self.name = name
        self.label = f"{name or 'tensor'} {shape} {dtype}"
        self.size = math.prod(shape)
        if self.size * dtypes.size_of(dtype) >= 2**63:
            raise NkiValidationError(f"{self.label} is too large; accepted: less than 2**63 bytes")
        self.row_bytes = self.size // max(shape[0], 1) * dtypes.size_of(dtype)
        self.place: Callable[[Storage], None] | None = None
        self._bank: Bank | None = None
        self.base = 0
        self.pitch = 0
        self.partition = 0
        self.is_input = False
        self.begun = np.zeros(self.row_bytes * shape[0] if region is MemoryRegion.psum else 0, np.bool_)

    @property
    def bank(self) -> Bank:
        """Where the bytes are; a tile that waits for its place gets one now."""
        if self.place is not None:
            self._settle()
        assert self._bank is not None
        return self._bank

    @bank.setter
    def bank(self, bank: Bank) -> None:
        self._bank = bank

    def _settle(self) -> None:
        if self.place is not None:
            place, self.place = self.place, None
            place(self)

    def locate(self, offset: int, itemsize: int) -> int:
        """Logical byte address of the element at ``offset`` (in elements of ``itemsize`` bytes)."""
        if not self.region.on_chip:
            return self.base + offset * itemsize
        self._settle()
        row, rest = divmod(offset * itemsize, self.row_bytes)
        return self.base + row * self.pitch + rest

    def byte_strides(self, strides: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
        """Logical byte strides of a view; on chip the first one steps over partitions."""
        scaled = [stride * itemsize for stride in strides]
        if self.region.on_chip:
            self._settle()
            scaled[0] = scaled[0] // self.row_bytes * self.pitch
        return tuple(scaled)

    def element_type(self, dtype: str) -> np.dtype[Any]:
        """NumPy dtype in which elements are held."""
        if self.bank.scale > 1 and dtype in dtypes.LOW_PRECISION:
            return np.dtype(np.float32)
        return dtypes.to_numpy(dtype)
