# SPDX-License-Identifier: Apache-2.0
"""Layouts are permutations of cells, and batch norm is the same in each of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import strategies as st
from property_cases import Batch, Bounds, assert_within, batches, equal_parts, holds_for, rounding, shard

from nki_bn import reference
from nki_bn import synchronised_reference as synchronised
from nki_bn.reference import Array, Float64

SMALL = st.integers(1, 4)
IMAGES = st.tuples(SMALL, SMALL, SMALL, SMALL)


def rows_of(images: Array) -> Array:
    """[C, N*S] from [N, C, ...]."""
    rows: Array = np.moveaxis(images, 1, 0).reshape(images.shape[1], -1)
    return rows


def images_of(rows: Array, shape: tuple[int, ...]) -> Array:
    """[N, C, ...] of this shape from [C, N*S]: the inverse of ``rows_of``."""
    return np.moveaxis(rows.reshape(shape[1], shape[0], *shape[2:]), 0, 1)


def labels(shape: tuple[int, ...]) -> Array:
    """Every cell with its own number, in row-major order."""
    return np.arange(math.prod(shape)).reshape(shape)


@pytest.mark.statement("layout")
@holds_for(IMAGES)
def test_rows_and_images_are_permutations_of_each_other(shape: tuple[int, int, int, int]) -> None:
    """Cell (n, c, h, w) is column (n*H + h)*W + w of row c."""
    cells = labels(shape)
    rows = rows_of(cells)
    assert np.array_equal(np.sort(rows, axis=None), cells.ravel())
    assert np.array_equal(images_of(rows, shape), cells)
    n, c, h, w = np.unravel_index(rows, shape)
    _, _, height, width = shape
    assert np.array_equal((n * height + h) * width + w, np.broadcast_to(np.arange(rows.shape[1]), rows.shape))
    assert np.array_equal(c, np.broadcast_to(np.arange(shape[1])[:, None], rows.shape))


@pytest.mark.statement("layout")
@holds_for(IMAGES)
def test_the_vjp_of_a_permutation_is_the_inverse_scatter(shape: tuple[int, int, int, int]) -> None:
    """The cotangent of a row's cell goes to the cell it came from; inner products agree, exactly in integers."""
    cotangent = labels((shape[1], math.prod(shape) // shape[1])) + 1
    scattered = np.zeros(math.prod(shape), int)
    np.add.at(scattered, rows_of(labels(shape)).ravel(), cotangent.ravel())
    assert np.array_equal(scattered.reshape(shape), images_of(cotangent, shape))
    x = labels(shape) ** 2
    assert (rows_of(x) * cotangent).sum() == (x * images_of(cotangent, shape)).sum()


@pytest.mark.statement("layout")
@holds_for(st.tuples(SMALL, SMALL, SMALL))
def test_a_channel_may_be_read_as_a_plane_or_as_lines(shape: tuple[int, int, int]) -> None:
    """(c, (h, w)) <-> ((c, h), w): both number the cells alike, so that the map is a relabelling without a move."""
    channels, height, width = shape
    c, h, w = np.indices(shape)
    assert np.array_equal(c * (height * width) + (h * width + w), (c * height + h) * width + w)
    planes, lines = labels((channels, height * width)), labels((channels * height, width))
    assert np.array_equal(planes.reshape(channels * height, width), lines)
    assert np.array_equal(planes[c, h * width + w], lines[c * height + h, w])


@pytest.mark.statement("layout")
@holds_for(st.tuples(equal_parts(), IMAGES))
def test_example_n_of_shard_r_is_example_r_n(case: tuple[tuple[int, ...], tuple[int, int, int, int]]) -> None:
    parts, (_, *rest) = case
    cells = labels((sum(parts), *rest))
    for r, part in enumerate(shard(cells, parts)):
        for n in range(parts[0]):
            assert np.array_equal(part[n], cells[r * parts[0] + n])
    assert np.array_equal(np.stack(shard(cells, parts)), cells.reshape(len(parts), parts[0], *rest))


@pytest.mark.statement("layout")
@holds_for(batches())
def test_a_shard_keeps_the_channel_of_every_cell(batch: Batch) -> None:
    channel = np.indices(batch.x.shape)[1]
    for part in batch.shards(channel):
        assert np.array_equal(part, np.indices(part.shape)[1])
        assert np.array_equal(rows_of(part), np.indices(rows_of(part).shape)[0])


@pytest.mark.statement("layout")
@holds_for(st.tuples(equal_parts(), IMAGES))
def test_values_per_channel_multiply(case: tuple[tuple[int, ...], tuple[int, int, int, int]]) -> None:
    """(R*N)*(h*w) = R*(N*(h*w)): the count of the global batch is the sum of the shards' counts."""
    parts, (_, channels, height, width) = case
    whole = np.zeros((sum(parts), channels, height, width))
    assert synchronised.count(whole) == len(parts) * (parts[0] * (height * width))
    assert synchronised.count(whole) == sum(map(synchronised.count, shard(whole, parts)))


@pytest.mark.statement("layout")
@holds_for(batches(parts=equal_parts()))
def test_the_rows_of_the_global_batch_are_those_of_the_shards_side_by_side(batch: Batch) -> None:
    assert np.array_equal(np.concatenate(list(map(rows_of, batch.shards(batch.x))), 1), rows_of(batch.x))


# Batch norm of one row of numbers, from the definitions and with exactly rounded sums.


def mean_of(row: Float64) -> float:
    return math.fsum(row) / len(row)


def row_statistics(row: Float64) -> tuple[float, float]:
    mean = mean_of(row)
    return mean, mean_of((row - mean) ** 2)


def row_forward(row: Float64, statistics: tuple[float, float], gamma: float, beta: float, eps: float) -> Float64:
    mean, var = statistics
    return gamma * (row - mean) / math.sqrt(var + eps) + beta


def row_backward(
    dy: Float64, row: Float64, statistics: tuple[float, float], gamma: float, eps: float, training: bool
) -> tuple[Float64, float, float]:
    """dx, dgamma, dbeta."""
    mean, var = statistics
    normalised = (row - mean) / math.sqrt(var + eps)
    dgamma, dbeta = math.fsum(dy * normalised), math.fsum(dy)
    means = (dbeta / len(row), dgamma / len(row)) if training else (0.0, 0.0)
    return gamma / math.sqrt(var + eps) * (dy - means[0] - normalised * means[1]), dgamma, dbeta


def by_rows(batch: Batch, training: bool) -> tuple[Float64, Float64, Float64, Float64]:
    """y and dx [N, C, ...], dgamma and dbeta [C], row by row; inference takes statistics from elsewhere."""
    ys, dxs, sums = [], [], []
    for c, (row, dy) in enumerate(zip(rows_of(batch.x), rows_of(batch.dy), strict=True)):
        statistics = row_statistics(row) if training else (batch.beta[c], batch.gamma[c] ** 2 + 0.5)
        ys.append(row_forward(row, statistics, batch.gamma[c], batch.beta[c], batch.eps))
        dx, *both = row_backward(dy, row, statistics, batch.gamma[c], batch.eps, training)
        dxs.append(dx)
        sums.append(both)
    dgamma, dbeta = np.array(sums).T
    return images_of(np.stack(ys), batch.x.shape), images_of(np.stack(dxs), batch.x.shape), dgamma, dbeta


def layouts(array: Array) -> list[Array]:
    """[N, C, ...] as rows [1, C, N*S], as examples [N*S, C], and as planes and volumes of the same order."""
    rows = rows_of(array)
    return [array, rows[None], rows.T, rows[None, :, :, None], rows[None, :, None, :, None]]


def back(array: Array, shape: tuple[int, ...]) -> Array:
    """The inverse of each of ``layouts``."""
    return images_of(rows_of(array), shape)


@pytest.mark.statement("shapes")
@holds_for(batches(most=1))
def test_training_agrees_with_rows_in_every_shape(batch: Batch) -> None:
    y, dx, dgamma, dbeta = by_rows(batch, training=True)
    bounds = Bounds(batch)
    for x, dy in zip(layouts(batch.x), layouts(batch.dy), strict=True):
        forward = reference.batch_norm_fwd(x, batch.gamma, batch.beta, batch.eps)
        assert_within(back(forward.y, y.shape), y, bounds.y)
        got = reference.batch_norm_bwd(dy, x, forward.mean, forward.var, batch.gamma, batch.eps)
        assert_within(back(got.dx.value, y.shape), dx, bounds.dx(batch.dy))
        assert_within(got.dgamma.value, dgamma, bounds.dgamma(batch.dy))
        assert_within(got.dbeta.value, dbeta, bounds.dbeta(batch.dy))


@pytest.mark.statement("shapes")
@holds_for(batches(most=1))
def test_inference_agrees_with_rows_in_every_shape(batch: Batch) -> None:
    """No sums lead to y and dx here: a few roundings of their terms."""
    y, dx, dgamma, dbeta = by_rows(batch, training=False)
    mean, var = batch.beta, batch.gamma**2 + 0.5
    terms = reference.pre_activation(batch.x, mean, var, batch.gamma, batch.beta, batch.eps).scale
    sums = rounding(batch.total + 8)
    for x, dy in zip(layouts(batch.x), layouts(batch.dy), strict=True):
        z = reference.pre_activation(x, mean, var, batch.gamma, batch.beta, batch.eps).value
        assert_within(back(z, y.shape), y, rounding(8) * terms)
        got = reference.batch_norm_bwd(dy, x, mean, var, batch.gamma, batch.eps, training=False)
        assert_within(back(got.dx.value, y.shape), dx, rounding(8) * np.abs(dx))
        assert_within(got.dgamma.value, dgamma, sums * got.dgamma.scale)
        assert_within(got.dbeta.value, dbeta, sums * got.dbeta.scale)


@pytest.mark.statement("shapes")
@holds_for(batches())
def test_synchronised_training_agrees_with_rows_in_every_shape(batch: Batch) -> None:
    y, dx, *_ = by_rows(batch, training=True)
    bounds = Bounds(batch)
    relabelled = zip(*map(layouts, batch.shards(batch.x)), strict=True)
    for x, dy in zip(relabelled, zip(*map(layouts, batch.shards(batch.dy)), strict=True), strict=True):
        packed = synchronised.two_round(x)
        terms = synchronised.backward_terms(dy, x, packed, batch.gamma, batch.eps)
        ys = [synchronised.forward(part, packed, batch.gamma, batch.beta, batch.eps) for part in x]
        dxs = [synchronised.input_gradient(*pair, terms, batch.gamma, batch.eps) for pair in zip(dy, x, strict=True)]
        for got, want, bound in ((ys, y, bounds.y), (dxs, dx, bounds.dx(batch.dy))):
            pieces = zip(got, batch.shards(batch.x), strict=True)
            whole = np.concatenate([back(part, piece.shape) for part, piece in pieces])
            assert_within(whole, want, bound)


@pytest.mark.statement("shapes")
@holds_for(batches(most=1))
def test_a_single_image_and_a_flat_vector(batch: Batch) -> None:
    """[C, H, W] is a batch of one image; a flat vector (c, n) is cut into rows by its channels."""
    image = batch.x[0]
    y = reference.batch_norm_fwd(image[None], batch.gamma, batch.beta, batch.eps).y[0]
    flat = image.reshape(-1)
    single = Batch(image[None], image[None], image[None], batch.gamma, batch.beta, (1,), batch.eps)
    for c, row in enumerate(np.split(flat, batch.channels)):
        want = row_forward(row, row_statistics(row), batch.gamma[c], batch.beta[c], batch.eps)
        assert_within(y[c].reshape(-1), want, Bounds(single).y[0, c].reshape(-1))
