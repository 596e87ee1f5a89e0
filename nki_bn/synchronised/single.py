# SPDX-License-Identifier: Apache-2.0
"""Synchronised batch norm with collectives inside the kernels: one launch per replica and direction.

x stays in SBUF between statistics and y where it fits, and dy and x between sums and dx. The replicas of a step run in
the embedded simulator, in lockstep.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nki_bn import execute, ops
from nki_bn.ops import BatchNormForward
from nki_bn.problem import GRADIENTS, OUTPUTS, Array, BackwardCase, ForwardCase
from nki_bn.requests import BackwardRequest, ForwardRequest, prepare_backward, prepare_forward
from nki_bn.simulator import Launch, SimulationResult, run_replicas
from nki_bn.synchronised.exchange import check_mode
from nki_bn.synchronised.launches import (
    Exchange,
    backward_plans,
    empty_launch,
    forward_plans,
    launch_of,
    meetings,
)

_SAME = ("dtype", "channels", "relu", "residual", "training", "lnc", "target")


def forward_in_one_launch(
    shards: Sequence[ForwardCase], mode: str = "two_round", lnc: int | None = None, target: str = "trn2"
) -> list[BatchNormForward]:
    """Normalise the shards of a batch with the statistics of all of it, each replica in one launch.

    Args:
        shards: the arguments of ``nki_bn.batch_norm_fwd`` of each replica, in training. All have the same number of
            channels, dtype, fusion, eps and momentum; batches may be unequal, and empty.
        mode: "two_round" (two all-reduces per group of channels) or "one_round" (one all-gather).
        lnc, target: see ``nki_bn.batch_norm_fwd``.

    Returns:
        What ``nki_bn.batch_norm_fwd`` returns, for each replica; mean, var and running statistics are the same on all.
        With one replica everything is that of the plain kernel.

    Raises:
        TypeError, ValueError: as ``nki_bn.batch_norm_fwd``; shards differ in more than their batches, or are so unequal
            that they cannot exchange group by group; all together have one value per channel.
        RuntimeError: kernels do not run in the embedded simulator here.
    """
    check_mode(mode)
    requests = [prepare_forward(case, lnc, target, part=len(shards) > 1) for case in shards]
    _check_alike(requests, ("eps", "momentum"), ("running_mean",))
    exchange = Exchange(tuple(request.problem.count for request in requests), mode)
    if len(requests) == 1 or not sum(exchange.counts):
        return [ops.run_forward(request) for request in requests]
    if sum(exchange.counts) == 1:
        raise ValueError("x has 1 value per channel on all replicas together; accepted in training: more than 1")
    plans = forward_plans([request.problem for request in requests], exchange)
    results = _run(requests, plans, exchange)
    return [_forward_of(request, result.outputs) for request, result in zip(requests, results, strict=True)]


def backward_in_one_launch(
    shards: Sequence[BackwardCase], need: Iterable[str] = OUTPUTS, lnc: int | None = None, target: str = "trn2"
) -> list[tuple[Array | None, ...]]:
    """Gradients of the shards of a batch, each replica in one launch with one all-reduce per group of channels.

    Args:
        shards: the arguments of ``nki_bn.batch_norm_bwd`` of each replica, in training; mean and var are those of the
            whole batch. They are alike as for :func:`forward_in_one_launch`.
        need, lnc, target: see ``nki_bn.batch_norm_bwd``.

    Returns:
        (dx, dgamma, dbeta) of each replica: dx is that of the whole batch, cut; dgamma and dbeta are the replica's own
        sums, which data parallelism adds up. With one replica everything is that of the plain kernel.

    Raises:
        TypeError, ValueError, RuntimeError: as for :func:`forward_in_one_launch`, and as ``nki_bn.batch_norm_bwd``.
    """
    wanted = tuple(need)
    requests = [prepare_backward(case, wanted, lnc=lnc, target=target) for case in shards]
    _check_alike(requests, ("eps",), ())
    exchange = Exchange(tuple(request.problem.count for request in requests), "two_round")
    # Without dx nothing is exchanged.
    if len(requests) == 1 or not sum(exchange.counts) or "dx" not in requests[0].problem.need:
        return [ops.run_backward(request) for request in requests]
    plans = backward_plans([request.problem for request in requests], exchange)
    results = _run(requests, plans, exchange)
    return [_backward_of(request, result.outputs) for request, result in zip(requests, results, strict=True)]


def _check_alike(requests: Sequence[Any], numbers: tuple[str, ...], given: tuple[str, ...]) -> None:
    """Refuse shards that differ in more than their batches, and such that are not synchronised at all."""
    if not requests:
        raise ValueError("shards is empty; accepted: one or more")
    if len(requests) > 1 and not requests[0].problem.training:
        raise ValueError("training is False on replica 0; accepted for several replicas: True")
    first = _traits(requests[0], numbers, given)
    for rank, request in enumerate(requests):
        for name, value in _traits(request, numbers, given).items():
            if value != first[name]:
                raise ValueError(
                    f"shards have {name} {first[name]!r} on replica 0 and {value!r} on {rank}; accepted: equal ones"
                )


def _traits(request: Any, numbers: tuple[str, ...], given: tuple[str, ...]) -> dict[str, Any]:
    """What all replicas have in common."""
    found = {name: getattr(request.problem, name) for name in _SAME}
    found |= {name: getattr(request.inputs, name) for name in numbers}
    return found | {f"{name} given": getattr(request.inputs, name) is not None for name in given}


def _run(requests: Sequence[Any], plans: Sequence[Any], exchange: Exchange) -> list[SimulationResult]:
    """All replicas in lockstep."""
    if execute.which_nki().kind != "embedded":
        raise RuntimeError("nki is the vendor's package here; accepted for replicas in one process: the simulator")
    problem = requests[0].problem
    options = replace(execute.simulation_options(), target=problem.target)
    launches = _launches(requests, plans, exchange)
    results = run_replicas(launches, problem.lnc, options)
    for request, plan, result in zip(requests, plans, results, strict=True):
        if request.problem.count:
            execute.check_memory(result, plan)
    return results


def _launches(requests: Sequence[Any], plans: Sequence[Any], exchange: Exchange) -> list[Launch]:
    filled = next(rank for rank, count in enumerate(exchange.counts) if count)
    found = []
    for rank, request in enumerate(requests):
        told, plan = exchange.of(rank), plans[rank]
        if exchange.counts[rank]:
            found.append(launch_of(request.inputs, request.problem, plan, told))
        else:
            tiles = meetings(requests[filled].problem, plans[filled], exchange.mode, len(requests))
            found.append(empty_launch(request.inputs, request.problem, plans[filled], tiles, told))
    return found


def _forward_of(request: ForwardRequest, outputs: tuple[Any, ...]) -> BatchNormForward:
    shape = request.problem.shape
    if request.problem.count:
        y, *statistics, mask = outputs
    else:
        y, statistics = np.zeros_like(request.inputs.x), list(outputs)
        mask = np.zeros(shape, np.uint8) if request.problem.relu == "mask" else None
    y, mask = (None if array is None else array.reshape(shape) for array in (y, mask))
    return BatchNormForward._make((y, *statistics, mask))


def _backward_of(request: BackwardRequest, outputs: Any) -> tuple[Array | None, ...]:
    problem = request.problem
    if not problem.count:
        outputs = np.zeros_like(request.inputs.dy), outputs, outputs.copy()
    shapes = (problem.shape, (problem.channels,), (problem.channels,))
    return tuple(
        None if output is None or name not in problem.need else output.reshape(shape)
        for name, output, shape in zip(GRADIENTS, outputs, shapes, strict=False)
    )
