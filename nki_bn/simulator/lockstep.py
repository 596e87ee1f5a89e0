# SPDX-License-Identifier: Apache-2.0
"""Cores as threads of which one runs at a time, switching only where they synchronise: deterministic."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from typing import Any

from nki_bn.simulator.errors import DeadlockError


class _Aborted(BaseException):
    """Ends a core whose peer has failed; never seen by users."""


class Lockstep:
    """A baton passed between cores, which errors call by ``names``."""

    def __init__(self, names: Sequence[str]) -> None:
        self._condition = threading.Condition()
        self._turn = 0
        self._waiting: dict[int, tuple[Callable[[], bool], str]] = {}
        self._done: set[int] = set()
        self._names = tuple(names)
        self._count = len(self._names)
        self._failure: BaseException | None = None

    def run(self, bodies: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run one body per core to the end; returns their results or raises the first failure."""
        if len(bodies) == 1:
            return [bodies[0]()]
        results: list[Any] = [None] * len(bodies)

        def work(core: int) -> None:
            try:
                self._take_turn(core)
                results[core] = bodies[core]()
            except _Aborted:
                pass
            except BaseException as error:  # the thread's end is the only place left to hand it over
                self._failure = self._failure or error
            self._finish(core)

        threads = [
            threading.Thread(target=contextvars.copy_context().run, args=(work, core), daemon=True)
            for core in range(len(bodies))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure
        return results

    def wait_until(self, core: int, ready: Callable[[], bool], what: str) -> None:
        """Let other cores run until ``ready()`` holds; ``what`` says what is waited for.

        Raises:
            DeadlockError: no core can go on.
        """
        with self._condition:
            if ready():
                return
            self._waiting[core] = ready, what
            self._pass_on(core)
        self._take_turn(core)

    def _take_turn(self, core: int) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._turn == core or self._failure is not None)
            self._waiting.pop(core, None)
            if self._failure is not None and self._turn != core:
                raise _Aborted
            if isinstance(self._failure, DeadlockError):
                raise self._failure
            if self._failure is not None:
                raise _Aborted

    def _finish(self, core: int) -> None:
        with self._condition:
            self._done.add(core)
            self._waiting.pop(core, None)
            if len(self._done) < self._count:
                self._pass_on(core)
            self._condition.notify_all()

    def _pass_on(self, core: int) -> None:
        for step in range(1, self._count + 1):
            other = (core + step) % self._count
            if other in self._done:
                continue
            if other not in self._waiting or self._waiting[other][0]():
                self._turn = other
                self._condition.notify_all()
                return
        if self._failure is None:
            waits = "; ".join(
                f"{self._names[other]} waits for {what}" for other, (_, what) in sorted(self._waiting.items())
            )
            over = "".join(f"; {self._names[other]} has ended" for other in sorted(self._done))
            self._failure = DeadlockError(f"deadlock: {waits}{over}")
        self._condition.notify_all()
