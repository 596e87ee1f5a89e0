# SPDX-License-Identifier: Apache-2.0
"""Kernels of nki-library that choose rows and trip counts at run time: mixtures of experts, a dynamic loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from public_cases.common import BFLOAT16, FLOAT32, Array, Cases, Kernel, Module, error, launch, normal, wide

_EXPERTS, _BLOCK = 4, 256


def kernels(module: Callable[[str], Module]) -> list[Kernel]:
    """The kernels, from modules of the library."""
    types, skips = module("core.utils.common_types"), module("core.moe.moe_cte.moe_cte_utils")
    by_hidden = module("experimental.moe.forward.bwmm_shard_on_H")
    by_intermediate = module("core.moe.moe_cte.bwmm_shard_on_I")
    return [
        Kernel("nki-library bwmm_shard_on_H", _experts_by_hidden(by_hidden, types, skips)),
        Kernel("nki-library bwmm_shard_on_I", _experts_by_intermediate(by_intermediate, types, skips)),
        Kernel("nki-library dynamic_elementwise_add", _dynamic_add(module("experimental.dynamic_shapes"))),
        Kernel("nki-library topk_reduce", _topk_reduce(module("experimental.collectives.topk_reduce"))),
    ]


def _experts_by_hidden(module: Module, types: Module, skips: Module) -> Cases:
    def run(each: int, skip: bool) -> float:
        mixture = _Mixture(256, 512, 256, each, skip, BFLOAT16)
        modes = {"expert_affinities_scaling_mode": types().ExpertAffinityScaleMode.POST_SCALE}
        return mixture.error_of(module().blockwise_mm_baseline_shard_hidden, skips().SkipMode(skip, False), **modes)

    return {
        "256 tokens lnc 2, one expert each": lambda: run(1, False),
        "256 tokens lnc 2, two experts each, indices skipped": lambda: run(2, True),
        "256 tokens lnc 2, two experts each": lambda: run(2, False),
    }


def _experts_by_intermediate(module: Module, types: Module, skips: Module) -> Cases:
    def run(kernel: str, **keywords: Any) -> float:
        mixture = _Mixture(256, 512, 256, 1, True, FLOAT32)
        keywords |= {"expert_affinities_scaling_mode": types().ExpertAffinityScaleMode.POST_SCALE}
        return mixture.error_of(getattr(module(), kernel), skips().SkipMode(True, False), **keywords)

    # A one for each block that is in use, and one place more.
    used = np.array([*[1] * _EXPERTS, 0], np.int32)
    name = "blockwise_mm_baseline_shard_intermediate"
    return {
        "256 tokens lnc 2, one expert each, indices skipped, float32": lambda: run(name),
        "the same, blocks after the second one in a device loop": lambda: run(
            f"{name}_hybrid", conditions=used, num_static_block=2
        ),
    }


@dataclass(frozen=True)
class _Mixture:
    """Inputs for tokens of which each goes to ``each`` of the experts; padding is skipped, or a token of zeros."""

    tokens: int
    hidden: int
    inner: int
    each: int
    skip: bool
    dtype: Any

    def error_of(self, kernel: Any, skip_dma: Any, **modes: Any) -> float:
        """Worst error of a kernel on two cores."""
        x, affinities = self._tokens()
        gates = (normal((_EXPERTS, self.hidden, 2, self.inner), seed=1) / np.sqrt(self.hidden)).astype(self.dtype)
        down = (normal((_EXPERTS, self.inner, self.hidden), seed=2) / np.sqrt(self.inner)).astype(self.dtype)
        positions, experts = self._blocks()
        result = launch(
            kernel,
            (),
            lnc=2,
            hidden_states=x,
            expert_affinities_masked=affinities.reshape(-1, 1),
            gate_up_proj_weight=gates,
            down_proj_weight=down,
            block_size=_BLOCK,
            token_position_to_id=positions,
            block_to_expert=experts,
            skip_dma=skip_dma,
            compute_dtype=self.dtype.name,
            is_tensor_update_accumulating=self.each > 1,
            **modes,
        )
        expected = _mixed(*wide(x, affinities, gates, down))
        return error(np.asarray(result)[: self.tokens], expected[: self.tokens])

    def _chosen(self) -> Array:
        """Experts of each token."""
        rng = np.random.default_rng(0)
        return np.stack([rng.permutation(_EXPERTS)[: self.each] for _ in range(self.tokens)])

    def _tokens(self) -> tuple[Array, Array]:
        """Tokens and their affinities to all experts."""
        padding = ((0, 0 if self.skip else 1), (0, 0))
        affinities = np.zeros((self.tokens, _EXPERTS))
        weights = np.random.default_rng(1).random((self.tokens, self.each))
        np.put_along_axis(affinities, self._chosen(), weights, axis=1)
        x = normal((self.tokens, self.hidden), self.dtype)
        return np.pad(x, padding), np.pad(affinities, padding).astype(self.dtype)

    def _blocks(self) -> tuple[Array, Array]:
        """Tokens by their place in the blocks of the experts, and the expert of each block."""
        padding, chosen = -1 if self.skip else self.tokens, self._chosen()
        positions, experts = [], []
        for expert in range(_EXPERTS):
            mine = np.flatnonzero((chosen == expert).any(1))
            blocks = -(-len(mine) // _BLOCK)
            positions.append(np.pad(mine, (0, blocks * _BLOCK - len(mine)), constant_values=padding))
            experts += [expert] * blocks
        return np.concatenate(positions).astype(np.int32), np.array(experts, np.int32)


def _mixed(x: Array, affinities: Array, gates: Array, down: Array) -> Array:
    total = np.zeros_like(x)
    for expert in range(_EXPERTS):
        gate, up = x @ gates[expert, :, 0], x @ gates[expert, :, 1]
        total += affinities[:, expert, None] * ((gate / (1 + np.exp(-gate)) * up) @ down[expert])
    return total


def _dynamic_add(module: Module) -> Cases:
    def run(tiles: int) -> float:
        a, b = normal((512, 1024), BFLOAT16), normal((512, 1024), BFLOAT16, 1)
        with warnings.catch_warnings(action="ignore"):
            result = launch(module().dynamic_elementwise_add, (a, b, np.array([[tiles]], np.int32)))
        # The rows after the last tile are not defined.
        rows = 128 * tiles
        return error(np.asarray(result)[:rows], np.add(*wide(a, b))[:rows])

    return {"512x1024, all tiles": lambda: run(4), "512x1024, 3 tiles": lambda: run(3)}


def _topk_reduce(module: Module) -> Cases:
    def run(tokens: int, each: int, width: int, lnc: int) -> float:
        """Rows of ``each`` experts for every token, scattered among 8 times as many as there are tokens."""
        rows, owners = normal((8 * tokens, width), BFLOAT16), np.full(8 * tokens, -1, np.int32)
        owners[np.random.default_rng(lnc).permutation(8 * tokens)[: tokens * each]] = np.repeat(range(tokens), each)
        sums = np.stack([rows[owners == token].astype(np.float64).sum(0) for token in range(tokens)])
        packed = np.concatenate([rows, owners[:, None].view(BFLOAT16)], axis=1)
        return error(launch(module().topk_reduce, (packed, tokens, each), lnc=lnc), sums)

    return {"32 tokens, 4 each": lambda: run(32, 4, 256, 1), "64 tokens, 4 each, lnc 2": lambda: run(64, 4, 512, 2)}
