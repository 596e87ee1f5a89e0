# SPDX-License-Identifier: Apache-2.0
"""The stages of a chunk in the backward strategies ``resident`` and ``reread``; resident_bwd.py has their order."""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_bn.kernels.backward_phases import center
from nki_bn.kernels.backward_tensors import BackwardTensors, needs_input_sums, needs_products, needs_sums
from nki_bn.kernels.column_blocks import BLOCK_STEPS, Block, block_of, block_step, load_block, set_columns
from nki_bn.kernels.columns import HI, OFFSET, RATIO, SCALE, SLOPE, column, column_tile, share_columns, split_mean
from nki_bn.kernels.elementwise import passed, pre_activation
from nki_bn.kernels.plan import ResidentPlan, allocate
from nki_bn.kernels.resident_geometry import Extent, Step, load_step, set_part, step_part, store_parts, store_step
from nki_bn.kernels.resident_turn import TurnTiles, allocate_turn, combines_by_tensor
from nki_bn.kernels.sizing import ceil_div
from nki_bn.kernels.sums import add_columns
from nki_bn.kernels.tensor_work import TensorWork, accumulate, allocate_tensor_work, combine_slice, make_diagonals
from nki_bn.kernels.turned_columns import take_others, turn_columns, turned_tile

# Groups at the end whose dx is made after all products: turns take about one group.
DRAINED_GROUPS = 2
# Groups at the beginning whose products are formed before all dx.
LEADING_GROUPS = 2


@dataclass(frozen=True)
class Visit(nl.NKIObject):
    """A chunk that comes into a slot: for its sums, for its dx, or for both."""

    step: Step
    sums: bool
    gradient: bool


@dataclass(frozen=True)
class Job(nl.NKIObject):
    """Set ``number`` of visit ``visit``, the ``last`` of it or not."""

    visit: int
    step: Step
    number: int
    sums: bool
    gradient: bool
    last: bool


@dataclass(frozen=True)
class Filled(nl.NKIObject):
    """Columns of dx of a job whose dy' + ratio*x is in a bank of PSUM; ``columns`` are those of its set."""

    job: int
    dx: nl.NkiTensor
    combined: nl.NkiTensor
    columns: nl.NkiTensor


@dataclass(frozen=True)
class ResidentWork(nl.NKIObject):
    """What a core works with: visits and jobs, the ring of slots, temporaries, and the columns of all sets.

    ``turned``: the loaded columns of the first block, if they come as rows.
    """

    plan: ResidentPlan
    visits: list[Visit]
    jobs: list[Job]
    dy_slots: list[nl.NkiTensor]
    x_slots: list[nl.NkiTensor]
    mask_slots: list[nl.NkiTensor]
    residual_slots: list[nl.NkiTensor]
    values: list[nl.NkiTensor]
    products: list[nl.NkiTensor]
    terms: list[nl.NkiTensor]
    copies: list[nl.NkiTensor]
    partials: list[nl.NkiTensor]
    turn: TurnTiles
    tensor: TensorWork
    blocks: list[Block]
    turned: nl.NkiTensor | None


def allocate_work(extent: Extent, plan: ResidentPlan, visits: list[Visit], jobs: list[Job]) -> ResidentWork:
    """The tiles of the plan's list; partial sums that no chunk makes count as 0."""
    lanes = nl.tile_size.pmax
    partials = allocate(plan.buffers, "partials", lanes)
    for i in range(len(partials)):
        nisa.memset(dst=partials[i], value=0.0)
    blocks: list[Block] = []
    whole = extent.channels // plan.set_channels
    if whole > 0:
        add_block(blocks, extent, plan, 0, whole, plan.set_channels)
    if extent.channels % plan.set_channels > 0:
        add_block(blocks, extent, plan, whole, 1, extent.channels % plan.set_channels)
    return ResidentWork(
        plan,
        visits,
        jobs,
        allocate(plan.buffers, "dy", lanes),
        allocate(plan.buffers, "x", lanes),
        allocate(plan.buffers, "mask", lanes),
        allocate(plan.buffers, "residual", lanes),
        allocate(plan.buffers, "values", lanes),
        allocate(plan.buffers, "products", lanes),
        allocate(plan.buffers, "terms", lanes),
        allocate(plan.buffers, "copies", lanes),
        partials,
        allocate_turn(plan),
        allocate_tensor_work(plan, combines_by_tensor(plan)),
        blocks,
        turned_tile(blocks, plan.relu),
    )


def add_block(blocks: list[Block], extent: Extent, plan: ResidentPlan, first: int, sets: int, channels: int) -> None:
    """Append the block of ``sets`` sets from number ``first`` on."""
    bands = plan.lane_bands
    if channels < plan.set_channels:
        bands = plan.last_lane_bands
    lanes = bands * channels
    prefix = ""
    if len(blocks) > 0:
        prefix = "last "
    tile = allocate(plan.buffers, prefix + "columns", nl.tile_size.pmax)[0]
    flag = allocate(plan.buffers, prefix + "flag", nl.tile_size.pmax)[0][0:lanes, 0:sets]
    channel = extent.channel + first * plan.set_channels
    blocks.append(Block(first, sets, channel, channels, lanes, column_tile(tile, lanes, sets), flag))


def load_columns(tensors: BackwardTensors, work: ResidentWork) -> None:
    """Load the columns of all sets, and split the means that the first groups need."""
    for i in range(len(work.blocks)):
        if i == 0 and work.turned != None:
            rows = allocate(work.plan.buffers, "rows", nl.tile_size.pmax)[0]
            turn_columns(tensors, work.blocks[0], rows, work.turned)
        else:
            load_block(tensors, work.plan, work.blocks[i])
    if len(work.blocks) > 0:
        split_mean(work.blocks[0].columns)


def in_first_block(work: ResidentWork, job: Job) -> bool:
    """Whether the means of a job are split from the start."""
    return job.step.first_set < work.blocks[0].first + work.blocks[0].sets


def column_steps(work: ResidentWork) -> int:
    """Number of steps that derive from the columns of all sets what does not depend on the sums."""
    return len(work.blocks) * (BLOCK_STEPS + 1)


def column_step(work: ResidentWork, eps: float, count: int, number: int) -> None:
    """One of these steps."""
    block = work.blocks[number // (BLOCK_STEPS + 1)]
    at = number % (BLOCK_STEPS + 1)
    if number == 0 and work.turned != None:
        take_others(block, work.turned)
    if at == 0 and number > 0:
        split_mean(block.columns)
    if at < BLOCK_STEPS:
        block_step(work.plan, block, eps, at)
    elif needs_input_sums(work.plan):
        share_columns(block.columns, count)


def columns_of(work: ResidentWork, job: Job) -> nl.NkiTensor:
    """The columns of a job's set, on the lanes of its chunk."""
    number = job.step.first_set + job.number
    return set_columns(block_of(work.blocks, number), number)[0 : job.step.unit.lanes(), :, :]


def job_part(tiles: list[nl.NkiTensor], job: Job) -> nl.NkiTensor:
    """A job's part of a ring of slots."""
    return set_part(step_part(tiles, job.visit, job.step), job.step, job.number)


def temporary(tiles: list[nl.NkiTensor], at: int, job: Job) -> nl.NkiTensor:
    """Scratch of job number ``at``, as wide as its set."""
    return tiles[at % len(tiles)][0 : job.step.unit.lanes(), 0 : job.step.tile.width()]


def set_in_group(job: Job) -> int:
    """The number of a job's set in its group."""
    return job.step.first_set + job.number - job.step.group_first


def partials_of(work: ResidentWork, step: Step, lanes: int) -> nl.NkiTensor:
    """The partial sums of a group, by turns of two groups: (lanes, 2, sets, chunks of a set)."""
    tile = work.partials[step.group % 2]
    sets = work.plan.group_sets
    return tile[0:lanes, :].reshape((lanes, 2, sets, tile.shape[1] // (2 * sets)))


def slice_of(work: ResidentWork, step: Step) -> int:
    """Columns of the partial sums of Tensor that are in use: no chunk's slices are wider than the first chunk."""
    return min(work.plan.slice, step.widest)


def load_chunk(tensors: BackwardTensors, work: ResidentWork, step: Step, at: int) -> None:
    """Load dy, and x, mask and residual where they are used, into slot ``at``."""
    plan = work.plan
    load_step(step_part(work.dy_slots, at, step), tensors.dy, step)
    if needs_products(plan) or plan.relu == "recompute":
        load_step(step_part(work.x_slots, at, step), tensors.x, step)
    if plan.relu == "mask":
        load_step(step_part(work.mask_slots, at, step), tensors.mask, step)
    if plan.residual:
        load_step(step_part(work.residual_slots, at, step), tensors.residual, step)


def mask_chunk(work: ResidentWork, first: Job) -> None:
    """dy' = dy where the ReLU let the value through, else 0, in a chunk whose first job this is."""
    plan = work.plan
    if plan.relu == "none":
        return
    step = first.step
    dy = step_part(work.dy_slots, first.visit, step)
    mask = step_part(work.mask_slots, first.visit, step)
    if plan.relu == "recompute":
        for i in range(step.sets):
            job = Job(first.visit, step, i, first.sums, first.gradient, i == step.sets - 1)
            value = temporary(work.values, i, job)
            residual = None
            if plan.residual:
                residual = job_part(work.residual_slots, job)
            pre_activation(value, job_part(work.x_slots, job), residual, columns_of(work, job))
            passed(job_part(work.mask_slots, job), value)
    nisa.select_reduce(dst=dy, predicate=mask, on_true=dy, on_false=0.0)


def store_residual(tensors: BackwardTensors, work: ResidentWork, job: Job) -> None:
    """The gradient of the residual, which is dy', of a chunk."""
    if work.plan.need_dresidual:
        store_step(tensors.dresidual, step_part(work.dy_slots, job.visit, job.step), job.step)


def multiply(work: ResidentWork, at: int) -> None:
    """The product of dy' and x - hi, whose sum is needed."""
    if not needs_products(work.plan):
        return
    job = work.jobs[at]
    nisa.scalar_tensor_tensor(
        dst=temporary(work.products, at, job),
        data=job_part(work.x_slots, job),
        op0=nl.subtract,
        operand0=column(columns_of(work, job), HI),
        op1=nl.multiply,
        operand1=job_part(work.dy_slots, job),
    )


def sum_gradient(work: ResidentWork, at: int) -> None:
    """The partial sum of dy': by Tensor; or by Vector for as many of eight jobs as the plan says, else by Scalar."""
    plan = work.plan
    if not needs_sums(plan):
        return
    job = work.jobs[at]
    dy = job_part(work.dy_slots, job)
    if plan.tensor_sums:
        add_on_tensor(work, job, 0, dy)
        return
    if may_leave_partials(plan) and job.step.group > 1 and job.step.partial == 0 and set_in_group(job) == 0:
        # The tile is another group's, and units of fewer lanes than the set leave the partials of the others alone.
        nisa.memset(dst=work.partials[job.step.group % 2], value=0.0)
    if vector_adds(plan, job.step.group, at) or at >= len(work.jobs) - helped_jobs(len(work.jobs)):
        add_columns(partial_of(work, job, 0), dy)
    else:
        sum_by_scalar(temporary(work.copies, at, job), dy, partial_of(work, job, 0))


def may_leave_partials(plan: ResidentPlan) -> bool:
    """Whether a group may leave partials alone that another one has made in the same place."""
    return plan.ragged or (plan.short_end and plan.group_sets > 1)


def vector_adds(plan: ResidentPlan, group: int, at: int) -> bool:
    """Whether Vector adds up dy of job ``at``, of group number ``group``.

    Where Vector makes x-terms it does so in the first groups only, which have no phase 2 beside their phase 1.
    """
    if plan.term_eighths > 0 and group >= LEADING_GROUPS:
        return False
    return at * plan.eighths % 8 >= 8 - plan.eighths


def vector_terms(plan: ResidentPlan, later: int, at: int) -> bool:
    """Whether Vector makes the x-term of job ``at``, after whose group ``later`` others come.

    It makes fewer in the last groups, which have no phase 1 beside their phase 2; but only there beside Tensor.
    """
    eighths = plan.term_eighths
    if plan.tensor_sums:
        if later >= DRAINED_GROUPS:
            eighths = 0
    elif later < DRAINED_GROUPS:
        eighths = max(eighths - 4, 0)
    return plan.folded and at * eighths % 8 < eighths


def helped_jobs(jobs: int) -> int:
    """Jobs at the end whose dy Vector adds up at any rate: the last turn waits for Scalar, which has more to do."""
    return min(jobs // 12, 2)


def vector_ends(at: int, jobs: int) -> bool:
    """Whether Vector adds up the product of job ``at``: the last one, where it helps with no dy."""
    return at == jobs - 1 and helped_jobs(jobs) == 0


def sum_product(work: ResidentWork, at: int) -> None:
    """The partial sum of the product, by Tensor or by Scalar."""
    if not needs_products(work.plan):
        return
    job = work.jobs[at]
    product = temporary(work.products, at, job)
    if work.plan.tensor_sums:
        add_on_tensor(work, job, 1, product)
    elif vector_ends(at, len(work.jobs)):
        add_columns(partial_of(work, job, 1), product)
    else:
        sum_by_scalar(product, product, partial_of(work, job, 1))


def add_on_tensor(work: ResidentWork, job: Job, kind: int, data: nl.NkiTensor) -> None:
    """Add dy' (kind 0) or the product (kind 1) of a job to Tensor's partial sums."""
    step = job.step
    accumulate(work.tensor, step.group, set_in_group(job), kind, data, slice_of(work, step), step.partial == 0)


def partial_of(work: ResidentWork, job: Job, kind: int) -> nl.NkiTensor:
    """Where the partial sum of dy' (kind 0) or of the product (kind 1) of a job goes."""
    partials = partials_of(work, job.step, job.step.unit.lanes())
    return partials[:, kind, set_in_group(job), nl.ds(job.step.partial, 1)]


def sum_by_scalar(copy: nl.NkiTensor, data: nl.NkiTensor, partial: nl.NkiTensor) -> None:
    """The sum of the columns of data by Scalar, which copies them on the way."""
    nisa.activation(
        dst=copy,
        op=nl.copy,
        data=data,
        reduce_op=nl.add,
        reduce_res=partial,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )


def on_tensor(work: ResidentWork, at: int) -> bool:
    """Whether Tensor combines dx of a job: as many of eight as the plan says.

    But none of the last groups, when Vector has no products left to form.
    """
    group = work.jobs[at].step.group
    if not combines_by_tensor(work.plan) or group > work.jobs[-1].step.group - DRAINED_GROUPS:
        return False
    return at * work.plan.eighths % 8 < work.plan.eighths


def prepare(work: ResidentWork, at: int) -> None:
    """What the combination of a job takes beforehand: the diagonals of Tensor, or the x-term of dx.

    That is slope*x + offset, or x - hi where the mean is not folded. Scalar makes it, or Vector for as many of eight
    jobs as the plan says.
    """
    job = work.jobs[at]
    if not job.gradient or not needs_input_sums(work.plan):
        return
    columns = columns_of(work, job)
    if on_tensor(work, at):
        make_diagonals(work.tensor, columns, at)
        return
    x = job_part(work.x_slots, job)
    term = temporary(work.terms, at, job)
    if vector_terms(work.plan, work.jobs[-1].step.group - job.step.group, at):
        nisa.tensor_scalar(
            dst=term,
            data=x,
            op0=nl.multiply,
            operand0=column(columns, SLOPE),
            op1=nl.add,
            operand1=column(columns, OFFSET),
        )
    elif work.plan.folded:
        affine(term, x, SLOPE, columns)
    else:
        center(term, x, columns)


def affine(dst: nl.NkiTensor, data: nl.NkiTensor, factor: int, columns: nl.NkiTensor) -> None:
    """dst = data*factor + offset, on Scalar."""
    nisa.activation(dst=dst, op=nl.copy, data=data, scale=column(columns, factor), bias=column(columns, OFFSET))


def combine(work: ResidentWork, at: int) -> None:
    """dx of a job in the slot of dy; where the mean is not folded (x - hi)*ratio + dy' in the term's tile."""
    job = work.jobs[at]
    columns = columns_of(work, job)
    pieces = column_pieces(work, at)
    for i in range(len(pieces)):
        dx = job_part(work.dy_slots, job)[:, pieces[i]]
        term = temporary(work.terms, at, job)[:, pieces[i]]
        if not work.plan.training:
            nisa.activation(dst=dx, op=nl.copy, data=dx, scale=column(columns, SCALE))
        elif work.plan.folded:
            add_scaled(dx, dx, column(columns, SCALE), term)
        else:
            add_scaled(term, term, column(columns, RATIO), dx)


def add_scaled(dst: nl.NkiTensor, data: nl.NkiTensor, factor: nl.NkiTensor, other: nl.NkiTensor) -> None:
    """dst = data*factor + other."""
    nisa.scalar_tensor_tensor(dst=dst, data=data, op0=nl.multiply, operand0=factor, op1=nl.add, operand1=other)


def banks_of(work: ResidentWork, at: int) -> int:
    """Banks of PSUM that a job takes."""
    return ceil_div(work.jobs[at].step.tile.width(), nl.tile_size.psum_fmax)


def combine_on_tensor(work: ResidentWork, filled: list[Filled], at: int) -> None:
    """dy' + ratio*x of a job, a bank of PSUM at a time, noted in ``filled``."""
    job = work.jobs[at]
    dy = job_part(work.dy_slots, job)
    x = job_part(work.x_slots, job)
    banks = banks_of(work, at)
    width = ceil_div(dy.shape[1], banks)
    for i in range(banks):
        some = nl.ds(i * width, min(width, dy.shape[1] - i * width))
        combined = combine_slice(work.tensor, dy[:, some], x[:, some], at, len(filled))
        filled.append(Filled(at, dy[:, some], combined, columns_of(work, job)))


def empty_bank(filled: Filled) -> None:
    """dx = scale*(dy' + ratio*x) + offset, from a bank."""
    affine(filled.dx, filled.combined, SCALE, filled.columns)


def finish(work: ResidentWork, at: int) -> None:
    """Where the mean is not folded: dx = scale*term + offset, by Scalar and Vector in turns."""
    job = work.jobs[at]
    if work.plan.folded or not work.plan.training:
        return
    columns = columns_of(work, job)
    pieces = column_pieces(work, at)
    for i in range(len(pieces)):
        dx = job_part(work.dy_slots, job)[:, pieces[i]]
        term = temporary(work.terms, at, job)[:, pieces[i]]
        if (at + i) % 2 == 0:
            affine(dx, term, SCALE, columns)
        else:
            nisa.tensor_scalar(
                dst=dx,
                data=term,
                op0=nl.multiply,
                operand0=column(columns, SCALE),
                op1=nl.add,
                operand1=column(columns, OFFSET),
            )


def parts_of(work: ResidentWork, at: int) -> list[Step]:
    """What is stored after a job."""
    job = work.jobs[at]
    return store_parts(job.step, job.number, job.visit == len(work.visits) - 1)


def column_pieces(work: ResidentWork, at: int) -> list[slice]:
    """The columns of a job that are finished together: those of a part that is stored."""
    parts = parts_of(work, at)
    whole = work.jobs[at].step.tile.width()
    if len(parts) < 2:
        return [nl.ds(0, whole)]
    first = parts[0].tile.width()
    return [nl.ds(0, first), nl.ds(first, whole - first)]


def store_job(tensors: BackwardTensors, work: ResidentWork, at: int) -> None:
    """Store what of dx a job completes."""
    job = work.jobs[at]
    parts = parts_of(work, at)
    pieces = column_pieces(work, at)
    for i in range(len(parts)):
        if job.visit == len(work.visits) - 1:
            store_step(tensors.dx, job_part(work.dy_slots, job)[:, pieces[i]], parts[i])
        else:
            store_step(tensors.dx, step_part(work.dy_slots, job.visit, job.step), parts[i])
