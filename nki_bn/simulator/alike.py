# SPDX-License-Identifier: Apache-2.0
"""Which launches can stand for each other, and which results: those that can be compared."""

from __future__ import annotations

import enum
import types
import weakref
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from nki_bn.simulator.launch import Launch, framework_of, function_of
from nki_bn.simulator.machine import RunOptions
from nki_bn.simulator.tensor import NkiTensor

# Where classes come from whose objects hold something that is no attribute.
_CONTAINERS = ("builtins", "collections")


class _NotComparable(Exception):
    """An argument of which it is unknown whether another one is the same."""


def kind_of(launch: Launch, lnc: int, options: RunOptions) -> Any:
    """What launches that can stand for each other have in common; None if that is unknown.

    It begins with a weak reference to the function: what a kernel has closed over can be large.
    """
    function = function_of(launch.kernel)
    if not isinstance(function, types.FunctionType) or getattr(launch.kernel, "schedule", None):
        return None
    try:
        positional = tuple(map(_argument, launch.args))
        named = tuple((name, _argument(value)) for name, value in launch.kwargs.items())
    except _NotComparable:
        return None
    return weakref.ref(function), lnc, options, positional, named


def _argument(value: Any) -> Any:
    """Equal for arguments that are the same to a kernel: arrays of one kind, shape and dtype, and equal constants."""
    if framework_of(value) is not None:
        return type(value), tuple(value.shape), value.dtype
    return _constant(value)


def _constant(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str, bytes):
        return kind, value
    if kind is float:
        return kind, value.hex()
    if isinstance(value, np.generic):
        return kind, value.dtype, value.tobytes()
    if isinstance(value, enum.Enum):
        # There is one object per member. (Not all flags have a name.)
        return kind, id(value)
    if isinstance(value, tuple) and not getattr(value, "__dict__", None):
        return kind, tuple(map(_constant, value))
    if kind is dict:
        return kind, tuple((_constant(key), _constant(item)) for key, item in value.items())
    if is_dataclass(value) and not isinstance(value, type):
        names = [one.name for one in fields(value)]
        if _has_only(value, set(names)):
            return kind, tuple(_constant(getattr(value, name)) for name in names)
    raise _NotComparable


def _has_only(value: Any, names: set[str]) -> bool:
    """Whether an object holds nothing but its fields ``names``: no other attributes, and it is no number or list."""
    kept = set(getattr(value, "__dict__", ()))
    for base in type(value).__mro__[:-1]:
        slots = vars(base).get("__slots__", ())
        kept.update((slots,) if isinstance(slots, str) else slots)
        if base.__module__ in _CONTAINERS:
            return False
    return kept <= names | {"__dict__", "__weakref__"}


def can_be_given_again(returned: Any) -> bool:
    """Whether what a kernel returned is the same for every launch of a kind: tensors, and numbers or strings beside."""
    if isinstance(returned, (tuple, list)):
        return all(map(can_be_given_again, returned))
    return isinstance(returned, NkiTensor) or returned is None or type(returned) in (bool, int, float, str)
