# SPDX-License-Identifier: Apache-2.0
"""How a kernel will work: plans, made on the host and passed to a launch, and the buffers they list."""

from dataclasses import dataclass

import nki.language as nl


@dataclass(frozen=True)
class Buffer(nl.NKIObject):
    """``count`` SBUF tiles of ``columns`` elements per partition."""

    name: str
    count: int
    columns: int
    dtype: str


@dataclass(frozen=True)
class BackwardPlan(nl.NKIObject):
    """A backward launch.

    Attributes:
        strategy: "staged".
        shape, dtype, cores: what it is made for: (batches, channels, positions), elements of x, physical cores.
        split: what the two cores of LNC 2 divide: "none", "channel", "batch" or "spatial".
        bands: partitions per channel.
        f_tile: columns per slot.
        interleave: number of slots.
        relu: "none", "mask" (supplied) or "recompute".
        residual: the residual is read, to recompute the mask.
        training: statistics are those of the batch.
        folded: the mean of x enters dx through a constant (for 16-bit x); else it is subtracted from x first.
        need_dx, need_dgamma, need_dbeta, need_dresidual: the outputs that are made.
        buffers: the one list of what is allocated in SBUF.
        sbuf_bytes: total of that list per partition.
    """

    strategy: str
    shape: tuple[int, int, int]
    dtype: str
    cores: int
    split: str
    bands: int
    f_tile: int
    interleave: int
    relu: str
    residual: bool
    training: bool
    folded: bool
    need_dx: bool
    need_dgamma: bool
    need_dbeta: bool
    need_dresidual: bool
    buffers: tuple[Buffer, ...]
    sbuf_bytes: int


@dataclass(frozen=True)
class ResidentPlan(nl.NKIObject):
    """A backward launch of the strategies ``resident`` and ``reread``.

    Attributes:
        strategy: "resident" (a group stays in SBUF between its phases) or "reread" (it is loaded again).
        shape, dtype, cores: as in :class:`BackwardPlan`.
        split: what the two cores of LNC 2 divide: "none", "channel", "batch" or "spatial".
        set_channels: channels of a set, which lie on partitions together.
        group_sets: sets of a group, which lie side by side and have their turn together.
        batch_bands, space_bands: each channel takes their product of partitions, in bands of batches and of space.
        last_batch_bands, last_space_bands: the same for a last set with fewer channels.
        lane_bands, last_lane_bands: bands that are in use, at most those products.
        ragged: some chunks use fewer partitions than their set.
        chunk: columns per slot.
        slots: number of slots.
        tensor_sums: Tensor adds up; else Scalar and Vector do.
        slice: columns of the partial sums of Tensor.
        eighths: of eight chunks, so many are combined by Tensor (with ``tensor_sums``, where the mean is folded), or
            have their dy added up by Vector and not by Scalar (without).
        term_eighths: of eight chunks, so many have their x-term made by Vector and not by Scalar, where the mean is
            folded and Tensor does not combine them; with ``tensor_sums`` in the last groups only.
        short_start: the very first chunk is a small one.
        short_end: the very last chunk is a small one.
        fast: the x-term of dx is held in the output dtype.
        relu, residual, training, folded, need_dx, need_dgamma, need_dbeta, need_dresidual: as in :class:`BackwardPlan`.
        buffers: the one list of what is allocated in SBUF.
        sbuf_bytes: total of that list per partition.
    """

    strategy: str
    shape: tuple[int, int, int]
    dtype: str
    cores: int
    split: str
    set_channels: int
    group_sets: int
    batch_bands: int
    space_bands: int
    last_batch_bands: int
    last_space_bands: int
    lane_bands: int
    last_lane_bands: int
    ragged: bool
    chunk: int
    slots: int
    tensor_sums: bool
    slice: int
    eighths: int
    term_eighths: int
    short_start: bool
    short_end: bool
    fast: bool
    relu: str
    residual: bool
    training: bool
    folded: bool
    need_dx: bool
    need_dgamma: bool
    need_dbeta: bool
    need_dresidual: bool
    buffers: tuple[Buffer, ...]
    sbuf_bytes: int


@dataclass(frozen=True)
class ForwardPlan(nl.NKIObject):
    """A forward launch.

    Attributes:
        strategy: "two_read".
        shape, dtype, cores, split, bands, f_tile, interleave: as in :class:`BackwardPlan`.
        relu: a ReLU follows.
        residual: a residual is added before the ReLU.
        training: the statistics are made from x; else they are given.
        need_y, need_mask: the outputs that are made beside the statistics.
        buffers: the one list of what is allocated in SBUF.
        sbuf_bytes: total of that list per partition.
    """

    strategy: str
    shape: tuple[int, int, int]
    dtype: str
    cores: int
    split: str
    bands: int
    f_tile: int
    interleave: int
    relu: bool
    residual: bool
    training: bool
    need_y: bool
    need_mask: bool
    buffers: tuple[Buffer, ...]
    sbuf_bytes: int


@dataclass(frozen=True)
class ResidentForwardPlan(nl.NKIObject):
    """A forward launch of the strategy ``resident`` or ``reread``.

    Attributes:
        strategy: "resident" or "reread".
        shape, dtype, cores, split: as in :class:`BackwardPlan`.
        group_channels: channels of a group, which lie on partitions together.
        batch_bands, space_bands, lane_bands, ragged, chunk, slots, short_start: as in :class:`ResidentPlan`.
        scalar_turns: beside statistics in bfloat16 Scalar subtracts the mean in one of so many chunks, else GpSimd.
        late_slots: number of slots for what is loaded again, or for the first time, after the statistics.
        reread: x is loaded again after the statistics; else it stays in its slot.
        relu, residual, training, need_y, need_mask: as in :class:`ForwardPlan`.
        buffers: the one list of what is allocated in SBUF.
        sbuf_bytes: total of that list per partition.
    """

    strategy: str
    shape: tuple[int, int, int]
    dtype: str
    cores: int
    split: str
    group_channels: int
    batch_bands: int
    space_bands: int
    lane_bands: int
    ragged: bool
    chunk: int
    slots: int
    short_start: bool
    scalar_turns: int
    late_slots: int
    reread: bool
    relu: bool
    residual: bool
    training: bool
    need_y: bool
    need_mask: bool
    buffers: tuple[Buffer, ...]
    sbuf_bytes: int


@dataclass(frozen=True)
class TransposedPlan(nl.NKIObject):
    """A backward launch of the strategy ``transposed``.

    Attributes:
        strategy: "transposed".
        shape, dtype, cores: as in :class:`BackwardPlan`.
        split: what the two cores of LNC 2 divide: "none", "channel" or "batch".
        group_blocks: blocks of 128 channels that are worked on together.
        tiles, positions: a slot holds so many tiles of up to 128 batches, with so many positions of every channel.
        slots: number of slots.
        reload: phase 2 reads the data again; else it stays in the slots.
        relu, residual, training, folded, need_dx, need_dgamma, need_dbeta, need_dresidual: as in :class:`BackwardPlan`.
        buffers: the one list of what is allocated in SBUF.
        sbuf_bytes: total of that list per partition.
    """

    strategy: str
    shape: tuple[int, int, int]
    dtype: str
    cores: int
    split: str
    group_blocks: int
    tiles: int
    positions: int
    slots: int
    reload: bool
    relu: str
    residual: bool
    training: bool
    folded: bool
    need_dx: bool
    need_dgamma: bool
    need_dbeta: bool
    need_dresidual: bool
    buffers: tuple[Buffer, ...]
    sbuf_bytes: int


@dataclass(frozen=True)
class TransposedForwardPlan(nl.NKIObject):
    """A forward launch of the strategy ``transposed``.

    Attributes:
        strategy, shape, dtype, cores, split, group_blocks, tiles, positions, slots, reload: as in
            :class:`TransposedPlan`.
        relu, residual, training, need_y, need_mask: as in :class:`ForwardPlan`.
        buffers: the one list of what is allocated in SBUF.
        sbuf_bytes: total of that list per partition.
    """

    strategy: str
    shape: tuple[int, int, int]
    dtype: str
    cores: int
    split: str
    group_blocks: int
    tiles: int
    positions: int
    slots: int
    reload: bool
    relu: bool
    residual: bool
    training: bool
    need_y: bool
    need_mask: bool
    buffers: tuple[Buffer, ...]
    sbuf_bytes: int


def size_of(dtype: str) -> int:
    """Bytes of one element of a dtype that the kernels use."""
    if dtype == nl.float32:
        return 4
    if dtype == nl.uint8:
        return 1
    return 2


def total_bytes(buffers: list[Buffer]) -> int:
    """Bytes per partition of a list of buffers."""
    total = 0
    for i in range(len(buffers)):
        buffer = buffers[i]
        total += buffer.count * buffer.columns * size_of(buffer.dtype)
    return total


def allocate(buffers: tuple[Buffer, ...], name: str, partitions: int) -> list[nl.NkiTensor]:
    """The SBUF tiles of the buffer called ``name``; none if the list does not have it."""
    tiles: list[nl.NkiTensor] = []
    for i in range(len(buffers)):
        buffer = buffers[i]
        if buffer.name == name:
            for _ in range(buffer.count):
                tiles.append(nl.ndarray((partitions, buffer.columns), dtype=buffer.dtype, buffer=nl.sbuf))
    return tiles
