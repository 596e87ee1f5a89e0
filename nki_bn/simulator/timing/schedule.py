# SPDX-License-Identifier: Apache-2.0
"""The event loop: engines in order, DMAs through their queues, cores that meet.

What depends on no transfer that is still under way is placed at once, be it far ahead. Only the DMA engines share
something, so only their events are taken in order of time.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Mapping

from nki_bn.hardware import Timing
from nki_bn.simulator.timing.classes import Duration, duration_of
from nki_bn.simulator.timing.dma import LOAD, WITHIN_HBM, Transfer, transfer_of
from nki_bn.simulator.timing.engines import Engine, Slot, trigger_time
from nki_bn.simulator.timing.jobs import Job, jobs_of, semaphore
from nki_bn.simulator.timing.service import Flight, Service
from nki_bn.simulator.timing.spans import ORDER, PEER, SPACING, Cause, Span
from nki_bn.simulator.trace import Record, Trace


def schedule(trace: Trace, timing: Timing, collectives: Mapping[int, Duration] | None = None) -> list[Span]:
    """A span for each record; ``collectives`` says what those cost, by the index of the record.

    Raises:
        ValueError: instructions wait for each other, or one is not in the model.
    """
    return _Schedule(trace, timing, collectives or {}).run()


class _Schedule:
    """Streams of jobs per engine, of which the first are placed as soon as what they wait for is known."""

    def __init__(self, trace: Trace, timing: Timing, collectives: Mapping[int, Duration]) -> None:
        self._timing = timing
        self._collectives = collectives
        self._jobs = jobs_of(trace)
        self._spans: dict[int, Span] = {}
        self._open = [len(job.edges) for job in self._jobs]
        self._dependents: dict[int, list[int]] = defaultdict(list)
        self._streams: dict[tuple[int, str], deque[int]] = defaultdict(deque)
        for index, job in enumerate(self._jobs):
            self._streams[job.stream].append(index)
            for edge in job.edges:
                self._dependents[edge.producer].append(index)
        self._engines = {stream: Engine(stream[1], timing) for stream in self._streams}
        self._service = Service(timing, 1 + max((core for core, _ in self._streams), default=0))
        self._arrivals: list[tuple[float, int, Flight]] = []
        self._arrived: dict[tuple[int, str], float] = defaultdict(float)
        self._waiting: dict[tuple[object, ...], int] = {}
        self._ready = deque(self._streams)

    def run(self) -> list[Span]:
        """Place everything; the spans in the order of the trace."""
        while True:
            self._place_what_can()
            arrival = self._arrivals[0][0] if self._arrivals else math.inf
            time = min(arrival, self._service.next_end())
            if time == math.inf:
                break
            for flight in self._service.advance(time):
                self._spans[flight.record].done = flight.last + self._timing.dma.completion
                self._release(flight.record)
            while self._arrivals and self._arrivals[0][0] <= time:
                self._service.submit(heapq.heappop(self._arrivals)[2])
        self._check_finished()
        return [self._spans[index] for index in range(len(self._jobs))]

    def _check_finished(self) -> None:
        stuck = [self._jobs[stream[0]].record for stream in self._streams.values() if stream]
        if stuck:
            names = "; ".join(f"{record.opcode} at {record.source}" for record in stuck)
            raise ValueError(f"instructions wait for others that come later on their engine: {names}")

    def _place_what_can(self) -> None:
        while self._ready:
            stream = self._streams[self._ready.popleft()]
            while stream and self._open[stream[0]] == 0 and self._place(stream[0]):
                stream.popleft()

    def _release(self, index: int) -> None:
        """It is known when ``index`` is done: what waited for it may be placed."""
        for dependent in self._dependents[index]:
            self._open[dependent] -= 1
            if self._open[dependent] == 0:
                self._ready.append(self._jobs[dependent].stream)

    def _place(self, index: int) -> bool:
        """Give the first of a stream its time; False if it meets another job that has not come yet."""
        job = self._jobs[index]
        if job.meeting is not None:
            return self._meet(index, job.meeting)
        engine = self._engines[job.stream]
        time, cause = self._operands(job)
        self._settle(
            index,
            self._execute(job, engine, time, cause) if job.issuer is None else self._trigger(job, engine, time, cause),
        )
        return True

    def _operands(self, job: Job) -> tuple[float, Cause | None]:
        """When all that a job waits for is there, and what came last."""
        latest, cause = 0.0, None
        for edge in job.edges:
            delay = semaphore(self._jobs[edge.producer], job, self._timing.semaphore)
            time = self._spans[edge.producer].done + delay
            if cause is None or time > latest:
                latest, cause = time, Cause(edge.producer, edge.kind)
        return latest, cause

    def _settle(self, index: int, span: Span) -> None:
        self._spans[index] = span
        self._engines[self._jobs[index].stream].last = index
        if span.done < math.inf:
            self._release(index)

    def _execute(self, job: Job, engine: Engine, time: float, cause: Cause | None) -> Span:
        free = engine.free
        duration = self._collectives.get(job.record.index) or duration_of(job.record, self._timing)
        slot = engine.execute(duration, time)
        idle_from = slot.table_load[1] if slot.table_load else free
        return _span(job, slot, _why(cause, time, slot.start, engine.last), idle_from)

    def _trigger(self, job: Job, engine: Engine, time: float, cause: Cause | None) -> Span:
        assert job.issuer is not None, "only DMAs are triggered"
        free, spaced = engine.free, engine.next_trigger
        slot = engine.trigger(job.issuer, time)
        held_back = SPACING if spaced > free else ORDER
        span = _span(job, slot, _why(cause, time, slot.start, engine.last, held_back), free)
        transfer = transfer_of(job.record, self._timing.dma)
        if transfer is None:
            span.done = span.free
        else:
            self._send(job, span, transfer)
        return span

    def _send(self, job: Job, span: Span, transfer: Transfer) -> None:
        """Put a transfer on its way to its queue, behind what was sent there before."""
        assert job.issuer is not None, "only DMAs are sent"
        dma = self._timing.dma
        from_hbm = transfer.direction in (LOAD, WITHIN_HBM)
        first = dma.first_software if job.issuer.software else dma.first_load if from_hbm else dma.first_store
        arrival = self._arrived[job.stream] = max(span.start + first, self._arrived[job.stream])
        span.flight = Flight(job.record.index, job.record.core, job.engine, transfer, arrival)
        heapq.heappush(self._arrivals, (arrival, job.record.index, span.flight))

    def _meet(self, index: int, meeting: tuple[object, ...]) -> bool:
        """Place both sides of a meeting when both are first on their engines."""
        other = self._waiting.setdefault(meeting, index)
        if other == index:
            return False
        self._place_pair((other, index))
        stream = self._jobs[other].stream
        self._streams[stream].popleft()
        self._ready.append(stream)
        return True

    def _place_pair(self, pair: tuple[int, int]) -> None:
        """Start both when the later one can, and hold their engines."""
        operands = {index: self._operands(self._jobs[index]) for index in pair}
        possible = {index: max(operands[index][0], self._engines[self._jobs[index].stream].free) for index in pair}
        late = max(pair, key=lambda index: possible[index])
        start = possible[late]
        for index in pair:
            job, (time, cause) = self._jobs[index], operands[index]
            engine = self._engines[job.stream]
            why = Cause(late, PEER) if possible[index] < start else _why(cause, time, start, engine.last)
            idle_from, done = engine.free, start + self._meeting_time(job.record)
            free = done if job.issuer is None else start + trigger_time(job.issuer, self._timing)
            self._settle(index, _span(job, engine.hold(start, free, done), why, idle_from))

    def _meeting_time(self, record: Record) -> float:
        """ns from the meeting until results can be seen; the payload of a sendrecv moves outside of the queues."""
        transfer = transfer_of(record, self._timing.dma)
        if transfer is None:
            return self._timing.cores.barrier
        return self._timing.cores.sendrecv + max(transfer.work)


def _why(cause: Cause | None, ready: float, start: float, before: int | None, held_back: str = ORDER) -> Cause:
    """The edge that came last, unless the engine was ready later than that."""
    return cause if cause is not None and start <= ready else Cause(before, held_back)


def _span(job: Job, slot: Slot, cause: Cause, idle_from: float) -> Span:
    return Span(
        job.record, job.engine, slot.start, slot.free, slot.done, cause, slot.start - idle_from, slot.table_load
    )
