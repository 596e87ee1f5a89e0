# SPDX-License-Identifier: Apache-2.0
"""NKI element types: strings, as in the vendor's package, and their NumPy counterparts."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np

DType = str

_NUMPY: dict[str, np.dtype[Any]] = {
    "bool_": np.dtype(np.uint8),
    "int8": np.dtype(np.int8),
    "int16": np.dtype(np.int16),
    "int32": np.dtype(np.int32),
    "uint8": np.dtype(np.uint8),
    "uint16": np.dtype(np.uint16),
    "uint32": np.dtype(np.uint32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    # 1-8-10 in 32 bits of storage; the rounding of the format is undocumented, so it is held as float32.
    "tfloat32": np.dtype(np.float32),
    "float32": np.dtype(np.float32),
    "float8_e4m3": np.dtype(ml_dtypes.float8_e4m3),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "float8_e8m0fnu": np.dtype(ml_dtypes.float8_e8m0fnu),
}
# Packed formats of the MX instructions: containers only, no arithmetic.
_PACKED: dict[str, np.dtype[Any]] = {
    "float8_e5m2_x4": np.dtype(np.uint32),
    "float8_e4m3fn_x4": np.dtype(np.uint32),
    "float4_e2m1fn_x4": np.dtype(np.uint16),
}
ALL_DTYPES: dict[str, np.dtype[Any]] = {**_NUMPY, **_PACKED}

# Floats that engines compute with; tfloat32 is not everywhere.
FLOATS = ("float8_e4m3", "float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32")
_INTEGERS = frozenset({"bool_", "int8", "int16", "int32", "uint8", "uint16", "uint32"})
LOW_PRECISION = frozenset({"float16", "bfloat16", "float8_e4m3", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"})


def normalize(dtype: Any) -> DType:
    """The NKI name of ``dtype``: an NKI dtype, a NumPy or ml_dtypes dtype or scalar type, or a torch dtype.

    Raises:
        TypeError: there is no such NKI dtype (64-bit types, complex, objects).
    """
    name = dtype if isinstance(dtype, str) else _foreign_name(dtype)
    name = {"bool": "bool_"}.get(name, name)
    if name not in ALL_DTYPES:
        raise TypeError(f"dtype {dtype!r} has no NKI counterpart; accepted: {', '.join(sorted(ALL_DTYPES))}")
    return name


def _foreign_name(dtype: Any) -> str:
    return _name_of(dtype) if isinstance(dtype, np.dtype) else _name_of_other(dtype)


@functools.cache
def _name_of(dtype: np.dtype[Any]) -> str:
    return str(dtype.name)


def _name_of_other(dtype: Any) -> str:
    text = str(dtype)
    if text.startswith("torch."):
        return text.removeprefix("torch.")
    try:
        return str(np.dtype(dtype).name)
    except TypeError:
        return text


def to_numpy(dtype: DType) -> np.dtype[Any]:
    """The NumPy dtype that stores ``dtype`` with all its roundings."""
    return ALL_DTYPES[dtype]


def size_of(dtype: DType) -> int:
    """Bytes of one element."""
    return ALL_DTYPES[dtype].itemsize


def is_integer(dtype: DType) -> bool:
    """Whether ``dtype`` is one of the integer types (bool_ is stored as uint8)."""
    return dtype in _INTEGERS


def is_packed(dtype: DType) -> bool:
    """Whether ``dtype`` is a packed MX container."""
    return dtype in _PACKED
