# SPDX-License-Identifier: Apache-2.0
"""The rows in which a timeline is shown: one per engine, one or more per DMA queue, without overlaps."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from nki_bn.simulator.timing.spans import Span
from nki_bn.simulator.timing.timeline import Timeline

TABLE_LOAD = "table load"


@dataclass(frozen=True)
class Bar:
    """Something in a row: from ``begin`` to ``end`` in ns."""

    label: str
    begin: float
    end: float
    span: Span


@dataclass(frozen=True)
class Track:
    """A row of bars of one core, in order of time."""

    core: int
    name: str
    bars: tuple[Bar, ...]


def tracks_of(timeline: Timeline) -> list[Track]:
    """All rows: by core, engines first, then the DMA queues."""
    engines: dict[tuple[int, str], list[Bar]] = defaultdict(list)
    queues: dict[tuple[int, str], list[Bar]] = defaultdict(list)
    for span in timeline.spans:
        key = span.record.core, span.engine
        if span.table_load is not None:
            engines[key].append(Bar(TABLE_LOAD, *span.table_load, span))
        engines[key].append(Bar(_label(span), span.start, span.free, span))
        if span.flight is not None:
            transfer = Bar(span.flight.transfer.direction, span.flight.begun, span.flight.last, span)
            queues[span.record.core, span.flight.queue].append(transfer)
    tracks = []
    for core in range(timeline.cores):
        tracks += [Track(core, name, tuple(bars)) for (at, name), bars in sorted(engines.items()) if at == core]
        for (at, name), bars in sorted(queues.items()):
            if at == core:
                tracks += [Track(core, row, tuple(lane)) for row, lane in _lanes(f"dma {name}", bars)]
    return tracks


def _label(span: Span) -> str:
    return f"trigger {span.flight.transfer.direction}" if span.flight is not None else span.record.opcode


def _lanes(name: str, bars: list[Bar]) -> list[tuple[str, list[Bar]]]:
    """As few rows as hold bars that overlap (DMAs of one queue do where they use different engines)."""
    lanes: list[list[Bar]] = []
    for bar in sorted(bars, key=lambda bar: (bar.begin, bar.end)):
        free = next((lane for lane in lanes if lane[-1].end <= bar.begin), None)
        if free is None:
            lanes.append([bar])
        else:
            free.append(bar)
    return [(name if number == 1 else f"{name} ({number})", lane) for number, lane in enumerate(lanes, 1)]
