# SPDX-License-Identifier: Apache-2.0
"""How far training may drift: a float64 model whose batch norms are off by what the table of tolerances allows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch_models import train

from nki_bn.tolerances import Arithmetic

DRAWS = 4


class Perturbed(nn.Module):
    """A batch norm whose outputs and input gradients are off by their shares in the table, with a sign per channel.

    That is how the largest of the errors acts: a factor per channel that is good to 18 bits. Signs are drawn anew in
    every step. The shares are taken of the results; those of the table are of the terms, which are larger.
    """

    def __init__(self, norm: nn.Module, arithmetic: Arithmetic, generator: torch.Generator) -> None:
        super().__init__()
        self.norm, self._arithmetic, self._generator = norm, arithmetic, generator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As the layer inside, but for the errors."""
        if x.requires_grad:
            x = _OffBackward.apply(x, self._signs(x) * self._arithmetic.elements)  # type: ignore[no-untyped-call]
        y: torch.Tensor = self.norm(x)
        return y + (y.detach().abs() * self._signs(x) * self._arithmetic.frozen)

    def _signs(self, x: torch.Tensor) -> torch.Tensor:
        shape = (1, x.shape[1], *[1] * (x.dim() - 2))
        return torch.randint(0, 2, shape, generator=self._generator).double() * 2 - 1


class _OffBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(share)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> Any:
        (share,) = ctx.saved_tensors
        return dx * (1 + share), None


Train = Callable[[nn.Module, torch.Tensor, torch.Tensor, int], list[float]]


def allowed_drift(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, steps: int, train: Train = train
) -> list[float]:
    """Bound on the difference of the losses, per step, between runs whose batch norms round differently.

    Twice the largest drift that ``DRAWS`` perturbed runs showed up to that step, as two runs may drift opposite ways.
    """
    wide = copy.deepcopy(model).double()
    exact = train(copy.deepcopy(wide), images.double(), labels, steps)
    drifts = [0.0] * steps
    for seed in range(DRAWS):
        generator = torch.Generator().manual_seed(seed)
        off = train(_perturbed(copy.deepcopy(wide), generator), images.double(), labels, steps)
        drifts = [max(drift, abs(a - b)) for drift, a, b in zip(drifts, off, exact, strict=True)]
    return [2 * max(drifts[: step + 1]) for step in range(steps)]


def _perturbed(model: nn.Module, generator: torch.Generator) -> nn.Module:
    arithmetic = Arithmetic("float32")
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.modules.batchnorm._BatchNorm):
                setattr(parent, name, Perturbed(child, arithmetic, generator))
    return model
