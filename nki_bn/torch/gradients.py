# SPDX-License-Identifier: Apache-2.0
"""Autograd of the operators: first derivatives by the backward kernel, second ones refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nki_bn.torch.calls import Forward
from nki_bn.torch.operators import LIBRARY

Tensor = torch.Tensor

_OPERATORS = torch.ops.nki_bn
# The gradients of x, weight, bias and residual stand first among those of a forward's arguments.
_LEADING = 4


class _Differentiable(torch.autograd.Function):
    """A forward that keeps what its backward reads; the statistics are its own, so the running ones may move on."""

    @staticmethod
    def forward(operator: Any, *arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        operator, x, weight, bias, residual, *rest = inputs
        y, mean, var, mask = output
        ctx.eps, ctx.relu, saves_mask = rest[-3:]
        ctx.training = operator is _OPERATORS.batch_norm_training.default
        ctx.arguments, ctx.dtypes = len(inputs) - 1, [None if p is None else p.dtype for p in (weight, bias)]
        replayed = (bias, residual) if ctx.relu and not saves_mask else (None, None)
        ctx.save_for_backward(x, mean, var, weight, replayed[0], mask if ctx.relu and saves_mask else None, replayed[1])
        ctx.mark_non_differentiable(mean, var, mask)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: Any) -> Any:
        need = list(ctx.needs_input_grad[1 : 1 + _LEADING])
        made: list[Tensor | None] = [None] * _LEADING
        if dy is not None and any(need):
            made = _gradients(ctx, dy, need)
        return (None, *made, *[None] * (ctx.arguments - _LEADING))


# Some versions of torch have types here, others have none.
_differentiable: Callable[..., Any] = _Differentiable.apply


def _gradients(ctx: Any, dy: Tensor, need: list[bool]) -> list[Tensor | None]:
    # Without a ReLU the gradient of the residual is dy: no kernel has to copy it.
    asked = [*need[:3], need[3] and ctx.relu]
    made = _OPERATORS.batch_norm_backward(dy, *ctx.saved_tensors, ctx.training, ctx.eps, ctx.relu, asked)
    dx, dweight, dbias, dresidual = (gradient if asked[i] else None for i, gradient in enumerate(made))
    weight_dtype, bias_dtype = ctx.dtypes
    dweight = None if dweight is None else dweight.to(weight_dtype)
    dbias = None if dbias is None else dbias.to(bias_dtype)
    return [dx, dweight, dbias, dy if need[3] and not ctx.relu else dresidual]


class _Once(torch.autograd.Function):
    """The backward, whose results refuse to be differentiated."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return _OPERATORS.batch_norm_backward(*arguments)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "the batch-norm kernels have no second derivatives; accepted for a loss that needs them: backend='torch'"
        )


def _recorded(operator: Any) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError(
                "the batch-norm kernels cannot be differentiated by torch.func; accepted there: backend='torch'"
            )
        return _differentiable(operator, *arguments)

    return call


def _register() -> None:
    for name in ("batch_norm_training", "batch_norm_inference"):
        LIBRARY.impl(name, _recorded(getattr(_OPERATORS, name).default), "Autograd")
    LIBRARY.impl("batch_norm_backward", _Once.apply, "Autograd")


_register()


def forward(call: Forward) -> Tensor:
    """y of a call, by the kernel for the device of x; autograd knows its backward."""
    # A mask is for the backward alone.
    saves = call.save_mask and torch.is_grad_enabled()
    leading, rest = (call.x, call.weight, call.bias, call.residual), (call.eps, call.relu, saves)
    running = call.running_mean, call.running_var
    if call.training:
        y, *_ = _OPERATORS.batch_norm_training(*leading, *running, call.num_batches_tracked, call.momentum, *rest)
    else:
        y, *_ = _OPERATORS.batch_norm_inference(*leading, *running, *rest)
    made: Tensor = y
    return made
