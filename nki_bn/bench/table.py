# SPDX-License-Identifier: Apache-2.0
"""Tables of strings, as aligned text and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A header and rows; the first ``left`` columns and the last are words, to the left, the others figures."""

    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    left: int = 1

    def text(self) -> str:
        """Aligned, one line per row."""
        lines = [self.header, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(align(line, widths, self.left) for line in lines)

    def markdown(self) -> str:
        """As Markdown."""
        last = len(self.header) - 1
        rule = ["---" if self._is_word(at, last) else "---:" for at in range(last + 1)]
        lines = [self.header, rule, *self.rows]
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)

    def _is_word(self, at: int, last: int) -> bool:
        return is_word(at, last, self.left)


def is_word(at: int, last: int, left: int) -> bool:
    """Whether column ``at`` of 0 to ``last`` has words rather than figures."""
    return at < left or at == last


def align(cells: Sequence[str], widths: Sequence[int], left: int) -> str:
    """One line: words to the left, figures to the right."""
    last = len(cells) - 1
    placed = [
        cell.ljust(width) if is_word(at, last, left) else cell.rjust(width)
        for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(placed).rstrip()
