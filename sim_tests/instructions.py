# SPDX-License-Identifier: Apache-2.0
"""Running single instructions in tests, and the roundings of the hardware written in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from launching import NEEDS_EMBEDDED, VENDOR, launch, load, nisa, nl, store

from nki_bn.simulator import NkiValidationError, SimulationResult
from nki_bn.simulator.trace import Record

Array = npt.NDArray[Any]
BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3)
F32 = np.float32
# Columns of a tile: the two memories that Vector and Scalar can use.
BUFFERS = (nl.sbuf, nl.psum)

# What the operators compute; comparisons and logic give 1.0 and 0.0 in float32.
ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "equal": lambda a, b: a == b,
    "not_equal": lambda a, b: a != b,
    "greater_equal": lambda a, b: a >= b,
    "greater": lambda a, b: a > b,
    "less_equal": lambda a, b: a <= b,
    "less": lambda a, b: a < b,
    "logical_and": lambda a, b: (a != 0) & (b != 0),
    "logical_or": lambda a, b: (a != 0) | (b != 0),
    "logical_xor": lambda a, b: (a != 0) ^ (b != 0),
}
# On unsigned integers of the operands' width.
BITVEC: dict[str, Callable[[Any, Any], Any]] = {
    "bitwise_and": lambda a, b: a & b,
    "bitwise_or": lambda a, b: a | b,
    "bitwise_xor": lambda a, b: a ^ b,
    "left_shift": lambda a, b: a << b,
    "right_shift": lambda a, b: a >> b,
}


def op(name: str) -> Any:
    """The operator ``nl.<name>``."""
    return getattr(nl, name)


def execute(
    call: Callable[..., Any],
    *arrays: Array,
    dtype: str = "float32",
    shape: Sequence[int] | None = None,
    buffer: Any = nl.sbuf,
    source: Any = nl.sbuf,
    **options: Any,
) -> SimulationResult:
    """Run ``call(dst, *tiles)``; its results, stored, are ``dst`` and what it returns in a list.

    Tiles hold ``arrays``, the first of them in the memory ``source``, all others in SBUF; ``dst`` lies in ``buffer``.
    The numerics are ideal unless ``options`` say otherwise.
    """

    def kernel(*tensors: Any) -> Any:
        tiles = [load(tensor) for tensor in tensors]
        if source == nl.psum:
            tiles[0] = in_psum(tiles[0])
        dst = nl.ndarray(tuple(shape or tiles[0].shape), dtype, buffer=buffer)
        extra = call(dst, *tiles)
        results = [store(tile) for tile in [dst, *(extra if isinstance(extra, list) else [])]]
        return results[0] if len(results) == 1 else tuple(results)

    return launch(kernel, *arrays, **{"numerics": "ideal", **options})


def computed(call: Callable[..., Any], *arrays: Array, **options: Any) -> Any:
    """The results of :func:`execute`."""
    return execute(call, *arrays, **options).outputs


def record_of(result: SimulationResult, opcode: str) -> Record:
    """The last record of an instruction."""
    return [record for record in result.trace if record.opcode == opcode][-1]


def refused(
    match: str, call: Callable[..., Any], *arrays: Array, error: type[Exception] = NkiValidationError, **options: Any
) -> None:
    """``call`` raises ``error`` with a message that matches; the vendor's simulator has words of its own."""
    if VENDOR:
        pytest.skip(NEEDS_EMBEDDED)
    with pytest.raises(error, match=match):
        execute(call, *arrays, **options)


def in_psum(tile: Any) -> Any:
    """Inside a kernel: a copy of ``tile`` in PSUM."""
    copy = nl.ndarray(tile.shape, tile.dtype, buffer=nl.psum)
    nisa.tensor_copy(dst=copy, src=tile)
    return copy


def same(actual: Any, expected: Any) -> None:
    """Equal in dtype, shape and every value; NaN equals NaN."""
    expected = np.asarray(expected)
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual, expected)


def written(values: Any, dtype: Any) -> Array:
    """Float32 ``values`` as an engine writes them: to nearest even, integers saturate."""
    dtype, values = np.dtype(dtype), np.asarray(values, F32)
    if dtype.kind not in "iu":
        return values.astype(dtype)
    info = np.iinfo(dtype)
    return np.clip(np.rint(values.astype(np.float64)), info.min, info.max).astype(dtype)


def pointer(values: Array) -> Array:
    """Float32 ``values`` with 18 significant bits, ties to even."""
    mantissa, exponent = np.frexp(values.astype(np.float64))
    return np.ldexp(np.rint(np.ldexp(mantissa, 18)), exponent - 18).astype(F32)


def values(*shape: int, seed: int = 0, scale: float = 1.0) -> Array:
    """Normal float32 numbers."""
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(F32)
