# SPDX-License-Identifier: Apache-2.0
"""Values of options that several commands have."""

from __future__ import annotations

import argparse

# Of a size or a count: more than any has, and few enough for 64 bits, and for Python to turn into a number.
MOST_DIGITS = 18


def is_number(text: str, digits: int = MOST_DIGITS) -> bool:
    """Whether it is a number from 0 up of at most so many digits."""
    return text.isdecimal() and len(text) <= digits


def cores(text: str) -> int:
    """A number of physical cores.

    Raises:
        ArgumentTypeError: it is none.
    """
    if text not in ("1", "2"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of cores; accepted: 1, 2")
    return int(text)


def shape(text: str) -> tuple[int, ...]:
    """``B,C,...`` as a shape of rank 2 to 5.

    Raises:
        ArgumentTypeError: it is none, or C is 0.
    """
    sizes = text.split(",")
    if not 2 <= len(sizes) <= 5 or not all(map(is_number, sizes)) or int(sizes[1]) == 0:
        accepted = f"B,C,... of rank 2 to 5, C at least 1, sizes of at most {MOST_DIGITS} digits"
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape; accepted: {accepted}")
    return tuple(map(int, sizes))


def training_of(args: argparse.Namespace) -> bool:
    """Whether statistics are those of the batch, from ``--training`` or ``--eval``, which ``--op`` may say by itself.

    Raises:
        ValueError: the two disagree.
    """
    said = {"fwd": True, "eval": False}.get(args.op)
    if said is None:
        return args.training is not False
    if args.training not in (None, said):
        option = "--training" if args.training else "--eval"
        raise ValueError(f"{option} cannot go with --op {args.op}; accepted: --op {'fwd' if args.training else 'eval'}")
    return said


def refuse_fast(args: argparse.Namespace) -> None:
    """Refuse ``--precision fast`` where there is no backward alone.

    Raises:
        ValueError: it is asked for.
    """
    if args.precision == "fast" and args.op != "bwd":
        raise ValueError(f"--precision fast cannot go with --op {args.op}; accepted: --op bwd")
