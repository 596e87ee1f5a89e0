# SPDX-License-Identifier: Apache-2.0
"""Records as one HTML page that needs nothing else: a table and a figure per series."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape

from nki_bn.bench.figures import series_svg
from nki_bn.bench.record import Record
from nki_bn.bench.report import LEGEND, caveat, layer_table, summary_table
from nki_bn.bench.series import Series, series_of
from nki_bn.bench.table import Table, is_word

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; max-width: 1280px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2.5em; border-top: 1px solid #ccc; padding-top: 1em; }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums; }
th, td { padding: 0.2em 0.8em; border-bottom: 1px solid #e4e4e4; text-align: right; white-space: nowrap; }
th { background: #f4f4f4; } .word { text-align: left; }
img { width: 100%; height: auto; }
nav ul { columns: 28em; } nav li { margin: 0.15em 0; }
.kind { background: #fff3cd; padding: 0.5em 0.8em; }
"""


def page(records: Sequence[Record], baseline: str | None = None) -> str:
    """The page.

    Raises:
        ValueError: a series does not have the baseline.
    """
    found = series_of(records)
    links = [f'<li><a href="#s{at}">{escape(str(series.conditions))}</a></li>' for at, series in enumerate(found)]
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8"><title>Batch-norm benchmark</title>',
        f"<style>{_STYLE}</style></head>",
        "<body><h1>Batch-norm benchmark</h1>",
        f'<p class="kind">{escape(caveat(records))}</p><p>{escape(LEGEND)}</p>',
        f"<nav><ul>{''.join(links)}</ul></nav>" if len(found) > 1 else "",
        *(_section(at, series, baseline) for at, series in enumerate(found)),
        "</body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _section(at: int, series: Series, baseline: str | None) -> str:
    """A series."""
    title = escape(str(series.conditions))
    image = base64.b64encode(series_svg(series, series.baseline(baseline)).encode()).decode()
    return "\n".join(
        [
            f'<h2 id="s{at}">{title}</h2>',
            _table(summary_table(series, baseline)),
            f'<img alt="Time, bandwidth, speed-up and traffic per layer of {title}" '
            f'src="data:image/svg+xml;base64,{image}">',
            f"<details><summary>figures per layer</summary>{_table(layer_table(series))}</details>",
        ]
    )


def _table(table: Table) -> str:
    last = len(table.header) - 1

    def line(cells: Sequence[str], tag: str) -> str:
        made = [
            f"<{tag}{' class=word' if is_word(at, last, table.left) else ''}>{escape(cell)}</{tag}>"
            for at, cell in enumerate(cells)
        ]
        return f"<tr>{''.join(made)}</tr>"

    rows = "".join(line(row, "td") for row in table.rows)
    return f"<table><thead>{line(table.header, 'th')}</thead><tbody>{rows}</tbody></table>"
