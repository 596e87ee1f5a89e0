# SPDX-License-Identifier: Apache-2.0
"""The command line: ``nki-bn COMMAND ...``."""

from __future__ import annotations

import argparse
import importlib
import os
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


# As shells say it of a process that an interrupt has ended.
_INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Leave with exit code 2 and one line; what would break it or steer a terminal is escaped."""
        line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in message)
        self.exit(2, f"{self.prog}: error: {line}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit code, 0 for success, 2 for wrong use, and 130 when it is interrupted."""
    parser = _Parser(prog="nki-bn", description="Batch-norm kernels for AWS Trainium and their simulator.")
    parser.add_argument("--version", action="version", version=f"nki-bn {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        command = importlib.import_module(module)
        subparser = commands.add_parser(name, help=summary, description=summary)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run, error=subparser.error)
    args = parser.parse_args(argv)
    if installation.kind == "refused" and args.command != "doctor":
        args.error(installation.reason)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has gone, as with `| head`. Python would complain once more when it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("nki-bn: interrupted", file=sys.stderr)
        return _INTERRUPTED
    return code


if __name__ == "__main__":
    raise SystemExit(main())
