# SPDX-License-Identifier: Apache-2.0
"""Batch norm as functions, with the arguments of ``torch.nn.functional.batch_norm``."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from nki_bn.torch import gradients, through_torch
from nki_bn.torch.calls import Forward
from nki_bn.torch.formats import KERNEL_DTYPES
from nki_bn.torch.paths import path_of

Tensor = torch.Tensor

# Keep the mask of a fused ReLU for the backward, or make it again there.
RELU_MASKS = ("save", "recompute")


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    *,
    num_batches_tracked: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """``torch.nn.functional.batch_norm``, by the kernel where there is one for the device of the input.

    Args:
        input: [B, C, ...] of rank 2 to 5; float32, float16 or bfloat16 for the kernel.
        running_mean, running_var: [C], moved in place in training.
        weight, bias: [C], or None for 1 and 0.
        training: normalise with the statistics of the batch (True) or with the running ones (False).
        momentum: weight of this batch in the running statistics; None is the average over all batches, and needs
            ``num_batches_tracked``.
        eps: added to the variance.
        num_batches_tracked: a tensor with one integer, increased by 1 in training.
        backend: "neuron", "simulator" or "torch"; None chooses by the device (see ``nki_bn.torch.paths``).

    Returns:
        Like ``input``, in its memory format.

    Raises:
        ValueError: ``backend`` does not fit the device; in training, there is one value per channel, eps is not above
            0, there is only one of the two running statistics, or nothing that counts for momentum None.
        TypeError: an argument is of the wrong type, or a dtype is not one that the kernel takes.
        RuntimeError: as torch: a parameter or statistic has another length than C, or is missing in eval.
    """
    statistics = (running_mean, running_var, num_batches_tracked, momentum, eps)
    return run(Forward(input, weight, bias, None, *statistics, False, False, training), backend)


def batch_norm_relu(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    *,
    num_batches_tracked: Tensor | None = None,
    relu_mask: str = "save",
    backend: str | None = None,
) -> Tensor:
    """:func:`batch_norm` and a ReLU.

    Args:
        relu_mask: "save" keeps a byte per element for the backward, "recompute" makes the mask again from the input.
    """
    statistics = (running_mean, running_var, num_batches_tracked, momentum, eps)
    return run(Forward(input, weight, bias, None, *statistics, True, saves_mask(relu_mask), training), backend)


def batch_norm_add_relu(
    input: Tensor,
    residual: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    *,
    num_batches_tracked: Tensor | None = None,
    relu_mask: str = "save",
    backend: str | None = None,
) -> Tensor:
    """:func:`batch_norm`, then the residual is added, then a ReLU.

    Args:
        residual: shaped like ``input``. If their dtypes differ, both are taken in the wider one, as torch adds them.
        relu_mask: "save" keeps a byte per element for the backward, "recompute" makes the mask again from the input
            and the residual, and keeps the latter.
    """
    check_residual(input, residual)
    statistics = (running_mean, running_var, num_batches_tracked, momentum, eps)
    return run(Forward(input, weight, bias, residual, *statistics, True, saves_mask(relu_mask), training), backend)


def saves_mask(relu_mask: str) -> bool:
    """Whether the mask is saved.

    Raises:
        ValueError: ``relu_mask`` is not one of ``RELU_MASKS``.
    """
    if relu_mask not in RELU_MASKS:
        raise ValueError(f"relu_mask is {relu_mask!r}; accepted: {', '.join(map(repr, RELU_MASKS))}")
    return relu_mask == "save"


def check_residual(input: Tensor, residual: Tensor) -> None:
    """Refuse, by a ValueError, a residual of another shape than the input; by a TypeError, what is no tensor."""
    _check_tensor("input", input)
    _check_tensor("residual", residual)
    if residual.shape != input.shape:
        raise ValueError(f"residual has shape {tuple(residual.shape)}; accepted: {tuple(input.shape)}, that of input")


def run(call: Forward, backend: str | None) -> Tensor:
    """y of a call, on the path for its device; raises as :func:`batch_norm`."""
    check_types(call)
    path = path_of(call.x.device.type, backend)
    if call.training:
        check_training(call)
        check_count(call.x)
    if path == "torch":
        return through_torch.forward(call)
    call = promoted(call)
    check_dtypes(call)
    check_lengths(call)
    return gradients.forward(call)


def check_types(call: Forward) -> None:
    """Refuse, by a TypeError, what is no tensor, bool or number; by a ValueError, an input of a rank not 2 to 5."""
    _check_tensor("input", call.x)
    columns = {"running_mean": call.running_mean, "running_var": call.running_var}
    others = {**columns, "weight": call.weight, "bias": call.bias, "num_batches_tracked": call.num_batches_tracked}
    for name, tensor in others.items():
        if tensor is not None:
            _check_tensor(name, tensor, " or None")
    if not isinstance(call.training, bool):
        raise TypeError(f"training must be a bool, got {type(call.training).__name__}")
    for name, value in {"momentum": 0.0 if call.momentum is None else call.momentum, "eps": call.eps}.items():
        if not isinstance(value, (int, float)):
            raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not 2 <= call.x.dim() <= 5:
        raise ValueError(f"input has shape {tuple(call.x.shape)}; accepted: ranks 2 to 5, [B, C, ...]")


def _check_tensor(name: str, value: object, more: str = "") -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor{more}, got {type(value).__name__}")


def check_training(call: Forward) -> None:
    """Refuse what cannot be trained with, before anything is counted or moved; the messages are torch's."""
    if call.eps <= 0:
        raise ValueError(f"batch_norm eps must be positive during training, but got {call.eps}")
    if (call.running_mean is None) != (call.running_var is None):
        raise ValueError("running_mean and running_var must either both be None or neither be None")
    if call.averages and call.num_batches_tracked is None:
        raise ValueError("num_batches_tracked is None; accepted with momentum=None: a tensor with one integer")


def check_count(x: Tensor) -> None:
    """Refuse, by a ValueError of torch's, one value per channel in training."""
    sizes = x.shape
    if sizes[0] * math.prod(sizes[2:]) == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {sizes}")


def promoted(call: Forward) -> Forward:
    """The call with x and the residual in the wider of their dtypes, as torch adds them."""
    if call.residual is None or call.residual.dtype == call.x.dtype:
        return call
    dtype = torch.promote_types(call.x.dtype, call.residual.dtype)
    return replace(call, x=call.x.to(dtype), residual=call.residual.to(dtype))


def check_dtypes(call: Forward) -> None:
    """Refuse, by a TypeError, what the kernel does not take."""
    columns = {"running_mean": call.running_mean, "running_var": call.running_var}
    tensors = {"input": call.x, **columns, "weight": call.weight, "bias": call.bias}
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in KERNEL_DTYPES:
            names = ", ".join(map(str, KERNEL_DTYPES))
            raise TypeError(f"{name} is {tensor.dtype}; accepted by the kernel: {names}; backend='torch' takes others")


def check_lengths(call: Forward) -> None:
    """Refuse, by a RuntimeError of torch's, columns of another length than C, and eval without statistics."""
    channels = call.x.shape[1]
    columns = {"running_mean": call.running_mean, "running_var": call.running_var}
    for name, column in {**columns, "weight": call.weight, "bias": call.bias}.items():
        if column is None and name in columns and not call.training:
            raise RuntimeError(f"{name} must be defined in evaluation mode")
        if column is not None and column.numel() != channels:
            raise RuntimeError(f"{name} should contain {channels} elements not {column.numel()}")
