# SPDX-License-Identifier: Apache-2.0
"""The nki/examples folder of the Neuron SDK's documentation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from public_cases.common import BFLOAT16, FLOAT32, Array, Kernel, error, launch, load, normal, wide

# Kernel and the sizes (K, M, N) it takes.
_MATMULS: dict[str, tuple[int, int, int]] = {
    "nki_matmul_basic_": (128, 64, 512),
    "nki_matmul_tiled_": (256, 256, 1024),
    "nki_matmul_hoist_load_": (256, 256, 1024),
    "nki_matmul_block_free_dimension_": (256, 512, 2048),
    "nki_matmul_fully_optimized_": (1024, 2048, 1024),
}


def kernels(checkout: Path) -> list[Kernel]:
    """The kernels of the checkout at ``checkout``."""
    folder = checkout / "nki" / "examples"

    def module(name: str) -> Any:
        return load(folder / name / f"{name}_nki_kernels.py")

    found = [
        Kernel("neuron-sdk tensor_addition", _addition(partial(module, "tensor_addition"))),
        Kernel("neuron-sdk transpose2d", _transpose(partial(module, "transpose2d"))),
        Kernel("neuron-sdk average_pool2d", _pool(partial(module, "average_pool2d"))),
    ]
    found += [
        Kernel("neuron-sdk index-case-1", _split(partial(load, folder / "index-case-1.py"))),
        Kernel("neuron-sdk index-case-3", _max_pool(partial(load, folder / "index-case-3.py"))),
        Kernel("neuron-sdk nki_simulate_example", _simulated(folder / "simulate" / "nki_simulate_example.py")),
    ]
    found += [
        Kernel(f"neuron-sdk {name}", _matmul(partial(module, "matrix_multiplication"), name, sizes))
        for name, sizes in _MATMULS.items()
    ]
    mamba = partial(load, folder / "fused_mamba" / "mamba_nki_kernels.py")
    found += [Kernel(f"neuron-sdk {name}", _mamba(mamba, name)) for name in ("mamba_v1", "mamba_v2", "mamba_v3")]
    return found


def _addition(module: Callable[[], Any]) -> dict[str, Callable[[], float]]:
    def run(shape: tuple[int, int], dtype: Any, target: str) -> float:
        a, b = normal(shape, dtype), normal(shape, dtype, 1)
        return error(launch(module().nki_tensor_add, (a, b), target=target), np.add(*wide(a, b)))

    # The file itself asks for trn1.
    return {
        "256x1024 float32 trn1": lambda: run((256, 1024), FLOAT32, "trn1"),
        "128x512 bfloat16 trn2": lambda: run((128, 512), BFLOAT16, "trn2"),
    }


def _transpose(module: Callable[[], Any]) -> dict[str, Callable[[], float]]:
    def run(x: Array, rows: int, columns: int) -> float:
        result = launch(module().tensor_transpose2D_kernel_, (x, (rows, columns)))
        return error(result, wide(x)[0].reshape(-1, rows, columns).swapaxes(1, 2).reshape(x.shape), FLOAT32)

    return {
        "5x(3x4) int8": lambda: run(np.arange(60, dtype=np.int8).reshape(5, 12), 3, 4),
        "128x(7x9) float32": lambda: run(normal((128, 63)), 7, 9),
    }


def _pool(module: Callable[[], Any]) -> dict[str, Callable[[], float]]:
    def run(shape: tuple[int, int, int], size: int, dtype: Any) -> float:
        x = normal(shape, dtype)
        c, h, w = shape
        windows = wide(x)[0].reshape(c, h // size, size, w // size, size)
        return error(launch(module().tensor_avgpool_kernel, (x, size)), windows.mean((2, 4)))

    return {
        "2x6x6 by 2 float32": lambda: run((2, 6, 6), 2, FLOAT32),
        "128x12x20 by 4 bfloat16": lambda: run((128, 12, 20), 4, BFLOAT16),
    }


def _split(module: Callable[[], Any]) -> dict[str, Callable[[], float]]:
    def run(shape: tuple[int, int], dtype: Any) -> float:
        x = normal(shape, dtype)
        even, odd = launch(module().tensor_split_kernel_, (x,))
        return max(error(even, wide(x)[0][:, ::2]), error(odd, wide(x)[0][:, 1::2]))

    return {"4x5 bfloat16": lambda: run((4, 5), BFLOAT16), "128x64 float32": lambda: run((128, 64), FLOAT32)}


def _max_pool(module: Callable[[], Any]) -> dict[str, Callable[[], float]]:
    def run(shape: tuple[int, int, int], size: int, dtype: Any) -> float:
        x = normal(shape, dtype)
        c, h, w = shape
        windows = wide(x)[0].reshape(c, h // size, size, w // size, size)
        return error(launch(module().tensor_maxpool_kernel_, (x, size)), windows.max((2, 4)))

    return {
        "2x6x6 by 2 bfloat16": lambda: run((2, 6, 6), 2, BFLOAT16),
        "64x12x20 by 4 float32": lambda: run((64, 12, 20), 4, FLOAT32),
    }


def _simulated(path: Path) -> dict[str, Callable[[], float]]:
    def run() -> float:
        # The file runs its kernel and compares by itself; here its result is compared once more.
        module = load(path)
        return error(module.result, np.add(*wide(module.a, module.b)))

    return {"128x512 float32, its own launch": run}


def _matmul(module: Callable[[], Any], name: str, sizes: tuple[int, int, int]) -> dict[str, Callable[[], float]]:
    def run(dtype: Any) -> float:
        k, m, n = sizes
        left, right = normal((k, m), dtype), normal((k, n), dtype, 1)
        return error(launch(getattr(module(), name), (left, right)), np.matmul(*wide(left.T, right)))

    label = "x".join(map(str, sizes))
    return {f"{label} float32": lambda: run(FLOAT32), f"{label} bfloat16": lambda: run(BFLOAT16)}


def _mamba(module: Callable[[], Any], name: str) -> dict[str, Callable[[], float]]:
    def run(batch: int, channels: int, length: int, state: int) -> float:
        delta, u = abs(normal((batch, channels, length))) * 0.1, normal((batch, channels, length), seed=1)
        a = -abs(normal((channels, state)))
        b, c = normal((batch, state, length), seed=2), normal((batch, state, length), seed=3)
        delta = delta.astype(np.float32)
        return error(launch(getattr(module(), name), (delta, u, a, b, c)), _selective_scan(*wide(delta, u, a, b, c)))

    return {"1x128x512x4": lambda: run(1, 128, 512, 4), "2x256x512x3": lambda: run(2, 256, 512, 3)}


def _selective_scan(delta: Array, u: Array, a: Array, b: Array, c: Array) -> Array:
    """The state-space recurrence: h = exp(delta*a)*h + delta*u*b, y = sum over states of c*h."""
    decay = np.exp(delta[:, :, None, :] * a[None, :, :, None])
    drive = (delta * u)[:, :, None, :] * b[:, None, :, :]
    state, outputs = np.zeros(decay.shape[:3]), []
    for step in range(u.shape[-1]):
        state = decay[..., step] * state + drive[..., step]
        outputs.append((state * c[:, None, :, step]).sum(2))
    return np.stack(outputs, axis=-1)
