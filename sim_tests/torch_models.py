# SPDX-License-Identifier: Apache-2.0
"""Models of torch.nn alone, which the tests convert."""

from __future__ import annotations

import torch
from torch import nn


class BasicBlock(nn.Module):
    """A block of a small residual network; one ReLU serves both places, as in torchvision."""

    def __init__(self, inner: int, outer: int, stride: int, momentum: float | None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer, momentum=momentum)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.downsample = None
        if stride != 1 or inner != outer:
            self.downsample = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, inner, H, W] to [B, outer, H/stride, W/stride]."""
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(out + identity)


def small_resnet(classes: int = 5, momentum: float | None = None, seed: int = 0) -> nn.Sequential:
    """Stem, two blocks, head: [B, 3, H, W] to [B, classes]."""
    torch.manual_seed(seed)
    stem = (nn.Conv2d(3, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
    blocks = BasicBlock(4, 4, 1, momentum), BasicBlock(4, 6, 2, momentum)
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, classes))


class NarrowConv2d(nn.Conv2d):
    """A convolution in bfloat16 between layers of another dtype, as casts around it make it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Like x; operands and result are rounded, and so are their gradients."""
        weight, bias = map(_through_bfloat16, (self.weight, self.bias))
        return _through_bfloat16(self._conv_forward(_through_bfloat16(x), weight, bias))


def _through_bfloat16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32).to(torch.bfloat16).to(x.dtype)


class InvertedResidual(nn.Module):
    """A block of a small mobile network: wide depthwise convolution between narrow ends."""

    def __init__(self, inner: int, outer: int, stride: int, wide: int) -> None:
        super().__init__()
        self.adds = stride == 1 and inner == outer
        layers: list[nn.Module] = [nn.Conv2d(inner, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()]
        layers += [nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()]
        layers += [nn.Conv2d(wide, outer, 1, bias=False), nn.BatchNorm2d(outer)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, inner, H, W] to [B, outer, H/stride, W/stride]."""
        y: torch.Tensor = self.layers(x)
        return x + y if self.adds else y


def small_mobilenet(classes: int = 5, seed: int = 0) -> nn.Sequential:
    """Stem, three blocks, head: [B, 3, H, W] to [B, classes]."""
    torch.manual_seed(seed)
    stem = (nn.Conv2d(3, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU6())
    blocks = InvertedResidual(4, 4, 1, 8), InvertedResidual(4, 6, 2, 12), InvertedResidual(6, 6, 1, 12)
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, classes))


def cifar_net(
    widths: tuple[int, ...],
    hidden: tuple[int, int],
    classes: int,
    image: int,
    seed: int = 0,
    convolution: type[nn.Conv2d] = nn.Conv2d,
) -> nn.Sequential:
    """Convolution, batch norm, ReLU eight times, a max pool after every second; three dense layers."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    before = 3
    for number, width in enumerate(widths, 1):
        layers += [convolution(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if number % 2 == 0 else []
        before = width
    layers += [nn.Flatten(), nn.Linear(before * (image // 16) ** 2, hidden[0]), nn.ReLU()]
    layers += [nn.Linear(*hidden), nn.ReLU(), nn.Linear(hidden[1], classes)]
    return nn.Sequential(*layers)


def train(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, steps: int) -> list[float]:
    """The losses of ``steps`` steps on all images, with momentum."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses
