# SPDX-License-Identifier: Apache-2.0
"""Edges between instructions that a kernel asks for: by handle, or by name through ``kernel.with_schedule``."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nki_bn.simulator.shapes import require
from nki_bn.simulator.trace import Record

# Names of producers by the name of their consumer.
Edges = Mapping[str, tuple[str, ...]]


def edges_of(schedule: Any) -> dict[str, tuple[str, ...]]:
    """The edges of a list of pairs (consumer, producer or list of producers).

    Raises:
        TypeError: it is no such list.
        NkiValidationError: an instruction is to wait for itself.
    """
    if not isinstance(schedule, (list, tuple)):
        raise TypeError(f"with_schedule takes a list of pairs (consumer, producers), got {schedule!r}")
    edges: dict[str, tuple[str, ...]] = {}
    for pair in schedule:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise TypeError(f"with_schedule takes pairs (consumer, producers), got {pair!r}")
        consumer, producers = pair[0], [pair[1]] if isinstance(pair[1], str) else pair[1]
        if not isinstance(producers, (list, tuple)) or not all(
            isinstance(name, str) for name in (consumer, *producers)
        ):
            raise TypeError(f"with_schedule takes names of instructions, got {pair!r}")
        require(consumer not in producers, f"with_schedule: {consumer!r} cannot wait for itself")
        edges[consumer] = (*edges.get(consumer, ()), *producers)
    return edges


def add_edge(consumer: Record, producer: Record) -> None:
    """Let ``consumer`` wait for ``producer``.

    Raises:
        NkiValidationError: the producer stands in a device loop that the consumer is not in.
    """
    require(
        consumer.loops[: len(producer.loops)] == producer.loops,
        f"{consumer.opcode} at {consumer.source} waits for {producer.opcode} at {producer.source} in another device "
        "loop; accepted: a producer in the same loop or around it",
    )
    consumer.after.append(producer.index)


@dataclass
class NamedEdges:
    """The edges of a schedule on one core: each is added when its consumer runs, if its producer ran before."""

    edges: Edges
    _named: dict[str, Record] = field(default_factory=dict)
    _early: set[tuple[str, str]] = field(default_factory=set)

    def note(self, record: Record) -> None:
        """The next instruction of the core."""
        if record.name is None:
            return
        for producer in self.edges.get(record.name, ()):
            if producer in self._named:
                add_edge(record, self._named[producer])
            else:
                self._early.add((record.name, producer))
        self._named[record.name] = record

    @property
    def names(self) -> set[str]:
        """Names that instructions had."""
        return set(self._named)

    def warn_about_order(self) -> None:
        """Warn about consumers that ran before their producers: nothing here turns them round."""
        for consumer, producer in sorted(self._early):
            if producer in self._named:
                warnings.warn(
                    f"with_schedule: {consumer!r} comes before {producer!r} in the program; the edge is ignored here",
                    stacklevel=2,
                )


def finish(cores: Sequence[NamedEdges]) -> None:
    """Check a schedule after a run.

    Raises:
        NkiValidationError: no instruction had one of its names.
    """
    known: set[str] = set().union(*(core.names for core in cores))
    wanted = {name for consumer, producers in cores[0].edges.items() for name in (consumer, *producers)}
    require(wanted <= known, f"with_schedule names no instruction: {', '.join(sorted(wanted - known))}")
    for core in cores:
        core.warn_about_order()
