# SPDX-License-Identifier: Apache-2.0
"""Kernels of nki-library that select and search: top-k, routing, gathers, masks by ranges of positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from launching import nki, nl

from public_cases.common import (
    BFLOAT16,
    FLOAT16,
    Array,
    Cases,
    Kernel,
    Module,
    error,
    exact,
    launch,
    normal,
    provide,
    softmax,
    wide,
)


def kernels(module: Callable[[str], Module]) -> list[Kernel]:
    """These kernels; ``module`` gives an importer for the name of a module."""
    types = module("core.utils.common_types")
    found: dict[str, Cases] = {
        "cascaded_max": _cascaded_max(module("core.max.cascaded_max")),
        "rotational_topk": _topk(module("core.topk.rotational_topk")),
        "router_topk": _router(module("core.router_topk.router_topk"), types),
        "find_nonzero_indices": _nonzero(module("core.subkernels.find_nonzero_indices")),
        "find_nonzero_indices_with_count": _nonzero_count(
            module("experimental.benchmark.find_nonzero_indices_with_count")
        ),
        "attention_cte by ranges": _ranges(module("core.attention.attention_cte")),
        "attention_bwd": _attention_bwd(module("core.attention.attention_bwd")),
        "moe_tkg of selected experts": _moe(module("core.moe.moe_tkg.moe_tkg"), types),
    }
    return [Kernel(f"nki-library {name}", cases) for name, cases in found.items()]


def _cascaded_max(module: Module) -> Cases:
    def run(shape: tuple[int, ...], lnc: int = 1) -> float:
        x = normal(shape)
        top, at = launch(module().cascaded_max, (x,), lnc=lnc)
        index = x.argmax(-1, keepdims=True)
        return max(exact(at, index.astype(np.uint32)), exact(top, np.take_along_axis(x, index, -1)))

    return {
        "2x3x1000": lambda: run((2, 3, 1000)),
        "40x3x300": lambda: run((40, 3, 300)),
        "1x1x5000 lnc 2": lambda: run((1, 1, 5000), 2),
        "2x3x1000 lnc 2": lambda: run((2, 3, 1000), 2),
    }


def _circulant(column: Any) -> Array:
    """The matrix whose column j is ``column`` rolled by j."""
    return np.stack([np.roll(np.asarray(column), shift) for shift in range(len(column))], axis=1)


def _topk(module: Module) -> Cases:
    def run(batch: int, vocabulary: int, k: int, lnc: int = 2, ordered: bool = True) -> float:
        provide("scipy.linalg", circulant=_circulant)
        topk = module()
        x = normal((batch, vocabulary))
        config = topk.create_topk_config(inp_shape=x.shape, inp_dtype=nl.float32, k=k, sorted=ordered, num_programs=lnc)
        rotations = topk.create_rotational_topk_config(inp_shape=x.shape, topk_config=config)
        config = topk.prepare_rotational_constants(rotations)
        try:
            top, at = launch(topk.rotational_topk, (), lnc=lnc, inp=x, config=config)
        finally:
            topk.cleanup_rotational_constants()
        order = np.argsort(-x, axis=1)[:, :k].astype(np.uint32)
        if not ordered:
            order.sort(axis=1)
            places = np.argsort(at, axis=1)
            top, at = np.take_along_axis(top, places, 1), np.take_along_axis(at, places, 1)
        return max(exact(at, order), exact(top, np.take_along_axis(x, order.astype(np.int64), 1)))

    return {
        "6x3000 top 5, scanning, lnc 2": lambda: run(6, 3000, 5),
        "6x3000 top 20 lnc 2": lambda: run(6, 3000, 20),
        "6x3000 top 256 lnc 2": lambda: run(6, 3000, 256),
        "6x3000 top 16, in any order, lnc 2": lambda: run(6, 3000, 16, ordered=False),
        "130x700 top 24 lnc 1": lambda: run(130, 700, 24, 1),
    }


def _router(module: Module, types: Module) -> Cases:
    def run(
        tokens: int,
        experts: int,
        k: int,
        act: str = "SOFTMAX",
        *,
        rows: bool = False,
        bias: bool = True,
        before: bool = True,
        norm: bool = False,
        **keywords: Any,
    ) -> float:
        provide("neuronxcc.nki.typing", mutable_tensor=nki.typing.mutable_tensor)
        x, w, b = normal((tokens, 256)), normal((256, experts), seed=1) / 4, normal((1, experts), seed=2)
        logits, affinities = np.zeros((2, tokens, experts), np.float32)
        index = np.zeros((tokens, k), np.uint32)
        launch(
            module().router_topk,
            (x if rows else x.T.copy(), w, b if bias else None, logits, affinities, index),
            lnc=2,
            act_fn=getattr(types().RouterActFnType, act),
            k=k,
            x_hbm_layout=int(rows),
            x_sb_layout=0,
            router_pre_norm=before,
            norm_topk_prob=norm,
            **keywords,
        )
        expected = wide(x)[0] @ wide(w)[0] + (b if bias else 0.0)
        order = np.argsort(-expected, axis=1)[:, :k]
        chosen = _affinities(expected, order, act, before, norm)
        return max(error(logits, expected), error(affinities, chosen), exact(index, order.astype(np.uint32)))

    return {
        "64 tokens, 4 of 32 lnc 2": lambda: run(64, 32, 4),
        "64 tokens, 4 of 32, softmax after lnc 2": lambda: run(64, 32, 4, before=False),
        "200 tokens, 8 of 128, rows, normalised lnc 2": lambda: run(200, 128, 8, rows=True, norm=True),
        "64 tokens, 2 of 16, sigmoid, no bias lnc 2": lambda: run(64, 16, 2, "SIGMOID", norm=True, bias=False),
        "200 tokens, 4 of 32, sharded lnc 2": lambda: run(200, 32, 4, shard_on_tokens=True),
    }


def _affinities(logits: Array, order: Array, act: str, before: bool, norm: bool) -> Array:
    """What a token gives each expert: the activation of all logits or of the selected ones."""
    activate = softmax if act == "SOFTMAX" else lambda x: 1 / (1 + np.exp(-x))
    if before and not norm:
        return activate(logits)
    selected = np.zeros_like(logits)
    picked = (
        np.take_along_axis(activate(logits), order, 1) if before else activate(np.take_along_axis(logits, order, 1))
    )
    np.put_along_axis(selected, order, picked, 1)
    return selected / selected.sum(1, keepdims=True) if norm else selected


def _sparse(shape: tuple[int, int], dtype: Any) -> Array:
    rng = np.random.default_rng(list(shape))
    return np.where(rng.random(shape) < 0.3, rng.integers(1, 9, shape), 0).astype(dtype)


def _positions(row: Array) -> Array:
    """Positions of what is not zero, then -1."""
    found = np.flatnonzero(row)
    return np.concatenate([found, np.full(len(row) - len(found), -1)]).astype(np.int32)


def _nonzero(module: Module) -> Cases:
    def run(tokens: int, columns: int, first: int | None = None, count: int | None = None, **keywords: Any) -> float:
        x = _sparse((tokens, columns), np.float32)
        start = None if first is None else np.array([first], np.int32)
        indices, counts = launch(
            module().find_nonzero_indices, (x,), lnc=2, col_start_id=start, n_cols=count, **keywords
        )
        used = x if first is None else x[:, first : first + (count or 0)]
        expected = np.stack([_positions(column) for column in used.T])
        return max(exact(indices, expected), exact(counts, (used != 0).sum(0).astype(np.int32)))

    return {
        "256x6 lnc 2": lambda: run(256, 6),
        "512x20 in chunks of 128 lnc 2": lambda: run(512, 20, chunk_size=128),
        "256x12, columns 3 to 7 lnc 2": lambda: run(256, 12, 3, 4),
    }


def _nonzero_count(module: Module) -> Cases:
    def run(length: int, dtype: Any) -> float:
        x = _sparse((1, length), dtype)
        result = launch(module().find_nonzero_indices_with_count, (x,))
        return exact(result, np.append(_positions(x[0]), np.count_nonzero(x)).astype(np.int32)[None])

    return {
        "1x500 float32": lambda: run(500, np.float32),
        "1x2048 int32": lambda: run(2048, np.int32),
    }


def _packed(length: int) -> tuple[Array, Array, Array]:
    """Three sequences of unequal length in one row: who may look at whom, and the bounds of each position's own."""
    edges = np.array([0, 200, 340, length])
    own = np.searchsorted(edges, np.arange(length), side="right")
    low, high = (edges[own - 1 + shift].astype(np.float32) for shift in (0, 1))
    return own[:, None] == own[None], low, high


def _ranges(module: Module) -> Cases:
    def run(queries: Array, keys: int, *, batch: int = 1, lnc: int = 1, **keywords: Any) -> float:
        """``queries`` are the positions of the queries among all keys, which end with the active ones."""
        prior = keywords.pop("prior", 0)
        used, window = keywords.pop("used", prior), keywords.get("sliding_window")
        q = normal((batch, len(queries), 64)) / 8
        k, v = normal((batch, 64, prior + keys), seed=1), normal((batch, prior + keys, 64), seed=2)
        if prior:
            keywords.update(k_prior=k[:, :, :prior].copy(), v_prior=v[:, :prior].copy())
            keywords["prior_used_len"] = np.array([used], np.int32)
        active = (q, k[:, :, prior:].copy(), v[:, prior:].copy())
        result = launch(module().attention_cte, active, lnc=lnc, causal_mask=True, **keywords)
        kept = np.r_[0:used, prior : prior + keys]
        distance = queries[:, None] - np.arange(len(kept))
        mask = (distance >= 0) & (distance < (window or np.inf))
        if "bound_min" in keywords:
            mask &= _packed(keys)[0]
        scores = np.where(mask, wide(q)[0] @ wide(k)[0][:, :, kept], -np.inf)
        # As in the other cases: probabilities and inputs are bfloat16 inside.
        return error(result, softmax(scores) @ wide(v)[0][:, kept], BFLOAT16)

    def packed(**keywords: Any) -> float:
        low, high = (bound[:, None] for bound in _packed(512)[1:])
        return run(np.arange(512), 512, bound_min=low, bound_max=high, **keywords)

    def shifted(start: int, step: int, **keywords: Any) -> float:
        offset = np.array([[start]], np.int32)
        return run(start + step * np.arange(256), 768, cp_offset=offset, global_cp_deg=3, **keywords)

    return {
        "1x512 packed": lambda: packed(),
        "2x512 packed lnc 2": lambda: packed(batch=2, lnc=2),
        "1x512 after 300 of 512": lambda: run(300 + np.arange(512), 512, prior=512, used=300),
        "2x512 after 700 of 1024 lnc 2": lambda: run(700 + np.arange(512), 512, prior=1024, used=700, batch=2, lnc=2),
        "1x512 window 100": lambda: run(np.arange(512), 512, sliding_window=100),
        "256 of 768, second part": lambda: shifted(256, 1),
        "256 of 768, every third": lambda: shifted(1, 3, cp_strided_q_slicing=True),
    }


def _attention_bwd(module: Module) -> Cases:
    def run(heads: int, *, lnc: int = 1, packed: bool = True, causal: bool = True, window: int | None = None) -> float:
        length, width = 512, 64
        q, k, v, dy = (normal((1, heads, width, length), seed=seed) for seed in range(4))
        own, low, high = _packed(length)
        distance = np.arange(length)[:, None] - np.arange(length)
        mask = (own | (not packed)) & ((distance >= 0) | (not causal)) & (distance < (window or np.inf))
        out, lse, gradients = _attention_gradients(q, k, v, dy, mask)
        bounds = {"bound_min": low, "bound_max": high} if packed else {}
        saved = (out.astype(np.float32), dy, lse.reshape(1, heads, -1, 128).swapaxes(2, 3).astype(np.float32))
        results = launch(
            module().attention_bwd,
            (q, k, v, *saved),
            lnc=lnc,
            use_causal_mask=causal,
            mixed_precision=True,
            sliding_window=window,
            **bounds,
        )
        return max(error(result, expected) for result, expected in zip(results, gradients, strict=True))

    return {
        "512 causal": lambda: run(1, packed=False),
        "512 packed": lambda: run(1, causal=False),
        "512 packed, causal, window 100": lambda: run(1, window=100),
        "2 heads of 512 packed, causal lnc 2": lambda: run(2, lnc=2),
    }


def _attention_gradients(q: Array, k: Array, v: Array, dy: Array, mask: Array) -> tuple[Array, Array, list[Array]]:
    """Output, log-sum-exp and the gradients of q, k and v, for heads [..., width, length]."""
    rows = [array.swapaxes(-1, -2) for array in wide(q, k, v, dy)]
    wide_q, wide_k, wide_v, wide_dy = rows
    scale = 1 / np.sqrt(q.shape[-2])
    scores = np.where(mask, wide_q @ wide_k.swapaxes(-1, -2) * scale, -np.inf)
    lse = np.log(np.exp(scores).sum(-1))
    weights = np.exp(scores - lse[..., None])
    out = weights @ wide_v
    dscores = weights * (wide_dy @ wide_v.swapaxes(-1, -2) - (wide_dy * out).sum(-1, keepdims=True)) * scale
    gradients = [dscores @ wide_k, dscores.swapaxes(-1, -2) @ wide_q, weights.swapaxes(-1, -2) @ wide_dy]
    return out.swapaxes(-1, -2), lse, [gradient.swapaxes(-1, -2) for gradient in gradients]


def _moe(module: Module, types: Module) -> Cases:
    def run(tokens: int, k: int, experts: int, hidden: int, lnc: int = 2, dtype: np.dtype[Any] = BFLOAT16) -> float:
        x, inner = normal((tokens, hidden), dtype), 128
        up = (normal((experts, hidden, 2, inner), seed=1) / np.sqrt(hidden)).astype(dtype)
        down = (normal((experts, inner, hidden), seed=2) / np.sqrt(inner)).astype(dtype)
        rng = np.random.default_rng(3)
        affinities = rng.random((tokens, experts), np.float32)
        index = rng.random((tokens, experts)).argsort(1)[:, :k].astype(np.int32)
        result = launch(
            module().moe_tkg,
            (x, up, down, affinities, index, False),
            lnc=lnc,
            expert_affinities_scaling_mode=types().ExpertAffinityScaleMode.POST_SCALE,
            activation_fn=types().ActFnType.SiLU,
        )
        rows, ups, downs = wide(x, up, down)
        gate, value = np.einsum("th,ehsi->seti", rows, ups)
        outputs = np.einsum("eti,eih->teh", gate / (1 + np.exp(-gate)) * value, downs)
        picked = np.take_along_axis(outputs, index[:, :, None], 1)
        return error(result, (picked * np.take_along_axis(affinities, index, 1)[:, :, None]).sum(1))

    return {
        "8 tokens, 2 of 6 bfloat16": lambda: run(8, 2, 6, 256, 1),
        "4 tokens, 1 of 6 float16 lnc 2": lambda: run(4, 1, 6, 256, 2, FLOAT16),
        "24 tokens, 4 of 16 bfloat16 lnc 2": lambda: run(24, 4, 16, 512),
    }
