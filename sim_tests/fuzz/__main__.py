# SPDX-License-Identifier: Apache-2.0
"""``python -m fuzz --surface NAME --minutes M``: fuzz a surface for a time; exit code 0: nothing was found."""

from __future__ import annotations

import argparse
import importlib
import secrets
import time
import traceback

from fuzz.surface import run_examples

SURFACES = ("command", "ops", "readers", "simulator", "sites", "torch")
_ROUND = 200


def main() -> int:
    """Run rounds until the time is over or one finds a fault; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description="Fuzz a surface of the project.")
    parser.add_argument("--surface", choices=SURFACES, required=True)
    parser.add_argument("--minutes", type=float, default=10.0, help="(10)")
    parser.add_argument("--seed", type=int, help="of the first round; the next ones take those after it (by chance)")
    args = parser.parse_args()
    surface = importlib.import_module(f"fuzz.{args.surface}").SURFACE
    start = time.monotonic()
    seed = secrets.randbits(32) if args.seed is None else args.seed
    total = 0
    while (passed := time.monotonic() - start) < 60 * args.minutes:
        try:
            total += run_examples(surface, _ROUND, seed)
        except Exception:
            traceback.print_exc()
            print(f"{args.surface}: a fault after {total} examples, {passed / 60:.1f} minutes; --seed {seed} finds it")
            return 1
        seed += 1
    print(f"{args.surface}: nothing found in {total} examples, {passed / 60:.1f} minutes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
