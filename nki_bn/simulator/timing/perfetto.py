# SPDX-License-Identifier: Apache-2.0
"""A timeline as JSON for ui.perfetto.dev: a process per core, a thread per engine and DMA queue, bytes in flight, and
arrows along the critical path."""

from __future__ import annotations

import itertools
import json
from typing import Any

from nki_bn.simulator.timing.spans import Span
from nki_bn.simulator.timing.timeline import Timeline
from nki_bn.simulator.timing.tracks import Bar, Track, tracks_of

Event = dict[str, Any]

_NS_PER_US = 1000.0


def perfetto_json(timeline: Timeline) -> str:
    """The whole file. Times are modelled, in microseconds from the first instruction."""
    tracks = tracks_of(timeline)
    events = [*_names(tracks), *_bars(timeline, tracks), *_bytes_in_flight(timeline), *_arrows(timeline, tracks)]
    about = {
        "modelled": True,
        "target": timeline.target,
        "total_us": timeline.total / _NS_PER_US,
        "launch_us": timeline.launch / _NS_PER_US,
    }
    return json.dumps({"displayTimeUnit": "ns", "otherData": about, "traceEvents": events})


def _names(tracks: list[Track]) -> list[Event]:
    cores = [
        {"ph": "M", "name": "process_name", "pid": core, "args": {"name": f"core {core}"}}
        for core in sorted({track.core for track in tracks})
    ]
    rows = [
        {"ph": "M", "name": "thread_name", "pid": track.core, "tid": row, "args": {"name": track.name}}
        for row, track in enumerate(tracks)
    ]
    order = [
        {"ph": "M", "name": "thread_sort_index", "pid": track.core, "tid": row, "args": {"sort_index": row}}
        for row, track in enumerate(tracks)
    ]
    return [*cores, *rows, *order]


def _bars(timeline: Timeline, tracks: list[Track]) -> list[Event]:
    return [
        {
            "ph": "X",
            "name": bar.label,
            "pid": track.core,
            "tid": row,
            "ts": bar.begin / _NS_PER_US,
            "dur": (bar.end - bar.begin) / _NS_PER_US,
            "args": _details(timeline, bar.span),
        }
        for row, track in enumerate(tracks)
        for bar in track.bars
    ]


def _details(timeline: Timeline, span: Span) -> dict[str, Any]:
    record = span.record
    details: dict[str, Any] = {
        "index": record.index,
        "opcode": record.opcode,
        "source": str(record.source),
        "writes": [f"{access.tensor} {list(access.shape)} {access.dtype}" for access in record.writes],
        "reads": [f"{access.tensor} {list(access.shape)} {access.dtype}" for access in record.reads],
        "waited for": timeline.reason(span.cause),
        "waited ns": span.stalled,
        "results after ns": span.done - span.start,
    }
    if record.name:
        details["name"] = record.name
    if span.flight is not None:
        transfer = span.flight.transfer
        details |= {"bytes": transfer.nbytes, "descriptors": sum(transfer.descriptors)}
    return details


def _bytes_in_flight(timeline: Timeline) -> list[Event]:
    """A counter per core: bytes of the DMAs that engines serve."""
    changes = sorted(
        (time, flight.core, sign * flight.transfer.nbytes)
        for flight in timeline.flights
        for time, sign in ((flight.begun, 1), (flight.last, -1))
    )
    flying = dict.fromkeys(range(timeline.cores), 0)
    events = []
    for (time, core), group in itertools.groupby(changes, key=lambda change: change[:2]):
        flying[core] += sum(change[2] for change in group)
        events.append(
            {
                "ph": "C",
                "name": "bytes in flight",
                "pid": core,
                "ts": time / _NS_PER_US,
                "args": {"bytes": flying[core]},
            }
        )
    return events


def _arrows(timeline: Timeline, tracks: list[Track]) -> list[Event]:
    """From each step of the critical path to the next, bar to bar."""
    bars: dict[int, tuple[int, int, Bar]] = {}
    for row, track in enumerate(tracks):
        for bar in track.bars:
            bars[bar.span.record.index] = track.core, row, bar
    events: list[Event] = []
    for number, (step, following) in enumerate(itertools.pairwise(timeline.critical_path)):
        for phase, record in (("s", step.record), ("f", following.record)):
            core, row, bar = bars[record]
            events.append(
                {
                    "ph": phase,
                    "bp": "e",
                    "id": number,
                    "name": "critical path",
                    "cat": "critical path",
                    "pid": core,
                    "tid": row,
                    "ts": (bar.begin + bar.end) / 2 / _NS_PER_US,
                }
            )
    return events
