# SPDX-License-Identifier: Apache-2.0
"""A timeline as a static SVG: a row per engine and DMA queue, time to the right, a colour per kind of work."""

from __future__ import annotations

import html
from dataclasses import dataclass

from nki_bn.simulator.timing.timeline import Timeline
from nki_bn.simulator.timing.tracks import TABLE_LOAD, Bar, Track, tracks_of

_NS_PER_US = 1000.0
_WIDTH, _LEFT, _RIGHT, _TOP = 1200, 150, 20, 52
_ROW, _GAP, _LEGEND_ROW, _LEGEND_COLUMN = 22, 6, 18, 190
# Pixels: narrower gaps between bars of one colour are closed, so that long runs stay small files.
_CLOSE = 0.4
_TICKS = 10
_STEPS = (1, 2, 5)

# Distinguishable in print and for the colour-blind; the first are those of transfers.
_FIXED = {
    "load": "#0072b2",
    "store": "#d55e00",
    "hbm copy": "#56b4e9",
    "sbuf copy": "#999999",
    "trigger load": "#9ecae1",
    "trigger store": "#fdbe85",
    "trigger hbm copy": "#c6dbef",
    "trigger sbuf copy": "#d9d9d9",
    "sendrecv": "#000000",
    "core_barrier": "#444444",
    TABLE_LOAD: "#b30000",
}
_PALETTE = (
    "#009e73",
    "#cc79a7",
    "#e6ab02",
    "#6a3d9a",
    "#b15928",
    "#a6d854",
    "#e7298a",
    "#bcbd22",
    "#fb8072",
    "#7570b3",
    "#1f3b2d",
    "#d9c29c",
)


def picture(timeline: Timeline, title: str = "") -> str:
    """The SVG text. The critical path is the dark line under the bars it runs through."""
    tracks = tracks_of(timeline)
    chart = _Chart(timeline, tracks, _colours(tracks))
    return chart.draw(title or f"timeline on {timeline.target}")


def _colours(tracks: list[Track]) -> dict[str, str]:
    labels = sorted({bar.label for track in tracks for bar in track.bars})
    others = [label for label in labels if label not in _FIXED]
    chosen = {label: _PALETTE[at % len(_PALETTE)] for at, label in enumerate(others)}
    return {label: _FIXED.get(label) or chosen[label] for label in labels}


@dataclass(frozen=True)
class _Chart:
    timeline: Timeline
    tracks: list[Track]
    colours: dict[str, str]

    @property
    def _scale(self) -> float:
        """Pixels per ns."""
        return (_WIDTH - _LEFT - _RIGHT) / max(self.timeline.total, 1.0)

    @property
    def _bottom(self) -> float:
        return _TOP + len(self.tracks) * (_ROW + _GAP)

    def draw(self, title: str) -> str:
        legend = self._legend()
        height = self._bottom + 34 + _LEGEND_ROW * (1 + (len(self.colours) - 1) // self._legend_columns)
        total = f"{self.timeline.total / _NS_PER_US:.1f} us"
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height:g}" '
            f'viewBox="0 0 {_WIDTH} {height:g}" font-family="sans-serif" font-size="12">'
        )
        parts = [
            head,
            f'<rect width="{_WIDTH}" height="{height:g}" fill="white"/>',
            f'<text x="{_LEFT}" y="18" font-size="14">{html.escape(title)}: {total} (modelled)</text>',
            *self._axis(),
            *self._rows(),
            *self._critical(),
            *legend,
            "</svg>",
        ]
        return "\n".join(parts) + "\n"

    def _x(self, time: float) -> float:
        return _LEFT + time * self._scale

    def _y(self, row: int) -> float:
        return _TOP + row * (_ROW + _GAP)

    def _axis(self) -> list[str]:
        parts = []
        step = _tick(self.timeline.total / _NS_PER_US)
        ticks = int(self.timeline.total / _NS_PER_US / step)
        for number in range(ticks + 1):
            x = self._x(number * step * _NS_PER_US)
            parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 6}" y2="{self._bottom:g}" stroke="#ddd"/>')
            parts.append(f'<text x="{x:.1f}" y="{_TOP - 12}" text-anchor="middle" fill="#555">{number * step:g}</text>')
        parts.append(f'<text x="{_LEFT - 8}" y="{_TOP - 12}" text-anchor="end" fill="#555">us</text>')
        return parts

    def _rows(self) -> list[str]:
        parts = []
        for row, track in enumerate(self.tracks):
            y = self._y(row)
            parts.append(
                f'<text x="{_LEFT - 8}" y="{y + _ROW * 0.7:.1f}" text-anchor="end">core {track.core} '
                f"{html.escape(track.name)}</text>"
            )
            parts.append(
                f'<rect x="{_LEFT}" y="{y:g}" width="{_WIDTH - _LEFT - _RIGHT}" height="{_ROW}" fill="#f5f5f5"/>'
            )
            parts += [
                f'<rect x="{self._x(begin):.2f}" y="{y:g}" width="{max((end - begin) * self._scale, 0.2):.2f}" '
                f'height="{_ROW}" fill="{self.colours[label]}"/>'
                for label, begin, end in _merged(track.bars, _CLOSE / self._scale)
            ]
        return parts

    def _critical(self) -> list[str]:
        """A line under each bar of the critical path, for as long as the path stays with it."""
        rows = {bar.span.record.index: row for row, track in enumerate(self.tracks) for bar in track.bars}
        return [
            f'<line x1="{self._x(step.begin):.2f}" x2="{self._x(step.end):.2f}" y1="{y:g}" y2="{y:g}" '
            f'stroke="#222" stroke-width="2"/>'
            for step in self.timeline.critical_path
            if step.end > step.begin
            for y in [self._y(rows[step.record]) + _ROW + _GAP / 2]
        ]

    @property
    def _legend_columns(self) -> int:
        return (_WIDTH - _LEFT) // _LEGEND_COLUMN

    def _legend(self) -> list[str]:
        parts = []
        for at, (label, colour) in enumerate(self.colours.items()):
            row, column = divmod(at, self._legend_columns)
            x, y = _LEFT + column * _LEGEND_COLUMN, self._bottom + 22 + row * _LEGEND_ROW
            parts.append(f'<rect x="{x}" y="{y - 10:g}" width="12" height="12" fill="{colour}"/>')
            parts.append(f'<text x="{x + 18}" y="{y:g}">{html.escape(label)}</text>')
        return parts


def _tick(total: float) -> float:
    """A round distance of at most ``_TICKS`` marks."""
    power = 1e-3
    while True:
        for step in _STEPS:
            if total <= step * power * _TICKS:
                return step * power
        power *= 10


def _merged(bars: tuple[Bar, ...], close: float) -> list[tuple[str, float, float]]:
    """Bars, neighbours of one label with a gap below ``close`` ns as one."""
    merged: list[tuple[str, float, float]] = []
    for bar in bars:
        if merged and merged[-1][0] == bar.label and bar.begin - merged[-1][2] < close:
            merged[-1] = bar.label, merged[-1][1], bar.end
        else:
            merged.append((bar.label, bar.begin, bar.end))
    return merged
