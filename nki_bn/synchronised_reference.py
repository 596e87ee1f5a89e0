# SPDX-License-Identifier: Apache-2.0
"""Synchronised batch norm in float64: what replicas compute alone, and what they reduce.

A batch is a list of *shards*, one [n, C, ...] array per replica; a shard may be empty. Replicas weigh as many values as
they hold. What travels is *packed*, one row of C values per quantity:

    [mu | var]                                                  forward, running statistics, gradients of gamma and beta
    [mu | var | mean(gamma*dy) | mean(x_hat*gamma*dy)]          backward
    [mu | m2]                                                   the other reading of the forward: m2 = var + mu^2

Functions on one shard are what one replica does; functions on shards have the reductions in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np

from nki_bn import reference
from nki_bn.reference import Array, Float64

# Values per channel, mean, and sum of squared deviations.
Moments = tuple[int, Float64, Float64]


def count(x: Array) -> int:
    """Values per channel in ``x`` [n, C, ...]."""
    return int(x.size // x.shape[1])


def all_reduce_mean(values: Sequence[Float64], counts: Sequence[int]) -> Float64:
    """The mean of ``values``, one per replica, weighted with ``counts``: what every replica gets.

    Replicas are added in pairs, then pairs of pairs: the mean of equal values is exactly that value when they weigh the
    same and their number is a power of two.
    """
    total = max(1, sum(counts))
    terms = [value * (number / total) for value, number in zip(values, counts, strict=True)]
    while len(terms) > 1:
        terms = [terms[i] + terms[i + 1] if i + 1 < len(terms) else terms[i] for i in range(0, len(terms), 2)]
    return terms[0]


def local_statistics(x: Array) -> Float64:
    """[mean | var] of one shard; zeros if it is empty, as it then weighs nothing."""
    return np.stack(reference.statistics(x))


def variance_around(x: Array, center: Float64) -> Float64:
    """Mean of (x - center)^2 of one shard as var + (mean - center)^2: Chan's rule."""
    mean, var = local_statistics(x)
    around: Float64 = var + (mean - center) ** 2
    return around


def two_round(shards: Sequence[Array]) -> Float64:
    """[mu | var] of the global batch by two all-reduces: of the means, then of the variances around their mean."""
    counts = [count(x) for x in shards]
    mu = all_reduce_mean([local_statistics(x)[0] for x in shards], counts)
    return np.stack([mu, all_reduce_mean([variance_around(x, mu) for x in shards], counts)])


def one_round(shards: Sequence[Array]) -> Float64:
    """[mu | var] of the global batch from one all-gather of counted moments, which merge by Chan's rule."""
    total, mean, squares = reduce(merge, map(local_moments, shards))
    return np.stack([mean, squares / max(1, total)])


def local_moments(x: Array) -> Moments:
    """Counted moments of one shard."""
    mean, var = local_statistics(x)
    return count(x), mean, var * count(x)


def merge(one: Moments, other: Moments) -> Moments:
    """Counted moments of the union."""
    total = max(1, one[0] + other[0])
    distance = other[1] - one[1]
    mean = one[1] + distance * (other[0] / total)
    return one[0] + other[0], mean, one[2] + other[2] + distance**2 * (one[0] * other[0] / total)


def second_moments(shards: Sequence[Array]) -> Float64:
    """[mu | m2] of the global batch: both are plain weighted means, so one all-reduce is enough."""
    local = [local_statistics(x) for x in shards]
    packed = [np.stack([mean, var + mean**2]) for mean, var in local]
    return all_reduce_mean(packed, [count(x) for x in shards])


def from_second_moments(packed: Float64) -> Float64:
    """[mu | var] from [mu | m2]; the difference cancels where the mean is large."""
    mu, m2 = packed
    return np.stack([mu, m2 - mu**2])


def forward(x: Array, packed: Float64, gamma: Array | None, beta: Array | None, eps: float = 1e-5) -> Float64:
    """y of one shard from [mu | var]."""
    return reference.pre_activation(x, packed[0], packed[1], gamma, beta, eps).value


def update_running(running: Float64, packed: Float64, total: int, momentum: float) -> Float64:
    """New [running mean | running variance] after a batch of ``total`` > 1 values with [mu | var]."""
    unbiased = np.array([[1.0], [total / (total - 1)]])
    new: Float64 = (1 - momentum) * running + momentum * unbiased * packed
    return new


def parameter_gradients(dy: Array, x: Array, packed: Float64, eps: float = 1e-5) -> Float64:
    """[dgamma | dbeta] of one shard: its own sums, at the global statistics."""
    local = reference.batch_norm_bwd(dy, x, packed[0], packed[1], None, eps, training=False)
    return np.stack([local.dgamma.value, local.dbeta.value])


def gradient_means(dy: Array, x: Array, packed: Float64, gamma: Float64, eps: float = 1e-5) -> Float64:
    """[mu | var | mean(gamma*dy) | mean(x_hat*gamma*dy)] of one shard, from [mu | var]: what it gives to the reduction.

    The first half is the same on every replica, and comes back as it went.
    """
    dgamma, dbeta = parameter_gradients(dy, x, packed, eps) / max(1, count(x))
    return np.stack([*packed, gamma * dbeta, gamma * dgamma])


def backward_terms(
    dy: Sequence[Array], shards: Sequence[Array], packed: Float64, gamma: Float64, eps: float = 1e-5
) -> Float64:
    """The one all-reduce of the backward: ``gradient_means`` of the global batch."""
    local = [gradient_means(g, x, packed, gamma, eps) for g, x in zip(dy, shards, strict=True)]
    return all_reduce_mean(local, [count(x) for x in shards])


def input_gradient(dy: Array, x: Array, terms: Float64, gamma: Float64, eps: float = 1e-5) -> Float64:
    """dx of one shard from [mu | var | mean(gamma*dy) | mean(x_hat*gamma*dy)] of the global batch."""
    mu, var, plain, correlated = (reference.column(row, x) for row in terms)
    rstd = 1 / np.sqrt(var + eps)
    normalised = (x - mu) * rstd
    dx: Float64 = rstd * (reference.column(gamma, x) * dy - plain - normalised * correlated)
    return dx
