# SPDX-License-Identifier: Apache-2.0
"""Backward strategy ``resident``: every element is read once and written once.

Statistics are per channel, so one group of channels at a time is taken whole: its dy and x stay in a ring of slots from
the sums to dx, while the loads of later groups fill the slots that stores have emptied.

    phase 1, per chunk: load dy, x (mask)      dy' = dy where the ReLU let it through
                        Vector  (x - hi)*dy'
                        Scalar and Vector  the two sums
    turn, per group:    sums over bands (transposes on Tensor) and cores; the coefficients of the group
    phase 2, per chunk: float32   Scalar x - hi, Vector (x - hi)*k - dy', Scalar or Vector times -scale, minus offset
                        16 bits   Scalar slope*x + offset, Vector scale*dy' minus that
                        store dx from the slot of dy

Phase 2 of a group is interleaved with phase 1 of the next one, chunk by chunk.
"""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_bn.kernels.backward_phases import center, input_term
from nki_bn.kernels.backward_tensors import BackwardTensors, needs_input_sums, needs_products, needs_sums
from nki_bn.kernels.column_blocks import Block, block_of, group_columns, start_block, store_block
from nki_bn.kernels.columns import (
    HI,
    MINUS_OFFSET,
    MINUS_SCALE,
    RATIO,
    SCALE,
    column,
    column_tile,
    input_coefficients,
    negated_coefficients,
)
from nki_bn.kernels.elementwise import passed, pre_activation
from nki_bn.kernels.plan import ResidentPlan, allocate
from nki_bn.kernels.resident_geometry import (
    Extent,
    Step,
    extent_of_core,
    load_step,
    step_part,
    steps_of,
    store_step,
)
from nki_bn.kernels.resident_turn import TurnTiles, finish_group
from nki_bn.kernels.sums import add_columns


@dataclass(frozen=True)
class ResidentWork(nl.NKIObject):
    """What a core works with: the plan, the ring of slots, temporaries, and the columns of all groups."""

    plan: ResidentPlan
    dy_slots: list[nl.NkiTensor]
    x_slots: list[nl.NkiTensor]
    mask_slots: list[nl.NkiTensor]
    residual_slots: list[nl.NkiTensor]
    products: list[nl.NkiTensor]
    terms: list[nl.NkiTensor]
    copies: list[nl.NkiTensor]
    partials: list[nl.NkiTensor]
    turn: list[nl.NkiTensor]
    blocks: list[Block]


@dataclass
class Progress(nl.NKIObject):
    """How far each stage has come: the number of the next chunk to load, to add up, and for the stages of dx.

    ``ready`` chunks have the coefficients that the stages of dx need.
    """

    loaded: int = 0
    ready: int = 0
    termed: int = 0
    combined: int = 0
    stored: int = 0


def resident_gradients(
    tensors: BackwardTensors, flat: tuple[int, int, int], plan: ResidentPlan, eps: float, count: int
) -> None:
    """All gradients of this core's share; ``count`` is N.

    The engines run in program order, so what an engine does for one chunk is issued between what it does for others:
    the term of a chunk before the combination of the previous one, sums after the combination.
    """
    extent = extent_of_core(flat, plan.split, nl.program_id(0), nl.num_programs(0))
    steps = steps_of(extent, plan.group_channels, plan.batch_bands, plan.space_bands, plan.chunk)
    work = allocate_work(tensors, extent, plan, eps)
    done = Progress()
    for i in range(len(steps)):
        load_ahead(tensors, work, steps, done)
        while done.loaded <= i:
            assert done.stored < done.ready, "a group does not fit into the ring of slots"
            finish_chunk(tensors, work, steps, done)
            load_ahead(tensors, work, steps, done)
        make_terms(work, steps, done)
        start_sums(tensors, work, steps[i], i)
        finish_chunk(tensors, work, steps, done)
        end_sums(work, steps[i], i)
        if steps[i].last:
            turn(work, steps[i], count)
        if steps[i].last or not needs_input_sums(plan):
            done.ready = i + 1
    while plan.need_dx and done.stored < len(steps):
        make_terms(work, steps, done)
        finish_chunk(tensors, work, steps, done)
    if needs_sums(plan):
        for i in range(len(work.blocks)):
            store_block(tensors, plan, work.blocks[i])


def load_ahead(tensors: BackwardTensors, work: ResidentWork, steps: list[Step], done: Progress) -> None:
    """Load chunks into fresh slots, or slots emptied at least one store earlier (or now, if nothing else is left)."""
    slots = work.plan.slots
    while done.loaded < len(steps) and (done.loaded < slots or done.loaded - slots < done.stored - 1):
        load_chunk(tensors, work, steps[done.loaded], done.loaded)
        done.loaded += 1


def make_terms(work: ResidentWork, steps: list[Step], done: Progress) -> None:
    """The x-terms of dx, one chunk ahead of the combination."""
    if not needs_input_sums(work.plan):
        return
    while done.termed < done.ready and done.termed <= done.combined + 1:
        x_term(work, steps[done.termed], done.termed)
        done.termed += 1


def finish_chunk(tensors: BackwardTensors, work: ResidentWork, steps: list[Step], done: Progress) -> None:
    """Combine the next chunk, if it is ready, and store the one behind it (or itself, where one step does it all)."""
    plan = work.plan
    if not plan.need_dx:
        done.stored = done.ready
        return
    behind = 1
    if plan.folded or not plan.training:
        behind = 0
    if done.combined < done.ready:
        make_terms(work, steps, done)
        combine(work, steps[done.combined], done.combined)
        done.combined += 1
        if done.combined - behind <= done.stored:
            return
    if done.stored < done.combined:
        store_chunk(tensors, work, steps[done.stored], done.stored)
        done.stored += 1


def allocate_work(tensors: BackwardTensors, extent: Extent, plan: ResidentPlan, eps: float) -> ResidentWork:
    """The tiles of the plan's list, and the columns of all groups."""
    lanes = nl.tile_size.pmax
    blocks: list[Block] = []
    whole = extent.channels // plan.group_channels
    if whole > 0:
        add_block(blocks, extent, plan, 0, whole, plan.group_channels)
    if extent.channels % plan.group_channels > 0:
        add_block(blocks, extent, plan, whole, 1, extent.channels % plan.group_channels)
    for i in range(len(blocks)):
        start_block(tensors, plan, blocks[i], eps)
    return ResidentWork(
        plan,
        allocate(plan.buffers, "dy", lanes),
        allocate(plan.buffers, "x", lanes),
        allocate(plan.buffers, "mask", lanes),
        allocate(plan.buffers, "residual", lanes),
        allocate(plan.buffers, "products", lanes),
        allocate(plan.buffers, "terms", lanes),
        allocate(plan.buffers, "copies", lanes),
        allocate(plan.buffers, "partials", lanes),
        allocate(plan.buffers, "turn", 2),
        blocks,
    )


def add_block(blocks: list[Block], extent: Extent, plan: ResidentPlan, first: int, groups: int, channels: int) -> None:
    """Append the block of ``groups`` groups from number ``first`` on."""
    lanes = plan.lane_bands * channels
    prefix = ""
    if len(blocks) > 0:
        prefix = "last "
    tile = allocate(plan.buffers, prefix + "columns", nl.tile_size.pmax)[0]
    flag = allocate(plan.buffers, prefix + "flag", nl.tile_size.pmax)[0][0:lanes, 0:groups]
    channel = extent.channel + first * plan.group_channels
    blocks.append(Block(first, groups, channel, channels, lanes, column_tile(tile, lanes, groups), flag))


def columns_of(work: ResidentWork, step: Step) -> nl.NkiTensor:
    """The columns of a chunk's group, on the chunk's lanes."""
    return group_columns(block_of(work.blocks, step.group), step.group)[0 : step.unit.lanes(), :, :]


def partials_of(work: ResidentWork, group: int) -> list[nl.NkiTensor]:
    """The two partial tiles of a group, by turns of two groups."""
    at = group % 2 * 2
    return work.partials[at : at + 2]


def load_chunk(tensors: BackwardTensors, work: ResidentWork, step: Step, at: int) -> None:
    """Load dy, and x, mask and residual where they are used."""
    plan = work.plan
    load_step(step_part(work.dy_slots, at, step), tensors.dy, step)
    if needs_products(plan) or plan.relu == "recompute":
        load_step(step_part(work.x_slots, at, step), tensors.x, step)
    if plan.relu == "mask":
        load_step(step_part(work.mask_slots, at, step), tensors.mask, step)
    if plan.residual:
        load_step(step_part(work.residual_slots, at, step), tensors.residual, step)


def start_sums(tensors: BackwardTensors, work: ResidentWork, step: Step, at: int) -> None:
    """Mask dy of a chunk and form the product whose sum is needed."""
    plan = work.plan
    if plan.relu != "none":
        mask_chunk(work, step, at)
    dy = step_part(work.dy_slots, at, step)
    if plan.need_dresidual:
        store_step(tensors.dresidual, dy, step)
    if needs_products(plan):
        x = step_part(work.x_slots, at, step)
        hi = column(columns_of(work, step), HI)
        product = step_part(work.products, at, step)
        nisa.scalar_tensor_tensor(dst=product, data=x, op0=nl.subtract, operand0=hi, op1=nl.multiply, operand1=dy)


def end_sums(work: ResidentWork, step: Step, at: int) -> None:
    """The partial sums of dy' and of the product over a chunk."""
    plan = work.plan
    if not needs_sums(plan):
        return
    partials = partials_of(work, step.group)
    if step.partial == 0 and plan.ragged:
        # Units of fewer lanes than the group leave the partials of the others alone: these count as 0.
        nisa.memset(dst=partials[0], value=0.0)
        nisa.memset(dst=partials[1], value=0.0)
    sum_gradient(work, step, at, step_part(work.dy_slots, at, step), partials[0])
    if needs_products(plan):
        product = step_part(work.products, at, step)
        nisa.activation(
            dst=product,
            op=nl.copy,
            data=product,
            reduce_op=nl.add,
            reduce_res=partial_at(partials[1], step),
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )


def partial_at(partials: nl.NkiTensor, step: Step) -> nl.NkiTensor:
    """Where the partial of a chunk goes."""
    return partials[0 : step.unit.lanes(), step.partial : step.partial + 1]


def sum_gradient(work: ResidentWork, step: Step, at: int, dy: nl.NkiTensor, partials: nl.NkiTensor) -> None:
    """The partial sum of dy', by Scalar and Vector in turns."""
    if at % 2 == 0:
        add_columns(partial_at(partials, step), dy)
        return
    copy = step_part(work.copies, at, step)
    nisa.activation(
        dst=copy,
        op=nl.copy,
        data=dy,
        reduce_op=nl.add,
        reduce_res=partial_at(partials, step),
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )


def mask_chunk(work: ResidentWork, step: Step, at: int) -> None:
    """dy' = dy where the ReLU let the value through, else 0."""
    dy = step_part(work.dy_slots, at, step)
    mask = step_part(work.mask_slots, at, step)
    if work.plan.relu == "recompute":
        residual = None
        if work.plan.residual:
            residual = step_part(work.residual_slots, at, step)
        value = step_part(work.products, at, step)
        pre_activation(value, step_part(work.x_slots, at, step), residual, columns_of(work, step))
        passed(mask, value)
    nisa.select_reduce(dst=dy, predicate=mask, on_true=dy, on_false=0.0)


def turn(work: ResidentWork, step: Step, count: int) -> None:
    """After the last chunk of a group: its sums, and the coefficients of its phase 2."""
    plan = work.plan
    if not needs_sums(plan):
        return
    block = block_of(work.blocks, step.group)
    tiles = TurnTiles(work.turn[0], work.turn[1], work.turn[2])
    finish_group(plan, block, step.group, partials_of(work, step.group), step.partial + 1, tiles)
    if needs_input_sums(plan):
        columns = group_columns(block, step.group)
        input_coefficients(columns, count, plan.folded)
        if not plan.folded:
            negated_coefficients(columns, count)


def x_term(work: ResidentWork, step: Step, at: int) -> None:
    """slope*x + offset of a chunk, or x - hi where the mean is not folded."""
    x = step_part(work.x_slots, at, step)
    term = step_part(work.terms, at, step)
    columns = columns_of(work, step)
    if work.plan.folded:
        input_term(term, x, columns, True)
    else:
        center(term, x, columns)


def combine(work: ResidentWork, step: Step, at: int) -> None:
    """dx of a chunk in the slot of dy; where the mean is not folded, (x - hi)*ratio - dy' in the term's tile."""
    dx = step_part(work.dy_slots, at, step)
    columns = columns_of(work, step)
    if not work.plan.training:
        nisa.activation(dst=dx, op=nl.copy, data=dx, scale=column(columns, SCALE))
        return
    term = step_part(work.terms, at, step)
    if work.plan.folded:
        scale = column(columns, SCALE)
        nisa.scalar_tensor_tensor(dst=dx, data=dx, op0=nl.multiply, operand0=scale, op1=nl.subtract, operand1=term)
    else:
        ratio = column(columns, RATIO)
        nisa.scalar_tensor_tensor(dst=term, data=term, op0=nl.multiply, operand0=ratio, op1=nl.subtract, operand1=dx)


def store_chunk(tensors: BackwardTensors, work: ResidentWork, step: Step, at: int) -> None:
    """Store dx of a chunk; where the mean is not folded it is -scale*term - offset, by Scalar and Vector in turns."""
    dx = step_part(work.dy_slots, at, step)
    if work.plan.training and not work.plan.folded:
        term = step_part(work.terms, at, step)
        columns = columns_of(work, step)
        scale = column(columns, MINUS_SCALE)
        offset = column(columns, MINUS_OFFSET)
        if at % 2 == 0:
            nisa.activation(dst=dx, op=nl.copy, data=term, scale=scale, bias=offset)
        else:
            nisa.tensor_scalar(dst=dx, data=term, op0=nl.multiply, operand0=scale, op1=nl.add, operand1=offset)
    store_step(tensors.dx, dx, step)
