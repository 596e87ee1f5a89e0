# SPDX-License-Identifier: Apache-2.0
"""The network of ``whole_net`` in torch, with the gradients of its autograd: shares no backward with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from whole_net import BLOCKS, HEAD, POOLED, Parameters

from nki_bn.reference import Array

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Variant:
    """Statistics over the batch or over each image; convolutions in bfloat16 or as everything else; dtype of that."""

    per_image: bool = False
    bfloat16: bool = False
    dtype: torch.dtype = torch.float64
    eps: float = 1e-5

    def cast(self, x: torch.Tensor) -> torch.Tensor:
        """To bfloat16 and back, which rounds the cotangent too."""
        return x.to(torch.float32).to(torch.bfloat16).to(self.dtype) if self.bfloat16 else x

    def normalise(self, x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        """Batch norm from the definitions."""
        axes = (2, 3) if self.per_image else (0, 2, 3)
        centred = x - x.mean(axes, keepdim=True)
        normalised = centred / torch.sqrt((centred**2).mean(axes, keepdim=True) + self.eps)
        return normalised * gamma.reshape(-1, 1, 1) + beta.reshape(-1, 1, 1)


@dataclass(frozen=True)
class Results:
    """Outputs and cotangents of every step by name, and the gradients of the parameters."""

    outputs: dict[str, Array]
    cotangents: dict[str, Array]
    gradients: Parameters


def autograd(parameters: Parameters, images: Array, target: Array, variant: Variant) -> Results:
    """Of the mean over the batch of the cross-entropy with rows of probabilities ``target`` [N, classes]."""
    leaves = {name: torch.tensor(value, dtype=variant.dtype, requires_grad=True) for name, value in parameters.items()}
    steps: Tensors = {"images": torch.tensor(images, dtype=variant.dtype, requires_grad=True)}

    def kept(name: str, value: torch.Tensor) -> torch.Tensor:
        value.retain_grad()
        steps[name] = value
        return value

    logits = _head(leaves, _blocks(leaves, steps["images"], variant, kept), kept)
    weighted = torch.tensor(target, dtype=variant.dtype) * torch.log_softmax(logits, 1)
    (-weighted.sum() / len(images)).backward()  # type: ignore[no-untyped-call]
    return Results(
        {name: value.detach().numpy() for name, value in steps.items()},
        {name: _gradient(value) for name, value in steps.items()},
        {name: _gradient(value) for name, value in leaves.items()},
    )


Keep = Callable[[str, torch.Tensor], torch.Tensor]


def _blocks(leaves: Tensors, x: torch.Tensor, variant: Variant, kept: Keep) -> torch.Tensor:
    for name in BLOCKS:
        operands, weight, bias = map(variant.cast, (x, leaves[f"{name}.weight"], leaves[f"{name}.bias"]))
        z = kept(f"conv{name}", variant.cast(torch.nn.functional.conv2d(operands, weight, bias, padding=1)))
        normalised = kept(f"bn{name}", variant.normalise(z, leaves[f"{name}.gamma"], leaves[f"{name}.beta"]))
        x = kept(f"relu{name}", torch.relu(normalised))
        if name in POOLED:
            x = kept(f"pool{name}", torch.nn.functional.max_pool2d(x, 2))
    return x.flatten(1)


def _head(leaves: Tensors, x: torch.Tensor, kept: Keep) -> torch.Tensor:
    for name in HEAD:
        x = kept(f"dense{name}", torch.nn.functional.linear(x, leaves[f"{name}.weight"], leaves[f"{name}.bias"]))
        if name != HEAD[-1]:
            x = kept(f"relu{name}", torch.relu(x))
    return x


def _gradient(value: torch.Tensor) -> Array:
    assert value.grad is not None
    gradient: Array = value.grad.numpy()
    return gradient.astype(np.float64)


def optimiser_step(
    kind: type[torch.optim.Optimizer], parameter: Array, gradient: Array, state: dict[str, Any], **options: Any
) -> Array:
    """The parameter after one step of a torch optimiser that has ``state``."""
    leaf = torch.tensor(parameter, requires_grad=True)
    leaf.grad = torch.tensor(gradient)
    optimiser = kind([leaf], **options)
    optimiser.state[leaf] = {name: torch.tensor(value) for name, value in state.items()}
    optimiser.step()
    moved: Array = leaf.detach().numpy()
    return moved
