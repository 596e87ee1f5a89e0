# SPDX-License-Identifier: Apache-2.0
"""trnrand: counter-based random numbers and low-discrepancy sequences in integer arithmetic on bytes.

The references follow the papers: Salmon et al. 2011 for Threefry, van der Corput's radical inverse for Halton, XOR of
direction vectors for Sobol.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from public_cases.common import Array, Cases, Kernel, Module, error, launch
from public_cases.trnsci import module

_WORD = 0xFFFFFFFF
_PARITY = 0x1BD11BDA
_ROTATIONS = ((10, 26), (11, 21), (13, 27), (23, 5))
_LANES = 128
# Smallest number under a logarithm in the kernels.
_CLAMP = 1e-10


def kernels(checkout: Path) -> list[Kernel]:
    """The kernels of the checkout at ``checkout``."""
    source = module(checkout, "trnrand.nki.dispatch")
    return [
        Kernel("trnrand box_muller_kernel", _box_muller(source)),
        Kernel("trnrand threefry4x32_kernel", _threefry(source)),
        Kernel("trnrand threefry_normal_kernel", _threefry_normal(source)),
        Kernel("trnrand sobol_gray_code_kernel", _sobol(source)),
        Kernel("trnrand halton_kernel", _halton(source)),
        *(
            Kernel(f"trnrand threefry_streaming_{name}_kernel", _streaming(source, name))
            for name in ("normal", "uniform")
        ),
    ]


def _column(values: object) -> Array:
    return np.broadcast_to(np.asarray(values, np.int32), _LANES).reshape(-1, 1).copy()


def _words(counter: tuple[Array, int], key: tuple[int, int]) -> Array:
    """Threefry 4x32 with 20 rounds: four words for each lane, whose counter is (lane, batch, 0, 0)."""
    lanes, batch = counter
    x = [lanes.reshape(-1).astype(np.int64), np.full(_LANES, batch), np.zeros(_LANES, int), np.zeros(_LANES, int)]
    keys = [*key, 0, 0, key[0] ^ key[1] ^ _PARITY]

    def inject(step: int) -> None:
        for word in range(4):
            x[word] = (x[word] + keys[(step + word) % 5] + (step if word == 3 else 0)) & _WORD

    inject(0)
    for turn in range(20):
        pairs = ((0, 1), (2, 3)) if turn % 2 == 0 else ((0, 3), (2, 1))
        for (one, other), by in zip(pairs, _ROTATIONS[turn % 4], strict=True):
            x[one] = (x[one] + x[other]) & _WORD
            x[other] = (((x[other] << by) | (x[other] >> (32 - by))) & _WORD) ^ x[one]
        if turn % 4 == 3:
            inject(turn // 4 + 1)
    return np.stack(x, axis=1)


def _uniform(batch: int, key: tuple[int, int]) -> Array:
    """The low 24 bits of each word as a fraction."""
    return np.asarray((_words((_column(np.arange(_LANES)), batch), key) & 0xFFFFFF) / 2.0**24)


def _normal(uniform: Array) -> Array:
    """Box-Muller on pairs of columns."""
    radius = np.sqrt(-2 * np.log(np.maximum(uniform[:, 0::2], _CLAMP)))
    angle = 2 * np.pi * uniform[:, 1::2]
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=2).reshape(uniform.shape)


def _box_muller(source: Module) -> Cases:
    def run(seed: int) -> float:
        uniform = np.random.default_rng(seed).random((_LANES, 2), np.float32)
        return error(launch(source().box_muller_kernel, (uniform,)), _normal(uniform.astype(np.float64)))

    return {"128 pairs": lambda: run(0), "128 others": lambda: run(1)}


def _inputs(batch: int, key: tuple[int, int]) -> list[Array]:
    return [_column(np.arange(_LANES)), *(_column(word) for word in (batch, 0, 0, *key, 0, 0))]


def _threefry(source: Module) -> Cases:
    def run(batch: int, key: tuple[int, int]) -> float:
        return error(launch(source().threefry4x32_kernel, _inputs(batch, key)), _uniform(batch, key))

    return {"batch 0, key 0": lambda: run(0, (0, 0)), "batch 77": lambda: run(77, (0x345678, 0x12))}


def _threefry_normal(source: Module) -> Cases:
    def run(batch: int, key: tuple[int, int]) -> float:
        return error(launch(source().threefry_normal_kernel, _inputs(batch, key)), _normal(_uniform(batch, key)))

    return {"batch 5": lambda: run(5, (0x345678, 0x12))}


def _sobol(source: Module) -> Cases:
    def run(start: int) -> float:
        points = np.arange(start, start + _LANES)
        gray = points ^ (points >> 1)
        vectors = np.array(source()._SOBOL_DIR_VECS)
        bits = (gray[:, None, None] >> np.arange(vectors.shape[1])) & 1
        expected = np.bitwise_xor.reduce(bits * vectors, axis=2) / 2.0**24
        return error(launch(source().sobol_gray_code_kernel, (_column(gray),)), expected)

    return {"points from 1": lambda: run(1), "points from 5000": lambda: run(5000)}


def _halton(source: Module) -> Cases:
    def run(start: int) -> float:
        points = np.arange(start, start + _LANES)
        expected = np.stack([_radical_inverse(points, base) for base in source()._HALTON_PRIMES], axis=1)
        return error(launch(source().halton_kernel, (_column(points),)), expected)

    return {"points from 1": lambda: run(1), "points from 5000": lambda: run(5000)}


def _radical_inverse(points: Array, base: int) -> Array:
    rest, share, total = points.copy(), 1.0 / base, np.zeros(len(points))
    while rest.any():
        total += rest % base * share
        rest, share = rest // base, share / base
    return total


def _streaming(source: Module, name: str) -> Cases:
    def run(start: int, key: tuple[int, int]) -> float:
        kernel = getattr(source(), f"threefry_streaming_{name}_kernel")
        result = launch(kernel, (_column(np.arange(_LANES)), *(_column(word) for word in (start, *key, 0, 0))))
        tiles = [_uniform(start + tile, key) for tile in range(source()._PROGRAM_TILES)]
        expected = [_normal(tile) for tile in tiles] if name == "normal" else tiles
        return error(result, np.concatenate(expected, axis=1))

    return {"32 tiles from 3": partial(run, 3, (0x345678, 0x12))}
