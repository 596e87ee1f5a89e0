# SPDX-License-Identifier: Apache-2.0
"""The sites as StableHLO on XLA's CPU backend: a step is that of the global batch, and that of the kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from judging import joined, same_bits
from site_steps import (
    MOMENTUM,
    Batch,
    Outputs,
    arithmetic_of,
    case_of,
    drawn,
    judge_columns,
    judge_outputs,
    of_the_global_batch,
    options_of,
    outputs_of,
    running_before,
    steps,
)
from xla_runs import Xla

from nki_bn import pair, reference, tolerances, verify
from nki_bn.comparison import compare
from nki_bn.problem import GRADIENTS, Array, ForwardCase
from nki_bn.stablehlo import Graph, Options, bn_back_site, bn_fwd_site, bn_gamma_site, running_statistics
from nki_bn.synchronised import MODES
from nki_bn.tolerances import Allowance, Arithmetic, half_unit

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class Layer:
    """A step of one layer, as a function of a shard of [shape]: x, dy, residual, gamma, beta, running statistics."""

    replicas: int
    shape: tuple[int, ...]
    options: Options
    dtype: str = "float32"
    add: bool = False
    padded: bool = False
    groups: tuple[tuple[int, ...], ...] | None = None

    def module(self) -> str:
        """The text; it returns the fields of ``Outputs``."""
        graph = Graph(self.replicas, self.groups)
        x, dy, residual = (graph.parameter(name, self.shape, self.dtype) for name in ("x", "dy", "residual"))
        names = ("g", "b", "running_mean", "running_var")
        gamma, beta, *running = (graph.parameter(name, self.shape[1:2]) for name in names)
        examples = graph.parameter("examples", (1,)) if self.padded else None
        forward = bn_fwd_site(x, gamma, beta, "g", self.options, residual if self.add else None, examples)
        sums = bn_gamma_site(dy, x, gamma, forward)
        dx = bn_back_site(dy, x, gamma, "g", forward, sums)
        moved = running_statistics(*running, forward.statistics, MOMENTUM)
        return graph.module([forward.y, dx, *sums, forward.statistics.mean, forward.statistics.var, *moved])


def padded(shard: Array, size: int) -> Array:
    """A shard filled up with NaN."""
    filling = np.full((size - len(shard), *shard.shape[1:]), np.nan).astype(shard.dtype)
    return np.concatenate([shard, filling])


def on_xla(xla: Xla, batch: Batch, layer: Layer) -> list[Outputs]:
    """The step on every replica, of what its shard has."""
    size, channels = layer.shape[0], layer.shape[1]
    columns = *batch.parameters.values(), *running_before(channels)
    arguments = []
    for shard in zip(*(batch.shards(array) for array in (batch.x, batch.dy, batch.residual)), strict=True):
        count = [np.float32([len(shard[0])])] if layer.padded else []
        arguments.append([*(padded(array, size) for array in shard), *columns, *count])
    made = [Outputs(*results) for results in xla.run(layer.module(), arguments)]
    for one, number in zip(made, batch.sizes, strict=True):
        assert not one.y[number:].any() and not one.dx[number:].any(), "what fills up is 0 in y and dx"
    return [one._replace(y=one.y[:n], dx=one.dx[:n]) for one, n in zip(made, batch.sizes, strict=True)]


def in_order(batch: Batch) -> Arithmetic:
    """Float32 throughout, with sums in the order of the elements: shards here have no more than 2048 per channel."""
    return Arithmetic(batch.x.dtype.name, "ideal", "sequential", replicas=len(batch.sizes))


def layer_of(batch: Batch, options: Options, **more: Any) -> Layer:
    shape = max(batch.sizes), *batch.x.shape[1:]
    return Layer(len(batch.sizes), shape, options, batch.x.dtype.name, padded=len(set(batch.sizes)) > 1, **more)


def judged(xla: Xla, batch: Batch, options: Options, add: bool = False) -> list[Outputs]:
    """The step on XLA, within the table's bounds of float64 on the global batch."""
    made = on_xla(xla, batch, layer_of(batch, options, add=add))
    judge_columns(batch, made, in_order(batch))
    case = case_of(batch, options.fuse_relu, add)
    judge_outputs(case, batch.dy, made, in_order(batch))
    judge_at_their_statistics(case, batch, made)
    return made


def judge_at_their_statistics(case: ForwardCase, batch: Batch, made: list[Outputs]) -> None:
    """y and the gradients against float64 at the statistics that were reduced, whose own errors play no part."""
    statistics, outputs = (made[0].mean, made[0].var), of_the_global_batch(made)
    want = reference.batch_norm_fwd(case.x, case.gamma, case.beta, case.eps, case.fuse_relu, case.residual, statistics)
    error = tolerances.everywhere(tolerances.forward(case, want, in_order(batch)))
    back = pair.backward_case(case, batch.dy, *statistics, None)
    rows = compare("y", outputs[0], want.y, error), *verify.judge_backward(back, outputs[1:], in_order(batch))
    assert len(rows) == 4 and all(row.ok for row in rows), rows


def judge_with_kernels(batch: Batch, made: list[Outputs], options: Options, add: bool) -> None:
    """As far from the kernels as the two may be from float64 together."""
    kernels, _ = steps(batch, options_of(options.mode, "mask" if options.fuse_relu else "none"), add)
    theirs = of_the_global_batch(list(map(outputs_of, kernels)))
    case = case_of(batch, options.fuse_relu, add)
    allowed = [pair.allowances(case, batch.dy, kind) for kind in (in_order(batch), arithmetic_of(batch))]
    for name, got, want in zip(("y", *GRADIENTS), of_the_global_batch(made), theirs, strict=False):
        one, other = (table[name] for table in allowed)
        wide = want.astype(np.float64)
        error = one.error + other.error + half_unit(np.abs(wide) + other.error, want.dtype)
        row = compare(name, got, wide, Allowance(error, one.excluded | other.excluded))
        assert row.ok, row


@pytest.mark.parametrize("relu", [False, True], ids=["plain", "residual and ReLU"])
@pytest.mark.parametrize(
    ("sizes", "mode"), [((4,), "two_round"), *(((4,) * r, mode) for r in (2, 4) for mode in MODES)], ids=str
)
def test_a_step_is_that_of_the_global_batch_and_of_the_kernels(
    xla: Xla, sizes: tuple[int, ...], mode: str, relu: bool
) -> None:
    batch, options = drawn(sizes), Options(mode, fuse_relu=relu)
    made = judged(xla, batch, options, add=relu)
    judge_with_kernels(batch, made, options, add=relu)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("sizes", "mode"), [((4,), "two_round"), ((2, 2), "two_round"), ((2, 2), "one_round")])
def test_16_bits(xla: Xla, sizes: tuple[int, ...], mode: str, dtype: str) -> None:
    """With a ReLU, whose mask is of what has not been rounded yet; statistics are float32."""
    batch, options = drawn(sizes, dtype=DTYPES[dtype]), Options(mode, fuse_relu=True)
    made = judged(xla, batch, options)
    assert {one.y.dtype for one in made} == {one.dx.dtype for one in made} == {np.dtype(DTYPES[dtype])}
    judge_with_kernels(batch, made, options, add=False)


@pytest.mark.parametrize("relu", [False, True], ids=["plain", "residual and ReLU"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sizes", [(1, 3), (3, 0, 1, 2)], ids=str)
def test_smaller_shards_are_filled_up(xla: Xla, sizes: tuple[int, ...], mode: str, relu: bool) -> None:
    """With NaN here, which goes nowhere; a replica that has nothing takes part."""
    batch, options = drawn(sizes), Options(mode, fuse_relu=relu)
    made = judged(xla, batch, options, add=relu)
    judge_with_kernels(batch, made, options, add=relu)


@pytest.mark.parametrize("sizes", [(4,), (2, 2)], ids=str)
def test_the_mask_is_of_what_has_not_been_rounded(xla: Xla, sizes: tuple[int, ...]) -> None:
    """1e-9 is 0 in float16, and lets the gradient pass."""
    batch = drawn(sizes, dtype=np.float16)
    batch.parameters.update(g=np.full(3, 1e-9, np.float32), b=np.zeros(3, np.float32))
    made = judged(xla, batch, Options(fuse_relu=True))
    assert not any(one.y.any() for one in made) and all(one.dbeta.all() for one in made)


@pytest.mark.parametrize("sizes", [(2, 2), (1, 3), (3, 0, 1, 2)], ids=str)
def test_a_constant_channel_is_its_beta(xla: Xla, sizes: tuple[int, ...]) -> None:
    """To the bit in one round: no sum on the way has rounded terms, as all are distances from the first value."""
    batch = drawn(sizes)
    constants = np.random.default_rng(0).normal(size=(1, 3, 1, 1)).astype(np.float32)
    batch = replace(batch, x=np.broadcast_to(constants, batch.x.shape).copy())
    for one in on_xla(xla, batch, layer_of(batch, Options("one_round"))):
        same_bits(one.mean, constants.reshape(3))
        same_bits(one.var, np.zeros(3, np.float32))
        same_bits(one.y, np.broadcast_to(batch.parameters["b"].reshape(1, 3, 1, 1), one.y.shape))


@pytest.mark.parametrize(("mean", "std"), [(1e3, 1.0), (1e6, 1.0), (0.0, 1e-3)])
@pytest.mark.parametrize("mode", MODES)
def test_means_far_from_zero_and_variances_below_eps(xla: Xla, mode: str, mean: float, std: float) -> None:
    """Where E[x^2] - mean^2, or a mean folded into the shift, would be off by more than the result."""
    judged(xla, drawn((2, 2), mean, std), Options(mode))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rest", [(), (5,), (3, 4), (2, 3, 4)], ids=len)
def test_every_rank(xla: Xla, rest: tuple[int, ...], mode: str) -> None:
    rng = np.random.default_rng(0)
    x, dy, residual = rng.standard_normal((3, 8, 3, *rest)).astype(np.float32)
    parameters = {name: rng.standard_normal(3).astype(np.float32) for name in "gb"}
    judged(xla, Batch(x, dy, residual, parameters, (4, 4)), Options(mode))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("mode", MODES)
def test_what_is_not_finite_stays_in_its_channel(xla: Xla, mode: str, value: float) -> None:
    batch = drawn((2, 2))
    layer = layer_of(batch, Options(mode, fuse_relu=True))
    clean = on_xla(xla, batch, layer)
    batch.x[3, 1, 0, 0] = value
    for one, before in zip(on_xla(xla, batch, layer), clean, strict=True):
        assert np.isnan(one.y[:, 1]).all() and np.isnan(one.var[1])
        for got, want in ((one.y, before.y), (one.dx, before.dx)):
            same_bits(np.delete(got, 1, 1), np.delete(want, 1, 1))


@pytest.mark.parametrize("mode", MODES)
def test_groups_are_batches_of_their_own(xla: Xla, mode: str) -> None:
    """Replicas 0 and 2, and 1 and 3, as two runs of two replicas each: to the bit."""
    batch, options = drawn((2,) * 4), Options(mode)
    made = on_xla(xla, batch, Layer(4, (2, 3, 3, 4), options, groups=((0, 2), (1, 3))))
    parts = [batch.shards(array) for array in (batch.x, batch.dy, batch.residual)]
    for group in ((0, 2), (1, 3)):
        arrays = (np.concatenate([part[rank] for rank in group]) for part in parts)
        alone = Batch(*arrays, batch.parameters, (2, 2))
        for one, rank in zip(on_xla(xla, alone, layer_of(alone, options)), group, strict=True):
            for got, want in zip(made[rank], one, strict=True):
                same_bits(got, want)


@pytest.mark.parametrize("modes", [("two_round", "one_round"), ("one_round", "two_round")])
def test_a_layer_behind_a_layer(xla: Xla, modes: tuple[str, str]) -> None:
    """In one function, with operations of its own between; each is judged on what it was given."""
    graph = Graph(2)
    x, dy = (graph.parameter(name, (2, 3, 3, 4)) for name in ("x", "dy"))
    gammas = [graph.parameter(name, (3,)) for name in ("g", "h")]
    below = bn_fwd_site(x, gammas[0], None, "g", Options(modes[0]))
    between = below.y + below.y
    above = bn_fwd_site(between, gammas[1], None, "h", Options(modes[1]))
    into_above = bn_back_site(dy, between, gammas[1], "h", above)
    into_below = into_above + into_above
    dx = bn_back_site(into_below, x, gammas[0], "g", below)
    batch = drawn((2, 2))
    columns = list(batch.parameters.values())
    shards = zip(batch.shards(batch.x), batch.shards(batch.dy), strict=True)
    text = graph.module([between, into_above, above.y, into_below, below.y, dx])
    made = xla.run(text, [[*shard, *columns] for shard in shards])
    between_, into_above_, above_, into_below_, below_, dx_ = map(joined, zip(*made, strict=True))
    lower, upper = ForwardCase(batch.x, columns[0], None), ForwardCase(between_, columns[1], None)
    for case, cotangent, outputs in ((lower, into_below_, (below_, dx_)), (upper, batch.dy, (above_, into_above_))):
        rows = pair.judge_pair(case, cotangent, outputs, in_order(batch))
        assert len(rows) == 2 and all(row.ok for row in rows), rows
    same_bits(between_, 2 * below_)
