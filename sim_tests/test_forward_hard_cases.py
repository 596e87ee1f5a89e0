# SPDX-License-Identifier: Apache-2.0
"""Inputs that broke other batch norms, and the standing hard cases of the numerics contract, for the forward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from agreement import assert_agrees, assert_forward_agrees, forward_of, outputs_of

import nki_bn
from nki_bn.cases import Draw
from nki_bn.pair import backward_case
from nki_bn.problem import DTYPES, RELU_MODES, Array, ForwardCase

F32 = np.float32
MODES = [("trn2", "pairwise"), ("ideal", "sequential")]


def vector(*values: float) -> Array:
    return np.array(values, F32)


def normal(shape: tuple[int, ...], mean: float = 0, std: float = 1, dtype: Any = F32) -> Array:
    drawn: Array = (mean + std * np.random.default_rng(0).standard_normal(shape)).astype(dtype)
    return drawn


@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize(
    ("mean", "std", "within"),
    [
        (1e4, 1, 1e-4),
        (-1e4, 1, 1e-4),
        (1e3, 1, 1e-5),
        (1e3, 0.1, 1e-4),
        (1e3, 1e-2, 1e-3),
        (1e4, 1e-2, 1e-2),
        (1e6, 1, 1e-2),
    ],
)
def test_a_mean_far_above_the_deviation(mean: float, std: float, within: float, modes: tuple[str, str]) -> None:
    """E[x^2] - mean^2 would be off by mean^2*2^-24: all of the variance from mean/std = 4096 on."""
    x = normal((16, 2, 40, 50), mean, std)
    got = assert_forward_agrees(ForwardCase(x, None, None), *modes)
    wide = x.astype(np.float64)
    assert np.abs(got.var / wide.var((0, 2, 3)) - 1).max() < within
    assert np.abs(got.mean - wide.mean((0, 2, 3))).max() <= np.spacing(F32(abs(mean)))


@pytest.mark.parametrize("shape", [(4, 3, 50), (2, 3, 2)])
@pytest.mark.parametrize("ratio", [1e3, 1e6])
@pytest.mark.parametrize("relu", RELU_MODES)
def test_few_values_with_a_mean_far_above_the_deviation(relu: str, ratio: float, shape: tuple[int, ...]) -> None:
    assert_forward_agrees(Draw(shape, mean=ratio).forward(relu, residual=True))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("relu", RELU_MODES)
def test_a_mean_far_above_the_deviation_in_16_bits(relu: str, dtype: str) -> None:
    """x is a handful of neighbouring numbers around the mean."""
    assert_forward_agrees(Draw((4, 3, 50), dtype, mean=1000).forward(relu))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mean", [-4096.0, 4096.0])
def test_folding_the_mean_would_lose_the_small_spread(mean: float, training: bool) -> None:
    assert_forward_agrees(Draw((4, 3, 50), mean=mean, std=0.01).forward("mask", training))


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("value", [3000.1, 5000.7, -3000.1, 1e-3, 12345.678])
def test_a_variance_is_never_negative(value: float, lnc: int) -> None:
    """A one-pass float32 variance of 3000.1 is -1, of 5000.7 it is +4."""
    got = assert_forward_agrees(ForwardCase(np.full((8, 1, 32, 32), value, F32), vector(1), vector(0.5)), lnc=lnc)
    assert 0 <= got.var[0] < 1e-6 and np.abs(got.y - 0.5).max() < 0.1


@pytest.mark.parametrize("numerics", ["trn2", "ideal"])
@pytest.mark.parametrize("shape", [(4, 1, 7, 9), (3, 1, 1025), (2, 1)])
@pytest.mark.parametrize("value", [0.0, 7.3, -0.1, 3000.1, 1e10, -1e10])
def test_constant_channels_are_beta(value: float, shape: tuple[int, ...], numerics: str) -> None:
    """The mean of equal values is that value, so y is beta, even at 1e10 where one rounding of the mean is 1024."""
    gamma, beta = -2.0, 0.3
    case = ForwardCase(np.full(shape, value, F32), vector(gamma), vector(beta))
    got = assert_forward_agrees(case, numerics)
    assert got.mean[0] == F32(value) and got.var[0] == 0
    rounding_of_the_mean = abs(gamma) * np.spacing(F32(abs(value))) / np.sqrt(1e-5)
    assert np.abs(got.y.astype(np.float64) - F32(beta)).max() <= rounding_of_the_mean + 2.0**-17 * beta


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("value", [7.3, 1000.0, 6e4])
def test_constant_channels_in_16_bits(value: float, dtype: Any) -> None:
    x = np.full((4, 2, 7), value, dtype)
    got = assert_forward_agrees(ForwardCase(x, vector(1, 100), vector(0.25, -3)))
    assert np.array_equal(got.mean, x[0, :, 0].astype(F32)) and not got.var.any()
    assert np.array_equal(got.y, np.broadcast_to(vector(0.25, -3)[:, None], x.shape).astype(dtype))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_small_parameters_are_not_cast_to_the_type_of_x(dtype: Any) -> None:
    """var, eps and gamma that float16 cannot hold: 1e6 would be infinite, 1e-8 zero, and y 0 or infinite."""
    x = np.zeros((2, 3), dtype)
    x[:, 0], x[:, 1], x[:, 2] = 1000, 1e-3, 1e-3
    zeros, var = vector(0, 0, 0), vector(1e6, 0, 1e4)
    case = ForwardCase(x, vector(1, 1, 1e5), zeros, zeros, var, eps=1e-8, training=False)
    assert np.allclose(assert_forward_agrees(case).y[0].astype(F32), [1.0, 10.0, 1.0], rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 4, 120, 160), (1, 1, 9001), (3, 2, 77)])
@pytest.mark.parametrize("value", [1.0, 3.0, 0.1])
def test_the_mean_of_ones_is_one(value: float, shape: tuple[int, ...], dtype: str) -> None:
    """A bfloat16 sum would stop at 256 times the value; 9001 columns are tiles and pieces of unequal length."""
    x = np.full(shape, value, DTYPES[dtype])
    got = assert_forward_agrees(ForwardCase(x, None, np.full(shape[1], 0.5, F32)))
    assert np.array_equal(got.mean, x[0].reshape(shape[1], -1)[:, 0].astype(F32)) and not got.var.any()
    # beta comes in through a per-partition operand, which is good to that.
    assert np.abs(got.y.astype(np.float64) - 0.5).max() <= 2.0**-18


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("values", [(1, 3), (-7, 7), (0.25, 0.25)])
def test_two_values_per_channel(values: tuple[float, float], lnc: int) -> None:
    """Legal: the unbiased variance, which is tracked, is twice the biased one."""
    x = vector(*values)[:, None]
    got = assert_forward_agrees(ForwardCase(x, vector(1), vector(0), vector(0), vector(1)), lnc=lnc)
    biased = ((values[0] - values[1]) / 2) ** 2
    assert got.mean[0] == sum(values) / 2 and got.var[0] == biased and got.running_var is not None
    assert got.running_var[0] == pytest.approx(0.9 + 0.1 * 2 * biased, rel=1e-6)


def test_biased_to_normalise_and_unbiased_to_track() -> None:
    x = (np.arange(1, 5) + np.arange(4)[:, None]).astype(F32).reshape(4, 1, 4)
    got = assert_forward_agrees(ForwardCase(x, vector(1), vector(0), vector(0), vector(1)))
    assert got.y[0, 0, 0] == pytest.approx(-1.897363, abs=1e-5) and got.var[0] == pytest.approx(2.5, rel=1e-6)
    assert got.running_mean is not None and got.running_mean[0] == pytest.approx(0.4, rel=1e-6)
    assert got.running_var is not None and got.running_var[0] == pytest.approx(0.9 + 0.1 * 2.5 * 16 / 15, rel=1e-6)


@pytest.mark.parametrize("means", [(3.0, 6.0, 9.0), (-4.0, 0.0, 4.0, 100.0)])
def test_the_plain_average_of_all_batches(means: tuple[float, ...]) -> None:
    """The first batch drops the initial values; k - 1 and k + 1 have the unbiased variance 2."""
    mean, var = vector(50), vector(70)
    for batch, k in enumerate(means):
        x = vector(k - 1, k + 1)[:, None]
        got = nki_bn.batch_norm_fwd(x, None, None, mean, var, None, num_batches_tracked=batch)
        assert got.running_mean is not None and got.running_var is not None
        mean, var = got.running_mean, got.running_var
        assert mean[0] == pytest.approx(np.mean(means[: batch + 1]), rel=1e-6, abs=1e-6)
        assert var[0] == pytest.approx(2, rel=1e-6)


@pytest.mark.parametrize("batch", [769, 1000, 1024])
@pytest.mark.parametrize("channels", [1, 2])
def test_a_long_batch_of_1x1_images(channels: int, batch: int) -> None:
    """(N, C), (N, C, 1) and (N, C, 1, 1) are one problem."""
    x = (np.arange(batch * channels).reshape(batch, channels) % 977 / 100).astype(F32)
    case = ForwardCase(x, np.ones(channels, F32), np.zeros(channels, F32), fuse_relu=True)
    flat = assert_forward_agrees(case)
    for more in ((1,), (1, 1)):
        image = forward_of(replace(case, x=x.reshape(*x.shape, *more)))
        assert np.array_equal(image.y.reshape(x.shape), flat.y)
        assert np.array_equal(image.mean, flat.mean) and np.array_equal(image.var, flat.var)


def spoil(case: ForwardCase, where: str, value: float) -> ForwardCase:
    """``case`` with ``value`` in channel 1 of the named argument."""
    array = getattr(case, where).copy()
    array[(0, 1, 2) if array.ndim == 3 else 1] = value
    return replace(case, **{where: array})


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("where", "training"),
    # In eval a running variance below 0 is refused.
    [(where, training) for where in ("x", "residual", "gamma", "beta", "running_mean") for training in (True, False)]
    + [("running_var", True)],
)
@pytest.mark.parametrize(("channels", "lnc"), [(3, 1), (3, 2), (32, 2), (130, 2)])
def test_what_is_not_finite_stays_in_its_channel(
    channels: int, lnc: int, training: bool, where: str, value: float
) -> None:
    """Every other channel has the very bits of a clean run: lanes of one tile, bands of partitions, both cores."""
    drawn = Draw((4, channels, 5)).forward("mask", training, residual=True)
    # So large that everything passes the ReLU.
    case = replace(drawn, beta=np.full(channels, 9, F32))
    others = [channel for channel in range(channels) if channel != 1]
    spoilt, clean = (forward_of(c, lnc=lnc) for c in (spoil(case, where, value), case))
    for got, want in zip(spoilt, clean, strict=True):
        assert got is not None and want is not None
        axis = 1 if got.ndim > 1 else 0
        assert np.array_equal(got.take(others, axis), want.take(others, axis))
    used = where in ("x", "residual", "gamma", "beta") or not training
    changed = spoilt.y[:, 1] if used else getattr(spoilt, where)[1]
    assert not np.array_equal(changed, clean.y[:, 1] if used else getattr(clean, where)[1])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_running_variance_that_is_not_finite_in_eval(value: float) -> None:
    """NaN makes NaN of its channel, infinity leaves beta."""
    case = Draw((4, 3, 5)).forward(training=False)
    spoilt, clean = assert_forward_agrees(spoil(case, "running_var", value)), forward_of(case)
    assert case.beta is not None and np.array_equal(spoilt.y[:, [0, 2]], clean.y[:, [0, 2]])
    expected = np.nan if np.isnan(value) else case.beta[1]
    assert np.allclose(spoilt.y[:, 1], expected, rtol=2.0**-17, equal_nan=True)


@pytest.mark.parametrize("relu", RELU_MODES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_through_a_fused_relu(value: float, dtype: str, relu: str) -> None:
    """NaN stays NaN, as with torch.relu: a maximum with 0 would hide it. Infinity makes NaN of its channel's mean."""
    x = normal((2, 3, 4), dtype=DTYPES[dtype])
    x[0, 1, 2] = value
    how = {"fuse_relu": relu != "none", "save_relu_mask": relu == "mask"}
    got = assert_forward_agrees(ForwardCase(x, np.ones(3, F32), np.zeros(3, F32), **how))
    wide = got.y.astype(F32)
    assert np.isnan(wide[:, 1]).all() and np.isfinite(wide[:, [0, 2]]).all()
    if got.relu_mask is not None:
        assert not got.relu_mask[:, 1].any() and got.relu_mask[:, [0, 2]].any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_element_that_is_not_finite_in_eval(value: float) -> None:
    """With frozen statistics the damage is one element: NaN stays, +inf passes the ReLU, -inf is stopped."""
    case = Draw((2, 3, 4)).forward("mask", training=False)
    got = assert_forward_agrees(replace(spoil(case, "x", value), gamma=vector(1, 1, 1)))
    assert got.relu_mask is not None
    expected = {"nan": np.nan, "inf": np.inf, "-inf": 0}[str(value)]
    assert np.array_equal(got.y[0, 1, 2], expected, equal_nan=True) and got.relu_mask[0, 1, 2] == (value == np.inf)
    assert np.isfinite(np.delete(got.y.ravel(), 6)).all()


def test_float16_at_its_largest_numbers_does_not_overflow() -> None:
    """Sums of float16 values near 6e4 are far beyond 65504; mean, variance and y are not affected."""
    for relu in RELU_MODES:
        case = Draw((4, 3, 25), "float16", mean=6e4, std=1000).forward(relu)
        got = assert_forward_agrees(case)
        assert np.isfinite(got.y).all() and (got.mean > 5.9e4).all() and np.isfinite(got.var).all()
    constant = assert_forward_agrees(ForwardCase(np.full((4, 1, 300), 6e4, np.float16), None, None))
    assert constant.mean[0] == 6e4 and constant.var[0] == 0


def test_float16_outputs_that_overflow_are_infinite() -> None:
    case = replace(Draw((4, 2, 25), "float16").forward(), gamma=vector(1e5, 1))
    got = assert_forward_agrees(case)
    assert np.isinf(got.y[:, 0]).any() and np.isfinite(got.y[:, 1]).all() and np.isfinite(got.var).all()


@pytest.mark.parametrize("eps", [1e-5, 1e-12])
def test_a_tiny_variance(eps: float) -> None:
    assert_forward_agrees(replace(Draw((4, 3, 25), std=1e-6).forward("mask"), eps=eps))


def test_no_variance_and_no_eps_in_eval_spoils_only_that_channel() -> None:
    case = replace(Draw((4, 3, 25)).forward(training=False), running_var=vector(1, 0, 2), eps=0.0)
    clean = forward_of(replace(case, running_var=vector(1, 1, 2)))
    got = forward_of(case)
    assert not np.isfinite(got.y[:, 1]).any() and np.array_equal(got.y[:, [0, 2]], clean.y[:, [0, 2]])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("relu", RELU_MODES)
def test_gamma_zero_and_negative(relu: str, training: bool) -> None:
    """gamma = 0 leaves beta, or the residual and beta, whatever x is."""
    case = replace(Draw((4, 4, 9)).forward(relu, training), gamma=vector(0, -2, -0.5, 0), beta=vector(0, 0.3, -0.3, 1))
    got = assert_forward_agrees(case)
    assert not got.y[:, 0].any() and (got.y[:, 3] == 1).all() and got.y[:, 1].std() > 0.5


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("training", [True, False])
def test_the_mask_is_not_needed_without_a_residual(dtype: Any, training: bool) -> None:
    """The saved mask and a recomputed one give the same gradients, bit for bit."""
    parameters, running = (vector(1, -2, 0.5), vector(0.1, 0, -0.2)), (vector(0, 0.1, 0), vector(1, 2, 0.5))
    x = normal((4, 3, 6, 6), dtype=dtype)
    case = ForwardCase(x, *parameters, *running, fuse_relu=True, training=training)
    made = forward_of(case)
    given = backward_case(case, np.ones_like(x), made.mean, made.var, made.relu_mask)
    for a, b in zip(outputs_of(given), outputs_of(replace(given, relu_mask=None)), strict=True):
        assert np.array_equal(a, b)


def test_with_a_residual_the_mask_or_the_residual_is_needed() -> None:
    """Recomputed from x alone the mask would be another one; the backward cannot know, unless the residual is asked."""
    case = Draw((4, 3, 9)).forward("mask", residual=True)
    made = forward_of(case)
    given = backward_case(case, Draw((4, 3, 9)).gradient(), made.mean, made.var, made.relu_mask)
    by_mask = assert_agrees(given, residual_grad=True)
    by_residual = outputs_of(replace(given, relu_mask=None), residual_grad=True)
    for a, b in zip(by_mask, by_residual, strict=True):
        assert np.array_equal(a, b)
    neither = replace(given, relu_mask=None, residual=None)
    assert not np.array_equal(outputs_of(neither)[2], by_mask[2])
    with pytest.raises(ValueError, match="residual and relu_mask are None"):
        outputs_of(neither, residual_grad=True)


def test_the_mask_follows_the_value_before_it_is_rounded() -> None:
    """1e-9 is 0 in float16, but it was above 0: the gradient passes."""
    x = np.array([[1, -1], [2, -2]], np.float16)
    case = ForwardCase(x, vector(1e-9, 1e-9), vector(0, 0), vector(0, 0), vector(1, 1), training=False, fuse_relu=True)
    got = assert_forward_agrees(case)
    assert not got.y.any() and got.relu_mask is not None and got.relu_mask.tolist() == [[1, 0], [1, 0]]


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("channels", [129, 300, 512])
def test_every_channel_tile_keeps_its_own_statistics(channels: int, lnc: int) -> None:
    """Two to four partition tiles, each channel with its own mean, scale, shift and residual."""
    number = np.arange(channels, dtype=F32)
    x = normal((2, channels, 16), 0, 0.1) + number[:, None]
    residual = np.broadcast_to(number[:, None], x.shape).copy()
    case = ForwardCase(x, 1 + number, -number, -number, 1 + number, residual=residual)
    got = assert_forward_agrees(case, lnc=lnc)
    assert np.abs(got.mean - number).max() < 0.2 and np.allclose(got.var, x.var((0, 2)), rtol=3e-3)
    assert np.abs(got.y.mean((0, 2))).max() < 1e-3 * channels


@pytest.mark.parametrize("shape", [(3, 4, 7), (5, 4), (1, 4, 9), (3, 130, 5)])
def test_two_exchanges_between_cores(shape: tuple[int, ...]) -> None:
    """A layer on the output of another, with odd counts so that the halves of two cores differ.

    The second sees mean 0 and variance v/(v + eps), so it gives y1 to within eps.
    """
    x = normal(shape, 1, 2)
    first = assert_forward_agrees(ForwardCase(x, None, None), lnc=2)
    second = assert_forward_agrees(ForwardCase(first.y, None, None), lnc=2)
    shape_of_columns = (1, -1, *[1] * (x.ndim - 2))
    v = first.var.astype(np.float64).reshape(shape_of_columns)
    assert np.allclose(second.y, first.y * np.sqrt((v + 1e-5) / (v + 1e-5 * (v + 1e-5))), atol=1e-4)
    assert np.abs(second.mean).max() < 1e-5
    one_core = forward_of(ForwardCase(forward_of(ForwardCase(x, None, None), lnc=1).y, None, None), lnc=1)
    assert np.abs(second.y - one_core.y).max() <= 2.0**-17 * np.abs(one_core.y).max()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_channels_last_memory_is_as_contiguous(dtype: Any) -> None:
    x = normal((4, 8, 8, 3), dtype=dtype).transpose(0, 3, 1, 2)
    permuted = normal((4, 5, 2, 3, 7), dtype=dtype).transpose(0, 4, 1, 2, 3)
    for values in (x, permuted):
        assert not values.flags.c_contiguous
        strided = assert_forward_agrees(ForwardCase(values, None, None))
        plain = forward_of(ForwardCase(np.ascontiguousarray(values), None, None))
        assert np.array_equal(strided.y, plain.y) and np.array_equal(strided.var, plain.var)


@pytest.mark.nightly
@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("mean", [0.0, 1e3])
@pytest.mark.parametrize("shape", [(10, 1, 1_000_000), (100_000, 1, 10, 10)])
def test_ten_million_values_per_channel(shape: tuple[int, ...], mean: float, modes: tuple[str, str]) -> None:
    assert_forward_agrees(Draw(shape, mean=mean).forward("mask"), *modes)
