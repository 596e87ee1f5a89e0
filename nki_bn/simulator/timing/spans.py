# SPDX-License-Identifier: Apache-2.0
"""One instruction in time, and why it did not start earlier."""

from __future__ import annotations

from dataclasses import dataclass

from nki_bn.simulator.timing.service import Flight
from nki_bn.simulator.trace import Record

# Reasons of a start beside the kinds of edges: the engine was busy, triggers keep a distance, the other core was late.
ORDER, SPACING, PEER = "order", "spacing", "peer"


@dataclass(frozen=True, slots=True)
class Cause:
    """Why something did not start earlier: the record it waited for, if any, and the reason (see above and
    ``dependencies``)."""

    record: int | None
    why: str


@dataclass(slots=True)
class Span:
    """One instruction; times in ns.

    Attributes:
        engine: what executes it, or triggers its DMA.
        start, free: from when to when the engine is busy with it.
        done: when its results can be seen.
        cause: why it did not start earlier.
        stalled: how long the engine stood idle before.
        table_load: from when to when Scalar loaded a table of functions before.
        flight: the DMA itself.
    """

    record: Record
    engine: str
    start: float
    free: float
    done: float
    cause: Cause
    stalled: float = 0.0
    table_load: tuple[float, float] | None = None
    flight: Flight | None = None
