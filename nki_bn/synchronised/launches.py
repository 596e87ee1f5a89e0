# SPDX-License-Identifier: Apache-2.0
"""The launches of a synchronised step that is one launch per replica and direction, and how they are planned.

All replicas have to meet in the same collectives, group of channels by group of channels. Equal shards take the plan
that the planner likes best; unequal ones the fastest with which all of them exchange the same tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from typing import Any

from nki_bn import execute
from nki_bn.execute import BackwardInputs, ForwardInputs
from nki_bn.hardware import load_target
from nki_bn.kernels.plan import (
    Buffer,
    ForwardPlan,
    ResidentForwardPlan,
    ResidentPlan,
    TransposedForwardPlan,
    TransposedPlan,
    total_bytes,
)
from nki_bn.kernels.resident_fwd_plan import forward_steps
from nki_bn.kernels.resident_geometry import extent_of_core
from nki_bn.kernels.sizing import PARTITIONS, ceil_div
from nki_bn.kernels.transposed_layout import block_size
from nki_bn.links import MESH, RING, TOPOLOGIES, linked_targets, load_links
from nki_bn.planner import candidates, exchanging_candidates
from nki_bn.predict import Candidate, Plan
from nki_bn.problem import BackwardProblem, ForwardProblem, Problem
from nki_bn.simulator import Launch, RunOptions, Shaped, run
from nki_bn.simulator.timing import model
from nki_bn.simulator.trace import Trace

# Bytes of a triple (n, mean, M2) in float32, and of the scratch of an exchange of one group.
_TRIPLE, _LEAST = 12, 16
# Numbers of groups that may exchange together, and how many of the plans that an estimate likes best are modelled.
_TOGETHER = (1, 2, 4, 8, 16, 32)
_MODELLED = 3
# ns of the turn of a group beside its collectives, in that estimate.
_TURN = 4e3

# For each core the shapes of the tiles that are exchanged, in order.
Meetings = tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True)
class Exchange:
    """Replicas and how they exchange moments: values per channel of each, and "two_round" or "one_round".

    Plans are chosen as if collectives went over a "mesh" or a "ring" (see ``nki_bn.links``).
    """

    counts: tuple[int, ...]
    mode: str
    topology: str = MESH

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
        ValueError: shards are so unequal that no plans exchange the same tiles, or replicas so many that their moments
            leave no room in SBUF.
    """
    triples = exchange.triples

    def offered(problem: ForwardProblem) -> list[Candidate]:
        capacity = load_target(problem.target).sbuf_partition_bytes
        try:
            fitting = exchanging_candidates(problem, capacity - _LEAST - _TRIPLE * triples)
        except ValueError as error:
            if triples:
                raise _crowded(triples, capacity) from error
            raise
        found = _fitting(problem, fitting, triples)
        if triples and not found:
            raise _crowded(triples, capacity)
        return found

    return _alike(problems, exchange, offered)


def _crowded(triples: int, capacity: int) -> ValueError:
    return ValueError(
        f"mode is 'one_round' with {triples} replicas, whose moments take {_TRIPLE * triples} of {capacity} bytes of "
        "SBUF per partition, and no plan fits beside them; accepted: 'two_round', or fewer replicas"
    )


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
    """The plan that is modelled as fastest with its collectives; for targets without links the first one found."""
    if problem.target not in linked_targets():
        return found[0].plan
    choices: dict[tuple[Any, ...], tuple[float, Plan]] = {}
    for one in found:
        for plan in _groupings(problem, one.plan, exchange):
            kind = plan.strategy, plan.split, _groups(plan), _together(plan)
            choices.setdefault(kind, (_estimated(problem, one.prediction.ns, plan, exchange), plan))
    plans = [plan for _, plan in sorted(choices.values(), key=itemgetter(0))[:_MODELLED]]
    return min(plans, key=lambda plan: modelled(problem, plan, exchange.mode, len(exchange.counts))[exchange.topology])


def _estimated(problem: Problem, ns: float, plan: Plan, exchange: Exchange) -> float:
    """ns of a plan that takes ``ns`` without its collectives: they follow each other, as turns of groups do."""
    links, size = load_links(problem.target), len(exchange.counts)
    hop = 1e3 * (links.ring(0, size) if exchange.topology == RING else links.mesh(0))
    rounds = 2 if isinstance(problem, ForwardProblem) and exchange.mode == "two_round" else 1
    groups = _groups(plan)
    batches = ceil_div(groups, _together(plan))
    # The last ones have nothing to wait beside; what they exchange for is done after them.
    last = rounds * hop + ns / 2 * (1 / batches - 1 / groups)
    estimate: float = max(ns, batches * (rounds * hop + _TURN)) + last
    return estimate


@lru_cache(1024)
def modelled(problem: Problem, plan: Plan, mode: str, replicas: int) -> dict[str, float]:
    """ns of a plan with its collectives, over every topology."""
    trace = dry_trace(problem, plan, mode, replicas)
    return {topology: float(model(trace, problem.target, topology).total) for topology in TOPOLOGIES}


def _groups(plan: Plan) -> int:
    """Groups of channels that core 0 has."""
    if isinstance(plan, ResidentForwardPlan):
        group = plan.group_channels
    elif isinstance(plan, ResidentPlan):
        group = plan.set_channels * plan.group_sets
    elif isinstance(plan, TransposedPlan | TransposedForwardPlan):
        group = block_size(plan.shape, plan.split, plan.cores) * plan.group_blocks
    else:
        group = PARTITIONS // plan.bands
    groups: int = ceil_div(extent_of_core(plan.shape, plan.split, 0, plan.cores).channels, group)
    return groups


def _together(plan: Plan) -> int:
    """Groups that exchange together."""
    columns = [buffer.columns for buffer in plan.buffers if buffer.name == "merged"]
    return int(columns[0]) // 2 if columns else 1


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
