# SPDX-License-Identifier: Apache-2.0
"""What a collective costs, by hops and bytes: of the replica that is looked at, whose peers come when it does.

Collectives have a stream of their own on every core, in which they follow each other.
"""

from __future__ import annotations

from nki_bn.links import RING, TOPOLOGIES, Links, load_links
from nki_bn.simulator.timing.classes import Duration
from nki_bn.simulator.trace import Record, Trace

ENGINE = "collective"

_NS_PER_US = 1e3


def durations_of(trace: Trace, target: str, topology: str) -> dict[int, Duration]:
    """What each collective of a trace costs, by the index of its record.

    Raises:
        ValueError: the topology is unknown; the trace has collectives, and the target no parameters for them.
    """
    if topology not in TOPOLOGIES:
        raise ValueError(f"topology is {topology!r}; accepted: {', '.join(map(repr, TOPOLOGIES))}")
    found = [record for record in trace if record.engine == ENGINE]
    links = load_links(target) if found else None
    return {record.index: _duration(record, links, topology) for record in found if links is not None}


def _duration(record: Record, links: Links, topology: str) -> Duration:
    size = sum(access.nbytes for access in record.reads)
    ranks = len(record.attributes["ranks"])
    if ranks == 1:
        us = size / links.rate
    elif topology == RING and not record.opcode.startswith("collective_permute"):
        us = links.ring(size, ranks)
    else:
        us = links.mesh(size)
    return Duration(us * _NS_PER_US, 0.0, 0.0)
