# SPDX-License-Identifier: Apache-2.0
"""The planner tries few layouts: how much a wide search would gain."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from nki_bn.bench.workloads import load_model
from nki_bn.hardware import load_target
from nki_bn.kernels.resident_layout import ResidentLayout
from nki_bn.kernels.sizing import SBUF_SLACK_BYTES
from nki_bn.planner import candidates
from nki_bn.problem import BackwardProblem
from nki_bn.resident_planner import Search, chunk_of, family_of, group_columns

# What the planner may lose in total against the search, and the families that the search starts from.
LOSS = 0.05
STARTS = 5
WIDTHS = np.unique(np.geomspace(150, 3200, 24).astype(int))
EIGHTHS = range(9)
TERMS = range(0, 9, 2)


def variations(search: Search, layout: ResidentLayout) -> Iterator[ResidentLayout]:
    """Every chunk width, every share of the engines, every end."""
    columns = group_columns(search.extent, layout.batch_bands, layout.space_bands)
    for width in WIDTHS:
        yield replace(layout, chunk=chunk_of(search.extent, layout.space_bands, columns, int(width)))
    for eighths in EIGHTHS:
        for terms in TERMS if search.task.folded() else (layout.term_eighths,):
            yield replace(layout, eighths=eighths, term_eighths=terms)
    yield replace(layout, short_start=not layout.short_start)
    yield replace(layout, short_end=not layout.short_end)


def descend(search: Search, start: ResidentLayout) -> float:
    """Predicted ns where no variation of the layout, with as many slots as fit or fewer, is better."""
    layout, ns = start, math.inf
    while True:
        found = [
            (search.predict(fitted), fitted.layout)
            for other in (layout, *variations(search, layout))
            for share in (0.7, 1.0, math.inf)
            if (fitted := search.fitted(other, share)) is not None
        ]
        best = min(found, key=lambda one: one[0])
        if best[0] >= ns:
            return ns
        ns, layout = best


def searched(problem: BackwardProblem) -> float:
    """Predicted ns of the best resident layout that a wide search finds; infinite if none fits."""
    budget = load_target(problem.target).sbuf_partition_bytes - int(SBUF_SLACK_BYTES)
    search = Search(problem, budget, "resident")
    families = {family_of(estimate.layout): estimate.layout for estimate in reversed(search.estimates)}
    return min((descend(search, layout) for layout in list(families.values())[-STARTS:]), default=math.inf)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name, batch, dtype, precision",
    [
        ("resnet50", 32, "bfloat16", "high"),
        ("resnet50", 32, "bfloat16", "fast"),
        ("resnet50", 32, "float32", "high"),
        ("efficientnet_b0", 32, "bfloat16", "high"),
        ("efficientnet_b0", 32, "float32", "high"),
        ("mobilenet_v2", 32, "bfloat16", "high"),
        ("r3d18", 8, "bfloat16", "high"),
        ("unet3d", 2, "bfloat16", "high"),
    ],
)
def test_a_wide_search_gains_little(name: str, batch: int, dtype: str, precision: str) -> None:
    taken = best = 0.0
    for layer in load_model(name).layers:
        problem = BackwardProblem(layer.shape(batch), dtype, precision=precision, lnc=2)
        mine = candidates(problem)[0].prediction.ns
        taken += layer.count * mine
        best += layer.count * min(mine, searched(problem))
    assert taken <= (1 + LOSS) * best
    print(f"{name} {dtype} {precision}: {taken / 1e3:.0f} us, by the search {best / 1e3:.0f}")
