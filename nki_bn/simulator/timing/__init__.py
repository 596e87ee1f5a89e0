# SPDX-License-Identifier: Apache-2.0
"""An event-driven timing model over a trace: when every instruction would run on the hardware."""

from nki_bn.hardware import load_target, load_timing
from nki_bn.links import MESH
from nki_bn.simulator.timing.collectives import durations_of
from nki_bn.simulator.timing.perfetto import perfetto_json
from nki_bn.simulator.timing.picture import picture
from nki_bn.simulator.timing.schedule import schedule
from nki_bn.simulator.timing.text import report
from nki_bn.simulator.timing.timeline import Timeline
from nki_bn.simulator.trace import Trace

__all__ = ["Timeline", "model", "perfetto_json", "picture", "report"]


def model(trace: Trace, target: str = "trn2", topology: str = MESH) -> Timeline:
    """The modelled timeline of a run on ``target``.

    Collectives work as a "mesh" or as a "ring" (see ``nki_bn.links``); the other replicas are taken to come when this
    one does.

    Raises:
        TypeError, ValueError: target or topology is unknown, or has no parameters; an instruction is not in the model;
            instructions wait for each other (an edge to a later instruction of the same engine).
    """
    timing = load_timing(target)
    collectives = durations_of(trace, target, topology)
    cores = 1 + max((record.core for record in trace), default=0)
    return Timeline(load_target(target).name, timing, cores, tuple(schedule(trace, timing, collectives)))
