# SPDX-License-Identifier: Apache-2.0
"""Steps of a synchronised batch norm on replicas, by its sites, and their judgement against the global batch."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from judging import joined, same_bits

from nki_bn import pair, reference, tolerances
from nki_bn.comparison import compare
from nki_bn.problem import Array, ForwardCase
from nki_bn.synchronised import (
    Replica,
    SiteBackward,
    SiteForward,
    SiteOptions,
    SiteSums,
    bn_back_site,
    bn_fwd_site,
    bn_gamma_site,
    replicas,
    running_statistics,
)
from nki_bn.tolerances import Arithmetic

# The weight of a step's batch in the running statistics.
MOMENTUM = 0.3


def running_before(channels: int) -> tuple[Array, Array]:
    """The running statistics before a step."""
    return np.linspace(-1, 2, channels, dtype=np.float32), np.linspace(0.5, 2, channels, dtype=np.float32)


@dataclass(frozen=True)
class Batch:
    """A global batch [N, C, H, W], the parameters, and the sizes of the shards."""

    x: Array
    dy: Array
    residual: Array
    parameters: dict[str, Array]
    sizes: tuple[int, ...]

    def shards(self, array: Array) -> list[Array]:
        """The replicas' parts."""
        return np.split(array, np.cumsum(self.sizes)[:-1])


def drawn(
    sizes: tuple[int, ...], mean: float = 1.0, std: float = 2.0, dtype: Any = np.float32, channels: int = 3
) -> Batch:
    rng = np.random.default_rng(len(sizes))
    shape = (sum(sizes), channels, 3, 4)
    x, dy, residual = ((m + s * rng.standard_normal(shape)).astype(dtype) for m, s in ((mean, std), (0, 1), (0, 1)))
    gamma, beta = rng.standard_normal((2, channels)).astype(np.float32)
    return Batch(x, dy, residual, {"g": gamma, "b": beta}, sizes)


@dataclass(frozen=True)
class Step:
    """What one replica has after forward, gamma site and backward."""

    forward: SiteForward
    sums: SiteSums
    backward: SiteBackward


def on_all(groups: list[Replica], work: Callable[[int], Any]) -> list[Any]:
    """``work(rank)`` of every replica in a thread of its own; one that raises leaves the group."""

    def run(rank: int) -> Any:
        try:
            return work(rank)
        except Exception:
            groups[rank].leave()
            raise

    with ThreadPoolExecutor(len(groups)) as pool:
        waiting = [pool.submit(contextvars.copy_context().run, run, rank) for rank in range(len(groups))]
        return [future.result() for future in waiting]


def steps(batch: Batch, options: SiteOptions, add: bool = False) -> tuple[list[Step], list[Replica]]:
    groups = replicas(len(batch.sizes))
    x, dy, residual = map(batch.shards, (batch.x, batch.dy, batch.residual))

    def step(rank: int) -> Step:
        arguments = x[rank], batch.parameters
        forward = bn_fwd_site(*arguments, groups[rank], "g", options, residual[rank] if add else None)
        before = list(groups[rank].collectives)
        sums = bn_gamma_site(dy[rank], *arguments, "g", forward, options)
        assert groups[rank].collectives == before, "the gamma site exchanges nothing"
        backward = bn_back_site(dy[rank], *arguments, groups[rank], "g", forward, sums, options)
        return Step(forward, sums, backward)

    return on_all(groups, step), groups


def options_of(mode: str, relu: str, **named: Any) -> SiteOptions:
    return SiteOptions("b", mode, fuse_relu=relu != "none", save_relu_mask=relu == "mask", lnc=1, **named)


class Outputs(NamedTuple):
    """What a step gives every replica: of its shard y and dx, its own sums, and the columns that all have."""

    y: Array
    dx: Array
    dgamma: Array
    dbeta: Array
    mean: Array
    var: Array
    running_mean: Array
    running_var: Array


def outputs_of(step: Step) -> Outputs:
    """With the running statistics after those of ``running_before``."""
    statistics = step.forward.statistics
    running = running_statistics(*running_before(len(statistics.mean)), statistics, MOMENTUM)
    return Outputs(step.forward.y, step.backward.dx, *step.sums, *statistics[:2], *running)


def of_the_global_batch(made: list[Outputs]) -> tuple[Array, ...]:
    """y, dx, dgamma and dbeta."""
    sums = (np.sum([one[i] for one in made], axis=0, dtype=np.float64).astype(np.float32) for i in (2, 3))
    return joined([one.y for one in made]), joined([one.dx for one in made]), *sums


def case_of(batch: Batch, fuse_relu: bool, add: bool) -> ForwardCase:
    """The forward of the global batch."""
    parameters = batch.parameters["g"], batch.parameters["b"]
    return ForwardCase(batch.x, *parameters, fuse_relu=fuse_relu, residual=batch.residual if add else None)


def judge_outputs(case: ForwardCase, dy: Array, made: list[Outputs], arithmetic: Arithmetic) -> None:
    """Everything of a shard, against torch's float64 autograd of the global batch."""
    rows = pair.judge_pair(case, dy, of_the_global_batch(made), arithmetic)
    assert all(row.ok for row in rows), rows
    assert len(rows) == 4


def judge_columns(batch: Batch, made: list[Outputs], arithmetic: Arithmetic) -> None:
    """The statistics of the global batch, and the running ones that follow; to the bit the same on all replicas."""
    mean, var = reference.statistics(batch.x)
    allowed = tolerances.statistics(batch.x, mean, var, arithmetic)
    channels = batch.x.shape[1]
    total, first = batch.x.size // channels, made[0]
    for one in made:
        for got, want in zip(one[4:], first[4:], strict=True):
            same_bits(got, want)
    rows = [compare("mean", first.mean, mean, allowed["mean"]), compare("var", first.var, var, allowed["var"])]
    tracked = first.mean, first.var * (total / (total - 1))
    for before, after, value in zip(running_before(channels), first[6:], tracked, strict=True):
        want = reference.running(before, value.astype(np.float64), MOMENTUM)
        rows.append(compare("running", after, want.value, tolerances.running(want)))
    assert all(row.ok for row in rows), rows


def judge(batch: Batch, options: SiteOptions, made: list[Step], add: bool, numerics: str = "trn2") -> None:
    """What the sites made, but for the columns."""
    case = case_of(batch, options.fuse_relu, add)
    judge_outputs(case, batch.dy, list(map(outputs_of, made)), arithmetic_of(batch, numerics))


def judge_statistics(batch: Batch, made: list[Step]) -> None:
    """The columns that the sites made."""
    assert all(step.forward.statistics.total == batch.x.size // batch.x.shape[1] for step in made)
    judge_columns(batch, list(map(outputs_of, made)), arithmetic_of(batch))


def arithmetic_of(batch: Batch, numerics: str = "trn2") -> Arithmetic:
    """That of the kernels and the reductions between them."""
    return Arithmetic(batch.x.dtype.name, numerics, replicas=len(batch.sizes))
