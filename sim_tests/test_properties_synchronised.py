# SPDX-License-Identifier: Apache-2.0
"""Synchronised batch norm on replica r is shard r of the global batch norm, in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st
from property_cases import Batch, Bounds, assert_within, batches, holds_for, normal_batch

from nki_bn import reference
from nki_bn import synchronised_reference as synchronised
from nki_bn.reference import Array, BackwardReference, Float64


def global_backward(batch: Batch, dy: Array) -> BackwardReference:
    statistics = reference.statistics(batch.x)
    return reference.batch_norm_bwd(dy, batch.x, *statistics, batch.gamma, batch.eps)


def forward(batch: Batch, packed: Float64) -> list[Float64]:
    columns = batch.gamma, batch.beta, batch.eps
    return [synchronised.forward(x, packed, *columns) for x in batch.shards(batch.x)]


def backward(batch: Batch, dy: Array) -> list[Float64]:
    """dx per replica."""
    x, cotangents = batch.shards(batch.x), batch.shards(dy)
    terms = synchronised.backward_terms(cotangents, x, synchronised.two_round(x), batch.gamma, batch.eps)
    pairs = zip(cotangents, x, strict=True)
    return [synchronised.input_gradient(*pair, terms, batch.gamma, batch.eps) for pair in pairs]


def sums(batch: Batch, dy: Array, packed: Float64) -> list[Float64]:
    """[dgamma | dbeta] per replica."""
    pairs = zip(batch.shards(dy), batch.shards(batch.x), strict=True)
    return [synchronised.parameter_gradients(*pair, packed, batch.eps) for pair in pairs]


@pytest.mark.statement("P1")
@holds_for(batches())
def test_forward_is_the_shard_of_the_global_one_in_both_forms(batch: Batch) -> None:
    want = batch.shards(reference.batch_norm_fwd(batch.x, batch.gamma, batch.beta, batch.eps).y)
    bounds = batch.shards(Bounds(batch).y)
    for statistics in (synchronised.two_round, synchronised.one_round):
        got = forward(batch, statistics(batch.shards(batch.x)))
        for part, expected, bound in zip(got, want, bounds, strict=True):
            assert_within(part, expected, bound)


@pytest.mark.statement("P1")
@holds_for(batches())
def test_relu_and_residual_after_a_synchronised_forward_are_shards_too(batch: Batch) -> None:
    """A ReLU does not increase an error; where its argument is beyond the bound, so is the mask's certainty."""
    z = reference.batch_norm_fwd(batch.x, batch.gamma, batch.beta, batch.eps).y + batch.residual
    got = np.concatenate(forward(batch, synchronised.two_round(batch.shards(batch.x)))) + batch.residual
    bound = Bounds(batch).y + Bounds(batch).error * np.abs(batch.residual)
    assert_within(np.maximum(got, 0), np.maximum(z, 0), bound)
    decided = np.abs(z) > bound
    assert np.array_equal((got > 0)[decided], (z > 0)[decided])


@pytest.mark.statement("P1")
@holds_for(batches(most=4))
def test_the_second_moment_form_is_the_other_reading(batch: Batch) -> None:
    """Where it does not cancel: on batches moved to their mean, so that m2 is var."""
    centred = replace(batch, x=batch.x - batch.x.mean((0, *range(2, batch.x.ndim)), keepdims=True))
    packed = synchronised.from_second_moments(synchronised.second_moments(centred.shards(centred.x)))
    want = reference.batch_norm_fwd(centred.x, centred.gamma, centred.beta, centred.eps).y
    # var is off by three more shares of m2 than otherwise.
    assert_within(np.concatenate(forward(centred, packed)), want, 4 * Bounds(centred).y)


@pytest.mark.statement("P2")
@holds_for(batches())
def test_input_gradient_is_the_shard_of_the_global_one(batch: Batch) -> None:
    want = batch.shards(global_backward(batch, batch.dy).dx.value)
    for got, expected, bound in zip(
        backward(batch, batch.dy), want, batch.shards(Bounds(batch).dx(batch.dy)), strict=True
    ):
        assert_within(got, expected, bound)


@pytest.mark.statement("P2")
@holds_for(batches())
def test_input_gradient_through_a_relu_is_the_shard_of_the_global_one(batch: Batch) -> None:
    mask = reference.batch_norm_fwd(batch.x, batch.gamma, batch.beta, batch.eps).y + batch.residual > 0
    masked = np.where(mask, batch.dy, 0.0)
    statistics = reference.statistics(batch.x)
    want = reference.batch_norm_bwd(batch.dy, batch.x, *statistics, batch.gamma, batch.eps, mask)
    assert_within(np.concatenate(backward(batch, masked)), want.dx.value, Bounds(batch).dx(masked))


@pytest.mark.statement("P2")
@pytest.mark.parametrize("parts", [(2, 2), (1, 3, 2), (1,) * 8], ids=str)
def test_a_cotangent_on_one_replica_reaches_all_of_them(parts: tuple[int, ...]) -> None:
    """The terms across shards: what the input gradient would lack without its reduction."""
    batch = normal_batch((sum(parts), 3, 4), parts, seed=4)
    for source in range(len(parts)):
        dy = np.zeros_like(batch.dy)
        batch.shards(dy)[source][...] = batch.shards(batch.dy)[source]
        want = batch.shards(global_backward(batch, dy).dx.value)
        bounds = batch.shards(Bounds(batch).dx(dy))
        for got, expected, bound in zip(backward(batch, dy), want, bounds, strict=True):
            assert_within(got, expected, bound)
            assert (np.abs(expected).max((0, 2)) > 1e9 * bound.max((0, 2)))[batch.gamma != 0].all()


@pytest.mark.statement("P2")
@pytest.mark.parametrize("parts", [(2, 2), (1, 3, 2)], ids=str)
def test_own_means_in_place_of_reduced_ones_are_wrong(parts: tuple[int, ...]) -> None:
    batch = normal_batch((sum(parts), 3, 4), parts, seed=5)
    packed = synchronised.two_round(batch.shards(batch.x))
    want = batch.shards(global_backward(batch, batch.dy).dx.value)
    bounds = batch.shards(Bounds(batch).dx(batch.dy))
    pairs = zip(batch.shards(batch.dy), batch.shards(batch.x), want, bounds, strict=True)
    for dy, x, expected, bound in pairs:
        own = synchronised.gradient_means(dy, x, packed, batch.gamma, batch.eps)
        wrong = synchronised.input_gradient(dy, x, own, batch.gamma, batch.eps)
        assert (np.abs(wrong - expected) > 1e9 * bound).any()


@pytest.mark.statement("P2")
@holds_for(batches())
def test_cotangents_of_own_means_give_r_times_the_shard(batch: Batch) -> None:
    """A factor common to all replicas passes through the reduction, so that averaging gradients takes it away again."""
    replicas = len(batch.sizes)
    got = np.concatenate(backward(batch, replicas * batch.dy))
    want = replicas * global_backward(batch, batch.dy).dx.value
    assert_within(got, want, replicas * Bounds(batch).dx(batch.dy))


@pytest.mark.statement("P2g")
@holds_for(batches())
def test_gradients_of_gamma_and_beta_at_global_statistics_add_up(batch: Batch) -> None:
    local = sums(batch, batch.dy, synchronised.two_round(batch.shards(batch.x)))
    want, bounds = global_backward(batch, batch.dy), Bounds(batch)
    total = np.sum(local, axis=0)
    assert_within(total[0], want.dgamma.value, bounds.dgamma(batch.dy))
    assert_within(total[1], want.dbeta.value, bounds.dbeta(batch.dy))


@pytest.mark.statement("P2g")
@pytest.mark.parametrize("parts", [(2, 2), (1, 3, 2), (3,) * 8], ids=str)
def test_gradients_of_gamma_at_local_statistics_do_not(parts: tuple[int, ...]) -> None:
    batch = normal_batch((sum(parts), 3, 4), parts, seed=6)
    pairs = zip(batch.shards(batch.dy), batch.shards(batch.x), strict=True)
    local = [synchronised.parameter_gradients(dy, x, synchronised.local_statistics(x), batch.eps)[0] for dy, x in pairs]
    gap = np.abs(np.sum(local, axis=0) - global_backward(batch, batch.dy).dgamma.value)
    assert (gap > 1e9 * Bounds(batch).dgamma(batch.dy)).all()


@pytest.mark.statement("P2g")
def test_local_statistics_lose_all_of_a_gradient_that_lies_between_replicas() -> None:
    """Each shard is constant: its own x_hat is 0, the global one is not."""
    x = np.array([[1.0], [1.0], [3.0], [3.0]])
    dy = np.array([[0.0], [0.0], [1.0], [1.0]])
    packed = synchronised.two_round([x[:2], x[2:]])
    assert packed.tolist() == [[2.0], [1.0]]
    at_global = [synchronised.parameter_gradients(dy[s], x[s], packed, 0.0)[0, 0] for s in (slice(2), slice(2, 4))]
    own = np.array([[3.0], [0.0]])
    assert at_global == [0.0, 2.0]
    assert synchronised.parameter_gradients(dy[2:], x[2:], own, 1e-5)[0, 0] == 0.0


@pytest.mark.statement("R1")
@holds_for(batches(most=1))
def test_one_replica_has_the_plain_forward_bit_for_bit(batch: Batch) -> None:
    packed = synchronised.two_round([batch.x])
    plain = reference.batch_norm_fwd(batch.x, batch.gamma, batch.beta, batch.eps)
    assert np.array_equal(packed, np.stack([plain.mean, plain.var]))
    assert np.array_equal(synchronised.one_round([batch.x])[0], plain.mean)
    assert np.array_equal(forward(batch, packed)[0], plain.y)


@pytest.mark.statement("R1")
@holds_for(batches(most=1))
def test_one_replica_has_its_own_means_back_bit_for_bit(batch: Batch) -> None:
    """The synchronised backward without its reduction, and the plain parameter gradients."""
    packed = synchronised.two_round([batch.x])
    terms = synchronised.gradient_means(batch.dy, batch.x, packed, batch.gamma, batch.eps)
    alone = synchronised.input_gradient(batch.dy, batch.x, terms, batch.gamma, batch.eps)
    assert np.array_equal(backward(batch, batch.dy)[0], alone)
    plain = global_backward(batch, batch.dy)
    assert np.array_equal(sums(batch, batch.dy, packed)[0], np.stack([plain.dgamma.value, plain.dbeta.value]))
    assert_within(alone, plain.dx.value, Bounds(batch).dx(batch.dy))


@pytest.mark.statement("P1", "P2")
@holds_for(st.tuples(batches(most=3), st.integers(0, 3)))
def test_an_empty_shard_changes_nothing(case: tuple[Batch, int]) -> None:
    """Bit for bit: it weighs 0, and adds 0, even where its own mean would be NaN."""
    batch, place = case
    at = min(place, len(batch.sizes))
    more = replace(batch, sizes=(*batch.sizes[:at], 0, *batch.sizes[at:]))
    packed = synchronised.one_round(more.shards(more.x))
    assert np.array_equal(packed, synchronised.one_round(batch.shards(batch.x)))
    parts = forward(more, packed)
    assert parts[at].size == 0 and np.array_equal(np.concatenate(parts), np.concatenate(forward(batch, packed)))
    with_empty, without = (np.concatenate(backward(b, b.dy)) for b in (more, batch))
    assert_within(with_empty, without, Bounds(batch).dx(batch.dy))
