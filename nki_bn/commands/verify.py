# SPDX-License-Identifier: Apache-2.0
"""``nki-bn verify``: run a kernel on drawn or given inputs and compare it with the float64 reference.

Exit code 0: it agrees. 1: it does not. 2: wrong use.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from nki_bn import cases, installation
from nki_bn.hardware import TARGETS
from nki_bn.problem import DTYPES, BackwardCase, require_eps
from nki_bn.simulator import RunOptions

if TYPE_CHECKING:
    from nki_bn.verify import Verification

# What --input takes the place of, with the defaults for drawn inputs.
_DRAWN = {"shape": None, "dtype": "float32", "mean": 0.0, "std": 1.0, "seed": 0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--op", choices=["bwd"], required=True, help="the kernel")
    parser.add_argument("--shape", type=_shape, help="B,C,... of x, rank 2 to 5")
    parser.add_argument("--dtype", choices=list(DTYPES), help="of x, dy and dx (float32)")
    parser.add_argument("--mean", type=float, help="mean of the drawn x (0)")
    parser.add_argument("--std", type=float, help="deviation of the drawn x (1)")
    parser.add_argument("--seed", type=_seed, help="of the drawn inputs (0)")
    parser.add_argument(
        "--input", type=Path, metavar="FILE.npz", help=f"take the inputs from this file: {', '.join(cases.ARRAYS)}"
    )
    parser.add_argument("--eps", type=float, default=1e-5, help="(1e-5)")
    parser.add_argument("--fuse-relu", choices=["mask", "recompute"], help="a ReLU, its mask stored or recomputed")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--training", action="store_true", default=True, help="batch statistics (the default)")
    mode.add_argument("--eval", action="store_false", dest="training", help="frozen statistics")
    parser.add_argument("--lnc", type=int, choices=[1, 2], help="physical cores (all of a logical core)")
    parser.add_argument("--target", choices=TARGETS, default="trn2", help="(trn2)")
    parser.add_argument("--numerics", choices=["trn2", "ideal"], default="trn2", help="of the simulator (trn2)")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")


def run(args: argparse.Namespace) -> int:
    """Verify and print; the exit code."""
    from nki_bn import ops, verify

    try:
        if args.numerics == "ideal" and installation.kind != "embedded":
            raise ValueError("--numerics ideal needs the embedded simulator; accepted with the vendor's nki: trn2")
        case = _case(args)
        request = ops.prepare(case, lnc=args.lnc, target=args.target)
    except (TypeError, ValueError, NotImplementedError) as error:
        args.error(str(error))
    verification = verify.verify_backward(case, request, RunOptions(target=args.target, numerics=args.numerics))
    print(_json(verification) if args.json else f"{_title(verification)}\n{verify.table(verification.comparisons)}")
    return 0 if verification.ok else 1


def _case(args: argparse.Namespace) -> BackwardCase:
    given = {name: getattr(args, name) for name in _DRAWN if getattr(args, name) is not None}
    relu = args.fuse_relu or "none"
    eps = require_eps(args.eps, args.training)
    if args.input is None:
        if "shape" not in given:
            raise ValueError("one of --shape and --input is required")
        return cases.Draw(**(_DRAWN | given)).case(relu, args.training, eps)
    if given:
        raise ValueError(f"--{next(iter(given))} cannot go with --input, which has its own arrays")
    return cases.load(args.input, relu, args.training, eps)


def _shape(text: str) -> tuple[int, ...]:
    sizes = text.split(",")
    if not 2 <= len(sizes) <= 5 or not all(size.isdecimal() for size in sizes) or int(sizes[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape; accepted: B,C,... of rank 2 to 5, C at least 1")
    return tuple(map(int, sizes))


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a seed; accepted: integers from 0 up")
    return int(text)


def _title(verification: Verification) -> str:
    problem = verification.problem
    mode = "training" if problem.training else "eval"
    return (
        f"bwd {list(problem.shape)} {problem.dtype}, {mode}, relu {problem.relu}, "
        f"{problem.target} lnc {problem.lnc}, numerics {verification.arithmetic.numerics}, {installation.kind} nki"
    )


def _json(verification: Verification) -> str:
    rows = [asdict(row) | {"ok": row.ok} for row in verification.comparisons]
    return json.dumps(
        {
            "op": "bwd",
            "problem": asdict(verification.problem),
            "arithmetic": asdict(verification.arithmetic),
            "nki": installation.kind,
            "outputs": rows,
            "ok": verification.ok,
        }
    )
