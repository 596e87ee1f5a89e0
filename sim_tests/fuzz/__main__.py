# SPDX-License-Identifier: Apache-2.0
"""``python -m fuzz --surface NAME --minutes M``: fuzz a surface for a time; exit code 0: nothing was found."""

from __future__ import annotations

import argparse
import math
import secrets

from fuzz.surface import PATIENCE
from fuzz.watching import Plan, fuzz

SURFACES = ("command", "ops", "readers", "simulator", "sites", "torch")


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = math.nan
    if not 0 < minutes < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; accepted: finite numbers above 0")
    return minutes


def main() -> int:
    """Fuzz as the command line says; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description="Fuzz a surface of the project.")
    parser.add_argument("--surface", choices=SURFACES, required=True)
    parser.add_argument("--minutes", type=_minutes, default=10.0, help="(10)")
    parser.add_argument("--seed", type=int, help="of the first round; the next ones take those after it (by chance)")
    parser.add_argument("--patience", type=float, default=PATIENCE, help=f"seconds for an example ({PATIENCE:g})")
    args = parser.parse_args()
    seed = secrets.randbits(32) if args.seed is None else args.seed
    return fuzz(Plan(args.surface, 60 * args.minutes, seed, args.patience))


if __name__ == "__main__":
    raise SystemExit(main())
