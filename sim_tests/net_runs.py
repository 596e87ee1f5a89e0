# SPDX-License-Identifier: Apache-2.0
"""The network that the tests of the whole network run, small enough for float64 on any machine."""

from __future__ import annotations

from functools import cache

import ml_dtypes
import numpy as np
from property_cases import shard
from whole_net import Chain, Parameters, Shards, Tape, draw_parameters, loss_cotangent

from nki_bn.reference import Array, Float64

IMAGES, CLASSES = 8, 5
WIDTHS = (4, 4, 6, 6, 8, 8, 8, 8)


@cache
def network() -> tuple[Parameters, Array, Array]:
    """Parameters, images and targets: rows of probabilities, none of them 0 or 1."""
    rng = np.random.default_rng(11)
    parameters = draw_parameters(rng, WIDTHS, (10, 8), CLASSES, image=16)
    target = rng.random((IMAGES, CLASSES)) + 0.1
    return parameters, rng.standard_normal((IMAGES, 3, 16, 16)), target / target.sum(1, keepdims=True)


def run(
    chain: Chain, parts: tuple[int, ...], choices: dict[str, list[Array]] | None = None
) -> tuple[Tape, dict[str, Shards], list[Parameters]]:
    """Forward and backward on replicas: tape, cotangents, and each replica's gradients.

    A replica's loss is the sum over its examples times R/B, its mean if all shards are equal.
    """
    parameters, images, target = network()
    tape = chain.forward(parameters, shard(images, parts), choices)
    weight = IMAGES / len(parts)
    pairs = zip(tape.outputs["denseb"], shard(target, parts), strict=True)
    return tape, *chain.backward(parameters, tape, [loss_cotangent(*pair, weight) for pair in pairs])


def mean_gradients(gradients: list[Parameters]) -> Parameters:
    """What data parallelism's own all-reduce gives every replica."""
    return {name: np.mean([local[name] for local in gradients], axis=0) for name in gradients[0]}


def to_bfloat16(array: Float64) -> Float64:
    """Rounded as torch rounds: by way of float32."""
    return array.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
