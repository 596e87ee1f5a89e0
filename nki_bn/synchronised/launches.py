# SPDX-License-Identifier: Apache-2.0
"""The launches of a synchronised step that is one launch per replica and direction, and how they are planned.

All replicas have to meet in the same collectives, group of channels by group of channels. Equal shards take the plan
that the planner likes best; unequal ones the fastest with which all of them exchange the same tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from nki_bn import execute
from nki_bn.execute import BackwardInputs, ForwardInputs
from nki_bn.hardware import load_target
from nki_bn.kernels.plan import (
    Buffer,
    ForwardPlan,
    ResidentForwardPlan,
    TransposedForwardPlan,
    TransposedPlan,
    total_bytes,
)
from nki_bn.kernels.resident_fwd_plan import forward_steps
from nki_bn.kernels.resident_geometry import extent_of_core
from nki_bn.kernels.sizing import ceil_div
from nki_bn.planner import candidates, exchanging_candidates
from nki_bn.predict import Candidate, Plan
from nki_bn.problem import BackwardProblem, ForwardProblem, Problem
from nki_bn.simulator import Launch, RunOptions, Shaped, run
from nki_bn.simulator.timing import model
from nki_bn.simulator.trace import Trace

# Bytes of a triple (n, mean, M2) in float32, and of the scratch of an exchange of one group.
_TRIPLE, _LEAST = 12, 16
# Numbers of groups that may exchange together, and how much slower than the best a strategy may be to be modelled.
_TOGETHER = (1, 2, 4, 8, 16, 32)
_NEAR = 1.25

# For each core the shapes of the tiles that are exchanged, in order.
Meetings = tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True)
class Exchange:
    """Replicas and how they exchange moments: values per channel of each, and "two_round" or "one_round"."""

    counts: tuple[int, ...]
    mode: str

    @property
    def triples(self) -> int:
        """Moments that a gather brings for each channel."""
        return len(self.counts) if self.mode == "one_round" else 0

    def of(self, rank: int) -> Any:
        """What the kernels are told on replica ``rank``."""
        # Imported here, as kernels are everywhere, so that the doctor can say which nki is in use.
        from nki.collectives import ReplicaGroup

        from nki_bn.kernels.replicas import Replicas

        size = len(self.counts)
        group = ReplicaGroup([list(range(size))])
        return Replicas(group, size, self.counts[rank], sum(self.counts), self.mode)


def forward_plans(problems: Sequence[ForwardProblem], exchange: Exchange) -> list[Plan]:
    """A plan for each replica, in their order; any for one that has no values.

    Raises:
        ValueError: shards are so unequal that no plans exchange the same tiles.
    """
    triples = exchange.triples

    def offered(problem: ForwardProblem) -> list[Candidate]:
        budget = load_target(problem.target).sbuf_partition_bytes - _LEAST - _TRIPLE * triples
        return _fitting(problem, exchanging_candidates(problem, budget), triples)

    return _alike(problems, exchange, offered)


def backward_plans(problems: Sequence[BackwardProblem], exchange: Exchange) -> list[Plan]:
    """As :func:`forward_plans`."""

    def offered(problem: BackwardProblem) -> list[Candidate]:
        return _fitting(problem, candidates(problem), 0)

    return _alike(problems, exchange, offered)


def _alike(problems: Sequence[Any], exchange: Exchange, offered: Callable[[Any], list[Candidate]]) -> list[Plan]:
    """For each problem the plan of the best choice that all can make."""
    filled = {problem for problem in problems if problem.count}
    if len(filled) == 1:
        (only,) = filled
        return [_fastest(only, offered(only), exchange)] * len(problems)
    choices = {problem: _by_meetings(problem, exchange, offered(problem)) for problem in filled}
    common = set.intersection(*(set(found) for found in choices.values()))
    if not common:
        shapes = ", ".join(str(problem.shape) for problem in problems)
        raise ValueError(f"shards have shapes {shapes}, for which no plans exchange alike; accepted: more equal ones")
    slowest = {key: max(found[key].prediction.ns for found in choices.values()) for key in common}
    best = min(common, key=lambda key: (slowest[key], key))
    plans = {problem: found[best].plan for problem, found in choices.items()}
    anyone = next(iter(plans.values()))
    return [plans.get(problem, anyone) for problem in problems]


def _by_meetings(problem: Problem, exchange: Exchange, found: list[Candidate]) -> dict[Meetings, Candidate]:
    """The fastest candidate for every sequence of tiles that it exchanges."""
    best: dict[Meetings, Candidate] = {}
    for candidate in sorted(found, key=lambda one: one.prediction.ns):
        best.setdefault(meetings(problem, candidate.plan, exchange.mode, len(exchange.counts)), candidate)
    return best


def _fitting(problem: Problem, found: Sequence[Candidate], triples: int) -> list[Candidate]:
    """Candidates with what their exchange takes, where that fits."""
    capacity = load_target(problem.target).sbuf_partition_bytes
    exchanging = [replace(one, plan=_exchanging(one.plan, triples, 1)) for one in found]
    return [one for one in exchanging if one.plan.sbuf_bytes <= capacity]


def _exchanging(plan: Any, triples: int, together: int) -> Any:
    """A plan with what its exchange takes: so many ``triples`` for each group; ``resident`` groups ``together``."""
    buffers = [buffer for buffer in plan.buffers if buffer.name not in ("scratch", "gathered")]
    if isinstance(plan, TransposedPlan | TransposedForwardPlan):
        together = plan.group_blocks
        buffers.append(Buffer("scratch", 1, 4 * together, "float32"))
    if isinstance(plan, ResidentForwardPlan):
        buffers = [buffer for buffer in buffers if buffer.name != "merged"]
        buffers += [Buffer("merged", 1, 2 * together, "float32"), Buffer("scratch", 1, 4 * together, "float32")]
    if triples:
        buffers.append(Buffer("gathered", 1, 3 * triples * together, "float32"))
    return replace(plan, buffers=tuple(buffers), sbuf_bytes=total_bytes(buffers))


def _fastest(problem: Problem, found: Sequence[Candidate], exchange: Exchange) -> Plan:
    """The plan that is modelled as fastest with its collectives, of the best of each strategy.

    Strategies that take more than ``_NEAR`` times as long as the best without them are left out.
    """
    near = [one for one in found if one.prediction.ns <= _NEAR * found[0].prediction.ns]
    best = {one.plan.strategy: one.plan for one in reversed(near)}
    plans = [plan for one in best.values() for plan in _groupings(problem, one, exchange)]

    def modelled(plan: Plan) -> float:
        return model(dry_trace(problem, plan, exchange.mode, len(exchange.counts)), problem.target).total

    return plans[0] if len(plans) == 1 else min(plans, key=modelled)


def _groupings(problem: Problem, plan: Plan, exchange: Exchange) -> list[Plan]:
    """A plan, and where groups can exchange together those with more of them at once, of those that fit."""
    if not isinstance(plan, ResidentForwardPlan):
        return [plan]
    extent = extent_of_core(plan.shape, plan.split, 0, plan.cores)
    groups = ceil_div(extent.channels, plan.group_channels)
    at_once = groups if plan.reread else plan.slots // ceil_div(len(forward_steps(plan, extent)), groups)
    capacity = load_target(problem.target).sbuf_partition_bytes
    plans = [_exchanging(plan, exchange.triples, number) for number in _TOGETHER if number <= max(at_once, 1)]
    return [one for one in plans if one.sbuf_bytes <= capacity]


@lru_cache(256)
def meetings(problem: Problem, plan: Plan, mode: str, replicas: int) -> Meetings:
    """What a replica with this problem and plan brings to collectives."""
    trace = dry_trace(problem, plan, mode, replicas)
    return tuple(
        tuple(record.reads[0].shape for record in trace if record.core == core and record.engine == "collective")
        for core in range(problem.lnc)
    )


def dry_trace(problem: Problem, plan: Plan, mode: str, replicas: int) -> Trace:
    """The trace of one replica, of so many that are alike, from shapes alone."""
    exchange = Exchange((problem.count,) * replicas, mode).of(0)
    elements = Shaped(problem.layout, problem.dtype)
    column, row = Shaped((problem.channels, 1), "float32"), Shaped((problem.channels,), "float32")
    residual = elements if problem.residual else None
    if isinstance(problem, BackwardProblem):
        mask = Shaped(problem.layout, "uint8") if problem.relu == "mask" else None
        made: Any = BackwardInputs(elements, elements, row, row, column, column, 1e-5, mask, residual)  # type: ignore[arg-type]
    else:
        made = ForwardInputs(elements, column, column, row, row, residual, 0.1, 1e-5)  # type: ignore[arg-type]
    launch = launch_of(made, problem, plan, exchange)
    options = RunOptions(target=problem.target, dry=True, replicas=replicas)
    return run(launch.kernel, launch.args, launch.kwargs, problem.lnc, options).trace


def launch_of(inputs: Any, problem: Any, plan: Any, replicas: Any) -> Launch:
    """The launch of a replica that has values."""
    call = execute.backward_call if isinstance(problem, BackwardProblem) else execute.forward_call
    kernel, arguments = call(inputs, problem, plan)
    return Launch(kernel, arguments, {"replicas": replicas})


def empty_launch(inputs: Any, problem: Problem, plan: Any, tiles: Meetings, replicas: Any) -> Launch:
    """The launch of a replica that has none; ``plan`` is that of another one, which exchanges these ``tiles``."""
    from nki_bn.kernels.empty_shard import empty_backward, empty_forward

    if isinstance(problem, BackwardProblem):
        return Launch(empty_backward, (inputs.gamma, tiles, replicas))
    assert isinstance(plan, ForwardPlan | ResidentForwardPlan | TransposedForwardPlan), "a forward has one of these"
    rounds, each = (2, 1) if replicas.mode == "two_round" else (1, 3)
    groups = tuple(tuple((shape[0], shape[1] // each) for shape in core[::rounds]) for core in tiles)
    running = inputs.running_mean, inputs.running_var
    divided = plan.split == "channel"
    return Launch(empty_forward, (*running, inputs.momentum, problem.channels, groups, divided, replicas))
