# SPDX-License-Identifier: Apache-2.0
"""The device against the embedded simulator: values, and measured against modelled times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import elsewhere
import pytest
from strategy_cases import CASES, LARGE, differences, results, time_us

from nki_bn import verify
from nki_bn.bench.timers import Timer
from nki_bn.problem import Array

# Measured over modelled, either way. The model's own sources differ by up to 1.35 (loads that are not in deep queues)
# and by 1.2 (what a pair of cores gets of its memory), and a launch is measured on the host's clock, dispatch included.
FACTOR = 2.0


@pytest.fixture(scope="module")
def simulated() -> dict[str, Array]:
    """What the embedded simulator gives for all cases."""
    return elsewhere.call("embedded", "strategy_cases", "all_results")


@pytest.fixture(scope="module")
def modelled() -> dict[str, Array]:
    """Microseconds by the timing model."""
    return elsewhere.call("embedded", "strategy_cases", "modelled_times")


@pytest.mark.parametrize("name", CASES)
def test_values(name: str, simulated: dict[str, Array], record_property: Callable[[str, Any], None]) -> None:
    """Both are within the tolerance of the reference, so they may differ by twice that."""
    got = results(name)
    other = {key: simulated[f"{name}/{key}"] for key in got}
    record_property("equal elements", {key: float((got[key] == other[key]).mean()) for key in got})
    rows = differences(name, got, other)
    assert rows and all(row.ok for row in rows), f"\n{verify.table(rows)}"


@pytest.mark.parametrize("name", LARGE)
def test_times(
    name: str, timer: Timer, modelled: dict[str, Array], record_property: Callable[[str, Any], None]
) -> None:
    """At sizes where the fixed cost of a launch, which the model leaves out, is small."""
    time, expected = time_us(LARGE[name], timer), float(modelled[name])
    record_property("microseconds", {"found": time, "modelled": expected, "method": timer.method})
    assert expected / FACTOR <= time <= expected * FACTOR
