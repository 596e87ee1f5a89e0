# SPDX-License-Identifier: Apache-2.0
"""The DMA engines at work: FIFO in each queue, round robin between queues, HBM shared by the cores.

What an engine does for one DMA is one amount of work, served as a fluid. Queues that are busy on the same engine take
turns by descriptor, so each gets a part of its time in proportion to the length of its descriptors. When what all
engines could move to and from HBM exceeds what the stack can, everything that touches HBM slows down alike.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from nki_bn.hardware import Timing
from nki_bn.simulator.timing.dma import Transfer

Lanes = npt.NDArray[np.float64]
Lane = tuple[int, int, int]

# Engines that trigger DMAs; each has one queue.
QUEUES = ("sync", "scalar", "gpsimd")

# ns of work below which a transfer counts as finished: rounding of the fluid.
_NOTHING = 1e-6


@dataclass
class Flight:
    """A DMA on its way: ``arrival`` of its first packet, when an engine first served it (``begun``), and its ``last``
    packet. ``behind`` is the DMA in the same queue that kept the engine which finished last until then.
    """

    record: int
    core: int
    queue: str
    transfer: Transfer
    arrival: float
    begun: float = math.inf
    last: float = math.inf
    behind: int | None = None
    open_lanes: int = field(default=0, repr=False)


class Service:
    """All DMA engines of ``cores`` cores. A lane is (core, queue, engine); its head is the DMA it works on."""

    def __init__(self, timing: Timing, cores: int) -> None:
        shape = cores, len(QUEUES), timing.dma.engines
        self.now = 0.0
        self._limit = timing.hbm.pair
        self._left: Lanes = np.zeros(shape)
        self._weight: Lanes = np.zeros(shape)
        self._demand: Lanes = np.zeros(shape)
        self._rate: Lanes = np.zeros(shape)
        self._heads: dict[Lane, tuple[Flight, int | None]] = {}
        self._waiting: dict[Lane, deque[Flight]] = {lane: deque() for lane in np.ndindex(shape)}

    def submit(self, flight: Flight) -> None:
        """The first packet of ``flight`` is there, at the time of the last :meth:`advance`."""
        queue = QUEUES.index(flight.queue)
        lanes = [(flight.core, queue, engine) for engine, work in enumerate(flight.transfer.work) if work > 0]
        flight.open_lanes = len(lanes)
        for lane in lanes:
            if lane in self._heads:
                self._waiting[lane].append(flight)
            else:
                self._take(lane, flight, None)
        self._share()

    def next_end(self) -> float:
        """When the next lane finishes its head; infinite if all are idle."""
        with np.errstate(divide="ignore", invalid="ignore"):
            times = np.where(self._left > 0, self._left / self._rate, np.inf)
        return self.now + float(times.min())

    def advance(self, time: float) -> list[Flight]:
        """Work until ``time``, which is not beyond :meth:`next_end`; the DMAs that have ended then."""
        self._left -= self._rate * (time - self.now)
        self.now = time
        done = [lane for lane in self._heads if self._left[lane] <= _NOTHING]
        ended = [flight for lane in done if (flight := self._finish(lane)) is not None]
        if done:
            self._share()
        return ended

    def _take(self, lane: Lane, flight: Flight, before: int | None) -> None:
        transfer, engine = flight.transfer, lane[2]
        work = transfer.work[engine]
        self._heads[lane] = flight, before
        self._left[lane] = work
        self._weight[lane] = work / transfer.descriptors[engine]
        self._demand[lane] = transfer.hbm_bytes / sum(transfer.work)
        flight.begun = min(flight.begun, self.now)

    def _finish(self, lane: Lane) -> Flight | None:
        """End the head of a lane and go on with the next DMA; the head's flight if this was its last lane."""
        flight, before = self._heads.pop(lane)
        self._left[lane] = self._weight[lane] = self._demand[lane] = 0
        if self._waiting[lane]:
            self._take(lane, self._waiting[lane].popleft(), flight.record)
        flight.open_lanes -= 1
        if flight.open_lanes:
            return None
        flight.last, flight.behind = self.now, before
        return flight

    def _share(self) -> None:
        """The part of its engine's time that every lane gets."""
        together = self._weight.sum(axis=1, keepdims=True)
        self._rate = np.divide(self._weight, together, out=np.zeros_like(self._weight), where=together > 0)
        demand = float((self._rate * self._demand).sum())
        if demand > self._limit:
            self._rate[self._demand > 0] *= self._limit / demand
