# SPDX-License-Identifier: Apache-2.0
"""Times from a device: warm-up, repeated launches, their median."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from nki_bn.bench.launches import Launch, launch_of
from nki_bn.bench.record import MEASURED
from nki_bn.bench.timers import Figures
from nki_bn.planner import Plan
from nki_bn.problem import DTYPES, Array, Problem

_NS_PER_US = 1e3


class Launcher(Protocol):
    """Runs kernels on a device; ``words`` says what the time of a launch includes."""

    @property
    def words(self) -> str: ...

    def tensor(self, shape: tuple[int, ...], dtype: str) -> Any:
        """A tensor on the device, with values that a batch norm can work on."""
        ...

    def run(self, launch: Launch) -> None:
        """Launch, and wait until it is done."""
        ...


class DeviceTimer:
    """The median of ``launches`` launches after ``warmup`` others, each waited for.

    Args:
        launcher: what launches.
        clock: nanoseconds, monotonic.
        warmup: launches that do not count; the first compiles.
        launches: launches that count.
    """

    timing = MEASURED

    def __init__(
        self, launcher: Launcher, clock: Callable[[], int] = time.perf_counter_ns, warmup: int = 5, launches: int = 20
    ) -> None:
        self._launcher = launcher
        self._clock = clock
        self._warmup = warmup
        self._launches = launches

    @property
    def method(self) -> str:
        """In words."""
        return f"median of {self._launches} launches after {self._warmup}, {self._launcher.words}"

    def time(self, problem: Problem, plan: Plan) -> Figures:
        """The median."""
        launch = launch_of(problem, plan, self._launcher.tensor)
        for _ in range(self._warmup):
            self._launcher.run(launch)
        return Figures(statistics.median(self._once(launch) for _ in range(self._launches)) / _NS_PER_US)

    def _once(self, launch: Launch) -> int:
        start = self._clock()
        self._launcher.run(launch)
        return self._clock() - start


class XlaLauncher:
    """Launches through torch-xla, on tensors that are on the device already."""

    words = "on the clock of the host, from dispatch through torch-xla to completion, tensors on the device"

    def __init__(self) -> None:
        import torch_xla

        self._device = torch_xla.device()
        self._wait: Callable[[], Any] = lambda: torch_xla.sync(wait=True)

    def tensor(self, shape: tuple[int, ...], dtype: str) -> Any:
        """As :class:`Launcher`: values from 0 to 1, mask values 0 and 1."""
        return _to_torch(values_of(shape, dtype)).to(self._device)

    def run(self, launch: Launch) -> None:
        """As :class:`Launcher`."""
        # Results that are dropped before the wait would not be computed.
        outputs = launch.kernel[launch.lnc](*launch.arguments)
        self._wait()
        del outputs


def values_of(shape: tuple[int, ...], dtype: str) -> Array:
    """Values from 0 to 1 of a dtype of ``DTYPES``, or 0 and 1 of uint8."""
    rng = np.random.default_rng(0)
    if dtype == "uint8":
        return rng.integers(0, 2, shape, np.uint8)
    return rng.random(shape, np.float32).astype(DTYPES[dtype])


def _to_torch(array: Array) -> Any:
    import torch

    if array.dtype == DTYPES["bfloat16"]:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
