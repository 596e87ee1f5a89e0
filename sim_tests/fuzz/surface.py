# SPDX-License-Identifier: Apache-2.0
"""A surface that is fuzzed, and how examples of it are run: each within a time, all from one seed."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import hypothesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# Seconds that an example may take; all of them are small.
PATIENCE = 60.0


class HangError(BaseException):
    """An example took too long. No Exception, as sweeps record those and go on, and Hypothesis repeats them."""


@dataclass(frozen=True)
class Surface:
    """``check`` raises for an example of ``examples`` that shows a fault; ``shown`` is how to tell of it."""

    examples: st.SearchStrategy[Any]
    check: Callable[[Any], None]
    shown: Callable[[Any], str] = repr


class Watch:
    """Is told of every example before it runs, and of the first one of every round that shows a fault."""

    def begins(self, example: str) -> None:
        """It runs from now on."""

    def ends(self) -> None:
        """No example runs."""

    def fails(self, example: str, error: BaseException) -> None:
        """It showed a fault; a search for a smaller one may follow."""


def run_examples(
    surface: Surface, number: int, seed: int, watch: Watch | None = None, patience: float = PATIENCE
) -> int:
    """Check ``number`` examples drawn from ``seed``, or fewer where there are no more; how many they were.

    Raises:
        Exception: what the check of the smallest example found raises, with the example in its notes.
        HangError: an example took longer than ``patience`` seconds; it is in the notes.
    """
    count, failed, told = 0, False, watch or Watch()

    def check(example: Any) -> None:
        nonlocal count, failed
        count += 1
        shown = surface.shown(example)
        told.begins(shown)
        try:
            with limited(patience):
                surface.check(example)
        except (Exception, HangError) as error:
            if isinstance(error, HangError):
                error.add_note(shown)
            if not failed:
                failed = True
                told.fails(shown, error)
            raise
        finally:
            told.ends()

    options = settings(max_examples=number, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    test: Callable[[], None] = hypothesis.seed(seed)(options(given(surface.examples)(check)))
    test()
    return count


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise a HangError in the block when it takes longer, as soon as Python code runs there."""

    def late(signum: int, frame: FrameType | None) -> None:
        raise HangError(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check_refusal(error: Exception, names: Collection[str]) -> None:
    """A refusal as documented: a TypeError or ValueError that names one of ``names`` and what is right.

    Raises:
        Exception: ``error`` itself, if it is none.
    """
    text = str(error)
    named = any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) for name in names)
    says = any(word in text for word in ("accepted", "must be", "must have", "not accepted", "unknown"))
    if type(error) not in (TypeError, ValueError) or not named or not says:
        error.add_note(f"not a documented refusal that names one of {', '.join(sorted(names))}")
        raise error
