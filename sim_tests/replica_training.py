# SPDX-License-Identifier: Apache-2.0
"""Training steps of whole networks: alone on the global batch, and on ranks with synchronised batch norms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from ranks import first_ranks
from torch import nn
from torch_models import NarrowConv2d, cifar_net, small_mobilenet, small_resnet

import nki_bn.torch as nbt

Tensor = torch.Tensor
Tensors = dict[str, Tensor]

IMAGES, CLASSES = 8, 5
_CIFAR = ((4, 4, 6, 6, 8, 8, 8, 8), (10, 8), CLASSES, 16)
# Name -> (network, size of the images).
NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "cifar": (partial(cifar_net, *_CIFAR), 16),
    "cifar with bfloat16 convolutions": (partial(cifar_net, *_CIFAR, convolution=NarrowConv2d), 16),
    "resnet": (small_resnet, 8),
    "mobilenet": (small_mobilenet, 16),
}
OPTIMISERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.01),
}


@dataclass(frozen=True)
class Training:
    """A network, an optimiser, and the examples of each rank; none for a process alone with torch's own layers."""

    network: str
    optimiser: str = "sgd"
    sizes: tuple[int, ...] = ()
    mode: str = "two_round"
    backend: str = "torch"
    dtype: torch.dtype = torch.float64
    steps: int = 3

    @property
    def alone(self) -> Training:
        """The same on the global batch."""
        return replace(self, sizes=(), backend="torch", mode="two_round")

    def model(self) -> nn.Module:
        """The network with torch's layers."""
        return NETWORKS[self.network][0]().to(self.dtype)

    def data(self) -> tuple[Tensor, Tensor]:
        """Images and targets of the global batch: rows of probabilities, none of them 0 or 1."""
        generator = torch.Generator().manual_seed(5)
        size = NETWORKS[self.network][1]
        images = torch.randn(IMAGES, 3, size, size, generator=generator, dtype=torch.float64)
        target = torch.rand(IMAGES, CLASSES, generator=generator, dtype=torch.float64) + 0.1
        return images.to(self.dtype), (target / target.sum(1, keepdim=True)).to(self.dtype)


@dataclass(frozen=True)
class Results:
    """Of the first step: outputs and cotangents by layer (``images`` too), gradients, and what this process had of them
    before they were averaged; of all steps: losses, parameters."""

    outputs: Tensors
    cotangents: Tensors
    gradients: Tensors
    own: Tensors
    losses: list[float]
    parameters: Tensors


class Defined(nn.BatchNorm2d):
    """Batch norm from the definitions, with torch's autograd; torch's own adds up less exactly in float64."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W], normalised with its own statistics."""
        centred = x - x.mean((0, 2, 3), keepdim=True)
        normalised = centred / torch.sqrt((centred**2).mean((0, 2, 3), keepdim=True) + self.eps)
        return normalised * self.weight.reshape(-1, 1, 1) + self.bias.reshape(-1, 1, 1)


def train_alone(training: Training) -> Results:
    """The global batch in one process, with batch norm from the definitions."""
    model = training.model()
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.__class__ = Defined
    return _train(model, model, training, training.data(), IMAGES)


def train_on_rank(rank: int, training: Training) -> Results | None:
    """This rank's part, data parallel; None on ranks that stand by.

    The loss is the sum over the rank's examples times R/B, so that the ranks' gradients average to the global one.
    """
    size = len(training.sizes)
    group = first_ranks(size)
    if rank >= size:
        return None
    model = training.model()
    nbt.convert_sync_batch_norm(model, group, mode=training.mode, backend=training.backend)
    parallel = nn.parallel.DistributedDataParallel(model, process_group=group)
    images, target = (part.split(training.sizes)[rank] for part in training.data())
    return _train(model, parallel, training, (images, target), IMAGES / size)


def losses_alone(model: nn.Module, images: Tensor, target: Tensor, steps: int, optimiser: str) -> list[float]:
    """The losses of ``model`` on the global batch."""
    training = Training("", optimiser, steps=steps)
    return _train(model, model, training, (images, target), len(images)).losses


def _train(
    model: nn.Module, forward: nn.Module, training: Training, data: tuple[Tensor, Tensor], examples: float
) -> Results:
    optimiser = OPTIMISERS[training.optimiser](model.parameters())
    images, target = data[0].clone().requires_grad_(), data[1]
    first, losses = None, []
    for _ in range(training.steps):
        optimiser.zero_grad()
        kept, own, hooks = _keep(model)
        logits = forward(images)
        loss = -(target * torch.log_softmax(logits, 1)).sum() / examples
        loss.backward()
        for hook in hooks:
            hook.remove()
        losses.append(loss.item())
        first = first or (*_first(model, kept, images), own)
        optimiser.step()
    assert first is not None
    return Results(*first, losses, {name: p.detach().clone() for name, p in model.named_parameters()})


def _keep(model: nn.Module) -> tuple[Tensors, Tensors, list[Any]]:
    """What will hold the outputs of a plain sequence's layers and the gradients before they are averaged; the hooks."""
    kept: Tensors = {}
    own: Tensors = {}

    def keep(name: str, _: nn.Module, __: Any, output: Tensor) -> None:
        output.retain_grad()
        kept[name] = output

    layers = dict(model.named_children()) if not any(list(child.children()) for child in model.children()) else {}
    hooks = [layer.register_forward_hook(partial(keep, name)) for name, layer in layers.items()]
    return kept, own, hooks + [p.register_hook(partial(own.__setitem__, name)) for name, p in model.named_parameters()]


def _first(model: nn.Module, kept: Tensors, images: Tensor) -> tuple[Tensors, Tensors, Tensors]:
    outputs = {name: value.detach().clone() for name, value in kept.items()}
    steps = kept | {"images": images}
    cotangents = {name: value.grad.clone() for name, value in steps.items() if value.grad is not None}
    assert len(cotangents) == len(steps)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return outputs, cotangents, gradients
