# SPDX-License-Identifier: Apache-2.0
"""Batch norm in float64, from the definitions: what every kernel is compared with.

Beside each result stands the *scale of its terms*: the result computed with the absolute value of everything that is
added up, or summed, on the way. A rounding error is a share of that scale, however small the result itself comes out;
``nki_bn.tolerances`` turns the scales into bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Result:
    """A result and the scale of its terms, both float64 and of one shape."""

    value: Float64
    scale: Float64


@dataclass(frozen=True)
class ForwardReference:
    """``y`` [B, C, ...] and the ``mean`` and biased ``var`` [C] it was made with, float64.

    ``z`` is the value before the ReLU, with its scale: y itself if there is none.
    """

    y: Float64
    mean: Float64
    var: Float64
    z: Result


@dataclass(frozen=True)
class BackwardReference:
    """``dx`` and ``dresidual`` [B, C, ...], ``dgamma`` and ``dbeta`` [C], each with its scale.

    ``normalised`` is (x - mean)*rstd [B, C, ...] and ``factor`` gamma*rstd, shaped to broadcast over x: what an error
    of a sum is multiplied by on its way into dx.
    """

    dx: Result
    dgamma: Result
    dbeta: Result
    dresidual: Result
    normalised: Float64
    factor: Float64


def statistics(x: Array) -> tuple[Float64, Float64]:
    """Mean and biased variance [C] of ``x`` [B, C, ...]; 0 where there are no values."""
    wide = x.astype(np.float64)
    axes = sum_axes(x)
    if not x.size:
        return np.zeros(x.shape[1]), np.zeros(x.shape[1])
    with np.errstate(all="ignore"):
        return wide.mean(axes), wide.var(axes)


def spread(x: Array) -> Float64:
    """Largest minus smallest value [C] of ``x`` [B, C, ...]; 0 where there are no values."""
    wide = x.astype(np.float64)
    if not x.size:
        return np.zeros(x.shape[1])
    with np.errstate(all="ignore"):
        distance: Float64 = wide.max(sum_axes(x)) - wide.min(sum_axes(x))
    return distance


def running(old: Array, batch: Array, momentum: float) -> Result:
    """(1 - momentum)*old + momentum*batch, for running and batch statistics [C]; the variance enters as unbiased."""
    with np.errstate(all="ignore"):
        kept, added = (1 - momentum) * old.astype(np.float64), momentum * batch.astype(np.float64)
        return Result(kept + added, np.abs(kept) + np.abs(added))


def column(values: Array, x: Array) -> Float64:
    """``values`` [C] as float64, shaped to broadcast over ``x`` [B, C, ...]."""
    return values.astype(np.float64).reshape(1, -1, *[1] * (x.ndim - 2))


def pre_activation(
    x: Array,
    mean: Array,
    var: Array,
    gamma: Array | None,
    beta: Array | None,
    eps: float = 1e-5,
    residual: Array | None = None,
) -> Result:
    """gamma*(x - mean)*rstd + beta + residual, the value whose sign a fused ReLU looks at, for ``x`` [B, C, ...]."""
    with np.errstate(all="ignore"):
        normalised = _normalise(x, mean, var, eps) * column(_or_constant(gamma, x, 1), x)
        shift = column(_or_constant(beta, x, 0), x)
        added = np.float64(0) if residual is None else residual.astype(np.float64)
        return Result(normalised + shift + added, np.abs(normalised) + np.abs(shift) + np.abs(added))


def batch_norm_fwd(
    x: Array,
    gamma: Array | None,
    beta: Array | None,
    eps: float = 1e-5,
    fuse_relu: bool = False,
    residual: Array | None = None,
    given: tuple[Array, Array] | None = None,
) -> ForwardReference:
    """Batch norm of ``x`` [B, C, ...], then the residual, then the ReLU.

    Args:
        gamma, beta: [C], or None for 1 and 0.
        residual: like x.
        given: mean and variance [C] to normalise with; None takes those of x.
    """
    mean, var = statistics(x) if given is None else (values.astype(np.float64) for values in given)
    z = pre_activation(x, mean, var, gamma, beta, eps, residual)
    # np.maximum keeps NaN, as a ReLU has to.
    return ForwardReference(np.maximum(z.value, 0) if fuse_relu else z.value, mean, var, z)


def batch_norm_bwd(
    dy: Array,
    x: Array,
    mean: Array,
    var: Array,
    gamma: Array | None,
    eps: float = 1e-5,
    relu_mask: Array | None = None,
    training: bool = True,
) -> BackwardReference:
    """Gradients of batch norm, and of the ReLU behind it when ``relu_mask`` is given.

    Args:
        dy, x: [B, C, ...], any rank from 2 and any float dtype.
        mean, var: [C], the statistics of the forward.
        gamma: [C], or None for 1. beta plays no part: a ReLU comes in through its mask alone.
        eps: that of the forward.
        relu_mask: like x; true where the ReLU let the value pass.
        training: the statistics are those of the batch (True) or constants (False).
    """
    with np.errstate(all="ignore"):
        gradient = dy.astype(np.float64)
        if relu_mask is not None:
            gradient = np.where(relu_mask.astype(bool), gradient, 0.0)
        normalised = _normalise(x, mean, var, eps)
        factor = column(_or_constant(gamma, x, 1), x) * column(_rstd(var, eps), x)
        dgamma, dbeta = _sum(gradient * normalised), _sum(gradient)
        value, scale = gradient, np.abs(gradient)
        if training and x.shape[1] and x.size:
            count = x.size // x.shape[1]
            value = gradient - column(dbeta.value / count, x) - normalised * column(dgamma.value / count, x)
            scale = scale + column(dbeta.scale / count, x) + np.abs(normalised) * column(dgamma.scale / count, x)
        dx = Result(factor * value, np.abs(factor) * scale)
        return BackwardReference(dx, dgamma, dbeta, Result(gradient, np.abs(gradient)), normalised, factor)


def _normalise(x: Array, mean: Array, var: Array, eps: float) -> Float64:
    normalised: Float64 = (x.astype(np.float64) - column(mean, x)) * column(_rstd(var, eps), x)
    return normalised


def _rstd(var: Array, eps: float) -> Float64:
    rstd: Float64 = 1.0 / np.sqrt(var.astype(np.float64) + eps)
    return rstd


def channel_sum(terms: Float64) -> Float64:
    """The sum [C] of ``terms`` [B, C, ...]."""
    total: Float64 = terms.sum(sum_axes(terms))
    return total


def _sum(terms: Float64) -> Result:
    return Result(channel_sum(terms), channel_sum(np.abs(terms)))


def sum_axes(x: Array) -> tuple[int, ...]:
    """All axes of ``x`` [B, C, ...] but that of the channels."""
    return (0, *range(2, x.ndim))


def _or_constant(values: Array | None, x: Array, constant: float) -> Array:
    return np.full(x.shape[1], constant, np.float64) if values is None else values
