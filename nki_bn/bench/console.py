# SPDX-License-Identifier: Apache-2.0
"""A sweep on the terminal: a progress bar, one aligned line per case, and the summary."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from nki_bn.bench.record import Case, Record
from nki_bn.bench.report import LAYER_HEADER, LAYER_LEFT, caveat, layer_cells, summary_table
from nki_bn.bench.series import Conditions, conditions_of, contender_of, series_of
from nki_bn.bench.table import align

# Of the columns from "time us" on.
_FIGURE_WIDTHS = (10, 11, 6, 5, 9, 8)


class _Console(rich.console.Console):
    def on_broken_pipe(self) -> None:
        """Leave it to the command line, as every output, that nobody reads on."""
        raise BrokenPipeError


class SweepConsole:
    """Shows the records of a sweep over ``cases``; a context manager, inside which the bar is shown.

    ``kept`` are records of these cases that a file had already.
    """

    def __init__(self, cases: Sequence[Case], kept: Sequence[Record] = ()) -> None:
        self._console = _Console(highlight=False, markup=False, soft_wrap=True)
        self._records = list(kept)
        self._conditions: Conditions | None = None
        words = [[LAYER_HEADER[0], LAYER_HEADER[1], LAYER_HEADER[2]]]
        words += [[case.layer, contender_of(case), str(case.count)] for case in cases]
        self._widths = (*(max(map(len, column)) for column in zip(*words, strict=True)), *_FIGURE_WIDTHS)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        hidden = not self._console.is_terminal
        self._progress = Progress(*columns, console=self._console, disable=hidden, transient=True)
        self._task = self._progress.add_task("", total=len(cases), completed=len(kept))
        if kept:
            self._print(f"{len(kept)} of {len(cases)} cases are in the output already")

    @property
    def failed(self) -> int:
        """How many cases failed."""
        return sum(not record.ok for record in self._records)

    def __enter__(self) -> SweepConsole:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, record: Record) -> None:
        """Print the line of a case, under a title where a series begins."""
        self._records.append(record)
        conditions = conditions_of(record)
        if conditions != self._conditions:
            self._conditions = conditions
            self._print(f"\n{conditions}\n{align(LAYER_HEADER, self._widths, LAYER_LEFT)}")
        self._print(align(layer_cells(record), self._widths, LAYER_LEFT))
        self._progress.update(self._task, advance=1, description=record.model)

    def summarise(self) -> None:
        """Print counts, totals and geometric means per series, and why cases failed."""
        if not self._records:
            return
        for series in series_of(self._records):
            self._print(f"\n{series.conditions}\n{summary_table(series).text()}")
        for record in self._records:
            if not record.ok:
                place = f"{conditions_of(record)}, {record.layer}, {contender_of(record)}"
                self._print(f"\nfailed: {place}: {record.error}")
        number = len(self._records)
        self._print(f"\n{number} case{'s' * (number != 1)}, {self.failed} failed. {caveat(self._records)}")

    def _print(self, text: str) -> None:
        self._progress.console.print(text)
