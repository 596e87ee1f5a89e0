# SPDX-License-Identifier: Apache-2.0
"""What each instruction has to wait for: data by byte range, explicit edges, barriers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from nki_bn.simulator.memory import MemoryRegion
from nki_bn.simulator.timing.footprint import Box, Ledger, Touch, boxes_of, everything, levels_of
from nki_bn.simulator.trace import Access, Record, Trace

# A read after the write of its data, a write after a read or a write of what it replaces, an edge the kernel asked
# for, and the order that a barrier makes.
READ, REPLACE_READ, REPLACE_WRITTEN, AFTER, BARRIER = "RAW", "WAR", "WAW", "after", "barrier"


@dataclass(frozen=True, slots=True)
class Edge:
    """Wait for the record ``producer``, for the reason ``kind``."""

    producer: int
    kind: str


def dependencies(trace: Trace, queues: Sequence[str]) -> list[list[Edge]]:
    """The edges into each record; ``queues`` names what executes each of them in order.

    Cores do not see each other's accesses: what they share is ordered by barriers.
    """
    watch = _Watch(trace)
    return [watch.edges(record, queue) for record, queue in zip(trace, queues, strict=True)]


class _Watch:
    """The ledgers of all memories that a trace writes, per core."""

    def __init__(self, trace: Trace) -> None:
        written = {access.memory for record in trace for access in record.writes}
        accesses: dict[int, list[Access]] = defaultdict(list)
        for record in trace:
            for access in (*record.writes, *record.reads):
                if access.memory in written:
                    accesses[access.memory].append(access)
        self._levels = {memory: levels_of(found) for memory, found in accesses.items()}
        self._shared = {memory for memory, found in accesses.items() if found[0].region is MemoryRegion.shared_hbm}
        self._ledgers: dict[tuple[int, int], Ledger] = {}
        self._boxes: dict[Access, tuple[Box, ...]] = {}

    def edges(self, record: Record, queue: str) -> list[Edge]:
        """The edges into the next record of the trace."""
        if record.opcode == "core_barrier":
            found = self._pass_barrier(record, queue)
        else:
            found = self._touch(record, queue)
        for producer in record.after:
            found.setdefault(producer, AFTER)
        return [Edge(producer, kind) for producer, kind in found.items()]

    def _pass_barrier(self, record: Record, queue: str) -> dict[int, str]:
        """Everything that touched the shared memory comes before, everything that will touch it after."""
        chosen = record.attributes["memory"]
        memories = self._shared if chosen is None else self._shared & {chosen}
        found: dict[int, str] = {}
        for memory in sorted(memories):
            ledger, box = self._ledger(record.core, memory), everything(self._levels[memory])
            found |= {touch.record: BARRIER for touch in ledger.conflicts(box, writing=True)}
            ledger.note(box, Touch(record.index, queue, writes=True))
        return found

    def _touch(self, record: Record, queue: str) -> dict[int, str]:
        touches = [(access, False) for access in record.reads] + [(access, True) for access in record.writes]
        placed = [
            (self._ledger(record.core, access.memory), box, writing)
            for access, writing in touches
            if access.memory in self._levels
            for box in self._boxes_of(access)
        ]
        found: dict[int, str] = {}
        for ledger, box, writing in placed:
            for touch in ledger.conflicts(box, writing):
                kind = (REPLACE_WRITTEN if touch.writes else REPLACE_READ) if writing else READ
                if not _in_order(touch.queue, queue, kind):
                    found.setdefault(touch.record, kind)
        for ledger, box, writing in placed:
            ledger.note(box, Touch(record.index, queue, writing))
        return found

    def _ledger(self, core: int, memory: int) -> Ledger:
        key = core, memory
        if key not in self._ledgers:
            self._ledgers[key] = Ledger(len(self._levels[memory]) + 1)
        return self._ledgers[key]

    def _boxes_of(self, access: Access) -> tuple[Box, ...]:
        if access not in self._boxes:
            self._boxes[access] = boxes_of(access, self._levels[access.memory])
        return self._boxes[access]


def _in_order(earlier: str, later: str, kind: str) -> bool:
    """Whether being executed in order is enough: replacing on one engine, and Tensor's accumulation in PSUM."""
    if earlier != later or earlier.startswith("dma"):
        return False
    return kind != READ or earlier == "tensor"
