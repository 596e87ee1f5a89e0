# SPDX-License-Identifier: Apache-2.0
"""``nki.jit`` and ``nki.simulate``: kernels as objects that are launched on the simulator."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from nki_bn.simulator.launch import options_from_environment
from nki_bn.simulator.machine import RunOptions, running
from nki_bn.simulator.replay import run
from nki_bn.simulator.scheduling import Edges, edges_of


class Kernel:
    """A function as a kernel: ``kernel(...)`` runs it on one core, ``kernel[2](...)`` on two.

    There is no compiler here, so every launch is a simulation. Called inside a running kernel it is inlined.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        lnc: int = 1,
        options: RunOptions | None = None,
        schedule: Edges | None = None,
    ) -> None:
        self.func = inspect.unwrap(func)
        self.lnc = lnc
        self.options = options
        self.schedule = schedule or {}
        functools.update_wrapper(self, self.func)

    def __getitem__(self, grid: int | tuple[int]) -> Kernel:
        size = grid[0] if isinstance(grid, tuple) and len(grid) == 1 else grid
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"a kernel grid is one integer, the number of cores; got {grid!r}")
        return Kernel(self.func, size, self.options, self.schedule)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if running() is not None:
            return self.func(*args, **kwargs)
        return run(self, args, kwargs, self.lnc, self.options or options_from_environment()).outputs

    def with_schedule(self, schedule: Any) -> Kernel:
        """This kernel with edges: pairs (consumer, producer or list of producers) of names of instructions.

        The timing model lets a consumer wait for its producers; results do not change.

        Raises:
            TypeError: ``schedule`` is no list of such pairs.
            NkiValidationError: an instruction is to wait for itself; when run: a name that no instruction has.
        """
        return Kernel(self.func, self.lnc, self.options, edges_of(schedule))


# Documented keywords and, from debug_kernel on, undocumented ones of public kernels; none matters to a simulation.
_JIT_KEYWORDS = {
    "mode",
    "compile_config",
    "specialization_config",
    "debug_kernel",
    "experimental_flags",
    "show_compiler_tb",
}


def jit(fn: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
    """Make a kernel of a function; used as ``@nki.jit``, ``@nki.jit()`` or ``nki.jit(function)``.

    ``mode`` is ignored, as in the vendor's package.

    Raises:
        TypeError: ``platform_target`` was given (use NEURON_PLATFORM_TARGET_OVERRIDE) or an unknown keyword.
    """
    if "platform_target" in kwargs:
        raise TypeError("platform_target is not an argument any more: set NEURON_PLATFORM_TARGET_OVERRIDE")
    unknown = set(kwargs) - _JIT_KEYWORDS
    if unknown:
        raise TypeError(f"nki.jit got unexpected keyword arguments {sorted(unknown)}")
    if fn is None:
        return jit
    return fn if isinstance(fn, Kernel) else Kernel(fn)


def simulate(kernel: Any, options: RunOptions | None = None) -> Kernel:
    """``nki.simulate(kernel)(*args)``: run on the CPU; plain functions are wrapped.

    ``options`` (this simulator's own) chooses target, strictness and numerics; without it the environment decides.
    """
    made = jit(kernel)
    return Kernel(made.func, made.lnc, options or made.options, made.schedule)
