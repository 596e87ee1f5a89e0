# SPDX-License-Identifier: Apache-2.0
"""Batch norm over the ranks of a process group: statistics and gradients are those of the global batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from nki_bn.synchronised import exchange
from nki_bn.synchronised.exchange import Moments
from nki_bn.torch import functional
from nki_bn.torch.calls import Backward, Forward, recomputing, track
from nki_bn.torch.paths import path_of
from nki_bn.torch.process_groups import ProcessGroup
from nki_bn.torch.steps import steps_of

Tensor = torch.Tensor


@dataclass(frozen=True)
class Exchange:
    """With whom and how: the replicas, and one of ``nki_bn.synchronised.MODES``."""

    group: ProcessGroup
    mode: str


def run(call: Forward, backend: str | None, by: Exchange) -> Tensor:
    """y of a training forward of this rank's shard ``call.x``; the running statistics become those of all ranks.

    All ranks of the group have to call it, and the backward, in the same order; a shard may be empty.

    Raises:
        ValueError: all ranks together have one value per channel; or as ``nki_bn.torch.batch_norm``.
        TypeError, RuntimeError: as there; or a rank did not come within the timeout of the group.
    """
    path = path_of(call.x.device.type, backend)
    functional.check_training(call)
    call = functional.promoted(call)
    if path != "torch":
        functional.check_dtypes(call)
    functional.check_lengths(call)
    settings = replace(call, x=call.x.detach(), weight=None, bias=None, residual=None)
    tensors = (call.x, call.weight, call.bias, call.residual)
    y, *global_batch = _synchronised(*tensors, (settings, path, by))
    moments = Moments(*global_batch)
    if torch.compiler.is_compiling() or not recomputing():
        _track(call, moments)
    made: Tensor = y
    return made


class _Synchronised(torch.autograd.Function):
    """Between the reductions, the steps of a path. The gradients of weight and bias are this rank's own sums."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, options: Any
    ) -> Any:
        settings, path, by = options
        call = replace(settings, x=x, weight=weight, bias=bias, residual=residual)
        steps, count = steps_of(path), x.numel() // x.shape[1]
        mean, var = steps.moments(x)
        local = Moments(mean, var, mean.new_full((1,), count))
        moments = exchange.global_moments(local, by.group, "", by.mode)
        if count <= 1:
            _check_total(moments.total)
        y, mask = steps.normalised(call, moments.mean, moments.var)
        replayed = (bias, residual) if call.relu and mask is None else (None, None)
        ctx.save_for_backward(x, *moments, weight, replayed[0], mask, replayed[1])
        ctx.options = call.eps, call.relu, path, by
        ctx.dtypes = [None if p is None else p.dtype for p in (weight, bias)]
        ctx.mark_non_differentiable(*moments)
        ctx.set_materialize_grads(False)
        return y, *moments

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, *_: Any) -> Any:
        assert dy is not None, "only y has a gradient, and nothing goes backward without one"
        x, mean, var, count, weight, bias, mask, residual = ctx.saved_tensors
        eps, relu, path, by = ctx.options
        need = list(ctx.needs_input_grad[:4])
        saved = (mean, var, weight, bias, mask, residual)
        call = Backward(dy, x, *saved, True, eps, relu, [*need[:3], need[3] and relu])
        steps = steps_of(path)
        dgamma, dbeta, dresidual = steps.sums(call)
        dx = None
        if need[0]:
            total = exchange.global_sums(dgamma, dbeta, by.group, "")
            dx = steps.input_gradient(call, *(column / count.clip(1) for column in total))
        own = [column.to(dtype) if wanted else None for column, dtype, wanted in _parameters(ctx, dgamma, dbeta, need)]
        return (dx, *own, dy if need[3] and not relu else dresidual, None)


# Some versions of torch have types here, others have none.
_synchronised: Callable[..., Any] = _Synchronised.apply


def _parameters(ctx: Any, dgamma: Tensor, dbeta: Tensor, need: list[bool]) -> Any:
    return zip((dgamma, dbeta), ctx.dtypes, need[1:3], strict=True)


def _check_total(total: Tensor) -> None:
    """Refuse one value per channel on all ranks together, which needs a look only where this rank has no more."""
    message = "Expected more than 1 value per channel on all ranks together when training"
    if torch.compiler.is_compiling():
        torch._assert_async((total != 1).all(), message)
    elif bool(total == 1):
        raise ValueError(message)


def _track(call: Forward, moments: Moments) -> None:
    """Count the batch, and move the running statistics to those of all ranks; a batch without values moves nothing."""
    mean, var = call.running_mean, call.running_var
    if mean is None or var is None:
        track(call, None)
        return
    unbiased = exchange.unbiased(moments.total)
    if call.averages:
        new = moments.mean, moments.var * unbiased
    else:
        assert call.momentum is not None
        factors = (call.momentum, call.momentum * unbiased)
        pairs = zip((mean, var), moments[:2], factors, strict=True)
        new = tuple(exchange.moved(old.to(batch.dtype), batch, call.momentum, f) for old, batch, f in pairs)
    kept = [torch.where(moments.total > 0, after, before) for before, after in zip((mean, var), new, strict=True)]
    track(call, (kept[0], kept[1]), call.averages)
