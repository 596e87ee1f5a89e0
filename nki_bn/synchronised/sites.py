# SPDX-License-Identifier: Apache-2.0
"""The three sites of a synchronised batch norm, by the kernels: forward, input gradient, gradients of gamma and beta.

A replica calls them with its own shard. x, dy and y are [n, C, ...] as for ``nki_bn.batch_norm_fwd``, columns [C]
float32. With one replica they are the plain kernels, bit for bit. Else the forward reads x once for its moments and
once for y, as the plain ``two_read`` does: what happens between the rounds needs columns alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from nki_bn import execute, ops
from nki_bn.problem import Array, BackwardCase, ForwardCase, require_array, require_eps
from nki_bn.requests import prepare_backward, prepare_forward
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
from nki_bn.synchronised.groups import ArrayGroup

Parameters = Mapping[str, Array]


@dataclass(frozen=True)
class SiteOptions:
    """What the sites of one layer have in common.

    Args:
        beta: the name of its beta among the parameters; None for 0.
        mode: "two_round" (two all-reduces in the forward) or "one_round" (one all-gather).
        eps: added to the variance.
        fuse_relu: the layer ends in a ReLU.
        save_relu_mask: keep its mask for the backward; else that makes it again.
        lnc, target: see ``nki_bn.batch_norm_fwd``.

    Raises:
        ValueError: ``mode`` or ``eps`` is not accepted.
        TypeError: ``eps`` is no number, ``mode`` or ``beta`` no string.
    """

    beta: str | None = None
    mode: str = "two_round"
    eps: float = 1e-5
    fuse_relu: bool = False
    save_relu_mask: bool = True
    lnc: int | None = None
    target: str = "trn2"

    def __post_init__(self) -> None:
        check_mode(self.mode)
        require_eps(self.eps, training=True)
        if self.beta is not None and not isinstance(self.beta, str):
            raise TypeError(f"beta must be a string or None, got {type(self.beta).__name__}")


PLAIN = SiteOptions()


class Statistics(NamedTuple):
    """Of the global batch: mean and biased variance [C], and the number of values per channel."""

    mean: Array
    var: Array
    total: int


class SiteForward(NamedTuple):
    """What ``bn_fwd_site`` returns.

    Attributes:
        y: like x.
        packed: [mu | var], [2, C], as it was reduced; None with one replica, which reduces nothing.
        statistics: what x was normalised with, for the other sites and the running statistics.
        relu_mask: uint8 like x, or None.
        residual: what was added, if the mask has to be made again; else None.
    """

    y: Array
    packed: Array | None
    statistics: Statistics
    relu_mask: Array | None
    residual: Array | None


class SiteBackward(NamedTuple):
    """What ``bn_back_site`` returns: dx, and [mu | var | mean(gamma*dy) | mean(x_hat*gamma*dy)], [4, C], or None."""

    dx: Array
    packed: Array | None


class SiteSums(NamedTuple):
    """What ``bn_gamma_site`` returns: this replica's sums, [C], at the global statistics."""

    dgamma: Array
    dbeta: Array


def bn_fwd_site(
    x: Array,
    parameters: Parameters,
    group: ArrayGroup,
    tag: str,
    options: SiteOptions = PLAIN,
    residual: Array | None = None,
) -> SiteForward:
    """Normalise a shard with the statistics of the global batch.

    Args:
        x: this replica's shard; it may be empty.
        parameters: those of the whole model by name.
        group: the replicas. The collectives are named ``{tag}mu`` and ``{tag}var``, or ``{tag}mom``.
        tag: the name of the site's gamma.
        options: of the layer.
        residual: like x, added before the ReLU.

    Raises:
        KeyError: a parameter is not there.
        ValueError: the tag was used before in this step, or a collective has the name of a parameter; all replicas
            together have one value per channel; or as ``nki_bn.batch_norm_fwd``.
        TypeError: as there.
    """
    gamma, beta = _columns(parameters, tag, options)
    _claim(parameters, group, forward_names(tag, options.mode))
    case = ForwardCase(
        x, gamma, beta, None, None, 0.0, options.eps, True, options.fuse_relu, residual, None, options.save_relu_mask
    )
    if group.size > 1:
        statistics = _synchronised(case, group, tag, options)
        frozen = replace(case, running_mean=statistics.mean, running_var=statistics.var, training=False)
        out = ops.run_forward(prepare_forward(frozen, options.lnc, options.target))
        packed = np.stack([statistics.mean, statistics.var])
    else:
        out, packed = ops.run_forward(prepare_forward(case, options.lnc, options.target)), None
        statistics = Statistics(out.mean, out.var, x.size // x.shape[1])
    kept = residual if case.relu == "recompute" else None
    return SiteForward(out.y, packed, statistics, out.relu_mask, kept)


def bn_gamma_site(
    dy: Array, x: Array, parameters: Parameters, tag: str, forward: SiteForward, options: SiteOptions = PLAIN
) -> SiteSums:
    """dgamma and dbeta of a shard at the global statistics: no collective, and nothing is divided.

    They add up to those of the global batch; data parallelism's own all-reduce of gradients does that.
    Arguments and errors as for :func:`bn_back_site`.
    """
    case = _backward_case(dy, x, parameters, tag, forward, options)
    _, dgamma, dbeta = ops.run_backward(
        prepare_backward(case, ("dgamma", "dbeta"), lnc=options.lnc, target=options.target)
    )
    assert dgamma is not None and dbeta is not None
    return SiteSums(dgamma, dbeta)


def bn_back_site(
    dy: Array,
    x: Array,
    parameters: Parameters,
    group: ArrayGroup,
    tag: str,
    forward: SiteForward,
    sums: SiteSums | None = None,
    options: SiteOptions = PLAIN,
) -> SiteBackward:
    """The input gradient of a shard: that of the global batch, cut.

    Args:
        dy: gradient of y, like x.
        x, parameters, group, tag, options: as for :func:`bn_fwd_site`. The collective is named ``{tag}dst``.
        forward: what that returned.
        sums: what :func:`bn_gamma_site` returned; None computes them here. One replica does without.

    Raises:
        KeyError, TypeError, ValueError: as :func:`bn_fwd_site`.
    """
    _claim(parameters, group, (backward_name(tag),))
    case = _backward_case(dy, x, parameters, tag, forward, options)
    request = prepare_backward(case, ("dx",), lnc=options.lnc, target=options.target)
    if group.size <= 1:
        (dx, *_) = ops.run_backward(request)
        assert dx is not None
        return SiteBackward(dx, None)
    local = bn_gamma_site(dy, x, parameters, tag, forward, options) if sums is None else sums
    dgamma, dbeta = global_sums(local.dgamma, local.dbeta, group, tag)
    total = forward.statistics.total
    if request.problem.count:
        dx = execute.run_input_gradient(request.inputs, dgamma, dbeta, total, request.problem).reshape(x.shape)
    else:
        dx = np.zeros_like(x)
    scale = parameters[tag] / np.float32(max(1, total))
    return SiteBackward(dx, np.stack([forward.statistics.mean, forward.statistics.var, scale * dbeta, scale * dgamma]))


def running_statistics(mean: Array, var: Array, batch: Statistics, momentum: float = 0.1) -> tuple[Array, Array]:
    """The running mean and variance [C] after a step with ``batch``, the same on all replicas.

    A batch without values leaves them as they are.
    """
    if not batch.total:
        return mean.copy(), var.copy()
    factor = momentum * float(unbiased(np.float64(batch.total)))
    return moved(mean, batch.mean, momentum, momentum), moved(var, batch.var, momentum, factor)


def _columns(parameters: Parameters, tag: str, options: SiteOptions) -> tuple[Array, Array]:
    """gamma and beta [C], which a site always has; they are named as among the parameters."""
    gamma = parameters[tag]
    require_array(tag, gamma)
    if options.beta is None:
        return gamma, np.zeros_like(gamma)
    beta = parameters[options.beta]
    require_array(options.beta, beta)
    return gamma, beta


def _claim(parameters: Parameters, group: ArrayGroup, names: tuple[str, ...]) -> None:
    for name in names:
        if name in parameters:
            raise ValueError(f"the collective {name} has the name of a parameter; accepted: a tag for a new name")
    group.claim(names)


def _synchronised(case: ForwardCase, group: ArrayGroup, tag: str, options: SiteOptions) -> Statistics:
    """The statistics of the global batch, of which ``case`` has a shard."""
    request = prepare_forward(case, options.lnc, options.target, part=True)
    count = request.problem.count
    if count:
        mean, var = execute.run_moments(request.inputs, request.problem)
    else:
        mean, var = np.zeros((2, request.problem.channels), np.float32)
    moments = global_moments(Moments(mean, var, np.array([count], np.float32)), group, tag, options.mode)
    total = int(moments.total[0])
    if total == 1:
        raise ValueError("x has 1 value per channel on all replicas together; accepted in training: more than 1")
    return Statistics(moments.mean, moments.var, total)


def _backward_case(
    dy: Array, x: Array, parameters: Parameters, tag: str, forward: SiteForward, options: SiteOptions
) -> BackwardCase:
    columns = forward.statistics.mean, forward.statistics.var, *_columns(parameters, tag, options)
    relu = options.fuse_relu, forward.relu_mask
    return BackwardCase(dy, x, *columns, options.eps, *relu, residual=forward.residual)
