# SPDX-License-Identifier: Apache-2.0
"""What a replica computes between the reductions of a synchronised batch norm: by the kernels, and by torch.

Both have the same four steps, with mean, var and sums [C] float32 (torch: float64 for such an input).
"""

from __future__ import annotations

from typing import Protocol

import torch

from nki_bn.torch.calls import Backward, Forward

Tensor = torch.Tensor

_OPERATORS = torch.ops.nki_bn


class Steps(Protocol):
    """One way to compute."""

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and biased variance of a shard; zeros if it is empty."""

    def normalised(self, call: Forward, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor | None]:
        """y, and the mask of the ReLU if it is saved."""

    def sums(self, call: Backward) -> tuple[Tensor, Tensor, Tensor | None]:
        """dgamma and dbeta of a shard, and the gradient of the residual if ``call.need`` has it."""

    def input_gradient(self, call: Backward, dgamma: Tensor, dbeta: Tensor) -> Tensor:
        """dx of a shard from the sums of the global batch over its number of values."""


class KernelSteps:
    """By the operators of this package."""

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`Steps`."""
        mean, var = _OPERATORS.batch_norm_moments(x)
        return mean, var

    def normalised(self, call: Forward, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor | None]:
        """See :class:`Steps`."""
        columns = (call.x, call.weight, call.bias, call.residual, mean, var)
        y, _, _, mask = _OPERATORS.batch_norm_inference(*columns, call.eps, call.relu, call.save_mask)
        return y, mask if call.relu and call.save_mask else None

    def sums(self, call: Backward) -> tuple[Tensor, Tensor, Tensor | None]:
        """See :class:`Steps`."""
        need = [False, True, True, call.need[3]]
        # A layer without a weight has no gradient of it, but dx needs the sum.
        weight = torch.ones_like(call.mean) if call.weight is None else call.weight
        saved = (call.mean, call.var, weight, call.bias, call.mask, call.residual)
        made = _OPERATORS.batch_norm_backward(call.dy, call.x, *saved, True, call.eps, call.relu, need)
        return made[1], made[2], made[3] if need[3] else None

    def input_gradient(self, call: Backward, dgamma: Tensor, dbeta: Tensor) -> Tensor:
        """See :class:`Steps`."""
        saved = (call.mean, call.var, call.weight, call.bias, call.mask, call.residual)
        dx: Tensor = _OPERATORS.batch_norm_input_gradient(call.dy, call.x, *saved, dgamma, dbeta, call.eps, call.relu)
        return dx


class TorchSteps:
    """By torch's elementwise operations, which subtract the mean first; the mask of a ReLU is always saved."""

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`Steps`."""
        if x.numel() == 0:
            mean, var = x.new_zeros((2, x.shape[1]), dtype=_wide(x))
        else:
            var, mean = torch.var_mean(x.to(_wide(x)), _summed(x), correction=0)
        return mean, var

    def normalised(self, call: Forward, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor | None]:
        """See :class:`Steps`."""
        x = call.x
        z = _normalised(x, mean, var, call.eps)
        if call.weight is not None:
            z = z * _column(call.weight, x)
        if call.bias is not None:
            z = z + _column(call.bias, x)
        if call.residual is not None:
            z = z + call.residual
        y = z.to(x.dtype)
        return (torch.relu(y), y > 0) if call.relu else (y, None)

    def sums(self, call: Backward) -> tuple[Tensor, Tensor, Tensor | None]:
        """See :class:`Steps`."""
        dy, axes = _masked(call), _summed(call.x)
        normalised = _normalised(call.x, call.mean, call.var, call.eps)
        dresidual = dy.to(call.dy.dtype) if call.need[3] else None
        return (dy * normalised).sum(axes), dy.sum(axes), dresidual

    def input_gradient(self, call: Backward, dgamma: Tensor, dbeta: Tensor) -> Tensor:
        """See :class:`Steps`."""
        x = call.x
        scale = torch.rsqrt(call.var + call.eps)
        if call.weight is not None:
            scale = scale * call.weight
        normalised = _normalised(x, call.mean, call.var, call.eps)
        dx = _column(scale, x) * (_masked(call) - _column(dbeta, x) - normalised * _column(dgamma, x))
        return dx.to(x.dtype)


def steps_of(path: str) -> Steps:
    """The steps on a path of ``nki_bn.torch.paths``."""
    return TorchSteps() if path == "torch" else KernelSteps()


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _summed(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _column(values: Tensor, x: Tensor) -> Tensor:
    """[C] as [1, C, 1, ...], in the dtype of sums."""
    return values.to(_wide(x)).reshape(1, -1, *[1] * (x.dim() - 2))


def _normalised(x: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    return (x.to(_wide(x)) - _column(mean, x)) * _column(torch.rsqrt(var + eps), x)


def _masked(call: Backward) -> Tensor:
    dy = call.dy.to(_wide(call.x))
    return dy if call.mask is None else torch.where(call.mask, dy, 0.0)
