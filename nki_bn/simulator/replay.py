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
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nki_bn.simulator.alike import can_be_given_again, kind_of
from nki_bn.simulator.errors import NkiValidationError
from nki_bn.simulator.launch import (
    Arguments,
    Launch,
    Member,
    SimulationResult,
    check_lnc,
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
    past = _past
    # Launches at the same time, and inside of another one, have memory of their own: they are simulated.
    if options.replay and not options.dry and options.precise_fp and past.lock.acquire(blocking=False):
        try:
            return past.run(launch, check_lnc(lnc, options), options)
        finally:
            past.lock.release()
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

    def refuse(self, why: str) -> None:
        """Simulate such launches from now on."""
        self.refusal, self.program = why, None


class _Past:
    """What is kept of earlier launches; one launch at a time has the ``lock``.

    ``memory`` is that of tiles: data and shadow of scratchpads by core, region and size.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.known: OrderedDict[Any, _Known] = OrderedDict()
        self.memory: dict[tuple[int, MemoryRegion, int], tuple[Array, Array]] = {}

    def run(self, launch: Launch, lnc: int, options: RunOptions) -> SimulationResult:
        """Simulate a launch, or repeat an earlier one."""
        kind = kind_of(launch, lnc, options)
        known = None if kind is None else self.known.get(kind)
        if kind is None or (known is not None and known.refusal):
            return run_replicas([launch], lnc, options)[0]
        if known is not None and known.program is not None:
            self.known.move_to_end(kind)
            return self._repeat(launch, lnc, options, known)
        if known is None:
            result, known = _scout(launch, lnc, options)
        else:
            result = self._record(launch, lnc, options, known)
        if kind_of(launch, lnc, options) != kind:
            known.refuse("the kernel changes an argument that is no array")
        self.known[kind] = known
        self.known.move_to_end(kind)
        self._make_room()
        return result

    def _make_room(self) -> None:
        """Forget launches of functions that are gone, and old ones; the newest one stays."""
        for kind in [kind for kind in self.known if kind[0]() is None]:
            del self.known[kind]
        steps = sum(known.steps for known in self.known.values())
        while len(self.known) > 1 and (len(self.known) > _MOST_KNOWN or steps > _MOST_STEPS):
            steps -= self.known.popitem(last=False)[1].steps

    def _record(self, launch: Launch, lnc: int, options: RunOptions, known: _Known) -> SimulationResult:
        """The second launch, which keeps what its instructions compute."""
        world, recorder = World(1, lnc), Recorder()
        reserved = {at: self._reserve(at, pad) for at, pad in known.pads.items()}
        member = Member(launch, Run(options, lnc, world, recorder=recorder, reserved=reserved))
        (result,) = run_members([member], world)
        known.refusal = recorder.refusal
        if not known.refusal:
            known.program = Program(member, recorder, result)
        return result

    def _reserve(self, at: tuple[int, MemoryRegion], pad: _Pad) -> Reserved:
        place = *at, pad.size
        if place not in self.memory:
            self.memory[place] = np.zeros(pad.size, np.uint8), np.zeros(pad.size, np.uint8)
        data, shadow = self.memory[place]
        return Reserved(Bank(data, 1, shadow), pad.placed, pad.high_water)

    def _repeat(self, launch: Launch, lnc: int, options: RunOptions, known: _Known) -> SimulationResult:
        program = known.program
        assert program is not None
        try:
            return program.run(launch)
        except NkiValidationError as error:
            if program.writes_arguments:
                raise
            # The kernel may go on after it; if not, its line is in the traceback.
            known.refuse(f"values decide whether there is an error: {error}")
            return run_replicas([launch], lnc, options)[0]


_past = _Past()


def refusals() -> dict[str, str]:
    """Kernels, by name, whose last kind of launch is simulated every time, and why."""
    found: dict[str, str] = {}
    for kind, known in list(_past.known.items()):
        function = kind[0]()
        if function is not None:
            found[function.__name__] = known.refusal
    return {name: why for name, why in found.items() if why}


def forget() -> None:
    """Forget all earlier launches, and the memory of their tiles: for kernels that have changed."""
    global _past
    # Another one: a launch that is under way keeps its own to the end.
    _past = _Past()


def _scout(launch: Launch, lnc: int, options: RunOptions) -> tuple[SimulationResult, _Known]:
    """The first launch; it shows where tiles go, and why it could not be repeated."""
    world, recorder = World(1, lnc), Recorder(keeps_steps=False)
    member = Member(launch, Run(options, lnc, world, recorder=recorder))
    (result,) = run_members([member], world)
    if not can_be_given_again(member.returned):
        recorder.refuse("the kernel returns something else than tensors, numbers and strings")
    pads = {
        (core.index, pad.region): _Pad(pad.partitions * pad.pitch, pad.placed, pad.high_water)
        for core in member.state.cores
        for pad in (core.sbuf, core.psum)
    }
    return result, _Known(pads, recorder.refusal)


class Program:
    """What the instructions of a launch compute, in order: so many ``steps``.

    ``result`` is what that launch left; ``writes_arguments`` says whether it wrote into memory of the caller.
    """

    def __init__(self, member: Member, recorder: Recorder, result: SimulationResult) -> None:
        self._state = member.state
        self._state.recorder = None
        self._signature = member.signature
        self._returned = member.returned
        self._result = replace(result, outputs=None)
        self._arguments, self._made = recorder.arguments, recorder.made
        self.writes_arguments = recorder.writes_arguments
        self._sizes = [storage.bank.data.size for storage in self._made]
        self._work = list(_with_cores(recorder.steps))
        self.steps = len(self._work)
        recorder.close()
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
            arguments.bind(self._signature, launch.args, launch.kwargs)
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
