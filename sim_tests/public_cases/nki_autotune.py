# SPDX-License-Identifier: Apache-2.0
"""The kernels of nki-autotune that were tuned by hand: products of 2048 x 2048 matrices in bfloat16."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from public_cases.common import BFLOAT16, Cases, Kernel, error, launch, load, normal, provide, wide

_SIZE = 2048


def kernels(checkout: Path) -> list[Kernel]:
    """The kernels of the checkout at ``checkout``."""
    folder = checkout / "kernel_library"
    products = {"lhs_rhs": "matmul_lhs_rhs_nkigym", "lhsT_rhs": "matmul_lhsT_rhs_nkigym"}
    return [
        *(
            Kernel(f"nki-autotune {name}", {"2048 bfloat16": partial(_product, folder / "matmul" / place, name)})
            for place, name in products.items()
        ),
        Kernel("nki-autotune rmsnorm_matmul_online", {"2048 bfloat16": partial(_normed, folder / "rmsnorm_matmul")}),
        Kernel("nki-autotune kernel_transforms", _steps(checkout / "kernel_transforms.py")),
    ]


def _steps(path: Path) -> Cases:
    """The product at 17 stages of its transformation."""

    def run(name: str) -> float:
        provide("nkigym.synthesis", simulate_fp32=None)
        left, right = normal((_SIZE, _SIZE), BFLOAT16), normal((_SIZE, _SIZE), BFLOAT16, 1)
        return error(launch(getattr(load(path), name), (left, right)), np.matmul(*wide(left.T, right)))

    return {name: partial(run, name) for name in (*(f"kernel_{step}" for step in range(16)), "kernel_partial")}


def _product(folder: Path, name: str) -> float:
    (path,) = folder.glob("kernel_hand*.py")
    left, right = normal((_SIZE, _SIZE), BFLOAT16), normal((_SIZE, _SIZE), BFLOAT16, 1)
    first, second = wide(left, right)
    expected = (first.T if "lhsT" in name else first) @ second
    return error(launch(getattr(load(path), name), (left, right)), expected)


def _normed(folder: Path) -> float:
    left, right = normal((_SIZE, _SIZE), BFLOAT16), normal((_SIZE, _SIZE), BFLOAT16, 1)
    first, second = wide(left, right)
    rms = np.sqrt((first**2).mean(1, keepdims=True) + 1e-6)
    result = launch(load(folder / "kernel_hand_online.py").rmsnorm_matmul_online, (left, right))
    return error(result, first / rms @ second)
