# SPDX-License-Identifier: Apache-2.0
"""Batch norm as a map: its VJP is linear, inference is affine, and channels do not meet, in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from property_cases import Batch, Bounds, assert_within, batches, holds_for, normal_batch, rounding

from nki_bn import reference
from nki_bn import synchronised_reference as synchronised
from nki_bn.reference import Array, Float64

FACTORS = st.tuples(st.sampled_from([-3.0, -0.5, 0.0, 1.0, 7.0]), st.sampled_from([-1.0, 0.25, 3.0]))


def vjp(batch: Batch, dy: Array, training: bool = True) -> tuple[Float64, Float64, Float64]:
    statistics = reference.statistics(batch.x)
    got = reference.batch_norm_bwd(dy, batch.x, *statistics, batch.gamma, batch.eps, training=training)
    return got.dx.value, got.dgamma.value, got.dbeta.value


def synchronised_vjp(batch: Batch, dy: Array) -> Float64:
    """dx of all replicas."""
    x, parts = batch.shards(batch.x), batch.shards(dy)
    terms = synchronised.backward_terms(parts, x, synchronised.two_round(x), batch.gamma, batch.eps)
    pairs = zip(parts, x, strict=True)
    return np.concatenate([synchronised.input_gradient(*pair, terms, batch.gamma, batch.eps) for pair in pairs])


@pytest.mark.statement("lin")
@holds_for(st.tuples(batches(), FACTORS))
def test_the_vjp_is_linear_in_its_cotangent(case: tuple[Batch, tuple[float, float]]) -> None:
    batch, (a, b) = case
    one, other = batch.dy, batch.residual
    sizes = abs(a) * np.abs(one) + abs(b) * np.abs(other)
    bounds = Bounds(batch)
    dx, dgamma, dbeta = vjp(batch, a * one + b * other)
    for got, first, second, bound in zip(
        (dx, dgamma, dbeta, synchronised_vjp(batch, a * one + b * other)),
        (*vjp(batch, one), synchronised_vjp(batch, one)),
        (*vjp(batch, other), synchronised_vjp(batch, other)),
        (bounds.dx(sizes), bounds.dgamma(sizes), bounds.dbeta(sizes), bounds.dx(sizes)),
        strict=True,
    ):
        assert_within(got, a * first + b * second, bound)


@pytest.mark.statement("lin")
@holds_for(st.tuples(batches(), st.integers(-20, 20)))
def test_a_power_of_two_passes_through_the_vjp_exactly(case: tuple[Batch, int]) -> None:
    batch, exponent = case
    for training in (True, False):
        for got, want in zip(
            vjp(batch, np.ldexp(batch.dy, exponent), training), vjp(batch, batch.dy, training), strict=True
        ):
            assert np.array_equal(got, np.ldexp(want, exponent))
    assert np.array_equal(
        synchronised_vjp(batch, np.ldexp(batch.dy, exponent)), np.ldexp(synchronised_vjp(batch, batch.dy), exponent)
    )


@pytest.mark.statement("lin")
@holds_for(st.tuples(batches(), FACTORS))
def test_inference_is_affine_in_x(case: tuple[Batch, tuple[float, float]]) -> None:
    """It keeps every combination whose weights add up to 1."""
    batch, (a, _) = case
    b = 1 - a
    mean, var = batch.beta - 1.0, batch.gamma**2 + 0.5

    def inference(x: Array) -> Float64:
        return reference.pre_activation(x, mean, var, batch.gamma, batch.beta, batch.eps).value

    got, want = inference(a * batch.x + b * batch.residual), a * inference(batch.x) + b * inference(batch.residual)
    factor, weights = reference.column(np.abs(batch.gamma) / np.sqrt(var + batch.eps), batch.x), 1 + abs(a) + abs(b)
    moved = abs(a) * np.abs(batch.x) + abs(b) * np.abs(batch.residual)
    terms = factor * (moved + weights * np.abs(reference.column(mean, batch.x)))
    # Twice these terms, and beta, are added up on the two sides, each with at most eight roundings on its way.
    assert_within(got, want, rounding(8) * 2 * (terms + weights * np.abs(reference.column(batch.beta, batch.x))))


def jacobian(batch: Batch, replicas: bool) -> Float64:
    """d y[out] / d x[in] as [out cells, in cells], a row per basis cotangent."""
    rows = []
    for cell in np.eye(batch.x.size):
        cotangent = cell.reshape(batch.x.shape)
        dx = synchronised_vjp(batch, cotangent) if replicas else vjp(batch, cotangent)[0]
        rows.append(dx.ravel())
    return np.stack(rows)


@pytest.mark.statement("block")
@pytest.mark.parametrize("parts", [(4,), (2, 2), (1, 3), (1, 0, 1, 2)], ids=str)
def test_the_jacobian_is_block_diagonal_over_channels(parts: tuple[int, ...]) -> None:
    """Exactly 0 between channels, and nowhere 0 within one: every value depends on every other, on any replica."""
    batch = normal_batch((4, 3, 2), parts, seed=7)
    batch.gamma[:] = [1.5, -0.5, 2.0]
    matrix = jacobian(batch, replicas=len(parts) > 1)
    channel = np.indices(batch.x.shape)[1].ravel()
    same = channel[:, None] == channel[None, :]
    assert np.array_equal(matrix != 0, same)


@pytest.mark.statement("block")
def test_the_jacobian_is_that_of_autograd() -> None:
    batch = normal_batch((3, 2, 2), (3,), seed=8)
    gamma, beta = torch.tensor(batch.gamma), torch.tensor(batch.beta)

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.batch_norm(x, None, None, gamma, beta, training=True, eps=batch.eps)

    want = torch.autograd.functional.jacobian(function, torch.tensor(batch.x)).numpy()  # type: ignore[no-untyped-call]
    cells = batch.x.size
    bounds = [Bounds(batch).dx(cell.reshape(batch.x.shape)).ravel() for cell in np.eye(cells)]
    assert_within(jacobian(batch, replicas=False), want.reshape(cells, cells), np.stack(bounds))


@pytest.mark.statement("block")
@holds_for(st.tuples(batches(), st.sampled_from([np.nan, np.inf, 1e30]), st.booleans()))
def test_other_channels_do_not_see_a_changed_one(case: tuple[Batch, float, bool]) -> None:
    """Whatever one value of the last channel becomes, in x or in dy: every other channel keeps its bits."""
    batch, value, in_x = case
    x, dy = batch.x.copy(), batch.dy.copy()
    (x if in_x else dy).reshape(len(x), batch.channels, -1)[0, -1, 0] = value
    changed = replace(batch, x=x, dy=dy)
    with np.errstate(all="ignore"):
        pairs = [(vjp(changed, dy), vjp(batch, batch.dy)), (both_passes(changed), both_passes(batch))]
    for got, want in pairs:
        for mine, before in zip(got, want, strict=True):
            axis = 0 if mine.ndim == 1 else 1
            others = range(batch.channels - 1)
            assert np.array_equal(mine.take(others, axis), before.take(others, axis))


def both_passes(batch: Batch) -> tuple[Float64, Float64, Float64]:
    """Packed statistics (channels second), y and dx on replicas."""
    packed = synchronised.two_round(batch.shards(batch.x))
    y = synchronised.forward(batch.x, packed, batch.gamma, batch.beta, batch.eps)
    return packed, y, synchronised_vjp(batch, batch.dy)
