# SPDX-License-Identifier: Apache-2.0
"""Modelled timelines of small kernels in tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from launching import launch, nl

from nki_bn.hardware import load_timing
from nki_bn.simulator.machine import Shaped
from nki_bn.simulator.timing import Timeline, model
from nki_bn.simulator.timing.classes import Duration, duration_of
from nki_bn.simulator.timing.spans import Span
from nki_bn.simulator.trace import Record

TIMING = load_timing("trn2")
DMA = TIMING.dma


def records(kernel: Callable[..., Any], *args: Any, lnc: int = 1) -> list[Record]:
    """The trace of a dry run; a kernel without arguments gets none."""
    body = kernel if args else lambda _: kernel()
    return launch(body, *(args or (Shaped((1,), "float32"),)), lnc=lnc, dry=True).trace.records


def timeline(kernel: Callable[..., Any], *args: Any, lnc: int = 1) -> Timeline:
    """The timeline of a dry run."""
    return model(launch(kernel, *args, lnc=lnc, dry=True).trace)


def spans(kernel: Callable[..., Any], *args: Any, lnc: int = 1) -> list[Span]:
    """The spans of a dry run."""
    return list(timeline(kernel, *args, lnc=lnc).spans)


def hbm(*shape: int, dtype: str = "float32") -> Shaped:
    """An argument in HBM."""
    return Shaped(shape, dtype)


def tile(columns: int = 512, dtype: Any = nl.float32, buffer: Any = nl.sbuf, partitions: int = 128) -> Any:
    """A new tile, inside a kernel."""
    return nl.ndarray((partitions, columns), dtype, buffer=buffer)


def duration(build: Callable[[], Any]) -> Duration:
    """What the one instruction that ``build`` issues costs on its engine."""
    (record,) = records(build)
    return duration_of(record, TIMING)


def transfer_time(nbytes: int, descriptors: int = 1) -> float:
    """ns of one partition's bytes on its engine, written from the descriptor law."""
    return descriptors * DMA.descriptor + nbytes / DMA.rate


def load_time(nbytes: int, descriptors: int = 1) -> float:
    """ns from the trigger of an undisturbed load of 128 partitions to its completion."""
    return DMA.first_load + 8 * transfer_time(nbytes, descriptors) + DMA.completion


def store_time(nbytes: int, descriptors: int = 1) -> float:
    """ns from the trigger of an undisturbed store of 128 partitions to its completion."""
    return DMA.first_store + 8 * transfer_time(nbytes, descriptors) + DMA.completion


def close(got: Any, want: Any) -> bool:
    """Whether times agree to a millionth of a ns and ten digits."""
    return bool(np.allclose(got, want, rtol=1e-10, atol=1e-6))
