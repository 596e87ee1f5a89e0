# SPDX-License-Identifier: Apache-2.0
"""Where accesses lie in a memory, as boxes, and who touched what: the ground of dependencies.

A byte address is written in digits. On chip there are two, partition and byte in the row. In HBM the strides of the
accesses to a tensor give the digits, so that tiles of one tensor that interleave in memory (other channels, other
positions of the same images) are boxes that do not meet. Where a pattern is no box, its box is the smallest around it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from nki_bn.simulator import dtypes
from nki_bn.simulator.trace import Access

# Half-open ranges, one per digit.
Box = tuple[tuple[int, int], ...]

_FAR = 2**62


def everything(levels: tuple[int, ...]) -> Box:
    """The box that every other lies in."""
    return ((-_FAR, _FAR),) * (len(levels) + 1)


def levels_of(accesses: Iterable[Access]) -> tuple[int, ...]:
    """The place values of the digits above the byte, largest first, for the accesses to one memory.

    On chip that is the pitch. In HBM they are strides of which each divides the one before.
    """
    strides: set[int] = set()
    for access in accesses:
        if access.region.on_chip:
            return (access.pitch,)
        strides.update(stride for stride, _ in _outer(access)[0])
    levels: list[int] = []
    for stride in sorted(strides, reverse=True):
        if not levels or levels[-1] % stride == 0:
            levels.append(stride)
    return tuple(levels)


def boxes_of(access: Access, levels: tuple[int, ...]) -> tuple[Box, ...]:
    """The smallest boxes around ``access`` that its digits allow: one, or more where a range goes on into a digit."""
    outer, run = _outer(access)
    kept: dict[int, int] = {}
    reach = run
    for stride, size in outer:
        if stride in levels and reach <= stride:
            kept[stride] = size
        else:
            kept, run = {}, reach + stride * (size - 1)
        reach += stride * (size - 1)
    boxes = tuple(_digits(offset, sizes, run, levels) for offset, sizes in _carried(access.offset, kept, levels))
    return boxes if all(boxes) else (_digits(access.offset, {}, reach, levels),)


def _carried(offset: int, kept: dict[int, int], levels: tuple[int, ...]) -> list[tuple[int, dict[int, int]]]:
    """Offsets and sizes of the parts of a pattern, cut where a size goes on into the digit above.

    The levels above come from other accesses. Nothing is cut where the digit above has a size of its own.
    """
    for place, level in zip(reversed(levels[:-1]), reversed(levels[1:]), strict=True):
        base, first = place // level, offset % place // level
        count = kept.get(level, 0)
        if count and first + count > base and place not in kept:
            whole, last = divmod(count - (base - first), base)
            parts = [(offset, kept | {level: base - first})]
            offset += (base - first) * level
            if whole:
                parts.append((offset, kept | {level: base, place: whole}))
            if last:
                parts.append((offset + whole * place, kept | {level: last}))
            return [cut for part in parts for cut in _carried(*part, levels)]
    return [(offset, kept)]


def _outer(access: Access) -> tuple[list[tuple[int, int]], int]:
    """Dimensions (stride, size) in bytes, smallest stride first, outside of the contiguous run; and the run's bytes."""
    run = dtypes.size_of(access.dtype)
    outer: list[tuple[int, int]] = []
    dims = sorted((stride, size) for size, stride in zip(access.places, access.strides, strict=True) if size > 1)
    for stride, size in dims:
        if stride == run and not outer:
            run *= size
        elif stride > 0:
            outer.append((stride, size))
    return outer, run


def _digits(offset: int, kept: dict[int, int], run: int, levels: tuple[int, ...]) -> Box:
    """The box from ``offset`` with ``kept`` sizes at their levels and a run of bytes; empty if a digit carries over."""
    ranges: list[tuple[int, int]] = []
    place, rest = _FAR, offset
    for level in levels:
        first, inner = divmod(rest, level)
        count = kept.get(level) or (inner + run - 1) // level + 1
        if (first + count) * level > place:
            return ()
        ranges.append((first, first + count))
        if count > 1 and level not in kept:
            below = levels[len(ranges) :]
            # A run beyond its place takes all of what is below.
            return () if any(lower in kept for lower in below) else (*ranges, *everything(below))
        place, rest = level, inner
    return () if rest + run > place else (*ranges, (rest, rest + run))


@dataclass(frozen=True, slots=True)
class Touch:
    """An access by a record: its index, the queue that executes it, and whether it writes."""

    record: int
    queue: str
    writes: bool


class Ledger:
    """The touches of one memory that later ones can depend on."""

    def __init__(self, digits: int) -> None:
        # A row per digit, a column per slot; free slots meet no box.
        self._low = np.full((digits, 64), _FAR, np.int64)
        self._high = np.full((digits, 64), -_FAR, np.int64)
        self._touches: list[Touch | None] = []
        self._boxes: list[Box] = []
        self._free: list[int] = []
        self._slots: dict[tuple[Box, str, bool], int] = {}

    def conflicts(self, box: Box, writing: bool) -> list[Touch]:
        """Earlier touches that meet ``box``, of which one of the two writes; oldest first."""
        found = (self._touches[slot] for slot in self._meeting(box))
        touches = [touch for touch in found if touch is not None and (writing or touch.writes)]
        return sorted(touches, key=lambda touch: touch.record)

    def note(self, box: Box, touch: Touch) -> None:
        """Remember a touch. One that writes makes those inside its box superfluous."""
        if touch.writes:
            for slot in self._meeting(box):
                if _inside(self._boxes[slot], box):
                    self._forget(slot)
        key = (box, touch.queue, touch.writes)
        if key not in self._slots:
            self._slots[key] = self._new_slot(box)
        # Queues work in order: the last touch of a queue stands for its earlier ones.
        self._touches[self._slots[key]] = touch

    def _meeting(self, box: Box) -> list[int]:
        meets = np.ones(len(self._touches), np.bool_)
        for lows, highs, (low, high) in zip(self._low, self._high, box, strict=True):
            meets &= lows[: len(meets)] < high
            meets &= highs[: len(meets)] > low
        slots: list[int] = meets.nonzero()[0].tolist()
        return slots

    def _new_slot(self, box: Box) -> int:
        if not self._free:
            self._free.append(len(self._touches))
            self._touches.append(None)
            self._boxes.append(box)
        slot = self._free.pop()
        if slot == self._low.shape[1]:
            self._low = np.concatenate([self._low, np.full_like(self._low, _FAR)], axis=1)
            self._high = np.concatenate([self._high, np.full_like(self._high, -_FAR)], axis=1)
        self._boxes[slot] = box
        self._low[:, slot], self._high[:, slot] = zip(*box, strict=True)
        return slot

    def _forget(self, slot: int) -> None:
        touch = self._touches[slot]
        assert touch is not None, "a forgotten slot meets no box"
        del self._slots[self._boxes[slot], touch.queue, touch.writes]
        self._low[:, slot], self._high[:, slot] = _FAR, -_FAR
        self._touches[slot] = None
        self._free.append(slot)


def _inside(inner: Box, outer: Box) -> bool:
    return all(low <= first and last <= high for (first, last), (low, high) in zip(inner, outer, strict=True))
