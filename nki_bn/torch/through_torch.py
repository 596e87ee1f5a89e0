# SPDX-License-Identifier: Apache-2.0
"""Torch's own batch norm, with the promises that hold on every path."""

from __future__ import annotations

import torch
from torch.nn import functional

from nki_bn.torch.calls import Forward, recomputing, track

Tensor = torch.Tensor


def forward(call: Forward) -> Tensor:
    """y, by torch; the running statistics are moved in place, but not if a backward repeats a forward."""
    y = _normalised(call)
    if call.residual is not None:
        y = y + call.residual
    return torch.relu(y) if call.relu else y


def _normalised(call: Forward) -> Tensor:
    parameters = _widened(call.weight, call), _widened(call.bias, call)
    if not call.training:
        # Torch's backward reads the running statistics of the time of the backward: give it copies of today's.
        frozen = _copy(call.running_mean), _copy(call.running_var)
        return functional.batch_norm(call.x, *frozen, *parameters, False, 0.0, call.eps)
    moved = call.running_mean, call.running_var
    repeated = not torch.compiler.is_compiling() and recomputing()
    if call.averages or repeated:
        moved = _copy(call.running_mean), _copy(call.running_var)
    momentum = 1.0 if call.momentum is None else call.momentum
    y = functional.batch_norm(call.x, *moved, *parameters, True, momentum, call.eps)
    if not repeated:
        track(call, moved if call.averages else None, call.averages)
    return y


def _copy(statistic: Tensor | None) -> Tensor | None:
    return None if statistic is None else statistic.clone()


def _widened(parameter: Tensor | None, call: Forward) -> Tensor | None:
    """In the dtype of the running statistics where these are wider, which torch does not accept side by side."""
    if parameter is None or call.running_mean is None or parameter.element_size() >= call.running_mean.element_size():
        return parameter
    return parameter.to(call.running_mean.dtype)
