# SPDX-License-Identifier: Apache-2.0
"""``nki-bn trace``: model when every instruction of a kernel runs; report, Perfetto JSON and picture.

Exit code 0: done. 2: wrong use.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from nki_bn.bench.output import output_path, write_whole
from nki_bn.bench.rows import refuse_existing
from nki_bn.commands import options
from nki_bn.problem import DTYPES, BackwardProblem, ForwardProblem, Problem
from nki_bn.simulator import RunOptions, Shaped, SimulationResult
from nki_bn.simulator import run as simulate

if TYPE_CHECKING:
    from nki_bn.predict import Plan
    from nki_bn.simulator.timing import Timeline

# The one target with timing parameters.
TARGET = "trn2"
_PROBLEMS: dict[str, type[ForwardProblem] | type[BackwardProblem]] = {"bwd": BackwardProblem, "fwd": ForwardProblem}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--op", choices=list(_PROBLEMS), required=True, help="bwd: the backward; fwd: the forward")
    parser.add_argument("--shape", type=options.shape, required=True, help="B,C,... of x, rank 2 to 5")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32", help="of x (float32)")
    parser.add_argument("--lnc", type=options.cores, metavar="{1,2}", help="physical cores (all of a logical core)")
    relu = "a ReLU, its mask stored or recomputed"
    parser.add_argument("--fuse-relu", choices=["mask", "recompute"], default="none", help=relu)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.json", help="write a trace for ui.perfetto.dev")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw the timeline")
    parser.add_argument("--force", action="store_true", help="overwrite these files")


def run(args: argparse.Namespace) -> int:
    """Model and print; the exit code."""
    from nki_bn import planner
    from nki_bn.bench.roofline import minimum_bytes
    from nki_bn.simulator.timing import model, report

    try:
        problem = _PROBLEMS[args.op](args.shape, args.dtype, relu=args.fuse_relu, lnc=args.lnc, target=TARGET)
        _check_target("--output", args.output, ".json", args.force)
        _check_target("--picture", args.picture, ".svg", args.force)
        plan = planner.plan(problem)
    except (TypeError, ValueError) as error:
        args.error(str(error))
    result = _dry_run(problem, plan)
    timeline = model(result.trace, problem.target)
    title = f"{args.op} {list(problem.shape)} {problem.dtype}, relu {problem.relu}, lnc {problem.lnc}"
    print(f"{title}\n{report(timeline, minimum_bytes(problem))}\n\n{_memory(result)}")
    try:
        _write_files(args, timeline, title)
    except (OSError, ValueError) as error:
        args.error(str(error))
    return 0


def _check_target(option: str, path: Path | None, suffix: str, force: bool) -> None:
    """Refuse a file that cannot be written, before there is anything to write.

    Raises:
        ValueError: another kind of file; it exists, and ``force`` is not given; or see
            :func:`nki_bn.bench.output.output_path`.
    """
    if path is None:
        return
    if path.suffix != suffix:
        raise ValueError(f"{option} {path} is of no kind that can be written; accepted: {suffix}")
    try:
        output_path(path)
        if not force:
            refuse_existing(path, "--force to overwrite it")
    except ValueError as error:
        raise ValueError(f"{option} {error}") from error


def _dry_run(problem: Problem, plan: Plan) -> SimulationResult:
    """The kernel on shapes alone."""
    from nki_bn.bench.launches import launch_of

    launch = launch_of(problem, plan, Shaped)
    return simulate(launch.kernel, launch.arguments, {}, launch.lnc, RunOptions(target=problem.target, dry=True))


def _memory(result: SimulationResult) -> str:
    levels = zip(("SBUF", "PSUM"), (result.sbuf_high_water, result.psum_high_water), strict=True)
    return "most bytes per partition in use: " + ", ".join(f"{name} {max(level)}" for name, level in levels)


def _write_files(args: argparse.Namespace, timeline: Timeline, title: str) -> None:
    from nki_bn.simulator.timing import perfetto_json, picture

    if args.output is not None:
        write_whole(args.output, perfetto_json(timeline))
    if args.picture is not None:
        write_whole(args.picture, picture(timeline, title))
