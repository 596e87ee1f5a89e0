# SPDX-License-Identifier: Apache-2.0
"""The figure of a series, as SVG: per layer the time against the roofline, the bandwidth, the speed-up, the traffic."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from nki_bn.bench.record import Record
from nki_bn.bench.series import Series, bandwidth_share_of, traffic_of

# Distinguishable with any kind of colour blindness (Okabe and Ito).
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
_ROOFLINE = "#333333"
_WIDTH = 13.0
_ROW = 0.17
_GAP = 0.14
_FRAME = 1.5
# Of the height of a layer, what its bars take.
_BARS = 0.76
# Times that differ by less get two more labels per decade.
_DECADES = 1000
# Same input, same bytes: ids in the SVG do not change from run to run.
_STYLE: Any = {"svg.hashsalt": "nki_bn", "svg.fonttype": "path", "font.size": 9}


def series_svg(series: Series, baseline: str) -> str:
    """Four panels beside each other, one row per layer, one colour per contender."""
    layers, names = series.layers, list(series.contenders)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, _FRAME + len(layers) * (_ROW * len(names) + _GAP)), layout="constrained")
        panels = figure.subplots(1, 4, sharey=True, width_ratios=(1.4, 1, 1, 1))
        _times(panels[0], series)
        _bars(panels[1], series, bandwidth_share_of)
        _label(panels[1], "share of peak bandwidth", "GB/s over the DMA limit")
        panels[1].set_xlim(0, max(1, panels[1].get_xlim()[1]))
        panels[1].xaxis.set_major_formatter(PercentFormatter(1))
        _speed_ups(panels[2], series, baseline)
        _bars(panels[3], series, traffic_of)
        _label(panels[3], "HBM traffic", "bytes moved over the least possible")
        _mark(panels[3], 1.0)
        _name_layers(panels[0], series)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=len(labels), frameon=False)
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None})
    return written.getvalue()


def _times(axes: Axes, series: Series) -> None:
    """Time and roofline on a logarithmic axis, a line between them."""
    roofline = [next(r for r in series.records if r.layer == layer).roofline_us for layer in series.layers]
    tops, bottoms = ([row + half for row in range(len(roofline))] for half in (-0.45, 0.45))
    axes.vlines(roofline, tops, bottoms, _ROOFLINE, linewidth=2, label="roofline")
    for at, (name, records) in enumerate(series.contenders.items()):
        rows = [row for row, layer in enumerate(series.layers) if layer in records and records[layer].ok]
        timed = [records[series.layers[row]] for row in rows]
        heights = [row + _offset(at, series) for row in rows]
        times = [record.time_us for record in timed]
        axes.hlines(heights, [record.roofline_us for record in timed], times, _colour(at), linewidth=1)
        axes.plot(times, heights, "o", color=_colour(at), markersize=5, label=name)
    axes.set_xscale("log")
    least, most = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if most < _DECADES * least else (1,)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    _label(axes, "time", f"microseconds, {series.conditions.timing}")


def _speed_ups(axes: Axes, series: Series, baseline: str) -> None:
    _label(axes, "speed-up", f"time of {baseline} over the time")
    if len(series.contenders) == 1:
        words = "one strategy:\nnothing to compare with"
        axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center")
        axes.set_xticks([])
        return
    for at, name in enumerate(series.contenders):
        if name != baseline:
            found = series.speed_ups(name, baseline)
            _draw(axes, series, at, [found.get(layer) for layer in series.layers])
    _mark(axes, 1.0)


def _bars(axes: Axes, series: Series, figure: Callable[[Record], float | None]) -> None:
    for at, records in enumerate(series.contenders.values()):
        values = [figure(records[layer]) if layer in records and records[layer].ok else None for layer in series.layers]
        _draw(axes, series, at, values)


def _draw(axes: Axes, series: Series, at: int, values: Sequence[float | None]) -> None:
    """Bars of contender number ``at``, one per layer."""
    found = [(row + _offset(at, series), value) for row, value in enumerate(values) if value is not None]
    height = _BARS / len(series.contenders)
    axes.barh([row for row, _ in found], [value for _, value in found], height, color=_colour(at))


def _offset(at: int, series: Series) -> float:
    """Where a contender's mark lies in the row of a layer."""
    count = len(series.contenders)
    return (at - (count - 1) / 2) * _BARS / count


def _name_layers(axes: Axes, series: Series) -> None:
    counts = {record.layer: record.count for record in series.records}
    axes.set_yticks(range(len(series.layers)), [f"{layer}  ({counts[layer]}\u00d7)" for layer in series.layers])
    axes.set_ylim(len(series.layers) - 0.5, -0.5)


def _label(axes: Any, title: str, unit: str) -> None:
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel(unit)
    axes.grid(axis="x", color="#dddddd")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _mark(axes: Axes, value: float) -> None:
    axes.axvline(value, color=_ROOFLINE, linewidth=1)


def _colour(at: int) -> str:
    return _COLOURS[at % len(_COLOURS)]
