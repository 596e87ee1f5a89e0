# SPDX-License-Identifier: Apache-2.0
"""Kernels of nki-library (package ``nkilib_src.nkilib``)."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from public_cases import nki_library_attention, nki_library_indirect, nki_library_selection
from public_cases.common import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    Array,
    Cases,
    Kernel,
    Module,
    error,
    launch,
    normal,
    softmax,
    wide,
)


def kernels(checkout: Path) -> list[Kernel]:
    """The kernels of the checkout at ``checkout``."""
    source = str(checkout / "src")
    if source not in sys.path:
        sys.path.append(source)

    def module(name: str) -> Module:
        return partial(importlib.import_module, f"nkilib_src.nkilib.{name}")

    loss = module("experimental.loss.cross_entropy")
    return [
        Kernel("nki-library RoPE", _rope(module("core.embeddings.rope"))),
        Kernel("nki-library rmsnorm_tkg", _rmsnorm(module("core.subkernels.rmsnorm_tkg"))),
        Kernel("nki-library layernorm_tkg", _layernorm(module("core.subkernels.layernorm_tkg"))),
        Kernel("nki-library attention_cte", _attention(module("core.attention.attention_cte"))),
        Kernel("nki-library cumsum", _cumsum(module("core.cumsum.cumsum"))),
        Kernel("nki-library cross_entropy_forward", _cross_entropy(loss)),
        Kernel("nki-library cross_entropy_backward", _cross_entropy_backward(loss)),
        Kernel("nki-library conv1d", _conv1d(module("experimental.conv.conv1d"), module("core.utils.common_types"))),
        *nki_library_attention.kernels(module),
        *nki_library_indirect.kernels(module),
        *nki_library_selection.kernels(module),
    ]


def _rope(module: Module) -> Cases:
    def run(
        shape: tuple[int, int, int, int], dtype: Any, lnc: int = 1, interleaved: bool = False, **keywords: Any
    ) -> float:
        width, batch, _, length = shape
        x = normal(shape, dtype)
        angles = normal((width // 2, batch, length), seed=1)
        cos, sin = np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)
        result = launch(module().RoPE, (x, cos, sin), lnc=lnc, contiguous_layout=not interleaved, **keywords)
        values, c, s = wide(x, cos, sin)
        return error(result, _rotate(values, c, s, interleaved))

    return {
        "128x2x4x64 float32": lambda: run((128, 2, 4, 64), FLOAT32),
        "64x1x3x40 bfloat16": lambda: run((64, 1, 3, 40), BFLOAT16),
        "interleaved by DMA": lambda: run((128, 1, 2, 32), FLOAT32, interleaved=True),
        "interleaved by matmul": lambda: run((64, 2, 2, 16), FLOAT32, interleaved=True, relayout_in_sbuf=True),
        "128x2x4x64 bfloat16 lnc 2": lambda: run((128, 2, 4, 64), BFLOAT16, lnc=2, lnc_shard=True),
    }


def _rotate(x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    half = len(x) // 2
    first, second = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, half), slice(half, None))
    c, s = cos[:, :, None, :], sin[:, :, None, :]
    result = np.empty_like(x)
    result[first] = x[first] * c - x[second] * s
    result[second] = x[second] * c + x[first] * s
    return result


def _rmsnorm(module: Module) -> Cases:
    def run(batch: int, length: int, hidden: int, lnc: int = 1, actual: int | None = None, **keywords: Any) -> float:
        x, gamma = normal((batch, length, hidden), FLOAT16), normal((1, hidden), FLOAT16)
        out = np.zeros((128, batch * length, hidden // 128), FLOAT16)
        launch(module().rmsnorm_tkg, (x, gamma, out), lnc=lnc, hidden_actual=actual, **keywords)
        values, scale = wide(x, gamma)
        norm = values / np.sqrt((values**2).sum(-1, keepdims=True) / (actual or hidden) + 1e-6) * scale
        return error(out, _tiles(norm, lnc, keywords.get("hidden_dim_tp", False)))

    return {
        "1x8x2048": lambda: run(1, 8, 2048),
        "1x4x2048 of which 1920": lambda: run(1, 4, 2048, actual=1920),
        "1x1x4096 hidden_dim_tp": lambda: run(1, 1, 4096, actual=3072, hidden_dim_tp=True),
        "1x1x1024 lnc 2": lambda: run(1, 1, 1024, lnc=2),
        "2x8x1024 lnc 2": lambda: run(2, 8, 1024, lnc=2),
        "130x5x768 lnc 2": lambda: run(130, 5, 768, lnc=2),
        "2x8x1024 lnc 2 shard_on_h": lambda: run(2, 8, 1024, lnc=2, shard_on_h=True),
    }


def _tiles(norm: Array, shards: int, transposed: bool = False) -> Array:
    """[B, S, H] as [128, B*S, H/128]; each shard of H is laid out by itself."""
    rows = norm.reshape(-1, norm.shape[-1])
    if transposed:
        return rows.reshape(len(rows), -1, 128).transpose(2, 0, 1)
    parts = [part.reshape(len(rows), 128, -1) for part in np.split(rows, shards, axis=1)]
    return np.concatenate(parts, axis=2).transpose(1, 0, 2)


def _layernorm(module: Module) -> Cases:
    def run(batch: int, length: int, hidden: int, lnc: int = 1, with_beta: bool = True, **keywords: Any) -> float:
        x, gamma, beta = (
            normal(shape, FLOAT16, seed)
            for seed, shape in enumerate([(batch, length, hidden), (1, hidden), (1, hidden)])
        )
        out = np.zeros((128, batch * length, hidden // 128), FLOAT16)
        launch(module().layernorm_tkg, (x, gamma, out), lnc=lnc, beta=beta if with_beta else None, **keywords)
        values, scale, shift = wide(x, gamma, beta if with_beta else np.zeros_like(beta))
        centred = values - values.mean(-1, keepdims=True)
        return error(out, _tiles(centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * scale + shift, lnc))

    return {
        "1x8x2048": lambda: run(1, 8, 2048),
        "1x1x1024 without beta": lambda: run(1, 1, 1024, with_beta=False),
        "1x1x1024 lnc 2": lambda: run(1, 1, 1024, lnc=2),
        "2x8x1024 lnc 2": lambda: run(2, 8, 1024, lnc=2),
        "2x8x1024 lnc 2 shard_on_h": lambda: run(2, 8, 1024, lnc=2, shard_on_h=True),
    }


def _attention(module: Module) -> Cases:
    def run(batch: int, m: int, n: int, width: int, lnc: int = 1, causal: bool = False) -> float:
        q, k, v = normal((batch, m, width)), normal((batch, width, n), seed=1), normal((batch, n, width), seed=2)
        result = launch(module().attention_cte, (q, k, v), lnc=lnc, scale=0.125, causal_mask=causal, tp_q=True)
        wide_q, wide_k, wide_v = wide(q, k, v)
        scores = wide_q @ wide_k / 8
        if causal:
            scores[:, np.arange(m)[:, None] < np.arange(n)] = -np.inf
        # The kernel holds probabilities and inputs as bfloat16 inside.
        return error(result, softmax(scores) @ wide_v, BFLOAT16)

    return {
        "1x640x1024x64": lambda: run(1, 640, 1024, 64),
        "2x512x512x128 causal": lambda: run(2, 512, 512, 128, 1, True),
        "2x512x1024x128 lnc 2": lambda: run(2, 512, 1024, 128, 2),
    }


def _cumsum(module: Module) -> Cases:
    def run(shape: tuple[int, ...], dtype: Any) -> float:
        x = normal(shape, dtype)
        return error(launch(module().cumsum, (x,)), wide(x)[0].cumsum(-1))

    return {
        "130x5000 float32": lambda: run((130, 5000), FLOAT32),
        "3x7x100 float32": lambda: run((3, 7, 100), FLOAT32),
        "128x600 bfloat16": lambda: run((128, 600), BFLOAT16),
    }


def _loss(positions: int, vocabulary: int, dtype: Any) -> tuple[Array, Array, Array, Array]:
    """Logits, targets, and in float64 the log-sum-exp and the loss per position."""
    logits = normal((positions, vocabulary), dtype)
    targets = np.random.default_rng(1).integers(0, vocabulary, positions).astype(np.int32)
    values = logits.astype(np.float64)
    lse = np.log(np.exp(values).sum(1))
    return logits, targets, lse, lse - values[np.arange(positions), targets]


def _cross_entropy(module: Module) -> Cases:
    def run(positions: int, vocabulary: int, chunk: int, batch: int, lnc: int, dtype: Any) -> float:
        logits, targets, lse, loss = _loss(positions, vocabulary, dtype)
        results = launch(
            module().cross_entropy_forward,
            (logits, targets),
            lnc=lnc,
            positions_per_batch=batch,
            chunk_size=chunk,
            dtype=dtype.name,
        )
        return max(error(result, reference) for result, reference in zip(results, (loss, lse), strict=True))

    return {
        "37x1000 float32": lambda: run(37, 1000, 300, 8, 1, FLOAT32),
        "37x1000 float32 lnc 2": lambda: run(37, 1000, 300, 8, 2, FLOAT32),
        "64x2048 bfloat16 lnc 2": lambda: run(64, 2048, 2048, 32, 2, BFLOAT16),
    }


def _cross_entropy_backward(module: Module) -> Cases:
    def run(positions: int, vocabulary: int, chunk: int, reduction: str, lnc: int, inplace: bool) -> float:
        logits, targets, lse, _ = _loss(positions, vocabulary, FLOAT32)
        expected = np.exp(logits.astype(np.float64) - lse[:, None])
        expected[np.arange(positions), targets] -= 1
        scale = 1 / positions if reduction == "mean" else 1.0
        result = launch(
            module().cross_entropy_backward,
            (logits, targets, lse.astype(np.float32)),
            lnc=lnc,
            reduction=reduction,
            positions_per_batch=16,
            chunk_size=chunk,
            dtype="float32",
            inplace=inplace,
        )
        return error(result, expected * scale)

    return {
        "40x600 mean": lambda: run(40, 600, 256, "mean", 1, False),
        "40x600 sum in place lnc 2": lambda: run(40, 600, 600, "sum", 2, True),
    }


def _conv1d(module: Module, types: Module) -> Cases:
    def run(
        batch: int,
        c_in: int,
        c_out: int,
        length: int,
        size: int,
        *,
        dtype: Any = FLOAT32,
        lnc: int = 1,
        bias: bool = True,
        act: str | None = None,
        **keywords: Any,
    ) -> float:
        x, filters = normal((batch, c_in, length), dtype), normal((size, c_in, c_out), dtype, 1)
        offsets = normal((c_out,), dtype, 2) if bias else None
        function = getattr(types().ActFnType, act) if act else None
        result = launch(
            module().conv1d, (x, filters, offsets), lnc=lnc, activation_fn=function, lnc_shard=lnc > 1, **keywords
        )
        values, weights = wide(x, filters)
        expected = _convolve(values, weights, **keywords)
        if offsets is not None:
            expected += offsets.astype(np.float64)[None, :, None]
        return error(result, _ACTIVATIONS[act](expected) if act else expected)

    return {
        "2x16x32x100 k 3": lambda: run(2, 16, 32, 100, 3),
        "1x3x130x600 k 5 stride 2 padded": lambda: run(1, 3, 130, 600, 5, stride=2, padding=(2, 3)),
        "1x150x40x64 k 4 dilated, no bias": lambda: run(1, 150, 40, 64, 4, dilation=3, bias=False),
        "2x48x20x50 k 3 GELU bfloat16": lambda: run(2, 48, 20, 50, 3, act="GELU", dtype=BFLOAT16),
        "1x64x200x90 k 3 SiLU lnc 2": lambda: run(1, 64, 200, 90, 3, act="SiLU", lnc=2, padding=(1, 1)),
    }


_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "GELU": lambda x: x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "SiLU": lambda x: x / (1 + np.exp(-x)),
}


def _convolve(x: Array, filters: Array, stride: int = 1, padding: tuple[int, int] = (0, 0), dilation: int = 1) -> Array:
    padded = np.pad(x, ((0, 0), (0, 0), padding))
    reach = dilation * (len(filters) - 1) + 1
    windows = np.lib.stride_tricks.sliding_window_view(padded, reach, axis=2)[:, :, ::stride, ::dilation]
    return np.asarray(np.einsum("bclk,kco->bol", windows, filters))
