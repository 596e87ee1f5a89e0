# SPDX-License-Identifier: Apache-2.0
"""What commutes with sharding the batch, and which gradients add up over shards, in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import strategies as st
from layers import Convolution, Dense, Gradients, average_pool, average_pool_vjp, max_pool, max_pool_vjp
from property_cases import Batch, assert_within, batches, equal_parts, holds_for, rounding, shard, sizes

from nki_bn import reference
from nki_bn import synchronised_reference as synchronised
from nki_bn.reference import Array, Float64


def joined(parts: list[Array]) -> Array:
    return np.concatenate(parts)


def foreign_statistics(batch: Batch) -> Float64:
    """[mu | var] that are not those of the batch."""
    return np.stack([batch.beta - 1.0, batch.gamma**2 + 0.5])


def forward(batch: Batch, x: Array, residual: Array) -> tuple[Float64, Array]:
    """y after residual and ReLU, and the mask, at foreign statistics."""
    z = synchronised.forward(x, foreign_statistics(batch), batch.gamma, batch.beta, batch.eps) + residual
    return np.maximum(z, 0.0), z > 0


@pytest.mark.statement("P1a")
@holds_for(batches())
def test_forward_with_given_statistics_commutes_with_sharding(batch: Batch) -> None:
    """Bit for bit, with residual, ReLU and mask."""
    whole = forward(batch, batch.x, batch.residual)
    parts = [forward(batch, *pair) for pair in zip(batch.shards(batch.x), batch.shards(batch.residual), strict=True)]
    for part, want in zip(zip(*parts, strict=True), whole, strict=True):
        assert np.array_equal(joined(list(part)), want)


@pytest.mark.statement("P2a")
@holds_for(batches())
def test_frozen_backward_commutes_with_sharding(batch: Batch) -> None:
    """Bit for bit, through the ReLU's mask, and through a residual, which gets dy' itself."""
    mean, var = foreign_statistics(batch)
    mask = forward(batch, batch.x, batch.residual)[1]

    def dx(dy: Array, x: Array, passed: Array) -> Float64:
        got = reference.batch_norm_bwd(dy, x, mean, var, batch.gamma, batch.eps, passed, training=False)
        return got.dx.value

    local = map(dx, batch.shards(batch.dy), batch.shards(batch.x), batch.shards(mask))
    assert np.array_equal(joined(list(local)), dx(batch.dy, batch.x, mask))
    residual = [dy * passed for dy, passed in zip(batch.shards(batch.dy), batch.shards(mask), strict=True)]
    assert np.array_equal(joined(residual), batch.dy * mask)


@pytest.mark.statement("P2a")
@holds_for(batches())
def test_backward_with_given_means_commutes_with_sharding(batch: Batch) -> None:
    """Whatever [mu | var | mean(gamma*dy) | mean(x_hat*gamma*dy)] is."""
    terms = np.stack([*foreign_statistics(batch), batch.beta, batch.gamma])

    def dx(dy: Array, x: Array) -> Float64:
        return synchronised.input_gradient(dy, x, terms, batch.gamma, batch.eps)

    assert np.array_equal(joined(list(map(dx, batch.shards(batch.dy), batch.shards(batch.x)))), dx(batch.dy, batch.x))


# Operations that IEEE 754 rounds correctly, so that no value depends on where in an array it stands.
UNARY: dict[str, tuple[Callable[[Array], Array], Callable[[Array, Array], Array]]] = {
    "square": (np.square, lambda dy, x: dy * (2 * x)),
    "relu": (lambda x: np.maximum(x, 0), lambda dy, x: np.where(x > 0, dy, 0)),
    "root": (lambda x: np.sqrt(np.abs(x)), lambda dy, x: dy / (2 * np.sqrt(np.abs(x) + 1))),
}
BINARY: dict[str, Callable[[Array, Array], Array]] = {"sum": np.add, "product": np.multiply, "larger": np.maximum}


@pytest.mark.statement("P1a", "P2a")
@holds_for(st.tuples(batches(), st.sampled_from(sorted(UNARY)), st.sampled_from(sorted(BINARY))))
def test_pointwise_maps_and_their_vjps_commute_with_sharding(case: tuple[Batch, str, str]) -> None:
    batch, one, two = case
    function, vjp = UNARY[one]
    x, dy = batch.shards(batch.x), batch.shards(batch.dy)
    assert np.array_equal(joined(list(map(function, x))), function(batch.x))
    assert np.array_equal(joined(list(map(vjp, dy, x))), vjp(batch.dy, batch.x))
    assert np.array_equal(joined(list(map(BINARY[two], x, dy))), BINARY[two](batch.x, batch.dy))


PARTS = st.tuples(sizes(), st.integers(0, 2**32 - 1))
SAME = Convolution()
CONVOLUTIONS = {
    "same": (SAME, 3),
    "strided": (Convolution(stride=2), 3),
    "depthwise": (Convolution(groups=4), 1),
    "depthwise strided": (Convolution(stride=2, groups=4), 1),
    "pointwise": (Convolution(padding=0), 0),
}


def weights_of(name: str, rng: np.random.Generator) -> tuple[Convolution, Float64, Float64]:
    """A convolution of 4 channels to 8, its weight and bias."""
    layer = CONVOLUTIONS[name][0]
    size = 1 if layer.padding == 0 else 3
    return layer, rng.standard_normal((8, 4 // layer.groups, size, size)), rng.standard_normal(8)


@pytest.mark.statement("P1a", "P2a")
@holds_for(PARTS)
def test_pools_and_their_vjps_with_saved_choices_commute_with_sharding(case: tuple[tuple[int, ...], int]) -> None:
    parts, seed = case
    rng = np.random.default_rng(seed)
    x, dy = rng.standard_normal((sum(parts), 2, 6, 4)), rng.standard_normal((sum(parts), 2, 3, 2))
    pooled, choice = max_pool(x)
    local = [max_pool(part) for part in shard(x, parts)]
    assert np.array_equal(joined([y for y, _ in local]), pooled)
    back = [max_pool_vjp(cotangent, saved) for cotangent, (_, saved) in zip(shard(dy, parts), local, strict=True)]
    assert np.array_equal(joined(back), max_pool_vjp(dy, choice))
    dmean = rng.standard_normal((sum(parts), 2))
    assert np.array_equal(joined([average_pool(part) for part in shard(x, parts)]), average_pool(x))
    spread = map(average_pool_vjp, shard(dmean, parts), shard(x, parts))
    assert np.array_equal(joined(list(spread)), average_pool_vjp(dmean, x))


@pytest.mark.statement("P1a", "P2a")
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_and_their_input_gradients_commute_with_sharding(name: str) -> None:
    rng = np.random.default_rng(3)
    layer, weight, bias = weights_of(name, rng)
    parts = (2, 0, 3, 1)
    x = rng.standard_normal((6, 4, 6, 6))
    y = layer.forward(x, weight, bias)
    error = rounding(weight[0].size + 1)
    scale = layer.forward(np.abs(x), np.abs(weight), np.abs(bias))
    assert_within(joined([layer.forward(part, weight, bias) for part in shard(x, parts)]), y, error * scale)
    dy = rng.standard_normal(y.shape)
    local = [layer.vjp(*pair, weight).x for pair in zip(shard(dy, parts), shard(x, parts), strict=True)]
    # A cell is in as many windows as the kernel has cells, at most, and each has as many outputs as its group.
    terms = rounding(weight[:, 0].size)
    assert_within(joined(local), layer.vjp(dy, x, weight).x, terms * layer.vjp(np.abs(dy), x, np.abs(weight)).x)


@pytest.mark.statement("P1a", "P2a")
@holds_for(PARTS)
def test_dense_layers_and_their_input_gradients_commute_with_sharding(case: tuple[tuple[int, ...], int]) -> None:
    parts, seed = case
    rng = np.random.default_rng(seed)
    x, dy, weight = rng.standard_normal((sum(parts), 7)), rng.standard_normal((sum(parts), 5)), rng.random((5, 7))
    bias = rng.standard_normal(5)
    got = joined([Dense.forward(part, weight, bias) for part in shard(x, parts)])
    scale = Dense.forward(np.abs(x), weight, np.abs(bias))
    assert_within(got, Dense.forward(x, weight, bias), rounding(8) * scale)
    back = [Dense.vjp(*pair, weight).x for pair in zip(shard(dy, parts), shard(x, parts), strict=True)]
    assert_within(joined(back), dy @ weight, rounding(5) * (np.abs(dy) @ weight))


Vjp = Callable[[Float64, Float64], Gradients]


def summed_layers(rng: np.random.Generator, examples: int) -> dict[str, tuple[Vjp, Float64, Float64]]:
    """Name -> (VJP, input, cotangent of the output) of layers whose parameter gradients are sums over examples."""
    x = rng.standard_normal((examples, 4, 6, 6))
    layers: dict[str, tuple[Vjp, Float64, Float64]] = {}
    for name in CONVOLUTIONS:
        layer, weight, bias = weights_of(name, rng)
        shape = layer.forward(x, weight, bias).shape
        layers[name] = (partial(layer.vjp, weight=weight), x, rng.standard_normal(shape))
    weight = rng.standard_normal((5, 7))
    rows = rng.standard_normal((examples, 7))
    layers["dense"] = (partial(Dense.vjp, weight=weight), rows, rng.standard_normal((examples, 5)))
    # The sum of the cotangents is BN's beta; there is no weight to it here (gamma has its own statement).
    layers["batch norm"] = (lambda dy, x: Gradients(dy, np.zeros(1), reference.channel_sum(dy)), x, x[::-1])
    return layers


def scales_of(name: str, vjp: Vjp, x: Float64, dy: Float64) -> tuple[Gradients, float]:
    """The gradients of absolute values, and the rounding of a sum over examples and cells."""
    return vjp(np.abs(dy), np.abs(x)), rounding(dy.size // dy.shape[1] + len(dy) + 8)


@pytest.mark.statement("P4")
@holds_for(st.tuples(equal_parts(), st.integers(0, 2**32 - 1)))
def test_replica_means_of_summed_gradients_are_a_share_of_the_global_ones(case: tuple[tuple[int, ...], int]) -> None:
    """1/R with the shards of the global cotangent; R cancels when each replica's loss is its own mean."""
    parts, seed = case
    replicas = len(parts)
    for name, (vjp, x, dy) in summed_layers(np.random.default_rng(seed), sum(parts)).items():
        whole, (scale, error) = vjp(dy, x), scales_of(name, vjp, x, dy)
        for factor in (1, replicas):
            local = [vjp(factor * g, part) for g, part in zip(shard(dy, parts), shard(x, parts), strict=True)]
            for field in ("weight", "bias"):
                got = synchronised.all_reduce_mean([getattr(part, field) for part in local], parts)
                share = factor / replicas
                assert_within(got, share * getattr(whole, field), error * share * getattr(scale, field))


@pytest.mark.statement("P4")
@holds_for(PARTS)
def test_unequal_shards_of_own_means_average_by_their_counts(case: tuple[tuple[int, ...], int]) -> None:
    """A replica of n of N examples has N/n times its shard of the cotangent, and weighs n/N."""
    parts, seed = case
    for name, (vjp, x, dy) in summed_layers(np.random.default_rng(seed), sum(parts)).items():
        whole, (scale, error) = vjp(dy, x), scales_of(name, vjp, x, dy)
        pairs = zip(shard(dy, parts), shard(x, parts), parts, strict=True)
        local = [vjp(g * (sum(parts) / max(1, size)), part) for g, part, size in pairs]
        for field in ("weight", "bias"):
            got = synchronised.all_reduce_mean([getattr(part, field) for part in local], parts)
            assert_within(got, getattr(whole, field), error * getattr(scale, field))
