# SPDX-License-Identifier: Apache-2.0
"""The planner's plans for the layers of models compile, and launch once."""

from __future__ import annotations

import pytest
from strategy_cases import LAYERS, time_us

from nki_bn.bench.measured import DeviceTimer, XlaLauncher
from nki_bn.bench.record import MODELLED
from nki_bn.bench.timers import Timer


@pytest.fixture(scope="module")
def once(timer: Timer) -> Timer:
    """One launch, which compiles; on the simulator a dry run."""
    return timer if timer.timing == MODELLED else DeviceTimer(XlaLauncher(), warmup=0, launches=1)


@pytest.mark.parametrize("name", LAYERS)
def test_plan_compiles(name: str, once: Timer) -> None:
    assert time_us(LAYERS[name], once) > 0
