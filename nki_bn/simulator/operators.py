# SPDX-License-Identifier: Apache-2.0
"""Operators as instruction arguments: functions and sentinels of ``nki.language`` carry the name of their operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class Sentinel:
    """An operator that exists only as an instruction argument (``nl.bypass``, ``nl.prelu``, ``nl.average``)."""

    def __init__(self, name: str) -> None:
        self.nki_op = name
        self.__name__ = name

    def __repr__(self) -> str:
        return f"nl.{self.nki_op}"


def operator(function: F) -> F:
    """Mark a language function as the operator of the same name."""
    function.nki_op = function.__name__  # type: ignore[attr-defined]
    return function


def op_name(instruction: str, argument: str, op: Any) -> str:
    """The operator's name.

    Raises:
        TypeError: ``op`` is not an operator of ``nki.language``.
    """
    name = getattr(op, "nki_op", None)
    if not isinstance(name, str):
        raise TypeError(f"{instruction} {argument} must be an operator of nki.language such as nl.add, got {op!r}")
    return name
