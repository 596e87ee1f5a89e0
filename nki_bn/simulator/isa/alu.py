# SPDX-License-Identifier: Apache-2.0
"""ALU operators of the Vector and GpSimd engines: what they are, who may use them, and what they compute.

Arithmetic operators work on float32; comparisons and logical operators give booleans, which stand for 1.0 and 0.0.
Bitvec operators work on unsigned integers of the operands' width. What NumPy does with NaN (``maximum`` and ``minimum``
pass it on, comparisons with it are false) is done here too: the instruction set does not document it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nki_bn.simulator import dtypes
from nki_bn.simulator.isa import checks
from nki_bn.simulator.isa.enums import engine, nc_version
from nki_bn.simulator.isa.operands import Operands
from nki_bn.simulator.issue import float32, raw
from nki_bn.simulator.numerics import Array, Float32, sum_columns
from nki_bn.simulator.operators import op_name
from nki_bn.simulator.tensor import NkiTensor, require

_VECTOR = frozenset({engine.vector})
_EVERY = frozenset({engine.vector, engine.scalar, engine.gpsimd})
_GPSIMD = frozenset({engine.gpsimd})


@dataclass(frozen=True)
class Operator:
    """One ALU operator.

    Attributes:
        name: its name in ``nki.language``.
        function: what it computes.
        engines: engines that have it as a float32 operator.
        bitvec: works on bit patterns of integers instead of float32.
        unary: takes no second operand.
        reduces: legal as the operator of a reduction.
        since: first generation that has it.
    """

    name: str
    function: Callable[..., Any]
    engines: frozenset[engine] = _VECTOR
    bitvec: bool = False
    unary: bool = False
    reduces: bool = False
    since: nc_version = nc_version.gen2


def _abs_max(a: Array, b: Array) -> Array:
    return np.where(np.abs(a) > np.abs(b), a, b)


def _abs_min(a: Array, b: Array) -> Array:
    return np.where(np.abs(a) < np.abs(b), a, b)


def _rsqrt(a: Array) -> Array:
    return (1.0 / np.sqrt(a.astype(np.float64))).astype(np.float32)


def _relu(a: Array) -> Array:
    return np.maximum(a, np.float32(0))


_OPERATORS = (
    Operator("invert", np.invert, bitvec=True, unary=True),
    Operator("bitwise_and", np.bitwise_and, bitvec=True, reduces=True),
    Operator("bitwise_or", np.bitwise_or, bitvec=True, reduces=True),
    Operator("bitwise_xor", np.bitwise_xor, bitvec=True, reduces=True),
    Operator("left_shift", np.left_shift, bitvec=True),
    Operator("right_shift", np.right_shift, bitvec=True),
    Operator("add", np.add, _EVERY, reduces=True),
    Operator("subtract", np.subtract, reduces=True),
    Operator("multiply", np.multiply, _EVERY, reduces=True),
    Operator("maximum", np.maximum, reduces=True),
    Operator("minimum", np.minimum, reduces=True),
    Operator("equal", np.equal),
    Operator("not_equal", np.not_equal),
    Operator("greater_equal", np.greater_equal),
    Operator("greater", np.greater),
    Operator("less_equal", np.less_equal),
    Operator("less", np.less),
    Operator("logical_and", np.logical_and, reduces=True),
    Operator("logical_or", np.logical_or, reduces=True),
    Operator("logical_xor", np.logical_xor, reduces=True),
    Operator("power", np.power, _GPSIMD),
    Operator("abs_max", _abs_max, since=nc_version.gen4),
    Operator("abs_min", _abs_min, since=nc_version.gen4),
    Operator("abs", np.abs, unary=True),
    Operator("square", np.square, unary=True, since=nc_version.gen4),
    Operator("relu", _relu, unary=True, since=nc_version.gen4),
    Operator("rsqrt", _rsqrt, _GPSIMD, unary=True),
)
OPERATORS = {operator.name: operator for operator in _OPERATORS}
COMPARISONS = frozenset({"equal", "not_equal", "greater_equal", "greater", "less_equal", "less"})
# Float32 results that NumPy can write into an array of the caller's.
_IN_PLACE = frozenset({"add", "subtract", "multiply", "maximum", "minimum", "abs", "square"})

# The reductions of a tile are named where the operator is meant, in documentation and in kernels.
_ALIASES = {"max": "maximum", "min": "minimum"}

# What accumulators hold after a reset. The last two are not documented.
IDENTITIES = {
    "add": 0.0,
    "subtract": 0.0,
    "multiply": 1.0,
    "maximum": -np.inf,
    "minimum": np.inf,
    "abs_max": 0.0,
    "abs_min": np.inf,
}


def find(instruction: str, argument: str, op: Any) -> Operator:
    """The ALU operator that ``op`` names.

    Raises:
        TypeError: ``op`` is not an operator of ``nki.language``.
        NkiValidationError: it is not an ALU operator, or not one of this generation.
    """
    name = op_name(instruction, argument, op)
    require(
        name in OPERATORS,
        f"{instruction} {argument} nl.{name} is not an ALU operator; accepted: {', '.join(OPERATORS)}",
    )
    found = OPERATORS[name]
    if found.since > nc_version.gen2:
        checks.at_least(f"{instruction} {argument} nl.{name}", found.since)
    return found


def find_reduction(instruction: str, argument: str, op: Any, accepted: tuple[str, ...] | None = None) -> Operator:
    """The operator of a reduction, one of ``accepted`` if given; ``nl.max`` and ``nl.min`` mean maximum and minimum.

    Raises:
        TypeError: ``op`` is not an operator of ``nki.language``.
        NkiValidationError: it is not accepted.
    """
    name = op_name(instruction, argument, op)
    name = _ALIASES.get(name, name)
    names = accepted or tuple(item.name for item in _OPERATORS if item.reduces)
    require(name in names, f"{instruction} {argument} nl.{name} is not accepted; accepted: {', '.join(names)}")
    return OPERATORS[name]


def require_vector(instruction: str, **operators: Operator) -> None:
    """The operators are arithmetic ones that Vector has."""
    for argument, operator in operators.items():
        require(
            not operator.bitvec,
            f"{instruction} {argument} nl.{operator.name} is a bitvec operator; accepted: arithmetic operators",
        )
        require(
            engine.vector in operator.engines,
            f"{instruction} {argument} nl.{operator.name} does not exist on vector; it runs on "
            f"{', '.join(item.name for item in operator.engines)}",
        )


def read(tensor: NkiTensor) -> Float32:
    """Elements as float32, shape (partitions, elements per partition); the memory itself if it holds float32."""
    values = raw(tensor)
    return values if values.dtype == np.float32 else float32(tensor)


def bits(tensor: NkiTensor) -> Array:
    """Bit patterns of an integer tensor as unsigned integers of its width, shape (partitions, elements)."""
    return raw(tensor).view(f"u{dtypes.size_of(tensor.dtype)}")


def from_bits(values: Array, tensor: NkiTensor) -> Array:
    """Unsigned ``values`` as the integer type of ``tensor``, which has the same width."""
    return values.view(dtypes.to_numpy(tensor.dtype))


def check_bits(instruction: str, **tensors: NkiTensor) -> None:
    """Operands of a bitvec operator: integers of one width, as nothing is cast."""
    for name, tensor in tensors.items():
        require(
            dtypes.is_integer(tensor.dtype),
            f"{instruction} {name} is {tensor.dtype}; bitvec operators take integer dtypes only",
        )
    (first, model), *others = tensors.items()
    for name, tensor in others:
        require(
            dtypes.size_of(tensor.dtype) == dtypes.size_of(model.dtype),
            f"{instruction} {name} is {tensor.dtype}, {first} is {model.dtype}: bitvec operators do not cast",
        )


def evaluate(name: str, a: Any, b: Any = None, out: Array | None = None) -> Array:
    """``a`` op ``b`` (or op ``a``) elementwise; ``out`` is an array that may be overwritten with the result."""
    operator = OPERATORS[name]
    operands = (a,) if operator.unary else (a, b)
    if out is not None and name in _IN_PLACE and out.dtype == np.float32:
        return operator.function(*operands, out=out)  # type: ignore[no-any-return]
    return operator.function(*operands)  # type: ignore[no-any-return]


def evaluate_integers(name: str, a: Array, b: Array, dtype: str) -> Array:
    """``a`` op ``b`` for int32 and uint32 arrays, exact; results wrap into the 32 bits of ``dtype``."""
    wide = OPERATORS[name].function(a.astype(np.int64), b.astype(np.int64))
    return np.asarray(wide.astype(np.int64).astype(dtypes.to_numpy(dtype)))


def reduce(name: str, values: Array, order: str) -> Array:
    """Reduction over the last axis, kept with size 1; ``order`` is that of :func:`numerics.sum_columns`.

    ``subtract`` takes all later elements off the first one: its order is undocumented.
    """
    if name == "add":
        return sum_columns(values, order)
    if name in ("abs_max", "abs_min"):
        return _last_extreme(name, values)
    function: Any = OPERATORS[name].function
    if order == "sequential":
        return function.accumulate(values, axis=-1)[..., -1:]  # type: ignore[no-any-return]
    return function.reduce(values, axis=-1, keepdims=True)  # type: ignore[no-any-return]


def _last_extreme(name: str, values: Array) -> Array:
    """The element of largest or smallest magnitude over the last axis; of equal ones the last, in any order."""
    magnitudes = np.abs(values)[..., ::-1]
    at = magnitudes.argmax(axis=-1) if name == "abs_max" else magnitudes.argmin(axis=-1)
    return np.take_along_axis(values, values.shape[-1] - 1 - at[..., None], axis=-1)


def accumulate(name: str, start: Float32, values: Array, order: str) -> Array:
    """``start`` (partitions, 1) op all columns of ``values``; sequentially one accumulator runs through all of them."""
    if order == "sequential":
        return reduce(name, np.concatenate([start, values], axis=1), order)
    return evaluate(name, start, reduce(name, values, order))


@dataclass(frozen=True)
class Stage:
    """An operator with its second operand (a number or a column with a value per partition; None if unary)."""

    operator: Operator
    operand: Any
    reverse: bool

    @property
    def columns(self) -> list[NkiTensor]:
        """The operand if it is a column in memory (a pointer operand)."""
        return [self.operand] if isinstance(self.operand, NkiTensor) else []

    def apply(self, values: Array, out: Array | None = None) -> Array:
        """The stage's result for ``values`` (float32, or bits); ``out`` as in :func:`evaluate`."""
        if self.operator.unary:
            return evaluate(self.operator.name, values, out=out)
        other = self._bits(values.dtype) if self.operator.bitvec else checks.operand_values(self.operand)
        a, b = (other, values) if self.reverse else (values, other)
        return evaluate(self.operator.name, a, b, out)

    def _bits(self, dtype: np.dtype[Any]) -> Any:
        if isinstance(self.operand, NkiTensor):
            return bits(self.operand)
        return dtype.type(self.operand & np.iinfo(dtype).max)


def stage(
    operands: Operands,
    names: tuple[str, str],
    op: Any,
    operand: Any,
    data: NkiTensor,
    *,
    reverse: bool = False,
    float32_only: bool = True,
) -> Stage:
    """Check an operator and its operand for ``data``; ``names`` are the names of the two arguments.

    Raises:
        TypeError: the operator is none of ``nki.language``, or the operand is neither a number nor a tensor.
        NkiValidationError: the operator is not available, or the operand has a wrong shape, place or dtype.
    """
    operator = find(operands.instruction, names[0], op)
    what = f"{operands.instruction} {names[0]} nl.{operator.name}"
    if operator.unary:
        require(
            operand is None or (not isinstance(operand, NkiTensor) and operand == 0),
            f"{what} is unary: {names[1]} must be None or 0, got {operand!r}",
        )
        return Stage(operator, None, reverse)
    require(operand is not None, f"{what} needs {names[1]}")
    float32_only = float32_only and not operator.bitvec
    checked = operands.column(names[1], operand, data, float32_only=float32_only)
    if operator.bitvec and isinstance(checked, NkiTensor):
        check_bits(operands.instruction, data=data, **{names[1]: checked})
    elif operator.bitvec:
        require(isinstance(checked, int), f"{what} needs an integer {names[1]}, got {operand!r}")
    return Stage(operator, checked, reverse)
