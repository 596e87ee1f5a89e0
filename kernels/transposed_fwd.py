# SPDX-License-Identifier: Apache-2.0
"""Forward strategy ``transposed``: rows are loaded as they lie, the Tensor engine puts channels on partitions.

The stages of a job, on (channel, columns) blocks of at most one PSUM bank (see transposed_schedule.py for the order):

    first    Tensor x | Vector bn_stats on pieces of 512 columns, merged in groups of 64
    turn     bn_aggr over groups and cores, for every block of a group of blocks, and replicas; scale and shift
    second   Tensor x, residual | Vector z = (x - hi)*scale + shift [+ residual], its mask, and y of it; without a ReLU
             Scalar makes y | Tensor y and mask back to rows, Vector and Scalar copy them into slots; store

With given statistics there is no "first". Rows stay in their slots between the phases, or are read again.
"""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_bn.kernels.column_blocks import Block
from nki_bn.kernels.columns import (
    BETA,
    GAMMA,
    MEAN,
    SHIFT,
    VAR,
    column,
    load_column,
    reciprocal_root,
    scale_and_shift,
    split_mean,
)
from nki_bn.kernels.elementwise import pre_activation, rectify, scaled
from nki_bn.kernels.forward_phases import ForwardTensors, values_per_core, writes_columns
from nki_bn.kernels.moments import add_piece, close_group, exchange_moments, finish_moments
from nki_bn.kernels.plan import TransposedForwardPlan, allocate
from nki_bn.kernels.replicas import Replicas, exchange_at_once
from nki_bn.kernels.running import load_running, store_statistics
from nki_bn.kernels.sizing import GROUP_PIECES, ceil_div
from nki_bn.kernels.transposed_blocks import (
    Banks,
    Ground,
    Rows,
    allocate_banks,
    block_columns,
    ground_of,
    load_rows,
    rows_of,
    store_rows,
    turn_in,
    turn_out,
    turned_part,
)
from nki_bn.kernels.transposed_layout import piece_widths
from nki_bn.kernels.transposed_schedule import Scope, Step, blocks_of, run_steps, steps_of


def transposed_forward(tensors: ForwardTensors, plan: TransposedForwardPlan, momentum: float, eps: float) -> None:
    """All results of this core's share."""
    ground = ground_of(plan)
    work = allocate_work(tensors, plan, ground, eps)
    for i in range(len(ground.blocks)):
        load_columns(tensors, plan, ground.blocks[i])
        if not plan.training:
            coefficients(ground.blocks[i].columns, ground.blocks[i].flag, eps)
    run_steps(work, steps_of(work.scope))
    if plan.training and writes_columns(plan):
        for i in range(len(ground.blocks)):
            block = ground.blocks[i]
            load_running(tensors, block.columns, block.channel, block.channels, block.sets, False)
            store_statistics(tensors, block.columns, momentum, block.channel, block.channels, block.sets)


@dataclass(frozen=True)
class TransposedForward(nl.NKIObject):
    """What a core works with, and the stages of its jobs; ``widths`` are those of a channel's pieces of bn_stats."""

    tensors: ForwardTensors
    plan: TransposedForwardPlan
    eps: float
    ground: Ground
    scope: Scope
    widths: list[int]
    x_slots: list[nl.NkiTensor]
    residual_slots: list[nl.NkiTensor]
    mask_slots: list[nl.NkiTensor]
    wide: list[nl.NkiTensor]
    narrow: list[nl.NkiTensor]
    gate: list[nl.NkiTensor]
    stopped: list[nl.NkiTensor]
    pieces: list[nl.NkiTensor]
    groups: list[nl.NkiTensor]
    parts: list[nl.NkiTensor]
    scratch: list[nl.NkiTensor]
    gathered: list[nl.NkiTensor]
    banks: Banks

    def load(self, step: Step) -> None:
        """Load x, and the residual where it is used."""
        rows = rows_of(self.ground, self.scope, step)
        load_rows(self.x_slots, self.tensors.x, step.visit, rows)
        if self.plan.residual and (step.again or not self.scope.reload):
            load_rows(self.residual_slots, self.tensors.residual, step.visit, rows)

    def start(self, step: Step, at: int) -> None:
        """The first stage: turn the block."""
        if step.kind == "first" or step.kind == "second":
            rows = rows_of(self.ground, self.scope, step)
            turn_in(self.banks.x, at, self.x_slots, step.visit, rows)
            if self.plan.residual and step.kind == "second":
                turn_in(self.banks.other, at, self.residual_slots, step.visit, rows)

    def middle(self, step: Step, at: int) -> None:
        """The second stage: Vector's passes."""
        if step.kind == "first":
            add_moments(self, step, at, rows_of(self.ground, self.scope, step))
        if step.kind == "second":
            normalise(self, step, at, rows_of(self.ground, self.scope, step))

    def finish(self, step: Step, at: int) -> None:
        """The last stage: the turn, or results back to rows and to HBM."""
        if step.kind == "turn":
            turn(self, step)
        if step.kind == "second":
            store_results(self, step, at, rows_of(self.ground, self.scope, step))


def scope_of(plan: TransposedForwardPlan, ground: Ground) -> Scope:
    """What this core has to do."""
    turns = plan.training and plan.need_y
    return Scope(
        ceil_div(ground.extent.channels, ground.size),
        plan.group_blocks,
        len(ground.chunks),
        plan.slots,
        False,
        plan.training,
        turns,
        plan.need_y,
        plan.reload and turns,
    )


def allocate_work(
    tensors: ForwardTensors, plan: TransposedForwardPlan, ground: Ground, eps: float
) -> TransposedForward:
    """The tiles of the plan's list."""
    lanes = nl.tile_size.pmax
    return TransposedForward(
        tensors,
        plan,
        eps,
        ground,
        scope_of(plan, ground),
        piece_widths(ground.chunks),
        allocate(plan.buffers, "x", lanes),
        allocate(plan.buffers, "residual", lanes),
        allocate(plan.buffers, "mask", lanes),
        allocate(plan.buffers, "wide", lanes),
        allocate(plan.buffers, "narrow", lanes),
        allocate(plan.buffers, "gate", lanes),
        allocate(plan.buffers, "stopped", lanes),
        allocate(plan.buffers, "pieces", lanes),
        allocate(plan.buffers, "groups", lanes),
        allocate(plan.buffers, "parts", lanes),
        allocate(plan.buffers, "scratch", lanes),
        allocate(plan.buffers, "gathered", lanes),
        allocate_banks(plan.dtype),
    )


def load_columns(tensors: ForwardTensors, plan: TransposedForwardPlan, block: Block) -> None:
    """The columns that come from HBM: parameters, and given statistics."""
    rows = nl.ds(block.channel, block.sets * block.channels)
    load_column(block.columns, GAMMA, tensors.gamma[rows, :], 1, block.sets)
    load_column(block.columns, BETA, tensors.beta[rows, :], 1, block.sets)
    if not plan.training:
        load_column(block.columns, MEAN, tensors.means[rows], 1, block.sets)
        load_column(block.columns, VAR, tensors.variances[rows], 1, block.sets)


def coefficients(columns: nl.NkiTensor, flag: nl.NkiTensor, eps: float) -> None:
    """From mean and variance columns to those of the element passes: hi, lo, scale, shift."""
    reciprocal_root(columns, flag, eps)
    split_mean(columns)
    scale_and_shift(columns, True)


def moments_at(work: TransposedForward, tiles: list[nl.NkiTensor], step: Step, lanes: int) -> nl.NkiTensor:
    """The tile of a block's pieces or groups; groups of blocks take turns with two sets."""
    block = step.block - step.group * work.scope.group_blocks
    return tiles[step.group % 2 * work.scope.group_blocks + block][0:lanes, :]


def add_moments(work: TransposedForward, step: Step, at: int, rows: Rows) -> None:
    """bn_stats on the pieces of a block; after its last chunk, mean and variance of its channels."""
    x = turned_part(work.banks.x, at, rows)
    pieces = moments_at(work, work.pieces, step, rows.count)
    piece = len(piece_widths(work.ground.chunks[0 : step.chunk]))
    column_of_piece = 0
    while column_of_piece < rows.chunk.columns():
        width = work.widths[piece]
        add_piece(pieces, x[:, nl.ds(column_of_piece, width)], piece)
        if len(work.groups) > 0:
            groups = moments_at(work, work.groups, step, rows.count)
            close_group(pieces, groups, piece, piece == len(work.widths) - 1, columns_of_group(work.widths, piece))
        column_of_piece += width
        piece += 1
    if step.chunk == work.scope.chunks - 1:
        finish_block(work, step, rows.count)


def columns_of_group(widths: list[int], piece: int) -> int:
    """Columns of the pieces of a group, up to number ``piece``."""
    total = 0
    for i in range(piece // GROUP_PIECES * GROUP_PIECES, piece + 1):
        total += widths[i]
    return total


def finish_block(work: TransposedForward, step: Step, lanes: int) -> None:
    """Mean and variance columns of a block, over its pieces, or groups of them where there are many, and both cores."""
    extent = work.ground.extent
    columns = block_columns(work.ground, step.block)
    parts = work.parts[step.block % 2][0:lanes, :]
    if len(work.groups) > 0:
        groups = moments_at(work, work.groups, step, lanes)
        finish_moments(columns, groups, parts, len(work.widths), lanes, 1, extent.batches * extent.length)
    else:
        pieces = moments_at(work, work.pieces, step, lanes)
        nisa.bn_aggr(dst=columns[:, MEAN : VAR + 1, 0], data=pieces[:, 0 : 6 * len(work.widths)])
    if work.plan.split == "batch":
        exchange_moments(columns[:, MEAN : VAR + 1, 0], parts, values_per_core(work.tensors, work.plan.split))


def turn(work: TransposedForward, step: Step) -> None:
    """After the last "first" of a group: the coefficients of "second"."""
    start = step.group * work.scope.group_blocks
    end = start + blocks_of(work.scope, step.group)
    for i in range(len(work.ground.blocks)):
        block = work.ground.blocks[i]
        first = max(block.first, start) - block.first
        last = min(block.first + block.sets, end) - block.first
        if first < last:
            columns = block.columns[:, :, first:last]
            if work.tensors.replicas != None:
                synchronise(work, work.tensors.replicas, columns)
            coefficients(columns, block.flag[:, first:last], work.eps)


def synchronise(work: TransposedForward, replicas: Replicas, columns: nl.NkiTensor) -> None:
    """Mean and variance columns of this replica become those of all."""
    lanes, _, blocks = columns.shape
    gathered = None
    if replicas.mode == "one_round":
        gathered = work.gathered[0][0:lanes, 0 : 3 * blocks * replicas.size]
    scratch = work.scratch[0][0:lanes, 0 : 4 * blocks]
    exchange_at_once(replicas, columns[:, MEAN : VAR + 1, :], scratch, gathered)


def normalise(work: TransposedForward, step: Step, at: int, rows: Rows) -> None:
    """y of a block, turned, through the ReLU if there is one, and its mask; a NaN stays a NaN."""
    plan = work.plan
    columns = block_columns(work.ground, step.block)
    x = turned_part(work.banks.x, at, rows)
    value = turned_part(work.wide, at, rows)
    y = turned_part(work.narrow, at, rows)
    if not plan.relu and not plan.residual:
        scaled(value, x, columns)
        nisa.activation(dst=y, op=nl.copy, data=value, bias=column(columns, SHIFT))
        return
    residual = None
    if plan.residual:
        residual = turned_part(work.banks.other, at, rows)
    mask = None
    if plan.need_mask:
        mask = turned_part(work.gate, at, rows)
    pre_activation(value, x, residual, columns, mask)
    if plan.relu:
        rectify(y, value, turned_part(work.stopped, at, rows))
    else:
        nisa.activation(dst=y, op=nl.copy, data=value)


def store_results(work: TransposedForward, step: Step, at: int, rows: Rows) -> None:
    """y and mask back to rows, and to HBM after the last block of the group."""
    y = turned_part(work.narrow, at, rows)
    turn_out(work.x_slots, step.visit, work.banks.result, at, y, rows, True)
    if work.plan.need_mask:
        gate = turned_part(work.gate, at, rows)
        turn_out(work.mask_slots, step.visit, work.banks.result, at + 1, gate, rows, True)
    if step.last:
        store_rows(work.tensors.y, work.x_slots, step.visit, rows)
        if work.plan.need_mask:
            store_rows(work.tensors.mask, work.mask_slots, step.visit, rows)
