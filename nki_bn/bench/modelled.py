# SPDX-License-Identifier: Apache-2.0
"""Times from the timing model, on the trace of a dry run."""

from __future__ import annotations

from nki_bn.bench.launches import launch_of
from nki_bn.bench.record import MODELLED
from nki_bn.bench.timers import Figures
from nki_bn.planner import Plan
from nki_bn.problem import Problem
from nki_bn.simulator import RunOptions, Shaped, run
from nki_bn.simulator.timing import Timeline, model

_NS_PER_US = 1e3
# Below this share of the time nothing is called a bottleneck.
_BUSY = 0.5


class ModelTimer:
    """The timing model of the simulator."""

    timing = MODELLED
    method = "timing model, first instruction to last completion, on the trace of a dry run"

    def time(self, problem: Problem, plan: Plan) -> Figures:
        """The figures of the modelled timeline."""
        launch = launch_of(problem, plan, Shaped)
        options = RunOptions(target=problem.target, dry=True)
        result = run(launch.kernel, launch.arguments, {}, launch.lnc, options)
        return figures_of(model(result.trace, problem.target), result.sbuf_high_water)


def figures_of(timeline: Timeline, sbuf_high_water: tuple[int, ...]) -> Figures:
    """The figures of a timeline."""
    busy = busy_us(timeline)
    hbm_bytes = sum(flight.transfer.hbm_bytes for flight in timeline.flights)
    time = timeline.total / _NS_PER_US
    return Figures(time, len(timeline.spans), hbm_bytes, bound_by(busy, time), busy, sbuf_high_water)


def busy_us(timeline: Timeline) -> dict[str, float]:
    """Busy time by engine and core; "dma" is the busiest of a core's DMA engines."""
    busy = {f"{use.engine}.{use.core}": use.busy for use in timeline.engines}
    busy |= {f"dma.{core}": time for core, time in enumerate(timeline.dma_busy)}
    return {name: time / _NS_PER_US for name, time in busy.items()}


def bound_by(busy: dict[str, float], time: float) -> str:
    """The kind of resource that is busy longest; "latency" if none is for half of ``time``."""
    longest = max(busy, key=lambda name: busy[name])
    return longest.partition(".")[0] if busy[longest] >= _BUSY * time else "latency"
