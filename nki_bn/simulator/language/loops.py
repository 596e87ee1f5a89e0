# SPDX-License-Identifier: Apache-2.0
"""Loops that run on the device: here their bodies are executed once per iteration."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nki_bn.simulator.errors import NkiValidationError
from nki_bn.simulator.isa.registers import VirtualRegister
from nki_bn.simulator.machine import current_core
from nki_bn.simulator.tensor import require


def dynamic_range(start: Any, stop: Any = None, step: int = 1) -> Iterator[VirtualRegister]:
    """A counted loop with bounds known at run time; yields a register that must not be written (deprecated).

    Raises:
        NkiValidationError: the step is no positive integer, or the loop stands in a ``no_reorder`` block.
    """
    warnings.warn("nl.dynamic_range is deprecated: use nl.fori_loop", DeprecationWarning, stacklevel=2)
    lower, upper = (0, start) if stop is None else (start, stop)
    return _iterations("dynamic_range", lower, upper, step)


def fori_loop(lower: Any, upper: Any, body_fun: Callable[[VirtualRegister], Any], step: int = 1) -> None:
    """Call ``body_fun(i)`` for i in [lower, upper) with ``step``; bounds are integers or registers.

    Raises:
        NkiValidationError: the step is no positive integer, the loop stands in a ``no_reorder`` block, or the body
            returns something.
    """
    for register in _iterations("fori_loop", lower, upper, step):
        require(body_fun(register) is None, "the body of fori_loop must return nothing")


def while_loop(init: VirtualRegister, body_fun: Callable[[VirtualRegister], VirtualRegister]) -> None:
    """``while r != 0: r = body_fun(r)`` on a register.

    Raises:
        TypeError: ``init`` or what the body returns is no register.
        NkiValidationError: that register has no value, or the loop stands in a ``no_reorder`` block.
    """
    _check_place("while_loop")
    condition = _value("while_loop init", init)
    with _loop() as next_pass:
        while condition != 0:
            next_pass()
            condition = _value("the result of while_loop body_fun", body_fun(VirtualRegister(condition)))


def _iterations(name: str, lower: Any, upper: Any, step: int) -> Iterator[VirtualRegister]:
    require(
        isinstance(step, int) and not isinstance(step, bool) and step > 0,
        f"{name} step must be a positive integer known at compile time, got {step!r}",
    )
    _check_place(name)
    values = range(_bound(name, lower), _bound(name, upper), step)
    with _loop() as next_pass:
        for value in values:
            next_pass()
            yield VirtualRegister(value, frozen=True)


@contextmanager
def _loop() -> Iterator[Callable[[], None]]:
    """Instructions inside stand in a device loop of their own; what it gives is called before each pass."""
    core = current_core()
    names = set(core.names)
    core.loops.append(core.loop_count)
    core.loop_count += 1

    def next_pass() -> None:
        # The body is compiled once: a name in it is one name, however often it runs.
        core.names = set(names)

    try:
        yield next_pass
    finally:
        core.loops.pop()


def _check_place(name: str) -> None:
    require(current_core().ordered is None, f"{name} inside no_reorder: put no_reorder into the body instead")


def _bound(name: str, value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if not isinstance(value, VirtualRegister):
        raise TypeError(f"{name} bounds must be integers or registers, got {value!r}")
    return int(_value(f"a bound of {name}", value))


def _value(what: str, register: Any) -> float:
    if not isinstance(register, VirtualRegister):
        raise TypeError(f"{what} must be a register, got {register!r}")
    if register.state is None:
        raise NkiValidationError(f"{what} is a register without value")
    return register.state
