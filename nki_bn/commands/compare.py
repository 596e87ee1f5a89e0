# SPDX-License-Identifier: Apache-2.0
"""``nki-bn compare``: which cases of a sweep got slower.

Exit code 0: none. 1: at least one, or one that had a time fails now. 2: wrong use, as modelled against measured rows.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from nki_bn.bench.rows import read_records


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("old", type=Path, metavar="OLD.jsonl", help="rows of nki-bn bench, before")
    parser.add_argument("new", type=Path, metavar="NEW.jsonl", help="and after")
    parser.add_argument("--threshold", default="3%", metavar="PERCENT", help="what a time may grow by (3%%)")
    parser.add_argument("--all", action="store_true", help="show the cases that did not change too")


def run(args: argparse.Namespace) -> int:
    """Compare and print; the exit code."""
    from nki_bn.bench.compare import compare, threshold_of

    try:
        threshold = threshold_of(args.threshold)
        comparison = compare(read_records(args.old), read_records(args.new), threshold)
    except ValueError as error:
        args.error(str(error))
    print(comparison.text(args.all))
    return 1 if comparison.regressed else 0
