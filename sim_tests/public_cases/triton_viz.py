# SPDX-License-Identifier: Apache-2.0
"""The examples/nki_beta2 folder of triton-viz: plain functions that write an output argument."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from public_cases.common import BFLOAT16, FLOAT32, Array, Kernel, error, launch, load, normal, softmax, wide


def kernels(checkout: Path) -> list[Kernel]:
    """The kernels of the checkout at ``checkout``."""
    folder = checkout / "examples" / "nki_beta2"
    makers: dict[str, Callable[[Any], dict[str, Callable[[], float]]]] = {
        "add": _add,
        "matmul": _matmul,
        "mlp": _mlp,
        "rmsnorm": _rmsnorm,
        "rope": _rope,
        "softmax": _softmax,
        "tiled_attention": _attention,
    }
    return [
        Kernel(f"triton-viz {name}", make(lambda name=name: load(folder / f"{name}.py")))
        for name, make in makers.items()
    ]


def _add(module: Callable[[], Any]) -> dict[str, Callable[[], float]]:
    def run(shape: tuple[int, int], dtype: Any) -> float:
        a, b = normal(shape, dtype), normal(shape, dtype, 1)
        return error(launch(module().nki_tensor_add_kernel, (a, b, np.empty_like(a))), np.add(*wide(a, b)))

    def demo_in_torch() -> float:
        import torch

        a, b, result = torch.ones(4, 3), torch.ones(4, 3), torch.empty(4, 3)
        returned = launch(module().nki_tensor_add_kernel, (a, b, result))
        # The argument that the kernel wrote has to change as well.
        return max(error(returned, np.full((4, 3), 2.0)), error(result, np.full((4, 3), 2.0)))

    return {
        "4x3 torch": demo_in_torch,
        "128x512 float32": lambda: run((128, 512), FLOAT32),
        "64x100 bfloat16": lambda: run((64, 100), BFLOAT16),
    }


def _matmul(module: Callable[[], Any]) -> dict[str, Callable[[], float]]:
    def run(k: int, m: int, n: int, dtype: Any) -> float:
        left, right = normal((k, m), dtype), normal((k, n), dtype, 1)
        result = launch(module().matmul_kernel, (left, right, np.empty((m, n), dtype)))
        return error(result, np.matmul(*wide(left.T, right)))

    def demo() -> float:
        left, right = (np.arange(128 * n, dtype=np.float32).reshape(128, n) for n in (128, 512))
        result = launch(module().matmul_kernel, (left, right, np.empty((128, 512), np.float32)))
        return error(result, np.matmul(*wide(left.T, right)))

    return {
        "demo": demo,
        "256x256x1024 float32": lambda: run(256, 256, 1024, FLOAT32),
        "256x128x512 bfloat16": lambda: run(256, 128, 512, BFLOAT16),
    }


def _mlp(module: Callable[[], Any]) -> dict[str, Callable[[], float]]:
    def run(batch: int, inner: int, hidden: int, out: int, spread: float = 0.05) -> float:
        x, w1, w2 = normal((batch, inner)), normal((inner, hidden)) * spread, normal((hidden, out)) * spread
        tiled = (x.T, (128, 128)), (w1, (128, 128)), (w2, (128, 512))
        padded = [
            np.pad(value, [(0, -size % tile) for size, tile in zip(value.shape, tiles, strict=True)])
            for value, tiles in tiled
        ]
        result = np.empty((padded[0].shape[1], padded[2].shape[1]), np.float32)
        returned = launch(module().mlp_kernel, (*padded, result))
        wide_x, wide_w1, wide_w2 = wide(x, w1.astype(np.float32), w2.astype(np.float32))
        return error(returned[:batch, :out], np.maximum(wide_x @ wide_w1, 0) @ wide_w2)

    return {
        "190x170x222x333 padded": lambda: run(190, 170, 222, 333),
        "128x128x256x512": lambda: run(128, 128, 256, 512),
    }


def _rmsnorm(module: Callable[[], Any]) -> dict[str, Callable[[], float]]:
    def run(shape: tuple[int, int], dtype: Any, eps: float = 1e-6) -> float:
        x, gamma = normal(shape, dtype), normal(shape, dtype, 1)
        result = launch(module().rmsnorm_kernel, (x, gamma, np.empty_like(x), eps))
        values, scale = wide(x, gamma)
        return error(result, values / np.sqrt((values**2).mean(1, keepdims=True) + eps) * scale)

    return {
        "256x64 float32": lambda: run((256, 64), FLOAT32),
        "128x1000 bfloat16": lambda: run((128, 1000), BFLOAT16),
        "128x33 float32 eps 0.5": lambda: run((128, 33), FLOAT32, 0.5),
    }


def _rope(module: Callable[[], Any]) -> dict[str, Callable[[], float]]:
    def run(batch: int, heads: int, length: int, width: int, dtype: Any) -> float:
        shape = (batch, heads, length, width)
        q, k = normal(shape, dtype), normal(shape, dtype, 1)
        angles = np.arange(length)[:, None] / 10000.0 ** (np.arange(0, width, 2) / width)
        angles = np.concatenate([angles, angles], axis=1)
        tables = np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)
        outputs = np.empty_like(q), np.empty_like(k)
        launch(module().rope_kernel, (q, k, *tables, *outputs, *shape))
        return max(error(output, _rotated(*wide(x, *tables))) for output, x in zip(outputs, (q, k), strict=True))

    return {
        "1x4x128x64 float32": lambda: run(1, 4, 128, 64, FLOAT32),
        "2x1x256x32 bfloat16": lambda: run(2, 1, 256, 32, BFLOAT16),
    }


def _rotated(x: Array, cos: Array, sin: Array) -> Array:
    first, second = np.split(x, 2, axis=-1)
    return np.asarray(x * cos + np.concatenate([-second, first], axis=-1) * sin)


def _softmax(module: Callable[[], Any]) -> dict[str, Callable[[], float]]:
    def run(shape: tuple[int, int], dtype: Any) -> float:
        x = normal(shape, dtype)
        return error(launch(module().softmax_kernel, (x, np.empty_like(x))), softmax(*wide(x)))

    return {"256x64 float32": lambda: run((256, 64), FLOAT32), "128x500 bfloat16": lambda: run((128, 500), BFLOAT16)}


def _attention(module: Callable[[], Any]) -> dict[str, Callable[[], float]]:
    def run(batch: int, heads: int, kv_heads: int, m: int, n: int, value_width: int) -> float:
        q = normal((batch, heads, m, 128))
        k, v = normal((batch, kv_heads, n, 128), seed=1), normal((batch, kv_heads, n, value_width), seed=2)
        out = np.empty((batch, heads, m, value_width), np.float32)
        sizes = batch, heads, kv_heads, kv_heads, m, n, 128, value_width
        launch(module().tiled_attention_kernel, (q, k, v, out, *sizes))
        wide_q, wide_k, wide_v = wide(q, *(np.repeat(x, heads // kv_heads, axis=1) for x in (k, v)))
        return error(out, softmax(wide_q @ wide_k.swapaxes(2, 3) / np.sqrt(128)) @ wide_v)

    return {
        "2x2 heads 128x128x64": lambda: run(2, 2, 2, 128, 128, 64),
        "1x4 heads over 2, 256x384x128": lambda: run(1, 4, 2, 256, 384, 128),
    }
