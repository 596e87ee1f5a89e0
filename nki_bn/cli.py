# SPDX-License-Identifier: Apache-2.0
"""The command line: ``nki-bn COMMAND ...``."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from nki_bn import __version__, installation

COMMANDS = {
    "doctor": ("nki_bn.commands.doctor", "what is installed, and whether it works"),
    "verify": ("nki_bn.commands.verify", "compare a kernel with the float64 reference"),
    "plan": ("nki_bn.commands.plan", "which plan a problem gets, what it would take, and why"),
    "trace": ("nki_bn.commands.trace", "model when every instruction of a kernel runs"),
    "bench": ("nki_bn.commands.bench", "check and time the kernels on the layers of models"),
    "report": ("nki_bn.commands.report", "the rows of a benchmark as Markdown, CSV or HTML"),
    "compare": ("nki_bn.commands.compare", "which cases of a benchmark got slower"),
    "lint": ("nki_bn.lint.command", "check kernels against the documented NKI subset"),
}


# As shells say it of a process that an interrupt has ended, or that the reader of its output has left.
_INTERRUPTED, _READER_GONE = 130, 141

_OPTION, _NEGATIVE = re.compile(r"--[a-z-]+"), re.compile(r"-\d")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Leave with exit code 2 and one line; what would break it or steer a terminal is escaped."""
        line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in message)
        self.exit(2, f"{self.prog}: error: {line}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit code.

    It is 0 for success, 2 for wrong use and where what a command prints cannot be written, 130 when it is interrupted,
    and 141, without a word, when nobody reads on.
    """
    if sys.stdout is None:
        print("nki-bn: error: standard output is closed", file=sys.stderr)
        return 2
    try:
        try:
            return _run(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        return _READER_GONE
    except OSError as error:
        # Commands answer themselves for files that they read.
        print(f"nki-bn: error: output cannot be written: {error}", file=sys.stderr)
        _discard_output()
        return 2
    except KeyboardInterrupt:
        print("nki-bn: interrupted", file=sys.stderr)
        return _INTERRUPTED


def _run(argv: Sequence[str]) -> int:
    parser = _Parser(prog="nki-bn", description="Batch-norm kernels for AWS Trainium and their simulator.")
    parser.add_argument("--version", action="version", version=f"nki-bn {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        command = importlib.import_module(module)
        subparser = commands.add_parser(name, help=summary, description=summary)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run, error=subparser.error)
    args = parser.parse_args(_with_negative_values(argv))
    if installation.kind == "refused" and args.command != "doctor":
        args.error(installation.reason)
    code: int = args.run(args)
    return code


def _with_negative_values(argv: Sequence[str]) -> list[str]:
    """``--option -1,2`` as ``--option=-1,2``: argparse takes only what is one number for a value."""
    joined: list[str] = []
    for argument in argv:
        if _NEGATIVE.match(argument) and joined and _OPTION.fullmatch(joined[-1]):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def _discard_output() -> None:
    """Python would complain once more when it closes the stream."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    raise SystemExit(main())
