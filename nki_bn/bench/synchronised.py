# SPDX-License-Identifier: Apache-2.0
"""The modelled cost of a synchronised training step, against the plain one: of several launches, and of single ones.

Modelled are the launches (by the timing model, as everywhere in the benchmarks) and, from the parameters in
``configs/collectives``, hops and bytes of the collectives. Between launches nothing overlaps; inside single ones
collectives are part of the timeline. Not modelled: waiting for replicas that are late, launch costs, arithmetic on
columns between launches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from nki_bn import execute, planner
from nki_bn.bench.launches import EPS, Launch, launch_of
from nki_bn.bench.record import Case
from nki_bn.bench.table import Table
from nki_bn.links import TOPOLOGIES, load_links
from nki_bn.problem import BackwardProblem, ForwardProblem
from nki_bn.simulator import RunOptions, Shaped, run
from nki_bn.simulator.timing import model
from nki_bn.synchronised.launches import Exchange, backward_plans, forward_plans, modelled

_NS_PER_US = 1e3
_BYTES = 4
HEADER = (
    "model",
    "dtype",
    "batch",
    "lnc",
    "plain us",
    "kernels us",
    "mesh us",
    "ring us",
    "slowdown",
    "single mesh us",
    "single ring us",
    "slowdown",
)
LEFT = 2
CAVEAT = (
    "modelled: the batch norms of a training step of one replica; launches by the timing model, collectives by hops "
    "and bytes, between launches (where nothing overlaps) or inside single ones; nobody is late; see "
    "docs/synchronised.md"
)


@dataclass(frozen=True)
class Cost:
    """us of the batch norms of a step: plain, the launches of a synchronised one, and its collectives either way;
    and of one whose collectives are inside single launches, either way."""

    plain: float = 0.0
    kernels: float = 0.0
    mesh: float = 0.0
    ring: float = 0.0
    single_mesh: float = 0.0
    single_ring: float = 0.0

    def plus(self, other: Cost, times: int) -> Cost:
        """With those of ``times`` layers more."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Cost(*(mine + times * more for mine, more in pairs))

    @property
    def slowdown(self) -> tuple[float, float]:
        """Of the batch norms: with a mesh and with a ring."""
        return (self.kernels + self.mesh) / self.plain, (self.kernels + self.ring) / self.plain

    @property
    def single_slowdown(self) -> tuple[float, float]:
        """The same in single launches."""
        return self.single_mesh / self.plain, self.single_ring / self.plain


def payloads(channels: int, mode: str) -> tuple[int, ...]:
    """Bytes that a replica gives to each collective of a step."""
    forward = (channels + 1, channels) if mode == "two_round" else (2 * channels + 1,)
    return tuple(_BYTES * numbers for numbers in (*forward, 2 * channels))


def layer_cost(case: Case, replicas: int, mode: str) -> Cost:
    """That of one layer, forward and backward, whatever the operation of ``case`` is.

    Raises:
        ValueError: there are no parameters for its target, or it has one value per channel.
    """
    common: dict[str, Any] = {"relu": case.relu, "lnc": case.lnc, "target": case.target}
    forward = ForwardProblem(case.shape, case.dtype, **common)
    if forward.count == 1:
        raise ValueError(
            f"{case.model} {case.layer} has 1 value per channel in a batch of {case.shape[0]}; accepted: more than 1, "
            "as the plain step has the same shape"
        )
    backward = BackwardProblem(case.shape, case.dtype, **common)
    frozen, sums = replace(forward, training=False), replace(backward, need=("dgamma", "dbeta"))
    links, sizes = load_links(case.target), payloads(forward.channels, mode)
    return Cost(
        _planned_us(forward) + _planned_us(backward),
        _launch_us(launch_of(forward, execute.moments_plan(forward), Shaped), case.target)
        + _planned_us(frozen)
        + _planned_us(sums)
        + _launch_us(_input_gradient(backward), case.target),
        sum(map(links.mesh, sizes)),
        sum(links.ring(size, replicas) for size in sizes),
        *single_us(forward, backward, replicas, mode),
    )


def single_us(forward: ForwardProblem, backward: BackwardProblem, replicas: int, mode: str) -> tuple[float, float]:
    """us of both directions with collectives inside the launches, as a mesh and as a ring, where shards are equal."""
    found = []
    for way in TOPOLOGIES:
        exchange = Exchange((forward.count,) * replicas, mode, way)
        plans = (forward, forward_plans([forward], exchange)[0]), (backward, backward_plans([backward], exchange)[0])
        found.append(sum(modelled(problem, plan, mode, replicas)[way] for problem, plan in plans))
    mesh, ring = found
    return mesh / _NS_PER_US, ring / _NS_PER_US


def report(cases: Iterable[Case], replicas: int, mode: str) -> str:
    """A table with a row per model, dtype, batch and cores, and what it says.

    Raises:
        ValueError: as :func:`layer_cost`.
    """
    costs: dict[tuple[str, str, int, int], Cost] = {}
    for case in cases:
        key = case.model, case.dtype, case.shape[0], case.lnc
        costs[key] = costs.get(key, Cost()).plus(layer_cost(case, replicas, mode), case.count)
    rows = [(*map(str, key), *_cells(cost)) for key, cost in costs.items()]
    return f"{replicas} replicas, {mode}\n{Table(HEADER, rows, LEFT).text()}\n{CAVEAT}"


def _cells(cost: Cost) -> tuple[str, ...]:
    times = (f"{value:.0f}" for value in (cost.plain, cost.kernels, cost.mesh, cost.ring))
    single = (f"{value:.0f}" for value in (cost.single_mesh, cost.single_ring))
    return (*times, _range(cost.slowdown), *single, _range(cost.single_slowdown))


def _range(values: tuple[float, float]) -> str:
    return "{:.2f} to {:.2f}".format(*values)


def _planned_us(problem: ForwardProblem | BackwardProblem) -> float:
    return _launch_us(launch_of(problem, planner.plan(problem), Shaped), problem.target)


def _input_gradient(problem: BackwardProblem) -> Launch:
    from nki_bn.kernels.given_statistics import input_gradient

    plan = execute.input_gradient_plan(problem)
    whole = launch_of(problem, plan, Shaped).arguments
    sums = (Shaped((problem.channels, 1), "float32"), Shaped((problem.channels, 1), "float32"))
    mask = whole[8]
    return Launch(input_gradient, (*whole[:6], *sums, 1, plan, EPS, problem.relu != "none", mask), problem.lnc)


def _launch_us(launch: Launch, target: str) -> float:
    result = run(launch.kernel, launch.arguments, {}, launch.lnc, RunOptions(target=target, dry=True))
    return model(result.trace, target).total / _NS_PER_US
