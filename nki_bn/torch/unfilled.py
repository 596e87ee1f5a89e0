# SPDX-License-Identifier: Apache-2.0
"""The operators without values: the shapes, dtypes and memory formats of what they return."""

from __future__ import annotations

import torch

from nki_bn.torch.calls import Backward, Forward, Gradients, Outputs, absent

Tensor = torch.Tensor


def forward(call: Forward) -> Outputs:
    """The outputs of a forward, without their values."""
    x = call.x
    mean, var = (x.new_empty(x.shape[1], dtype=torch.float32) for _ in range(2))
    saved = call.relu and call.save_mask
    mask = x.new_empty(x.shape, dtype=torch.uint8) if saved else absent(x, torch.uint8)
    return Outputs(torch.empty_like(x), mean, var, mask)


def backward(call: Backward) -> Gradients:
    """The gradients of a backward, without their values."""
    dx, dweight, dbias, dresidual = call.need
    return (
        _unfilled(call.x, dx),
        _unfilled_sum(call.x, dweight),
        _unfilled_sum(call.x, dbias),
        _unfilled(call.x, dresidual),
    )


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """The moments of a shard, without their values."""
    mean, var = (_unfilled_sum(x, True) for _ in range(2))
    return mean, var


def input_gradient(call: Backward, dweight: Tensor, dbias: Tensor) -> Tensor:
    """The input gradient of a shard, without its values."""
    return _unfilled(call.x, True)


def _unfilled(x: Tensor, needed: bool) -> Tensor:
    return torch.empty_like(x) if needed else absent(x, x.dtype)


def _unfilled_sum(x: Tensor, needed: bool) -> Tensor:
    return x.new_empty(x.shape[1] if needed else 0, dtype=torch.float32)
