# SPDX-License-Identifier: Apache-2.0
"""Inputs that broke other batch norms, and the standing hard cases of the numerics contract, for the backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from agreement import assert_agrees, outputs_of

import nki_bn
from nki_bn.cases import Draw
from nki_bn.problem import DTYPES, RELU_MODES, Array, BackwardCase

F32 = np.float32


def vector(*values: float) -> Array:
    return np.array(values, F32)


def few_bits(shape: tuple[int, ...], dtype: Any = F32) -> Array:
    """A gradient without zeros that bfloat16 holds exactly, so that staging does not round it."""
    rng = np.random.default_rng(0)
    gradient: Array = (rng.integers(1, 21, shape) * rng.choice([-1, 1], shape) / 8).astype(dtype)
    return gradient


@pytest.mark.parametrize("numerics", ["trn2", "ideal"])
@pytest.mark.parametrize("ratio", [1e3, 1e6])
@pytest.mark.parametrize("relu", RELU_MODES)
def test_a_mean_far_above_the_deviation(relu: str, ratio: float, numerics: str) -> None:
    assert_agrees(Draw((4, 3, 50), mean=ratio).case(relu), numerics)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("relu", RELU_MODES)
def test_a_mean_far_above_the_deviation_in_16_bits(relu: str, dtype: str) -> None:
    """x is a handful of neighbouring numbers around the mean."""
    assert_agrees(Draw((4, 3, 50), dtype, mean=1000).case(relu))


@pytest.mark.parametrize("mean", [-4096.0, 4096.0])
def test_folding_the_mean_would_lose_the_small_spread(mean: float) -> None:
    assert_agrees(Draw((4, 3, 50), mean=mean, std=0.01).case("recompute"))


@pytest.mark.parametrize("value", [0.0, 7.3, -3000.1, 5000.7, 1e10])
def test_constant_channels(value: float) -> None:
    """inv = 1/sqrt(eps) = 316.2, so dx = 316.2*gamma*(dy - mean(dy)): large but finite.

    At 1e10 the part of the mean that is not subtracted is 1e5, and dx holds only where the sums are exact.
    """
    x = np.full((4, 1, 7, 9), value, F32)
    dy = few_bits(x.shape) if value > 1e6 else np.random.default_rng(0).standard_normal(x.shape).astype(F32)
    case = BackwardCase(dy, x, x[0, :, 0, 0], vector(0), vector(1), vector(0.25))
    dx, dgamma, dbeta = assert_agrees(case)
    assert np.abs(dx - 316.2278 * (case.dy - case.dy.mean())).max() < 0.05
    assert abs(dgamma[0]) < 1e-3 and dbeta[0] == pytest.approx(case.dy.sum(), abs=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 5), (1, 3, 1), (1, 130, 1, 1)])
def test_one_value_per_channel(shape: tuple[int, ...], dtype: str) -> None:
    """The value is its own mean: dx is 0 and dgamma too."""
    dy = few_bits(shape, DTYPES[dtype])
    dx, dgamma, dbeta = assert_agrees(replace(Draw(shape, dtype).case(), dy=dy, gamma=np.ones(shape[1], F32)))
    assert np.abs(np.float64(dx)).max() < 1e-2 and not dgamma.any() and dbeta.all()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("relu", RELU_MODES)
def test_gamma_zero_and_negative(relu: str, training: bool) -> None:
    gamma, beta = vector(0, -2, -0.5, 0), vector(0, 0.3, -0.3, 1)
    drawn = Draw((4, 4, 9)).case(relu, training)
    case = replace(drawn, gamma=gamma, beta=beta)
    if relu == "mask":
        z = gamma[:, None] * (case.x - case.mean[:, None]) / np.sqrt(case.var[:, None] + F32(1e-5)) + beta[:, None]
        case = replace(case, relu_mask=(z > 0).astype(np.uint8))
    dx, dgamma, _ = assert_agrees(case)
    assert not dx[:, 0].any() and not dx[:, 3].any() and dx[:, 1].any()
    assert (dgamma[0] != 0) == (relu == "none")


@pytest.mark.parametrize("eps", [1e-5, 1e-12])
def test_a_tiny_variance(eps: float) -> None:
    assert_agrees(replace(Draw((4, 3, 25), std=1e-6).case(), eps=eps))


def test_no_variance_and_no_eps_in_eval_spoils_only_that_channel() -> None:
    drawn = Draw((4, 3, 25)).case(training=False)
    case = replace(drawn, var=vector(1, 0, 2), eps=0.0)
    dx, _, dbeta = outputs_of(case)
    assert np.isfinite(dx[:, [0, 2]]).all() and np.isfinite(dbeta).all()
    clean = outputs_of(replace(case, var=vector(1, 1, 2)))
    assert np.array_equal(dx[:, [0, 2]], clean[0][:, [0, 2]])


@pytest.mark.parametrize("relu", RELU_MODES)
def test_float16_near_its_largest_number(relu: str) -> None:
    case = Draw((4, 3, 25), "float16", mean=6e4, std=1000).case(relu)
    assert np.abs(np.float64(case.x)).max() > 6.2e4
    assert_agrees(case)


def test_float16_gradients_that_overflow_are_infinite() -> None:
    """A large gamma over a small deviation: dx is beyond 65504, the sums are not."""
    case = Draw((4, 2, 25), "float16", std=1e-3).case()
    dx, dgamma, dbeta = assert_agrees(replace(case, gamma=vector(200, 1)))
    assert np.isinf(dx[:, 0]).any() and np.isfinite(dx[:, 1]).all()
    assert np.isfinite(dgamma).all() and np.isfinite(dbeta).all()


def spoil(case: BackwardCase, where: str, value: float) -> BackwardCase:
    """``case`` with ``value`` in channel 1 of the named argument."""
    array = getattr(case, where).copy()
    array[(0, 1, 2) if array.ndim == 3 else 1] = value
    return replace(case, **{where: array})


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["x", "dy", "mean", "var", "gamma"])
@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("channels", [3, 64])
def test_what_is_not_finite_stays_in_its_channel(channels: int, lnc: int, where: str, value: float) -> None:
    """Channels that share tiles, bands and cores with a spoilt one come out bit for bit as if it were clean."""
    case = Draw((4, channels, 5)).case("mask")
    if where == "dy":
        case = replace(case, relu_mask=np.ones_like(case.x, np.uint8))
    if where == "var" and value < 0:
        value = np.nan
    others = [channel for channel in range(channels) if channel != 1]
    spoilt, clean = (outputs_of(c, lnc=lnc) for c in (spoil(case, where, value), case))
    for got, want in zip(spoilt, clean, strict=True):
        axis = 1 if got.ndim > 1 else 0
        assert np.array_equal(got.take(others, axis), want.take(others, axis))
    if not (where == "var" and np.isinf(value)):
        assert not np.isfinite(spoilt[0][:, 1]).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_nan_in_x_reaches_all_of_its_channel(value: float) -> None:
    case = spoil(Draw((4, 3, 5)).case(), "x", value)
    dx, dgamma, dbeta = assert_agrees(case)
    assert not np.isfinite(dx[:, 1]).any() and not np.isfinite(dgamma[1]) and np.isfinite(dbeta).all()


@pytest.mark.parametrize("relu", ["none", "mask"])
def test_a_nan_beta_is_not_read_unless_a_mask_is_recomputed(relu: str) -> None:
    case = Draw((4, 3, 5)).case(relu)
    for got, want in zip(outputs_of(replace(case, beta=vector(*[np.nan] * 3))), outputs_of(case), strict=True):
        assert np.array_equal(got, want)


def test_what_a_mask_hides_is_not_read() -> None:
    """As torch: a gradient that a ReLU stops counts as 0 whatever it is."""
    case = Draw((4, 3, 5)).case("mask")
    assert case.relu_mask is not None
    hidden = replace(case, dy=np.where(case.relu_mask == 0, F32(np.nan), case.dy))
    for got, want in zip(outputs_of(hidden), outputs_of(case), strict=True):
        assert np.array_equal(got, want)


def test_dgamma_that_should_be_zero() -> None:
    """dy = 1: the sum of all normalised values; only rounding is left, and it is small beside n."""
    x = (10 * np.random.default_rng(0).random((8, 3, 56, 56))).astype(F32)
    axes = (0, 2, 3)
    count = x.size // 3
    wide = x.astype(np.float64)
    mean, var = wide.mean(axes).astype(F32), wide.var(axes).astype(F32)
    case = BackwardCase(np.ones_like(x), x, mean, var, np.ones(3, F32), np.zeros(3, F32))
    dx, dgamma, dbeta = assert_agrees(case)
    assert np.abs(dgamma).max() < count * 1e-6 and np.array_equal(dbeta, vector(*[count] * 3))
    assert np.abs(dx).max() < 1e-4
    drawn = np.random.default_rng(1).standard_normal(x.shape).astype(F32)
    got = outputs_of(replace(case, dy=drawn))[1]
    x_hat = (wide - mean[:, None, None]) / np.sqrt(var + 1e-5)[:, None, None]
    want = (drawn * x_hat).sum(axes)
    assert np.abs(got - want).max() < 1e-4 * np.abs(drawn * x_hat).sum(axes).max()


@pytest.mark.parametrize("batch", [1000, 1024])
@pytest.mark.parametrize("channels", [1, 2])
def test_a_long_batch_of_1x1_images(channels: int, batch: int) -> None:
    """(N, C), (N, C, 1) and (N, C, 1, 1) are one problem; dy depends on its index, so a row read twice would show."""
    x = np.random.default_rng(0).standard_normal((batch, channels)).astype(F32)
    dy = (np.arange(x.size).reshape(x.shape) / 1000).astype(F32)
    case = BackwardCase(dy, x, x.mean(0), x.var(0), np.ones(channels, F32), np.zeros(channels, F32))
    flat = assert_agrees(case)
    assert np.allclose(flat[1], (dy * (x - case.mean) / np.sqrt(case.var + 1e-5)).sum(0), rtol=1e-3, atol=1e-2)
    for more in ((1,), (1, 1)):
        image = outputs_of(replace(case, dy=dy.reshape(*dy.shape, *more), x=x.reshape(*x.shape, *more)))
        assert np.array_equal(image[0].reshape(x.shape), flat[0])
        assert np.array_equal(image[1], flat[1]) and np.array_equal(image[2], flat[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("training", [True, False])
def test_the_mask_is_not_needed_without_a_residual(dtype: str, training: bool) -> None:
    """A stored mask and a recomputed one give the same bits, as no value is at the kink."""
    drawn = Draw((4, 3, 6, 6), dtype).case("mask", training)
    stored = replace(drawn, gamma=vector(1, -2, 0.5), beta=vector(0.1, 0, -0.2), dy=np.ones_like(drawn.x))
    normalised = (np.float64(stored.x) - stored.mean[:, None, None]) / np.sqrt(stored.var[:, None, None] + 1e-5)
    z = np.asarray(stored.gamma)[:, None, None] * normalised + np.asarray(stored.beta)[:, None, None]
    assert np.abs(z).min() > 1e-4
    stored = replace(stored, relu_mask=(z > 0).astype(np.uint8))
    for a, b in zip(outputs_of(stored), outputs_of(replace(stored, relu_mask=None)), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("lnc", [1, 2])
def test_every_channel_tile_keeps_its_own_statistics(lnc: int) -> None:
    """300 channels, three partition tiles, each channel with its own mean, scale and gradient."""
    rng = np.random.default_rng(0)
    number = np.arange(300, dtype=F32)
    x = (rng.standard_normal((2, 300, 16)) * 0.1 + number[:, None]).astype(F32)
    dy = np.broadcast_to(1 + number[:, None], x.shape).astype(F32)
    wide = x.astype(np.float64)
    statistics = (wide.mean((0, 2)).astype(F32), wide.var((0, 2)).astype(F32))
    _, dgamma, dbeta = assert_agrees(BackwardCase(dy, x, *statistics, 1 + number, number), lnc=lnc)
    assert np.array_equal(dbeta, 32 * (1 + number)) and np.abs(dgamma).max() < 1e-2 * 300


def test_small_parameters_are_not_cast_to_the_type_of_x() -> None:
    """var and eps that float16 cannot hold: 1e6 would be infinite and 1e-8 zero."""
    x = np.zeros((2, 2), np.float16)
    x[:, 0], x[:, 1] = 1000, 1e-3
    case = BackwardCase(
        np.ones_like(x), x, vector(0, 0), vector(1e6, 0), vector(1, 1e-3), vector(0, 0), eps=1e-8, training=False
    )
    dx, dgamma, _ = assert_agrees(case)
    assert np.allclose(dx[0].astype(F32), [1e-3, 10.0], rtol=1e-3) and np.allclose(dgamma, [2.0, 20.0], rtol=2e-3)


def test_two_layers_in_a_row() -> None:
    """The gradient of one backward is the input of the next, with odd counts so that the halves of two cores differ."""
    case = Draw((3, 4, 7), mean=1).case()
    first = assert_agrees(case)[0]
    second = assert_agrees(replace(case, dy=first))[0]
    one_core = outputs_of(replace(case, dy=outputs_of(case, lnc=1)[0]), lnc=1)[0]
    assert np.abs(second - one_core).max() <= 2.0**-8 * np.abs(one_core).max()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_channels_last_memory_is_as_contiguous(dtype: Any) -> None:
    """For dy = 1, dgamma and dx are 0 to rounding."""
    x = np.random.default_rng(0).standard_normal((4, 8, 8, 3)).astype(dtype).transpose(0, 3, 1, 2)
    wide = x.astype(np.float64)
    mean, var = wide.mean((0, 2, 3)).astype(F32), wide.var((0, 2, 3)).astype(F32)
    parameters = (mean, var, np.ones(3, F32), np.zeros(3, F32))
    strided = nki_bn.batch_norm_bwd(np.ones_like(x), x, *parameters)
    plain = nki_bn.batch_norm_bwd(np.ones(x.shape, dtype), np.ascontiguousarray(x), *parameters)
    for a, b in zip(strided, plain, strict=True):
        assert a is not None and b is not None and np.array_equal(a, b)
    assert strided[1] is not None and np.abs(strided[1]).max() < 1e-3
    assert strided[0] is not None and np.abs(np.float64(strided[0])).max() < 1e-4
