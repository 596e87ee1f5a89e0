# SPDX-License-Identifier: Apache-2.0
"""The float64 reference against torch's float64 autograd, which shares no algebra with it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nki_bn import reference
from nki_bn.problem import Array

SHAPES = [(7, 3), (4, 3, 5), (3, 2, 4, 5), (2, 3, 2, 3, 4)]
EPS = 1e-3


def _draw(shape: tuple[int, ...]) -> dict[str, Array]:
    rng = np.random.default_rng(len(shape))
    channels = shape[1]
    return {
        "x": 2 + 3 * rng.standard_normal(shape),
        "dy": rng.standard_normal(shape),
        "gamma": rng.standard_normal(channels),
        "beta": rng.standard_normal(channels),
        "mean": rng.standard_normal(channels),
        "var": rng.random(channels) + 0.1,
        "residual": rng.standard_normal(shape),
    }


def _torch_gradients(data: dict[str, Array], relu: bool, training: bool) -> tuple[Array, list[Array]]:
    leaves = [torch.from_numpy(data[name]).requires_grad_() for name in ("x", "gamma", "beta")]
    x, gamma, beta = leaves
    mean, var = (torch.from_numpy(data[name]).clone() for name in ("mean", "var"))
    y = torch.nn.functional.batch_norm(x, mean, var, gamma, beta, training=training, eps=EPS)
    y = torch.relu(y) if relu else y
    gradients = torch.autograd.grad(y, leaves, torch.from_numpy(data["dy"]))
    return y.detach().numpy(), [gradient.numpy() for gradient in gradients]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_agree_with_autograd(shape: tuple[int, ...], relu: bool, training: bool) -> None:
    data = _draw(shape)
    mean, var = reference.statistics(data["x"]) if training else (data["mean"], data["var"])
    z = reference.pre_activation(data["x"], mean, var, data["gamma"], data["beta"], EPS).value
    got = reference.batch_norm_bwd(
        data["dy"], data["x"], mean, var, data["gamma"], EPS, z > 0 if relu else None, training
    )
    _, want = _torch_gradients(data, relu, training)
    for name, expected in zip(("dx", "dgamma", "dbeta"), want, strict=True):
        np.testing.assert_allclose(getattr(got, name).value, expected, rtol=1e-10, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_agrees_with_torch(shape: tuple[int, ...], relu: bool) -> None:
    data = _draw(shape)
    got = reference.batch_norm_fwd(data["x"], data["gamma"], data["beta"], EPS, relu)
    want, _ = _torch_gradients(data, relu, training=True)
    np.testing.assert_allclose(got.y, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_with_a_residual_agrees_with_torch(shape: tuple[int, ...], relu: bool, given: bool) -> None:
    data = {name: torch.from_numpy(values) for name, values in _draw(shape).items()}
    y = (
        torch.nn.functional.batch_norm(
            data["x"],
            data["mean"].clone(),
            data["var"].clone(),
            data["gamma"],
            data["beta"],
            training=not given,
            eps=EPS,
        )
        + data["residual"]
    )
    arrays = _draw(shape)
    statistics = (arrays["mean"], arrays["var"]) if given else None
    got = reference.batch_norm_fwd(
        arrays["x"], arrays["gamma"], arrays["beta"], EPS, relu, arrays["residual"], statistics
    )
    np.testing.assert_allclose(got.y, (torch.relu(y) if relu else y).numpy(), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(got.z.value, y.numpy(), rtol=1e-10, atol=1e-12)
    assert (got.z.scale >= np.maximum(np.abs(got.z.value), np.abs(arrays["residual"]))).all()


@pytest.mark.parametrize("momentum", [0.1, 0.0, 1.0, -2.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_running_statistics_agree_with_torch(shape: tuple[int, ...], momentum: float) -> None:
    data = _draw(shape)
    mean, var = (torch.from_numpy(data[name]).clone() for name in ("mean", "var"))
    torch.nn.functional.batch_norm(torch.from_numpy(data["x"]), mean, var, training=True, momentum=momentum)
    count = data["x"].size // shape[1]
    batch_mean, batch_var = reference.statistics(data["x"])
    got = reference.running(data["mean"], batch_mean, momentum)
    np.testing.assert_allclose(got.value, mean.numpy(), rtol=1e-12)
    got = reference.running(data["var"], batch_var * count / (count - 1), momentum)
    np.testing.assert_allclose(got.value, var.numpy(), rtol=1e-12)
    assert (got.scale >= np.abs(got.value)).all()


def test_spread_is_the_range_of_each_channel() -> None:
    x = np.array([[1.0, 5.0], [-2.0, np.nan], [3.0, 5.0]])
    assert np.array_equal(reference.spread(x), [5.0, np.nan], equal_nan=True)


@pytest.mark.parametrize("shape", SHAPES)
def test_affine_off_is_gamma_one_and_beta_zero(shape: tuple[int, ...]) -> None:
    data = _draw(shape)
    one, zero = np.ones(shape[1]), np.zeros(shape[1])
    plain = reference.batch_norm_bwd(data["dy"], data["x"], data["mean"], data["var"], None)
    affine = reference.batch_norm_bwd(data["dy"], data["x"], data["mean"], data["var"], one)
    assert np.array_equal(plain.dx.value, affine.dx.value)
    assert np.array_equal(
        reference.batch_norm_fwd(data["x"], None, None).y, reference.batch_norm_fwd(data["x"], one, zero).y
    )


@pytest.mark.parametrize("training", [True, False])
def test_scales_bound_the_results_and_survive_cancellation(training: bool) -> None:
    """With dy = 1 the training gradients cancel; what was added up to get them does not."""
    x = _draw((4, 3, 5))["x"]
    mean, var = reference.statistics(x)
    got = reference.batch_norm_bwd(np.ones_like(x), x, mean, var, None, EPS, training=training)
    for result in (got.dx, got.dgamma, got.dbeta):
        assert (result.scale >= np.abs(result.value)).all()
    assert np.abs(got.dgamma.value).max() < 1e-12 < 1 < got.dgamma.scale.min()
    assert got.dbeta.scale == pytest.approx(20)
    assert (np.abs(got.dx.value).max() < 1e-12 < got.dx.scale.min()) == training


def test_a_nan_stays_in_its_channel() -> None:
    data = _draw((4, 3, 5))
    data["x"][0, 1, 0] = np.nan
    got = reference.batch_norm_bwd(data["dy"], data["x"], data["mean"], data["var"], None)
    assert np.isnan(got.dx.value[:, 1]).all() and np.isfinite(got.dx.value[:, [0, 2]]).all()
    assert np.isnan(reference.batch_norm_fwd(data["x"], None, None, fuse_relu=True).y[:, 1]).all()


def test_the_gradient_of_a_residual_is_that_of_the_sum() -> None:
    """Behind a ReLU, that is what passes it; a NaN that is stopped is 0."""
    data = _draw((4, 3, 5))
    mask = data["residual"] > 0
    dy = np.where(mask, data["dy"], np.nan)
    got = reference.batch_norm_bwd(dy, data["x"], data["mean"], data["var"], None, relu_mask=mask)
    assert np.array_equal(got.dresidual.value, np.where(mask, data["dy"], 0))
    plain = reference.batch_norm_bwd(data["dy"], data["x"], data["mean"], data["var"], None)
    assert np.array_equal(plain.dresidual.value, data["dy"])


def test_an_empty_batch_has_zero_statistics_and_zero_sums() -> None:
    empty = np.zeros((0, 3, 5))
    assert not np.any(reference.statistics(empty)) and not reference.spread(empty).any()
    got = reference.batch_norm_bwd(empty, empty, np.zeros(3), np.ones(3), None)
    assert got.dx.value.shape == empty.shape
    assert np.array_equal(got.dgamma.value, np.zeros(3)) and np.array_equal(got.dbeta.value, np.zeros(3))
