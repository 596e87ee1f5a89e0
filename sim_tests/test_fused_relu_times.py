# SPDX-License-Identifier: Apache-2.0
"""A fused backward against the unfused one and the backward of a ReLU after it, both by the timing model."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from separate_relu import LANES, relu_bwd

from nki_bn.bench.launches import launch_of
from nki_bn.bench.workloads import load_model
from nki_bn.planner import plan
from nki_bn.problem import BackwardProblem
from nki_bn.simulator import RunOptions, Shaped, run
from nki_bn.simulator.timing import model

CHUNKS = (512, 1024, 2048, 4096)


def modelled_us(kernel: object, arguments: tuple[object, ...]) -> float:
    return model(run(kernel, arguments, {}, 2, RunOptions(dry=True)).trace, "trn2").total / 1e3


@cache
def fused_us(shape: tuple[int, ...], dtype: str, relu: str) -> float:
    problem = BackwardProblem(shape, dtype, relu=relu, lnc=2)
    launch = launch_of(problem, plan(problem), Shaped)
    return modelled_us(launch.kernel, launch.arguments)


@cache
def separate_us(elements: int, dtype: str, relu: str) -> float:
    """With the chunk that suits it best, on as many elements as divide evenly over all lanes."""
    flat = (elements - elements % (2 * LANES),)
    tensors = Shaped(flat, dtype), Shaped(flat, "uint8" if relu == "mask" else dtype)
    return min(modelled_us(relu_bwd, (*tensors, chunk)) for chunk in CHUNKS)


def test_the_separate_kernel_is_right() -> None:
    rng = np.random.default_rng(0)
    dy, y = (rng.standard_normal(2 * LANES * 9).astype(np.float32) for _ in range(2))
    dy[y <= 0] = np.where(rng.random((y <= 0).sum()) < 0.1, np.inf, dy[y <= 0])
    want = np.where(y > 0, dy, 0.0)
    for passed in (y, (y > 0).astype(np.uint8)):
        assert np.array_equal(run(relu_bwd, (dy, passed, 4), {}, 2, RunOptions()).outputs, want)


@pytest.mark.nightly
@pytest.mark.parametrize("relu", ["mask", "recompute"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["resnet50", "efficientnet_b0", "mobilenet_v2"])
def test_fused_is_faster(name: str, dtype: str, relu: str) -> None:
    slower, total, rival = [], 0.0, 0.0
    for layer in load_model(name).layers:
        shape = layer.shape(32)
        mine = fused_us(shape, dtype, relu)
        other = fused_us(shape, dtype, "none") + separate_us(int(np.prod(shape)), dtype, relu)
        total, rival = total + layer.count * mine, rival + layer.count * other
        if mine >= other:
            slower.append((shape, round(mine, 1), round(other, 1)))
    print(f"{name} {dtype} {relu}: {total:.0f} us, unfused with a ReLU after it {rival:.0f}, slower: {slower}")
    assert total < rival and not slower
