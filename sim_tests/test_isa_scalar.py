# SPDX-License-Identifier: Apache-2.0
"""activation and activation_reduce: functions, affine input, accumulators, and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as tf
from instructions import (
    BF16,
    BUFFERS,
    F32,
    computed,
    execute,
    in_psum,
    pointer,
    record_of,
    refused,
    same,
    values,
    written,
)
from launching import nisa, nl

from nki_bn.simulator import UnsupportedError

CMD = nisa.reduce_cmd
X, Y = values(64, 24, scale=2), values(64, 24, seed=1)
SCALE, BIAS = values(64, 1, seed=2), values(64, 1, seed=3)
# Rows whose sums are exact in float32, whatever the order of addition.
WHOLE = np.random.default_rng(4).integers(-8, 9, (64, 24)).astype(F32)


def derivative(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def gradient(x: Any) -> Any:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(function(x).sum(), x)[0]

    return gradient


def gelu(x: Any) -> Any:
    # By the complementary error function, which has the lower tail that 1 + erf loses.
    return 0.5 * x * torch.erfc(-x / math.sqrt(2))


def tanh_gelu(x: Any) -> Any:
    return x / (1 + torch.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def sigmoid_gelu(x: Any) -> Any:
    return x * torch.sigmoid(1.702 * x)


REFERENCE: dict[str, Callable[[Any], Any]] = {
    "copy": lambda x: x,
    "square": lambda x: x * x,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "gelu": gelu,
    "gelu_dx": derivative(gelu),
    "gelu_apprx_tanh": tanh_gelu,
    "gelu_apprx_sigmoid": sigmoid_gelu,
    "gelu_apprx_sigmoid_dx": derivative(sigmoid_gelu),
    "silu": tf.silu,
    "silu_dx": derivative(tf.silu),
    "tanh": torch.tanh,
    "softplus": lambda x: torch.log1p(torch.exp(x)),
    "mish": tf.mish,
    "erf": torch.erf,
    "erf_dx": derivative(torch.erf),
    "exp": torch.exp,
    "arctan": torch.arctan,
    "sign": torch.sign,
    "abs": torch.abs,
    "sin": torch.sin,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
}


def activate(*positional: Any, **keywords: Any) -> Callable[..., Any]:
    return lambda dst, data, *rest: nisa.activation(dst, *positional, data, *rest, **keywords)


@pytest.mark.parametrize("name", REFERENCE)
def test_functions_are_exact(name: str) -> None:
    data = np.concatenate([X, 0.01 * X, 8 * X], axis=1)
    data = np.clip(data, -math.pi, math.pi) if name == "sin" else data
    data = np.abs(data) if name in ("log", "sqrt", "rsqrt") else data
    expected = REFERENCE[name](torch.from_numpy(data.astype(np.float64))).numpy().astype(F32)
    np.testing.assert_allclose(computed(activate(getattr(nl, name)), data), expected, rtol=1.2e-7, atol=1e-37)


def test_gelus_are_those_of_torch() -> None:
    data = torch.from_numpy(X)
    for name, approximate in (("gelu", "none"), ("gelu_apprx_tanh", "tanh")):
        expected = tf.gelu(data.double(), approximate=approximate).numpy()
        np.testing.assert_allclose(computed(activate(getattr(nl, name)), X), expected, rtol=1e-6, atol=1e-7)


def test_simple_functions_keep_every_bit() -> None:
    data = np.array([[-0.0, 1e-45, -3e38, np.inf, -np.inf, 1.1]], F32)
    same(computed(activate(nl.copy), data), data)
    same(computed(activate(nl.abs), data), np.abs(data))
    same(computed(activate(nl.square), X), X * X)
    same(computed(activate(nl.relu), data), np.array([[0, 1e-45, 0, np.inf, 0, 1.1]], F32))
    same(computed(activate(nl.sign), data), np.array([[0, 1, -1, 1, -1, 1]], F32))


def test_sine_continues_as_a_cubic_outside_its_range() -> None:
    data = np.array([[9.0, -9.0, 3.2, -100.0, math.pi, 0.5]], F32)
    result = computed(activate(nl.sin), data)
    assert abs(result[0, 0] - 27.65) < 0.005
    beyond = np.abs(data[0, :4].astype(float)) - math.pi
    np.testing.assert_allclose(result[0, :4], np.sign(data[0, :4]) * (beyond**3 / 6 - beyond), rtol=1e-6)
    np.testing.assert_allclose(result[0, 4:], np.sin(data[0, 4:].astype(float)), rtol=1e-6, atol=1e-12)


def test_other_functions_are_exact_outside_their_range() -> None:
    data = np.array([[0.0, -1.0, 1e-40, 1e30]], F32)
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(computed(activate(nl.rsqrt), data), (1 / np.sqrt(data.astype(float))), rtol=1e-7)
        np.testing.assert_allclose(computed(activate(nl.log), data), np.log(data.astype(float)), rtol=1e-7)


# --- affine input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["number", "column"])
@pytest.mark.parametrize("bias", ["none", "number", "column"])
@pytest.mark.parametrize("function", [nl.copy, nl.square])
def test_scale_and_bias(scale: str, bias: str, function: Any) -> None:
    def call(dst: Any, data: Any, s: Any, b: Any) -> None:
        nisa.activation(
            dst, function, data, {"none": None, "number": 0.3, "column": b}[bias], s if scale == "column" else 1.7
        )

    expected = X * (SCALE if scale == "column" else F32(1.7))
    if bias != "none":
        expected = expected + (BIAS if bias == "column" else F32(0.3))
    same(computed(call, X, SCALE, BIAS), expected * expected if function is nl.square else expected)


def test_numpy_numbers_are_numbers() -> None:
    same(computed(activate(nl.copy, scale=np.float32(1.7), bias=np.float64(0.25)), X), X * F32(1.7) + F32(0.25))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int32, np.float16, BF16], ids=str)
def test_any_dtypes(dtype: Any) -> None:
    data = np.abs(10 * X).astype(dtype)
    bias = np.abs(10 * BIAS).astype(dtype)
    result = computed(
        lambda dst, d, b: nisa.activation(dst, nl.copy, d, bias=b, scale=1.5), data, bias, dtype=np.dtype(dtype).name
    )
    same(result, written(data.astype(F32) * F32(1.5) + bias.astype(F32), dtype))


@pytest.mark.parametrize("source", BUFFERS)
@pytest.mark.parametrize("buffer", BUFFERS)
def test_psum_ranks_and_in_place(source: Any, buffer: Any) -> None:
    def call(dst: Any, data: Any, s: Any, b: Any) -> None:
        nisa.activation(dst, nl.copy, data, bias=in_psum(b), scale=in_psum(s))
        nisa.activation(dst, nl.square, dst)

    expected = (X * SCALE + BIAS) ** 2
    same(computed(call, X.reshape(64, 4, 6), SCALE, BIAS, shape=(64, 24), source=source, buffer=buffer), expected)


@pytest.mark.parametrize("name", ["scale", "bias"])
def test_pointer_operands_have_18_bits_on_trn2_and_numbers_have_24(name: str) -> None:
    column = np.full((4, 1), 1 + 2**-20, F32)
    data = np.ones((4, 3), F32) if name == "scale" else np.zeros((4, 3), F32)
    whole, short = np.broadcast_to(column, (4, 3)), np.ones((4, 3), F32)

    def call(dst: Any, data: Any, column: Any) -> None:
        nisa.activation(dst, nl.copy, data, **{name: column})

    same(computed(call, data, column, numerics="ideal"), whole)
    same(computed(call, data, column, numerics="trn2"), short)
    for numerics in ("ideal", "trn2"):
        same(computed(activate(nl.copy, **{name: float(column[0, 0])}), data, numerics=numerics), whole)


def test_both_columns_are_rounded() -> None:
    result = execute(lambda dst, d, s, b: nisa.activation(dst, nl.copy, d, b, s), X, SCALE, BIAS, numerics="trn2")
    same(result.outputs, X * pointer(SCALE) + pointer(BIAS))
    record = record_of(result, "activation")
    assert record.engine == "scalar" and [access.shape for access in record.reads] == [(64, 24), (64, 1), (64, 1)]
    assert record.attributes == {
        "function": "copy",
        "pointers": 2,
        "reduce_op": "add",
        "reduce_cmd": "idle",
        "read_out": False,
    }


# --- accumulators ----------------------------------------------------------------------------------------------------


def column(rows: int = 64, dtype: str = "float32") -> Any:
    return nl.ndarray((rows, 1), dtype)


def test_commands_reset_add_and_leave_alone() -> None:
    def call(dst: Any, a: Any, b: Any) -> list[Any]:
        read = [column() for _ in range(6)]
        nisa.activation(dst, nl.square, a, reduce_op=nl.add, reduce_res=read[0], reduce_cmd=CMD.reset_reduce)
        nisa.activation(dst, nl.copy, b, reduce_op=nl.add, reduce_res=read[1], reduce_cmd=CMD.reduce)
        nisa.activation(dst, nl.copy, b, reduce_res=read[2], reduce_cmd=CMD.idle)
        nisa.activation(dst, nl.copy, b, reduce_op=nl.add, reduce_cmd=CMD.reduce)
        nisa.activation(dst, nl.relu, b, reduce_op=nl.add, reduce_res=read[3])
        nisa.activation(dst, nl.copy, b, reduce_res=read[4], reduce_cmd=CMD.reset)
        nisa.activation(dst, nl.copy, a, scale=2.0, reduce_op=nl.add, reduce_res=read[5], reduce_cmd=CMD.reduce)
        return read

    other = np.flip(WHOLE).copy()
    dst, *read = computed(call, WHOLE, other)
    squares, plain = (WHOLE * WHOLE).sum(1, keepdims=True), other.sum(1, keepdims=True)
    expected = [
        squares,
        squares + plain,
        squares + plain,
        squares + 2 * plain,
        0 * plain,
        2 * WHOLE.sum(1, keepdims=True),
    ]
    for actual, wanted in zip(read, expected, strict=True):
        same(actual, wanted)
    same(dst, 2 * WHOLE)


def test_only_the_lanes_of_an_instruction_change() -> None:
    def call(dst: Any, a: Any) -> list[Any]:
        read = column()
        nisa.activation(dst, nl.copy, a, reduce_op=nl.add, reduce_cmd=CMD.reset_reduce)
        # Lanes are those of the destination, wherever the data comes from.
        nisa.activation(dst[32:64], nl.copy, a[0:32], reduce_op=nl.add, reduce_cmd=CMD.reduce)
        nisa.activation(dst[0:5], nl.copy, a[0:5], reduce_cmd=CMD.reset)
        nisa.activation(dst, nl.copy, a, reduce_res=read)
        return [read]

    sums = WHOLE.sum(1, keepdims=True)
    sums[32:] += sums[:32]
    sums[:5] = 0
    same(computed(call, WHOLE)[1], sums)


def test_accumulators_are_zero_at_the_start_and_belong_to_a_run() -> None:
    def call(dst: Any, a: Any) -> list[Any]:
        nisa.activation(dst, nl.copy, a, reduce_op=nl.add, reduce_res=a[:, 0:1], reduce_cmd=CMD.reduce)
        return [a]

    for _ in range(2):
        same(computed(call, WHOLE)[1][:, :1], WHOLE.sum(1, keepdims=True))


def test_the_sum_sees_float32_and_keeps_its_own_dtype() -> None:
    data = np.full((2, 4), 1 + 2**-10, F32)

    def call(dst: Any, a: Any) -> list[Any]:
        whole, half = column(2), column(2, "bfloat16")
        nisa.activation(dst, nl.copy, a, reduce_op=nl.add, reduce_res=whole, reduce_cmd=CMD.reset_reduce)
        nisa.activation(dst, nl.copy, a, reduce_res=half)
        return [whole, half]

    dst, whole, half = computed(call, data, dtype="bfloat16")
    same(dst, np.ones((2, 4), BF16))
    same(whole, np.full((2, 1), 4 + 2**-8, F32))
    same(half, np.full((2, 1), 4, BF16))


def test_a_result_inside_the_destination_survives() -> None:
    def call(dst: Any, a: Any) -> None:
        nisa.activation(dst, nl.copy, a, reduce_op=nl.add, reduce_res=dst[:, 3:4], reduce_cmd=CMD.reset_reduce)

    expected = WHOLE.copy()
    expected[:, 3] = WHOLE.sum(1)
    same(computed(call, WHOLE), expected)


def test_columns_may_be_read_out_into_psum() -> None:
    def call(dst: Any, a: Any) -> list[Any]:
        result = nl.ndarray((64, 1), nl.float32, buffer=nl.psum)
        nisa.activation(dst, nl.copy, a, reduce_op=nl.add, reduce_res=result, reduce_cmd=CMD.reset_reduce)
        return [result]

    same(computed(call, WHOLE)[1], WHOLE.sum(1, keepdims=True))


@pytest.mark.parametrize("order, expected", [("sequential", 2.0**24), ("pairwise", 2.0**24 + 16)])
def test_order_of_summation(order: str, expected: float) -> None:
    # One after the other, every 1 is lost beside 2^24; eight running sums keep most of them.
    data = np.concatenate([np.full((1, 1), 2.0**24, F32), np.ones((1, 16), F32)], axis=1)
    call = lambda dst, a: nisa.activation_reduce(dst, nl.copy, a, nl.add, dst[:, 0:1])  # noqa: E731
    result = computed(call, data, accumulate=order)[0, 0]
    assert result == expected if order == "sequential" else abs(result - expected) <= 4


def test_one_accumulator_runs_through_several_instructions_in_sequence() -> None:
    def call(dst: Any, a: Any, b: Any) -> list[Any]:
        read = column(1)
        nisa.activation(dst[:, 0:1], nl.copy, a, reduce_op=nl.add, reduce_cmd=CMD.reset_reduce)
        nisa.activation(dst[:, 1:17], nl.copy, b, reduce_op=nl.add, reduce_cmd=CMD.reduce, reduce_res=read)
        return [read]

    arrays = np.full((1, 1), 2.0**24, F32), np.ones((1, 16), F32)
    assert computed(call, *arrays, shape=(1, 17), accumulate="sequential", strict=False)[1] == 2.0**24
    assert computed(call, *arrays, shape=(1, 17), accumulate="pairwise", strict=False)[1] == 2.0**24 + 16


def test_activation_reduce_resets_adds_and_reads_out() -> None:
    def call(dst: Any, a: Any, s: Any, b: Any) -> list[Any]:
        first, second, kept = column(), column(), column()
        nisa.activation_reduce(dst, nl.square, a, nl.add, first)
        nisa.activation_reduce(dst, nl.copy, a, nl.add, second, b, s)
        nisa.activation_reduce(dst, nl.copy, a, nl.add, None)
        nisa.activation(dst, nl.copy, a, reduce_res=kept)
        return [first, second, kept]

    scale, bias = np.full((64, 1), 2, F32), np.full((64, 1), -3, F32)
    result = execute(call, WHOLE, scale, bias)
    _, first, second, kept = result.outputs
    sums = WHOLE.sum(1, keepdims=True)
    for actual, expected in ((first, (WHOLE**2).sum(1, keepdims=True)), (second, 2 * sums - 72), (kept, sums)):
        same(actual, expected)
    record = record_of(result, "activation_reduce")
    assert record.engine == "scalar" and record.attributes["reduce_cmd"] == "reset_reduce"
    assert not record.attributes["read_out"] and len(record.writes) == 1


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "match, keywords",
    [
        ("reduce_op nl.maximum is not accepted; accepted: add", {"reduce_op": nl.maximum, "reduce_cmd": CMD.reduce}),
        ("reduce_op nl.multiply is not accepted", {"reduce_op": nl.multiply}),
        ("reduce_cmd load_reduce is not accepted", {"reduce_op": nl.add, "reduce_cmd": CMD.load_reduce}),
        ("reduce_cmd reduce needs reduce_op=nl.add", {"reduce_cmd": CMD.reduce}),
        ("reduce_cmd reset_reduce needs reduce_op=nl.add", {"reduce_cmd": CMD.reset_reduce}),
    ],
)
def test_activation_refuses_reductions(match: str, keywords: Any) -> None:
    refused(match, activate(nl.copy, **keywords), X)


@pytest.mark.parametrize("name", ["cos", "tan", "add", "maximum", "bypass", "logical_not"])
def test_activation_refuses_other_operators(name: str) -> None:
    refused(f"op nl.{name} is not an activation function", activate(getattr(nl, name)), X)


def test_prelu_has_no_documented_slope() -> None:
    refused("nl.prelu.*slope is undocumented", activate(nl.prelu), X, error=UnsupportedError)


def test_activation_refuses_operands() -> None:
    half = SCALE.astype(BF16)
    refused("scale must be float32, got bfloat16", lambda dst, d, s: nisa.activation(dst, nl.copy, d, scale=s), X, half)
    refused(
        r"bias must have shape \(64, 1\), got \(64, 24\)", lambda dst, d, b: nisa.activation(dst, nl.copy, d, b), X, Y
    )
    refused(
        r"bias must have shape \(64, 1\), got \(32, 1\)",
        lambda dst, d, b: nisa.activation(dst, nl.copy, d, b[0:32]),
        X,
        BIAS,
    )
    refused(r"scale must have shape \(64, 1\)", lambda dst, d, s: nisa.activation(dst, nl.copy, d, scale=s), X, Y)
    refused("bias is tfloat32", lambda dst, d: nisa.activation(dst, nl.copy, d, nl.ndarray((64, 1), nl.tfloat32)), X)
    refused("scale must be a number", lambda dst, d: nisa.activation(dst, nl.copy, d, scale=None), X, error=TypeError)
    refused("op must be an operator", lambda dst, d: nisa.activation(dst, np.exp, d), X, error=TypeError)
    refused(
        "reduce_cmd must be a member", lambda dst, d: nisa.activation(dst, nl.copy, d, reduce_cmd=2), X, error=TypeError
    )
    refused(
        r"reduce_res must have shape \(64, 1\), got \(64, 2\)",
        lambda dst, d: nisa.activation(dst, nl.copy, d, reduce_res=nl.ndarray((64, 2), nl.float32)),
        X,
    )
    refused(
        "reduce_res must be a tensor",
        lambda dst, d: nisa.activation(dst, nl.copy, d, reduce_res=1.0),
        X,
        error=TypeError,
    )
    refused("dst has 12 elements per partition, data has 24", activate(nl.copy), X, shape=(64, 12))
    refused(
        "data is in private_hbm",
        lambda dst, d: nisa.activation(dst, nl.copy, nl.ndarray((64, 24), nl.float32, buffer=nl.private_hbm)),
        X,
    )


def test_activation_reduce_refuses() -> None:
    refused(
        "activation_reduce reduce_op nl.maximum is not accepted",
        lambda dst, d: nisa.activation_reduce(dst, nl.copy, d, nl.maximum, None),
        X,
    )
    refused(
        "missing 1 required positional argument: 'reduce_res'",
        lambda dst, d: nisa.activation_reduce(dst, nl.copy, d, nl.add),
        X,
        error=TypeError,
    )
    refused(
        "unexpected keyword",
        lambda dst, d: nisa.activation_reduce(dst, nl.copy, d, nl.add, None, reduce_cmd=CMD.reduce),
        X,
        error=TypeError,
    )


def test_gen2_takes_no_number_as_bias_and_no_bias_with_reciprocal() -> None:
    refused("bias must be a tile of shape .P, 1. on gen2", activate(nl.copy, bias=0.5), X, target="trn1")
    refused(
        "op nl.reciprocal takes no bias on gen2",
        lambda dst, d, b: nisa.activation(dst, nl.reciprocal, d, b),
        X,
        BIAS,
        target="trn1",
    )
    same(computed(lambda dst, d, b: nisa.activation(dst, nl.copy, d, b), X, BIAS, target="trn1"), X + BIAS)
    same(computed(activate(nl.copy, scale=2.0), X, target="trn1"), 2 * X)
    for target in ("trn2", "trn3"):
        same(computed(activate(nl.copy, bias=0.5), X, target=target), X + F32(0.5))
