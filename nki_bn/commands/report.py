# SPDX-License-Identifier: Apache-2.0
"""``nki-bn report``: the rows of a sweep as Markdown, CSV, or an HTML page with figures.

Exit code 0: done. 2: wrong use.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nki_bn.bench.extra import require_extra
from nki_bn.bench.output import output_path, write_whole
from nki_bn.bench.rows import read_records, refuse_existing

if TYPE_CHECKING:
    from nki_bn.bench.record import Record

Writer = Callable[["Sequence[Record]", str | None], str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("file", type=Path, metavar="OUT.jsonl", help="rows of nki-bn bench")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        action="append",
        default=[],
        metavar="REPORT",
        help="write .md, .csv or .html; may be repeated (Markdown on standard output)",
    )
    parser.add_argument(
        "--baseline", metavar="STRATEGY", help="what speed-ups refer to (staged or two_read, else the first)"
    )
    parser.add_argument("--force", action="store_true", help="overwrite the output")


def run(args: argparse.Namespace) -> int:
    """Write the reports; the exit code."""
    try:
        writers = [_writer(path, args.force) for path in args.output]
        records = read_records(args.file)
        texts = [write(records, args.baseline) for write in writers or [_markdown]]
        for path, text in zip(args.output, texts, strict=bool(args.output)):
            write_whole(path, text)
    except (OSError, ValueError) as error:
        args.error(str(error))
    if not args.output:
        print(texts[0], end="")
    return 0


def _writer(path: Path, force: bool) -> Writer:
    """What makes the text of a report; refuses what cannot be written before any report is."""
    if path.suffix not in _WRITERS:
        raise ValueError(f"{path} is of no kind that can be written; accepted: {', '.join(_WRITERS)}")
    output_path(path)
    if not force:
        refuse_existing(path, "--force to overwrite it")
    return _WRITERS[path.suffix]


def _markdown(records: Sequence[Record], baseline: str | None) -> str:
    from nki_bn.bench.report import markdown

    return markdown(records, baseline)


def _csv(records: Sequence[Record], baseline: str | None) -> str:
    from nki_bn.bench.report import as_csv

    return as_csv(records)


def _html(records: Sequence[Record], baseline: str | None) -> str:
    require_extra("matplotlib")
    from nki_bn.bench.html import page

    return page(records, baseline)


_WRITERS: dict[str, Writer] = {".md": _markdown, ".csv": _csv, ".html": _html}
