# SPDX-License-Identifier: Apache-2.0
"""The properties on many more examples, and replicas of drawn shapes through the simulator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from judging import judge_replicas
from property_cases import PROPERTIES, sizes
from replicas import ROOMY, TIGHT, draw

from nki_bn.simulator import RunOptions

pytestmark = pytest.mark.nightly
HERE = Path(__file__).resolve()


def properties() -> list[str]:
    """The names of all properties, which register when their files are imported."""
    for path in sorted(HERE.parent.glob("test_properties_*.py")):
        if path != HERE:
            import_module(path.stem)
    return sorted(PROPERTIES)


@pytest.mark.parametrize("name", properties())
def test_with_many_examples(name: str) -> None:
    check, strategy = PROPERTIES[name]
    test = settings(max_examples=1000, deadline=None)(given(strategy)(check))
    assert callable(test)
    test()


@dataclass(frozen=True)
class Step:
    """Shards, the shape of an example, and how the kernels are launched."""

    parts: tuple[int, ...]
    example: tuple[int, int, int, int]
    dtype: type
    relu: str
    seed: int
    launch: dict[str, Any]


EXAMPLES = st.tuples(
    st.sampled_from([1, 3, 31, 32, 64, 130]), st.integers(1, 3), st.integers(1, 12), st.integers(1, 24)
)
LAUNCHES = st.fixed_dictionaries(
    {
        "lnc": st.sampled_from([1, 2]),
        "sbuf_bytes": st.sampled_from([ROOMY, TIGHT]),
        "options": st.sampled_from([RunOptions(numerics="trn2"), RunOptions(numerics="ideal")]),
    }
)
STEPS = st.builds(
    Step,
    parts=sizes(4),
    example=EXAMPLES,
    dtype=st.sampled_from([np.float32, ml_dtypes.bfloat16, np.float16]),
    relu=st.sampled_from(["none", "mask", "recompute"]),
    seed=st.integers(0, 1000),
    launch=LAUNCHES,
)


@pytest.mark.statement("P1", "P2", "P2g", "Chan")
@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_a_synchronised_step_of_any_shape(step: Step) -> None:
    shape = (sum(step.parts), *step.example)
    layer, whole, parts = draw(shape, step.parts, step.dtype, step.relu == "recompute", step.seed)
    judge_replicas(replace(layer, relu=step.relu, **step.launch), whole, parts)
