# SPDX-License-Identifier: Apache-2.0
"""Instructions that involve both cores of a logical core: exchange of tiles, barriers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nki_bn.simulator import dtypes
from nki_bn.simulator.isa import checks, enums
from nki_bn.simulator.issue import NkiInstruction, clear_all_marks, clear_marks, issue
from nki_bn.simulator.machine import Core, current_core
from nki_bn.simulator.memory import Bank, MemoryRegion
from nki_bn.simulator.numerics import Array
from nki_bn.simulator.tensor import NkiTensor, require
from nki_bn.simulator.trace import Source, caller

# Elements per partition that the DMA of GpSimd moves: 1024, 512 and 256 bytes for 4-, 2- and 1-byte types.
_GPSIMD_ELEMENTS = 256
_RANKS = (0, 1)


@dataclass(frozen=True)
class _Post:
    """What a core offers at a rendezvous; no tensor, which would keep its tile alive until the peer goes on."""

    source: Source
    label: str
    shape: tuple[int, ...]
    dtype: str
    shared: Bank | None = None
    send_to: int | None = None


def _post(tensor: NkiTensor, send_to: int | None = None) -> _Post:
    shared = tensor.storage.bank if tensor.buffer is MemoryRegion.shared_hbm else None
    return _Post(caller(), repr(tensor), tensor.shape, tensor.dtype, shared, send_to)


def sendrecv(
    src: NkiTensor,
    dst: NkiTensor,
    send_to_rank: int,
    recv_from_rank: int,
    pipe_id: int,
    dma_engine: enums.dma_engine = enums.dma_engine.dma,
    name: str | None = None,
) -> NkiInstruction:
    """Send ``src`` to the core ``send_to_rank`` and receive what ``recv_from_rank`` sends into ``dst``.

    Both tiles are in SBUF, of equal shape and dtype, on both cores. The n-th call with a ``pipe_id`` on one core meets
    the n-th one on the other. ``dma_engine.gpsimd_dma`` moves at most 256 elements per partition.

    Raises:
        TypeError: an operand is no tensor, ``dma_engine`` no member, a rank or ``pipe_id`` no integer.
        NkiValidationError: one core, gen2, another place, shape, dtype or rank; or the two calls do not fit.
        DeadlockError: the other core never calls.
    """
    op = "sendrecv"
    core = _pair(op)
    checks.tile(op, "src", src, checks.SBUF)
    checks.tile(op, "dst", dst, checks.SBUF)
    require(src.shape == dst.shape, f"{op} dst must have the shape of src, {src.shape}, got {dst.shape}")
    require(src.dtype == dst.dtype, f"{op} dst must have the dtype of src, {src.dtype}, got {dst.dtype}")
    for label, rank in (("send_to_rank", send_to_rank), ("recv_from_rank", recv_from_rank)):
        require(_integer(op, label, rank) in _RANKS, f"{op} {label} must be 0 or 1, got {rank}")
    _integer(op, "pipe_id", pipe_id)
    dma_engine = checks.member(op, "dma_engine", dma_engine, enums.dma_engine)
    _check_gpsimd(src, dma_engine)
    key = (op, pipe_id, core.posted[op, pipe_id])
    core.posted[op, pipe_id] += 1
    sent = core.run.parcels

    def offer() -> list[Array]:
        sent[core.index, *key] = src.array().copy()
        return []

    def compute() -> list[Array]:
        # Checked by now: only what was written is offered.
        offer()
        if core.run.recorder is not None:
            core.run.recorder.note(core, offer)
        posts = _meet(core, key, _post(src, send_to_rank), f"{op} with pipe_id {pipe_id}")
        _check_sender(core, posts[recv_from_rank], dst, recv_from_rank)
        return receive()

    def receive() -> list[Array]:
        return [sent.pop((recv_from_rank, *key))]

    return issue(
        op,
        "dma",
        [dst],
        [src],
        compute,
        name=name,
        rendezvous=lambda: _meet(core, key, _post(src), f"{op} with pipe_id {pipe_id}"),
        again=receive,
        pipe=pipe_id,
        sequence=key[2],
        send_to=send_to_rank,
        recv_from=recv_from_rank,
        dma_engine=dma_engine.name,
    )


def core_barrier(
    data: NkiTensor,
    cores: Sequence[int],
    engine: enums.engine = enums.engine.gpsimd,
    name: str | None = None,
) -> NkiInstruction:
    """Wait until both ``cores`` (0, 1) are here; writes to ``data`` before it are visible after it.

    ``data`` is the shared tensor the cores synchronise on. Public kernels also pass a tile: then all shared tensors are
    ordered. The n-th barrier of one core meets the n-th of the other.

    Raises:
        TypeError: ``data`` is no tensor, ``engine`` no member.
        NkiValidationError: one core, gen2, other cores, private HBM, or the other core waits on other data.
        DeadlockError: the other core never comes.
    """
    op = "core_barrier"
    core = _pair(op)
    checks.tile(op, "data", data, (*checks.ON_CHIP, MemoryRegion.shared_hbm))
    require(tuple(cores) == _RANKS, f"{op} cores must be (0, 1), got {cores!r}")
    chosen = checks.pick_engine(op, engine, enums.engine.gpsimd, tuple(enums.engine))
    key = (op, core.posted[op])
    core.posted[op] += 1

    def compute() -> list[Array]:
        posts = _meet(core, key, _post(data), f"{op} on {data!r}")
        if core.index == list(posts)[-1]:
            # Only the last to arrive: its peer resumes when this core may have touched the memory again.
            _order(core, data, posts[1 - core.index])
        return []

    shared = data.buffer is MemoryRegion.shared_hbm
    return issue(
        op,
        chosen.name,
        [],
        [],
        compute,
        name=name,
        rendezvous=lambda: _meet(core, key, _post(data), f"{op} on {data!r}"),
        again=list,
        sequence=key[1],
        memory=data.storage.bank.serial if shared else None,
        tensor=data.name,
    )


def join_cores(core: Core, what: str, tensors: Sequence[NkiTensor]) -> None:
    """Let both cores of a replica come to ``what``; what they did to shared ``tensors`` before it is seen after it.

    Raises:
        NkiValidationError: the other core comes to something else.
        DeadlockError: it never comes.
    """
    key = ("join_cores", core.posted["join_cores"])
    core.posted["join_cores"] += 1
    posts = _meet(core, key, _Post(caller(), what, (), ""), what)
    other = posts[1 - core.index]
    require(other.label == what, f"the cores of a replica meet in {what} here, but in {other.label} at {other.source}")
    if core.index == list(posts)[-1]:
        for tensor in tensors:
            clear_marks(core, tensor.storage.bank)


def _pair(op: str) -> Core:
    checks.at_least(op, enums.nc_version.gen3)
    core = current_core()
    require(core.run.lnc == 2, f"{op} needs a launch on two cores, kernel[2](...); this one has {core.run.lnc}")
    return core


def _integer(op: str, label: str, value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{op} {label} must be an integer, got {value!r}")
    return value


def _check_gpsimd(src: NkiTensor, dma_engine: enums.dma_engine) -> None:
    if dma_engine is enums.dma_engine.gpsimd_dma:
        size = dtypes.size_of(src.dtype)
        require(
            checks.columns(src) <= _GPSIMD_ELEMENTS,
            f"sendrecv with gpsimd_dma moves at most {_GPSIMD_ELEMENTS * size} bytes per partition of {src.dtype}, "
            f"src has {checks.columns(src) * size}",
        )


def _meet(core: Core, key: tuple[Any, ...], post: _Post, what: str) -> dict[int, _Post]:
    """Post at ``key`` and wait until every core has; all posts, in order of arrival."""
    posts = core.run.posts[key]
    posts[core.index] = post
    core.run.world.lockstep.wait_until(core.seat, lambda: len(posts) == core.run.lnc, f"{what} at {post.source}")
    core.run.posts.pop(key, None)
    return posts


def _check_sender(core: Core, sent: _Post, dst: NkiTensor, rank: int) -> None:
    """What core ``rank`` sends is for this one, and fits ``dst``."""
    require(
        sent.send_to == core.index,
        f"sendrecv on core {core.index} receives from core {rank}, which sends to core {sent.send_to} at {sent.source}",
    )
    for label in ("shape", "dtype"):
        mine, theirs = getattr(dst, label), getattr(sent, label)
        require(
            mine == theirs,
            f"sendrecv dst on core {core.index} has {label} {mine}, but core {rank} sends {label} "
            f"{theirs} at {sent.source}",
        )


def _order(core: Core, data: NkiTensor, other: _Post) -> None:
    """Forget all accesses to what the barrier orders."""
    mine = data.storage.bank if data.buffer is MemoryRegion.shared_hbm else None
    if mine is None or other.shared is None:
        clear_all_marks(core)
        return
    require(mine is other.shared, f"core_barrier is on {data!r} here, but on {other.label} at {other.source}")
    clear_marks(core, mine)
