# SPDX-License-Identifier: Apache-2.0
"""The state of an engine between two instructions: when it is free, the table of Scalar, the warmth of Tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nki_bn.hardware import TensorTiming, Timing
from nki_bn.simulator.timing.classes import Duration
from nki_bn.simulator.timing.dma import Issuer


@dataclass(frozen=True, slots=True)
class Slot:
    """When an instruction starts, when its engine can go on, and when its results can be seen."""

    start: float
    free: float
    done: float
    table_load: tuple[float, float] | None = None


class Engine:
    """An engine that executes in order; ``free``: when it can go on, ``last``: the record it executed last."""

    def __init__(self, name: str, timing: Timing) -> None:
        self.free = 0.0
        self.last: int | None = None
        self.next_trigger = 0.0
        self._timing = timing
        self._table: str | None = None
        self._heat = _Heat(timing.tensor) if name == "tensor" else None

    def execute(self, duration: Duration, ready: float) -> Slot:
        """Run an instruction whose operands are there at ``ready``."""
        loaded = self._load_table(duration.table)
        start = max(loaded[1] if loaded else self.free, ready)
        streaming = duration.streaming
        if self._heat is not None:
            # Weights load while the instruction before streams; nothing hides them if Tensor stood idle.
            weights = duration.weights if start > self.free else 0.0
            streaming = self._heat.streaming(start, streaming + weights)
        busy = max(streaming + duration.occupancy, duration.least)
        if self._heat is not None:
            self._heat.worked(start, busy)
        self.free = start + busy
        return Slot(start, self.free, start + streaming + duration.latency, loaded)

    def trigger(self, issuer: Issuer, ready: float) -> Slot:
        """Trigger a DMA; its end is not known yet."""
        start = max(self.free, self.next_trigger, ready)
        self.next_trigger = start + self._timing.dma.spacing
        return self.hold(start, start + trigger_time(issuer, self._timing), math.inf)

    def hold(self, start: float, free: float, done: float) -> Slot:
        """Be busy from ``start`` until ``free``."""
        assert start >= self.free, "an engine starts when it is free"
        self.free = free
        return Slot(start, free, done)

    def _load_table(self, table: str | None) -> tuple[float, float] | None:
        """Load a table of functions if another one is there; the first load belongs to the launch."""
        if table is None or table == self._table:
            return None
        first, self._table = self._table is None, table
        return None if first else (self.free, self.free + self._timing.scalar.table_load)


def trigger_time(issuer: Issuer, timing: Timing) -> float:
    """ns that triggering a DMA holds its engine."""
    return timing.dma.software_trigger if issuer.software else timing.dma.hardware_trigger


class _Heat:
    """Tensor runs slowly until it has worked for a while, and is cold again after as long a pause."""

    def __init__(self, tensor: TensorTiming) -> None:
        self._window = tensor.cold_ns
        self._factor = tensor.cold_factor
        self._busy = 0.0
        self._end = 0.0

    def streaming(self, start: float, warm: float) -> float:
        """ns of streaming from ``start`` on for what takes ``warm`` at full speed."""
        if start - self._end >= self._window:
            self._busy = 0.0
        slow = min(warm * self._factor, max(self._window - self._busy, 0.0))
        return slow + warm - slow / self._factor

    def worked(self, start: float, busy: float) -> None:
        """The engine was busy for ``busy`` ns from ``start`` on."""
        self._busy += busy
        self._end = start + busy
