# SPDX-License-Identifier: Apache-2.0
"""Running small kernels in tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from nki_bn.simulator import RunOptions, SimulationResult, install, run

VENDOR = install().kind == "vendor"
NEEDS_EMBEDDED = "needs the embedded simulator: pytest --simulator embedded"

import nki  # noqa: E402
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402

__all__ = ["launch", "load", "nisa", "nki", "nl", "outputs", "store"]


class VendorResult:
    """What the vendor's simulator gives: outputs, and nothing of what only the embedded one knows."""

    def __init__(self, outputs: Any) -> None:
        self.outputs = outputs

    def __getattr__(self, name: str) -> Any:
        pytest.skip(NEEDS_EMBEDDED)


def launch(kernel: Callable[..., Any], *args: Any, lnc: int = 1, **options: Any) -> SimulationResult | VendorResult:
    """Run ``kernel`` on ``lnc`` cores of the simulator that the tests run on.

    ``options`` are those of RunOptions (defaults: trn2, strict). Tests that ask for what the vendor's simulator does
    not have are skipped on it.
    """
    if not VENDOR:
        return run(kernel, args, {}, lnc, RunOptions(**options))
    _skip_unknown(options)
    with _target(options.get("target", "trn2")):
        return VendorResult(nki.simulate(nki.jit(kernel)[lnc] if lnc > 1 else kernel)(*args))


def _skip_unknown(options: dict[str, Any]) -> None:
    """The vendor computes with float32 operands, adds in an order of its own, keeps dtypes, and is never dry."""
    vendors = {"numerics": "ideal", "accumulate": "pairwise", "precise_fp": True, "dry": False}
    if any(options.get(name, value) != value for name, value in vendors.items()):
        pytest.skip(NEEDS_EMBEDDED)


@contextmanager
def _target(name: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "NEURON_PLATFORM_TARGET_OVERRIDE", name)
        yield


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
