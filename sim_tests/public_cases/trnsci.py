# SPDX-License-Identifier: Apache-2.0
"""The packages of trnsci, linear algebra part: trnfft, trnsolver, trnsparse and trntensor."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from public_cases.common import BFLOAT16, FLOAT32, Array, Cases, Kernel, Module, error, launch, load, normal, provide


def module(checkout: Path, name: str) -> Module:
    """The module ``name`` of the package whose checkout this is."""
    if str(checkout) not in sys.path:
        sys.path.append(str(checkout))
    return partial(importlib.import_module, name)


def fft_kernels(checkout: Path) -> list[Kernel]:
    """trnfft: complex products and stages of Fourier transforms; complex arrays come as their two parts."""
    dispatch, butterfly, stockham = (
        module(checkout, f"trnfft.nki.{name}") for name in ("dispatch", "butterfly", "stockham")
    )
    return [
        Kernel("trnfft _complex_gemm_kernel", _complex(dispatch, "_complex_gemm_kernel", FLOAT32)),
        Kernel("trnfft _complex_gemm_kernel_bf16", _complex(dispatch, "_complex_gemm_kernel_bf16", BFLOAT16)),
        Kernel("trnfft _complex_linear_kernel", _complex(dispatch, "_complex_linear_kernel", FLOAT32, turned=True)),
        Kernel("trnfft _complex_mul_kernel", _complex_mul(dispatch)),
        Kernel("trnfft butterfly_stage_kernel", _butterfly(butterfly, "butterfly_stage_kernel")),
        Kernel("trnfft butterfly_stage_kernel_kahan", _butterfly(butterfly, "butterfly_stage_kernel_kahan")),
        Kernel("trnfft stockham_radix4_stage_kernel", _radix4(stockham)),
        Kernel("trnfft stockham_radix8_w8_kernel", _radix8(stockham)),
        *(
            Kernel(f"trnfft {name}", _scratch(checkout, name))
            for name in ("kernel_with_local_scratch", "kernel_with_external_arg")
        ),
    ]


def _parts(*arrays: Array, dtype: Any = FLOAT32) -> list[Array]:
    return [part.astype(dtype) for array in arrays for part in (array.real, array.imag)]


def _complex_normal(shape: tuple[int, ...], seed: int = 0, dtype: Any = FLOAT32) -> Array:
    """Complex numbers in double precision whose parts are of ``dtype``."""
    real, imaginary = (normal(shape, dtype, 2 * seed + part).astype(np.float64) for part in (0, 1))
    return real + 1j * imaginary


def _complex_error(result: Sequence[Any], expected: Array, dtype: Any = None) -> float:
    return max(error(got, part, dtype) for got, part in zip(result, (expected.real, expected.imag), strict=True))


def _complex(source: Module, name: str, dtype: Any, turned: bool = False) -> Cases:
    def run(m: int, k: int, n: int) -> float:
        a, b = _complex_normal((m, k), 0, dtype), _complex_normal((n, k) if turned else (k, n), 1, dtype)
        result = launch(getattr(source(), name), _parts(a, b, dtype=dtype))
        return _complex_error(result, a @ (b.T if turned else b), FLOAT32)

    return {"64x32x40": lambda: run(64, 32, 40), "256x256x128": lambda: run(256, 256, 128)}


def _complex_mul(source: Module) -> Cases:
    def run(shape: tuple[int, ...]) -> float:
        a, b = _complex_normal(shape), _complex_normal(shape, 1)
        return _complex_error(launch(source()._complex_mul_kernel, _parts(a, b)), a * b)

    return {"8x4x64": lambda: run((8, 4, 64)), "256x1024": lambda: run((256, 1024))}


def _butterfly(source: Module, name: str) -> Cases:
    def run(batch: int, size: int, stage: int) -> float:
        half, x = 1 << stage, _complex_normal((batch, size))
        factors = np.exp(-1j * np.pi * np.arange(half) / half).astype(np.complex64).astype(np.complex128)
        groups = x.reshape(-1, 2, half)
        tables = np.broadcast_to(factors, (len(groups), half))
        result = launch(getattr(source(), name), (*_parts(x, tables), size, stage))
        odd = groups[:, 1] * factors
        expected = np.stack([groups[:, 0] + odd, groups[:, 0] - odd], axis=1)
        return _complex_error(result, expected.reshape(batch, size))

    return {"4x32 stage 0": lambda: run(4, 32, 0), "8x64 stage 3": lambda: run(8, 64, 3)}


def _radix4(source: Module) -> Cases:
    def run(groups: int) -> float:
        x, factors = _complex_normal((groups, 4)), _complex_normal((groups, 4), 1)
        result = launch(source().stockham_radix4_stage_kernel, _parts(x, factors))
        return _complex_error(result, np.fft.fft(x * factors, axis=1))

    return {"64 groups": lambda: run(64), "256 groups": lambda: run(256)}


def _radix8(source: Module) -> Cases:
    def run(groups: int) -> float:
        x = _complex_normal((groups, 8))
        matrix = np.fft.fft(np.eye(8)).astype(np.complex64).astype(np.complex128)
        result = launch(source().stockham_radix8_w8_kernel, _parts(x, matrix))
        return _complex_error(result, x @ matrix)

    return {"64 groups": lambda: run(64), "256 groups": lambda: run(256)}


def _scratch(checkout: Path, name: str) -> Cases:
    def run() -> float:
        provide("torch_xla")
        source = load(checkout / "scripts" / "reproduce_nl_load_transpose2d.py")
        x, w = normal((512, 8)), normal((8, 8), seed=1)
        return error(launch(getattr(source, name), (x, w)), x.astype(np.float64) @ w)

    return {"512x8x8": run}


def solver_kernels(checkout: Path) -> list[Kernel]:
    """trnsolver: the two steps of a tridiagonalisation."""
    source = module(checkout, "trnsolver.nki.dispatch")

    def matvec(n: int) -> float:
        a, v = normal((n, n)), normal((n, 1), seed=1)
        return error(launch(source().matvec_kernel, (a, v)), a.astype(np.float64) @ v)

    def rank2(n: int) -> float:
        a, u, v = normal((n, n)), normal((n, 1), seed=1), normal((n, 1), seed=2)
        crossed = u.astype(np.float64) @ v.T
        return error(launch(source().rank2_update_kernel, (a, u, v)), a - crossed - crossed.T)

    return [
        Kernel("trnsolver matvec_kernel", {f"{n}": partial(matvec, n) for n in (8, 100, 128)}),
        Kernel("trnsolver rank2_update_kernel", {f"{n}": partial(rank2, n) for n in (8, 100, 128)}),
    ]


def sparse_kernels(checkout: Path) -> list[Kernel]:
    """trnsparse: products with block sparse and padded matrices, and the statistics of blocks of attention."""
    source = module(checkout, "trnsparse.nki.kernels")

    def blocks(rows: int, most: int, columns: int) -> float:
        a, b = normal((rows, most, 128, 128)), normal((rows, most, 128, columns), seed=1)
        expected = np.einsum("rkij,rkjn->rin", a.astype(np.float64), b).reshape(rows * 128, columns)
        return error(launch(source()._bsr_spmm_kernel, (a, b)), expected)

    def dense(m: int, k: int, n: int) -> float:
        a, b = normal((m, k)) * (normal((m, k), seed=2) > 1), normal((k, n), seed=1)
        return error(launch(source()._spmm_dense_kernel, (a, b)), a.astype(np.float64) @ b)

    def statistics(rows: int, most: int, width: int) -> float:
        q, k = normal((rows, 128, width)), normal((rows, most, 128, width), seed=1)
        largest, total = launch(source()._attn_stats_kernel, (q * np.float32(width**-0.5), k))
        scores = np.einsum("rid,rkjd->rkij", (q * np.float32(width**-0.5)).astype(np.float64), k)
        top = scores.max(-1, keepdims=True)
        return max(error(largest, top), error(total, np.exp(scores - top).sum(-1, keepdims=True)))

    return [
        Kernel(
            "trnsparse _bsr_spmm_kernel", {"2x2 blocks": lambda: blocks(2, 2, 64), "1x3": lambda: blocks(1, 3, 512)}
        ),
        Kernel("trnsparse _spmm_dense_kernel", {"256x128x32": lambda: dense(256, 128, 32)}),
        Kernel(
            "trnsparse _attn_stats_kernel",
            {"2x2 blocks of 32": lambda: statistics(2, 2, 32), "1x2 blocks of 256": lambda: statistics(1, 2, 256)},
        ),
    ]


def tensor_kernels(checkout: Path) -> list[Kernel]:
    """trntensor: products and a transform of integrals."""
    source = module(checkout, "trntensor.nki._kernels")

    def product(name: str, left: tuple[int, ...], right: tuple[int, ...]) -> float:
        a, b = normal(left), normal(right, seed=1)
        return error(launch(getattr(source(), name), (a, b)), a.astype(np.float64) @ b)

    def transform(basis: int, occupied: int, virtual: int, auxiliary: int) -> float:
        integrals = normal((basis, basis, auxiliary))
        first, second = normal((basis, occupied), seed=1), normal((basis, virtual), seed=2)
        result = launch(source().ao_to_mo_transform_kernel, (integrals, first, second))
        return error(result, np.einsum("mnp,mi,na->iap", integrals.astype(np.float64), first, second, optimize=True))

    return [
        Kernel(
            "trntensor matmul_kernel",
            {"256x128x1024": partial(product, "matmul_kernel", (256, 128), (128, 1024))},
        ),
        Kernel(
            "trntensor batched_matmul_kernel",
            {"3x128x256x64": partial(product, "batched_matmul_kernel", (3, 128, 256), (3, 256, 64))},
        ),
        Kernel("trntensor ao_to_mo_transform_kernel", {"256, 20, 30, 3": partial(transform, 256, 20, 30, 3)}),
    ]
