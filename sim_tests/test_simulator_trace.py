# SPDX-License-Identifier: Apache-2.0
"""The trace of a run: engines, operands as byte patterns, source lines, names and edges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from launching import launch, nisa, nl

from nki_bn.simulator import NkiValidationError
from nki_bn.simulator.memory import MemoryRegion

X = np.arange(12, dtype=np.float32).reshape(3, 4)


def traced(x: Any) -> Any:
    tile = nl.ndarray((3, 8), x.dtype, address=(0, 256), name="tile")
    first = nisa.dma_copy(dst=tile[:, 2:6], src=x, name="load")
    nisa.memset(tile[:, 0:2], 0.0, engine=nisa.engine.gpsimd).depends_on(first)
    nisa.tensor_copy(dst=tile[:, 6:8], src=tile[:, 2:6:2], engine=nisa.engine.scalar)
    out = nl.ndarray((3, 8), x.dtype, buffer=nl.shared_hbm, name="out")
    nisa.dma_copy(dst=out, src=tile)
    return out


def test_the_trace_records_engines_operands_and_lines() -> None:
    records = launch(traced, X).trace.records
    assert [(record.index, record.core, record.opcode, record.engine, record.name) for record in records] == [
        (0, 0, "dma_copy", "dma", "load"),
        (1, 0, "memset", "gpsimd", None),
        (2, 0, "tensor_copy", "scalar", None),
        (3, 0, "dma_copy", "dma", None),
    ]
    line = traced.__code__.co_firstlineno
    assert [record.source.line - line for record in records] == [2, 3, 4, 6]
    assert all(record.source.file == __file__ and record.source.function == "traced" for record in records)
    assert records[1].after == [0] and records[0].after == []


def test_the_trace_records_byte_patterns() -> None:
    load_record, fill, copy, save = launch(traced, X).trace.records
    (to,), (source,) = load_record.writes, load_record.reads
    assert (to.region, to.tensor, to.offset, to.shape, to.dtype) == (
        MemoryRegion.sbuf,
        "tile",
        256 + 8,
        (3, 4),
        "float32",
    )
    assert to.strides == (to.pitch, 4) and to.pitch == 212984 + 64 and (to.nbytes, to.columns) == (48, 4)
    assert (source.region, source.tensor, source.offset, source.strides) == (MemoryRegion.private_hbm, "x", 0, (16, 4))
    assert (source.nbytes, source.columns, source.extent, source.run_bytes()) == (48, 12, (0, 48), 48)
    assert fill.reads == () and fill.writes[0].offset == 256
    assert copy.reads[0].strides == (to.pitch, 8) and copy.reads[0].run_bytes() == 4
    assert copy.writes[0].offset == 256 + 24
    assert save.reads[0].memory == to.memory and save.writes[0].memory != source.memory
    assert save.writes[0].tensor == "out" and save.writes[0].run_bytes() == 96


def test_a_pattern_that_skips_columns_has_short_runs() -> None:
    def kernel(x: Any) -> None:
        nisa.dma_copy(dst=nl.ndarray((3, 2), x.dtype), src=x[:, 1:3])

    (record,) = launch(kernel, X).trace.records
    assert record.reads[0].run_bytes() == 8 and record.reads[0].extent == (4, 44)


def test_names_are_unique_in_strict_runs() -> None:
    def tensors(x: Any) -> None:
        nl.ndarray((3, 4), nl.float32, name="same")
        nl.ndarray((3, 4), nl.float32, name="same")

    def instructions(x: Any) -> None:
        tile = nl.ndarray((3, 4), nl.float32)
        for _ in range(2):
            nisa.memset(tile, 0.0, name="same")

    for kernel, kind in ((tensors, "tensor"), (instructions, "instruction")):
        with pytest.raises(NkiValidationError, match=f"{kind} name 'same' is used twice"):
            launch(kernel, X)
        launch(kernel, X, strict=False)


def test_depends_on_takes_instructions() -> None:
    def kernel(x: Any) -> None:
        tile = nl.ndarray((3, 4), nl.float32)
        handle = nisa.memset(tile, 0.0)
        assert handle.depends_on() is handle
        handle.depends_on(tile)

    with pytest.raises(TypeError, match="depends_on takes instruction handles, got NkiTensor"):
        launch(kernel, X)
