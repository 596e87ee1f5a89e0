# SPDX-License-Identifier: Apache-2.0
"""Two files of records: which cases got slower."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from nki_bn.bench.record import Case, Record
from nki_bn.bench.rows import timing_of
from nki_bn.bench.series import contender_of, mean
from nki_bn.bench.table import Table

SLOWER, FASTER, SAME, BROKEN, MENDED, STILL_BROKEN = "slower", "faster", "same", "broken", "mended", "still broken"
_REGRESSIONS = (SLOWER, BROKEN)
_HEADER = ("model", "layer", "op", "dtype", "strategy", "shape", "lnc", "old us", "new us", "change", "verdict")
_LEFT = 5
_BESIDES: dict[str, Callable[[Record], str]] = {
    "version": lambda record: record.version,
    "method": lambda record: record.method,
    "hardware parameters": lambda record: record.environment.get("hardware", "unknown"),
}


@dataclass(frozen=True)
class Change:
    """A case in both files."""

    old: Record
    new: Record
    verdict: str

    @property
    def ratio(self) -> float | None:
        """New time over old time, if there are both."""
        return self.new.time_us / self.old.time_us if self.old.ok and self.new.ok else None


@dataclass(frozen=True)
class Comparison:
    """The cases in both files, and the numbers of those in only one."""

    changes: tuple[Change, ...]
    only_old: int
    only_new: int
    notes: tuple[str, ...]

    @property
    def regressed(self) -> bool:
        """Whether a case got slower than the threshold allows, or fails that did not."""
        return any(change.verdict in _REGRESSIONS for change in self.changes)

    def text(self, everything: bool = False) -> str:
        """The cases that changed (or all), the counts, and the geometric mean of new over old."""
        shown = [change for change in self.changes if everything or change.verdict != SAME]
        table = [Table(_HEADER, [_cells(change) for change in shown], _LEFT).text()] if shown else []
        counts = Counter(change.verdict for change in self.changes)
        lines = [", ".join(f"{number} {verdict}" for verdict, number in sorted(counts.items()))]
        if self.only_old or self.only_new:
            lines.append(f"not compared: {self.only_old} only in the old file, {self.only_new} only in the new file")
        ratio = mean([change.ratio for change in self.changes if change.ratio is not None])
        lines += [] if ratio is None else [f"new over old, geometric mean: {ratio:.3f}"]
        return "\n".join([*table, *lines, *self.notes])


def compare(old: Sequence[Record], new: Sequence[Record], threshold: float) -> Comparison:
    """Compare the records of two files; a time may grow by ``threshold`` (a share).

    Raises:
        ValueError: they are not all modelled or all measured, or no case is in both.
    """
    timing_of([*old, *new], "the comparison of the two files")
    before, after = ({_identity(record): record for record in records} for records in (old, new))
    both = [key for key in before if key in after]
    if not both:
        raise ValueError("no case is in both files; accepted: files of sweeps that overlap")
    changes = tuple(Change(before[key], after[key], _verdict(before[key], after[key], threshold)) for key in both)
    return Comparison(changes, len(before) - len(both), len(after) - len(both), tuple(_notes(old, new)))


def threshold_of(text: str) -> float:
    """The share that a percentage like "3%" says.

    Raises:
        ValueError: it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no threshold; accepted: a percentage from 0% up, as 3%")
    return float(found[1]) / 100


def _identity(record: Record) -> Case:
    """The case without what does not change its time."""
    return replace(record.case, count=1)


def _verdict(old: Record, new: Record, threshold: float) -> str:
    if not (old.ok and new.ok):
        return BROKEN if old.ok else MENDED if new.ok else STILL_BROKEN
    if new.time_us > old.time_us * (1 + threshold):
        return SLOWER
    return FASTER if old.time_us > new.time_us * (1 + threshold) else SAME


def _cells(change: Change) -> tuple[str, ...]:
    case, ratio = change.new, change.ratio
    op = case.op if case.relu == "none" else f"{case.op} relu {case.relu}"
    place = (case.model, case.layer, op, case.dtype, contender_of(case), str(list(case.shape)), str(case.lnc))
    times = tuple(f"{record.time_us:.1f}" if record.ok else "failed" for record in (change.old, change.new))
    return *place, *times, "-" if ratio is None else f"{100 * (ratio - 1):+.1f} %", change.verdict


def _notes(old: Sequence[Record], new: Sequence[Record]) -> list[str]:
    """What else differs between the files."""
    notes = []
    for name, figure in _BESIDES.items():
        before, after = (", ".join(sorted({figure(record) for record in records})) for records in (old, new))
        if before != after:
            notes.append(f"note: {name} differs: {before} -> {after}")
    return notes
