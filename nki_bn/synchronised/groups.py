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
    """Where the replicas of a process meet."""

    size: int
    timeout: float
    barrier: threading.Barrier = field(init=False)
    given: list[tuple[str, Array] | None] = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=self.timeout)
        self.given = [None] * self.size


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
            RuntimeError: another replica gave up, did not come within the timeout, or calls another collective.
        """
        self.collectives.append(name)
        self._meeting.given[self._rank] = (name, values)
        self._wait(name)
        given = [entry for entry in self._meeting.given if entry is not None]
        self._wait(name)
        if any((other, array.shape) != (name, values.shape) for other, array in given):
            called = ", ".join(f"{other} of {array.shape}" for other, array in given)
            raise RuntimeError(f"replicas call different collectives: {called}; accepted: the same on all of them")
        return np.stack([array for _, array in given])

    def leave(self) -> None:
        """Let the others fail at once, instead of after the timeout."""
        self._meeting.barrier.abort()

    def _wait(self, name: str) -> None:
        try:
            self._meeting.barrier.wait()
        except threading.BrokenBarrierError:
            raise RuntimeError(
                f"replica {self._rank} waited for the others in {name}; one gave up, or did not come within "
                f"{self._meeting.timeout} s"
            ) from None


def replicas(size: int, timeout: float = 60.0) -> list[Replica]:
    """The members of a group of ``size``, one for each thread, which wait at most ``timeout`` seconds."""
    meeting = _Meeting(size, timeout)
    return [Replica(meeting, rank) for rank in range(size)]
