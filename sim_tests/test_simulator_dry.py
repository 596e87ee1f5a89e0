# SPDX-License-Identifier: Apache-2.0
"""Dry runs: the trace of a kernel from shapes alone."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from launching import nisa, nl

from nki_bn.kernels.batch_norm_bwd import batch_norm_bwd
from nki_bn.kernels.batch_norm_fwd import batch_norm_fwd
from nki_bn.kernels.sizing import staged_plan, two_read_plan
from nki_bn.simulator import RunOptions, Shaped, SimulationResult, run

SHAPES = [(4, 64, 49), (3, 200, 5), (2, 3, 3000)]
SBUF = 40_000


def argument(shape: tuple[int, ...], dtype: str, dry: bool) -> Any:
    """An input of ones, or its stand-in."""
    numpy_dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    return Shaped(shape, dtype) if dry else np.ones(shape, numpy_dtype)


def backward(shape: tuple[int, int, int], lnc: int, dry: bool) -> SimulationResult:
    batch, channels, spatial = shape
    x = argument((batch, channels, 1, 1, spatial), "bfloat16", dry)
    column, row = argument((channels, 1), "float32", dry), argument((channels,), "float32", dry)
    plan = staged_plan(shape, "bfloat16", "recompute", lnc, SBUF)
    return run(batch_norm_bwd, (x, x, row, row, column, column, 1e-5, True, None, plan), {}, lnc, RunOptions(dry=dry))


def forward(shape: tuple[int, int, int], lnc: int, dry: bool) -> SimulationResult:
    batch, channels, spatial = shape
    x = argument((batch, channels, 1, 1, spatial), "float32", dry)
    column = argument((channels, 1), "float32", dry)
    plan = two_read_plan(shape, "float32", lnc, SBUF)
    return run(batch_norm_fwd, (x, column, column), {"plan": plan}, lnc, RunOptions(dry=dry))


def what_was_recorded(result: SimulationResult) -> list[Any]:
    """Everything in the trace that does not number memories."""
    return [
        (
            r.core,
            r.opcode,
            r.engine,
            r.source,
            r.name,
            r.after,
            {k: v for k, v in r.attributes.items() if k != "memory"},
            [(a.region, a.tensor, a.offset, a.shape, a.strides, a.dtype) for a in (*r.writes, *r.reads)],
        )
        for r in result.trace
    ]


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("direction", [backward, forward])
def test_trace_and_memory_are_those_of_a_full_run(direction: Any, shape: tuple[int, int, int], lnc: int) -> None:
    full, dry = direction(shape, lnc, False), direction(shape, lnc, True)
    assert what_was_recorded(dry) == what_was_recorded(full) and len(dry.trace) > 20
    assert dry.sbuf_high_water == full.sbuf_high_water
    for got, known in zip(full.outputs, dry.outputs, strict=True):
        assert (got is None) == (known is None)
        if got is not None:
            assert known == Shaped(got.shape, got.dtype.name)


def test_arrays_are_not_touched() -> None:
    """A dry run looks at shapes only: it neither reads nor writes."""
    x = np.full((4, 8), np.nan, np.float32)

    def kernel(a: Any) -> Any:
        tile = nl.ndarray((4, 8), a.dtype)
        nisa.memset(dst=tile, value=1.0)
        nisa.dma_copy(dst=a, src=tile)
        return a

    result = run(kernel, (x,), {}, 1, RunOptions(dry=True))
    assert result.outputs == Shaped((4, 8), "float32") and np.isnan(x).all() and len(result.trace) == 2


def test_stand_ins_are_for_dry_runs() -> None:
    with pytest.raises(TypeError, match="dma_copy dst must be a tensor, got Shaped"):
        run(lambda a: nisa.dma_copy(dst=a, src=a), (Shaped((4,), "float32"),), {}, 1, RunOptions())
