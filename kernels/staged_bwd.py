# SPDX-License-Identifier: Apache-2.0
"""Backward strategy ``staged``: two phases over the data of one channel tile, channels on partitions.

    phase 1, per tile:  load dy, x (mask)      dy' = dy where the ReLU let it through
                        Scalar  staged = bf16(dy'), sum dy'
                        Vector  sum dy'*(x - hi)
                        store staged, except for the last `interleave` tiles, which stay in their slots
    turn:               bands and cores add their sums; dbeta, dgamma, slope and offset per channel
    phase 2, per tile:  the resident tiles first, with dy' as it is; then load x, staged
                        Scalar  t = slope*(x - hi) + offset
                        Vector  dx = scale*dy' - t, in the slot of dy
                        store dx

Loads are numbered through all channel tiles, and the slots of a ring take them in turn. They run ahead of the work as
far as slots have been emptied, also into the next channel tile. With frozen statistics dx = scale*dy' needs no sums, so
phase 1 stores it.
"""

from dataclasses import dataclass

import nki.language as nl

from nki_bn.kernels.backward_phases import (
    BackwardWork,
    ChannelTile,
    allocate_work,
    channel_tile,
    finish_sums,
    first_phase,
    load_beside_dy,
    load_dy,
    second_phase,
    staged_load,
    staged_store,
    start_columns,
)
from nki_bn.kernels.backward_tensors import BackwardTensors, needs_input_sums, needs_sums
from nki_bn.kernels.column_blocks import block_of, store_block
from nki_bn.kernels.columns import input_coefficients
from nki_bn.kernels.plan import BackwardPlan
from nki_bn.kernels.tiling import Tile, slot_tile


@dataclass(frozen=True)
class Load(nl.NKIObject):
    """One filling of a slot: dy and x of a tile, or x and the staged gradient when it ``returns`` for phase 2."""

    group: ChannelTile
    tile: Tile
    staged_hbm: nl.NkiTensor
    returns: bool


@dataclass
class Progress(nl.NKIObject):
    """How many loads have been started, and the slots of how many are free again."""

    loaded: int = 0
    freed: int = 0


def staged_gradients(
    tensors: BackwardTensors, flat: tuple[int, int, int], plan: BackwardPlan, eps: float, count: int
) -> None:
    """All gradients of this core's share; ``count`` is N."""
    work = allocate_work(flat, plan, eps)
    loads = loads_of(tensors, work)
    done = Progress()
    at = 0
    for i in range(work.share.first, work.share.last):
        chunks = sum_tiles(tensors, work, loads, at, done)
        start_columns(tensors, work, i + 1)
        at += len(work.tiles)
        turn(tensors, work, loads[at - 1].group, chunks, count)
        block = block_of(work.blocks, i)
        if needs_sums(plan) and i == block.first + block.sets - 1:
            store_block(tensors, plan, block)
        if needs_input_sums(plan):
            left = leaving(work)
            for visited in range(at - len(work.tiles) + left, at + left):
                load_ahead(tensors, work, loads, visited, done)
                visit(tensors, work, loads[visited], visited)
                done.freed = visited + 1
            at += left


def leaving(work: BackwardWork) -> int:
    """How many tiles of a channel tile leave their slots before phase 2."""
    if not needs_input_sums(work.plan):
        return len(work.tiles)
    return max(0, len(work.tiles) - work.plan.interleave)


def loads_of(tensors: BackwardTensors, work: BackwardWork) -> list[Load]:
    """All loads of this core, in the order of their slots."""
    loads: list[Load] = []
    left = leaving(work)
    for i in range(work.share.first, work.share.last):
        group = channel_tile(tensors, work, i)
        staged_hbm = None
        returning = 0
        if needs_input_sums(work.plan) and left > 0:
            returning = left
            staged = (group.place.partitions, work.tiles[left].column)
            staged_hbm = nl.ndarray(staged, dtype=nl.bfloat16, buffer=nl.private_hbm)
        for j in range(len(work.tiles)):
            loads.append(Load(group, work.tiles[j], staged_hbm, False))
        for j in range(returning):
            loads.append(Load(group, work.tiles[j], staged_hbm, True))
    return loads


def load_ahead(tensors: BackwardTensors, work: BackwardWork, loads: list[Load], at: int, done: Progress) -> None:
    """Start loads up to the one behind ``at``, and more if that does not wait for the latest store.

    DMAs start in program order: a load into a slot that has just been stored would hold up what comes after it.
    """
    slots = work.plan.interleave
    while done.loaded < len(loads) and done.loaded - slots < done.freed:
        if done.loaded > at + 1 and done.loaded >= slots and done.loaded - slots == done.freed - 1:
            return
        fill_slot(tensors, work, loads[done.loaded], done.loaded)
        done.loaded += 1


def fill_slot(tensors: BackwardTensors, work: BackwardWork, load: Load, at: int) -> None:
    """Load number ``at``. The first columns come between dy and x of the first tile: they are needed with x."""
    if load.returns:
        staged_load(tensors, work, load.group, load.tile, at, load.staged_hbm)
        return
    load_dy(tensors, work, load.group, load.tile, at)
    if at == 0:
        start_columns(tensors, work, work.share.first)
    load_beside_dy(tensors, work, load.group, load.tile, at)


def sum_tiles(tensors: BackwardTensors, work: BackwardWork, loads: list[Load], first: int, done: Progress) -> int:
    """Phase 1 of the channel tile that starts with load ``first``; returns how many chunks it has summed."""
    chunks = 0
    left = leaving(work)
    for i in range(len(work.tiles)):
        at = first + i
        load = loads[at]
        load_ahead(tensors, work, loads, at, done)
        chunks = first_phase(tensors, work, load.group, load.tile, at, chunks, i >= left)
        if i < left:
            if needs_input_sums(work.plan):
                staged_store(work, load.group, load.tile, at, load.staged_hbm)
            done.freed = at + 1
    return chunks


def turn(tensors: BackwardTensors, work: BackwardWork, group: ChannelTile, chunks: int, count: int) -> None:
    """Between the phases: the sums over ``chunks`` chunks, and the coefficients of phase 2."""
    if needs_sums(work.plan):
        finish_sums(work, group, chunks, tensors.replicas)
    if needs_input_sums(work.plan):
        input_coefficients(group.columns, count, work.plan.folded)


def visit(tensors: BackwardTensors, work: BackwardWork, load: Load, at: int) -> None:
    """Phase 2 of the tile in slot ``at``: one that never left it, or one that came back."""
    slots = work.dy_slots
    if load.returns:
        slots = work.staged_slots
    gradient = slot_tile(slots, at, load.group.place, load.tile)
    second_phase(tensors, work, load.group, load.tile, at, gradient, not load.returns and not work.plan.folded)
