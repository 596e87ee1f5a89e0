# SPDX-License-Identifier: Apache-2.0
"""SyncBatchNorm on ranks of torch.distributed: a step is that of the global batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import Ranks, ranks_in
from synchronised_steps import Case, judge, one_step

COLLECTIVES = {
    "two_round": ["all_reduce", "all_reduce", "all_reduce"],
    "one_round": ["all_gather_into_tensor", "all_reduce"],
}
# Equal and unequal shards on 2, 3 and 4 ranks, and one without examples.
SIZES = ((2, 2), (1, 3, 2), (2, 0, 1, 1))
MODES = tuple(COLLECTIVES)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Four ranks; smaller groups are the first of them."""
    with ranks_in(tmp_path_factory.mktemp("ranks"), 4) as made:
        yield made


def check(ranks: Ranks, case: Case) -> None:
    """A step, judged; it communicates as its mode says, and reads no value from Python."""
    made = ranks.run(one_step, case)
    judge(case, made)
    members, others = made[: len(case.sizes)], made[len(case.sizes) :]
    assert all(member["collectives"] == COLLECTIVES[case.mode] for member in members)
    assert others == [None] * len(others)
    if min(case.sizes) > 1:
        assert not any(member["reads"] for member in members)


@pytest.mark.parametrize("kind", ["plain", "relu", "add"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("backend", ["simulator", "torch"])
def test_a_step_is_that_of_the_global_batch(
    ranks: Ranks, backend: str, sizes: tuple[int, ...], mode: str, kind: str
) -> None:
    check(ranks, Case(sizes, mode, backend, kind))


@pytest.mark.parametrize("mean", [1e3, 1e6])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", ["simulator", "torch"])
def test_means_far_from_zero(ranks: Ranks, backend: str, mode: str, mean: float) -> None:
    check(ranks, Case((1, 3, 2), mode, backend, mean=mean, std=1.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["simulator", "torch"])
def test_narrow_inputs(ranks: Ranks, backend: str, dtype: torch.dtype) -> None:
    for kind, mode in (("plain", "two_round"), ("relu", "two_round"), ("add", "one_round")):
        check(ranks, Case((1, 3), mode, backend, kind, dtype))


@pytest.mark.parametrize("kind", ["relu", "add"])
def test_masks_that_are_made_again(ranks: Ranks, kind: str) -> None:
    check(ranks, Case((1, 3), kind=kind, options={"relu_mask": "recompute"}))


@pytest.mark.parametrize(
    "options",
    [
        {"affine": False},
        {"bias": False},
        {"track_running_stats": False},
        {"affine": False, "track_running_stats": False},
        {"momentum": None},
        {"eps": 0.5, "momentum": 0.7},
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ["simulator", "torch"])
def test_layers_without_this_or_that(ranks: Ranks, backend: str, options: dict[str, object]) -> None:
    case = Case((1, 3), backend=backend, options=options)
    check(ranks, case)
    check(ranks, replace(case, mode="one_round"))


@pytest.mark.parametrize("inner", [(3,), (3, 5), (3, 2, 2, 2)], ids=str)
def test_other_ranks_of_inputs(ranks: Ranks, inner: tuple[int, ...]) -> None:
    for sizes in ((2, 2), (1, 1, 0)):
        check(ranks, Case(sizes, inner=inner))


@pytest.mark.nightly
@pytest.mark.parametrize("mode", MODES)
def test_eight_ranks(tmp_path: Path, mode: str) -> None:
    with ranks_in(tmp_path, 8) as eight:
        for sizes in ((1,) * 8, (2, 1, 0, 1, 3, 1, 1, 2)):
            for backend in ("simulator", "torch"):
                check(eight, Case(sizes, mode, backend, "add"))
                check(eight, Case(sizes, mode, backend, mean=1e6, std=1.0))
