# SPDX-License-Identifier: Apache-2.0
"""Collectives: what replicas do together. Ranks are those of replicas; core c of one meets core c of the others.

A collective on shared HBM is one of both cores of a replica: both call it, and it orders what they do to its tensors.

Reductions of floats add in float32, rank after rank in the order of the group, and round once, so that all ranks get
the same bits; integers stay integers. The documentation leaves the order open.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nki_bn.simulator.isa import checks
from nki_bn.simulator.isa.dma import DMA_REGIONS, check_priority
from nki_bn.simulator.isa.registers import VirtualRegister
from nki_bn.simulator.isa.sync import join_cores
from nki_bn.simulator.issue import issue
from nki_bn.simulator.machine import Core, current_core
from nki_bn.simulator.memory import MemoryRegion
from nki_bn.simulator.nki_object import NKIObject
from nki_bn.simulator.numerics import Array, to_float32
from nki_bn.simulator.operators import op_name
from nki_bn.simulator.tensor import NkiTensor, require
from nki_bn.simulator.trace import caller
from nki_bn.simulator.world import Post

_HBM = (MemoryRegion.private_hbm, MemoryRegion.shared_hbm)
_REDUCTIONS: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "minimum": np.minimum,
    "maximum": np.maximum,
}
# Channels of a ring over all ranks of the launch, and over some of them.
_WHOLE_CHANNELS, _CHANNELS = 4, 2

Tensors = Sequence[NkiTensor]
Give = Callable[[list[Sequence[Array]]], Sequence[Array]]


class ReplicaGroup(NKIObject):
    """Groups of ranks that communicate: a list of lists of ranks, no rank twice.

    Raises:
        ValueError: a rank stands in two groups or twice in one.
    """

    def __init__(self, groups: Any) -> None:
        self.groups = tuple(tuple(group) for group in groups)
        ranks = [rank for group in self.groups for rank in group]
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"ReplicaGroup groups must not overlap, got {self.groups}")


def all_reduce(
    srcs: Tensors,
    dsts: Tensors,
    replica_group: ReplicaGroup,
    op: Any,
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Every rank gets the reduction of ``srcs`` over its group. ``op``: nl.add, nl.minimum or nl.maximum.

    Tensors are all in HBM, or one 2-D tile in SBUF on either side; each of ``dsts`` is like its source.

    Raises:
        TypeError: an argument is of the wrong type.
        NkiValidationError: a place, shape, dtype, rank, operator or priority is not accepted; replicas meet in
            different collectives.
        DeadlockError: a replica never comes.
    """
    call = _Call("all_reduce", replica_group, priority, name)
    combine = _reduction(call.op, op)
    call.tensors(srcs, dsts, DMA_REGIONS)
    for src, dst in zip(srcs, dsts, strict=True):
        call.check_shape(dst, src.shape, src)
    call.run(srcs, dsts, lambda data: [combine(parts) for parts in zip(*data, strict=True)], op.nki_op)


def all_gather(
    srcs: Tensors,
    dsts: Tensors,
    replica_group: ReplicaGroup,
    collective_dim: int,
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Every rank gets what all ranks of its group have, joined along ``collective_dim`` in the order of the group.

    The dimension is 0 in HBM, 0 or 1 in SBUF. Places and errors as for :func:`all_reduce`.
    """
    call = _Call("all_gather", replica_group, priority, name)
    call.tensors(srcs, dsts, DMA_REGIONS)
    dim = call.dimension(collective_dim, (0, 1) if srcs[0].buffer.on_chip else (0,))
    for src, dst in zip(srcs, dsts, strict=True):
        call.check_shape(dst, _resized(src, dim, src.shape[dim] * len(call.ranks)), src)
    call.run(srcs, dsts, lambda data: [np.concatenate(parts, dim) for parts in zip(*data, strict=True)], dim)


def reduce_scatter(
    srcs: Tensors,
    dsts: Tensors,
    replica_group: ReplicaGroup,
    collective_dim: int,
    op: Any,
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Every rank gets its own part, along dimension 0, of the reduction of ``srcs`` over its group.

    Places, operators and errors as for :func:`all_reduce`.
    """
    call = _Call("reduce_scatter", replica_group, priority, name)
    combine = _reduction(call.op, op)
    call.tensors(srcs, dsts, DMA_REGIONS)
    dim = call.dimension(collective_dim, (0,))
    for src, dst in zip(srcs, dsts, strict=True):
        call.check_shape(dst, _resized(src, dim, call.part(src)), src)

    def own(data: list[Sequence[Array]]) -> list[Array]:
        return [combine([call.parts(part)[call.place] for part in parts]) for parts in zip(*data, strict=True)]

    call.run(srcs, dsts, own, dim, op.nki_op)


def all_to_all(
    srcs: Tensors,
    dsts: Tensors,
    replica_group: ReplicaGroup,
    collective_dim: int,
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Part k of ``srcs`` along dimension 0 goes to rank k of the group; ``dsts`` join what came, by rank.

    All tensors are in HBM. Errors as for :func:`all_reduce`.
    """
    call = _Call("all_to_all", replica_group, priority, name)
    call.tensors(srcs, dsts, _HBM)
    dim = call.dimension(collective_dim, (0,))
    for src, dst in zip(srcs, dsts, strict=True):
        call.part(src)
        call.check_shape(dst, src.shape, src)

    def own(data: list[Sequence[Array]]) -> list[Array]:
        return [np.concatenate([call.parts(part)[call.place] for part in parts]) for parts in zip(*data, strict=True)]

    call.run(srcs, dsts, own, dim)


def collective_permute(
    srcs: Tensors,
    dsts: Tensors,
    source_target_pairs: Sequence[Sequence[int]],
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Rank s sends to rank t for every pair (s, t); each rank is at most once a source and once a target.

    One tensor in HBM on either side, alike on all ranks. A rank that is no target keeps its ``dsts``; one in no pair
    waits for nobody. Errors as for :func:`all_reduce`.
    """
    op = "collective_permute"
    pairs = [tuple(pair) for pair in source_target_pairs]
    require(len(pairs) > 0, f"{op} source_target_pairs is empty; accepted: one pair of ranks or more")
    for label, side in (("source", 0), ("target", 1)):
        ranks = [pair[side] for pair in pairs]
        require(len(set(ranks)) == len(ranks), f"{op} source_target_pairs has a {label} twice: {pairs}")
    rank = current_core().run.rank
    everyone = sorted({member for pair in pairs for member in pair})
    call = _Call(op, ReplicaGroup([everyone] if rank in everyone else [[rank], everyone]), priority, name)
    call.tensors(srcs, dsts, _HBM)
    require(len(srcs) == 1, f"{op} takes one tensor, got {len(srcs)}")
    call.check_shape(dsts[0], srcs[0].shape, srcs[0])
    came = [call.ranks.index(source) for source, target in pairs if target == rank]
    sends = any(source == rank for source, _ in pairs)
    given, taken = (srcs if sends else ()), (dsts if came else ())
    shape = f"{srcs[0].shape} {srcs[0].dtype}"
    if sends or came:
        call.run(given, taken, lambda data: [data[place][0] for place in came], pairs, shape)


def collective_permute_implicit(
    srcs_by_channel: Sequence[Tensors],
    dsts_by_channel: Sequence[Tensors],
    replica_group: ReplicaGroup,
    channel_ids: Sequence[int] = (0,),
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Every rank sends to the one behind it in its group, the last to the first; one tensor per channel.

    Up to 4 channels in a group of all ranks, else up to 2. Errors as for :func:`all_reduce`.
    """
    call = _Call("collective_permute_implicit", replica_group, priority, name)
    srcs, dsts = (
        call.by_channel(*pair, channel_ids) for pair in (("srcs", srcs_by_channel), ("dsts", dsts_by_channel))
    )
    call.tensors(srcs, dsts, DMA_REGIONS, by_channel=True)
    for src, dst in zip(srcs, dsts, strict=True):
        call.check_shape(dst, src.shape, src)
    call.run(srcs, dsts, lambda data: data[call.place - 1])


def collective_permute_implicit_reduce(
    srcs0_by_channel: Sequence[Tensors],
    srcs1_by_channel: Sequence[Tensors],
    dsts_by_channel: Sequence[Tensors],
    replica_group: ReplicaGroup,
    op: Any,
    channel_ids: Sequence[int] = (0,),
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """As :func:`collective_permute_implicit`, of the reduction of two tensors; operators as for :func:`all_reduce`."""
    call = _Call("collective_permute_implicit_reduce", replica_group, priority, name)
    combine = _reduction(call.op, op)
    given = (("srcs0", srcs0_by_channel), ("srcs1", srcs1_by_channel), ("dsts", dsts_by_channel))
    left, right, dsts = (call.by_channel(*pair, channel_ids) for pair in given)
    for srcs in (left, right):
        call.tensors(srcs, dsts, DMA_REGIONS, by_channel=True)
        for src, dst in zip(srcs, dsts, strict=True):
            call.check_shape(dst, src.shape, src)

    def sent(data: list[Sequence[Array]]) -> list[Array]:
        before = data[call.place - 1]
        return [combine(pair) for pair in zip(before[: len(left)], before[len(left) :], strict=True)]

    call.run([*left, *right], dsts, sent, op.nki_op)


def collective_permute_implicit_current_processing_rank_id(
    iteration_id: int, replica_group: ReplicaGroup, channel_id: int = 0, name: str | None = None
) -> VirtualRegister:
    """A register with the rank whose data is there after so many steps round the ring: at 0 the own one.

    Raises:
        TypeError: ``iteration_id`` or ``channel_id`` is no integer, ``replica_group`` no ReplicaGroup.
        NkiValidationError: one is out of range.
    """
    op = "collective_permute_implicit_current_processing_rank_id"
    call = _Call(op, replica_group, None, name)
    for label, value in (("iteration_id", iteration_id), ("channel_id", channel_id)):
        require(_integer(op, label, value) >= 0, f"{op} {label} must be 0 or more, got {value}")
    require(channel_id < call.channels, f"{op} channel_id must be below {call.channels}, got {channel_id}")
    return _register(op, call.ranks[(call.place - iteration_id) % len(call.ranks)], name)


def rank_id(name: str | None = None) -> VirtualRegister:
    """A register with the rank of this replica."""
    return _register("rank_id", current_core().run.rank, name)


class _Call:
    """One collective of this core: the ranks that take part, and its place among them."""

    def __init__(self, op: str, replica_group: Any, priority: int | None, name: str | None) -> None:
        self.op, self._name, self._core = op, name, current_core()
        self._priority = priority
        check_priority(op, priority)
        self.ranks = _own_group(op, replica_group, self._core)
        self.place = self.ranks.index(self._core.run.rank)

    @property
    def channels(self) -> int:
        """How many channels a ring over these ranks may have."""
        return _WHOLE_CHANNELS if len(self.ranks) == self._core.run.world.size else _CHANNELS

    def tensors(self, srcs: Any, dsts: Any, regions: tuple[MemoryRegion, ...], by_channel: bool = False) -> None:
        """Check the places, numbers and dtypes of both sides."""
        sides = (("srcs", srcs), ("dsts", dsts))
        for label, tensors in sides:
            if not isinstance(tensors, list | tuple):
                raise TypeError(f"{self.op} {label} must be a list of tensors, got {type(tensors).__name__}")
            require(len(tensors) > 0, f"{self.op} {label} is empty; accepted: one tensor or more")
            for tensor in tensors:
                checks.tile(self.op, label, tensor, regions)
        require(len(srcs) == len(dsts), f"{self.op} has {len(srcs)} srcs and {len(dsts)} dsts; accepted: as many")
        everything = [tensor for _, tensors in sides for tensor in tensors]
        on_chip = [tensor.buffer.on_chip for tensor in everything]
        require(len(set(on_chip)) == 1, f"{self.op} srcs and dsts mix HBM and SBUF; accepted: all in one of them")
        require(
            not on_chip[0] or len(srcs) == 1 or by_channel,
            f"{self.op} has {len(srcs)} tensors in SBUF; accepted: 1, and several only in HBM",
        )
        for tensor in everything:
            require(not tensor.buffer.on_chip or tensor.ndim == 2, f"{self.op} takes 2-D tiles in SBUF, got {tensor!r}")

    def by_channel(self, label: str, tensors: Any, channel_ids: Sequence[int]) -> Tensors:
        """The one tensor of every channel."""
        count = len(channel_ids)
        require(
            list(channel_ids) == list(range(count)) and 0 < count <= self.channels,
            f"{self.op} channel_ids is {list(channel_ids)}; accepted: 0, 1, ... without a gap, at most {self.channels}",
        )
        lengths = [len(inner) for inner in tensors]
        require(lengths == [1] * count, f"{self.op} {label} has {lengths} tensors per channel; accepted: {[1] * count}")
        return [inner[0] for inner in tensors]

    def dimension(self, given: Any, accepted: tuple[int, ...]) -> int:
        """The dimension along which tensors are joined or cut."""
        dim = _integer(self.op, "collective_dim", given)
        require(dim in accepted, f"{self.op} collective_dim is {dim}; accepted here: {' or '.join(map(str, accepted))}")
        return dim

    def check_shape(self, dst: NkiTensor, shape: tuple[int, ...], src: NkiTensor) -> None:
        """``dst`` has this shape, and the dtype of ``src``."""
        require(dst.shape == shape, f"{self.op} dst must have shape {shape} for src {src.shape}, got {dst.shape}")
        require(dst.dtype == src.dtype, f"{self.op} dst must have the dtype of src, {src.dtype}, got {dst.dtype}")

    def part(self, src: NkiTensor) -> int:
        """The size of one of as many equal parts along dimension 0 as there are ranks."""
        count = len(self.ranks)
        require(src.shape[0] % count == 0, f"{self.op} src {src.shape} does not fall into {count} equal parts")
        return src.shape[0] // count

    def parts(self, values: Array) -> list[Array]:
        """Equal parts along dimension 0, one per rank."""
        return np.split(values, len(self.ranks))

    def run(self, srcs: Tensors, dsts: Tensors, give: Give, *details: Any) -> None:
        """Meet all ranks; ``give`` makes what this one gets of the values of all, which are in the order of ranks.

        ``details`` are what has to be the same on all ranks beside operation, shapes and dtypes.
        """
        shapes = [f"{tensor.shape} {tensor.dtype}" for tensor in (*srcs, *dsts)]
        if self.op == "collective_permute":
            shapes = []  # not every rank sends, and not every one receives
        call = f"{self.op}({', '.join(map(str, (*shapes, *details)))})"

        def meet(data: Sequence[Array]) -> list[Post]:
            core = self._core
            return core.run.world.meet(core.index, core.seat, Post(core.run.rank, self.ranks, call, caller(), data))

        def work() -> Sequence[Array]:
            return give([post.data for post in meet([src.array().copy() for src in srcs])])

        shared = [tensor for tensor in (*srcs, *dsts) if tensor.buffer is MemoryRegion.shared_hbm]
        if self._core.run.lnc == 1 or not shared:
            self._issue(srcs, dsts, work, lambda: meet([]))
            return
        # One collective of both cores: core 0 does it, and core 1 finds what came.
        join_cores(self._core, call, shared)
        if self._core.index == 0:
            self._issue(srcs, dsts, work, lambda: meet([]))
        join_cores(self._core, call, shared)
        if self._core.index == 1:
            self._issue(srcs, dsts, lambda: [dst.array().copy() for dst in dsts], lambda: None)
        join_cores(self._core, call, shared)

    def _issue(
        self, srcs: Tensors, dsts: Tensors, compute: Callable[[], Sequence[Array]], rendezvous: Callable[[], object]
    ) -> None:
        if self._core.run.recorder is not None:
            self._core.run.recorder.refuse(f"{self.op} meets other replicas")
        details: dict[str, Any] = {"ranks": self.ranks, "priority": self._priority}
        issue(self.op, "collective", dsts, srcs, compute, name=self._name, rendezvous=rendezvous, **details)


def _own_group(op: str, replica_group: Any, core: Core) -> tuple[int, ...]:
    """The group of ``replica_group`` that the rank of this core is in."""
    if not isinstance(replica_group, ReplicaGroup):
        raise TypeError(f"{op} replica_group must be a ReplicaGroup, got {type(replica_group).__name__}")
    size = core.run.world.size
    for rank in (rank for group in replica_group.groups for rank in group):
        require(
            0 <= _integer(op, "rank", rank) < size,
            f"{op} has rank {rank}; accepted of {size} replicas: 0 to {size - 1}",
        )
    own: tuple[int, ...] = next((group for group in replica_group.groups if core.run.rank in group), ())
    require(
        len(own) > 0, f"{op} is called by rank {core.run.rank}, which is in none of the groups {replica_group.groups}"
    )
    return own


def _reduction(op: str, operator: Any) -> Callable[[Sequence[Array]], Array]:
    name = op_name(op, "op", operator)
    require(name in _REDUCTIONS, f"{op} op is nl.{name}; accepted: {', '.join(f'nl.{key}' for key in _REDUCTIONS)}")

    def combine(parts: Sequence[Array]) -> Array:
        held = parts if parts[0].dtype.kind in "iu" else [to_float32(part) for part in parts]
        return functools.reduce(_REDUCTIONS[name], held)

    return combine


def _resized(tensor: NkiTensor, dim: int, size: int) -> tuple[int, ...]:
    return (*tensor.shape[:dim], size, *tensor.shape[dim + 1 :])


def _integer(op: str, label: str, value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{op} {label} must be an integer, got {value!r}")
    return value


def _register(op: str, value: int, name: str | None) -> VirtualRegister:
    issue(op, "sync", [], [], lambda: [], name=name)
    return VirtualRegister(value)
