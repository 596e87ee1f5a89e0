# SPDX-License-Identifier: Apache-2.0
"""The backward strategies ``resident`` and ``reread`` with any layout, also such as the planner would not take."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from agreement import outputs_of
from hypothesis import given, settings
from hypothesis import strategies as st

from nki_bn import verify
from nki_bn.cases import Draw
from nki_bn.kernels.resident_geometry import extent_of_core
from nki_bn.kernels.resident_layout import ResidentLayout, group_size, resident_plan
from nki_bn.predict import predict
from nki_bn.problem import DTYPES, GRADIENTS, RELU_MODES, BackwardCase, BackwardProblem
from nki_bn.requests import prepare_backward
from nki_bn.resident_planner import task_of
from nki_bn.simulator import RunOptions

SIXTEEN_BITS = ("float16", "bfloat16")


def check(case: BackwardCase, layout: ResidentLayout, strategy: str, lnc: int, numerics: str, precision: str) -> None:
    """All outputs of a strict run agree with the reference, and the plan can be predicted."""
    problem = prepare_backward(case, lnc=lnc, precision=precision).problem
    plan = resident_plan(task_of(problem), layout, strategy)
    outputs = outputs_of(case, numerics, lnc=lnc, plan=plan, precision=precision)
    arithmetic = verify.arithmetic_of(problem, plan, RunOptions(numerics=numerics))
    failed = [comparison for comparison in verify.judge_backward(case, outputs, arithmetic) if not comparison.ok]
    assert not failed, plan
    assert predict(plan).ns > 0


def check_subset(
    case: BackwardCase, layout: ResidentLayout, strategy: str, lnc: int, precision: str, need: tuple[str, ...]
) -> None:
    """What is needed has the same bits whatever else is made."""
    problem = prepare_backward(case, lnc=lnc, precision=precision).problem
    plan = resident_plan(task_of(problem), layout, strategy)
    fewer = replace(plan, **{f"need_{name}": name in need for name in GRADIENTS})
    made = outputs_of(case, "trn2", lnc=lnc, plan=plan, precision=precision)
    some = outputs_of(case, "trn2", lnc=lnc, plan=fewer, precision=precision, need=need)
    for name, whole, part in zip(GRADIENTS, made, some, strict=False):
        assert (part is None) == (name not in need)
        assert part is None or np.array_equal(whole.view(np.uint8), part.view(np.uint8)), name
    assert predict(fewer).ns > 0


NEEDS = [("dbeta",), ("dgamma",), ("dx",), ("dgamma", "dbeta"), ("dx", "dbeta"), ("dx", "dgamma")]


def least_slots(problem: BackwardProblem, layout: ResidentLayout, strategy: str) -> int:
    """The shortest ring that a layout can do with."""
    return 2 if strategy == "reread" else int(group_size(problem.extents, problem.lnc, layout).chunks) + 1


def layouts(problem: BackwardProblem, strategy: str) -> st.SearchStrategy[ResidentLayout]:
    """Any layout of a problem."""

    @st.composite
    def drawn(draw: st.DrawFn) -> ResidentLayout:
        shared = [("batch", problem.batch), ("spatial", problem.spatial)]
        splits = ["channel", *(name for name, length in shared if length > 1)]
        split = "none" if problem.lnc == 1 else draw(st.sampled_from(splits))
        extent = extent_of_core(problem.extents, split, 0, problem.lnc)
        tensor = draw(st.booleans()) and problem.dtype != "float32" and problem.training
        channels = 1 if tensor else draw(st.integers(1, min(extent.channels, 128)))
        bands = [draw(st.integers(1, max(1, min(extent.batches, 6)))) for _ in range(2)]
        spaces = [draw(st.integers(1, max(1, min(extent.length, 6, 128 // channels // band)))) for band in bands]
        layout = ResidentLayout(
            split=split,
            set_channels=channels,
            group_sets=draw(st.integers(1, 3)),
            batch_bands=min(bands[0], 128 // channels),
            space_bands=spaces[0],
            last_batch_bands=min(bands[1], 128 // channels),
            last_space_bands=spaces[1],
            chunk=draw(st.integers(max(1, extent.length // 4), 600)),
            slots=0,
            tensor_sums=tensor,
            eighths=draw(st.integers(0, 8)),
            term_eighths=0 if problem.dtype == "float32" else draw(st.integers(0, 8)),
            short_start=draw(st.booleans()),
            short_end=draw(st.booleans()),
        )
        return replace(layout, slots=least_slots(problem, layout, strategy) + draw(st.sampled_from([0, 1, 3, 20])))

    return drawn()


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_any_layout_agrees(data: st.DataObject) -> None:
    draw = data.draw
    strategy, numerics = draw(st.sampled_from(["resident", "reread"])), draw(st.sampled_from(["trn2", "ideal"]))
    shape = draw(st.integers(1, 6)), draw(st.integers(1, 9)), draw(st.integers(1, 130))
    dtype, relu = draw(st.sampled_from(list(DTYPES))), draw(st.sampled_from(RELU_MODES))
    case = Draw(shape, dtype, mean=draw(st.sampled_from([0.0, 2.0]))).case(relu, training=draw(st.booleans()))
    lnc = draw(st.sampled_from([1, 2]))
    precision = "high" if dtype == "float32" else draw(st.sampled_from(["high", "fast"]))
    layout = draw(layouts(prepare_backward(case, lnc=lnc, precision=precision).problem, strategy))
    check(case, layout, strategy, lnc, numerics, precision)
    if draw(st.booleans()):
        check_subset(case, layout, strategy, lnc, precision, draw(st.sampled_from(NEEDS)))


@pytest.mark.parametrize("ends", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("sets", [1, 2, 3])
@pytest.mark.parametrize("dtype, tensor", [("float32", False), ("bfloat16", False), ("bfloat16", True)])
def test_chunks_wide_enough_to_be_cut_in_two(dtype: str, tensor: bool, sets: int, ends: tuple[bool, bool]) -> None:
    """The sets of a group then have unequal numbers of chunks, and no sum is another group's."""
    case = Draw((2, 6, 1100), dtype, mean=0.5).case()
    layout = ResidentLayout("none", 1, sets, 1, 1, 1, 1, 1100, 20, tensor, 4, 2 * (dtype != "float32"), *ends)
    check(case, layout, "resident", 1, "trn2", "high")


def test_a_core_whose_sets_come_as_rows_beside_one_with_a_last_set() -> None:
    """Core 0 has two whole sets of 70 channels, core 1 one and a smaller one: neither holds all that the plan lists."""
    case = Draw((2, 279, 45)).case()
    layout = ResidentLayout("channel", 70, 1, 1, 1, 1, 1, 90, 11, False, 5, 0, True, True)
    check(case, layout, "resident", 2, "trn2", "high")


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("need", NEEDS)
def test_fewer_outputs_have_the_same_bits(need: tuple[str, ...], tensor: bool) -> None:
    case = Draw((4, 5, 80), "bfloat16", mean=0.5).case()
    layout = ResidentLayout("none", 1 if tensor else 5, 1, 2, 4, 2, 4, 40, 20, tensor, 4, 0, True, True)
    check_subset(case, layout, "resident", 1, "high", need)


@pytest.mark.parametrize("strategy", ["resident", "reread"])
@pytest.mark.parametrize("chunk", [20, 40, 400])
@pytest.mark.parametrize("sets", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_groups_of_few_sums_by_tensor(dtype: str, sets: int, chunk: int, strategy: str) -> None:
    """A group's sums are read before the next but one adds to the same accumulators, however few its chunks are.

    The ring is long enough that loads do not wait for the turn, and dy sums up to little, so that
    the sums of another channel stand out.
    """
    case = Draw((4, 9, 80), dtype, mean=0.5).case()
    case = replace(case, dy=(case.x.astype(np.float32) - case.mean[:, None]).astype(case.x.dtype))
    layout = ResidentLayout("none", 1, sets, 2, 4, 2, 4, chunk, 20, True, 4, 0, False, False)
    check(case, layout, strategy, 1, "trn2", "high")
