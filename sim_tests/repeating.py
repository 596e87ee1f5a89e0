# SPDX-License-Identifier: Apache-2.0
"""Launching kernels several times, so that the last launches repeat the first ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from launching import load, nisa, nl, outputs, store

Array = npt.NDArray[Any]
# The first launch looks, the second one records, and from the third on they are repeated.
LAUNCHES = 4


def arrays(shape: tuple[int, ...] = (4, 6), dtype: Any = np.float32) -> list[Array]:
    """One array for each launch."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(dtype) for _ in range(LAUNCHES)]


class Counted:
    """A ``kernel`` of which each core counts how often its Python has run."""

    def __init__(self, kernel: Callable[..., Any]) -> None:
        self.runs = 0

        def counted(*args: Any) -> Any:
            self.runs += 1
            return kernel(*args)

        self.kernel = counted


def tile(shape: tuple[int, ...] = (4, 6), dtype: str = "float32", **keywords: Any) -> Any:
    return nl.ndarray(shape, dtype, **keywords)


def doubled(x: Any) -> Any:
    data = load(x)
    result = tile(x.shape)
    nisa.tensor_tensor(dst=result, data1=data, data2=data, op=nl.add)
    return store(result)


def same(kernel: Callable[..., Any], inputs: list[tuple[Any, ...]], runs: int, **options: Any) -> None:
    """``kernel`` gives with repetition what it gives without, bit by bit, and its Python runs ``runs`` times."""
    counted = Counted(kernel)
    for args in inputs:
        mine = [value.copy() if isinstance(value, np.ndarray) else value for value in args]
        expected, got = outputs(kernel, *args, **options), outputs(counted.kernel, *mine, replay=True, **options)
        np.testing.assert_equal(np.asarray(got).tobytes(), np.asarray(expected).tobytes())
        for one, other in zip(mine, args, strict=True):
            np.testing.assert_array_equal(one, other)
    assert counted.runs == runs
