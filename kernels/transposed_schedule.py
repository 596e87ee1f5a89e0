# SPDX-License-Identifier: Apache-2.0
"""The order of work of the ``transposed`` strategy: a flat list of steps, made before anything is issued.

The data of one group of channels in one slot is a visit. The jobs of a visit, one per block of channels: "mask" puts
the ReLU's mask on dy, "first" adds up, "second" makes results and stores them; "turn" stands between the last "first"
and the first "second" of a group. A job runs in three stages, and each step starts one job, continues the one before
and finishes the one before that, so that engines that wait for each other within a job have work of others. A job that
needs another to be finished comes at least three steps later; "idle" steps keep that distance where no job does.
"""

from dataclasses import dataclass
from typing import Any

import nki.language as nl

from nki_bn.kernels.sizing import ceil_div

# Steps between the start of a job and the first that sees its results.
DEPTH = 3


@dataclass(frozen=True)
class Scope(nl.NKIObject):
    """What has to be done: blocks of the core and per group, chunks per group, which kinds of jobs there are.

    ``turns``: "second" needs the results of all "first" of its group. ``reload``: it reads the data again.
    """

    blocks: int
    group_blocks: int
    chunks: int
    slots: int
    masks: bool
    firsts: bool
    turns: bool
    seconds: bool
    reload: bool

    def groups(self) -> int:
        """Groups of the core."""
        return ceil_div(self.blocks, self.group_blocks)

    def visits(self) -> int:
        """Visits of the core."""
        if self.reload:
            return 2 * self.groups() * self.chunks
        return self.groups() * self.chunks


@dataclass(frozen=True)
class Step(nl.NKIObject):
    """A load of a visit, or the start of a job; ``block`` is one of the core, ``last`` that of its group.

    ``again``: the visit is the second one of its chunk.
    """

    kind: str
    visit: int
    group: int
    chunk: int
    block: int
    last: bool
    again: bool


def step_of(scope: Scope, kind: str, visit: int, block: int) -> Step:
    """The step of a kind in a visit, for block number ``block`` of the group."""
    group = visit // scope.chunks
    again = False
    if scope.reload:
        again = group % 2 == 1
        group = group // 2
    at = group * scope.group_blocks + block
    return Step(kind, visit, group, visit % scope.chunks, at, block == blocks_of(scope, group) - 1, again)


def works_alone(scope: Scope, step: Step) -> bool:
    """Whether jobs of this kind run without those of the other phase between them: engines then share otherwise."""
    if scope.reload or not scope.turns:
        return True
    if step.kind == "first":
        return step.group == 0
    return step.group == scope.groups() - 1


def odd_one(step: Step) -> bool:
    """Every second job of a kind, for work that two engines share."""
    return (step.chunk + step.block) % 2 == 1


def blocks_of(scope: Scope, group: int) -> int:
    """Blocks of a group."""
    return min(scope.group_blocks, scope.blocks - group * scope.group_blocks)


def steps_of(scope: Scope) -> list[Step]:
    """All steps of a core."""
    order: list[Step] = []
    if scope.reload:
        for group in range(scope.groups()):
            add_reloaded_group(order, scope, group)
    else:
        add_kept_groups(order, scope)
    return issued(order, scope)


def add_kept_groups(order: list[Step], scope: Scope) -> None:
    """Jobs over data that stays in its slot: "second" of a group among "first" of the next; masks one visit ahead."""
    visits = scope.visits()
    masked = 0
    ready = 0
    stored = 0
    for i in range(visits):
        while scope.seconds and stored < ready and i - stored >= scope.slots - 1:
            add_pair(order, scope, -1, stored)
            stored += 1
        while scope.masks and masked < visits and (masked <= i or (masked == i + 1 and masked - stored < scope.slots)):
            add_jobs(order, scope, "mask", masked)
            masked += 1
        second = -1
        if scope.seconds and stored < ready:
            second = stored
            stored += 1
        first = -1
        if scope.firsts:
            first = i
        add_pair(order, scope, first, second)
        if i % scope.chunks == scope.chunks - 1 and scope.firsts:
            order.append(step_of(scope, "turn", i, 0))
        if i % scope.chunks == scope.chunks - 1 or not scope.turns:
            ready = i + 1
    while scope.seconds and stored < visits:
        add_pair(order, scope, -1, stored)
        stored += 1


def add_reloaded_group(order: list[Step], scope: Scope, group: int) -> None:
    """Jobs over data that is read twice: the whole first phase of a group, then the second."""
    start = 2 * group * scope.chunks
    for i in range(2 * scope.chunks):
        visit = start + i
        if scope.masks:
            if i == 0:
                add_jobs(order, scope, "mask", visit)
            if i < 2 * scope.chunks - 1:
                add_jobs(order, scope, "mask", visit + 1)
        if i < scope.chunks:
            add_pair(order, scope, visit, -1)
        else:
            add_pair(order, scope, -1, visit)
        if i == scope.chunks - 1:
            order.append(step_of(scope, "turn", visit, 0))


def add_jobs(order: list[Step], scope: Scope, kind: str, visit: int) -> None:
    """The jobs of a kind in a visit."""
    count = blocks_of(scope, step_of(scope, kind, visit, 0).group)
    for block in range(count):
        order.append(step_of(scope, kind, visit, block))


def add_pair(order: list[Step], scope: Scope, first: int, second: int) -> None:
    """The jobs "first" of one visit and "second" of another in turns; -1 stands for none."""
    first_jobs: list[Step] = []
    second_jobs: list[Step] = []
    if first >= 0:
        add_jobs(first_jobs, scope, "first", first)
    if second >= 0:
        add_jobs(second_jobs, scope, "second", second)
    for i in range(max(len(first_jobs), len(second_jobs))):
        if i < len(first_jobs):
            order.append(first_jobs[i])
        if i < len(second_jobs):
            order.append(second_jobs[i])


def issued(order: list[Step], scope: Scope) -> list[Step]:
    """The order with loads and idle steps.

    A slot is loaded again at least one store after the one that emptied it: DMAs start in program order, so a load that
    waits for a store holds up those behind it.
    """
    visits = scope.visits()
    last_use = [-1] * visits
    for n in range(len(order)):
        last_use[order[n].visit] = n
    steps: list[Step] = []
    started = 0  # jobs and idle steps so far
    used = [-DEPTH] * visits  # when the last job of a visit started
    masked = [-DEPTH] * visits
    turned = [-DEPTH] * scope.groups()
    loaded = 0
    for n in range(len(order)):
        job = order[n]
        while loaded < visits and may_load(scope, last_use, loaded, job.visit, n):
            if loaded >= scope.slots:
                assert last_use[loaded - scope.slots] < n, "the work of a group does not fit into the ring of slots"
                started = add_idle(steps, started, used[loaded - scope.slots] + DEPTH)
            steps.append(step_of(scope, "load", loaded, 0))
            loaded += 1
        if job.kind == "first" or job.kind == "second":
            started = add_idle(steps, started, masked[job.visit] + DEPTH)
        if job.kind == "second" and scope.turns:
            started = add_idle(steps, started, turned[job.group] + DEPTH)
        if job.kind == "mask":
            masked[job.visit] = started
        if job.kind == "turn":
            turned[job.group] = started
        used[job.visit] = started
        steps.append(job)
        started += 1
    add_idle(steps, 0, DEPTH - 1)
    return steps


def may_load(scope: Scope, last_use: list[int], visit: int, wanted: int, now: int) -> bool:
    """Whether to load a visit before job number ``now``, which is about visit ``wanted``."""
    if visit < scope.slots or visit <= wanted:
        return True
    return scope.slots > 1 and last_use[visit - scope.slots + 1] < now


def add_idle(steps: list[Step], started: int, wanted: int) -> int:
    """Idle steps until ``wanted`` jobs and idle steps have started; returns how many have."""
    while started < wanted:
        steps.append(Step("idle", 0, 0, 0, 0, False, False))
        started += 1
    return started


def run_steps(work: Any, steps: list[Step]) -> None:
    """Issue all steps: ``work`` has the methods load, start, middle and finish; ``at`` numbers jobs and idle steps."""
    before = Step("idle", 0, 0, 0, 0, False, False)
    previous = before
    at = 0
    for i in range(len(steps)):
        step = steps[i]
        if step.kind == "load":
            work.load(step)
        else:
            work.start(step, at)
            work.middle(previous, at - 1)
            work.finish(before, at - 2)
            before = previous
            previous = step
            at += 1
