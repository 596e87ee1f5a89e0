# SPDX-License-Identifier: Apache-2.0
"""Backward strategy ``transposed``: rows are loaded as they lie, the Tensor engine puts channels on partitions.

For [B, C] inputs and other small S a load with channels on partitions would move single elements. The stages of a job,
on (channel, columns) blocks of at most one PSUM bank, unless it says rows:

    mask     (only recomputed)  Tensor x | Vector the value under the ReLU, its mask | Tensor mask back to rows
             Vector  dy' = dy where the ReLU let the value through, else 0, on rows
    first    Tensor x, dy'; Scalar copies dy' and adds it up | Vector (x - hi)*dy' | Scalar adds that up
    turn     the sums of a group of blocks, with those of the other core and of replicas; the coefficients of the group
    second   Tensor x, dy'; Scalar slope*(x - hi) + offset | Vector scale*dy' minus that | Tensor back to rows
             Vector and Scalar copy dx into the slot of dy; store

Rows stay in their slots between "first" and "second", or are read again where they do not fit.
"""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_bn.kernels.backward_phases import input_term
from nki_bn.kernels.backward_tensors import BackwardTensors, needs_input_sums, needs_products, needs_sums
from nki_bn.kernels.column_blocks import load_block, start_block, store_block
from nki_bn.kernels.columns import (
    HI,
    LOCAL,
    SCALE,
    SUMS,
    column,
    exchange_sums,
    gamma_gradient,
    input_coefficients,
    split_mean,
)
from nki_bn.kernels.elementwise import recompute_mask
from nki_bn.kernels.plan import TransposedPlan, allocate
from nki_bn.kernels.replicas import Replicas, add_over_replicas
from nki_bn.kernels.sizing import ceil_div
from nki_bn.kernels.sums import add_columns
from nki_bn.kernels.transposed_blocks import (
    Banks,
    Ground,
    Rows,
    allocate_banks,
    block_columns,
    block_rows,
    ground_of,
    load_rows,
    rows_of,
    store_rows,
    turn_in,
    turn_out,
    turned_part,
)
from nki_bn.kernels.transposed_schedule import Scope, Step, blocks_of, odd_one, run_steps, steps_of, works_alone


def transposed_gradients(tensors: BackwardTensors, plan: TransposedPlan, eps: float, count: int) -> None:
    """All gradients of this core's share; ``count`` is N."""
    ground = ground_of(plan)
    for i in range(len(ground.blocks)):
        load_block(tensors, plan, ground.blocks[i])
        split_mean(ground.blocks[i].columns)
        start_block(plan, ground.blocks[i], eps)
    work = allocate_work(tensors, plan, ground, count)
    run_steps(work, steps_of(work.scope))
    if needs_sums(plan):
        for i in range(len(ground.blocks)):
            store_block(tensors, plan, ground.blocks[i])


def scope_of(plan: TransposedPlan, ground: Ground) -> Scope:
    """What this core has to do."""
    return Scope(
        ceil_div(ground.extent.channels, ground.size),
        plan.group_blocks,
        len(ground.chunks),
        plan.slots,
        plan.relu != "none" or plan.need_dresidual,
        needs_sums(plan),
        needs_input_sums(plan),
        plan.need_dx,
        plan.reload and needs_input_sums(plan),
    )


@dataclass(frozen=True)
class TransposedBackward(nl.NKIObject):
    """What a core works with, and the stages of its jobs."""

    tensors: BackwardTensors
    plan: TransposedPlan
    count: int
    ground: Ground
    scope: Scope
    dy_slots: list[nl.NkiTensor]
    x_slots: list[nl.NkiTensor]
    mask_slots: list[nl.NkiTensor]
    residual_slots: list[nl.NkiTensor]
    wide: list[nl.NkiTensor]
    narrow: list[nl.NkiTensor]
    partials: list[nl.NkiTensor]
    scratch: list[nl.NkiTensor]
    banks: Banks

    def load(self, step: Step) -> None:
        """Load dy, and x, mask and residual where they are used."""
        plan = self.plan
        rows = rows_of(self.ground, self.scope, step)
        load_rows(self.dy_slots, self.tensors.dy, step.visit, rows)
        if needs_products(plan) or plan.relu == "recompute":
            load_rows(self.x_slots, self.tensors.x, step.visit, rows)
        if plan.relu == "mask":
            load_rows(self.mask_slots, self.tensors.mask, step.visit, rows)
        if plan.residual:
            load_rows(self.residual_slots, self.tensors.residual, step.visit, rows)

    def start(self, step: Step, at: int) -> None:
        """The first stage: turn the block, and Scalar's passes over it."""
        if step.kind == "mask" and self.plan.relu == "recompute":
            rows = rows_of(self.ground, self.scope, step)
            turn_in(self.banks.x, at, self.x_slots, step.visit, rows)
            if self.plan.residual:
                turn_in(self.banks.other, at, self.residual_slots, step.visit, rows)
        if step.kind == "first":
            start_first(self, step, at, rows_of(self.ground, self.scope, step))
        if step.kind == "second":
            start_second(self, step, at, rows_of(self.ground, self.scope, step))

    def middle(self, step: Step, at: int) -> None:
        """The second stage: Vector's passes."""
        if step.kind == "mask" and self.plan.relu == "recompute":
            recompute_block(self, step, at, rows_of(self.ground, self.scope, step))
        if step.kind == "first" and needs_products(self.plan):
            make_product(self, step, at, rows_of(self.ground, self.scope, step))
        if step.kind == "second":
            combine(self, step, at, rows_of(self.ground, self.scope, step))

    def finish(self, step: Step, at: int) -> None:
        """The last stage: sums, or results back to rows and to HBM."""
        if step.kind == "mask":
            apply_mask(self, step, at, rows_of(self.ground, self.scope, step))
        if step.kind == "first" and needs_products(self.plan):
            sum_product(self, step, at, rows_of(self.ground, self.scope, step))
        if step.kind == "turn":
            turn(self, step)
        if step.kind == "second":
            rows = rows_of(self.ground, self.scope, step)
            dx = turned_part(self.narrow, at, rows)
            by_scalar = self.plan.folded and works_alone(self.scope, step) and odd_one(step)
            turn_out(self.dy_slots, step.visit, self.banks.result, at, dx, rows, by_scalar)
            if step.last:
                store_rows(self.tensors.dx, self.dy_slots, step.visit, rows)


def allocate_work(tensors: BackwardTensors, plan: TransposedPlan, ground: Ground, count: int) -> TransposedBackward:
    """The tiles of the plan's list."""
    lanes = nl.tile_size.pmax
    return TransposedBackward(
        tensors,
        plan,
        count,
        ground,
        scope_of(plan, ground),
        allocate(plan.buffers, "dy", lanes),
        allocate(plan.buffers, "x", lanes),
        allocate(plan.buffers, "mask", lanes),
        allocate(plan.buffers, "residual", lanes),
        allocate(plan.buffers, "wide", lanes),
        allocate(plan.buffers, "narrow", lanes),
        allocate(plan.buffers, "partials", lanes),
        allocate(plan.buffers, "scratch", lanes),
        allocate_banks(plan.dtype),
    )


def partial_of(work: TransposedBackward, step: Step, which: int, rows: Rows) -> nl.NkiTensor:
    """Where the partial sum number ``which`` of a block of a chunk goes; groups take turns with two sets of tiles."""
    block = step.block - step.group * work.scope.group_blocks
    at = block * work.scope.chunks + step.chunk
    return work.partials[step.group % 2 * 2 + which][0 : rows.count, at : at + 1]


def start_first(work: TransposedBackward, step: Step, at: int, rows: Rows) -> None:
    """Turn x and dy'; copy dy' to SBUF, and by the same instruction its partial sum."""
    if needs_products(work.plan):
        turn_in(work.banks.x, at, work.x_slots, step.visit, rows)
    dy = turn_in(work.banks.other, at, work.dy_slots, step.visit, rows)
    nisa.activation(
        dst=turned_part(work.narrow, at, rows),
        op=nl.copy,
        data=dy,
        reduce_op=nl.add,
        reduce_res=partial_of(work, step, 0, rows),
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )


def make_product(work: TransposedBackward, step: Step, at: int, rows: Rows) -> None:
    """(x - hi)*dy' in float32."""
    nisa.scalar_tensor_tensor(
        dst=turned_part(work.wide, at, rows),
        data=turned_part(work.banks.x, at, rows),
        op0=nl.subtract,
        operand0=column(block_columns(work.ground, step.block), HI),
        op1=nl.multiply,
        operand1=turned_part(work.narrow, at, rows),
    )


def sum_product(work: TransposedBackward, step: Step, at: int, rows: Rows) -> None:
    """The partial sum of the product, by Scalar or, where that has more to do, by Scalar and Vector in turns."""
    product = turned_part(work.wide, at, rows)
    if odd_one(step) and (works_alone(work.scope, step) or not work.plan.folded):
        add_columns(partial_of(work, step, 1, rows), product)
        return
    nisa.activation(
        dst=product,
        op=nl.copy,
        data=product,
        reduce_op=nl.add,
        reduce_res=partial_of(work, step, 1, rows),
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )


def recompute_block(work: TransposedBackward, step: Step, at: int, rows: Rows) -> None:
    """The ReLU's mask of a block, as the forward makes it."""
    residual = None
    if work.plan.residual:
        residual = turned_part(work.banks.other, at, rows)
    value = turned_part(work.wide, at, rows)
    x = turned_part(work.banks.x, at, rows)
    recompute_mask(turned_part(work.narrow, at, rows), value, x, residual, block_columns(work.ground, step.block))


def apply_mask(work: TransposedBackward, step: Step, at: int, rows: Rows) -> None:
    """dy' = dy where the ReLU let the value through, else 0; it is the gradient of the residual."""
    if work.plan.relu == "recompute":
        mask = turned_part(work.narrow, at, rows)
        turn_out(work.mask_slots, step.visit, work.banks.result, at, mask, rows, True)
    if work.plan.relu != "none":
        dy = block_rows(work.dy_slots, step.visit, rows)
        mask = block_rows(work.mask_slots, step.visit, rows)
        nisa.select_reduce(dst=dy, predicate=mask, on_true=dy, on_false=0.0)
    if work.plan.need_dresidual and step.last and not step.again:
        store_rows(work.tensors.dresidual, work.dy_slots, step.visit, rows)


def turn(work: TransposedBackward, step: Step) -> None:
    """After the last "first" of a group: its sums, and the coefficients of "second"."""
    start = step.group * work.scope.group_blocks
    end = start + blocks_of(work.scope, step.group)
    for i in range(len(work.ground.blocks)):
        block = work.ground.blocks[i]
        first = max(block.first, start)
        last = min(block.first + block.sets, end)
        if first < last:
            columns = block.columns[:, :, first - block.first : last - block.first]
            finish_sums(work, step, columns, first - start)


def finish_sums(work: TransposedBackward, step: Step, columns: nl.NkiTensor, first: int) -> None:
    """The sums and coefficients of some blocks of a group, from number ``first`` in the group on."""
    plan = work.plan
    add_partials(work, step, 0, columns, first)
    if needs_products(plan):
        add_partials(work, step, 1, columns, first)
    else:
        nisa.memset(dst=column(columns, SUMS + 1), value=0.0)
    if plan.split == "batch":
        for i in range(columns.shape[2]):
            exchange_sums(columns[:, :, i : i + 1])
    if work.tensors.replicas != None and needs_input_sums(plan):
        synchronise_sums(work, work.tensors.replicas, columns)
    if needs_products(plan):
        gamma_gradient(columns)
    if needs_input_sums(plan):
        input_coefficients(columns, work.count, plan.folded)


def synchronise_sums(work: TransposedBackward, replicas: Replicas, columns: nl.NkiTensor) -> None:
    """Keep the sums of this replica, and put those of all in their place."""
    lanes, _, blocks = columns.shape
    sums = columns[:, SUMS : SUMS + 2, :]
    own = work.scratch[0][0:lanes, 0 : 2 * blocks]
    total = work.scratch[0][0:lanes, 2 * blocks : 4 * blocks]
    nisa.tensor_copy(dst=columns[:, LOCAL : LOCAL + 2, :], src=sums)
    nisa.tensor_copy(dst=own.reshape((lanes, 2, blocks)), src=sums)
    add_over_replicas(replicas, own, total)
    nisa.tensor_copy(dst=sums, src=total.reshape((lanes, 2, blocks)))


def add_partials(work: TransposedBackward, step: Step, which: int, columns: nl.NkiTensor, first: int) -> None:
    """Sum number ``which`` of some blocks, over the chunks."""
    lanes, _, blocks = columns.shape
    chunks = work.scope.chunks
    partials = work.partials[step.group % 2 * 2 + which][0:lanes, nl.ds(first * chunks, blocks * chunks)]
    by_block = partials.reshape((lanes, blocks, chunks))
    nisa.tensor_reduce(dst=column(columns, SUMS + which), op=nl.add, data=by_block, axis=2)


def start_second(work: TransposedBackward, step: Step, at: int, rows: Rows) -> None:
    """Turn dy' and, where dx depends on it, x; Scalar forms the x-term."""
    turn_in(work.banks.other, at, work.dy_slots, step.visit, rows)
    if work.plan.training:
        x = turn_in(work.banks.x, at, work.x_slots, step.visit, rows)
        input_term(turned_part(work.wide, at, rows), x, block_columns(work.ground, step.block), work.plan.folded)


def combine(work: TransposedBackward, step: Step, at: int, rows: Rows) -> None:
    """dx of a block, turned."""
    dx = turned_part(work.narrow, at, rows)
    dy = turned_part(work.banks.other, at, rows)
    scale = column(block_columns(work.ground, step.block), SCALE)
    if work.plan.training:
        term = turned_part(work.wide, at, rows)
        nisa.scalar_tensor_tensor(dst=dx, data=dy, op0=nl.multiply, operand0=scale, op1=nl.subtract, operand1=term)
    else:
        nisa.activation(dst=dx, op=nl.copy, data=dy, scale=scale)
