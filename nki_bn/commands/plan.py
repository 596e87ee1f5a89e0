# SPDX-License-Identifier: Apache-2.0
"""``nki-bn plan``: which plan a problem gets, what it is predicted to take, and why.

Exit code 0: done. 2: wrong use, or nothing fits.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from nki_bn.bench.record import OPERATIONS
from nki_bn.commands import options
from nki_bn.hardware import TARGETS
from nki_bn.problem import DTYPES, PRECISIONS, BackwardProblem, ForwardProblem, Problem

if TYPE_CHECKING:
    from nki_bn.explanation import Explanation

_MB = 1e6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--shape", type=options.shape, required=True, help="B,C,... of x, rank 2 to 5")
    operations = "bwd: the backward; fwd: the forward in training; eval: the forward in eval (bwd)"
    parser.add_argument("--op", choices=OPERATIONS, default="bwd", help=operations)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16", help="of x (bfloat16)")
    relu = "a ReLU, its mask stored or recomputed"
    parser.add_argument("--fuse-relu", choices=["mask", "recompute"], default="none", help=relu)
    parser.add_argument("--residual", action="store_true", help="a residual, added before the ReLU")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--training", action="store_true", default=None, help="batch statistics (the default)")
    mode.add_argument("--eval", action="store_false", dest="training", help="frozen statistics, for bwd")
    parser.add_argument(
        "--precision", choices=PRECISIONS, default="high", help="of bwd; fast: with 16-bit dtypes (high)"
    )
    parser.add_argument("--lnc", type=options.cores, metavar="{1,2}", help="physical cores (all of a logical core)")
    parser.add_argument("--target", choices=TARGETS, default="trn2", help="(trn2)")
    parser.add_argument("--explain", action="store_true", help="show the runners-up and why they lose")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Plan and print; the exit code."""
    from nki_bn.explanation import explain

    try:
        explanation = explain(_problem(args))
    except (TypeError, ValueError) as error:
        args.error(str(error))
    if args.json:
        print(json.dumps(explanation.as_dict(), indent=2))
    else:
        print(text_of(explanation, args.explain))
    return 0


def _problem(args: argparse.Namespace) -> Problem:
    training = options.training_of(args)
    options.refuse_fast(args)
    asked = (args.shape, args.dtype, training, args.fuse_relu, args.residual, args.lnc, args.target)
    return BackwardProblem(*asked, precision=args.precision) if args.op == "bwd" else ForwardProblem(*asked)


def text_of(explanation: Explanation, runners_up: bool) -> str:
    """The explanation as aligned lines, with or without the runners-up."""
    rows = [*_choice(explanation), *explanation.layout.items(), *_sbuf(explanation)]
    rows += [("note", note) for note in explanation.notes]
    width = max(len(name) for name, _ in rows)
    lines = [_title(explanation), *(f"{name:<{width}}  {value}" for name, value in rows)]
    if runners_up:
        lines += ["", *_runners_up(explanation)]
    return "\n".join(lines)


def _title(explanation: Explanation) -> str:
    from nki_bn.explanation import operation_of

    problem = explanation.problem
    words = [f"{operation_of(problem)} {list(problem.shape)} {problem.dtype}", f"relu {problem.relu}"]
    words += ["residual"] * problem.residual + ["frozen statistics"] * (not problem.training)
    words += ["fast"] * (getattr(problem, "precision", "high") == "fast")
    return ", ".join([*words, f"lnc {problem.lnc}", problem.target])


def _choice(explanation: Explanation) -> list[tuple[str, str]]:
    moved, least = explanation.moved_bytes, explanation.minimum_bytes
    busy = sorted(explanation.busy.items(), key=lambda item: -item[1])
    return [
        ("strategy", f"{explanation.plan.strategy}: {explanation.meaning}"),
        (
            "predicted",
            f"{explanation.predicted_us:.1f} us (modelled, without the launch), {explanation.roofline_share:.0%} of "
            f"the roofline: the minimum takes {explanation.roofline_us:.1f} us",
        ),
        ("bound by", explanation.bound),
        ("busy", ", ".join(f"{engine} {share:.0%}" for engine, share in busy)),
        ("HBM", f"{moved / _MB:.2f} MB, {moved / least:.2f} times the minimum of {least / _MB:.2f} MB"),
        ("instructions", f"{explanation.instructions} on a core, ceiling {explanation.ceiling}"),
    ]


def _sbuf(explanation: Explanation) -> list[tuple[str, str]]:
    used, limit = explanation.sbuf_bytes, explanation.sbuf_limit
    rows = [("SBUF", f"{used} of {limit} bytes per partition, {used / limit:.0%}")]
    for buffer in explanation.buffers:
        size = f"{buffer.count} x {buffer.columns} {buffer.dtype}"
        rows.append((f"  {buffer.name}", f"{size}, {buffer.nbytes} bytes"))
    return rows


def _runners_up(explanation: Explanation) -> list[str]:
    if not explanation.runners_up:
        return ["no other candidate"]
    lines = ["runners-up"]
    for other in explanation.runners_up:
        slower = other.predicted_us / explanation.predicted_us
        lines.append(
            f"  {other.predicted_us:.1f} us ({slower:.2f} times)  {other.strategy}, {other.layout}: {other.reason}"
        )
    return lines
