# SPDX-License-Identifier: Apache-2.0
"""Ranks of torch.distributed: processes over gloo that meet through a file and run what a test asks them to."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import distributed

# A server that has imported torch forks the ranks: that takes a moment, where starting Python takes seconds.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "nki_bn.torch"])
# Seconds for which a rank waits for the others, and a test for its ranks at least.
TIMEOUT, PATIENCE = 30, 120


class RankError(Exception):
    """What the ranks raised: one traceback for each, "" for those that went well."""


class Ranks:
    """``size`` processes, each a rank. They live until :meth:`close`."""

    def __init__(self, size: int, folder: Path, timeout: float = TIMEOUT) -> None:
        self._patience = max(PATIENCE, timeout)
        self._ends: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(size):
            here, there = _CONTEXT.Pipe()
            arguments = (rank, size, str(folder / "store"), timeout, there)
            process = _CONTEXT.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._ends.append(here)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """``function(rank, *arguments)`` of every rank; both have to be picklable.

        Raises:
            RankError: one raised something, or did not answer.
        """
        for end in self._ends:
            end.send((function, arguments))
        answers = [end.recv() if end.poll(self._patience) else (False, "no answer") for end in self._ends]
        if not all(good for good, _ in answers):
            raise RankError(*("" if good else text for good, text in answers))
        return [result for _, result in answers]

    def first(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """As :meth:`run`, but only the answer of the first rank counts; others need not give one."""
        for end in self._ends:
            end.send((function, arguments))
        good, result = self._ends[0].recv() if self._ends[0].poll(self._patience) else (False, "no answer")
        if not good:
            raise RankError(result)
        return result

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()


@contextmanager
def ranks_in(folder: Path, size: int, timeout: float = TIMEOUT) -> Iterator[Ranks]:
    """Ranks for the time of a block; they meet in ``folder``."""
    ranks = Ranks(size, folder, timeout)
    try:
        yield ranks
    finally:
        ranks.close()


def _serve(rank: int, size: int, store: str, timeout: float, end: Connection) -> None:
    torch.set_num_threads(1)
    os.environ["NEURON_LOGICAL_NC_CONFIG"] = "1"
    limit = timedelta(seconds=timeout)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit)
    while True:
        function, arguments = end.recv()
        try:
            answer = (True, function(rank, *arguments))
        except Exception:
            answer = (False, traceback.format_exc())
        end.send(answer)


@cache
def first_ranks(size: int) -> Any:
    """The process group of the first ``size`` ranks; all ranks of the world ask for it at the same place."""
    return distributed.new_group(range(size))
