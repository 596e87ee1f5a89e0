# SPDX-License-Identifier: Apache-2.0
"""A timeline as text."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence

from nki_bn.simulator.timing.timeline import FINISHED, Timeline
from nki_bn.simulator.trace import Record

_NS_PER_US = 1000.0
_REASONS = 4
_PATH_LINES = 8


def report(timeline: Timeline, minimum_bytes: int | None = None) -> str:
    """The figures of a timeline; with the bytes that have to move at least, its roofline share too."""
    sections = [_totals(timeline, minimum_bytes), _engines(timeline), _traffic(timeline), _path(timeline)]
    return "\n\n".join(sections)


def _us(time: float) -> str:
    return f"{time / _NS_PER_US:.1f}"


def _totals(timeline: Timeline, minimum_bytes: int | None) -> str:
    lines = [
        f"modelled on {timeline.target}, {_cores(timeline.cores)}: {_us(timeline.total)} us, launch "
        f"{_us(timeline.launch)} us not included, {len(timeline.spans)} instructions",
        f"DMA: {timeline.nbytes} bytes, {timeline.bandwidth:.0f} GB/s, the busiest engine of a core at work for "
        f"{', '.join(map(_us, timeline.dma_busy))} us",
    ]
    if minimum_bytes is not None:
        lines.append(
            f"roofline: {minimum_bytes} bytes at {timeline.limit:g} GB/s take "
            f"{_us(minimum_bytes / timeline.limit)} us, {timeline.roofline_share(minimum_bytes):.0%} of the "
            f"modelled time"
        )
    return "\n".join(lines)


def _cores(count: int) -> str:
    return "1 core" if count == 1 else f"{count} cores"


def _engines(timeline: Timeline) -> str:
    rows = [("engine", "instructions", "busy us", "%", "stalled us", "finished us", "waited most for (us)")]
    for use in timeline.engines:
        share = f"{use.busy / timeline.total:.0%}"
        rows.append(
            (
                f"core {use.core} {use.engine}",
                str(use.instructions),
                _us(use.busy),
                share,
                _us(use.stalled),
                _us(use.stalls[FINISHED]),
                _reasons(use.stalls),
            )
        )
    return _table(rows, "<>>>>><")


def _reasons(stalls: dict[str, float]) -> str:
    waits = sorted(((time, reason) for reason, time in stalls.items() if reason != FINISHED), reverse=True)
    return ", ".join(f"{reason} {_us(time)}" for time, reason in waits[:_REASONS])


def _traffic(timeline: Timeline) -> str:
    rows = [("transfer", "tensor", "bytes")]
    rows += [(traffic.direction, traffic.tensor, str(traffic.nbytes)) for traffic in timeline.traffic]
    return _table(rows, "<<>")


def _path(timeline: Timeline) -> str:
    """Where the time of the critical path went, by source line."""
    spent: dict[str, float] = defaultdict(float)
    for step in timeline.critical_path:
        span = timeline.spans[step.record]
        what = span.flight.transfer.direction if span.flight is not None else span.record.opcode
        spent[f"{what} ({span.engine}) at {_place(span.record)}"] += step.end - step.begin
    rows = [("critical path", "us", "%")]
    for what, time in sorted(spent.items(), key=lambda item: -item[1])[:_PATH_LINES]:
        rows.append((what, _us(time), f"{time / timeline.total:.0%}"))
    return _table(rows, "<>>")


def _place(record: Record) -> str:
    source = record.source
    return f"{os.path.basename(source.file)}:{source.line} {source.function}"


def _table(rows: Sequence[tuple[str, ...]], sides: str) -> str:
    """Columns aligned; ``sides`` has ``<`` or ``>`` for each."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    )
