# SPDX-License-Identifier: Apache-2.0
"""Running small kernels in tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nki_bn.simulator import RunOptions, SimulationResult, install, run

install()

import nki  # noqa: E402
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402

__all__ = ["launch", "load", "nisa", "nki", "nl", "outputs", "store"]


def launch(kernel: Callable[..., Any], *args: Any, lnc: int = 1, **options: Any) -> SimulationResult:
    """Run ``kernel`` on ``lnc`` cores; ``options`` are those of RunOptions (defaults: trn2, strict)."""
    return run(kernel, args, {}, lnc, RunOptions(**options))


def outputs(kernel: Callable[..., Any], *args: Any, lnc: int = 1, **options: Any) -> Any:
    """What ``kernel`` returns."""
    return launch(kernel, *args, lnc=lnc, **options).outputs


def load(source: Any, shape: tuple[int, ...] | None = None) -> Any:
    """Inside a kernel: a new SBUF tile with the elements of an HBM tensor."""
    tile = nl.ndarray(shape or source.shape, source.dtype)
    nisa.dma_copy(dst=tile, src=source)
    return tile


def store(tile: Any, shape: tuple[int, ...] | None = None) -> Any:
    """Inside a kernel: a new shared HBM tensor with the elements of an on-chip tile."""
    result = nl.ndarray(shape or tile.shape, tile.dtype, buffer=nl.shared_hbm)
    if tile.buffer == nl.psum:
        copy = nl.ndarray(tile.shape, tile.dtype)
        nisa.tensor_copy(dst=copy, src=tile)
        tile = copy
    nisa.dma_copy(dst=result, src=tile)
    return result
