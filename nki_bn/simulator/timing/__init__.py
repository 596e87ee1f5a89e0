# SPDX-License-Identifier: Apache-2.0
"""An event-driven timing model over a trace: when every instruction would run on the hardware."""

from nki_bn.hardware import load_target, load_timing
from nki_bn.simulator.timing.perfetto import perfetto_json
from nki_bn.simulator.timing.picture import picture
from nki_bn.simulator.timing.schedule import schedule
from nki_bn.simulator.timing.text import report
from nki_bn.simulator.timing.timeline import Timeline
from nki_bn.simulator.trace import Trace

__all__ = ["Timeline", "model", "perfetto_json", "picture", "report"]


def model(trace: Trace, target: str = "trn2") -> Timeline:
    """The modelled timeline of a run on ``target``.

    Raises:
        TypeError, ValueError: the target is unknown or has no timing parameters; an instruction is not in the model;
            instructions wait for each other (an edge to a later instruction of the same engine).
    """
    timing = load_timing(target)
    cores = 1 + max((record.core for record in trace), default=0)
    return Timeline(load_target(target).name, timing, cores, tuple(schedule(trace, timing)))
