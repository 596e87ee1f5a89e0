# SPDX-License-Identifier: Apache-2.0
"""The replicas of a launch: where they meet in collectives, and what each waits for.

Core c of a replica meets core c of the others. A collective is over when all its ranks stand at it, with the same call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nki_bn.simulator.errors import NkiValidationError
from nki_bn.simulator.lockstep import Lockstep
from nki_bn.simulator.trace import Source


@dataclass
class Post:
    """What a core brings to a collective of ``ranks``; all of them have to bring the same ``call``.

    ``data`` are the values it gives. ``found`` are the posts of all ranks, in their order, once all are here.
    """

    rank: int
    ranks: tuple[int, ...]
    call: str
    source: Source
    data: Sequence[Any] = ()
    found: list[Post] | None = None

    def __str__(self) -> str:
        return f"{self.call} over ranks {self.ranks} at {self.source}"


class World:
    """``size`` replicas of ``lnc`` cores; or one that is looked at, of so many that are ``alike``."""

    def __init__(self, size: int, lnc: int, alike: int = 1) -> None:
        self.size = size * alike
        self._alike = alike > 1
        self._here: dict[tuple[int, int], Post] = {}
        prefixes = [f"replica {rank} " if size > 1 else "" for rank in range(size)]
        self.lockstep = Lockstep([f"{prefix}core {core}" for prefix in prefixes for core in range(lnc)])

    def meet(self, core: int, seat: int, post: Post) -> list[Post]:
        """Wait at a collective, as core number ``core`` of a replica and ``seat`` of all, until all ranks are there.

        Raises:
            NkiValidationError: a rank that would meet this one is at another collective.
            DeadlockError: no core can go on.
        """
        if self._alike:
            return [post] * len(post.ranks)
        self._here[core, post.rank] = post
        present = [self._here[core, rank] for rank in post.ranks if (core, rank) in self._here]
        for other in present:
            _check_alike(post, other)
        if all(other.ranks == post.ranks for other in present) and len(present) == len(post.ranks):
            for rank in post.ranks:
                self._here.pop((core, rank)).found = present
        self.lockstep.wait_until(seat, _is_complete(post), str(post))
        assert post.found is not None, "the wait is over when all are here"
        return post.found


def _is_complete(post: Post) -> Callable[[], bool]:
    return lambda: post.found is not None


def _check_alike(post: Post, other: Post) -> None:
    """Refuse two posts of cores that wait for each other at different collectives."""
    if post.rank in other.ranks and (post.ranks, post.call) != (other.ranks, other.call):
        raise NkiValidationError(
            f"replicas {post.rank} and {other.rank} meet in different collectives: {post.rank} in {post}; {other.rank} "
            f"in {other}; accepted: the same operation, shapes, dtypes and ranks on all of them"
        )
