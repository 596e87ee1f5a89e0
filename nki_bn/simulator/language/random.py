# SPDX-License-Identifier: Apache-2.0
"""Random numbers: the distributions of the hardware's generators, not their sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nki_bn.simulator import dtypes
from nki_bn.simulator.isa import checks, random, vector
from nki_bn.simulator.isa.enums import nc_version
from nki_bn.simulator.language import math
from nki_bn.simulator.language.creation import ndarray, sbuf
from nki_bn.simulator.language.tiles import tile_operand
from nki_bn.simulator.memory import MemoryRegion
from nki_bn.simulator.tensor import NkiTensor, require

# Of 32 random bits, so many are dropped for a multiple of 2^-24, which float32 holds.
_DROPPED = 8


def rand(shape: Sequence[int], dtype: Any, buffer: MemoryRegion = sbuf, name: str = "") -> NkiTensor:
    """A new on-chip tensor of uniform numbers in [0, 1), rounded to ``dtype``.

    From gen4 this is one ``rand2``; before, random bits that are shifted and scaled.
    """
    result = tile_operand("rand", "result", ndarray(shape, dtype, buffer, name))
    if checks.version() >= nc_version.gen4:
        random.rand2(result, 0.0, 1.0)
        return result
    bits = ndarray(shape, "uint32", buffer)
    random.rng(bits)
    vector.tensor_scalar(bits, bits, math.right_shift, _DROPPED)
    vector.tensor_scalar(result, bits, math.multiply, 2.0 ** (_DROPPED - 32))
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
    random.set_rng_seed(seed)


def dropout(x: NkiTensor, rate: Any, dtype: Any = None) -> NkiTensor:
    """A new tile: ``x`` with every element set to zero with probability ``rate``; what stays is not scaled.

    ``rate`` is a number or a column with one probability per partition.
    """
    same = dtype is None or dtypes.normalize(dtype) == x.dtype
    data = tile_operand("dropout", "x", x) if same else math.copy(x, dtype)
    result = ndarray(data.shape, data.dtype)
    random.dropout(result, data, rate)
    return result
