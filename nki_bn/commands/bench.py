# SPDX-License-Identifier: Apache-2.0
"""``nki-bn bench``: check and time the kernels on the layers of models.

Exit code 0: every case has a time. 1: a case failed. 2: wrong use.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nki_bn.bench.extra import require_extra
from nki_bn.bench.record import OPERATIONS
from nki_bn.commands import options
from nki_bn.hardware import TARGETS
from nki_bn.problem import DTYPES, PRECISIONS, RELU_MODES, SYNC_MODES, resolve_lnc

if TYPE_CHECKING:
    from nki_bn.bench.record import Case, Record
    from nki_bn.bench.rows import RowFile

# Beyond any installation, and what is modelled within seconds per layer.
_MOST_REPLICAS = 65536
# Options that a sweep file has its own of: the fields of a grid that they are.
_GRID = {
    "op": "ops",
    "dtype": "dtypes",
    "batch": "batches",
    "lnc": "lnc",
    "strategy": "strategies",
    "fuse_relu": "relu",
    "precision": "precision",
    "target": "target",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    add(
        "names",
        nargs="+",
        metavar="MODEL_OR_TOML",
        help="models and sweeps (smoke, full) of the package, shape files, sweep files",
    )
    add("--op", type=_names(OPERATIONS), metavar="LIST", help="of bwd, fwd (training) and eval; with commas (bwd)")
    add("--dtype", type=_names(DTYPES), metavar="LIST", help=f"of {', '.join(DTYPES)} (bfloat16)")
    add("--batch", type=_numbers, metavar="LIST", help="per logical core (32)")
    add("--lnc", type=_numbers, metavar="LIST", help="physical cores (all of a logical core)")
    add("--strategy", type=_names(), metavar="LIST", help="planned is the planner's own choice (planned)")
    add("--fuse-relu", type=_names(RELU_MODES), metavar="LIST", help=f"of {', '.join(RELU_MODES)} (none)")
    add("--precision", type=_names(PRECISIONS), metavar="LIST", help="of high and, for bwd, fast (high)")
    add("--target", choices=TARGETS, help="(trn2)")
    add(
        "--dry",
        action="store_true",
        help="check outputs once per code path at a small shape; else on every layer, at its own shape",
    )
    add("--replicas", type=_replicas, metavar="R", help="what synchronising over R replicas costs, in place of a sweep")
    add("--sync-mode", choices=SYNC_MODES, help="with --replicas (two_round)")
    add("-o", "--output", type=Path, metavar="OUT.jsonl", help="write one line of JSON per case")
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument("--force", action="store_true", help="overwrite the output")
    existing.add_argument("--resume", action="store_true", help="keep what is good in the output, run the rest")


def run(args: argparse.Namespace) -> int:
    """Run the sweep, print its lines and its summary; the exit code."""
    from nki_bn.bench import checks, sweep, timers

    if args.replicas is not None or args.sync_mode is not None:
        return _synchronised(args)
    try:
        require_extra("rich")
        timer, cases = timers.timer_here(), _cases(args)
        file = _output(args, timer.timing)
    except (TypeError, ValueError) as error:
        args.error(str(error))
    from nki_bn.bench.console import SweepConsole

    wanted = set(cases)
    kept = [record for record in file.kept if record.case in wanted] if file else []
    console = SweepConsole(cases, kept)

    def done(record: Record) -> None:
        if file is not None:
            file.write(record)
        console.show(record)

    left = wanted - {record.case for record in kept}
    with file or contextlib.nullcontext(), console:
        checker = checks.Checker(own_shape=not args.dry)
        sweep.sweep([case for case in cases if case in left], timer, checker, done)
    console.summarise()
    return 1 if console.failed else 0


def _synchronised(args: argparse.Namespace) -> int:
    """Print what synchronised steps cost."""
    from nki_bn.bench import synchronised

    try:
        if args.replicas is None:
            raise ValueError("--sync-mode is about replicas; accepted with --replicas R")
        for option in ("output", "op", "strategy", "precision", "force", "resume", "dry"):
            if getattr(args, option):
                raise ValueError(f"--{option} is about a sweep; accepted without --replicas")
        print(synchronised.report(_cases(args), args.replicas, args.sync_mode or SYNC_MODES[0]))
    except (TypeError, ValueError) as error:
        args.error(str(error))
    return 0


def _cases(args: argparse.Namespace) -> list[Case]:
    """All cases that are asked for, each with a problem."""
    from nki_bn.bench import grids
    from nki_bn.bench.roofline import roofline_us
    from nki_bn.bench.strategies import problem_of
    from nki_bn.bench.workloads import check_name

    sweeps = [name for name in args.names if grids.is_sweep(name)]
    models = tuple(name for name in args.names if name not in sweeps)
    for name in models:
        check_name(name, [f"the sweeps {' and '.join(grids.sweep_names())}"])
    given = {field: getattr(args, option) for option, field in _GRID.items() if getattr(args, option) is not None}
    if sweeps and given:
        option = next(option for option, field in _GRID.items() if field in given).replace("_", "-")
        raise ValueError(f"--{option} cannot go with the sweep {sweeps[0]}, which has its own; accepted with models")
    found = [grid for name in sweeps for grid in grids.load_sweep(name)]
    if models:
        cores = {"lnc": (resolve_lnc(None, given.get("target", grids.Grid.target)),)}
        found.append(grids.Grid(models, **(cores | given)))
    cases = grids.all_cases(found)
    for case in cases:
        roofline_us(problem_of(case))
    return cases


def _output(args: argparse.Namespace, timing: str) -> RowFile | None:
    from nki_bn.bench.rows import RowFile

    if args.output is None:
        if args.force or args.resume:
            raise ValueError(f"--{'force' if args.force else 'resume'} is about the output; accepted with -o OUT.jsonl")
        return None
    return RowFile(args.output, timing, args.force, args.resume)


def _names(accepted: Collection[str] | None = None) -> Callable[[str], tuple[str, ...]]:
    """Parses a list of names, of those ``accepted``."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        for name in names:
            if not name or (accepted is not None and name not in accepted):
                known = "names" if accepted is None else ", ".join(accepted)
                raise argparse.ArgumentTypeError(f"{name!r} in {text!r} is unknown; accepted: {known}, with commas")
        return names

    return parse


def _replicas(text: str) -> int:
    if not options.is_number(text) or not 2 <= int(text) <= _MOST_REPLICAS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of replicas; accepted: from 2 to {_MOST_REPLICAS}")
    return int(text)


def _numbers(text: str) -> Any:
    numbers = text.split(",")
    if not all(options.is_number(number) and int(number) > 0 for number in numbers):
        accepted = f"numbers from 1 up, of at most {options.MOST_DIGITS} digits, with commas"
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers; accepted: {accepted}")
    return tuple(map(int, numbers))
