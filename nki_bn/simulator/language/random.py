# SPDX-License-Identifier: Apache-2.0
"""Random numbers: the distributions of the hardware's generators, not their sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nki_bn.simulator import dtypes
from nki_bn.simulator.isa import checks
from nki_bn.simulator.issue import issue, raw
from nki_bn.simulator.language.creation import ndarray, sbuf
from nki_bn.simulator.language.math import copy, tile_operand
from nki_bn.simulator.machine import current_core
from nki_bn.simulator.memory import MemoryRegion
from nki_bn.simulator.tensor import NkiTensor, require


def rand(shape: Sequence[int], dtype: Any, buffer: MemoryRegion = sbuf, name: str = "") -> NkiTensor:
    """A new on-chip tensor of uniform numbers in [0, 1), rounded to ``dtype``."""
    result = tile_operand("rand", "result", ndarray(shape, dtype, buffer, name))
    core = current_core()
    issue("rand2", "vector", [result], [], lambda: [core.random.random(result.shape, np.float32)])
    return result


def random_seed(seed: NkiTensor) -> None:
    """Start the sequence that belongs to ``seed``, a (1, 1) tile of a 32-bit integer type.

    Raises:
        TypeError: it is no tensor.
        NkiValidationError: it has another shape, place or dtype.
    """
    checks.tile("random_seed", "seed", seed)
    require(
        seed.shape == (1, 1) and seed.dtype in ("int32", "uint32"),
        f"random_seed seed must be a (1, 1) tile of int32 or uint32, got {seed!r}",
    )
    core = current_core()

    def compute() -> list[Any]:
        core.random = np.random.default_rng(int(raw(seed)[0, 0]) & 0xFFFFFFFF)
        return []

    issue("set_rng_seed", "vector", [], [seed], compute)


def dropout(x: NkiTensor, rate: Any, dtype: Any = None) -> NkiTensor:
    """A new tile: ``x`` with every element set to zero with probability ``rate``; what stays is not scaled.

    ``rate`` is a number or a column with one probability per partition.
    """
    data = x if dtype is None or dtypes.normalize(dtype) == x.dtype else copy(x, dtype)
    result = ndarray(tile_operand("dropout", "x", x).shape, data.dtype)
    checks.column_operand("dropout", "rate", rate, data)
    core = current_core()

    def compute() -> list[Any]:
        values = raw(data)
        dropped = core.random.random(values.shape, np.float32) < checks.operand_values(rate)
        return [np.where(dropped, np.zeros((), values.dtype), values)]

    issue("dropout", "vector", [result], [data, *[rate] * isinstance(rate, NkiTensor)], compute)
    return result
