# SPDX-License-Identifier: Apache-2.0
"""Backward strategies ``resident`` and ``reread``: one group of channels at a time.

Statistics are per channel, so a group of channels can be taken whole. ``resident`` keeps its dy and x in a ring of
slots from the sums to dx: every element is read once and written once. Where a group is too large for that, ``reread``
loads its chunks again for phase 2.

    phase 1, per chunk: load dy, x (mask)      dy' = dy where the ReLU let it through
                        Vector  (x - hi)*dy'
                        Scalar and Vector, or Tensor  the two sums
    turn, per group:    sums over bands (transposes on Tensor) and cores; the coefficients of the group
    phase 2, per chunk: 16 bits   Scalar slope*x + offset, Vector scale*dy' plus that,
                                  or Tensor dy' + ratio*x, Scalar scale times that plus offset
                        float32   Scalar x - hi, Vector (x - hi)*ratio + dy', Scalar or Vector scale times that plus
                                  offset
                        store dx from the slot of dy

Loads of later groups fill the slots that stores have emptied. The engines run in program order, so phase 2 of a group,
and its turn, are interleaved with phase 1 of later ones, set by set: this file is that order.
"""

from dataclasses import dataclass

import nki.language as nl

from nki_bn.kernels.backward_tensors import BackwardTensors, needs_input_sums, needs_sums
from nki_bn.kernels.column_blocks import block_of, set_columns, store_block
from nki_bn.kernels.plan import ResidentPlan
from nki_bn.kernels.resident_geometry import Step, extent_of_core
from nki_bn.kernels.resident_layout import plan_steps
from nki_bn.kernels.resident_stages import (
    Filled,
    Job,
    ResidentWork,
    Visit,
    allocate_work,
    banks_of,
    column_step,
    column_steps,
    combine,
    combine_on_tensor,
    empty_bank,
    finish,
    in_first_block,
    load_chunk,
    load_columns,
    mask_chunk,
    multiply,
    on_tensor,
    partials_of,
    prepare,
    slice_of,
    store_job,
    store_residual,
    sum_gradient,
    sum_product,
)
from nki_bn.kernels.resident_turn import Turn, combines_by_tensor, turn_pace, turn_step, turn_steps, turns_rows
from nki_bn.kernels.sizing import ceil_div


@dataclass
class Progress(nl.NKIObject):
    """How far each stage has come.

    Of the steps that derive columns, of ``eps`` and of N = ``count``, ``derived`` are done, ``column_pace`` at a
    chance. ``loaded`` and ``stored`` count visits. The others are numbers of jobs: the next one whose product is to
    be added up, those whose coefficients are ``ready``, and the next one for each of the stages of dx. ``turn`` is
    the turn under way, which waits for ``hold`` chances, of which ``turned`` steps are done and ``pace`` are due at
    a time; at its end ``after`` jobs are ready. Of the banks of PSUM that Tensor has ``filled``, ``emptied`` have
    been read.
    """

    eps: float
    count: int
    filled: list[Filled]
    column_pace: int = 1
    derived: int = 0
    emptied: int = 0
    loaded: int = 0
    stored: int = 0
    summed: int = 0
    ready: int = 0
    prepared: int = 0
    combined: int = 0
    finished: int = 0
    turn: Turn | None = None
    turned: int = 0
    pace: int = 0
    hold: int = 0
    after: int = 0


def resident_gradients(
    tensors: BackwardTensors, flat: tuple[int, int, int], plan: ResidentPlan, eps: float, count: int
) -> None:
    """All gradients of this core's share; ``count`` is N."""
    extent = extent_of_core(flat, plan.split, nl.program_id(0), nl.num_programs(0))
    steps = plan_steps(plan, extent)
    visits = visits_of(steps, plan)
    work = allocate_work(extent, plan, visits, jobs_of(visits))
    done = Progress(eps, count, [])
    if len(visits) > 0:
        load_ahead(tensors, work, done, 0)
    load_columns(tensors, work)
    if plan.relu == "recompute" or not plan.training:
        end_columns(work, done)
    done.column_pace = ceil_div(column_steps(work), max(first_jobs(work.jobs) - 2, 1))
    for i in range(len(work.jobs)):
        begin_job(tensors, work, done, i)
        finish_job(tensors, work, done)
        end_sums(tensors, work, done, i - 1)
        if not work.jobs[i].sums:
            done.ready = i + 1
    end_sums(tensors, work, done, len(work.jobs) - 1)
    while done.turn != None and done.combined < done.ready:
        finish_job(tensors, work, done)
    end_turn(work, done)
    while done.finished < len(work.jobs):
        finish_job(tensors, work, done)
    if needs_sums(plan):
        for i in range(len(work.blocks)):
            store_block(tensors, plan, work.blocks[i])


def visits_of(steps: list[Step], plan: ResidentPlan) -> list[Visit]:
    """The visits in order: once for everything, or a group for its sums and then again for dx."""
    visits: list[Visit] = []
    first = 0
    for i in range(len(steps)):
        again = plan.strategy == "reread" and needs_input_sums(plan)
        visits.append(Visit(steps[i], True, plan.need_dx and not again))
        if again and steps[i].last:
            for j in range(first, i + 1):
                visits.append(Visit(steps[j], False, True))
            first = i + 1
    return visits


def jobs_of(visits: list[Visit]) -> list[Job]:
    """One job per set of every visit."""
    jobs: list[Job] = []
    for i in range(len(visits)):
        visit = visits[i]
        for j in range(visit.step.sets):
            last = j == visit.step.sets - 1
            jobs.append(Job(i, visit.step, j, visit.sums, visit.gradient, last))
    return jobs


def first_jobs(jobs: list[Job]) -> int:
    """Number of jobs of the first group, before whose turn all columns have to be there."""
    count = 0
    while count < len(jobs) and jobs[count].step.group == jobs[0].step.group:
        count += 1
    return count


def load_ahead(tensors: BackwardTensors, work: ResidentWork, done: Progress, at: int) -> None:
    """Load visits into fresh slots, or slots emptied at least one store earlier; visit ``at`` at any rate."""
    load_into_free(tensors, work, done, 1)
    while done.loaded <= at:
        if done.finished == done.ready and work.jobs[done.summed].visit < at:
            end_sums(tensors, work, done, done.summed)
        if done.finished == done.ready:
            assert done.turn != None or done.after > done.ready, "a group does not fit into the ring of slots"
            end_turn(work, done)
        finish_job(tensors, work, done)
        load_into_free(tensors, work, done, 0)


def load_into_free(tensors: BackwardTensors, work: ResidentWork, done: Progress, behind: int) -> None:
    """Load while a slot is free that was emptied ``behind`` stores ago."""
    slots = work.plan.slots
    while done.loaded < len(work.visits) and (done.loaded < slots or done.loaded - slots < done.stored - behind):
        load_chunk(tensors, work, work.visits[done.loaded].step, done.loaded)
        done.loaded += 1


def begin_job(tensors: BackwardTensors, work: ResidentWork, done: Progress, at: int) -> None:
    """The loads that are due, the mask, the product of dy' and x - hi, and the sum of dy'."""
    job = work.jobs[at]
    if done.turn == None:
        done.ready = max(done.ready, done.after)
    if job.number == 0:
        load_ahead(tensors, work, done, job.visit)
        if not in_first_block(work, job):
            end_columns(work, done)
        mask_chunk(work, job)
        if job.sums:
            store_residual(tensors, work, job)
    if not job.sums:
        end_sums(tensors, work, done, at - 1)
        end_turn(work, done)
    prepare_ahead(work, done)
    if job.sums:
        free_sums(work, done, job)
        if work.plan.tensor_sums:
            sum_gradient(work, at)
        multiply(work, at)
        if not work.plan.tensor_sums:
            sum_gradient(work, at)
        take_turn_steps(work, done)


def free_sums(work: ResidentWork, done: Progress, job: Job) -> None:
    """Have the turn under way read its sums if this job's group is to use the same accumulators."""
    if done.turn != None and done.turned == 0 and job.step.group > done.turn.group + 1:
        take_turn_step(work, done)


def end_sums(tensors: BackwardTensors, work: ResidentWork, done: Progress, at: int) -> None:
    """The sums of job ``at``, one job late, so that nothing waits for its product; at the end of a group its turn."""
    if at < done.summed or at >= len(work.jobs):
        return
    done.summed = at + 1
    job = work.jobs[at]
    if not job.sums:
        return
    if not job.gradient or not needs_input_sums(work.plan):
        done.ready = max(done.ready, at + 1)
    if needs_sums(work.plan):
        sum_product(work, at)
        if job.last and job.step.last:
            start_turn(tensors, work, done, at)


def prepare_ahead(work: ResidentWork, done: Progress) -> None:
    """What Scalar does for the combination of dx, one job ahead."""
    while done.prepared < done.ready and done.prepared <= done.combined + 1:
        prepare(work, done.prepared)
        done.prepared += 1


def finish_job(tensors: BackwardTensors, work: ResidentWork, done: Progress) -> None:
    """Combine the next job, if it is ready, and end the one behind it (or itself, where one stage does it all)."""
    behind = stages_behind(work.plan)
    if done.combined < done.ready:
        prepare_ahead(work, done)
        if work.jobs[done.combined].gradient:
            combine_job(work, done, done.combined)
            take_turn_steps(work, done)
        done.combined += 1
        if done.combined - behind <= done.finished:
            return
    if done.finished < done.combined:
        end_job(tensors, work, done, done.finished)
        done.finished += 1


def combine_job(work: ResidentWork, done: Progress, at: int) -> None:
    """dx, or what its last stage makes dx of."""
    if on_tensor(work, at):
        ring = len(work.tensor.combinations)
        while done.emptied < len(done.filled) and len(done.filled) - done.emptied + banks_of(work, at) > ring:
            empty_bank(done.filled[done.emptied])
            done.emptied += 1
        combine_on_tensor(work, done.filled, at)
    else:
        combine(work, at)


def end_job(tensors: BackwardTensors, work: ResidentWork, done: Progress, at: int) -> None:
    """The last stage of dx, and the store after the last set of a chunk."""
    job = work.jobs[at]
    while done.emptied < len(done.filled) and done.filled[done.emptied].job <= at:
        empty_bank(done.filled[done.emptied])
        done.emptied += 1
    if job.gradient and not on_tensor(work, at):
        finish(work, at)
    if job.gradient:
        store_job(tensors, work, at)
    if job.last:
        done.stored = job.visit + 1


def stages_behind(plan: ResidentPlan) -> int:
    """How many jobs the last stage of dx is behind the combination."""
    if not needs_input_sums(plan):
        return 0
    if plan.folded and not combines_by_tensor(plan):
        return 0
    return 1


def take_column_step(work: ResidentWork, done: Progress) -> None:
    """The next step that derives columns: they wait for each other, so they are issued between other work."""
    column_step(work, done.eps, done.count, done.derived)
    done.derived += 1


def end_columns(work: ResidentWork, done: Progress) -> None:
    """All that is left of the columns."""
    while done.derived < column_steps(work):
        take_column_step(work, done)


def start_turn(tensors: BackwardTensors, work: ResidentWork, done: Progress, at: int) -> None:
    """Begin the turn of the group whose last sums are those of job ``at``; what the one before left comes first."""
    end_columns(work, done)
    end_turn(work, done)
    step = work.jobs[at].step
    block = block_of(work.blocks, step.group_first)
    partials = None
    if not work.plan.tensor_sums:
        chunks = step.partial + 1
        if step.group == 0:
            chunks = work.partials[0].shape[1] // (2 * work.plan.group_sets)
        partials = partials_of(work, step, block.lanes)[:, :, 0 : step.group_sets, 0:chunks]
    columns = set_columns(block, step.group_first, step.group_sets)
    done.turn = Turn(block, step.group, step.group_sets, columns, partials, slice_of(work, step))
    done.turned = 0
    done.hold = 1
    done.after = at + 1
    later = 0
    while at + later + 1 < len(work.jobs) and work.jobs[at + later + 1].step.group == step.group + 1:
        later += 1
    # In a job of the next group there are two chances. With none left there is one in each whose dx is still to be
    # made; but where Tensor combines, Scalar waits for the coefficients, and one is enough.
    chances = 2 * later
    if later == 0 and not combines_by_tensor(work.plan):
        chances = done.ready - done.combined
        if work.plan.folded:
            done.hold = 0
    done.pace = turn_pace(work.plan, turns_rows(work.plan, block), chances)


def take_turn_steps(work: ResidentWork, done: Progress) -> None:
    """The steps of the turn that are due; before the first turn, one of those that derive columns."""
    if done.derived < column_steps(work):
        for _ in range(min(done.column_pace, column_steps(work) - done.derived)):
            take_column_step(work, done)
        return
    if done.hold > 0:
        done.hold -= 1
        return
    due = done.pace
    while due > 0:
        due -= 1
        if done.turn != None and done.turned < 2 and turns_rows(work.plan, done.turn.block):
            # The next step needs what Tensor makes in this one: let there be other work between them.
            due = 0
        take_turn_step(work, done)


def take_turn_step(work: ResidentWork, done: Progress) -> None:
    """The next step of the turn under way, if there is one."""
    if done.turn != None:
        turn_step(work.plan, done.turn, work.turn, work.tensor, done.turned)
        done.turned += 1
        if done.turned == turn_steps(work.plan):
            done.turn = None


def end_turn(work: ResidentWork, done: Progress) -> None:
    """All that is left of the turn under way."""
    while done.turn != None:
        take_turn_step(work, done)
    done.ready = max(done.ready, done.after)
