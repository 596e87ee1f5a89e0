# SPDX-License-Identifier: Apache-2.0
"""Replicas in one process: a launch for each, and NumPy in place of the collectives between them.

Arrays of examples are [n, C, D, H, W] in the dtype of the kernels, columns [C] float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

import nki_bn
from nki_bn.kernels import given_statistics
from nki_bn.kernels.batch_norm_bwd import batch_norm_bwd
from nki_bn.kernels.batch_norm_fwd import batch_norm_fwd
from nki_bn.kernels.plan import BackwardPlan, ForwardPlan
from nki_bn.kernels.sizing import staged_plan, two_read_plan
from nki_bn.reference import Array
from nki_bn.simulator import RunOptions, run

assert nki_bn.installation.kind == "embedded"

# What a kernel may use of SBUF, and so little that tiles have 64 to 128 columns.
ROOMY = 200_000
TIGHT = 3_500


class Part(NamedTuple):
    """What one replica holds."""

    x: Array
    dy: Array
    residual: Array | None = None
    mask: Array | None = None

    @property
    def total(self) -> int:
        """Values per channel."""
        return int(self.x.size // self.x.shape[1])


class Forward(NamedTuple):
    """Results of a training forward; ``mean`` and ``var`` are the same on all replicas."""

    y: list[Array]
    masks: list[Array]
    mean: Array
    var: Array


class Backward(NamedTuple):
    """Results of a backward: dx per replica, and each replica's own sums."""

    dx: list[Array]
    dgamma: list[Array]
    dbeta: list[Array]


@dataclass(frozen=True)
class Layer:
    """A batch norm and how it is launched: plain, and in the steps between which replicas reduce.

    ``relu`` is "none", "mask" (the backward reads a mask) or "recompute".
    """

    gamma: Array
    beta: Array
    relu: str = "none"
    eps: float = 1e-5
    sbuf_bytes: int = ROOMY
    lnc: int = 1
    options: RunOptions = field(default_factory=RunOptions)

    @property
    def _columns(self) -> tuple[Array, Array]:
        return self.gamma.reshape(-1, 1), self.beta.reshape(-1, 1)

    def training_forward(self, part: Part, running: tuple[Array, Array] | None = None) -> tuple[Array, ...]:
        """y, mean, var, new running mean and variance, and mask of the plain kernel."""
        plan = self.forward_plan(part)
        tracked = {} if running is None else {"running_mean": running[0], "running_var": running[1]}
        outputs: tuple[Array, ...] = self._forward(part, plan, **tracked)
        return outputs

    def given_forward(self, part: Part, mean: Array, var: Array) -> tuple[Array, Array]:
        """y and mask of the forward with these statistics."""
        plan = self.forward_plan(part, training=False)
        y, *_, mask = self._forward(part, plan, means=mean, variances=var)
        return y, mask

    def local_moments(self, part: Part) -> tuple[Array, Array]:
        """Mean and variance of one shard."""
        plan = self.moments_plan(part)
        _, mean, var, *_ = self._run(batch_norm_fwd, part.x, *self._columns, plan=plan)
        return mean, var

    def variance_around(self, part: Part, centers: Array) -> Array:
        """Mean of (x - center)^2 of one shard."""
        result: Array = self._run(given_statistics.variance_around, part.x, centers, plan=self.moments_plan(part))
        return result

    def gradients(self, part: Part, mean: Array, var: Array, training: bool = True) -> tuple[Array, Array, Array]:
        """dx, dgamma [C] and dbeta [C] of the plain kernel."""
        plan = self.backward_plan(part, training=training)
        dx, dgamma, dbeta = self._run(batch_norm_bwd, *self._arguments(part, mean, var), plan=plan, **self._relu(part))
        return dx, dgamma[:, 0], dbeta[:, 0]

    def local_sums(self, part: Part, mean: Array, var: Array) -> tuple[Array, Array]:
        """dgamma and dbeta [C] of one shard at given statistics."""
        plan = self.backward_plan(part, need=(False, True, True, False))
        sums = self._run(batch_norm_bwd, *self._arguments(part, mean, var), plan=plan, **self._relu(part))[1:]
        return sums[0][:, 0], sums[1][:, 0]

    def input_gradient(
        self, part: Part, statistics: tuple[Array, Array], sums: tuple[Array, Array], count: int
    ) -> Array:
        """dx of one shard from (mean, var) and (dgamma, dbeta) of ``count`` values."""
        plan = self.backward_plan(part)
        columns = [total.reshape(-1, 1) for total in sums]
        arguments = (*self._arguments(part, *statistics), *columns, count, plan)
        dx: Array = self._run(given_statistics.input_gradient, *arguments, **self._relu(part))
        return dx

    def forward_plan(self, part: Part, training: bool = True) -> ForwardPlan:
        """The plan of a forward, with y and, under a ReLU, the mask."""
        fused = {"relu": self.relu != "none", "residual": part.residual is not None}
        return two_read_plan(flat(part.x), part.x.dtype.name, self.lnc, self.sbuf_bytes, training, **fused)

    def moments_plan(self, part: Part) -> ForwardPlan:
        """The plan of a forward without y."""
        sizes = flat(part.x), part.x.dtype.name, self.lnc, self.sbuf_bytes
        return two_read_plan(*sizes, need=(False, False))

    def backward_plan(
        self, part: Part, training: bool = True, need: tuple[bool, ...] = (True, True, True, False)
    ) -> BackwardPlan:
        """The plan of a backward."""
        residual = self.relu == "recompute" and part.residual is not None
        sizes = flat(part.x), part.x.dtype.name, self.relu, self.lnc, self.sbuf_bytes
        return staged_plan(*sizes, residual, training, need)

    def _forward(self, part: Part, plan: ForwardPlan, **arguments: Any) -> Any:
        fused = {"fuse_relu": self.relu != "none", "residual": part.residual, "eps": self.eps}
        return self._run(batch_norm_fwd, part.x, *self._columns, plan=plan, **fused, **arguments)

    def _arguments(self, part: Part, mean: Array, var: Array) -> tuple[Array, ...]:
        return part.dy, part.x, mean, var, *self._columns

    def _relu(self, part: Part) -> dict[str, Any]:
        masked = {"relu_mask": part.mask if self.relu == "mask" else None}
        return {"fuse_relu": self.relu != "none", "eps": self.eps, "residual": part.residual, **masked}

    def _run(self, kernel: Any, *arguments: Any, **named: Any) -> Any:
        return run(kernel, arguments, named, self.lnc, self.options).outputs


def flat(x: Array) -> tuple[int, int, int]:
    """(batches, channels, positions) of x."""
    return x.shape[0], x.shape[1], math.prod(x.shape[2:])


def all_reduce(values: Sequence[Array], weights: Sequence[float]) -> Array:
    """Weighted sum of one float32 array per replica, in float32 and in pairs."""
    terms = [value * np.float32(weight) for value, weight in zip(values, weights, strict=True)]
    while len(terms) > 1:
        terms = [terms[i] + terms[i + 1] if i + 1 < len(terms) else terms[i] for i in range(0, len(terms), 2)]
    return terms[0]


def synchronised_forward(layer: Layer, parts: Sequence[Part]) -> Forward:
    """Two all-reduces, and a launch per step on every replica that has values."""
    filled = [part for part in parts if part.total]
    weights = [part.total / total_of(parts) for part in filled]
    mean = all_reduce([layer.local_moments(part)[0] for part in filled], weights)
    var = all_reduce([layer.variance_around(part, mean) for part in filled], weights)
    results = [layer.given_forward(part, mean, var) if part.total else nothing(part) for part in parts]
    return Forward([y for y, _ in results], [mask for _, mask in results], mean, var)


def synchronised_backward(layer: Layer, parts: Sequence[Part], mean: Array, var: Array) -> Backward:
    """One all-reduce of the two sums."""
    zeros = np.zeros_like(mean)
    sums = [layer.local_sums(part, mean, var) if part.total else (zeros, zeros) for part in parts]
    dgamma, dbeta = ([pair[i] for pair in sums] for i in range(2))
    ones = [1.0] * len(parts)
    reduced = all_reduce(dgamma, ones), all_reduce(dbeta, ones)
    count = total_of(parts)
    dx = [
        layer.input_gradient(part, (mean, var), reduced, count) if part.total else np.zeros_like(part.x)
        for part in parts
    ]
    return Backward(dx, dgamma, dbeta)


def update_running(running: Array, batch: Array, factor: float, momentum: float) -> Array:
    """(1 - momentum)*running + factor*batch in float32, each product rounded, as the plain kernel does it."""
    return running * np.float32(1.0 - momentum) + batch * np.float32(factor)


def total_of(parts: Sequence[Part]) -> int:
    """Values per channel on all replicas."""
    return sum(part.total for part in parts)


def nothing(part: Part) -> tuple[Array, Array]:
    """y and mask of an empty shard."""
    return np.zeros_like(part.x), np.zeros(part.x.shape, np.uint8)


def with_masks(parts: Sequence[Part], masks: Sequence[Array]) -> list[Part]:
    """The parts with the masks of a forward; None where it made none."""
    return [part._replace(mask=mask) for part, mask in zip(parts, masks, strict=True)]


def draw(
    shape: tuple[int, ...], sizes: Sequence[int], dtype: Any = np.float32, residual: bool = False, seed: int = 0
) -> tuple[Layer, Part, list[Part]]:
    """A layer, a global batch of normal values with mean 3 and deviation 2, and its shards."""
    rng = np.random.default_rng(seed)
    channels = shape[1]
    gamma, beta = ((centre + 0.5 * rng.standard_normal(channels)).astype(np.float32) for centre in (1.0, 0.0))
    x, dy, extra = ((m + s * rng.standard_normal(shape)).astype(dtype) for m, s in ((3, 2), (0, 1), (0, 1)))
    whole = Part(x, dy, extra if residual else None)
    return Layer(gamma, beta), whole, cut(whole, sizes)


def cut(whole: Part, sizes: Sequence[int]) -> list[Part]:
    """The shards of a global batch."""
    places = np.cumsum(sizes)[:-1]
    arrays = [[None] * len(sizes) if array is None else np.split(array, places) for array in whole]
    return [Part(*arrays_of_part) for arrays_of_part in zip(*arrays, strict=True)]
