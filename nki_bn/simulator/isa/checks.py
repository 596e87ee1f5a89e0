# SPDX-License-Identifier: Apache-2.0
"""Operand rules that several instructions share; each names the instruction and the argument."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from math import prod
from typing import Any, TypeVar

import numpy as np

from nki_bn.simulator.errors import NkiValidationError
from nki_bn.simulator.isa.enums import engine, nc_version
from nki_bn.simulator.issue import float32
from nki_bn.simulator.machine import current_core
from nki_bn.simulator.memory import MemoryRegion
from nki_bn.simulator.numerics import Float32
from nki_bn.simulator.tensor import NkiTensor, require

SBUF = (MemoryRegion.sbuf,)
ON_CHIP = (MemoryRegion.sbuf, MemoryRegion.psum)
PSUM = (MemoryRegion.psum,)

E = TypeVar("E", bound=Enum)


def version() -> nc_version:
    """Generation of the core that runs."""
    return nc_version(current_core().run.target.generation)


def tile(op: str, name: str, value: Any, regions: tuple[MemoryRegion, ...] = ON_CHIP) -> NkiTensor:
    """``value`` if it is a tensor in one of ``regions`` with at most 128 partitions and no run-time index left.

    Raises:
        TypeError: it is no tensor.
        NkiValidationError: it lives elsewhere or is too large.
    """
    if not isinstance(value, NkiTensor):
        raise TypeError(f"{op} {name} must be a tensor, got {type(value).__name__}")
    # Messages are made only where they are needed: this is called for every operand.
    if value.buffer not in regions:
        accepted = " or ".join(region.value for region in regions)
        raise NkiValidationError(f"{op} {name} is in {value.buffer.value}; accepted: {accepted}")
    most = current_core().run.target.partitions
    if value.shape[0] > most and value.buffer.on_chip:
        raise NkiValidationError(f"{op} {name} partition dimension {value.shape[0]} exceeds maximum {most}")
    return value


def columns(tensor: NkiTensor) -> int:
    """Elements per partition."""
    return prod(tensor.shape[1:])


def same_layout(op: str, **tensors: NkiTensor) -> None:
    """All tensors have the same number of partitions and of elements per partition (ranks may differ)."""
    (first, model), *others = tensors.items()
    same_partitions(op, **tensors)
    for name, other in others:
        require(
            columns(model) == columns(other),
            f"{op} {name} has {columns(other)} elements per partition, {first} has {columns(model)}",
        )


def same_partitions(op: str, **tensors: NkiTensor) -> None:
    """All tensors have the same number of partitions."""
    (first, model), *others = tensors.items()
    for name, other in others:
        require(
            model.shape[0] == other.shape[0],
            f"{op} {name} has {other.shape[0]} partitions, {first} has {model.shape[0]}",
        )


def same_dtype(op: str, **tensors: NkiTensor) -> None:
    """All tensors have the dtype of the first."""
    (first, model), *others = tensors.items()
    for name, other in others:
        require(
            other.dtype == model.dtype, f"{op} {name} must have the dtype of {first}, {model.dtype}, got {other.dtype}"
        )


def check_dtypes(op: str, accepted: Sequence[str], **tensors: NkiTensor) -> None:
    """All tensors have one of the ``accepted`` dtypes."""
    for name, tensor in tensors.items():
        require(tensor.dtype in accepted, f"{op} {name} is {tensor.dtype}; accepted: {', '.join(accepted)}")


def number(op: str, name: str, value: Any) -> None:
    """``value`` is a number of Python or NumPy.

    Raises:
        TypeError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{op} {name} must be a number, got {value!r}")


def not_both_psum(op: str, **tensors: NkiTensor) -> None:
    """At least one of the two tensors is not in PSUM."""
    require(
        not all(tensor.buffer is MemoryRegion.psum for tensor in tensors.values()),
        f"{op} {' and '.join(tensors)} are both in psum; at most one may be",
    )


def member(op: str, name: str, value: Any, kind: type[E]) -> E:
    """``value`` if it is a member of the enumeration ``kind``; in a lenient run the value of a member does as well.

    Raises:
        TypeError: it is not.
    """
    if isinstance(value, str) and not current_core().options.strict and value in (one.value for one in kind):
        return kind(value)
    if not isinstance(value, kind):
        raise TypeError(f"{op} {name} must be a member of {kind.__name__}, got {value!r}")
    return value


def pick_engine(op: str, chosen: engine, default: engine, accepted: tuple[engine, ...]) -> engine:
    """The engine that runs the instruction: the chosen one if it can, the default for ``unknown``."""
    chosen = member(op, "engine", chosen, engine)
    if chosen is engine.unknown:
        return default
    require(
        chosen in accepted,
        f"{op} cannot run on engine {chosen.name}; accepted: {', '.join(item.name for item in accepted)}",
    )
    return chosen


def at_least(op: str, generation: nc_version) -> None:
    """The core is of ``generation`` or later."""
    require(version() >= generation, f"{op} needs {generation.name} or later, the target is {version().name}")


def column_operand(op: str, name: str, value: Any, data: NkiTensor, *, float32_only: bool = True) -> Any:
    """An operand that is a number or one column with a value per partition of ``data``; returned unchanged.

    Raises:
        TypeError: it is neither.
        NkiValidationError: the column has another shape, place or dtype.
    """
    if isinstance(value, NkiTensor):
        tile(op, name, value)
        require(
            value.shape[0] == data.shape[0] and columns(value) == 1,
            f"{op} {name} must have shape ({data.shape[0]}, 1), got {value.shape}",
        )
        require(not float32_only or value.dtype == "float32", f"{op} {name} must be float32, got {value.dtype}")
        return value
    if hasattr(value, "dtype") and getattr(value, "ndim", None) == 0:
        return value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{op} {name} must be a number or a column of shape ({data.shape[0]}, 1), got {value!r}")
    return value


def operand_values(value: Any) -> Float32 | float:
    """What the engine sees of a number or column: columns are rounded as the numerics mode says."""
    if isinstance(value, NkiTensor):
        return current_core().pointer(float32(value))
    return np.float32(value)  # type: ignore[return-value]
