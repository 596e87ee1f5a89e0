# SPDX-License-Identifier: Apache-2.0
"""Functions of nki.language that compute: values against NumPy, limits and refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from launching import launch, nisa, nl
from tiles import on_tiles, refuses

from nki_bn.simulator import NkiValidationError

RNG = np.random.default_rng(7)
BF16 = np.dtype(ml_dtypes.bfloat16)
X = (3 * RNG.normal(size=(64, 40))).astype(np.float32)
Y = RNG.normal(size=(64, 40)).astype(np.float32)
INTEGERS = RNG.integers(0, 2**16, (32, 8)).astype(np.int32)

erf = np.vectorize(math.erf)


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def softplus(x: Any) -> Any:
    return np.log1p(np.exp(x))


# --- elementwise functions -------------------------------------------------------------------------------------------

UNARY: dict[str, Callable[[Any], Any]] = {
    "abs": np.abs,
    "square": np.square,
    "exp": np.exp,
    "tanh": np.tanh,
    "sigmoid": sigmoid,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x * (1 + erf(x / math.sqrt(2))) / 2,
    "gelu_dx": lambda x: (1 + erf(x / math.sqrt(2))) / 2 + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi),
    "gelu_apprx_tanh": lambda x: x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu_apprx_sigmoid": lambda x: x * sigmoid(1.702 * x),
    "gelu_apprx_sigmoid_dx": lambda x: sigmoid(1.702 * x) * (1 + 1.702 * x * (1 - sigmoid(1.702 * x))),
    "silu": lambda x: x * sigmoid(x),
    "silu_dx": lambda x: sigmoid(x) * (1 + x * (1 - sigmoid(x))),
    "softplus": softplus,
    "mish": lambda x: x * np.tanh(softplus(x)),
    "erf": erf,
    "erf_dx": lambda x: 2 / math.sqrt(math.pi) * np.exp(-x * x),
    "reciprocal": np.reciprocal,
    "sin": np.sin,
    "cos": np.cos,
    "arctan": np.arctan,
    "ceil": np.ceil,
    "floor": np.floor,
    "trunc": np.trunc,
    "negative": np.negative,
    "sign": np.sign,
    "copy": np.array,
}
POSITIVE = {"log": np.log, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x)}


@pytest.mark.parametrize("name", [*UNARY, *POSITIVE])
def test_unary_functions(name: str) -> None:
    x = np.abs(X) + np.float32(1e-3) if name in POSITIVE else X
    expected = {**UNARY, **POSITIVE}[name](x.astype(np.float64))
    np.testing.assert_allclose(on_tiles(getattr(nl, name), x), expected, rtol=4e-7, atol=4e-7)
    rounded = on_tiles(lambda tile: getattr(nl, name)(tile, dtype=nl.bfloat16), x)
    assert rounded.dtype == BF16
    np.testing.assert_allclose(rounded.astype(np.float64), expected, rtol=2**-8, atol=1e-6)


def test_tangent() -> None:
    expected = np.tan(X.astype(np.float64))
    # The slope of the tangent multiplies the rounding of its argument.
    assert (np.abs(on_tiles(nl.tan, X) - expected) < 5e-7 * (1 + expected**2)).all()


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_sine_and_cosine_reduce_large_arguments(name: str) -> None:
    x = np.array([[0.0, math.pi, -math.pi, 9.0, -100.0, 1234.5, 99999.0]], np.float32)
    np.testing.assert_allclose(on_tiles(getattr(nl, name), x), getattr(np, name)(x.astype(np.float64)), atol=4e-7)


@pytest.mark.parametrize("name", ["ceil", "floor", "trunc"])
def test_rounding_keeps_integers_infinities_and_nan(name: str) -> None:
    x = np.array(
        [[0.5, -0.5, 1.5, 2.5, -2.5, 8388607.5, -8388607.5, 2.0**31, -(2.0**40), np.inf, -np.inf, np.nan]], np.float32
    )
    np.testing.assert_array_equal(on_tiles(getattr(nl, name), x), getattr(np, name)(x))


BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "equal": np.equal,
    "not_equal": np.not_equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_xor": np.logical_xor,
}


@pytest.mark.parametrize("name", BINARY)
def test_binary_functions_of_tiles_and_numbers(name: str) -> None:
    function, reference = getattr(nl, name), BINARY[name]
    x, y = np.trunc(X), np.trunc(Y)
    for given, expected in (
        (function, reference(x, y)),
        (lambda a, b: function(a, 1.5), reference(x, np.float32(1.5))),
        (lambda a, b: function(1.5, a), reference(np.float32(1.5), x)),
        (lambda a, b: function(a, 0), reference(x, np.float32(0))),
    ):
        result = on_tiles(given, x, y)
        assert result.dtype == np.float32
        np.testing.assert_array_equal(result, expected.astype(np.float32))


@pytest.mark.parametrize("name", ["bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift"])
def test_bit_functions(name: str) -> None:
    shifts = INTEGERS % 8 if "shift" in name else INTEGERS[::-1].copy()
    np.testing.assert_array_equal(on_tiles(getattr(nl, name), INTEGERS, shifts), getattr(np, name)(INTEGERS, shifts))
    np.testing.assert_array_equal(on_tiles(lambda x: getattr(nl, name)(x, 5), INTEGERS), getattr(np, name)(INTEGERS, 5))
    refuses(getattr(nl, name), "integer", X, Y)


def test_right_shift_is_logical_and_invert_flips_bits() -> None:
    negative = np.array([[-1, -8]], np.int32)
    np.testing.assert_array_equal(on_tiles(lambda x: nl.right_shift(x, 28), negative), np.array([[15, 15]]))
    np.testing.assert_array_equal(on_tiles(nl.invert, INTEGERS), ~INTEGERS)


def test_power_needs_two_tiles() -> None:
    base = np.abs(X) + np.float32(0.1)
    expected = base.astype(np.float64) ** Y
    np.testing.assert_allclose(on_tiles(nl.power, base, Y), expected, rtol=1e-6)
    refuses(lambda x: nl.power(x, 2.0), "power y must be a tile", X, error=TypeError)
    refuses(lambda x: nl.power(2.0, x), "power x must be a tile", X, error=TypeError)


def test_magnitude_functions_are_of_gen4_and_return_the_second_on_ties() -> None:
    x, y = np.array([[-5, 1, 2]], np.float32), np.array([[3, -1, -4]], np.float32)
    np.testing.assert_array_equal(on_tiles(nl.abs_max, x, y, target="trn3"), [[-5, -1, -4]])
    np.testing.assert_array_equal(on_tiles(nl.abs_min, x, y, target="trn3"), [[3, -1, 2]])
    column = np.array([[3]], np.float32)
    np.testing.assert_array_equal(on_tiles(nl.abs_max, x, column, target="trn3"), [[-5, 3, 3]])
    refuses(nl.abs_max, "gen4", x, y)


def test_logical_not_of_truth_values() -> None:
    truth = (X > 0).astype(np.float32)
    np.testing.assert_array_equal(on_tiles(nl.logical_not, truth), 1 - truth)
    np.testing.assert_array_equal(on_tiles(nl.logical_not, truth.astype(np.uint8)), (1 - truth).astype(np.uint8))


def test_no_broadcasting_between_tiles() -> None:
    refuses(nl.add, "elements per partition", X, X[:, :1].copy())


def test_division_is_refused_and_remainders_need_a_lenient_run() -> None:
    refuses(nl.divide, "reciprocal", X, Y)
    refuses(nl.divide, "reciprocal", X, Y, strict=False)
    for name in ("fmod", "mod"):
        refuses(getattr(nl, name), "not an operation of the hardware", X, Y)
        np.testing.assert_array_equal(on_tiles(getattr(nl, name), X, Y, strict=False), getattr(np, name)(X, Y))
        np.testing.assert_array_equal(
            on_tiles(lambda x, n=name: getattr(nl, n)(7.0, x), Y, strict=False), getattr(np, name)(np.float32(7), Y)
        )


def test_results_of_mixed_dtypes() -> None:
    assert on_tiles(nl.add, X.astype(BF16), Y).dtype == np.float32
    assert on_tiles(nl.add, INTEGERS, INTEGERS.astype(np.float16)).dtype == np.float16
    assert on_tiles(nl.add, INTEGERS.astype(np.int8), INTEGERS).dtype == np.int32
    assert on_tiles(lambda x: nl.greater(x, 0, dtype=nl.uint8), X).dtype == np.uint8


def test_functions_refuse_what_is_no_tile() -> None:
    for function in (nl.exp, nl.copy, nl.floor, nl.sum, nl.broadcast_to):
        with pytest.raises(TypeError, match="must be a tile"):
            launch(lambda x, f=function: f(1.0, 1), X)
    with pytest.raises(NkiValidationError, match="load it first"):
        launch(lambda x: nl.add(x, x), X)
    with pytest.raises(TypeError, match="must be a tile"):
        launch(lambda x: nl.add(1.0, 2.0), X)


def test_reciprocal_square_root_rejects_psum_and_copies_are_bit_exact() -> None:
    refuses(lambda x: nl.rsqrt(nl.transpose(x)), "psum", X[:32, :32].copy())
    pattern = np.array([[2**31 - 1, 2**24 + 1, -7]], np.int32)
    np.testing.assert_array_equal(on_tiles(nl.copy, pattern), pattern)


@pytest.mark.parametrize("name", ["average", "prelu", "bypass"])
def test_sentinels_are_operators_only(name: str) -> None:
    sentinel = getattr(nl, name)
    assert not callable(sentinel) and repr(sentinel) == f"nl.{name}"


def test_functions_are_operators_of_instructions() -> None:
    def combined(x: Any, y: Any) -> Any:
        result = nl.ndarray(x.shape, x.dtype)
        nisa.tensor_tensor(result, x, y, op=nl.subtract)
        nisa.activation(result, op=nl.square, data=result)
        return result

    np.testing.assert_allclose(on_tiles(combined, X, Y), (X - Y) ** 2, rtol=1e-6)


# --- reductions and what is built on them ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sum", "prod", "max", "min", "mean"])
@pytest.mark.parametrize("axis", [1, 2, (1, 2), [2], -1])
def test_reductions(name: str, axis: Any) -> None:
    x = X[:, :12].reshape(64, 3, 4)
    axes = tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
    if axis == 1:
        return refuses(lambda t: getattr(nl, name)(t, axis=axis), "last free dimensions", x)
    expected = getattr(np, name)(x.astype(np.float64), axis=axes, keepdims=True)
    kept = on_tiles(lambda t: getattr(nl, name)(t, axis=axis, keepdims=True), x)
    dropped = on_tiles(lambda t: getattr(nl, name)(t, axis=axis), x)
    np.testing.assert_allclose(kept, expected, rtol=2e-6, atol=2e-6)
    # On chip a result keeps two dimensions.
    np.testing.assert_array_equal(dropped, kept.reshape((64, 3) if len(axes) == 1 else (64, 1)))
    return None


def test_reductions_refuse_the_partition_dimension() -> None:
    for axis in (0, (0, 1), (), 2, -3):
        refuses(lambda t, axis=axis: nl.sum(t, axis=axis), "last free dimensions", X)


def test_variance_keeps_dimensions_and_mean_has_float32_intermediates() -> None:
    for keepdims in (True, False):
        variance = on_tiles(lambda t, k=keepdims: nl.var(t, axis=1, keepdims=k), X)
        np.testing.assert_allclose(variance, X.astype(np.float64).var(1, keepdims=True), rtol=2e-6)
    ones = np.ones((2, 1000), BF16)
    np.testing.assert_array_equal(on_tiles(lambda t: nl.mean(t, axis=1), ones), np.ones((2, 1), BF16))


def test_all_is_the_conjunction_of_truth_values() -> None:
    truth = np.array([[1, 1, 1], [1, 0, 1], [0, 0, 0]], np.float32)
    np.testing.assert_array_equal(on_tiles(lambda t: nl.all(t, axis=1), truth), [[1], [0], [0]])


def test_softmax_and_rms_norm() -> None:
    powers = np.exp(X.astype(np.float64) - X.max(1, keepdims=True))
    expected = powers / powers.sum(1, keepdims=True)
    np.testing.assert_allclose(on_tiles(nl.softmax, X), expected, rtol=2e-6, atol=1e-9)
    narrow = on_tiles(lambda t: nl.softmax(t, dtype=nl.bfloat16), X)
    np.testing.assert_allclose(narrow.astype(np.float64), expected, rtol=2**-8)
    x = X[:, :12].reshape(64, 3, 4)
    both = on_tiles(lambda t: nl.softmax(t, axis=(1, 2)), x).reshape(64, 12)
    np.testing.assert_allclose(both, on_tiles(nl.softmax, X[:, :12].copy()), rtol=1e-6)
    wide = X.astype(np.float64)
    expected = wide / np.sqrt((wide**2).sum(1, keepdims=True) / 40 + 0.5) * Y
    normed = on_tiles(lambda x, w: nl.rms_norm(x, w, axis=1, n=40, epsilon=0.5), X, Y)
    np.testing.assert_allclose(normed, expected, rtol=2e-6)


def test_where_chooses_and_keeps_nan_in_its_lanes() -> None:
    x, y = X.copy(), Y.copy()
    x[0, 0], y[0, 1] = np.nan, np.inf
    condition = (X > 0).astype(np.float32)
    np.testing.assert_array_equal(on_tiles(nl.where, condition, x, y), np.where(condition, x, y))
    refuses(nl.where, "shape", condition, x, y[:, :3].copy())


def test_matmul_and_transpose_live_in_psum() -> None:
    product = on_tiles(lambda x, y: nl.matmul(x, y, transpose_x=True), X, Y)
    np.testing.assert_allclose(product, X.T.astype(np.float64) @ Y, rtol=1e-5, atol=1e-4)
    refuses(nl.matmul, "transpose_x=True", X, Y)
    np.testing.assert_array_equal(on_tiles(nl.transpose, X), X.T)
    assert on_tiles(lambda x: nl.transpose(x, dtype=nl.bfloat16), X).dtype == BF16
    refuses(nl.transpose, "two dimensions", X.reshape(64, 5, 8))
