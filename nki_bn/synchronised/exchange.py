# SPDX-License-Identifier: Apache-2.0
"""What replicas exchange, and what they make of it, on NumPy arrays, torch tensors and values of StableHLO.

Columns are [C] float32, counts [1]. A replica weighs as many values per channel as it holds; one that holds none gives
zeros. Nothing here depends on a value, so that nothing has to be read from a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from nki_bn.problem import SYNC_MODES

MODES = SYNC_MODES


class Group(Protocol):
    """The replicas that share a batch; every one calls the same collectives in the same order."""

    @property
    def size(self) -> int:
        """R, the number of replicas."""

    def join(self, parts: Sequence[Any]) -> Any:
        """One array [sum of K] of arrays [K]."""

    def all_reduce(self, name: str, values: Any) -> Any:
        """The sum over all replicas of ``values`` [K], on each of them."""

    def all_gather(self, name: str, values: Any) -> Any:
        """[R, K]: ``values`` [K] of all replicas, on each of them."""


class Moments(NamedTuple):
    """Mean, biased variance [C] and number [1] of the values per channel: of a shard, or of the global batch."""

    mean: Any
    var: Any
    total: Any


def check_mode(mode: str) -> str:
    """``mode`` if it is one of ``MODES``.

    Raises:
        ValueError: it is not.
    """
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}; accepted: {', '.join(map(repr, MODES))}")
    return mode


def forward_names(tag: str, mode: str) -> tuple[str, ...]:
    """The names of the collectives of a forward, in order."""
    return (f"{tag}mu", f"{tag}var") if mode == "two_round" else (f"{tag}mom",)


def backward_name(tag: str) -> str:
    """The name of the one collective of a backward."""
    return f"{tag}dst"


def global_moments(local: Moments, group: Group, tag: str, mode: str) -> Moments:
    """The moments of the global batch from those of every shard."""
    exchange = _in_two_rounds if mode == "two_round" else _in_one_round
    return exchange(local, group, forward_names(tag, mode))


def global_sums(dgamma: Any, dbeta: Any, group: Group, tag: str) -> tuple[Any, Any]:
    """The sums of the global batch from those of every shard, all taken at the global statistics.

    The packed form [mu | var | mean(gamma*dy) | mean(x_hat*gamma*dy)] without what every replica has already: the
    statistics, gamma and the count.
    """
    channels = len(dgamma)
    reduced = group.all_reduce(backward_name(tag), group.join([dgamma, dbeta]))
    return reduced[:channels], reduced[channels:]


def _in_two_rounds(local: Moments, group: Group, names: tuple[str, ...]) -> Moments:
    """First the means, and with them the counts; then the variances around the global mean."""
    channels = len(local.mean)
    weighted = group.all_reduce(names[0], group.join([local.mean * local.total, local.total]))
    total = weighted[channels:]
    mean = weighted[:channels] / _divisor(total)
    around = (local.var + (local.mean - mean) ** 2) * local.total
    return Moments(mean, group.all_reduce(names[1], around) / _divisor(total), total)


def _in_one_round(local: Moments, group: Group, names: tuple[str, ...]) -> Moments:
    """Counts, means and sums of squared deviations of all replicas, merged by Chan's rule."""
    channels = len(local.mean)
    rows = group.all_gather(names[0], group.join([local.total, local.mean, local.var * local.total]))
    counts, means, squares = rows[:, :1], rows[:, 1 : 1 + channels], rows[:, 1 + channels :]
    total = counts.sum(0)
    weights = counts / _divisor(total)
    first = (weights * means).sum(0)
    # Once more around the first result, which rounding left off: equal means come out as that mean.
    mean = first + (weights * (means - first)).sum(0)
    var = (squares + counts * (means - mean) ** 2).sum(0) / _divisor(total)
    return Moments(mean, var, total)


def moved(running: Any, batch: Any, momentum: float, factor: Any) -> Any:
    """(1 - momentum)*running + factor*batch, each product rounded, as the kernel does it."""
    return running * (1.0 - momentum) + batch * factor


def unbiased(total: Any) -> Any:
    """N/(N - 1) of ``total`` values, which are more than one."""
    return total / _divisor(total - 1)


def _divisor(total: Any) -> Any:
    """A number of values to divide by: that of none is 1."""
    return total.clip(1)
