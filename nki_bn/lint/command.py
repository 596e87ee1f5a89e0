# SPDX-License-Identifier: Apache-2.0
"""The ``lint`` command: its arguments and its run."""

from __future__ import annotations

import argparse

from nki_bn.lint.report import explain, run_lint
from nki_bn.lint.rule import VERSIONS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``nki-bn lint`` to a parser."""
    parser.add_argument("paths", nargs="*", metavar="PATH", help="kernel source file to check, or folder of them")
    parser.add_argument("--nki", choices=(*VERSIONS, "both"), default="both", help="NKI version (default: both)")
    parser.add_argument("--explain", metavar="CODE", help="say what a code means instead, such as NKI201")
    parser.add_argument("--json", action="store_true", help="print a JSON list of findings")


def run(args: argparse.Namespace) -> int:
    """Lint as the parsed arguments say and return the exit code, see :func:`run_lint` and :func:`explain`."""
    if args.explain is not None:
        return explain(args.explain)
    versions = VERSIONS if args.nki == "both" else (args.nki,)
    return run_lint(args.paths, versions, args.json)
