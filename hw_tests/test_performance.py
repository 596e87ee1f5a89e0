# SPDX-License-Identifier: Apache-2.0
"""Times against those of an earlier run, the baseline; none comes with the project."""

from __future__ import annotations

import pytest
from strategy_cases import LARGE

from nki_bn.bench.checks import Checker
from nki_bn.bench.compare import compare
from nki_bn.bench.record import Record
from nki_bn.bench.rows import read_records
from nki_bn.bench.sweep import run_case
from nki_bn.bench.timers import Timer

# Share by which a median of 20 launches may grow.
THRESHOLD = 0.05


@pytest.fixture(scope="module")
def baseline(request: pytest.FixtureRequest, recorded: list[Record] | None) -> list[Record]:
    """The records of the file; none while one is being recorded."""
    path = request.config.getoption("baselines")
    if recorded is not None:
        return []
    if not path.exists():
        pytest.skip(f"no baseline in {path}: record one with --record-baselines")
    return read_records(path)


@pytest.mark.parametrize("name", LARGE)
def test_no_slower_than_the_baseline(
    name: str, timer: Timer, baseline: list[Record], recorded: list[Record] | None
) -> None:
    record = run_case(LARGE[name], timer, Checker())
    assert record.ok, record.error
    if recorded is not None:
        recorded.append(record)
        return
    comparison = compare(baseline, [record], THRESHOLD)
    assert not comparison.regressed, f"\n{comparison.text(everything=True)}"
