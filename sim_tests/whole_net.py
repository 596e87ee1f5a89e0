# SPDX-License-Identifier: Apache-2.0
"""A network for CIFAR images with its backward written out, on one or more replicas.

Layers 1 to 8: 3x3 convolution, batch norm, ReLU; a 2x2 max pool after 2, 4, 6, 8; then dense layers 9, a, b with a ReLU
between. 38 parameters: weight, bias, gamma, beta of eight layers, weight and bias of three.

Everything that depends on the examples is a list with one array per replica. Only a batch-norm *site* looks beyond its
own replica; all other layers map the list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from layers import Convolution, Dense, Gradients, max_pool, max_pool_vjp, softmax

from nki_bn import reference
from nki_bn import synchronised_reference as synchronised
from nki_bn.reference import Array, Float64

Shards = list[Float64]
Parameters = dict[str, Float64]
BLOCKS = tuple("12345678")
POOLED = tuple("2468")
HEAD = tuple("9ab")
# A parameter that batch norm takes away again: its true gradient is 0.
IDLE = tuple(f"{name}.bias" for name in BLOCKS)
CONVOLUTION = Convolution()


class Normalised(NamedTuple):
    """What a site gives forward: the values after the ReLU, where it let through (bool), what it keeps."""

    y: Shards
    masks: list[Array]
    saved: Any


class Site(Protocol):
    """Batch norm and the ReLU behind it, on all replicas."""

    def forward(self, x: Shards, gamma: Float64, beta: Float64, masks: list[Array] | None) -> Normalised:
        """Normalise; given ``masks`` stand in for the ReLU's own."""

    def backward(self, dy: Shards, saved: Any) -> list[Gradients]:
        """From the cotangent behind the ReLU: of x, gamma and beta, per replica."""


@dataclass(frozen=True)
class PlainSite:
    """The float64 reference on one replica; statistics over the batch, or over each image alone."""

    per_image: bool = False
    eps: float = 1e-5

    def forward(self, x: Shards, gamma: Float64, beta: Float64, masks: list[Array] | None) -> Normalised:
        """See :class:`Site`."""
        (values,) = x
        rows = self._relabelled(values)
        repeat = rows.shape[1] // len(gamma)
        mean, var = reference.statistics(rows)
        columns = np.tile(gamma, repeat), np.tile(beta, repeat)
        z = reference.pre_activation(rows, mean, var, *columns, self.eps).value.reshape(values.shape)
        mask = z > 0 if masks is None else masks[0]
        return Normalised([np.where(mask, z, 0.0)], [mask], (rows, mean, var, columns[0], mask))

    def backward(self, dy: Shards, saved: Any) -> list[Gradients]:
        """See :class:`Site`."""
        rows, mean, var, gamma, mask = saved
        cotangent = dy[0] * mask
        local = reference.batch_norm_bwd(self._relabelled(cotangent), rows, mean, var, gamma, self.eps)
        dx = local.dx.value.reshape(cotangent.shape)
        sums = (total.value.reshape(-1, cotangent.shape[1]).sum(0) for total in (local.dgamma, local.dbeta))
        return [Gradients(dx, *sums)]

    def _relabelled(self, x: Float64) -> Float64:
        """Every channel of every image as a channel of its own, if these are what is normalised."""
        return x.reshape(1, -1, *x.shape[2:]) if self.per_image else x


@dataclass(frozen=True)
class SynchronisedSite:
    """The synchronised float64 reference."""

    eps: float = 1e-5

    def forward(self, x: Shards, gamma: Float64, beta: Float64, masks: list[Array] | None) -> Normalised:
        """See :class:`Site`."""
        packed = synchronised.two_round(x)
        z = [synchronised.forward(part, packed, gamma, beta, self.eps) for part in x]
        chosen = [part > 0 for part in z] if masks is None else masks
        y = [np.where(mask, part, 0.0) for part, mask in zip(z, chosen, strict=True)]
        return Normalised(y, chosen, (x, packed, gamma, chosen))

    def backward(self, dy: Shards, saved: Any) -> list[Gradients]:
        """See :class:`Site`."""
        x, packed, gamma, masks = saved
        cotangents = [part * mask for part, mask in zip(dy, masks, strict=True)]
        terms = synchronised.backward_terms(cotangents, x, packed, gamma, self.eps)
        return [
            Gradients(
                synchronised.input_gradient(cotangent, part, terms, gamma, self.eps),
                *synchronised.parameter_gradients(cotangent, part, packed, self.eps),
            )
            for cotangent, part in zip(cotangents, x, strict=True)
        ]


def exact(array: Float64) -> Float64:
    """No rounding."""
    return array


@dataclass(frozen=True)
class Tape:
    """Of a forward: the input of every layer and the output of every step by name, what sites keep, and choices.

    Steps: ``conv1`` to ``conv8``, ``relu1`` to ``relu8``, ``pool2`` ..., ``dense9``, ``relu9``, ``densea``, ``relua``,
    ``denseb`` (the logits). ``choices`` holds the masks of the ReLUs and what the pools took.
    """

    inputs: dict[str, Shards] = field(default_factory=dict)
    outputs: dict[str, Shards] = field(default_factory=dict)
    saved: dict[str, Any] = field(default_factory=dict)
    choices: dict[str, list[Array]] = field(default_factory=dict)


@dataclass(frozen=True)
class Chain:
    """The network's forward and backward with one kind of site.

    ``cast`` rounds the operands and results of convolutions, and their cotangents, as casts around them would.
    """

    site: Site
    cast: Callable[[Float64], Float64] = exact

    def forward(self, parameters: Parameters, images: Shards, choices: Mapping[str, list[Array]] | None = None) -> Tape:
        """From images [n, 3, H, W] per replica; ``choices`` of another tape replace those of the ReLUs and pools."""
        tape, given = Tape(), choices or {}
        x = images
        for name in BLOCKS:
            x = self._block(name, parameters, x, tape, given)
        x = [part.reshape(len(part), math.prod(part.shape[1:])) for part in x]
        for name in HEAD:
            tape.inputs[name] = x
            weights = parameters[f"{name}.weight"], parameters[f"{name}.bias"]
            x = tape.outputs[f"dense{name}"] = [Dense.forward(part, *weights) for part in x]
            if name != HEAD[-1]:
                masks = tape.choices[f"relu{name}"] = given.get(f"relu{name}") or [part > 0 for part in x]
                x = tape.outputs[f"relu{name}"] = [np.where(m, part, 0.0) for m, part in zip(masks, x, strict=True)]
        return tape

    def _block(
        self, name: str, parameters: Parameters, x: Shards, tape: Tape, given: Mapping[str, list[Array]]
    ) -> Shards:
        weight, bias, gamma, beta = (parameters[f"{name}.{kind}"] for kind in ("weight", "bias", "gamma", "beta"))
        operands = tape.inputs[name] = [self.cast(part) for part in x]
        weights = self.cast(weight), self.cast(bias)
        z = tape.outputs[f"conv{name}"] = [self.cast(CONVOLUTION.forward(part, *weights)) for part in operands]
        y, masks, tape.saved[name] = self.site.forward(z, gamma, beta, given.get(f"relu{name}"))
        tape.outputs[f"relu{name}"], tape.choices[f"relu{name}"] = y, masks
        if name not in POOLED:
            return y
        taken = given.get(f"pool{name}")
        pooled = [max_pool(part, None if taken is None else taken[replica]) for replica, part in enumerate(y)]
        tape.choices[f"pool{name}"] = [choice for _, choice in pooled]
        tape.outputs[f"pool{name}"] = [part for part, _ in pooled]
        return tape.outputs[f"pool{name}"]

    def backward(
        self, parameters: Parameters, tape: Tape, cotangent: Shards
    ) -> tuple[dict[str, Shards], list[Parameters]]:
        """From the cotangent of the logits: those of every step by name and of ``images``; each replica's gradients."""
        cotangents: dict[str, Shards] = {}
        gradients: list[Parameters] = [{} for _ in cotangent]
        for name in reversed(HEAD):
            if name != HEAD[-1]:
                cotangents[f"relu{name}"] = cotangent
                masks = tape.choices[f"relu{name}"]
                cotangent = [part * mask for part, mask in zip(cotangent, masks, strict=True)]
            cotangents[f"dense{name}"] = cotangent
            local = [
                Dense.vjp(part, x, parameters[f"{name}.weight"])
                for part, x in zip(cotangent, tape.inputs[name], strict=True)
            ]
            cotangent = _collect(gradients, local, f"{name}.weight", f"{name}.bias")
        last = tape.outputs[f"pool{BLOCKS[-1]}"]
        cotangent = [part.reshape(pooled.shape) for part, pooled in zip(cotangent, last, strict=True)]
        for name in reversed(BLOCKS):
            cotangent = self._block_vjp(name, parameters, tape, cotangent, (cotangents, gradients))
        cotangents["images"] = cotangent
        return cotangents, gradients

    def _block_vjp(
        self,
        name: str,
        parameters: Parameters,
        tape: Tape,
        cotangent: Shards,
        results: tuple[dict[str, Shards], list[Parameters]],
    ) -> Shards:
        cotangents, gradients = results
        if name in POOLED:
            cotangents[f"pool{name}"] = cotangent
            choices = tape.choices[f"pool{name}"]
            cotangent = [max_pool_vjp(part, choice) for part, choice in zip(cotangent, choices, strict=True)]
        cotangents[f"relu{name}"] = cotangent
        masks = tape.choices[f"relu{name}"]
        cotangents[f"bn{name}"] = [part * mask for part, mask in zip(cotangent, masks, strict=True)]
        site = self.site.backward(cotangent, tape.saved[name])
        cotangents[f"conv{name}"] = _collect(gradients, site, f"{name}.gamma", f"{name}.beta")
        weight = self.cast(parameters[f"{name}.weight"])
        local = [
            CONVOLUTION.vjp(self.cast(part), x, weight)
            for part, x in zip(cotangents[f"conv{name}"], tape.inputs[name], strict=True)
        ]
        rounded = [Gradients(*map(self.cast, part)) for part in local]
        return _collect(gradients, rounded, f"{name}.weight", f"{name}.bias")


def _collect(gradients: list[Parameters], local: list[Gradients], first: str, second: str) -> Shards:
    """Put the two parameter gradients of every replica under their names, and pass on those of the input."""
    for replica, part in zip(gradients, local, strict=True):
        replica[first], replica[second] = part.weight, part.bias
    return [part.x for part in local]


def loss_cotangent(logits: Float64, target: Float64, batch: float | None = None) -> Float64:
    """(softmax - t)/B: of the mean over B examples (None: all there are) of the cross-entropy with ``target``."""
    return (softmax(logits) - target) / (len(logits) if batch is None else batch)


def draw_parameters(
    rng: np.random.Generator, widths: tuple[int, ...], hidden: tuple[int, int], classes: int, image: int
) -> Parameters:
    """Normal weights of deviation 1/sqrt(fan in), gammas about 1."""
    parameters: Parameters = {}
    before = 3
    for name, width in zip(BLOCKS, widths, strict=True):
        parameters[f"{name}.weight"] = rng.standard_normal((width, before, 3, 3)) / np.sqrt(9 * before)
        parameters[f"{name}.bias"] = rng.standard_normal(width)
        parameters[f"{name}.gamma"] = 1 + 0.3 * rng.standard_normal(width)
        parameters[f"{name}.beta"] = 0.5 * rng.standard_normal(width)
        before = width
    before *= (image // 16) ** 2
    for name, width in zip(HEAD, (*hidden, classes), strict=True):
        parameters[f"{name}.weight"] = rng.standard_normal((width, before)) / np.sqrt(before)
        parameters[f"{name}.bias"] = rng.standard_normal(width)
        before = width
    return parameters
