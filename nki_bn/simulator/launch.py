# SPDX-License-Identifier: Apache-2.0
"""Launching a kernel: arguments into HBM, one thread per core of every replica, results out."""

from __future__ import annotations

import contextvars
import functools
import inspect
import os
import types
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from nki_bn.hardware import load_target
from nki_bn.simulator import dtypes
from nki_bn.simulator.errors import IncompleteOutputError, NkiValidationError
from nki_bn.simulator.machine import Core, Run, RunOptions, Shaped, element_flags, enter
from nki_bn.simulator.memory import WRITTEN, MemoryRegion, Storage
from nki_bn.simulator.numerics import Array
from nki_bn.simulator.scheduling import finish
from nki_bn.simulator.tensor import NkiTensor
from nki_bn.simulator.torch_memory import to_torch, torch_memory
from nki_bn.simulator.trace import Trace
from nki_bn.simulator.world import World

TARGET_VARIABLE = "NEURON_PLATFORM_TARGET_OVERRIDE"
PRECISE_VARIABLE = "NKI_PRECISE_FP"
REPLAY_VARIABLE = "NKI_BN_REPLAY"


@dataclass(frozen=True)
class SimulationResult:
    """What a run returned and what it left: the trace, and the most bytes per partition that were in use per core."""

    outputs: Any
    trace: Trace
    sbuf_high_water: tuple[int, ...]
    psum_high_water: tuple[int, ...]
    options: RunOptions


def target_from_environment() -> str:
    """The target that NEURON_PLATFORM_TARGET_OVERRIDE names, else trn3.

    Raises:
        ValueError: the target is unknown.
    """
    name = os.environ.get(TARGET_VARIABLE, "trn3")
    try:
        load_target(name)
    except ValueError as error:
        raise ValueError(f"{TARGET_VARIABLE}: {error}") from error
    return name


def replay_from_environment() -> bool:
    """Whether launches are replayed: NKI_BN_REPLAY is 1.

    Raises:
        ValueError: it is neither 0 nor 1, nor empty.
    """
    replay = os.environ.get(REPLAY_VARIABLE) or "0"
    if replay not in ("0", "1"):
        raise ValueError(f"{REPLAY_VARIABLE} is {replay!r}; accepted: 0, 1")
    return replay == "1"


def options_from_environment() -> RunOptions:
    """The vendor's defaults and variables: lenient, float32 operands, target from NEURON_PLATFORM_TARGET_OVERRIDE (else
    trn3), roundings off when NKI_PRECISE_FP is 0. And one of ours: launches are replayed when NKI_BN_REPLAY is 1.

    Raises:
        ValueError: the target is unknown, or NKI_BN_REPLAY neither 0 nor 1.
    """
    return RunOptions(
        target=target_from_environment(),
        strict=False,
        numerics="ideal",
        precise_fp=os.environ.get(PRECISE_VARIABLE, "1") != "0",
        replay=replay_from_environment(),
    )


class Launch(NamedTuple):
    """What one replica runs: a kernel and its arguments."""

    kernel: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = {}


def run_replicas(launches: Sequence[Launch], lnc: int, options: RunOptions) -> list[SimulationResult]:
    """Simulate one launch per replica, each on ``lnc`` cores with memories of its own, which meet in collectives.

    Replica r has rank r. Everything else is as for :func:`nki_bn.simulator.run`; the trace of each result is that of
    the replica.

    Raises:
        TypeError, ValueError: as for :func:`run`; no launches, or several where ``options`` says how many there are.
        NkiValidationError and its subclasses: faults of a kernel; replicas that meet in different collectives.
        DeadlockError: a replica waits for one that never comes.
    """
    if not launches or (options.replicas > 1 and len(launches) > 1):
        accepted = "1, as options has replicas" if launches else "from 1 up"
        raise ValueError(f"launches has {len(launches)} entries; accepted: {accepted}")
    world = World(len(launches), check_lnc(lnc, options), alike=options.replicas)
    members = [
        Member(launch, Run(options, lnc, world, rank, getattr(launch.kernel, "schedule", {})))
        for rank, launch in enumerate(launches)
    ]
    return run_members(members, world)


def run_members(members: Sequence[Member], world: World) -> list[SimulationResult]:
    """Run the replicas of a ``world`` to the end."""
    lnc = members[0].state.lnc
    try:
        returned = world.lockstep.run([body for member in members for body in member.bodies()])
        return [member.result(returned[rank * lnc]) for rank, member in enumerate(members)]
    finally:
        for member in members:
            member.state.release()


class Member:
    """One replica: its launch on its cores. ``returned`` is what the kernel returned on core 0, once it has run."""

    def __init__(self, launch: Launch, state: Run) -> None:
        function = function_of(launch.kernel)
        if not launch.args and not launch.kwargs:
            raise TypeError(f"kernel {getattr(function, '__name__', function)} was called without arguments")
        self.state = state
        self.returned: Any = None
        self._arguments = Arguments(state)
        self.signature = inspect.signature(function)
        self._placed = self._arguments.bind(self.signature, launch.args, launch.kwargs)
        self._body = _with_memory_keywords(function)

    def bodies(self) -> list[Callable[[], Any]]:
        """What each core does.

        A new context per launch: kernels may be launched while another one runs, and from several threads.
        """
        return [functools.partial(contextvars.copy_context().run, self._work, core) for core in self.state.cores]

    def _work(self, core: Core) -> Any:
        enter(core)
        return self._body(*self._placed.args, **self._placed.kwargs)

    def result(self, returned: Any) -> SimulationResult:
        """What is left after the run, of which core 0 ``returned`` this."""
        self.returned = returned
        finish([core.schedule for core in self.state.cores])
        self._arguments.write_back()
        return SimulationResult(
            self._arguments.collect(returned),
            self.state.trace,
            tuple(core.sbuf.high_water for core in self.state.cores),
            tuple(core.psum.high_water for core in self.state.cores),
            self.state.options,
        )


def function_of(kernel: Any) -> Any:
    """The function of an ``nki.jit`` kernel; anything else as it is."""
    # A partial has an attribute of that name as well, without its arguments.
    return kernel if isinstance(kernel, functools.partial) else getattr(kernel, "func", kernel)


def framework_of(value: Any) -> str | None:
    """Whose array ``value`` is: "numpy", "torch" or "jax"; None if it is none."""
    if isinstance(value, np.ndarray):
        return "numpy"
    root = type(value).__module__.partition(".")[0]
    if root == "torch" and hasattr(value, "detach"):
        return "torch"
    return "jax" if root in ("jax", "jaxlib") and hasattr(value, "dtype") else None


def check_lnc(lnc: int, options: RunOptions) -> int:
    """``lnc`` if the target has that many cores in a logical one.

    Raises:
        ValueError: it has not.
    """
    most = load_target(options.target).logical_cores
    if isinstance(lnc, bool) or not isinstance(lnc, int) or not 1 <= lnc <= most:
        raise ValueError(f"lnc {lnc!r} is not possible on {options.target}; accepted: 1{' or 2' if most > 1 else ''}")
    return lnc


Adopt = Callable[[Array, str, str, MemoryRegion], NkiTensor]


class Arguments:
    """The tensors of a launch: where they came from and how to give them back.

    ``adopt`` puts one over the memory of an array, by default as :meth:`Run.adopt` does it. Without ``checks`` results
    are taken to be complete.
    """

    def __init__(self, state: Run, adopt: Adopt | None = None, *, checks: bool = True) -> None:
        self._state = state
        self._adopt = adopt or state.adopt
        self._checks = checks
        self._copies: list[tuple[Array, NkiTensor]] = []
        self._given: list[Storage] = []
        self._torch = False

    def bind(
        self, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> inspect.BoundArguments:
        """The arguments of a call of a function, with HBM tensors for arrays."""
        bound = signature.bind(*args, **kwargs)
        for key, value in bound.arguments.items():
            kind = bound.signature.parameters[key].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                bound.arguments[key] = tuple(self.place(f"{key}[{at}]", item) for at, item in enumerate(value))
            elif kind is inspect.Parameter.VAR_KEYWORD:
                bound.arguments[key] = {name: self.place(name, item) for name, item in value.items()}
            else:
                bound.arguments[key] = self.place(key, value)
        return bound

    def place(self, name: str, value: Any) -> Any:
        """An HBM tensor for an array, anything else as it is."""
        if isinstance(value, list):
            raise TypeError(f"argument {name} is a list; kernels take tuples")
        region = MemoryRegion.shared_hbm if self._state.lnc > 1 else MemoryRegion.private_hbm
        if isinstance(value, Shaped) and self._state.options.dry:
            return self._state.stand_in(value, name, region)
        array = self._as_array(value)
        if array is None:
            return value
        try:
            dtype = dtypes.normalize(array.dtype)
        except TypeError as error:
            raise TypeError(f"argument {name}: {error}") from error
        if array.ndim == 0 or array.size == 0:
            raise NkiValidationError(
                f"argument {name} has shape {array.shape}: HBM tensors have elements and a dimension"
            )
        if self._state.options.dry:
            return self._state.stand_in(Shaped(array.shape, dtype), name, region)
        held = array.view(np.uint8) if dtype == "bool_" else array
        in_place = held.flags.c_contiguous and held.flags.writeable and held.dtype.isnative
        tensor = self._adopt(held if in_place else _own_copy(held), dtype, name, region)
        if self._state.recorder is not None:
            self._state.recorder.arguments.append(tensor.storage)
        if self._state.scale > 1 or not in_place:
            self._copies.append((held, tensor))
        return tensor

    def _as_array(self, value: Any) -> Array | None:
        match framework_of(value):
            case "numpy":
                return value  # type: ignore[no-any-return]
            case "torch":
                self._torch = True
                return torch_memory(value)
            case "jax":
                return np.asarray(value)
        return None

    def write_back(self) -> None:
        """Copy inputs that could not be used in place back to their arrays, where that is possible and needed."""
        for array, tensor in self._copies:
            result = tensor.array().astype(array.dtype)
            if array.flags.writeable and result.tobytes() != array.tobytes():
                array[...] = result

    def collect(self, returned: Any) -> Any:
        """Results as arrays (or torch tensors), in the structure the kernel returned."""
        if isinstance(returned, (tuple, list)):
            return tuple(self.collect(item) for item in returned)
        if not isinstance(returned, NkiTensor):
            return returned
        if self._checks:
            self._check_result(returned)
        if self._state.options.dry:
            return Shaped(returned.shape, returned.dtype)
        if self._checks:
            self._check_complete(returned)
        return self._values(returned)

    def _values(self, returned: NkiTensor) -> Any:
        """What a tensor in HBM holds: the memory itself if the kernel made it and returns it whole, once."""
        array, storage = returned.array(), returned.storage
        whole = array.flags.c_contiguous and array.nbytes == storage.bank.data.size
        if storage.is_input or storage in self._given or not whole:
            array = array.copy()
        self._given.append(storage)
        if returned.dtype == "bool_":
            array = array.astype(np.bool_)
        return to_torch(array) if self._torch else array

    def _check_result(self, returned: NkiTensor) -> None:
        if returned.buffer is MemoryRegion.shared_hbm or returned.storage.is_input:
            return
        message = f"{returned!r} is returned but not in shared_hbm"
        if self._state.options.strict or returned.buffer is not MemoryRegion.private_hbm:
            raise NkiValidationError(message)
        # Guides of the vendor return such tensors. The compiler takes them no more.
        warnings.warn(f"{message}: the compiler refuses it", stacklevel=2)

    def _check_complete(self, tensor: NkiTensor) -> None:
        if self._state.recorder is not None:
            self._state.recorder.check_read(tensor, tensor.shadow())
        if not self._state.options.strict:
            return
        flags = element_flags(tensor, tensor.shadow() & WRITTEN)
        if not flags.all():
            first = tuple(int(i) for i in np.argwhere(flags == 0)[0])
            raise IncompleteOutputError(
                f"output {tensor!r} is incomplete: {int((flags == 0).sum())} elements were "
                f"never written (first: {first})"
            )


def _own_copy(array: Array) -> Array:
    return np.array(array, array.dtype.newbyteorder("="), order="C")


class _MemoryKeyword:
    """``sbuf``, ``psum`` or ``hbm`` as a bare name with a ``view`` method: the spelling of early releases."""

    def __init__(self, region: MemoryRegion) -> None:
        self._region = region

    def view(self, dtype: Any, shape: tuple[int, ...]) -> NkiTensor:
        """A new tensor in this region."""
        from nki_bn.simulator.machine import current_core

        return current_core().allocate(tuple(shape), dtypes.normalize(dtype), self._region, "", None)


_KEYWORDS = {"sbuf": MemoryRegion.sbuf, "psum": MemoryRegion.psum, "hbm": MemoryRegion.shared_hbm}


def _with_memory_keywords(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` seeing the memory keywords, if it names one that nothing defines."""
    code = getattr(function, "__code__", None)
    if not isinstance(function, types.FunctionType) or code is None:
        return function
    missing = {
        name: _MemoryKeyword(region)
        for name, region in _KEYWORDS.items()
        if name in code.co_names and name not in function.__globals__
    }
    if not missing:
        return function
    scope = {**function.__globals__, **missing}
    clone = types.FunctionType(code, scope, function.__name__, function.__defaults__, function.__closure__)
    clone.__kwdefaults__ = function.__kwdefaults__
    return clone
