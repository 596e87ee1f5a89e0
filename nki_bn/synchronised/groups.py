# SPDX-License-Identifier: Apache-2.0
"""Groups of replicas for NumPy arrays: one alone, and several in the threads of one process."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from nki_bn.problem import Array


class ArrayGroup(ABC):
    """A :class:`nki_bn.synchronised.Group` of NumPy arrays, in which a name is used once per step."""

    def __init__(self) -> None:
        self._claimed: set[str] = set()

    @property
    @abstractmethod
    def size(self) -> int:
        """R, the number of replicas."""

    @abstractmethod
    def all_gather(self, name: str, values: Array) -> Array:
        """[R, K]: ``values`` [K] of all replicas, on each of them."""

    def all_reduce(self, name: str, values: Array) -> Array:
        """The sum over all replicas of ``values`` [K]: one after the other, so that all get the same bits."""
        total: Array = self.all_gather(name, values).sum(0)
        return total

    def join(self, parts: Sequence[Array]) -> Array:
        """One array of several."""
        return np.concatenate(parts)

    def claim(self, names: Sequence[str]) -> None:
        """Take the names of collectives for this step.

        Raises:
            ValueError: one is taken already.
        """
        for name in names:
            if name in self._claimed:
                raise ValueError(f"the collective {name} is in use in this step; accepted: a tag of its own per site")
            self._claimed.add(name)

    def new_step(self) -> None:
        """Give all names back."""
        self._claimed.clear()


class Alone(ArrayGroup):
    """A group of one, which exchanges nothing."""

    @property
    def size(self) -> int:
        """1."""
        return 1

    def all_gather(self, name: str, values: Array) -> Array:
        """``values`` as the one row."""
        return values[None]


@dataclass
class _Meeting:
    """Where the replicas of a process meet: what each gave, by the number of the collective."""

    size: int
    timeout: float
    changed: threading.Condition = field(default_factory=threading.Condition)
    given: dict[int, dict[int, tuple[str, Array]]] = field(default_factory=dict)
    left: bool = False

    def exchange(self, turn: int, rank: int, entry: tuple[str, Array]) -> list[tuple[str, Array]] | None:
        """What all gave, by rank; None if that does not become complete."""
        with self.changed:
            # The collective before the last one is over on all replicas.
            self.given.pop(turn - 2, None)
            mine = self.given.setdefault(turn, {})
            mine[rank] = entry
            self.changed.notify_all()
            self.changed.wait_for(lambda: len(mine) == self.size or self.left, self.timeout)
            return [mine[other] for other in range(self.size)] if len(mine) == self.size else None

    def leave(self) -> None:
        """Somebody will not come again."""
        with self.changed:
            self.left = True
            self.changed.notify_all()


class Replica(ArrayGroup):
    """One of several replicas in the threads of one process; made by :func:`replicas`.

    Attributes:
        collectives: the names of those that were called, in order.
    """

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        super().__init__()
        self._meeting, self._rank = meeting, rank
        self.collectives: list[str] = []

    @property
    def size(self) -> int:
        """R, the number of replicas."""
        return self._meeting.size

    def all_gather(self, name: str, values: Array) -> Array:
        """[R, K]: ``values`` [K] of all replicas.

        Raises:
            RuntimeError: another replica left, did not come within the timeout, or calls another collective.
        """
        self.collectives.append(name)
        given = self._meeting.exchange(len(self.collectives), self._rank, (name, values))
        if given is None:
            raise RuntimeError(
                f"replica {self._rank} waited for the others in {name}; one left, or did not come within "
                f"{self._meeting.timeout} s"
            )
        if any((other, array.shape) != (name, values.shape) for other, array in given):
            called = ", ".join(f"{other} of {array.shape}" for other, array in given)
            raise RuntimeError(f"replicas call different collectives: {called}; accepted: the same on all of them")
        return np.stack([array for _, array in given])

    def leave(self) -> None:
        """Let the others fail at once, instead of after the timeout."""
        self._meeting.leave()


def replicas(size: int, timeout: float = 60.0) -> list[Replica]:
    """The members of a group of ``size``, one for each thread, which wait at most ``timeout`` seconds."""
    meeting = _Meeting(size, timeout)
    return [Replica(meeting, rank) for rank in range(size)]
