# SPDX-License-Identifier: Apache-2.0
"""What finds a time: the figures it returns, and the two kinds of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from nki_bn import execute
from nki_bn.planner import Plan
from nki_bn.problem import Problem


@dataclass(frozen=True)
class Figures:
    """What was found about one launch: the fields of a record; ``time_us`` is the one that the timer finds.

    Nothing is known without a launch; a device tells only the time.
    """

    time_us: float | None = None
    instructions: int | None = None
    hbm_bytes: int | None = None
    bound_by: str | None = None
    engine_busy_us: dict[str, float] | None = None
    sbuf_high_water: tuple[int, ...] | None = None


class Timer(Protocol):
    """Finds the time of a launch.

    ``timing`` is "modelled" or "measured", ``method`` says how in words.
    """

    @property
    def timing(self) -> str: ...

    @property
    def method(self) -> str: ...

    def time(self, problem: Problem, plan: Plan) -> Figures:
        """The figures for ``problem`` solved as ``plan`` says."""
        ...


def timer_here() -> Timer:
    """Measures where there is a device, else models.

    Raises:
        ValueError: the vendor's nki is in use without a device: the model needs the embedded simulator.
    """
    from nki_bn.bench.measured import DeviceTimer, XlaLauncher
    from nki_bn.bench.modelled import ModelTimer

    if execute.which_nki().kind == "embedded":
        return ModelTimer()
    if not execute.has_device():
        raise ValueError(
            "the vendor's nki is in use without a Neuron device: there is nothing to measure on, and the "
            "timing model needs the embedded simulator"
        )
    return DeviceTimer(XlaLauncher())
