# SPDX-License-Identifier: Apache-2.0
"""Rounds of examples in a process of its own, watched from outside.

What a limit inside of a process cannot end is ended here, and told with its example: code that never comes back to
Python, that has taken the error of the limit for another one, or that the system has killed.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import resource
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzz.surface import HangError, Surface, Watch, run_examples

ROUND = 200
# Bytes that a fuzzing may take: what asks for more gets a MemoryError, and not the end of another process.
_MEMORY = 8 << 30
# Seconds between two lines of progress, and between two looks.
_TELL, _LOOK = 30.0, 0.2


@dataclass(frozen=True)
class Plan:
    """What is fuzzed, for how many seconds, from which seed, and for how many an example may run.

    ``slack`` is for what then has to end by itself, before the process is killed.
    """

    name: str
    seconds: float
    seed: int
    patience: float
    slack: float = 30.0


class _Notes(Watch):
    """The example that runs, in a file that the other process reads."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path, self.seed, self.examples = path, seed, 0

    def begins(self, example: str) -> None:
        self.examples += 1
        self._write(example)

    def ends(self) -> None:
        self._write(None)

    def fails(self, example: str, error: BaseException) -> None:
        print(f"a fault with --seed {self.seed}: {type(error).__name__} from\n  {example}", flush=True)
        if not isinstance(error, HangError):
            print("looking for a smaller example of it, which can take minutes", flush=True)

    def _write(self, example: str | None) -> None:
        said = {"examples": self.examples, "seed": self.seed, "example": example, "since": time.time()}
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(said), encoding="utf-8")
        os.replace(new, self.path)


def fuzz(plan: Plan, surface: Surface | None = None) -> int:
    """Run rounds until the time is over or one finds a fault, and print how it goes; 0 if nothing was found, else 1."""
    with tempfile.TemporaryDirectory(prefix="fuzz") as folder:
        path, start = Path(folder) / "notes.json", time.monotonic()
        process = multiprocessing.get_context("fork").Process(target=_rounds, args=(plan, surface, path))
        process.start()
        try:
            hang = _watch(plan, process, path)
        finally:
            process.kill()
            process.join()
        notes, minutes = _read(path), (time.monotonic() - start) / 60
    told = f"{plan.name}: %s in {notes['examples']} examples, {minutes:.1f} minutes"
    if process.exitcode == 0:
        print(told % "nothing found", flush=True)
        return 0
    if hang:
        print(f"a hang: not done after {hang:.0f} s, and not to be interrupted\n  {notes['example']}")
    elif process.exitcode != 1:
        print(f"the process has ended, with code {process.exitcode}, in\n  {notes['example']}")
    print(told % "a fault", f"; --seed {notes['seed']} finds it", sep="", flush=True)
    return 1


def _watch(plan: Plan, process: Any, path: Path) -> float | None:
    """Wait for the end, and tell of the progress; how long an example has run that nothing interrupts, in seconds."""
    start = told = time.monotonic()
    while process.exitcode is None:
        process.join(_LOOK)
        notes = _read(path)
        if time.monotonic() - told >= _TELL:
            told = time.monotonic()
            passed = f"{(told - start) / 60:.1f} of {plan.seconds / 60:.1f} minutes"
            print(f"{plan.name}: {notes['examples']} examples, {passed}, --seed {notes['seed']}", flush=True)
        ran = time.time() - notes["since"]
        if notes["example"] is not None and ran > plan.patience + plan.slack and process.exitcode is None:
            return float(ran)
    return None


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"examples": 0, "seed": None, "example": None, "since": time.time()}
    notes: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return notes


def _rounds(plan: Plan, surface: Surface | None, path: Path) -> None:
    """What the other process does; it ends with 0 or 1."""
    tempfile.tempdir = str(path.parent)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY if hard < 0 else min(_MEMORY, hard), hard))
    surface = surface or importlib.import_module(f"fuzz.{plan.name}").SURFACE
    notes, start = _Notes(path, plan.seed), time.monotonic()
    while time.monotonic() - start < plan.seconds:
        try:
            run_examples(surface, ROUND, notes.seed, notes, plan.patience)
        except (Exception, HangError):
            traceback.print_exc()
            raise SystemExit(1) from None
        notes.seed += 1
