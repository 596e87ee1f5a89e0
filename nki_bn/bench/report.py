# SPDX-License-Identifier: Apache-2.0
"""Records as tables: lines on a terminal, Markdown, CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict

from nki_bn.bench.record import MODELLED, Record
from nki_bn.bench.series import Series, Summary, bandwidth_of, contender_of, series_of, summarise, traffic_of
from nki_bn.bench.table import Table

LAYER_HEADER = ("layer", "strategy", "count", "time us", "roofline us", "share", "GB/s", "bytes/min", "bound by")
LAYER_LEFT = 2
_SUMMARY_HEADER = (
    "strategy",
    "layers",
    "failed",
    "total us",
    "share",
    "mean share",
    "mean bytes/min",
    "speed-up",
    "mean speed-up",
    "against",
)
_ABSENT = "-"


def layer_cells(record: Record) -> tuple[str, ...]:
    """A record as a row under ``LAYER_HEADER``."""
    place = (record.layer, contender_of(record), str(record.count))
    if not record.ok:
        return *place, "failed", f"{record.roofline_us:.1f}", *(_ABSENT,) * 3, _first_line(record.error)
    share = percent(record.roofline_us / record.time_us)
    moved = (_number(bandwidth_of(record), ".0f"), _number(traffic_of(record), ".2f"))
    return *place, f"{record.time_us:.1f}", f"{record.roofline_us:.1f}", share, *moved, record.bound_by or _ABSENT


def layer_table(series: Series) -> Table:
    """The layers of a series."""
    return Table(LAYER_HEADER, [layer_cells(record) for record in series.records], LAYER_LEFT)


def summary_table(series: Series, baseline: str | None = None) -> Table:
    """Counts, totals and geometric means of a series, one row per contender; raises as ``Series.baseline``."""
    against = series.baseline(baseline)
    summaries = [summarise(series, contender, against) for contender in series.contenders]
    return Table(_SUMMARY_HEADER, [_summary_cells(summary, against) for summary in summaries])


def _summary_cells(summary: Summary, against: str) -> tuple[str, ...]:
    shares = (percent(summary.share), percent(summary.mean_share))
    speed = (_number(summary.total_speed_up, ".2f"), _number(summary.mean_speed_up, ".2f"))
    counts = (str(summary.ok), str(summary.failed), _number(summary.total_us or None, ".1f"))
    return summary.contender, *counts, *shares, _number(summary.mean_traffic, ".2f"), *speed, against


def caveat(records: Sequence[Record]) -> str:
    """Where the times come from, in a sentence; the records are of one kind."""
    methods = "; ".join(dict.fromkeys(record.method for record in records))
    if records[0].timing == MODELLED:
        return f"All times are modelled, none was measured on a device. Method: {methods}."
    return f"All times were measured on a device. Method: {methods}."


LEGEND = (
    "share: the least possible time (roofline: every byte that has to move, once, at the DMA limit) over the time. "
    "bytes/min: bytes moved over the least possible. count: batch norms of the model with this input. total: all batch "
    "norms of the model. mean: geometric mean over layers. speed-up: ratio of totals."
)


def markdown(records: Sequence[Record], baseline: str | None = None) -> str:
    """A report with the summary and the layers of each series.

    Raises:
        ValueError: a series does not have the baseline.
    """
    parts = ["# Batch-norm benchmark", caveat(records), LEGEND]
    for series in series_of(records):
        parts += [f"## {series.conditions}", summary_table(series, baseline).markdown(), layer_table(series).markdown()]
    return "\n\n".join(parts) + "\n"


def as_csv(records: Sequence[Record]) -> str:
    """One line per record, with the fields of the JSON; what is no number or word is JSON in a cell."""
    written = io.StringIO()
    rows = [{key: _csv_cell(value) for key, value in asdict(record).items()} for record in records]
    writer = csv.DictWriter(written, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return written.getvalue()


def _csv_cell(value: object) -> object:
    return json.dumps(value) if isinstance(value, dict | list | tuple) else value


def percent(share: float | None) -> str:
    """As 37 %; of None a dash."""
    return _ABSENT if share is None else f"{100 * share:.0f} %"


def _number(value: float | None, form: str) -> str:
    return _ABSENT if value is None else format(value, form)


def _first_line(text: str | None) -> str:
    return (text or "").partition("\n")[0]
