# SPDX-License-Identifier: Apache-2.0
"""The layers around batch norm in NumPy float64, each a map of examples with its explicit VJP.

Images are [N, C, H, W], rows [N, F]. A VJP takes the cotangent of the output and what the forward saved.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from nki_bn.reference import Array, Float64


class Gradients(NamedTuple):
    """Cotangents of a layer's input, weight and bias."""

    x: Float64
    weight: Float64
    bias: Float64


class Convolution(NamedTuple):
    """Stride and padding of both dimensions, and the number of groups (as many as channels: depthwise)."""

    stride: int = 1
    padding: int = 1
    groups: int = 1

    def forward(self, x: Float64, weight: Float64, bias: Float64) -> Float64:
        """[N, O, H', W'] from x [N, C, H, W], weight [O, C/groups, h, w] and bias [O]."""
        y = np.einsum("ngcijhw,gochw->ngoij", self._patches(x, weight), self._grouped(weight), optimize=True)
        outputs: Float64 = y.reshape(len(x), len(weight), *y.shape[3:]) + bias.reshape(-1, 1, 1)
        return outputs

    def vjp(self, dy: Float64, x: Float64, weight: Float64) -> Gradients:
        """From dy [N, O, H', W'] and the saved input."""
        grouped = dy.reshape(len(dy), self.groups, dy.shape[1] // self.groups, *dy.shape[2:])
        dweight = np.einsum("ngoij,ngcijhw->gochw", grouped, self._patches(x, weight), optimize=True)
        dpatches = np.einsum("ngoij,gochw->ngchwij", grouped, self._grouped(weight), optimize=True)
        return Gradients(self._scatter(dpatches, x), dweight.reshape(weight.shape), dy.sum((0, 2, 3)))

    def _patches(self, x: Float64, weight: Float64) -> Float64:
        """[N, G, C/G, H', W', h, w]: what each output cell looks at."""
        pad = (self.padding, self.padding)
        windows = sliding_window_view(np.pad(x, ((0, 0), (0, 0), pad, pad)), weight.shape[2:], (2, 3))
        strided = windows[:, :, :: self.stride, :: self.stride]
        patches: Float64 = strided.reshape(len(x), self.groups, x.shape[1] // self.groups, *strided.shape[2:])
        return patches

    def _grouped(self, weight: Float64) -> Float64:
        return weight.reshape(self.groups, -1, *weight.shape[1:])

    def _scatter(self, dpatches: Float64, x: Float64) -> Float64:
        """The transpose of ``_patches``: every patch adds to the cells it was taken from."""
        height, width = x.shape[2:]
        padded = np.zeros((*x.shape[:2], height + 2 * self.padding, width + 2 * self.padding))
        *_, rows, columns, high, wide = dpatches.shape
        by_channel = dpatches.reshape(*x.shape[:2], rows, columns, high, wide)
        for i in range(rows):
            for j in range(columns):
                vertical = slice(i, i + self.stride * high, self.stride)
                padded[:, :, vertical, slice(j, j + self.stride * wide, self.stride)] += by_channel[:, :, i, j]
        return padded[:, :, self.padding : self.padding + height, self.padding : self.padding + width]


class Dense(NamedTuple):
    """Rows times a weight [out, in], plus a bias [out]."""

    @staticmethod
    def forward(x: Float64, weight: Float64, bias: Float64) -> Float64:
        """[N, out] from x [N, in]."""
        return x @ weight.T + bias

    @staticmethod
    def vjp(dy: Float64, x: Float64, weight: Float64) -> Gradients:
        """From dy [N, out] and the saved input."""
        return Gradients(dy @ weight, dy.T @ x, dy.sum(0))


def max_pool(x: Float64, choice: Array | None = None) -> tuple[Float64, Array]:
    """2x2 max pool of [N, C, H, W], H and W even, and which of the four cells (row-major) it took.

    A given ``choice`` is taken instead of the largest: the linear map around another forward.
    """
    batch, channels, height, width = x.shape
    cells = x.reshape(batch, channels, height // 2, 2, width // 2, 2).transpose(0, 1, 2, 4, 3, 5)
    cells = cells.reshape(*cells.shape[:4], 4)
    chosen = cells.argmax(-1) if choice is None else choice
    return np.take_along_axis(cells, chosen[..., None], -1)[..., 0], chosen


def max_pool_vjp(dy: Float64, choice: Array) -> Float64:
    """The cotangent goes to the chosen cell of each window, and 0 to the others."""
    batch, channels, height, width = dy.shape
    cells = np.where(choice[..., None] == np.arange(4), dy[..., None], 0.0)
    cells = cells.reshape(batch, channels, height, width, 2, 2).transpose(0, 1, 2, 4, 3, 5)
    return cells.reshape(batch, channels, 2 * height, 2 * width)


def average_pool(x: Float64) -> Float64:
    """Global average pool: [N, C] from [N, C, H, W]."""
    mean: Float64 = x.mean((2, 3))
    return mean


def average_pool_vjp(dy: Float64, x: Float64) -> Float64:
    """Every cell gets an equal part."""
    cells = x.shape[2] * x.shape[3]
    return np.broadcast_to(dy[:, :, None, None] / cells, x.shape)


def softmax(logits: Float64) -> Float64:
    """Rows of probabilities from rows of logits."""
    powers = np.exp(logits - logits.max(1, keepdims=True))
    probabilities: Float64 = powers / powers.sum(1, keepdims=True)
    return probabilities
