# SPDX-License-Identifier: Apache-2.0
"""The parts of kernels that carry out random programs."""

from __future__ import annotations

from typing import Any

from launching import nisa, nl

from fuzz.interpretation import Operand, Step
from fuzz.memory import Tile

BUFFERS = {"sbuf": nl.sbuf, "psum": nl.psum, "hbm": nl.private_hbm}


def fill(tensor: Any, source: Any, tile: Tile) -> None:
    """Copy ``source`` in HBM to ``tensor``, which stands for ``tile``."""
    if tile.place != "psum":
        nisa.dma_copy(tensor, source)
        return
    staged = nl.ndarray(tile.shape, tile.dtype)
    nisa.dma_copy(staged, source)
    nisa.tensor_copy(tensor, staged)


def issue_step(step: Step, tiles: list[Any]) -> None:
    """Issue an instruction on views of ``tiles``."""
    arguments = {
        name: getattr(nl, value) if isinstance(value, str) and name[:2] in ("op", "cm") else value
        for name, value in step.arguments.items()
    }
    tensors = {name: _view(tiles, operand) for name, operand in step.operands.items()}
    getattr(nisa, step.name)(**tensors, **arguments)


def _view(tiles: list[Any], operand: Operand) -> Any:
    view = tiles[operand.tile]
    for name, arguments in operand.path:
        view = getattr(view, name)(*arguments)
    return view
