# SPDX-License-Identifier: Apache-2.0
"""Running the cases of a sweep."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from importlib import metadata, resources
from typing import Any

from nki_bn import __version__, execute
from nki_bn.bench.checks import Checker
from nki_bn.bench.record import FAILED, MODELLED, OK, Case, Record
from nki_bn.bench.roofline import minimum_bytes, roofline_us
from nki_bn.bench.strategies import plan_of, problem_of
from nki_bn.bench.timers import Figures, Timer
from nki_bn.problem import Problem

_DIGITS = 12


def sweep(cases: Iterable[Case], timer: Timer, checker: Checker, done: Callable[[Record], None]) -> None:
    """Check and time each case and hand over its record; one that fails gets a record that says why.

    Raises:
        TypeError, ValueError: a case has no problem (see ``problem_of``).
    """
    for case in cases:
        done(run_case(case, timer, checker))


@dataclass
class _Outcome:
    """How far a case came."""

    plan: dict[str, Any] | None = None
    checked_shape: tuple[int, ...] | None = None
    figures: Figures = Figures()
    error: str | None = None


def run_case(case: Case, timer: Timer, checker: Checker) -> Record:
    """The record of one case; raises as :func:`sweep`."""
    problem = problem_of(case)
    outcome, roofline = _attempt(case, problem, timer, checker), roofline_us(problem)
    figures, modelled = outcome.figures, timer.timing == MODELLED
    return Record(
        **vars(case),
        timing=timer.timing,
        method=timer.method,
        status=OK if outcome.error is None else FAILED,
        error=outcome.error,
        checked_shape=outcome.checked_shape,
        plan=outcome.plan,
        instructions=figures.instructions,
        modelled_us=figures.time_us if modelled else None,
        measured_us=None if modelled else figures.time_us,
        roofline_us=roofline,
        roofline_share=None if figures.time_us is None else roofline / figures.time_us,
        hbm_bytes=figures.hbm_bytes,
        hbm_bytes_min=minimum_bytes(problem),
        bound_by=figures.bound_by,
        engine_busy_us=figures.engine_busy_us,
        sbuf_high_water=figures.sbuf_high_water,
        version=__version__,
        environment=environment(case.target),
    )


def _attempt(case: Case, problem: Problem, timer: Timer, checker: Checker) -> _Outcome:
    outcome = _Outcome()
    try:
        plan = plan_of(problem, case.strategy)
        outcome.plan = asdict(plan)
        outcome.checked_shape = checker.shape(problem, plan)
        outcome.figures = timer.time(problem, plan)
    except Exception as error:  # Whatever it was: the sweep goes on.
        outcome.error = f"{type(error).__name__}: {error}"
    return outcome


def environment(target: str) -> dict[str, str]:
    """What a time may depend on beside the case; the hardware parameters by their digest."""
    parameters = resources.files("nki_bn.configs").joinpath("hardware", f"{target}.toml").read_bytes()
    return {
        "python": platform.python_version(),
        "numpy": metadata.version("numpy"),
        "ml_dtypes": metadata.version("ml_dtypes"),
        "machine": f"{platform.system()} {platform.machine()}",
        "nki": execute.which_nki().kind,
        "hardware": hashlib.sha256(parameters).hexdigest()[:_DIGITS],
    }
