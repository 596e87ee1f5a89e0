# SPDX-License-Identifier: Apache-2.0
"""Launching a kernel; and repeating launches, as a compiled kernel is launched again without being compiled again.

With ``RunOptions(replay=True)`` the third launch with the same kernel, shapes, dtypes and other arguments, and all
later ones, repeat the instructions of the second one on the new arrays. The kernel's Python does not run, and nothing
is checked, traced or allocated anew: the first two launches have done that, and what they found is the same for all
values. Results are the same bit by bit. The condition is the compiler's: a kernel depends on its arguments alone, not
on globals that change. Where values decide what is executed (run-time indices, registers that are loaded, masked writes
to memory that nothing has written, ``device_print``, collectives), launches are simulated as if ``replay`` were off.

The first launch shows whether that is so and where the tiles go. The second one records what each instruction computes;
that keeps its tiles alive, so they are put where they were without asking which places are free.
"""

from __future__ import annotations

import contextvars
import enum
import functools
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np

from nki_bn.simulator.launch import (
    Arguments,
    Launch,
    Member,
    SimulationResult,
    check_lnc,
    framework_of,
    function_of,
    run_members,
    run_replicas,
)
from nki_bn.simulator.machine import Core, Run, RunOptions, enter
from nki_bn.simulator.memory import Bank, MemoryRegion, Reserved
from nki_bn.simulator.numerics import Array
from nki_bn.simulator.recording import Recorder
from nki_bn.simulator.tensor import NkiTensor
from nki_bn.simulator.world import World

# Kinds of launches that are known, and instructions of those that can be repeated, some 7 kilobytes each. The kind that
# was launched longest ago goes first.
_MOST_KNOWN, _MOST_STEPS = 1000, 100_000


def run(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], lnc: int, options: RunOptions) -> SimulationResult:
    """Simulate ``kernel`` (a function or an ``nki.jit`` kernel) on ``lnc`` cores.

    NumPy arrays and torch tensors among the arguments become HBM tensors; what the kernel writes into them is seen by
    the caller. Results are of the same kind as the inputs.

    Raises:
        TypeError: an argument has no NKI dtype or is a list; no arguments were given.
        ValueError: ``lnc`` is not 1 or 2, or 2 on trn1.
        NkiValidationError and its subclasses, DeadlockError: faults of the kernel; with ``options.replay`` also a
            kernel that allocates other tiles than in a launch with such arguments before.
    """
    launch = Launch(kernel, args, kwargs)
    # Launches at the same time, and inside of another one, have memory of their own: they are simulated.
    if options.replay and not options.dry and options.precise_fp and _lock.acquire(blocking=False):
        try:
            return _run_known(launch, check_lnc(lnc, options), options)
        finally:
            _lock.release()
    return run_replicas([launch], lnc, options)[0]


@dataclass(frozen=True)
class _Pad:
    """A scratchpad after a launch: its size in bytes, its tiles (size, start) in order, its high-water mark."""

    size: int
    placed: list[tuple[int, int]]
    high_water: int


@dataclass
class _Known:
    """What earlier launches have shown: where tiles go, why none can be repeated, or how they are."""

    pads: dict[tuple[int, MemoryRegion], _Pad]
    refusal: str
    program: Program | None = None

    @property
    def steps(self) -> int:
        """How many instructions are kept."""
        return 0 if self.program is None else self.program.steps


_lock = threading.Lock()
_known: OrderedDict[Any, _Known] = OrderedDict()
# Data and shadow of scratchpads by core, region and size. One program at a time uses them.
_memory: dict[tuple[int, MemoryRegion, int], tuple[Array, Array]] = {}


def forget() -> None:
    """Forget all earlier launches, and the memory of their tiles: for kernels that have changed."""
    with _lock:
        _known.clear()
        _memory.clear()


def _run_known(launch: Launch, lnc: int, options: RunOptions) -> SimulationResult:
    key = _key(launch, lnc, options)
    known = None if key is None else _known.get(key)
    if key is None or (known is not None and known.refusal):
        return run_replicas([launch], lnc, options)[0]
    if known is None:
        result, _known[key] = _scout(launch, lnc, options)
        _make_room()
        return result
    _known.move_to_end(key)
    if known.program is not None:
        return known.program.run(launch)
    result = _record(launch, lnc, options, known)
    _make_room()
    return result


def _make_room() -> None:
    """Forget old launches; the newest one stays."""
    steps = sum(known.steps for known in _known.values())
    while len(_known) > 1 and (len(_known) > _MOST_KNOWN or steps > _MOST_STEPS):
        steps -= _known.popitem(last=False)[1].steps


def _scout(launch: Launch, lnc: int, options: RunOptions) -> tuple[SimulationResult, _Known]:
    """The first launch; it shows where tiles go, and why it could not be repeated."""
    world, recorder = World(1, lnc), Recorder(keeps_steps=False)
    member = Member(launch, Run(options, lnc, world, recorder=recorder))
    (result,) = run_members([member], world)
    pads = {
        (core.index, pad.region): _Pad(pad.partitions * pad.pitch, pad.placed, pad.high_water)
        for core in member.state.cores
        for pad in (core.sbuf, core.psum)
    }
    return result, _Known(pads, recorder.refusal)


def _record(launch: Launch, lnc: int, options: RunOptions, known: _Known) -> SimulationResult:
    """The second launch, which keeps what its instructions compute."""
    world, recorder = World(1, lnc), Recorder()
    reserved = {at: _reserve(at, pad) for at, pad in known.pads.items()}
    member = Member(launch, Run(options, lnc, world, recorder=recorder, reserved=reserved))
    (result,) = run_members([member], world)
    known.refusal = recorder.refusal
    if not known.refusal:
        known.program = Program(launch, member, recorder, result)
    return result


def _reserve(at: tuple[int, MemoryRegion], pad: _Pad) -> Reserved:
    place = *at, pad.size
    if place not in _memory:
        _memory[place] = np.zeros(pad.size, np.uint8), np.zeros(pad.size, np.uint8)
    data, shadow = _memory[place]
    return Reserved(Bank(data, 1, shadow), pad.placed, pad.high_water)


class Program:
    """What the instructions of a launch compute, in order: so many ``steps``. ``result`` is what that launch left."""

    def __init__(self, launch: Launch, member: Member, recorder: Recorder, result: SimulationResult) -> None:
        self._function = function_of(launch.kernel)
        self._state = member.state
        self._state.recorder = None
        self._returned = member.returned
        self._result = replace(result, outputs=None)
        self._arguments, self._made = recorder.arguments, recorder.made
        self._sizes = [storage.bank.data.size for storage in self._made]
        self._work = list(_with_cores(recorder.steps))
        self.steps = len(self._work)
        self._let_go()

    def run(self, launch: Launch) -> SimulationResult:
        """Repeat the launch with the arrays of ``launch``.

        Raises:
            NkiValidationError: an instruction refuses a value.
        """
        remaining = iter(self._arguments)

        def adopt(data: Array, dtype: str, name: str, region: MemoryRegion) -> NkiTensor:
            storage = next(remaining)
            storage.bank.data = data.reshape(-1).view(np.uint8)
            return NkiTensor(data.shape, dtype, storage)

        arguments = Arguments(self._state, adopt, checks=False)
        try:
            arguments.bind(self._function, launch.args, launch.kwargs)
            for storage, size in zip(self._made, self._sizes, strict=True):
                storage.bank.data = np.empty(size, np.uint8)
            contextvars.copy_context().run(self._repeat)
            arguments.write_back()
            return replace(self._result, outputs=arguments.collect(self._returned))
        finally:
            self._let_go()

    def _repeat(self) -> None:
        for core in self._state.cores:
            core.forget()
        with np.errstate(all="ignore"):
            for work in self._work:
                work()

    def _let_go(self) -> None:
        """The memory of HBM tensors is the caller's; nothing asks for their shadows any more."""
        for storage in (*self._arguments, *self._made):
            storage.bank.release()


def _with_cores(steps: list[tuple[Core, Callable[[], object]]]) -> Iterator[Callable[[], object]]:
    """All steps, with a change to the core of each where it is another one than before."""
    current = None
    for core, step in steps:
        if core is not current:
            yield functools.partial(enter, core)
            current = core
        yield step


class _NotComparable(Exception):
    """An argument of which it is unknown whether another one is the same."""


def _key(launch: Launch, lnc: int, options: RunOptions) -> Any:
    """What launches that can stand for each other have in common; None if that is unknown."""
    function = function_of(launch.kernel)
    if not isinstance(function, types.FunctionType) or getattr(launch.kernel, "schedule", None):
        return None
    try:
        positional = tuple(map(_argument, launch.args))
        named = tuple((name, _argument(value)) for name, value in launch.kwargs.items())
    except _NotComparable:
        return None
    return function, lnc, options, positional, named


def _argument(value: Any) -> Any:
    """Equal for arguments that are the same to a kernel: arrays of one kind, shape and dtype, and equal constants."""
    if framework_of(value) is not None:
        return type(value), tuple(value.shape), value.dtype
    return _constant(value)


def _constant(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str, bytes):
        return kind, value
    if kind is float:
        return kind, value.hex()
    if isinstance(value, np.generic):
        return kind, value.tobytes()
    if isinstance(value, enum.Enum):
        return kind, value.name
    if isinstance(value, tuple):
        return kind, tuple(map(_constant, value))
    if kind is dict:
        return kind, tuple((_constant(key), _constant(item)) for key, item in value.items())
    if is_dataclass(value) and not isinstance(value, type):
        names = [one.name for one in fields(value)]
        if getattr(value, "__dict__", {}).keys() <= set(names):
            return kind, tuple(_constant(getattr(value, name)) for name in names)
    raise _NotComparable
