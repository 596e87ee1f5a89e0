# SPDX-License-Identifier: Apache-2.0
"""Batch norm in a StableHLO function: the plain nodes, and the three sites on R replicas that take their place.

x, dy, y and dx are [n, C, ...] of rank 2 to 5 in float32, float16 or bfloat16, on every replica alike; columns are [C]
float32, as is all arithmetic. With R = 1 a site is the plain node, to the byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from nki_bn.problem import Problem, require_eps, require_flag
from nki_bn.stablehlo.graph import Graph
from nki_bn.stablehlo.value import Type, Value, number
from nki_bn.synchronised.exchange import (
    Moments,
    backward_name,
    check_mode,
    forward_names,
    global_moments,
    global_sums,
    moved,
    unbiased,
)


@dataclass(frozen=True)
class Options:
    """What the sites of one layer have in common.

    Args:
        mode: "two_round" (two all-reduces in the forward) or "one_round" (one all-gather).
        eps: added to the variance.
        fuse_relu: the layer ends in a ReLU.

    Raises:
        TypeError, ValueError: one is not accepted.
    """

    mode: str = "two_round"
    eps: float = 1e-5
    fuse_relu: bool = False

    def __post_init__(self) -> None:
        check_mode(self.mode)
        require_eps(self.eps, training=True)
        require_flag("fuse_relu", self.fuse_relu)


PLAIN = Options()


class SiteForward(NamedTuple):
    """What a forward emitted.

    Attributes:
        y: like x.
        statistics: mean and biased variance [C], and the number [1] of values per channel, of the global batch: what
            was reduced, for the other sites and the running statistics.
        relu_mask: bool like x, true where the ReLU let a value pass; None without one.
        valid: bool like x, false in what only fills a shard up; None if nothing does.
        options: those of the layer.
    """

    y: Value
    statistics: Moments
    relu_mask: Value | None
    valid: Value | None
    options: Options


class SiteSums(NamedTuple):
    """dgamma and dbeta [C] of this replica's shard at the global statistics."""

    dgamma: Value
    dbeta: Value


def batch_norm_training(
    x: Value, gamma: Value, beta: Value | None = None, options: Options = PLAIN, residual: Value | None = None
) -> SiteForward:
    """The plain forward: one ``stablehlo.batch_norm_training``, then the residual, then the ReLU, as asked.

    Args:
        x: the batch.
        gamma, beta: [C]; None for a beta of 0.
        options: of the layer; the mode plays no part.
        residual: like x, added before the ReLU.

    Raises:
        TypeError, ValueError: a shape or dtype is not accepted; there is no more than one value per channel.
    """
    graph, problem = _checked(x, gamma=gamma, beta=beta, residual=residual)
    _require_values(problem.count)
    wide, column = x.to("float32"), gamma.type
    operands = wide, gamma, _beta(beta, gamma)
    z, mean, var = graph.emit("batch_norm_training", operands, (wide.type, column, column), _attributes(options))
    y, mask = _finished(z, x, residual, options)
    return SiteForward(y, Moments(mean, var, graph.constant(problem.count, (1,))), mask, None, options)


def batch_norm_grad(dy: Value, x: Value, gamma: Value, forward: SiteForward) -> tuple[Value, Value, Value]:
    """dx, dgamma and dbeta of the plain backward: one ``stablehlo.batch_norm_grad`` behind the gradient of the ReLU.

    Arguments and errors as for :func:`bn_back_site`.
    """
    graph, _ = _checked(x, gamma=gamma, dy=dy, y=forward.y)
    wide, column = x.to("float32"), gamma.type
    operands = wide, gamma, *forward.statistics[:2], _passed(dy, forward)
    results = wide.type, column, column
    dx, dgamma, dbeta = graph.emit("batch_norm_grad", operands, results, _attributes(forward.options))
    return dx.to(x.dtype), dgamma, dbeta


def bn_fwd_site(
    x: Value,
    gamma: Value,
    beta: Value | None,
    tag: str,
    options: Options = PLAIN,
    residual: Value | None = None,
    examples: Value | None = None,
) -> SiteForward:
    """Normalise a shard with the statistics of the global batch.

    Args:
        x, gamma, beta, residual: as for :func:`batch_norm_training`; x is this replica's shard.
        tag: the name of the layer's gamma. The collectives are named ``{tag}mu`` and ``{tag}var``, or ``{tag}mom``.
        options: of the layer.
        examples: [1] float32, how many of the first examples of x there are; the rest only fills a smaller shard up,
            may be anything, and is 0 in y and dx. None for all. All replicas together need more than one value.

    Raises:
        TypeError, ValueError: as there; the tag was used before, is no SSA name, or makes a parameter's name; examples
            are given for one replica, whose node has no place for them.
    """
    graph, problem = _checked(x, gamma=gamma, beta=beta, residual=residual, examples=examples)
    _require_values(problem.count * graph.size)
    if graph.size <= 1 and examples is not None:
        raise ValueError("examples is given with one replica; accepted: None, as its batch is of its own size")
    graph.claim(tag, "forward", forward_names(tag, options.mode))
    if graph.size <= 1:
        return batch_norm_training(x, gamma, beta, options, residual)
    valid = None if examples is None else _first(examples, x)
    total = graph.constant(problem.count, (1,)) if examples is None else examples * problem.spatial
    wide = _wide(x, valid)
    statistics = global_moments(_moments(wide, valid, total), graph, tag, options.mode)
    scale = gamma * _rstd(statistics, options)
    z = (wide - _column(statistics.mean, x)) * _column(scale, x) + _column(_beta(beta, gamma), x)
    y, mask = _finished(_kept(z, valid), x, residual, options, valid)
    return SiteForward(y, statistics, mask, valid, options)


def bn_gamma_site(dy: Value, x: Value, gamma: Value, forward: SiteForward) -> SiteSums:
    """dgamma and dbeta of a shard at the global statistics: no collective, and nothing is divided.

    They add up to those of the global batch; data parallelism's own all-reduce of gradients does that.
    Arguments and errors as for :func:`bn_back_site`.
    """
    graph, _ = _checked(x, gamma=gamma, dy=dy, y=forward.y)
    if graph.size <= 1:
        return SiteSums(*batch_norm_grad(dy, x, gamma, forward)[1:])
    passed = _passed(dy, forward)
    products = (passed * _centred(x, forward)).sum(_axes(x))
    return SiteSums(products * _rstd(forward.statistics, forward.options), passed.sum(_axes(x)))


def bn_back_site(
    dy: Value, x: Value, gamma: Value, tag: str, forward: SiteForward, sums: SiteSums | None = None
) -> Value:
    """The input gradient of a shard: that of the global batch, cut.

    Args:
        dy: gradient of y, like x.
        x, gamma, tag: those of the forward. The collective is named ``{tag}dst``.
        forward: what :func:`bn_fwd_site` returned.
        sums: what :func:`bn_gamma_site` returned; None emits them here. One replica does without.

    Raises:
        TypeError, ValueError: as :func:`bn_fwd_site`.
    """
    graph, _ = _checked(x, gamma=gamma, dy=dy, y=forward.y)
    graph.claim(tag, "backward", (backward_name(tag),))
    if graph.size <= 1:
        return batch_norm_grad(dy, x, gamma, forward)[0]
    local = bn_gamma_site(dy, x, gamma, forward) if sums is None else sums
    dgamma, dbeta = global_sums(local.dgamma, local.dbeta, graph, tag)
    total = forward.statistics.total
    rstd = _rstd(forward.statistics, forward.options)
    through_sums = _column(dbeta / total, x) + _centred(x, forward) * _column(rstd * dgamma / total, x)
    dx = _column(gamma * rstd, x) * (_passed(dy, forward) - through_sums)
    return _kept(dx, forward.valid).to(x.dtype)


def running_statistics(mean: Value, var: Value, batch: Moments, momentum: float = 0.1) -> tuple[Value, Value]:
    """The running mean and variance [C] after a step with the statistics ``batch`` of a forward."""
    factor = unbiased(batch.total) * momentum
    return moved(mean, batch.mean, momentum, momentum), moved(var, batch.var, momentum, factor)


def _checked(x: Value, **given: Value | None) -> tuple[Graph, Problem]:
    """The graph of ``x`` and what is asked, if everything fits x."""
    problem = Problem(x.shape, x.dtype, lnc=1)
    column, count = Type((problem.channels,), "float32"), Type((1,), "float32")
    wanted = {"gamma": column, "beta": column, "examples": count}
    for name, value in given.items():
        if value is not None and value.type != wanted.get(name, x.type):
            raise ValueError(f"{name} is {value.type}; accepted: {wanted.get(name, x.type)}")
    return x.graph, problem


def _require_values(total: int) -> None:
    if total < 2:
        raise ValueError(f"x has {total} values per channel on all replicas together; accepted in training: 2 or more")


def _attributes(options: Options) -> str:
    return f"epsilon = {number(options.eps)} : f32, feature_index = 1 : i64"


def _first(examples: Value, x: Value) -> Value:
    """bool like ``x``, true in as many of its first examples."""
    (places,) = x.graph.emit("iota", (), (Type(x.shape, "float32"),), "iota_dimension = 0 : i64")
    return (examples - places).above_zero()


def _kept(values: Value, mask: Value | None) -> Value:
    return values if mask is None else values.where(mask)


def _wide(values: Value, valid: Value | None) -> Value:
    """``values`` as float32, and 0 where there are none."""
    return _kept(values.to("float32"), valid)


def _finished(
    z: Value, x: Value, residual: Value | None, options: Options, valid: Value | None = None
) -> tuple[Value, Value | None]:
    """y of z, with the residual and the ReLU, and the mask, which is of the value before it is rounded."""
    if residual is not None:
        z = z + _wide(residual, valid)
    if not options.fuse_relu:
        return z.to(x.dtype), None
    return z.clip(0.0).to(x.dtype), z.above_zero()


def _passed(dy: Value, forward: SiteForward) -> Value:
    """dy as float32 where the ReLU let values pass, and 0 elsewhere."""
    return _kept(_wide(dy, forward.valid), forward.relu_mask)


def _centred(x: Value, forward: SiteForward) -> Value:
    """x as float32 less the mean."""
    return _wide(x, forward.valid) - _column(forward.statistics.mean, x)


def _moments(x: Value, valid: Value | None, total: Value) -> Moments:
    """Of a shard: the mean by distances from the first value, so that what is added up is no larger than the spread."""
    start = x[(slice(1), slice(None), *(slice(1) for _ in x.shape[2:]))].reshape((x.shape[1],))
    divisor = total.clip(1)
    mean = start + _kept(x - _column(start, x), valid).sum(_axes(x)) / divisor
    var = (_kept(x - _column(mean, x), valid) ** 2).sum(_axes(x)) / divisor
    return Moments(mean, var, total)


def _rstd(statistics: Moments, options: Options) -> Value:
    made: Value = (statistics.var + options.eps).rsqrt()
    return made


def _beta(beta: Value | None, gamma: Value) -> Value:
    return gamma.graph.constant(0.0, gamma.shape) if beta is None else beta


def _column(values: Value, x: Value) -> Value:
    """``values`` [C] for every element of ``x``."""
    return values.broadcast(x.shape, (1,))


def _axes(x: Value) -> tuple[int, ...]:
    """All axes of ``x`` but that of the channels."""
    return (0, *range(2, len(x.shape)))
