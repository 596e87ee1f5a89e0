# SPDX-License-Identifier: Apache-2.0
"""What single instructions do: the figures that the numerics contract rests on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import probes
import pytest

from nki_bn import tolerances, verify
from nki_bn.comparison import compare
from nki_bn.tolerances import COLUMNS, POINTER, Arithmetic

Note = Callable[[str, Any], None]
# A Newton step leaves 1.5*e**2 of a relative error e, which is to be below half a unit of float32: e < 2**-12.3.
ROOT = (2.0**-24 / 1.5) ** 0.5


@pytest.mark.parametrize("place", probes.PLACES)
def test_per_partition_operands_are_good_to_18_bits(place: str, record_property: Note) -> None:
    """The contract splits means for this: were the error 0 at every place, it need not; a larger one breaks it."""
    error = probes.operand_error(place)
    record_property("relative error of the operand", error)
    assert error <= POINTER["trn2"]


@pytest.mark.parametrize("columns", [1, 2, 7, 511, 512])
def test_bn_stats_and_bn_aggr(columns: int, record_property: Note) -> None:
    """Counts by parity, exactly; means and variances as the kernels need them. How odd rows are split is noted."""
    data, triples, moments = probes.statistics_answers(columns)
    want = probes.by_parity(data)
    record_property("worst difference by slot", np.abs(triples - want).max(0).tolist())
    counts = triples[:, 0] + triples[:, 3]
    assert np.array_equal(counts, np.full(len(data), columns))
    mean, var = data.astype(np.float64).mean(1), data.astype(np.float64).var(1)
    allowed = tolerances.statistics(data.T, mean, var, Arithmetic("float32"))
    pairs = (("mean", moments[:, 0], mean), ("var", moments[:, 1], var))
    rows = [compare(name, got, wanted, allowed[name]) for name, got, wanted in pairs]
    assert all(row.ok for row in rows), f"\n{verify.table(rows)}"


def test_rsqrt(record_property: Note) -> None:
    """GpSimd's is near enough for one Newton step to reach float32; Scalar's is noted, as no kernel relies on it."""
    errors = probes.root_errors()
    record_property("relative error of 1/sqrt", errors)
    assert errors["gpsimd"] <= ROOT
    assert errors["gpsimd and Newton"] <= COLUMNS


@pytest.mark.parametrize("position", range(len(probes.INSTRUCTIONS)), ids=probes.INSTRUCTIONS)
def test_instruction(position: int) -> None:
    """Results that float32 holds exactly, to the bit."""
    which = probes.INSTRUCTIONS[position]
    got = np.asarray(probes.launched(probes.probe_kernels.instruction_probe, *probes.instruction_inputs(), which))
    np.testing.assert_array_equal(got, probes.expected_results()[str(position)])
