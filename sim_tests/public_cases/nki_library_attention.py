# SPDX-License-Identifier: Apache-2.0
"""Kernels of nki-library around a cache of keys and values in blocks, and residual sums by DMA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from launching import nisa, nl

from public_cases.common import BFLOAT16, Array, Cases, Kernel, Module, error, launch, normal, softmax, wide


def kernels(module: Callable[[str], Module]) -> list[Kernel]:
    """The kernels, from modules of the library."""
    attention, allocator = module("core.attention.attention_tkg"), module("core.utils.allocator")
    return [
        Kernel("nki-library attention_tkg, cache in blocks", _blocked_attention(attention, allocator)),
        Kernel(
            "nki-library qkv_cte, residual", _residual(module("core.qkv.qkv_cte"), module("core.utils.common_types"))
        ),
    ]


def _blocked_attention(module: Module, allocator: Module) -> Cases:
    def run(batch: int, heads: int, length: int, block: int, dtype: Any, lnc: int) -> float:
        width, count = 128, length // block
        config = module().AttnTKGConfig(
            bs=batch,
            q_head=heads,
            s_active=1,
            curr_sprior=length,
            full_sprior=length,
            d_head=width,
            block_len=block,
            tp_k_prior=True,
            strided_mm1=False,
            use_pos_id=True,
            qk_in_sb=True,
        )
        q = (normal((width, batch * heads), dtype) / np.sqrt(width)).astype(dtype)
        key, value = normal((width, batch), dtype, 1), normal((batch, 1, 1, width), dtype, 2)
        keys, values = (normal((batch * count, block, width), dtype, seed) for seed in (3, 4))
        table = np.random.default_rng(5).permutation(batch * count).reshape(batch, count).astype(np.uint32)
        positions = np.random.default_rng(6).integers(1, length - 1, (batch, 1)).astype(np.float32)
        mask = np.ones((1, batch, heads, 1), np.uint8)
        kernel = _with_memory(module().attention_tkg, allocator().SbufManager, config)
        result = launch(kernel, (q, key, value, keys, values, mask, positions, table), lnc=lnc)
        known = [_cached(cache, table) for cache in wide(keys, values)]
        expected = _attended(*wide(q, key, value), *known, positions[:, 0].astype(int))
        return error(result, expected)

    return {
        "2x2 heads, 2048 in blocks of 16, bfloat16": lambda: run(2, 2, 2048, 16, BFLOAT16, 1),
        "2x4 heads, 4096 in blocks of 16, bfloat16 lnc 2": lambda: run(2, 4, 4096, 16, BFLOAT16, 2),
    }


def _with_memory(attention: Any, manager: Any, config: Any) -> Any:
    """A kernel that gives the library's kernel its operands on chip, an output, and the memory it may use."""

    def kernel(q: Any, key: Any, value: Any, keys: Any, values: Any, mask: Any, positions: Any, table: Any) -> Any:
        memory = manager(0, nl.tile_size.total_available_sbuf_size - 16 * 1024)
        memory.open_scope()
        tiles = [memory.alloc_stack(tensor.shape, dtype=tensor.dtype, buffer=nl.sbuf) for tensor in (q, key)]
        for tile, tensor in zip(tiles, (q, key), strict=True):
            nisa.dma_copy(tile, tensor)
        out = nl.ndarray((config.bs, config.q_head, config.d_head, 1), q.dtype, buffer=nl.shared_hbm)
        operands = (*tiles, value, keys, values, mask, out, config, memory)
        result, _ = attention(*operands, rope_pos_ids=positions, active_blocks_table=table)
        memory.close_scope()
        return result

    return kernel


def _cached(blocks: Array, table: Array) -> Array:
    """The rows of each sequence in order, from blocks in the order of its table."""
    return blocks[table].reshape(len(table), -1, blocks.shape[-1])


def _attended(q: Array, key: Array, value: Array, keys: Array, values: Array, positions: Array) -> Array:
    """Attention of one token per sequence to those before its position and to itself, (batch, heads, width, 1)."""
    batch, width = len(keys), len(q)
    queries = q.T.reshape(batch, -1, width)
    rows = []
    for at in range(batch):
        seen = positions[at]
        scores = queries[at] @ np.concatenate([keys[at, :seen], key[:, at][None]]).T
        rows.append(softmax(scores) @ np.concatenate([values[at, :seen], value[at, 0]]))
    return np.stack(rows)[..., None]


def _residual(module: Module, types: Module) -> Cases:
    def run(batch: int, length: int, hidden: int, wide_by: int, dtype: Any, lnc: int, norm: bool) -> float:
        x, second, third = (normal((batch, length, hidden), dtype, seed) for seed in range(3))
        weights = (normal((hidden, wide_by), seed=3) / np.sqrt(hidden)).astype(dtype)
        gamma = normal((1, hidden), dtype, 4)
        modes = {"fused_norm_type": types().NormType.RMS_NORM, "gamma_norm_weights": gamma} if norm else {}
        result = launch(
            module().qkv_cte,
            (x, weights),
            lnc=lnc,
            fused_residual_add=True,
            mlp_prev=second,
            attention_prev=third,
            load_input_with_DMA_transpose=False,
            **modes,
        )
        total, matrix, scale = np.sum(wide(x, second, third), 0), *wide(weights, gamma)
        if norm:
            total = total / np.sqrt((total**2).mean(-1, keepdims=True) + 1e-6) * scale
        return error(result, total @ matrix)

    return {
        "1x200x512 bfloat16": lambda: run(1, 200, 512, 256, BFLOAT16, 1, False),
        "1x256x1024 bfloat16 RMS norm lnc 2": lambda: run(1, 256, 1024, 512, BFLOAT16, 2, True),
    }
