# SPDX-License-Identifier: Apache-2.0
"""Batches in shards for property tests, and how far two float64 evaluations of one formula may be apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nki_bn.reference import Array, Float64

# Half a unit of float64, relative.
UNIT = 2.0**-53
EXAMPLES = 60
# Property name -> (check, strategy): what the nightly run repeats with more examples.
PROPERTIES: dict[str, tuple[Callable[[Any], None], st.SearchStrategy[Any]]] = {}


def holds_for(strategy: st.SearchStrategy[Any]) -> Callable[[Callable[[Any], None]], Callable[[], None]]:
    """A test of one argument, for examples from ``strategy``."""

    def wrap(check: Callable[[Any], None]) -> Callable[[], None]:
        PROPERTIES[f"{check.__module__}.{check.__name__}"] = (check, strategy)
        test: Callable[[], None] = settings(max_examples=EXAMPLES, deadline=None)(given(strategy)(check))
        return test

    return wrap


@dataclass(frozen=True)
class Batch:
    """A global batch and how many examples each replica has: x, dy, residual [N, C, ...], gamma, beta [C], float64."""

    x: Float64
    dy: Float64
    residual: Float64
    gamma: Float64
    beta: Float64
    sizes: tuple[int, ...]
    eps: float = 1e-5

    @property
    def channels(self) -> int:
        """C."""
        return int(self.x.shape[1])

    @property
    def total(self) -> int:
        """Values per channel."""
        return int(self.x.size // self.channels)

    @property
    def counts(self) -> list[int]:
        """Values per channel of every replica."""
        return [size * self.total // len(self.x) for size in self.sizes]

    def shards(self, array: Array) -> list[Array]:
        """``array`` [N, ...] cut into the replicas' parts."""
        return shard(array, self.sizes)


def shard(array: Array, sizes: tuple[int, ...]) -> list[Array]:
    """``array`` cut along its first dimension into parts of these sizes."""
    assert sum(sizes) == len(array)
    return np.split(array, np.cumsum(sizes)[:-1])


@st.composite
def shapes(draw: st.DrawFn, examples: int) -> tuple[int, ...]:
    """[N, C, ...] of rank 2 to 5."""
    channels = draw(st.integers(1, 4))
    return examples, channels, *draw(st.lists(st.integers(1, 4), max_size=3))


@st.composite
def sizes(draw: st.DrawFn, most: int = 8) -> tuple[int, ...]:
    """Examples per replica: equal, or not, when some may have none."""
    replicas = draw(st.integers(1, most))
    if draw(st.booleans()):
        return (draw(st.integers(1, 3)),) * replicas
    uneven = draw(st.lists(st.integers(0, 3), min_size=replicas, max_size=replicas))
    return tuple(uneven) if sum(uneven) else (1, *uneven[1:])


def normal_batch(
    shape: tuple[int, ...], parts: tuple[int, ...], seed: int, mean: float = 0.0, std: float = 1.0
) -> Batch:
    """Normal values; some gammas are 0 or negative, channel means differ by deviations."""
    rng = np.random.default_rng(seed)
    channels = shape[1]
    centre = (mean + std * rng.standard_normal(channels)).reshape(1, -1, *[1] * (len(shape) - 2))
    x = centre + std * rng.standard_normal(shape)
    gamma = np.round(rng.standard_normal(channels), 1)
    return Batch(x, rng.standard_normal(shape), rng.standard_normal(shape), gamma, rng.standard_normal(channels), parts)


@st.composite
def batches(draw: st.DrawFn, most: int = 8, parts: st.SearchStrategy[tuple[int, ...]] | None = None) -> Batch:
    """A :class:`Batch` on 1 to ``most`` replicas, or on such ``parts``."""
    chosen = draw(sizes(most) if parts is None else parts)
    shape = draw(shapes(sum(chosen)))
    mean = draw(st.sampled_from([0.0, 1.0, -30.0, 1e3]))
    std = draw(st.sampled_from([1.0, 0.01, 20.0]))
    return normal_batch(shape, chosen, draw(st.integers(0, 2**32 - 1)), mean, std)


def equal_parts(most: int = 8) -> st.SearchStrategy[tuple[int, ...]]:
    """The same number of examples on each of 1 to ``most`` replicas."""
    return st.builds(lambda size, replicas: (size,) * replicas, st.integers(1, 3), st.integers(1, most))


def rounding(operations: int) -> float:
    """Share of the terms by which two evaluations may differ that have at most ``operations`` roundings in a row."""
    return 2 * operations * UNIT


class Bounds:
    """How far two float64 evaluations of batch norm on ``batch`` may differ, whatever their order of sums.

    Each has at most N - 1 roundings in a sum of N values per channel, and fewer than 64 in what follows (merging the
    moments of eight replicas: six each): an error of (N + 64) half units of the terms, twice for two evaluations. An
    error of the statistics goes on into what is made of them, to first order.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._axes = (0, *range(2, batch.x.ndim))
        self.error = rounding(batch.total + 64)
        self._mean, self._var = batch.x.mean(self._axes), batch.x.var(self._axes)
        self._rstd = 1 / np.sqrt(self._var + batch.eps)
        self._normalised = np.abs(batch.x - self._wide(self._mean)) * self._wide(self._rstd)
        self.mean = self.error * np.sqrt(self._mean**2 + self._var)
        # Of a sum of squares around a mean that is off, within shards and between them.
        self.var = self.error * self._var + 2 * np.sqrt(self._var) * self.mean + self.mean**2
        # A value that should be 0 may be the mean's error, amplified by rstd.
        self._root = self.var / (2 * (self._var + batch.eps)) + self.error
        self._normalisation = self._wide(self._rstd * self.mean) + self._normalised * self._wide(self._root)

    def _wide(self, values: Float64) -> Float64:
        return values.reshape(1, -1, *[1] * (self._batch.x.ndim - 2))

    def _sum(self, terms: Float64) -> Float64:
        total: Float64 = terms.sum(self._axes)
        return total

    @property
    def y(self) -> Float64:
        """Of a forward, statistics included."""
        gamma, beta = self._wide(np.abs(self._batch.gamma)), self._wide(np.abs(self._batch.beta))
        bound: Float64 = gamma * self._normalisation + self.error * (gamma * self._normalised + beta)
        return bound

    def dbeta(self, dy: Float64) -> Float64:
        """Of sum dy."""
        return self.error * self._sum(np.abs(dy))

    def dgamma(self, dy: Float64) -> Float64:
        """Of sum dy*x_hat."""
        size = np.abs(dy)
        return self._sum(size * self._normalisation) + self.error * self._sum(size * self._normalised)

    def dx(self, dy: Float64) -> Float64:
        """Of the input gradient with batch statistics."""
        total = self._batch.total
        plain = self._wide(self._sum(np.abs(dy)) / total)
        correlated = self._wide(self._sum(np.abs(dy) * self._normalised) / total)
        terms = np.abs(dy) + plain + self._normalised * correlated
        own = self._wide(self._root) * terms + self._normalisation * correlated
        through_sums = self._wide(self.dbeta(dy) / total) + self._normalised * self._wide(self.dgamma(dy) / total)
        bound: Float64 = self._wide(np.abs(self._batch.gamma) * self._rstd) * (own + through_sums)
        return bound


def assert_within(got: Array, want: Array, bound: Array | float) -> None:
    """Assert |got - want| <= bound, element by element."""
    assert got.shape == want.shape
    excess = np.abs(got - want) - bound
    assert (excess <= 0).all(), f"beyond its bound by up to {excess.max():.3e}"
