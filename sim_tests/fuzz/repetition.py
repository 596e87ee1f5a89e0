# SPDX-License-Identifier: Apache-2.0
"""Random programs launched several times with new values: repeated launches give what simulated ones give."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from launching import launch, nisa, nl
from repeating import LAUNCHES

from fuzz.kernels import BUFFERS, fill, issue_step
from fuzz.programs import Program, contents
from nki_bn.simulator import NkiValidationError
from nki_bn.simulator.replay import forget


def check_repeated(program: Program) -> None:
    """Of every launch of a program the outputs, or the error, are those of a simulation.

    The steps that the simulator refuses are left out, but for those that it refuses for some values only.
    """
    kernel = _kernel(program)
    forget()
    for number in range(LAUNCHES):
        inputs = [
            contents(replace(tile, seed=tile.seed + 1000 * number)) for tile in program.tiles if tile.seed is not None
        ]
        expected = _outcome(kernel, inputs, program, replay=False)
        assert _outcome(kernel, inputs, program, replay=True) == expected, f"launch {number}"


def _outcome(kernel: Callable[..., Any], inputs: list[Any], program: Program, replay: bool) -> Any:
    copies = [values.copy() for values in inputs]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = launch(kernel, *copies, numerics=program.numerics, strict=False, replay=replay)
        except NkiValidationError as error:
            return type(error)
    return [values.tobytes() for values in (*result.outputs, *copies)]


def _kernel(program: Program) -> Callable[..., Any]:
    def kernel(*arrays: Any) -> Any:
        given = iter(arrays)
        tiles = [nl.ndarray(tile.shape, tile.dtype, buffer=BUFFERS[tile.place]) for tile in program.tiles]
        for tile, tensor in zip(program.tiles, tiles, strict=True):
            if tile.seed is not None:
                fill(tensor, next(given), tile)
        for step in program.steps:
            try:
                issue_step(step, tiles)
            except NkiValidationError:
                continue
        return tuple(_stored(tensor) for tensor in tiles)

    return kernel


def _stored(tensor: Any) -> Any:
    out = nl.ndarray(tensor.shape, tensor.dtype, buffer=nl.shared_hbm)
    if tensor.buffer is nl.psum:
        staged = nl.ndarray(tensor.shape, tensor.dtype)
        nisa.tensor_copy(staged, tensor)
        tensor = staged
    nisa.dma_copy(out, tensor)
    return out
