# SPDX-License-Identifier: Apache-2.0
"""The modelled run: when every instruction ran and what it waited for, and the figures that follow from that."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from nki_bn.hardware import Timing
from nki_bn.simulator.timing.dependencies import REPLACE_READ, REPLACE_WRITTEN
from nki_bn.simulator.timing.jobs import MEETINGS
from nki_bn.simulator.timing.service import Flight
from nki_bn.simulator.timing.spans import ORDER, PEER, SPACING, Cause, Span
from nki_bn.simulator.trace import Access

# Time of an engine after its last instruction.
FINISHED = "finished"


@dataclass(frozen=True)
class EngineUse:
    """ns of one engine of a core: at work, and standing still by what it waited for."""

    core: int
    engine: str
    instructions: int
    busy: float
    stalls: dict[str, float]

    @property
    def stalled(self) -> float:
        """ns of waiting between its first instruction and its last."""
        return sum(time for reason, time in self.stalls.items() if reason != FINISHED)


@dataclass(frozen=True)
class Traffic:
    """Bytes between HBM and SBUF (or within either) for one tensor in one direction."""

    direction: str
    tensor: str
    nbytes: int


@dataclass(frozen=True)
class Step:
    """A part of the critical path: the record that time went to from ``begin`` to ``end``, and what it stood in for."""

    record: int
    begin: float
    end: float
    why: str


@dataclass(frozen=True)
class Timeline:
    """Modelled times in ns, from the start of the first instruction to the last completion; no launch cost.

    ``spans`` has one entry per record of the trace, in its order.
    """

    target: str
    timing: Timing
    cores: int
    spans: tuple[Span, ...]

    @cached_property
    def total(self) -> float:
        """ns from the first instruction to the last completion."""
        return max((span.done for span in self.spans), default=0.0)

    @property
    def launch(self) -> float:
        """ns that a launch costs on top."""
        return self.timing.launch_ns

    @property
    def limit(self) -> float:
        """The DMA limit that roofline shares refer to, in bytes per ns."""
        return self.timing.roofline.core if self.cores == 1 else self.timing.roofline.pair

    def roofline_share(self, minimum_bytes: int) -> float:
        """``minimum_bytes`` at the DMA limit, over the modelled time.

        Raises:
            ValueError: the timeline is empty.
        """
        if self.total == 0:
            raise ValueError("an empty timeline has no roofline share")
        return minimum_bytes / self.limit / self.total

    @cached_property
    def engines(self) -> tuple[EngineUse, ...]:
        """All engines in use, by core and name."""
        groups: dict[tuple[int, str], list[Span]] = defaultdict(list)
        for span in self.spans:
            groups[span.record.core, span.engine].append(span)
        return tuple(self._use(core, engine, groups[core, engine]) for core, engine in sorted(groups))

    def _use(self, core: int, engine: str, spans: list[Span]) -> EngineUse:
        stalls: dict[str, float] = defaultdict(float)
        busy = 0.0
        for span in spans:
            busy += span.free - span.start
            if span.table_load is not None:
                busy += span.table_load[1] - span.table_load[0]
            if span.stalled > 0:
                stalls[self.reason(span.cause)] += span.stalled
        stalls[FINISHED] = self.total - spans[-1].free
        return EngineUse(core, engine, len(spans), busy, dict(stalls))

    def reason(self, cause: Cause) -> str:
        """What was waited for, in words."""
        if cause.record is None:
            return "start"
        if cause.why in (ORDER, SPACING, PEER):
            return {ORDER: "engine", SPACING: "trigger spacing", PEER: "other core"}[cause.why]
        producer = self.spans[cause.record]
        name = producer.flight.transfer.direction if producer.flight else producer.engine
        if producer.record.opcode in MEETINGS:
            name = producer.record.opcode
        return f"{name} to let go" if cause.why in (REPLACE_READ, REPLACE_WRITTEN) else name

    @property
    def flights(self) -> Iterator[Flight]:
        """The DMAs, in the order of the trace."""
        return (span.flight for span in self.spans if span.flight is not None)

    @cached_property
    def nbytes(self) -> int:
        """All bytes that DMAs moved; a transfer counts once."""
        return sum(flight.transfer.nbytes for flight in self.flights)

    @property
    def bandwidth(self) -> float:
        """Bytes that DMAs moved per ns of the modelled time (GB/s)."""
        return self.nbytes / self.total if self.total else 0.0

    @cached_property
    def dma_busy(self) -> tuple[float, ...]:
        """For each core the ns that the busiest of its DMA engines is at work when nothing slows it down."""
        work = np.zeros((self.cores, self.timing.dma.engines))
        for flight in self.flights:
            work[flight.core] += flight.transfer.work
        return tuple(work.max(axis=1).tolist())

    @cached_property
    def traffic(self) -> tuple[Traffic, ...]:
        """Bytes by direction and tensor: that in HBM, else the destination."""
        counts: dict[tuple[str, str], int] = defaultdict(int)
        for span in self.spans:
            if span.flight is not None:
                access = _subject((*span.record.reads[:1], *span.record.writes))
                counts[span.flight.transfer.direction, access.tensor or "unnamed"] += access.nbytes
        return tuple(Traffic(*key, nbytes) for key, nbytes in sorted(counts.items()))

    @cached_property
    def critical_path(self) -> tuple[Step, ...]:
        """What the last completion waited for, and what that waited for, back to the start; in order of time."""
        if not self.spans:
            return ()
        last = max(self.spans, key=lambda span: span.done)
        steps = list(_back(self.spans, last.record.index))
        return tuple(reversed(steps))


def _subject(accesses: tuple[Access, ...]) -> Access:
    """The side in HBM, else the last."""
    return next((access for access in accesses if not access.region.on_chip), accesses[-1])


def _back(spans: tuple[Span, ...], index: int) -> Iterator[Step]:
    """Steps of the critical path, the last first."""
    end, by_completion = spans[index].done, True
    while True:
        span = spans[index]
        flight = span.flight if by_completion else None
        if flight is not None and flight.behind is not None:
            before = spans[flight.behind].flight
            assert before is not None, "a DMA queues behind a DMA"
            begin = min(before.last, end)
            yield Step(index, begin, end, "queue")
            index, end = flight.behind, begin
            continue
        yield Step(index, span.start, end, span.cause.why)
        if span.cause.record is None:
            return
        index, end = span.cause.record, span.start
        by_completion = span.cause.why not in (ORDER, SPACING, PEER)
