# SPDX-License-Identifier: Apache-2.0
"""Functions of the Scalar engine's activation table.

Hardware evaluates them as piecewise polynomials of undocumented error; here they are exact: computed in float64 and
rounded to float32. That holds outside the documented valid ranges too, with one exception: ``sin`` continues beyond
[-pi, pi] as the cubic that it has at the ends of that range.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from nki_bn.simulator.errors import UnsupportedError
from nki_bn.simulator.numerics import Float32
from nki_bn.simulator.operators import op_name
from nki_bn.simulator.tensor import require

Float64 = npt.NDArray[np.float64]

_erf: Callable[[Float64], Any] = np.vectorize(math.erf, otypes=[np.float64])
_erfc: Callable[[Float64], Any] = np.vectorize(math.erfc, otypes=[np.float64])
_TANH_CUBIC = 0.044715
_SIGMOID_SLOPE = 1.702


def _sigmoid(x: Float64) -> Float64:
    return 1.0 / (1.0 + np.exp(-x))


def _normal_cdf(x: Float64) -> Float64:
    # 1 + erf would lose the lower tail.
    return 0.5 * _erfc(-x / math.sqrt(2.0))  # type: ignore[no-any-return]


def _gelu(x: Float64) -> Float64:
    return x * _normal_cdf(x)


def _gelu_dx(x: Float64) -> Float64:
    return _normal_cdf(x) + x * np.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)


def _gelu_apprx_tanh(x: Float64) -> Float64:
    # x/2 * (1 + tanh(u)), written as x * sigmoid(2u), which keeps the lower tail.
    return x * _sigmoid(2.0 * math.sqrt(2.0 / math.pi) * (x + _TANH_CUBIC * x**3))


def _gelu_apprx_sigmoid(x: Float64) -> Float64:
    return x * _sigmoid(_SIGMOID_SLOPE * x)


def _gelu_apprx_sigmoid_dx(x: Float64) -> Float64:
    s = _sigmoid(_SIGMOID_SLOPE * x)
    return s + _SIGMOID_SLOPE * x * s * (1.0 - s)


def _silu(x: Float64) -> Float64:
    return x * _sigmoid(x)


def _silu_dx(x: Float64) -> Float64:
    s = _sigmoid(x)
    return s * (1.0 + x * (1.0 - s))


def _softplus(x: Float64) -> Float64:
    return np.logaddexp(0.0, x)


def _mish(x: Float64) -> Float64:
    return x * np.tanh(_softplus(x))


def _erf_dx(x: Float64) -> Float64:
    return 2.0 / math.sqrt(math.pi) * np.exp(-x * x)


def _sin(x: Float64) -> Float64:
    beyond = x - np.copysign(math.pi, x)
    return np.where(np.abs(x) <= math.pi, np.sin(x), beyond**3 / 6.0 - beyond)


def _rsqrt(x: Float64) -> Float64:
    return 1.0 / np.sqrt(x)


def _relu(x: Float32) -> Float32:
    return np.maximum(x, np.float32(0))


def _copy(x: Float32) -> Float32:
    return x


_EXACT: dict[str, Callable[[Float32], Float32]] = {
    "copy": _copy,
    "square": np.square,
    "relu": _relu,
    "abs": np.abs,
    "sign": np.sign,
}
_ROUNDED: dict[str, Callable[[Float64], Float64]] = {
    "sigmoid": _sigmoid,
    "gelu": _gelu,
    "gelu_dx": _gelu_dx,
    "gelu_apprx_tanh": _gelu_apprx_tanh,
    "gelu_apprx_sigmoid": _gelu_apprx_sigmoid,
    "gelu_apprx_sigmoid_dx": _gelu_apprx_sigmoid_dx,
    "silu": _silu,
    "silu_dx": _silu_dx,
    "tanh": np.tanh,
    "softplus": _softplus,
    "mish": _mish,
    "erf": _erf,
    "erf_dx": _erf_dx,
    "exp": np.exp,
    "log": np.log,
    "sin": _sin,
    "arctan": np.arctan,
    "sqrt": np.sqrt,
    "rsqrt": _rsqrt,
    "reciprocal": np.reciprocal,
}
FUNCTIONS = (*_EXACT, *_ROUNDED)


def find(instruction: str, op: Any) -> str:
    """The name of the activation function ``op``.

    Raises:
        TypeError: ``op`` is not an operator of ``nki.language``.
        NkiValidationError: it is not an activation function.
        UnsupportedError: it is ``nl.prelu``, whose slope is not documented.
    """
    name = op_name(instruction, "op", op)
    if name == "prelu":
        raise UnsupportedError(f"{instruction} op nl.prelu is not supported: its slope is undocumented")
    require(
        name in FUNCTIONS, f"{instruction} op nl.{name} is not an activation function; accepted: {', '.join(FUNCTIONS)}"
    )
    return name


def evaluate(name: str, values: Float32) -> Float32:
    """The function on float32 values; ``copy`` returns ``values`` itself."""
    if name in _EXACT:
        return _EXACT[name](values)
    return _ROUNDED[name](values.astype(np.float64)).astype(np.float32)
