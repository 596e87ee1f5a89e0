# SPDX-License-Identifier: Apache-2.0
"""Values of a StableHLO function, and arithmetic on them that emits operations and broadcasts as NumPy does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from nki_bn.stablehlo.graph import Graph

ELEMENTS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "bool": "i1"}


class Type(NamedTuple):
    """Shape and dtype, one of ``ELEMENTS``, of a tensor."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"tensor<{''.join(f'{size}x' for size in self.shape)}{ELEMENTS[self.dtype]}>"


@dataclass(frozen=True)
class Value:
    """A tensor of a function that is being emitted. Arithmetic takes float32 alone, and says so in a TypeError.

    Attributes:
        graph: what the operations on it are emitted to.
        name: its SSA name, without the per cent sign.
        type: its shape and dtype.
    """

    graph: Graph
    name: str
    type: Type

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of its dimensions."""
        return self.type.shape

    @property
    def dtype(self) -> str:
        """One of ``ELEMENTS``."""
        return self.type.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __add__(self, other: Value | float) -> Value:
        return self._with("add", other)

    def __sub__(self, other: Value | float) -> Value:
        return self._with("subtract", other)

    def __mul__(self, other: Value | float) -> Value:
        return self._with("multiply", other)

    def __truediv__(self, other: Value | float) -> Value:
        return self._with("divide", other)

    def __pow__(self, exponent: int) -> Value:
        if exponent != 2:
            raise ValueError(f"exponent is {exponent}; accepted: 2")
        return self * self

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Value:
        asked = index if isinstance(index, tuple) else (index,)
        missing = (slice(None),) * (len(self.shape) - len(asked))
        ranges = [range(size)[part] for part, size in zip(asked + missing, self.shape, strict=True)]
        numbers = {
            "start_indices": [part.start for part in ranges],
            "limit_indices": [part.stop for part in ranges],
            "strides": [part.step for part in ranges],
        }
        attributes = ", ".join(f"{name} = {_array(values)}" for name, values in numbers.items())
        return self._unary("slice", tuple(map(len, ranges)), attributes)

    def clip(self, least: float) -> Value:
        """No element less than ``least``; NaN stays NaN."""
        return self._with("maximum", least)

    def rsqrt(self) -> Value:
        """1/sqrt of every element."""
        return self._unary("rsqrt", self.shape)

    def sum(self, axes: int | tuple[int, ...]) -> Value:
        """The sums over ``axes``."""
        dropped = axes if isinstance(axes, tuple) else (axes,)
        kept = tuple(size for axis, size in enumerate(self.shape) if axis not in dropped)
        operands = self, self.graph.constant(0.0)
        dimensions = f"dimensions = {_array(dropped)}"
        return self.graph.emit("reduce", operands, (Type(kept, self.dtype),), dimensions, adds=True)[0]

    def reshape(self, shape: tuple[int, ...]) -> Value:
        """The same elements in another shape."""
        return self._unary("reshape", shape)

    def broadcast(self, shape: tuple[int, ...], dimensions: Sequence[int]) -> Value:
        """Repeated to ``shape``, in which its own dimensions are ``dimensions``; itself if it has that shape."""
        if self.shape == shape:
            return self
        return self._unary("broadcast_in_dim", shape, f"broadcast_dimensions = {_array(dimensions)}")

    def to(self, dtype: str) -> Value:
        """As another dtype, rounded to nearest; itself if it has that dtype."""
        return self if self.dtype == dtype else self.graph.emit("convert", (self,), (Type(self.shape, dtype),))[0]

    def above_zero(self) -> Value:
        """bool: true where an element is more than 0; false where it is NaN."""
        operands = self, self.graph.constant(0.0, self.shape)
        direction = "comparison_direction = #stablehlo<comparison_direction GT>"
        return self.graph.emit("compare", operands, (Type(self.shape, "bool"),), direction)[0]

    def where(self, mask: Value) -> Value:
        """Itself where ``mask``, a bool of its shape, is true, and 0 elsewhere, NaN or not."""
        operands = mask, self, self.graph.constant(0.0, self.shape)
        return self.graph.emit("select", operands, (self.type,))[0]

    def _unary(self, operation: str, shape: tuple[int, ...], attributes: str = "") -> Value:
        return self.graph.emit(operation, (self,), (Type(shape, self.dtype),), attributes)[0]

    def _with(self, operation: str, other: Value | float) -> Value:
        second = other if isinstance(other, Value) else self.graph.constant(other, self.shape)
        require_float32((self, second))
        shape = np.broadcast_shapes(self.shape, second.shape)
        pair = [value.broadcast(shape, range(len(shape) - len(value.shape), len(shape))) for value in (self, second)]
        return self.graph.emit(operation, pair, (Type(shape, self.dtype),))[0]


def require_float32(values: Sequence[Value]) -> None:
    """Refuse values of another dtype in arithmetic.

    Raises:
        TypeError: there is one.
    """
    for value in values:
        if value.dtype != "float32":
            raise TypeError(f"{value.name} is {value.dtype}; accepted in arithmetic: float32, as by to('float32')")


def number(value: float) -> str:
    """A float32 number with all its digits.

    Raises:
        ValueError: it is not finite in float32.
    """
    with np.errstate(over="ignore"):
        rounded = float(np.float32(value))
    if not np.isfinite(rounded):
        raise ValueError(f"a constant is {value}; accepted: finite values in float32")
    return f"{rounded:.8e}"


def _array(numbers: Sequence[int]) -> str:
    return f"array<i64{': ' if numbers else ''}{', '.join(map(str, numbers))}>"
