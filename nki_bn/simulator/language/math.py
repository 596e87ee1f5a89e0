# SPDX-License-Identifier: Apache-2.0
"""Elementwise functions of ``nki.language``.

Each one is an operator too, so it serves as the ``op`` argument of instructions; called, it allocates a tile in SBUF,
runs the instructions that compute it there and returns the tile. A binary function without ``dtype`` returns the
operands' common dtype: floats before integers, then the wider one, then the first operand's.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

import numpy as np

from nki_bn.simulator import dtypes
from nki_bn.simulator.errors import NkiValidationError
from nki_bn.simulator.isa import scalar, vector
from nki_bn.simulator.isa.enums import engine
from nki_bn.simulator.issue import float32, issue
from nki_bn.simulator.language.tiles import aligned, copied, empty_result, tile_operand
from nki_bn.simulator.machine import current_core
from nki_bn.simulator.operators import Sentinel, operator
from nki_bn.simulator.tensor import NkiTensor, require

Wrapper = Callable[..., NkiTensor]

average = Sentinel("average")
prelu = Sentinel("prelu")
bypass = Sentinel("bypass")


def common_dtype(x: Any, y: Any) -> str:
    """The dtype of a result of two operands, of which numbers do not count."""
    tiles = [value.dtype for value in (x, y) if isinstance(value, NkiTensor)]
    return builtins.max(tiles, key=lambda dtype: (not dtypes.is_integer(dtype), dtypes.size_of(dtype)))


# --- binary ----------------------------------------------------------------------------------------------------------


def _binary(name: str, formula: str) -> Wrapper:
    def function(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
        return _combine(function, x, y, dtype)

    return _named(function, name, f"Elementwise {formula} of two tiles, or of a tile and a number.")


def _named(function: Wrapper, name: str, doc: str) -> Wrapper:
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return operator(function)


def _combine(op: Wrapper, x: Any, y: Any, dtype: Any) -> NkiTensor:
    if isinstance(x, NkiTensor) and isinstance(y, NkiTensor):
        x, y = aligned(tile_operand(op.__name__, "x", x), tile_operand(op.__name__, "y", y))
        result = empty_result(x, dtype or common_dtype(x, y))
        vector.tensor_tensor(result, x, y, op=op)
        return result
    reverse = not isinstance(x, NkiTensor)
    data, number = (y, x) if reverse else (x, y)
    result = empty_result(tile_operand(op.__name__, "y" if reverse else "x", data), dtype)
    vector.tensor_scalar(result, data, op0=op, operand0=number, reverse0=reverse)
    return result


add = _binary("add", "x + y")
subtract = _binary("subtract", "x - y")
multiply = _binary("multiply", "x * y")
maximum = _binary("maximum", "larger value")
minimum = _binary("minimum", "smaller value")
equal = _binary("equal", "x == y as 1.0 or 0.0")
not_equal = _binary("not_equal", "x != y as 1.0 or 0.0")
less = _binary("less", "x < y as 1.0 or 0.0")
less_equal = _binary("less_equal", "x <= y as 1.0 or 0.0")
greater = _binary("greater", "x > y as 1.0 or 0.0")
greater_equal = _binary("greater_equal", "x >= y as 1.0 or 0.0")
bitwise_and = _binary("bitwise_and", "x & y on integers")
bitwise_or = _binary("bitwise_or", "x | y on integers")
bitwise_xor = _binary("bitwise_xor", "x ^ y on integers")
left_shift = _binary("left_shift", "x << y on integers")
right_shift = _binary("right_shift", "logical x >> y on integers")
logical_and = _binary("logical_and", "x and y as 1.0 or 0.0")
logical_or = _binary("logical_or", "x or y as 1.0 or 0.0")
logical_xor = _binary("logical_xor", "truth of exactly one of x and y as 1.0 or 0.0")


@operator
def power(x: NkiTensor, y: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Elementwise x ** y of two tiles; numbers are not accepted."""
    return _combine(power, tile_operand("power", "x", x), tile_operand("power", "y", y), dtype)


def _extreme(name: str, formula: str) -> Wrapper:
    """Like a binary function, but a column as second operand applies to whole rows."""

    def function(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
        if not (isinstance(x, NkiTensor) and isinstance(y, NkiTensor) and y.size == y.shape[0] < x.size):
            return _combine(function, x, y, dtype)
        result = empty_result(tile_operand(name, "x", x), dtype)
        vector.tensor_scalar(result, x, op0=function, operand0=y)
        return result

    return _named(function, name, f"Elementwise {formula}, with its sign; y may be a column. gen4 and later.")


abs_max = _extreme("abs_max", "operand of larger magnitude")
abs_min = _extreme("abs_min", "operand of smaller magnitude")


@operator
def divide(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """Division: documented, but no engine has it and the vendor's simulator refuses it as well."""
    raise NkiValidationError("divide is not an operation of the hardware: multiply by nl.reciprocal(y)")


def _remainder(name: str, compute: Callable[[Any, Any], Any], sign_of: str) -> Wrapper:
    def function(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
        require(
            not current_core().options.strict,
            f"{name} is not an operation of the hardware; only lenient simulations compute it",
        )
        return _emulate(name, compute, x, y, dtype)

    return _named(function, name, f"Remainder of x / y, sign of {sign_of}; not on hardware, in lenient runs only.")


def _emulate(name: str, compute: Callable[[Any, Any], Any], x: Any, y: Any, dtype: Any) -> NkiTensor:
    operands = (("x", x), ("y", y))
    tiles = [tile_operand(name, argument, value) for argument, value in operands if isinstance(value, NkiTensor)]
    require(len(tiles) > 0, f"{name} needs a tile")
    require(tiles[0].shape == tiles[-1].shape, f"{name} x has shape {tiles[0].shape}, y {tiles[-1].shape}")
    result = empty_result(tiles[0], dtype or common_dtype(x, y))

    def values(operand: Any) -> Any:
        return float32(operand) if isinstance(operand, NkiTensor) else np.float32(operand)

    issue(name, "vector", [result], tiles, lambda: [compute(values(x), values(y))])
    return result


fmod = _remainder("fmod", np.fmod, "x")
mod = _remainder("mod", np.mod, "y")

# --- unary -----------------------------------------------------------------------------------------------------------


def _activation(name: str, formula: str) -> Wrapper:
    def function(x: NkiTensor, dtype: Any = None) -> NkiTensor:
        result = empty_result(tile_operand(name, "x", x), dtype)
        scalar.activation(result, op=function, data=x)
        return result

    return _named(function, name, f"Elementwise {formula}, on the Scalar engine.")


abs = _activation("abs", "absolute value")
square = _activation("square", "x * x")
exp = _activation("exp", "exponential")
log = _activation("log", "natural logarithm")
sqrt = _activation("sqrt", "square root")
tanh = _activation("tanh", "hyperbolic tangent")
sigmoid = _activation("sigmoid", "logistic function")
relu = _activation("relu", "max(x, 0)")
gelu = _activation("gelu", "Gaussian error linear unit")
gelu_dx = _activation("gelu_dx", "derivative of gelu")
gelu_apprx_tanh = _activation("gelu_apprx_tanh", "tanh approximation of gelu")
gelu_apprx_sigmoid = _activation("gelu_apprx_sigmoid", "sigmoid approximation of gelu")
gelu_apprx_sigmoid_dx = _activation("gelu_apprx_sigmoid_dx", "derivative of gelu_apprx_sigmoid")
silu = _activation("silu", "x * sigmoid(x)")
silu_dx = _activation("silu_dx", "derivative of silu")
softplus = _activation("softplus", "log(1 + exp(x))")
mish = _activation("mish", "x * tanh(softplus(x))")
erf = _activation("erf", "error function")
erf_dx = _activation("erf_dx", "derivative of erf")
arctan = _activation("arctan", "arc tangent, for x in [-pi/2, pi/2] on hardware")
sign = _activation("sign", "sign of x as -1, 0 or 1")


@operator
def copy(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """A new SBUF tile with the values of an SBUF or PSUM tile; bit-exact when the dtypes agree."""
    return copied(tile_operand("copy", "x", x), dtype)


@operator
def reciprocal(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Elementwise 1 / x, on the Vector engine."""
    result = empty_result(tile_operand("reciprocal", "x", x), dtype)
    vector.reciprocal(result, x)
    return result


@operator
def rsqrt(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Elementwise 1 / sqrt(x), on the GpSimd engine: x must be in SBUF."""
    result = empty_result(tile_operand("rsqrt", "x", x), dtype)
    vector.tensor_scalar(result, x, op0=rsqrt, operand0=0.0, engine=engine.gpsimd)
    return result


@operator
def invert(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Elementwise bitwise NOT of an integer tile."""
    result = empty_result(tile_operand("invert", "x", x), dtype)
    vector.tensor_scalar(result, x, op0=invert, operand0=None)
    return result


@operator
def logical_not(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Elementwise NOT of a tile of 0 and 1 (x XOR 1)."""
    return _scaled(x, logical_xor, 1.0, dtype)


@operator
def negative(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Elementwise -x."""
    return _scaled(tile_operand("negative", "x", x), multiply, -1.0, dtype)


def _scaled(x: NkiTensor, op: Wrapper, number: float, dtype: Any = None) -> NkiTensor:
    result = empty_result(tile_operand(op.__name__, "x", x), dtype)
    vector.tensor_scalar(result, x, op0=op, operand0=number)
    return result
