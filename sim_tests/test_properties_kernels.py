# SPDX-License-Identifier: Apache-2.0
"""Kernels on replicas: launches per shard, and reductions between them, against launches of the global batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from judging import arithmetic_of, joined, judge_replicas, judge_statistics, same_bits, stages
from replicas import (
    TIGHT,
    Layer,
    Part,
    all_reduce,
    cut,
    draw,
    synchronised_backward,
    synchronised_forward,
    total_of,
    update_running,
    with_masks,
)

from nki_bn import reference, tolerances
from nki_bn.comparison import compare
from nki_bn.reference import Array
from nki_bn.simulator import RunOptions

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
RELUS = ("none", "mask", "recompute")
# Few channels, replicated ones (the shards have fewer bands than the whole), and two channel tiles.
SHAPES = {3: (8, 3, 1, 5, 7), 32: (8, 32, 1, 3, 5), 130: (8, 130, 1, 1, 3)}
# Equal, unequal, and one without examples.
SIZES = {"R2": (4, 4), "R4": (2, 2, 2, 2), "uneven": (3, 5), "empty": (1, 4, 0, 3)}


def drawn(
    channels: int, sizes: str, dtype: str, relu: str, lnc: int = 1, tight: bool = False
) -> tuple[Layer, Part, list[Part]]:
    """A layer, a global batch and its shards; a residual stands before a recomputed mask."""
    layer, whole, parts = draw(SHAPES[channels], SIZES[sizes], DTYPES[dtype], residual=relu == "recompute")
    layer = replace(layer, relu=relu, lnc=lnc)
    return replace(layer, sbuf_bytes=TIGHT) if tight else layer, whole, parts


def foreign_statistics(channels: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(1)
    return rng.standard_normal(channels).astype(np.float32), (0.5 + rng.random(channels)).astype(np.float32)


@pytest.mark.statement("P1a", "P2a")
@pytest.mark.parametrize("relu", RELUS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("channels", "sizes"), [(3, "uneven"), (32, "R2"), (130, "R4")])
def test_launches_with_given_statistics_commute_with_sharding(channels: int, sizes: str, dtype: str, relu: str) -> None:
    """Bit for bit: forward, frozen backward, and input gradient from given sums (in one tile: nothing is staged)."""
    layer, whole, parts = drawn(channels, sizes, dtype, relu)
    statistics = foreign_statistics(channels)
    y, mask = layer.given_forward(whole, *statistics)
    local = [layer.given_forward(part, *statistics) for part in parts]
    same_bits(joined([part[0] for part in local]), y)
    if relu != "none":
        same_bits(joined([part[1] for part in local]), mask)
    (whole,), parts = with_masks([whole], [mask]), with_masks(parts, [part[1] for part in local])
    frozen = [layer.gradients(part, *statistics, training=False)[0] for part in parts]
    same_bits(joined(frozen), layer.gradients(whole, *statistics, training=False)[0])
    sums, count = foreign_statistics(channels)[::-1], whole.total
    given = [layer.input_gradient(part, statistics, sums, count) for part in parts]
    same_bits(joined(given), layer.input_gradient(whole, statistics, sums, count))


@pytest.mark.statement("P1", "P2", "P2g", "Chan")
@pytest.mark.parametrize("relu", RELUS)
@pytest.mark.parametrize(
    ("channels", "sizes", "dtype", "lnc", "tight", "numerics"),
    [
        (3, "R2", "float32", 1, False, "ideal"),
        (3, "R2", "float32", 1, False, "trn2"),
        (3, "R4", "bfloat16", 1, False, "trn2"),
        (3, "uneven", "bfloat16", 2, True, "trn2"),
        (3, "empty", "float32", 1, True, "trn2"),
        (32, "R2", "bfloat16", 1, False, "ideal"),
        (130, "uneven", "float32", 2, False, "trn2"),
    ],
)
def test_a_synchronised_step_is_the_shard_of_the_global_one(
    channels: int, sizes: str, dtype: str, lnc: int, tight: bool, numerics: str, relu: str
) -> None:
    """Statistics, y, mask, dx and the sums of dgamma and dbeta."""
    layer, whole, parts = drawn(channels, sizes, dtype, relu, lnc, tight)
    judge_replicas(replace(layer, options=RunOptions(numerics=numerics)), whole, parts)


@pytest.mark.statement("P1b", "P2g")
def test_what_is_wrong_at_local_statistics_is_seen_through_the_kernels() -> None:
    """Shards that lie apart: their variances do not average, and their own dgamma do not add up."""
    layer, whole, _ = draw(SHAPES[3], (4, 4))
    whole.x[4:] += 5
    whole.dy[4:] += 1
    parts = cut(whole, (4, 4))
    _, mean, var, *_ = layer.training_forward(whole)
    local = [layer.local_moments(part) for part in parts]
    gap = var - all_reduce([part[1] for part in local], [0.5, 0.5])
    own = [layer.local_sums(part, *moments)[0] for part, moments in zip(parts, local, strict=True)]
    error = np.abs(all_reduce(own, [1.0, 1.0]) - layer.gradients(whole, mean, var)[1])
    exact = reference.batch_norm_bwd(whole.dy, whole.x, mean, var, layer.gamma)
    assert (gap > 4).all()
    assert (error > 1e3 * arithmetic_of(whole, layer).sums * exact.dgamma.scale).all()


@pytest.mark.statement("run")
@pytest.mark.parametrize("sizes", SIZES)
def test_running_statistics_after_a_synchronised_step(sizes: str) -> None:
    """What every replica makes from the reduced statistics, against torch's rule on the global batch."""
    layer, whole, parts = drawn(3, sizes, "float32", "none")
    forward = synchronised_forward(layer, parts)
    momentum, count = 0.1, total_of(parts)
    unbiased = count / (count - 1)
    old = foreign_statistics(3)
    judge_statistics(whole, parts, forward, layer)
    for before, batch, factor in ((old[0], forward.mean, 1.0), (old[1], forward.var, unbiased)):
        got = update_running(before, batch, momentum * factor, momentum)
        want = reference.running(before, batch.astype(np.float64) * factor, momentum)
        row = compare("running", got, want.value, tolerances.running(want))
        assert row.ok, row


@pytest.mark.statement("R1", "run")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [3, 32, 130])
def test_one_replica_has_the_running_statistics_of_the_plain_kernel(channels: int, dtype: str) -> None:
    layer, whole, parts = draw(SHAPES[channels], (8,), DTYPES[dtype])
    forward, old = synchronised_forward(layer, parts), foreign_statistics(channels)
    _, mean, var, *new, _ = layer.training_forward(whole, old)
    same_bits(forward.mean, mean)
    same_bits(forward.var, var)
    factors = 0.1, 0.1 * (whole.total / (whole.total - 1))
    for before, batch, factor, want in zip(old, (mean, var), factors, new, strict=True):
        same_bits(update_running(before, batch, factor, 0.1), want)


@pytest.mark.statement("R1")
@pytest.mark.parametrize("relu", RELUS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "lnc", "tight", "numerics"),
    [
        ((4, 3, 1, 5, 7), 1, False, "ideal"),
        ((4, 3, 2, 8, 10), 1, True, "trn2"),
        ((4, 3, 2, 8, 20), 2, True, "trn2"),
        ((5, 3, 1, 16, 27), 2, True, "ideal"),
        ((4, 32, 1, 3, 5), 1, False, "trn2"),
        ((2, 130, 1, 2, 3), 2, False, "trn2"),
    ],
)
def test_one_replica_is_the_plain_kernel_bit_for_bit(
    shape: tuple[int, ...], lnc: int, tight: bool, numerics: str, dtype: str, relu: str
) -> None:
    """Training forward and backward; in tight memory with tiles that stay and tiles that are staged in bfloat16."""
    layer, whole, parts = draw(shape, shape[:1], DTYPES[dtype], residual=relu == "recompute")
    sizes: dict[str, Any] = {"sbuf_bytes": TIGHT} if tight else {}
    layer = replace(layer, relu=relu, lnc=lnc, options=RunOptions(numerics=numerics), **sizes)
    forward = synchronised_forward(layer, parts)
    y, mean, var, _, _, mask = layer.training_forward(whole)
    for got, want in ((forward.y[0], y), (forward.mean, mean), (forward.var, var)):
        same_bits(got, want)
    if relu != "none":
        same_bits(forward.masks[0], mask)
    (masked,) = with_masks(parts, [mask])
    assert stages(layer, masked) == tight
    backward = synchronised_backward(layer, [masked], mean, var)
    for got, want in zip((part[0] for part in backward), layer.gradients(masked, mean, var), strict=True):
        same_bits(got, want)


@pytest.mark.statement("lin")
@pytest.mark.parametrize("relu", RELUS)
@pytest.mark.parametrize("exponent", [-9, 5])
def test_a_power_of_two_in_the_cotangent_passes_through_exactly(exponent: int, relu: str) -> None:
    """Also its sign; in training, and frozen."""
    layer, whole, _ = drawn(3, "R2", "float32", relu, tight=True)
    _, mean, var, _, _, mask = layer.training_forward(whole)
    whole = whole._replace(mask=mask)
    for training in (True, False):
        plain = layer.gradients(whole, mean, var, training)
        scaled = layer.gradients(whole._replace(dy=np.ldexp(-whole.dy, exponent)), mean, var, training)
        for got, want in zip(scaled, plain, strict=True):
            assert np.array_equal(got, np.ldexp(-want, exponent))


@pytest.mark.statement("block")
@pytest.mark.parametrize(("channels", "value"), [(3, np.nan), (3, np.inf), (3, 7.0), (32, np.nan), (130, np.nan)])
def test_other_channels_keep_their_bits_on_all_replicas(channels: int, value: float) -> None:
    """One value of one channel of one shard changes, in x or in dy."""
    layer, whole, _ = draw(SHAPES[channels], (4, 4))
    for name in ("x", "dy"):
        changed = whole._replace(**{name: getattr(whole, name).copy()})
        getattr(changed, name)[5, 1, 0, 0, 0] = value
        for got, want in zip(step(layer, changed), step(layer, whole), strict=True):
            axis = 1 if got.ndim > 1 else 0
            same_bits(np.delete(got, 1, axis), np.delete(want, 1, axis))


def step(layer: Layer, whole: Part) -> list[Array]:
    """Everything that two replicas have after a step."""
    parts = cut(whole, (4, 4))
    with np.errstate(all="ignore"):
        forward = synchronised_forward(layer, parts)
        backward = synchronised_backward(layer, parts, forward.mean, forward.var)
    return [*forward.y, forward.mean, forward.var, *backward.dx, *backward.dgamma, *backward.dbeta]


@pytest.mark.statement("shapes", "layout")
@pytest.mark.parametrize("dtype", DTYPES)
def test_relabelled_inputs_give_relabelled_results(dtype: str) -> None:
    """[N, C, H, W], one image of rows [1, C, N*S], and examples of one value [N*S, C]: the same bits."""
    layer, whole, _ = draw((4, 3, 1, 5, 6), (4,), DTYPES[dtype])
    rows, values = relabelled(whole, "rows"), relabelled(whole, "values")
    plain = layer.training_forward(whole)[:3]
    given = plain[1], plain[2]
    gradients = layer.gradients(whole, *given)
    inference = layer.given_forward(whole, *given)[0], layer.gradients(whole, *given, training=False)[0]
    for part in (rows, values):
        y, mean, var = layer.training_forward(part)[:3]
        same_bits(mean, plain[1])
        same_bits(var, plain[2])
        dx, dgamma, dbeta = layer.gradients(part, mean, var)
        same_bits(dgamma, gradients[1])
        same_bits(dbeta, gradients[2])
        frozen = layer.given_forward(part, mean, var)[0], layer.gradients(part, mean, var, training=False)[0]
        for got, want in zip((y, dx, *frozen), (plain[0], gradients[0], *inference), strict=True):
            same_bits(as_rows(got), as_rows(want))


def as_rows(x: Array) -> Array:
    """[C, N*S]."""
    return np.ascontiguousarray(np.moveaxis(x, 1, 0).reshape(x.shape[1], -1))


def relabelled(part: Part, layout: str) -> Part:
    channels, count = part.x.shape[1], part.total

    def moved(x: Array) -> Array:
        rows = as_rows(x)
        if layout == "rows":
            return rows.reshape(1, channels, 1, 1, count)
        return np.ascontiguousarray(rows.T).reshape(count, channels, 1, 1, 1)

    return Part(moved(part.x), moved(part.dy))
