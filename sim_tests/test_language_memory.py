# SPDX-License-Identifier: Apache-2.0
"""Moving and creating tensors with nki.language: values, rules and refusals."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from launching import launch, nl, outputs
from tiles import on_tiles, refuses

from nki_bn.simulator import NkiValidationError, OutOfMemoryError

RNG = np.random.default_rng(8)
BF16 = np.dtype(ml_dtypes.bfloat16)
X = RNG.normal(size=(64, 40)).astype(np.float32)
Y = RNG.normal(size=(64, 40)).astype(np.float32)

# --- moving data -----------------------------------------------------------------------------------------------------


def test_load_and_store() -> None:
    np.testing.assert_array_equal(on_tiles(lambda tile: tile, X), X)
    with pytest.raises(NkiValidationError, match="1 dimensions"):
        launch(lambda x: nl.load(x), np.ones(5, np.float32))
    with pytest.raises(TypeError, match="load src must be a tensor"):
        launch(lambda x: nl.load(X), X)
    refuses(nl.load, "load src is in sbuf", X)

    def from_psum(x: Any) -> None:
        nl.store(x, nl.transpose(nl.load(x)))

    with pytest.raises(NkiValidationError, match="psum"):
        launch(from_psum, np.ones((8, 8), np.float32))


def test_load_converts() -> None:
    def kernel(x: Any) -> Any:
        out = nl.ndarray(x.shape, nl.bfloat16, buffer=nl.shared_hbm)
        nl.store(out, nl.load(x, dtype=nl.bfloat16))
        return out

    np.testing.assert_array_equal(outputs(kernel, X), X.astype(BF16))


def test_load_transpose2d() -> None:
    def kernel(x: Any) -> Any:
        out = nl.ndarray((x.shape[1], x.shape[0]), nl.float32, buffer=nl.shared_hbm)
        nl.store(out, nl.load_transpose2d(x, dtype=nl.float32))
        return out

    np.testing.assert_array_equal(outputs(kernel, X), X.T)
    np.testing.assert_array_equal(outputs(kernel, X.astype(BF16)), X.astype(BF16).T.astype(np.float32))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((1, 40), (128, 40)),
        ((1, 40), (50, 40)),
        ((64, 1), (64, 7)),
        ((1, 1), (33, 5)),
        ((64, 4, 1), (64, 4, 3)),
        ((64, 40), (64, 40)),
    ],
)
def test_broadcast_to(source: tuple[int, ...], target: tuple[int, ...]) -> None:
    x = RNG.normal(size=source).astype(np.float32)
    np.testing.assert_array_equal(on_tiles(lambda t: nl.broadcast_to(t, target), x), np.broadcast_to(x, target))


def test_broadcast_to_keeps_ranks_and_returns_the_tile_when_nothing_changes() -> None:
    refuses(lambda t: nl.broadcast_to(t, (64, 40, 2)), "ranks must be equal", X)
    refuses(lambda t: nl.broadcast_to(t, (128, 40)), "does not broadcast", X)

    def kernel(x: Any) -> None:
        tile = nl.load(x)
        assert nl.broadcast_to(tile, tile.shape) is tile

    launch(kernel, X)


def test_gather_flattened() -> None:
    indices = RNG.integers(0, 40, (64, 9)).astype(np.uint32)
    expected = np.take_along_axis(X, indices.astype(int), 1)
    np.testing.assert_array_equal(on_tiles(nl.gather_flattened, X, indices), expected)
    refuses(nl.gather_flattened, "is outside", X, indices + np.uint32(40))
    refuses(nl.gather_flattened, "uint32", X, indices.astype(np.int32))
    refuses(lambda x, i: nl.gather_flattened(x, i, axis=1), "axis must be 0", X, indices)


def test_expand_dims_is_a_view() -> None:
    def kernel(x: Any) -> None:
        tile = nl.load(x)
        assert nl.expand_dims(tile, 1).shape == (64, 1, 40) and nl.expand_dims(tile, 1).storage is tile.storage

    launch(kernel, X)


# --- creation --------------------------------------------------------------------------------------------------------


def test_ndarray_rules() -> None:
    def kernel(x: Any) -> None:
        assert nl.ndarray([4, 5], nl.float32).shape == (4, 5)
        assert nl.ndarray((4,), nl.float32, buffer=nl.hbm).shape == (4,)
        assert nl.ndarray((4, 5), nl.float32).strides == (5, 1)
        assert nl.ndarray((4, 5), nl.float32, address=(32, 64), name="placed").address == (32, 64)
        assert nl.ndarray((4, 5), nl.float32, buffer=nl.psum, address=(0, 2048)).buffer == nl.psum
        for shape in ((4,), (1, 2, 3, 4, 5, 6), (4, 0)):
            with pytest.raises(NkiValidationError, match="ndarray shape"):
                nl.ndarray(shape, nl.float32)
        for shape in (4, "ab", (4, 1.5), (True, 4)):
            with pytest.raises(TypeError, match="ndarray shape"):
                nl.ndarray(shape, nl.float32)
        with pytest.raises(TypeError, match="buffer must be a memory region"):
            nl.ndarray((4, 5), nl.float32, buffer="sbuf")
        with pytest.raises(TypeError, match="address"):
            nl.ndarray((4, 5), nl.float32, address=64)
        with pytest.raises(NkiValidationError, match="exceeds maximum 128"):
            nl.ndarray((129, 5), nl.float32)
        with pytest.raises(NkiValidationError, match="multiples of 2048"):
            nl.ndarray((4, 5), nl.float32, buffer=nl.psum, address=(0, 64))
        with pytest.raises(NkiValidationError, match="no address"):
            nl.ndarray((4, 5), nl.float32, buffer=nl.hbm, address=(0, 64))
        with pytest.raises(OutOfMemoryError, match="bytes per partition"):
            nl.ndarray((4, 60000), nl.float32)
        with pytest.raises(TypeError, match="float64"):
            nl.ndarray((4, 5), np.float64)

    launch(kernel, X)


@pytest.mark.parametrize("buffer", [nl.sbuf, nl.psum, nl.hbm, nl.shared_hbm])
def test_filled_tensors(buffer: Any) -> None:
    def kernel(x: Any) -> Any:
        made = (
            nl.zeros((8, 6), nl.bfloat16, buffer),
            nl.ones((8, 6), nl.int32, buffer),
            nl.full((8, 6), -2.5, nl.float32, buffer),
        )
        results = []
        for tensor in (*made, nl.zeros_like(made[2]), nl.zeros_like(made[2], dtype=nl.uint8, buffer=nl.sbuf)):
            tile = nl.copy(tensor) if nl.is_on_chip(tensor.buffer) else nl.load(tensor)
            out = nl.ndarray(tile.shape, tile.dtype, buffer=nl.shared_hbm)
            nl.store(out, tile)
            results.append(out)
        assert nl.empty_like(made[0]).buffer == buffer and nl.empty_like(made[0], buffer=nl.sbuf).buffer == nl.sbuf
        return tuple(results)

    values = outputs(kernel, X)
    wanted = (0, BF16), (1, np.int32), (-2.5, np.float32), (0, np.float32), (0, np.uint8)
    for result, (expected, dtype) in zip(values, wanted, strict=True):
        assert result.dtype == dtype and result.shape == (8, 6) and (result == expected).all()


def test_predicates_of_memories() -> None:
    table = {
        nl.is_sbuf: {nl.sbuf},
        nl.is_psum: {nl.psum},
        nl.is_on_chip: {nl.sbuf, nl.psum},
        nl.is_hbm: {nl.private_hbm, nl.shared_hbm},
    }
    for predicate, accepted in table.items():
        assert {region for region in nl.MemoryRegion if predicate(region)} == accepted
    assert nl.hbm is nl.private_hbm
    assert [region.value for region in nl.MemoryRegion] == ["sbuf", "psum", "private_hbm", "shared_hbm"]


def test_shared_constants_are_one_tensor_for_both_cores(tmp_path: Any) -> None:
    path = tmp_path / "values.npy"
    np.save(path, X)
    seen = []

    def kernel(x: Any) -> Any:
        constant, loaded = nl.shared_constant(Y.astype(BF16)), nl.shared_constant(str(path))
        seen.append((constant.storage, loaded.storage))
        out = nl.ndarray((2, *Y.shape), nl.float32, buffer=nl.shared_hbm)
        nl.store(out[nl.program_id(0)], nl.add(nl.load(constant), nl.load(loaded)))
        return out

    result = outputs(kernel, X, lnc=2)
    np.testing.assert_allclose(result, np.broadcast_to(X + Y.astype(BF16).astype(np.float32), (2, 64, 40)))
    assert seen[0] == seen[1]
    with pytest.raises(TypeError, match="NumPy array or the path"):
        launch(lambda x: nl.shared_constant(3.0), X)
    with pytest.raises(TypeError, match="float64"):
        launch(lambda x: nl.shared_constant(np.ones(3)), X)


def test_identity_matrices_are_reused_per_size_and_dtype() -> None:
    def kernel(x: Any) -> Any:
        identity = nl.shared_identity_matrix(8)
        assert identity.dtype == nl.uint8 and nl.is_sbuf(identity.buffer)
        assert nl.shared_identity_matrix(8) is identity
        assert nl.shared_identity_matrix(8, dtype=nl.float32) is not identity
        given = nl.ndarray((128, 128), nl.bfloat16)
        assert nl.shared_identity_matrix(128, dst=given) is given
        out = nl.ndarray((128, 128), nl.bfloat16, buffer=nl.shared_hbm)
        nl.store(out, given)
        return out

    np.testing.assert_array_equal(outputs(kernel, X), np.eye(128, dtype=BF16))
    for n in (0, 129):
        with pytest.raises(NkiValidationError, match="1 to 128"):
            launch(lambda x, n=n: nl.shared_identity_matrix(n), X)
    with pytest.raises(NkiValidationError, match="dst has shape"):
        launch(lambda x: nl.shared_identity_matrix(4, dst=nl.ndarray((5, 5), nl.float32)), X)


def test_random_numbers() -> None:
    def kernel(x: Any) -> Any:
        seed = nl.full((1, 1), 42, nl.int32)
        out = nl.ndarray((3, 128, 500), nl.float32, buffer=nl.shared_hbm)
        for index in range(3):
            if index != 1:
                nl.random_seed(seed)
            nl.store(out[index], nl.rand((128, 500), nl.float32))
        return out

    first, second, again = outputs(kernel, X)
    assert 0 <= first.min() and first.max() < 1
    assert abs(first.mean() - 0.5) < 0.005 and abs(first.var() - 1 / 12) < 0.002
    np.testing.assert_array_equal(first, again)
    assert (first != second).mean() > 0.99
    with pytest.raises(TypeError, match="seed must be a tensor"):
        launch(lambda x: nl.random_seed(3), X)
    with pytest.raises(NkiValidationError, match=r"\(1, 1\) tile"):
        launch(lambda x: nl.random_seed(nl.zeros((1, 1), nl.float32)), X)


def test_dropout_zeroes_with_the_probability_and_does_not_scale() -> None:
    x = np.full((128, 1000), 3.0, np.float32)
    dropped = on_tiles(lambda t: nl.dropout(t, 0.25), x)
    assert set(np.unique(dropped)) == {0.0, 3.0} and abs((dropped == 0).mean() - 0.25) < 0.01
    rates = np.repeat(np.array([[0.0], [1.0]], np.float32), 64, axis=0)
    by_lane = on_tiles(nl.dropout, x, rates)
    assert (by_lane[:64] == 3).all() and (by_lane[64:] == 0).all()
