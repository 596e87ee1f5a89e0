# SPDX-License-Identifier: Apache-2.0
"""The state of a run: options, cores with their memories, tensors of HBM, and the trace."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nki_bn.hardware import Target, load_target
from nki_bn.simulator import dtypes
from nki_bn.simulator.errors import NkiValidationError, OutOfMemoryError
from nki_bn.simulator.memory import WRITTEN, Bank, MemoryRegion, Reserved, Scratchpad, Storage
from nki_bn.simulator.numerics import POINTER_BITS, Array, Float32, round_significant
from nki_bn.simulator.random_bits import STREAMS, Xorwow
from nki_bn.simulator.recording import Recorder
from nki_bn.simulator.scheduling import Edges, NamedEdges
from nki_bn.simulator.tensor import NkiTensor, require
from nki_bn.simulator.trace import Trace
from nki_bn.simulator.world import World

NUMERICS = ("ideal", "trn2")
ACCUMULATE = ("pairwise", "sequential")

# What the vendor's simulator puts into new memory.
_FILL_INTEGER = 4


@dataclass(frozen=True)
class RunOptions:
    """How a kernel is simulated.

    Attributes:
        target: chip (trn1, trn2, trn3 or an alias).
        strict: an unwritten read or an incomplete output is an error; otherwise unwritten memory is NaN (integers: 4).
        numerics: ``"trn2"`` rounds per-partition operands to 18 significant bits, ``"ideal"`` does not.
        accumulate: order of summation, ``"pairwise"`` or ``"sequential"``.
        precise_fp: False holds every low-precision tensor as float32, without rounding.
        dry: nothing is computed: the same trace from shapes alone. Run-time indices are taken as 0.
        replicas: in a dry run of one replica, how many there are: the others are taken to do the same.
        replay: a launch like two earlier ones repeats their instructions; see :mod:`nki_bn.simulator.replay`.
    """

    target: str = "trn2"
    strict: bool = True
    numerics: str = "trn2"
    accumulate: str = "pairwise"
    precise_fp: bool = True
    dry: bool = False
    replicas: int = 1
    replay: bool = False

    def __post_init__(self) -> None:
        load_target(self.target)
        if type(self.replicas) is not int or self.replicas < 1:
            raise ValueError(f"replicas is {self.replicas!r}; accepted: integers from 1 up")
        if self.replicas > 1 and not self.dry:
            raise ValueError(f"replicas is {self.replicas} without dry; accepted: 1, as run_replicas runs several")
        for field_name, accepted in (("numerics", NUMERICS), ("accumulate", ACCUMULATE)):
            value = getattr(self, field_name)
            if value not in accepted:
                raise ValueError(f"{field_name} {value!r} is unknown; accepted: {', '.join(accepted)}")


@dataclass(frozen=True)
class Shaped:
    """A tensor of which a dry run knows shape and dtype only: its argument, and its result."""

    shape: tuple[int, ...]
    dtype: str


@dataclass
class Run:
    """One launch of a kernel on ``lnc`` cores: that of replica ``rank`` of a ``world``.

    ``recorder`` notes what is needed to repeat it, in memory that is ``reserved`` per core and region. ``parcels`` are
    what cores send to each other.
    """

    options: RunOptions
    lnc: int
    world: World
    rank: int = 0
    edges: Edges = field(default_factory=dict)
    trace: Trace = field(default_factory=Trace)
    shared: list[tuple[Storage, NkiTensor]] = field(default_factory=list)
    posts: dict[Any, dict[int, Any]] = field(default_factory=lambda: defaultdict(dict))
    hbm_accesses: dict[Bank, list[Any]] = field(default_factory=lambda: defaultdict(list))
    recorder: Recorder | None = None
    reserved: Mapping[tuple[int, MemoryRegion], Reserved] = field(default_factory=dict)
    parcels: dict[Any, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.target: Target = load_target(self.options.target)
        self.cores = [Core(self, index) for index in range(self.lnc)]

    @property
    def scale(self) -> int:
        """Storage bytes per logical byte."""
        return 1 if self.options.precise_fp else 4

    def release(self) -> None:
        """Let go of what is on chip: cores and run refer to each other, and a collector of cycles may be late."""
        for core in self.cores:
            core.sbuf.release()
            core.psum.release()

    def stand_in(self, like: Shaped, name: str, region: MemoryRegion) -> NkiTensor:
        """An HBM tensor without memory, for a dry run."""
        storage = Storage(region, like.shape, dtypes.normalize(like.dtype), name)
        storage.is_input = True
        storage.bank = Bank(np.zeros(0, np.uint8), 1)
        return NkiTensor(storage.shape, storage.dtype, storage)

    def adopt(self, data: Array, dtype: str, name: str, region: MemoryRegion) -> NkiTensor:
        """An HBM tensor over the memory of ``data`` (contiguous, of the dtype elements are held in), fully written."""
        storage = Storage(region, data.shape, dtype, name)
        storage.is_input = True
        if self.scale > 1:
            wide = np.zeros(storage.size * dtypes.size_of(dtype) * self.scale, np.uint8)
            storage.bank = Bank(wide, self.scale)
            tensor = NkiTensor(data.shape, dtype, storage)
            storage.bank.shadow[:] = WRITTEN
            tensor.array()[...] = data
        else:
            memory = data.reshape(-1).view(np.uint8)
            storage.bank = Bank(memory, 1, np.full(memory.size, WRITTEN, np.uint8))
            tensor = NkiTensor(data.shape, dtype, storage)
        return tensor


class Core:
    """A physical core: SBUF, PSUM, accumulator registers, and counters of what it has allocated and posted."""

    def __init__(self, run: Run, index: int) -> None:
        target = run.target
        self.run = run
        self.index = index
        self.sbuf = self._scratchpad(MemoryRegion.sbuf, target.sbuf_partition_bytes, target.sbuf_partition_bytes)
        self.psum = self._scratchpad(MemoryRegion.psum, target.psum_partition_bytes, target.psum_bank_bytes)
        # One float32 per lane for each bank of accumulators (nki.isa: Scalar and Vector have one each).
        self.accumulators = {
            "scalar": np.zeros(target.partitions, np.float32),
            "vector": np.zeros(target.partitions, np.float32),
        }
        self.shared_count = 0
        self.posted: dict[Any, int] = defaultdict(int)
        self.names: set[tuple[str, str]] = set()
        self.constants: dict[Any, NkiTensor] = {}
        self.generators: dict[str, Xorwow] = {}
        self.schedule = NamedEdges(run.edges)
        self.loops: list[int] = []  # the device loops that the kernel is in, numbered as they were entered
        self.loop_count = 0
        self.ordered: list[int] | None = None  # indices of the records of an open no_reorder block

    def _scratchpad(self, region: MemoryRegion, row_bytes: int, bank_bytes: int) -> Scratchpad:
        run = self.run
        reserved = run.reserved.get((self.index, region))
        return Scratchpad(region, run.target.partitions, row_bytes, bank_bytes, run.scale, reserved)

    def forget(self) -> None:
        """Bring the registers of the engines into the state of a new core."""
        self.generators.clear()
        for registers in self.accumulators.values():
            registers[...] = 0

    @property
    def seat(self) -> int:
        """Its number among the cores of all replicas."""
        return self.run.rank * self.run.lnc + self.index

    @property
    def options(self) -> RunOptions:
        """Options of the run."""
        return self.run.options

    def generator(self, engine: str) -> Xorwow:
        """The generators of random numbers of an engine. Cores and engines start apart from each other, and from every
        seed: a missing word counts as 0 in a seed."""
        if engine not in self.generators:
            place = 1 + list(STREAMS).index(engine)
            self.generators[engine] = Xorwow(self.run.target.partitions, STREAMS[engine], self.index, place)
        return self.generators[engine]

    def allocate(
        self, shape: tuple[int, ...], dtype: str, region: MemoryRegion, name: str, address: tuple[int, int] | None
    ) -> NkiTensor:
        """A new tensor with undefined contents; see :func:`nki.language.ndarray` for the rules."""
        storage = Storage(region, shape, dtype, name)
        self._register(name, "tensor")
        if region.on_chip:
            return self._place(storage, address)
        require(address is None, f"{storage.label}: HBM tensors take no address")
        if region is MemoryRegion.shared_hbm:
            return self._share(storage)
        return self._fresh(storage)

    def _register(self, name: str | None, kind: str) -> None:
        if name and self.options.strict:
            require((kind, name) not in self.names, f"{kind} name {name!r} is used twice in one kernel")
            self.names.add((kind, name))

    def _place(self, storage: Storage, address: tuple[int, int] | None) -> NkiTensor:
        pad = self.sbuf if storage.region is MemoryRegion.sbuf else self.psum
        partition, byte = (0, None) if address is None else address
        partitions = storage.shape[0]
        require(
            partitions <= pad.partitions,
            f"{storage.label} partition dimension {partitions} exceeds maximum {pad.partitions}",
        )
        check_start(partition, partitions, storage.label)
        storage.pitch, storage.partition = pad.pitch, partition
        tensor = NkiTensor(storage.shape, storage.dtype, storage)
        if byte is None and not self.options.strict:
            # As compilers do it: a tile that is never used takes no memory, one that waits for its use takes none yet.
            storage.place = self._put_late
        else:
            storage.bank = pad.bank
            storage.base = partition * pad.pitch + self._find_place(pad, storage, byte)
            self._fill(tensor, new=False)
        return tensor

    def _find_place(self, pad: Scratchpad, storage: Storage, byte: int | None) -> int:
        try:
            return pad.place(storage, storage.row_bytes, byte)
        except NkiValidationError:
            # The kernel may go on, or be stopped here.
            if self.run.recorder is not None:
                self.run.recorder.refuse(f"{storage.label} finds no place")
            raise

    def _put_late(self, storage: Storage) -> None:
        pad = self.sbuf if storage.region is MemoryRegion.sbuf else self.psum
        try:
            storage.base, storage.bank = self._find_place(pad, storage, None), pad.bank
        except OutOfMemoryError as error:
            # Compilers move tiles in and out, and the vendor's simulator has no limit: the tile gets bytes of its own.
            warnings.warn(f"{error}; a compiler would have to spill", stacklevel=2)
            storage.pitch = storage.row_bytes
            storage.bank = Bank(np.zeros(storage.shape[0] * storage.pitch * self.run.scale, np.uint8), self.run.scale)
        self._fill(NkiTensor(storage.shape, storage.dtype, storage))

    def _share(self, storage: Storage) -> NkiTensor:
        # The n-th shared tensor of every core is the same one.
        at = self.shared_count
        self.shared_count += 1
        if at < len(self.run.shared):
            other, tensor = self.run.shared[at]
            require(
                other.shape == storage.shape and other.dtype == storage.dtype,
                f"shared_hbm tensor {at} is {other.label} on one core and {storage.label} on the other",
            )
            return tensor
        tensor = self._fresh(storage)
        self.run.shared.append((storage, tensor))
        return tensor

    def _fresh(self, storage: Storage) -> NkiTensor:
        nbytes = 0 if self.options.dry else storage.size * dtypes.size_of(storage.dtype)
        storage.bank = Bank(np.zeros(nbytes * self.run.scale, np.uint8), self.run.scale)
        if self.run.recorder is not None:
            self.run.recorder.made.append(storage)
        tensor = NkiTensor(storage.shape, storage.dtype, storage)
        self._fill(tensor)
        return tensor

    def _fill(self, tensor: NkiTensor, *, new: bool = True) -> None:
        """What lenient runs read where nothing was written; memory that is not ``new`` may hold something."""
        if self.options.dry or self.options.strict:
            return
        array = tensor.array()
        if dtypes.is_packed(tensor.dtype):
            fill: float = 0
        else:
            fill = _FILL_INTEGER if dtypes.is_integer(tensor.dtype) else np.nan
        if new:
            array[...] = fill
        else:
            unwritten = element_flags(tensor, tensor.shadow() & WRITTEN) == 0
            np.copyto(array, np.asarray(fill).astype(array.dtype), where=unwritten)

    def pointer(self, values: Float32) -> Float32:
        """A per-partition operand as the engine sees it."""
        return round_significant(values, POINTER_BITS) if self.options.numerics == "trn2" else values


def element_flags(tensor: NkiTensor, flags: Array) -> Array:
    """``flags`` of the shadow bytes of ``tensor``, one per element (of its first byte)."""
    return flags.reshape((*tensor.shape, -1))[..., 0]


def check_start(partition: int, partitions: int, what: str) -> None:
    """The rule for the first partition of a tile: it depends on how many partitions there are."""
    if not may_start(partition, partitions):
        starts = ", ".join(map(str, _starts(partitions)))
        raise NkiValidationError(f"{what}: {partitions} partitions may start at {starts}, got {partition}")


def may_start(partition: int, partitions: int) -> bool:
    """Whether a tile of so many ``partitions`` may start at ``partition``."""
    return partition in _starts(partitions)


def _starts(partitions: int) -> tuple[int, ...]:
    return (0,) if partitions > 64 else (0, 64) if partitions > 32 else (0, 32, 64, 96)


_current: ContextVar[Core | None] = ContextVar("core", default=None)


def current_core() -> Core:
    """The core whose kernel runs in this context.

    Raises:
        RuntimeError: no kernel is running.
    """
    core = _current.get()
    if core is None:
        raise RuntimeError(
            "NKI instructions and tensors exist only while a kernel runs: launch one with nki.jit or nki.simulate"
        )
    return core


def running() -> Core | None:
    """The core whose kernel runs in this context, or None."""
    return _current.get()


def enter(core: Core) -> None:
    """Make ``core`` the current one of this context."""
    _current.set(core)
