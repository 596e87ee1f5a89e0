# SPDX-License-Identifier: Apache-2.0
"""``nki-bn verify``: run a kernel on drawn or given inputs and compare it with the float64 reference.

Exit code 0: it agrees. 1: it does not. 2: wrong use.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nki_bn import cases, installation
from nki_bn.commands import options
from nki_bn.hardware import TARGETS
from nki_bn.problem import DTYPES, PRECISIONS, require_eps, require_values
from nki_bn.simulator import RunOptions

if TYPE_CHECKING:
    from nki_bn.verify import Verification

OPERATIONS = {
    "bwd": "the backward",
    "fwd": "the forward in training",
    "eval": "the forward in eval",
    "pair": "forward, then backward, against float64 autograd (needs torch)",
}
# Of a seed. Python turns a few times as many into a number.
_SEED_DIGITS = 1000
# What --input takes the place of, with the defaults for drawn inputs.
_DRAWN = {"shape": None, "dtype": "float32", "mean": 0.0, "std": 1.0, "seed": 0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    operations = "; ".join(f"{name}: {text}" for name, text in OPERATIONS.items())
    parser.add_argument("--op", choices=list(OPERATIONS), required=True, help=operations)
    parser.add_argument("--shape", type=options.shape, help="B,C,... of x, rank 2 to 5")
    parser.add_argument("--dtype", choices=list(DTYPES), help="of x and what is shaped like it (float32)")
    parser.add_argument("--mean", type=_finite, help="mean of the drawn x (0)")
    parser.add_argument("--std", type=_deviation, help="deviation of the drawn x (1)")
    parser.add_argument("--seed", type=_seed, help="of the drawn inputs (0)")
    files = f"bwd: {', '.join(cases.ARRAYS)}; else {', '.join(cases.PAIR_ARRAYS)}"
    parser.add_argument("--input", type=Path, metavar="FILE.npz", help=f"take the inputs from this file: {files}")
    parser.add_argument("--eps", type=_finite, default=1e-5, help="(1e-5)")
    parser.add_argument("--fuse-relu", choices=["mask", "recompute"], help="a ReLU, its mask stored or recomputed")
    parser.add_argument("--residual", action="store_true", help="a residual, added before the ReLU")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--training", action="store_true", default=None, help="batch statistics (the default)")
    mode.add_argument("--eval", action="store_false", dest="training", help="frozen statistics, for bwd and pair")
    parser.add_argument(
        "--precision", choices=PRECISIONS, default="high", help="of bwd; fast: with 16-bit dtypes (high)"
    )
    parser.add_argument("--lnc", type=options.cores, metavar="{1,2}", help="physical cores (all of a logical core)")
    parser.add_argument("--target", choices=TARGETS, default="trn2", help="(trn2)")
    parser.add_argument("--numerics", choices=["trn2", "ideal"], default="trn2", help="of the simulator (trn2)")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")


def run(args: argparse.Namespace) -> int:
    """Verify and print; the exit code."""
    from nki_bn import verify

    try:
        verification = _verify(args)
    except MemoryError as error:
        args.error(f"this needs more memory than there is: {error}")
    if args.json:
        print(_json(args.op, verification))
    else:
        print(f"{_title(args, verification)}\n{verify.table(verification.comparisons)}")
    return 0 if verification.ok else 1


def _verify(args: argparse.Namespace) -> Verification:
    try:
        if args.numerics == "ideal" and installation.kind != "embedded":
            raise ValueError("--numerics ideal needs the embedded simulator; accepted with the vendor's nki: trn2")
        job = _prepare(args)
    except (TypeError, ValueError, OverflowError) as error:
        args.error(str(error))
    return job(RunOptions(target=args.target, numerics=args.numerics))


def _prepare(args: argparse.Namespace) -> Callable[[RunOptions], Verification]:
    """What is left to do once the inputs are there and checked."""
    from nki_bn import pair, requests, verify

    draw, call = _draw(args), {"lnc": args.lnc, "target": args.target}
    training = options.training_of(args)
    how = (args.fuse_relu or "none", training, require_eps(args.eps, training), args.residual)
    options.refuse_fast(args)
    if args.op == "bwd":
        case = cases.load(args.input, *how) if draw is None else draw.case(*how)
        request = requests.prepare_backward(case, residual_grad=args.residual, precision=args.precision, **call)
        require_values(request.problem)
        return functools.partial(verify.verify_backward, case, request)
    forward = cases.load_forward(args.input, *how) if draw is None else draw.forward(*how)
    if args.op == "pair":
        dy = cases.load_gradient(args.input) if draw is None else draw.gradient()
        asked = pair.prepare(forward, dy, **call)
        job = functools.partial(pair.verify_pair, forward, dy, asked)
    else:
        asked = requests.prepare_forward(forward, **call)
        job = functools.partial(verify.verify_forward, forward, asked)
    require_values(asked.problem)
    return job


def _draw(args: argparse.Namespace) -> cases.Draw | None:
    """How to draw the inputs; None if a file has them."""
    given: dict[str, Any] = {name: getattr(args, name) for name in _DRAWN if getattr(args, name) is not None}
    if args.input is None:
        if "shape" not in given:
            raise ValueError("neither --shape nor --input is given; accepted: one of them")
        return cases.Draw(**(_DRAWN | given))
    if given:
        raise ValueError(
            f"--{next(iter(given))} cannot go with --input, which has its own arrays; accepted: one of them"
        )
    return None


def _seed(text: str) -> int:
    if not options.is_number(text, _SEED_DIGITS):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a seed; accepted: integers from 0 up, of at most {_SEED_DIGITS} digits"
        )
    return int(text)


def _finite(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no finite number; accepted: finite numbers")
    return value


def _deviation(text: str) -> float:
    value = _finite(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no deviation; accepted: finite numbers from 0 up")
    return value


def _title(args: argparse.Namespace, verification: Verification) -> str:
    problem = verification.problem
    mode = "training" if problem.training else "eval"
    residual = ", residual" if args.residual else ""
    fast = ", fast" if args.precision == "fast" else ""
    return (
        f"{args.op} {list(problem.shape)} {problem.dtype}, {mode}, relu {problem.relu}{residual}{fast}, "
        f"{problem.target} lnc {problem.lnc}, "
        f"numerics {verification.arithmetic.numerics}, {installation.kind} nki"
    )


def _json(op: str, verification: Verification) -> str:
    """The report as JSON, which knows no infinity and no NaN: they are null."""
    rows = [asdict(row) | {"worst_error": row.worst_error, "ok": row.ok} for row in verification.comparisons]
    finite = [{key: _null_unless_finite(value) for key, value in row.items()} for row in rows]
    return json.dumps(
        {
            "op": op,
            "problem": asdict(verification.problem),
            "arithmetic": asdict(verification.arithmetic),
            "nki": installation.kind,
            "outputs": finite,
            "ok": verification.ok,
        },
        allow_nan=False,
    )


def _null_unless_finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
