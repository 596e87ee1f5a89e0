# SPDX-License-Identifier: Apache-2.0
"""Random programs on the simulator against their interpretation with NumPy, element by element."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from launching import launch, nisa, nl

from fuzz.interpretation import Refused, Step, interpret
from fuzz.kernels import BUFFERS, fill, issue_step
from fuzz.memory import MAY_NEED_A_COPY, Memory, Tile, view_of
from fuzz.programs import Program, contents, programs
from fuzz.repetition import check_repeated
from fuzz.surface import Surface
from nki_bn.simulator import NkiValidationError
from nki_bn.simulator.memory import WRITTEN


def check_program(program: Program) -> None:
    """The simulator refuses the steps that the interpretation refuses, and ends with the same bytes, written or not."""
    inputs = [contents(tile) for tile in program.tiles if tile.seed is not None]
    results, refusals = _simulated(program, inputs)
    memories = [Memory(tile) for tile in program.tiles]
    for memory in memories:
        if memory.tile.seed is not None:
            memory.data[...] = contents(memory.tile).reshape(-1).view(np.uint8)
            memory.known[...] = True
    for number, step in enumerate(program.steps):
        _carry_out(step, memories, refusals.get(number), program.numerics)
    for number, (memory, (data, known)) in enumerate(zip(memories, results, strict=True)):
        np.testing.assert_array_equal(known, memory.known, f"written bytes of tile {number}")
        _same(data[memory.known], memory.data[memory.known], memory.tile, number)


def _same(got: Any, want: Any, tile: Tile, number: int) -> None:
    """The same bytes, but that one NaN may be another."""
    if (got == want).all():
        return
    got, want = (np.where(np.isnan(wide), 0, wide) for wide in (values_of(got, tile), values_of(want, tile)))
    np.testing.assert_array_equal(got, want, f"tile {number}")


def values_of(data: Any, tile: Tile) -> Any:
    """Bytes as elements, in float64."""
    from nki_bn.simulator.dtypes import ALL_DTYPES

    dtype = ALL_DTYPES[tile.dtype]
    return data[: len(data) // dtype.itemsize * dtype.itemsize].view(dtype).astype(np.float64)


def _carry_out(step: Step, memories: list[Memory], refusal: Exception | None, numerics: str) -> None:
    """Interpret a step; both refuse it, or none."""
    may = any(name in MAY_NEED_A_COPY for operand in step.operands.values() for name, _ in operand.path)
    if refusal is not None and may:
        return
    try:
        views = {name: view_of(memories[operand.tile], operand.path) for name, operand in step.operands.items()}
        interpret(step, views, numerics)
    except Refused:
        assert refusal is not None, f"the simulator accepts {step}"
    else:
        if refusal is not None:
            raise refusal


def _simulated(program: Program, inputs: list[Any]) -> tuple[list[Any], dict[int, Exception]]:
    """Bytes and whether they were written, of every tile at the end, and the refusals by step."""
    results: list[Any] = []
    refusals: dict[int, Exception] = {}

    def kernel(unused: Any, *arrays: Any) -> Any:
        given = iter(arrays)
        tiles = [nl.ndarray(tile.shape, tile.dtype, buffer=BUFFERS[tile.place]) for tile in program.tiles]
        for tile, tensor in zip(program.tiles, tiles, strict=True):
            if tile.seed is not None:
                fill(tensor, next(given), tile)
        for number, step in enumerate(program.steps):
            try:
                issue_step(step, tiles)
            except NkiValidationError as error:
                refusals[number] = error
        results.extend(_bytes(tensor) for tensor in tiles)
        done = nl.ndarray((1, 1), nl.float32, buffer=nl.shared_hbm)
        zero = nl.ndarray((1, 1), nl.float32)
        nisa.memset(zero, 0.0)
        nisa.dma_copy(done, zero)
        return done

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        launch(kernel, np.zeros((1, 1), np.float32), *inputs, numerics=program.numerics)
    return results, refusals


def _bytes(tensor: Any) -> tuple[Any, Any]:
    """Of a tile: its bytes, and whether each was written."""
    data = np.frombuffer(tensor.array().tobytes(), np.uint8)
    return data, (tensor.shadow() & WRITTEN).astype(np.bool_).reshape(-1)


def check_example(program: Program) -> None:
    """Both what a launch computes, and that it can be repeated."""
    check_program(program)
    if any(tile.seed is not None for tile in program.tiles):
        check_repeated(program)


SURFACE = Surface(programs(), check_example)
