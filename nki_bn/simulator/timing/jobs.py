# SPDX-License-Identifier: Apache-2.0
"""The records of a trace with what placing them needs: engine, issuer, edges."""

from __future__ import annotations

from dataclasses import dataclass

from nki_bn.hardware import SemaphoreTiming
from nki_bn.simulator.timing.dependencies import Edge, dependencies
from nki_bn.simulator.timing.dma import Issuer, issuer_of
from nki_bn.simulator.trace import Record, Trace

_BARRIER = "core_barrier"
MEETINGS = ("sendrecv", _BARRIER)


@dataclass(frozen=True, slots=True)
class Job:
    """A record, the engine whose stream it stands in, who issues it if it is a DMA, and the edges into it."""

    record: Record
    engine: str
    issuer: Issuer | None
    edges: list[Edge]

    @property
    def stream(self) -> tuple[int, str]:
        """Core and engine."""
        return self.record.core, self.engine

    @property
    def meeting(self) -> tuple[object, ...] | None:
        """What both sides of a sendrecv or a barrier share; None for everything else."""
        if self.record.opcode not in MEETINGS:
            return None
        return self.record.opcode, self.record.attributes.get("pipe"), self.record.attributes["sequence"]


def jobs_of(trace: Trace) -> list[Job]:
    """One job per record."""
    issuers = [_issuer(record) for record in trace]
    engines = [_engine(record, issuer) for record, issuer in zip(trace, issuers, strict=True)]
    queues = [f"dma {engine}" if issuer else engine for engine, issuer in zip(engines, issuers, strict=True)]
    edges = dependencies(trace, queues)
    return [Job(*parts) for parts in zip(trace, engines, issuers, edges, strict=True)]


def semaphore(producer: Job, consumer: Job, timing: SemaphoreTiming) -> float:
    """ns from the results of ``producer`` to the start of ``consumer``; the completion of a DMA contains it."""
    if producer.issuer is not None:
        return 0.0
    if consumer.issuer is not None:
        return timing.software_trigger if consumer.issuer.software else timing.hardware_trigger
    return timing.tensor if consumer.engine == "tensor" else timing.engine


def _issuer(record: Record) -> Issuer | None:
    return issuer_of(record) if record.engine == "dma" and record.opcode != _BARRIER else None


def _engine(record: Record, issuer: Issuer | None) -> str:
    if issuer is not None:
        return issuer.engine
    # A barrier may stand on the DMA rings, which have no stream of their own.
    return "sync" if record.engine == "dma" else record.engine
