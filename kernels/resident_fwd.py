# SPDX-License-Identifier: Apache-2.0
"""Forward strategies ``resident`` and ``reread``: one group of channels after the other, its chunks in a ring of slots.

    phase 1, per chunk: load x              Vector  bn_stats on pieces of at most 512 columns
    turn, per group:    mean and variance over bands and cores; scale and shift per channel (resident_moments.py)
    phase 2, per chunk: [reread: load x again] [load the residual]
                        float32   Vector (x - hi)*scale, Scalar + shift
                        16 bits   Vector x - hi in 16 bits, Scalar times scale, + shift
                        ReLU      as in two_read, so that a recomputed mask is the same
                        store y from the slot of x, and the mask

With ``resident`` x stays in its slot from the statistics to y: every element is read once and written once. Phase 2 of
a group is interleaved with phase 1 of the next one, chunk by chunk, and the turn's short instructions with bn_stats.
With given statistics there is phase 2 only.
"""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_bn.kernels.column_blocks import Block, block_of, set_columns
from nki_bn.kernels.columns import FACTOR, HI, MINUS_HI, SCALE, SHIFT, column
from nki_bn.kernels.elementwise import pre_activation, rectify
from nki_bn.kernels.forward_phases import ForwardTensors, writes_columns
from nki_bn.kernels.plan import ResidentForwardPlan, allocate
from nki_bn.kernels.resident_fwd_plan import forward_steps
from nki_bn.kernels.resident_geometry import Step, extent_of_core, load_step, step_part, store_parts, store_step
from nki_bn.kernels.resident_moments import (
    MINUS_HI_STEP,
    Turn,
    TurnTiles,
    blocks_of,
    ends_batch,
    is_narrow,
    load_parameters,
    moment_steps,
    start_given,
    start_turns,
    turn_step,
    turn_steps,
)
from nki_bn.kernels.running import load_running, store_statistics
from nki_bn.kernels.sizing import ceil_div

# Chunks that are loaded before the parameters.
FIRST_LOADS = 2
# Steps of the last turn between two chunks, when no statistics are left to be made.
STEPS_AT_THE_END = 2
# A chunk of at most so many columns has its mean subtracted by Scalar while the turn of the only group is under way.
AHEAD_COLUMNS = 1024
# What Scalar does to a chunk without a ReLU: half of the last pass over it, all of that, the first pass as well.
# (In bfloat16 GpSimd then does the first pass over all but one in ``scalar_turns`` chunks.)
HALF_A_PASS = 0
ONE_PASS = 1
BOTH_PASSES = 2


@dataclass(frozen=True)
class ForwardRing(nl.NKIObject):
    """What a core works with: the plan, its chunks, the slots and temporaries, the columns of all groups.

    ``again_slots`` are for x that is loaded a second time.
    """

    plan: ResidentForwardPlan
    steps: list[Step]
    x_slots: list[nl.NkiTensor]
    again_slots: list[nl.NkiTensor]
    residual_slots: list[nl.NkiTensor]
    mask_slots: list[nl.NkiTensor]
    stopped: list[nl.NkiTensor]
    values: list[nl.NkiTensor]
    pieces: list[nl.NkiTensor]
    turn: TurnTiles | None
    blocks: list[Block]
    eps: float


@dataclass
class Progress(nl.NKIObject):
    """How far each stage has come: the number of the next chunk to load, to add up, to load late, to form, to store.

    ``ready`` chunks have their coefficients. The turn of group ``turning`` (or -1) is at step ``turn``; it has
    ``turn_pieces`` results of bn_stats, and makes the chunks before ``turn_end`` ready. ``pieces`` results belong to
    the group that is being added up. In chunk ``centred`` the mean is subtracted already.
    """

    loaded: int = 0
    summed: int = 0
    late: int = 0
    ready: int = 0
    formed: int = 0
    stored: int = 0
    turning: int = -1
    turn: int = 0
    pieces: int = 0
    turn_pieces: int = 0
    turn_end: int = 0
    centred: int = -1


def normalise_groups(
    tensors: ForwardTensors, flat: tuple[int, int, int], plan: ResidentForwardPlan, momentum: float, eps: float
) -> None:
    """This core's share of the outputs."""
    ring = start_ring(tensors, flat, plan, eps)
    steps = ring.steps
    done = Progress()
    if plan.training:
        # A chunk for Vector to start with; the parameters would wait for all that is loaded before them.
        for _ in range(min(FIRST_LOADS, plan.slots, len(steps))):
            load_next(tensors, ring, done)
    start_columns(tensors, ring)
    if plan.training:
        for i in range(len(steps)):
            make_room(tensors, ring, done)
            add_chunk(tensors, ring, done)
            form_chunk(tensors, ring, done)
            if steps[i].last:
                start_turn(tensors, ring, done)
        while done.turning >= 0:
            form_chunk(tensors, ring, done)
            for _ in range(STEPS_AT_THE_END):
                advance_turn(tensors, ring, done)
    else:
        done.summed = len(steps)
        done.ready = len(steps)
    while plan.need_y and done.stored < len(steps):
        load_ahead(tensors, ring, done)
        form_chunk(tensors, ring, done)
    if plan.training and writes_columns(plan):
        for i in range(len(ring.blocks)):
            block = ring.blocks[i]
            store_statistics(tensors, block.columns, momentum, block.channel, block.channels, block.sets, True)


def start_ring(
    tensors: ForwardTensors, flat: tuple[int, int, int], plan: ResidentForwardPlan, eps: float
) -> ForwardRing:
    """The chunks of this core, and the tiles of the plan's list."""
    lanes = nl.tile_size.pmax
    extent = extent_of_core(flat, plan.split, nl.program_id(0), nl.num_programs(0))
    turn = None
    if plan.training and extent.channels > 0:
        turn = start_turns(extent, plan)
    ring = ForwardRing(
        plan,
        forward_steps(plan, extent),
        allocate(plan.buffers, "x", lanes),
        allocate(plan.buffers, "again", lanes),
        allocate(plan.buffers, "residual", lanes),
        allocate(plan.buffers, "mask", lanes),
        allocate(plan.buffers, "stopped", lanes),
        allocate(plan.buffers, "values", lanes),
        allocate(plan.buffers, "pieces", lanes),
        turn,
        blocks_of(extent, plan),
        eps,
    )
    return ring


def start_columns(tensors: ForwardTensors, ring: ForwardRing) -> None:
    """Load the parameters of all groups, and given statistics."""
    plan = ring.plan
    for i in range(len(ring.blocks)):
        block = ring.blocks[i]
        if plan.need_y:
            load_parameters(tensors, block)
        if not plan.training:
            start_given(tensors, plan, block, ring.eps)
        elif writes_columns(plan):
            load_running(tensors, block.columns, block.channel, block.channels, block.sets, True)


def columns_of(ring: ForwardRing, step: Step) -> nl.NkiTensor:
    """The columns of a chunk's group, on the chunk's lanes."""
    block = block_of(ring.blocks, step.group)
    return set_columns(block, step.group)[0 : step.unit.lanes(), :, :]


def load_ahead(tensors: ForwardTensors, ring: ForwardRing, done: Progress) -> None:
    """Load chunks into fresh slots and into slots that are free, by a store at least one store ago."""
    plan = ring.plan
    steps = ring.steps
    free = done.stored - 1
    if plan.reread or not plan.need_y:
        free = done.summed
    if not plan.reread or plan.training:
        while done.loaded < len(steps) and (done.loaded < plan.slots or done.loaded - plan.slots < free):
            load_next(tensors, ring, done)
    if plan.need_y:
        while done.late < done.summed and (
            done.late < plan.late_slots or done.late - plan.late_slots < done.stored - 1
        ):
            load_late(tensors, ring, steps[done.late], done.late)
            done.late += 1


def load_next(tensors: ForwardTensors, ring: ForwardRing, done: Progress) -> None:
    """Load the next chunk of phase 1."""
    step = ring.steps[done.loaded]
    load_step(step_part(ring.x_slots, done.loaded, step), tensors.x, step)
    done.loaded += 1


def load_late(tensors: ForwardTensors, ring: ForwardRing, step: Step, at: int) -> None:
    """Load what phase 2 of a chunk needs beside its slot."""
    if ring.plan.reread:
        load_step(step_part(ring.again_slots, at, step), tensors.x, step)
    if ring.plan.residual:
        load_step(step_part(ring.residual_slots, at, step), tensors.residual, step)


def make_room(tensors: ForwardTensors, ring: ForwardRing, done: Progress) -> None:
    """Load until the next chunk of phase 1 is there; work on phase 2 if it has to free a slot first."""
    load_ahead(tensors, ring, done)
    while done.loaded <= done.summed:
        assert done.stored < done.ready or done.turning >= 0, "a group does not fit into the ring of slots"
        while done.formed == done.ready and done.turning >= 0:
            advance_turn(tensors, ring, done)
        form_chunk(tensors, ring, done)
        load_ahead(tensors, ring, done)


def add_chunk(tensors: ForwardTensors, ring: ForwardRing, done: Progress) -> None:
    """bn_stats on pieces of a chunk of equal size, with a step of the turn after each."""
    step = ring.steps[done.summed]
    if step.partial == 0:
        done.pieces = 0
        if ring.plan.ragged:
            # Units of fewer lanes than the group leave the pieces of the others alone: these count as 0.
            nisa.memset(dst=ring.pieces[step.group % 2], value=0.0, engine=nisa.engine.gpsimd)
    x = step_part(ring.x_slots, done.summed, step)
    width = step.tile.width()
    pieces = ceil_div(width, nl.tile_size.bn_stats_fmax)
    columns = ceil_div(width, pieces)
    for i in range(pieces):
        start = i * columns
        end = min(start + columns, width)
        at = 6 * done.pieces
        moments = ring.pieces[step.group % 2][0 : step.unit.lanes(), at : at + 6]
        nisa.bn_stats(dst=moments, data=x[:, start:end])
        done.pieces += 1
        advance_turn(tensors, ring, done)
    done.summed += 1


def start_turn(tensors: ForwardTensors, ring: ForwardRing, done: Progress) -> None:
    """After the last chunk of a group: the first step of its turn."""
    while done.turning >= 0:
        advance_turn(tensors, ring, done)
    done.turning = ring.steps[done.summed - 1].group
    done.turn = 0
    done.turn_pieces = done.pieces
    done.turn_end = done.summed
    advance_turn(tensors, ring, done)


def advance_turn(tensors: ForwardTensors, ring: ForwardRing, done: Progress) -> None:
    """The next step of the turn under way, if there is one."""
    if done.turning < 0:
        return
    tiles = ring.turn
    assert tiles != None, "a turn without statistics of the batch"
    block = block_of(ring.blocks, done.turning)
    pieces = ring.pieces[done.turning % 2][0 : block.lanes, 0 : 6 * done.turn_pieces]
    turn_step(tensors, ring.plan, Turn(block, done.turning, pieces), tiles, ring.eps, done.turn)
    if done.turn >= moment_steps(ring.plan, block, tensors.replicas) + MINUS_HI_STEP:
        centre_ahead(ring, done)
    done.turn += 1
    if done.turn == turn_steps(ring.plan, block, done.turning, tiles, tensors.replicas):
        if ends_batch(block, done.turning, tiles):
            done.ready = done.turn_end
        done.turning = -1


def centre_ahead(ring: ForwardRing, done: Progress) -> None:
    """Scalar, which stands still during the turn of an only group, begins with its first chunk."""
    plan = ring.plan
    if plan.dtype != nl.bfloat16 or not is_narrow(plan) or plan.reread or done.summed < len(ring.steps):
        return
    step = ring.steps[0]
    if done.ready == 0 and done.centred < 0 and step.tile.width() <= AHEAD_COLUMNS:
        done.centred = 0
        subtract_beside(plan, y_part(ring, step, 0), columns_of(ring, step), 0)


def form_chunk(tensors: ForwardTensors, ring: ForwardRing, done: Progress) -> None:
    """Form y of the next chunk, if it is ready, and store the one before."""
    if not ring.plan.need_y:
        done.stored = done.ready
        return
    if done.formed < done.ready:
        load_ahead(tensors, ring, done)
        normalise_chunk(ring, done.formed, scalar_part(ring, done), done.formed == done.centred)
        done.formed += 1
        if done.formed - 1 <= done.stored:
            return
    if done.stored < done.formed:
        store_chunk(tensors, ring, done.stored)
        done.stored += 1


def y_part(ring: ForwardRing, step: Step, at: int) -> nl.NkiTensor:
    """Where x of a chunk is in phase 2, and y after it."""
    if ring.plan.reread:
        return step_part(ring.again_slots, at, step)
    return step_part(ring.x_slots, at, step)


def scalar_part(ring: ForwardRing, done: Progress) -> int:
    """How much of the work on the next chunk Scalar takes, see above: by what else Vector has to do."""
    if done.summed < len(ring.steps):
        if ring.plan.dtype == nl.bfloat16:
            return BOTH_PASSES
        return ONE_PASS + done.formed % 2
    if done.turning >= 0:
        return ONE_PASS
    return HALF_A_PASS


def parts_of(ring: ForwardRing, at: int) -> list[Step]:
    """The parts that a chunk is formed and stored in: two in the last one, since nothing can be done beside its end."""
    return store_parts(ring.steps[at], 0, at == len(ring.steps) - 1)


def normalise_chunk(ring: ForwardRing, at: int, by_scalar: int, centred: bool) -> None:
    """y of a chunk in the place of its x, and the mask.

    ``by_scalar`` is what Scalar does without a ReLU; ``centred``: the mean is subtracted already.
    """
    parts = parts_of(ring, at)
    start = 0
    for i in range(len(parts)):
        columns = nl.ds(start, parts[i].tile.width())
        if ring.plan.relu:
            rectify_part(ring, at, columns)
        else:
            if not centred:
                subtract_part(ring, at, columns, by_scalar)
            shift_part(ring, at, columns, by_scalar)
        start += parts[i].tile.width()


def rectify_part(ring: ForwardRing, at: int, part: nl.ds) -> None:
    """y through the ReLU, and the mask, in some columns of a chunk."""
    plan = ring.plan
    step = ring.steps[at]
    y = y_part(ring, step, at)[:, part]
    value = step_part(ring.values, at, step)[:, part]
    residual = None
    if plan.residual:
        residual = step_part(ring.residual_slots, at, step)[:, part]
    mask = None
    if plan.need_mask:
        mask = step_part(ring.mask_slots, at, step)[:, part]
    pre_activation(value, y, residual, columns_of(ring, step), mask)
    rectify(y, value, step_part(ring.stopped, at, step)[:, part])


def subtract_part(ring: ForwardRing, at: int, part: nl.ds, by_scalar: int) -> None:
    """The first pass over some columns of a chunk."""
    step = ring.steps[at]
    x = y_part(ring, step, at)[:, part]
    if is_narrow(ring.plan) and by_scalar == BOTH_PASSES:
        subtract_beside(ring.plan, x, columns_of(ring, step), at)
    else:
        subtract_mean(ring.plan, x, columns_of(ring, step))


def shift_part(ring: ForwardRing, at: int, part: nl.ds, by_scalar: int) -> None:
    """The second pass, and the residual, over some columns of a chunk."""
    plan = ring.plan
    step = ring.steps[at]
    y = y_part(ring, step, at)[:, part]
    columns = columns_of(ring, step)
    if plan.residual:
        value = step_part(ring.values, at, step)[:, part]
        add_shift(plan, value, y, columns, False)
        nisa.tensor_tensor(dst=y, data1=value, data2=step_part(ring.residual_slots, at, step)[:, part], op=nl.add)
        return
    shared = 0
    if is_narrow(plan) and by_scalar == HALF_A_PASS:
        shared = y.shape[1] // 2
    if shared > 0:
        add_shift(plan, y[:, 0:shared], y[:, 0:shared], columns, True)
    add_shift(plan, y[:, shared:], y[:, shared:], columns, False)


def subtract_mean(plan: ResidentForwardPlan, x: nl.NkiTensor, columns: nl.NkiTensor) -> None:
    """In place: x - hi in 16 bits, halved where float16 asks for it, or (x - hi)*scale in float32."""
    hi = column(columns, HI)
    if plan.dtype == nl.bfloat16:
        nisa.tensor_scalar(dst=x, data=x, op0=nl.subtract, operand0=hi)
        return
    factor = SCALE
    if is_narrow(plan):
        factor = FACTOR
    nisa.tensor_scalar(dst=x, data=x, op0=nl.subtract, operand0=hi, op1=nl.multiply, operand1=column(columns, factor))


def subtract_beside(plan: ResidentForwardPlan, x: nl.NkiTensor, columns: nl.NkiTensor, at: int) -> None:
    """What :func:`subtract_mean` does in 16 bits, to the same bits, by Scalar, or by Scalar and GpSimd in turns."""
    minus_hi = column(columns, MINUS_HI)
    if plan.dtype == nl.float16:
        nisa.activation(dst=x, op=nl.copy, data=x, scale=column(columns, FACTOR), bias=minus_hi)
    elif at % plan.scalar_turns == 0:
        nisa.activation(dst=x, op=nl.copy, data=x, bias=minus_hi)
    else:
        repeated = minus_hi.broadcast(1, x.shape[1])
        nisa.tensor_tensor(dst=x, data1=x, data2=repeated, op=nl.add, engine=nisa.engine.gpsimd)


def add_shift(
    plan: ResidentForwardPlan, dst: nl.NkiTensor, data: nl.NkiTensor, columns: nl.NkiTensor, on_vector: bool
) -> None:
    """dst = data [*scale] + shift: what :func:`subtract_mean` leaves to be done."""
    shift = column(columns, SHIFT)
    scale = column(columns, SCALE)
    if is_narrow(plan) and on_vector:
        nisa.tensor_scalar(dst=dst, data=data, op0=nl.multiply, operand0=scale, op1=nl.add, operand1=shift)
    elif is_narrow(plan):
        nisa.activation(dst=dst, op=nl.copy, data=data, scale=scale, bias=shift)
    elif on_vector:
        nisa.tensor_scalar(dst=dst, data=data, op0=nl.add, operand0=shift)
    else:
        nisa.activation(dst=dst, op=nl.copy, data=data, bias=shift)


def store_chunk(tensors: ForwardTensors, ring: ForwardRing, at: int) -> None:
    """Store y of a chunk, and the mask."""
    step = ring.steps[at]
    parts = parts_of(ring, at)
    start = 0
    for i in range(len(parts)):
        columns = nl.ds(start, parts[i].tile.width())
        store_step(tensors.y, y_part(ring, step, at)[:, columns], parts[i])
        if ring.plan.need_mask:
            store_step(tensors.mask, step_part(ring.mask_slots, at, step)[:, columns], parts[i])
        start += parts[i].tile.width()
