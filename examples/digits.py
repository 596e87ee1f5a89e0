# SPDX-License-Identifier: Apache-2.0
"""Train a small residual network on scikit-learn's digits, with torch's batch norm and with the kernels.

    pip install '.[examples]'  # in a checkout
    python examples/digits.py --picture digits.png

Both runs start from the same weights and see the same batches. On the CPU the kernels run in the simulator.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

try:
    import torch
    from sklearn.datasets import load_digits
    from torch import nn

    import nki_bn.torch as nbt
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error}; the extra examples has what is needed: in a checkout, pip install '.[examples]'", name=error.name
    ) from error

# How far the two curves may be apart, as a share of the first loss. Batch norms agree to 2^-18; training makes more of
# it, most of all where a ReLU of one run lets a value pass that the other stops. A test derives the figure.
BOUND = 0.005
CLASSES = 10
BATCH = 64


class Block(nn.Module):
    """Two convolutions and a shortcut, [B, inner, H, W] to [B, outer, H/stride, W/stride]."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inner, outer, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outer),
            nn.ReLU(),
            nn.Conv2d(outer, outer, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outer),
        )
        self.shortcut = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """relu(body(x) + shortcut(x))."""
        return torch.relu(self.body(x) + self.shortcut(x))


def make_network() -> nn.Module:
    """[B, 1, 8, 8] to [B, 10]; always with the same weights."""
    torch.manual_seed(0)
    stem = (nn.Conv2d(1, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    return nn.Sequential(
        *stem, Block(8, 16, 2), Block(16, 32, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES)
    )


def load_images() -> tuple[torch.Tensor, torch.Tensor]:
    """1797 handwritten digits [1797, 1, 8, 8] with values from 0 to 1, and their labels, in a fixed random order."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(digits.images).float()[order, None] / 16
    return images, torch.from_numpy(digits.target)[order]


def batches(images: torch.Tensor, labels: torch.Tensor, steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """``steps`` batches, over the images again and again."""
    whole = len(images) // BATCH
    for step in range(steps):
        first = step % whole * BATCH
        yield images[first : first + BATCH], labels[first : first + BATCH]


def train(network: nn.Module, images: torch.Tensor, labels: torch.Tensor, steps: int) -> list[float]:
    """The loss of every step."""
    optimiser = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for inputs, targets in batches(images, labels, steps):
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(network(inputs), targets)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


def accuracy(network: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """The share of images that are recognised, by the running statistics."""
    network.eval()
    with torch.no_grad():
        return float((network(images).argmax(1) == labels).float().mean())


def compare(steps: int) -> tuple[list[float], list[float]]:
    """The losses with torch's batch norm and with the kernels.

    Raises:
        RuntimeError: they are further apart than ``BOUND`` allows.
    """
    images, labels = load_images()
    held_back = images[-256:], labels[-256:]
    plain = make_network()
    converted = nbt.convert_batch_norm(copy.deepcopy(plain), backend="simulator", fuse_relu=True)
    curves = []
    for name, network in (("torch", plain), ("kernels in the simulator", converted)):
        curves.append(train(network, images[:-256], labels[:-256], steps))
        print(
            f"{name}: loss {curves[-1][0]:.4f} to {curves[-1][-1]:.4f}, {accuracy(network, *held_back):.1%} recognised"
        )
    apart = max(abs(a - b) for a, b in zip(*curves, strict=True))
    print(f"the curves are at most {apart:.2e} apart; allowed: {BOUND * curves[0][0]:.2e}")
    if apart > BOUND * curves[0][0]:
        raise RuntimeError("the two runs are further apart than rounding explains")
    return curves[0], curves[1]


def draw(plain: list[float], kernels: list[float], picture: Path) -> None:
    """The two curves, and below them how far they are apart."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, 1, sharex=True, figsize=(6, 5), height_ratios=(2, 1), layout="constrained"
    )
    above.plot(plain, color="tab:blue", linewidth=4, alpha=0.4, label="torch.nn.BatchNorm2d")
    above.plot(kernels, color="tab:red", linewidth=1, label="nki_bn kernels in the simulator")
    above.set_ylabel("loss")
    above.legend()
    below.semilogy([abs(a - b) + 1e-9 for a, b in zip(plain, kernels, strict=True)], color="black", linewidth=1)
    below.axhline(BOUND * plain[0], color="gray", linestyle="--", linewidth=1)
    below.set_ylabel("apart (dashed: allowed)")
    below.set_xlabel("step")
    figure.savefig(picture, dpi=110, metadata={"Software": None})


def _steps(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of steps; accepted: whole numbers from 1 up")
    return int(text)


def _picture(text: str) -> Path:
    """Refuses, before anything is trained, what cannot be written."""
    path = Path(text)
    if path.suffix != ".png":
        raise argparse.ArgumentTypeError(f"{text!r} is of no kind that can be written; accepted: .png")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: {path.parent} is no folder")
    if find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("matplotlib is not installed: in a checkout, pip install '.[examples]'")
    return path


def main(arguments: list[str] | None = None) -> None:
    """Run the comparison from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=_steps, default=60, help="of training (60)")
    parser.add_argument("--picture", type=_picture, metavar="FILE.png", help="write the two loss curves to it")
    options = parser.parse_args(arguments)
    curves = compare(options.steps)
    if options.picture is not None:
        draw(*curves, options.picture)


if __name__ == "__main__":
    main()
