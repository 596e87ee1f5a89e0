# SPDX-License-Identifier: Apache-2.0
"""Every kernel and strategy against the float64 reference, by the table of tolerances."""

from __future__ import annotations

import pytest
from strategy_cases import CASES, judged, results

from nki_bn import verify


@pytest.mark.parametrize("name", CASES)
def test_outputs_are_those_of_the_reference(name: str) -> None:
    rows = judged(name, results(name))
    assert rows and all(row.ok for row in rows), f"\n{verify.table(rows)}"
