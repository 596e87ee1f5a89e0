# SPDX-License-Identifier: Apache-2.0
"""Means and variances over replicas, in float64: what averages, what does not, and Chan's rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from property_cases import UNIT, Batch, Bounds, assert_within, batches, holds_for, normal_batch, rounding

from nki_bn import reference
from nki_bn import synchronised_reference as synchronised
from nki_bn.reference import Float64

MOMENTUM = 0.3


def local_statistics(batch: Batch) -> list[Float64]:
    return [synchronised.local_statistics(x) for x in batch.shards(batch.x)]


def mean_of(batch: Batch, values: list[Float64]) -> Float64:
    return synchronised.all_reduce_mean(values, batch.counts)


def global_mean(terms: Float64) -> Float64:
    mean: Float64 = reference.channel_sum(terms) * terms.shape[1] / terms.size
    return mean


@pytest.mark.statement("P1b")
@holds_for(batches())
def test_replica_means_average_to_the_global_mean(batch: Batch) -> None:
    got = mean_of(batch, [mean for mean, _ in local_statistics(batch)])
    assert_within(got, global_mean(batch.x), Bounds(batch).mean)


@pytest.mark.statement("P1b")
@holds_for(batches())
def test_second_moments_average_too(batch: Batch) -> None:
    want = global_mean(batch.x**2)
    bounds = Bounds(batch)
    # Each replica's mean is off by its share of its own root mean square: squared, by twice that share of m2.
    assert_within(synchronised.second_moments(batch.shards(batch.x))[1], want, bounds.var + 3 * bounds.error * want)


@pytest.mark.statement("P1b")
def test_variances_do_not_average() -> None:
    """Two shards without any spread of their own: all of the variance lies between them."""
    shards = [np.zeros((2, 1)), np.full((2, 1), 2.0)]
    local = [synchronised.local_statistics(x)[1] for x in shards]
    assert synchronised.all_reduce_mean(local, [2, 2]) == 0
    assert reference.statistics(np.concatenate(shards))[1] == 1


@pytest.mark.statement("P1b")
@pytest.mark.parametrize("parts", [(3, 3), (1, 5), (2, 2, 2, 2)], ids=str)
def test_the_average_of_variances_lacks_what_lies_between_replicas(parts: tuple[int, ...]) -> None:
    batch = normal_batch((sum(parts), 3, 5), parts, seed=1)
    local = local_statistics(batch)
    gap = reference.statistics(batch.x)[1] - mean_of(batch, [var for _, var in local])
    between = mean_of(batch, [(mean - batch.x.mean((0, 2))) ** 2 for mean, _ in local])
    bounds = Bounds(batch)
    assert_within(gap, between, 2 * bounds.var)
    assert (gap > 1e9 * bounds.var).all()


@pytest.mark.statement("Chan")
@holds_for(batches())
def test_variances_around_the_global_mean_average_to_the_global_variance(batch: Batch) -> None:
    mean, var = reference.statistics(batch.x)
    around = [synchronised.variance_around(x, mean) for x in batch.shards(batch.x)]
    assert_within(mean_of(batch, around), var, Bounds(batch).var)


@pytest.mark.statement("Chan")
@holds_for(batches())
def test_two_rounds_and_one_round_give_the_global_statistics(batch: Batch) -> None:
    bounds = Bounds(batch)
    for packed in (synchronised.two_round(batch.shards(batch.x)), synchronised.one_round(batch.shards(batch.x))):
        assert_within(packed, np.stack(reference.statistics(batch.x)), np.stack([bounds.mean, bounds.var]))


@pytest.mark.statement("Chan")
@holds_for(batches())
def test_the_second_moment_is_variance_and_squared_mean(batch: Batch) -> None:
    packed = synchronised.second_moments(batch.shards(batch.x))
    mean, var = reference.statistics(batch.x)
    bounds = Bounds(batch)
    m2_error = bounds.var + 3 * bounds.error * (mean**2 + var)
    assert_within(packed[1], var + mean**2, m2_error)
    # Taking mu^2 away again leaves the error of m2, and that of mu twice: the cancellation this reading suffers from.
    cancelled = m2_error + 2 * np.abs(mean) * bounds.mean + bounds.error * mean**2
    assert_within(synchronised.from_second_moments(packed), np.stack([mean, var]), np.stack([bounds.mean, cancelled]))


@pytest.mark.statement("Chan")
def test_the_second_moment_form_loses_what_the_variance_form_keeps() -> None:
    """Mean 1e8 and variance 1/4: mu^2 has no digits left for it in float64."""
    x = 1e8 + np.array([[0.0], [1.0], [0.0], [1.0]])
    shards = [x[:2], x[2:]]
    assert synchronised.two_round(shards)[1] == 0.25
    assert abs(synchronised.from_second_moments(synchronised.second_moments(shards))[1, 0] - 0.25) >= 0.25


POINTWISE: dict[str, Callable[[Float64, Float64], Float64]] = {
    "product": lambda dy, x: dy * x,
    "larger": np.maximum,
    "masked": lambda dy, x: np.where(x > 0, dy, 0.0),
    "distance": lambda dy, x: np.sqrt(dy**2 + x**2),
}


@pytest.mark.statement("P2b")
@holds_for(st.tuples(batches(), st.sampled_from(sorted(POINTWISE))))
def test_means_of_pointwise_functions_of_two_rows_average(case: tuple[Batch, str]) -> None:
    batch, name = case
    function = POINTWISE[name]
    local = [
        global_mean(function(dy, x)) if x.size else np.zeros(batch.channels)
        for dy, x in zip(batch.shards(batch.dy), batch.shards(batch.x), strict=True)
    ]
    terms = function(batch.dy, batch.x)
    assert_within(mean_of(batch, local), global_mean(terms), Bounds(batch).error * global_mean(np.abs(terms)))


@pytest.mark.statement("P2b")
@holds_for(batches())
def test_the_two_means_of_the_backward_average(batch: Batch) -> None:
    """mean(gamma*dy) and mean(x_hat*gamma*dy), at the same statistics on every replica."""
    mean, var = reference.statistics(batch.x)
    packed = np.stack([mean, var])
    columns = batch.gamma, batch.eps
    whole = synchronised.gradient_means(batch.dy, batch.x, packed, *columns)
    reduced = synchronised.backward_terms(batch.shards(batch.dy), batch.shards(batch.x), packed, *columns)
    normalised = reference.pre_activation(batch.x, mean, var, None, None, batch.eps).value
    sizes = (np.abs(batch.gamma) * global_mean(np.abs(batch.dy * factor)) for factor in (1.0, normalised))
    assert_within(reduced[2:], whole[2:], Bounds(batch).error * np.stack(list(sizes)))


@pytest.mark.statement("frozen")
@holds_for(st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(1, 3), st.integers(0, 2**32 - 1)))
def test_equal_values_on_a_power_of_two_of_replicas_come_back_exactly(case: tuple[int, int, int]) -> None:
    replicas, size, seed = case
    rng = np.random.default_rng(seed)
    value = rng.standard_normal(50) * 10.0 ** rng.integers(-100, 100, 50)
    assert np.array_equal(synchronised.all_reduce_mean([value] * replicas, [size] * replicas), value)


@pytest.mark.statement("frozen")
@pytest.mark.parametrize(("replicas", "exact"), [(2, True), (4, True), (8, False)])
def test_one_replica_after_the_other_is_exact_up_to_four(replicas: int, exact: bool) -> None:
    """Why replicas are added in pairs: a running sum of eight equal values rounds on its way."""
    value = np.random.default_rng(5).standard_normal(1000)
    running = sum(value / replicas for _ in range(replicas))
    assert np.array_equal(running, value) == exact


@pytest.mark.statement("frozen")
@holds_for(batches())
def test_equal_values_come_back_within_rounding_whatever_the_weights(batch: Batch) -> None:
    """One rounding per weight, product, and addition."""
    value = np.stack([batch.gamma, batch.beta])
    got = synchronised.all_reduce_mean([value] * len(batch.sizes), batch.counts)
    assert_within(got, value, (len(batch.sizes) + 2) * UNIT * np.abs(value))


@pytest.mark.statement("frozen")
@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
def test_the_statistics_in_the_backward_reduction_come_back_as_they_went(replicas: int) -> None:
    batch = normal_batch((2 * replicas, 3, 5), (2,) * replicas, seed=2)
    packed = synchronised.two_round(batch.shards(batch.x))
    terms = synchronised.backward_terms(batch.shards(batch.dy), batch.shards(batch.x), packed, batch.gamma)
    assert np.array_equal(terms[:2], packed)


def torch_running(x: Float64, running: Float64, momentum: float) -> Float64:
    mean, var = (torch.tensor(row) for row in running)
    torch.nn.functional.batch_norm(torch.tensor(x), mean, var, training=True, momentum=momentum)
    return np.stack([mean.numpy(), var.numpy()])


@pytest.mark.statement("run")
@holds_for(batches().filter(lambda batch: batch.total > 1))
def test_running_statistics_of_a_synchronised_step_are_those_of_the_global_batch(batch: Batch) -> None:
    """Every replica makes them from the same reduced values."""
    running = np.stack([batch.beta, np.abs(batch.gamma)])
    packed = synchronised.two_round(batch.shards(batch.x))
    got = synchronised.update_running(running, packed, batch.total, MOMENTUM)
    bounds, (mean, var) = Bounds(batch), reference.statistics(batch.x)
    unbiased = batch.total / (batch.total - 1)
    statistics = MOMENTUM * np.stack([bounds.mean, unbiased * bounds.var])
    terms = np.abs(running) + MOMENTUM * np.stack([np.abs(mean), unbiased * var])
    assert_within(got, torch_running(batch.x, running, MOMENTUM), statistics + rounding(8) * terms)


@pytest.mark.statement("run")
def test_one_value_per_replica() -> None:
    """1 and 3: mean 2, variance 1, and 2 when it is made unbiased."""
    packed = synchronised.two_round([np.ones((1, 1)), np.full((1, 1), 3.0)])
    assert packed.tolist() == [[2.0], [1.0]]
    running: Any = synchronised.update_running(np.array([[0.0], [1.0]]), packed, 2, 0.1)
    assert running.ravel() == pytest.approx([0.2, 1.1])
