# SPDX-License-Identifier: Apache-2.0
"""What only lenient runs do, as the vendor's simulator does it: assign, broadcast, place late, and have no limit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from launching import launch, load, nisa, nl, outputs, store

from nki_bn.simulator import NkiValidationError, OutOfMemoryError, RaceError

SBUF_BYTES = 212984
X = np.random.default_rng(3).normal(size=(64, 24)).astype(np.float32)


def lenient(kernel: Callable[..., Any], *args: Any) -> Any:
    return outputs(kernel, *args, strict=False)


def test_assignments_copy_and_fill() -> None:
    def kernel(x: Any) -> Any:
        tile = nl.ndarray((64, 24), nl.float32)
        tile[...] = 2.0
        tile[:, 0:8] = load(x)[:, 8:16]
        result = nl.ndarray((64, 48), nl.float32, buffer=nl.shared_hbm)
        result[:, 0:24] = tile
        result[:, 24:48] = x
        return result

    expected = np.full((64, 48), 2.0, np.float32)
    expected[:, :8], expected[:, 24:] = X[:, 8:16], X
    np.testing.assert_array_equal(lenient(kernel, X), expected)


@pytest.mark.parametrize("shapes", [((64, 24), (64, 1)), ((64, 1), (64, 24)), ((64, 24), (1, 24)), ((64, 1), (1, 24))])
def test_functions_broadcast(shapes: tuple[tuple[int, int], tuple[int, int]]) -> None:
    def kernel(x: Any, y: Any) -> Any:
        return store(nl.subtract(load(x), load(y)))

    x, y = (X[: rows or None, :columns].copy() for rows, columns in shapes)
    np.testing.assert_array_equal(lenient(kernel, x, y), x - y)
    with pytest.raises(NkiValidationError, match="data[12] has"):
        outputs(kernel, x, y)


def test_sizes_that_do_not_broadcast_are_refused() -> None:
    def kernel(x: Any) -> Any:
        return nl.add(load(x), load(x)[:, 0:12])

    with pytest.raises(NkiValidationError, match="data2 has 12 elements per partition, data1 has 24"):
        lenient(kernel, X)


def half(kept: int) -> Callable[[Any], Any]:
    """A kernel that has ``kept`` tiles of half of SBUF in use, and one that it does not use."""

    def kernel(x: Any) -> Any:
        columns = SBUF_BYTES // 8
        tiles = [nl.ndarray((64, columns), nl.float32, name=f"tile{index}") for index in range(kept + 1)]
        for index in range(kept):
            nisa.memset(tiles[index], float(index))
            nisa.dma_copy(dst=tiles[index][:, 0:24], src=x)
        result = nl.ndarray((kept * 64, columns), nl.float32, buffer=nl.shared_hbm)
        for index in range(kept):
            nisa.dma_copy(dst=result[index * 64 : index * 64 + 64], src=tiles[index])
        return result

    return kernel


@pytest.mark.parametrize("kept", [2, 3])
def test_tiles_take_memory_when_they_are_used_and_without_limit(kept: int) -> None:
    with pytest.raises(OutOfMemoryError, match="tile2"):
        outputs(half(kept), X)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = launch(half(kept), X, strict=False)
    assert [str(warning.message).startswith("tile2") for warning in caught] == [True] * (kept - 2)
    for index, part in enumerate(np.split(run.outputs, kept)):
        np.testing.assert_array_equal(part[:, :24], X)
        assert (part[:, 24:] == index).all()
    assert run.sbuf_high_water == (SBUF_BYTES // 8 * 4 * 2,)


def test_members_of_enumerations_may_be_given_by_value() -> None:
    def kernel(x: Any) -> Any:
        tile = load(x)
        result = nl.ndarray((24, 24), nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=result, stationary=tile, moving=tile, perf_mode="none")
        return store(result)

    np.testing.assert_allclose(lenient(kernel, X), X.astype(np.float64).T @ X, atol=1e-4)
    with pytest.raises(TypeError, match="perf_mode must be a member"):
        outputs(kernel, X)


@pytest.mark.parametrize("late", [False, True])
def test_what_both_cores_cleared_either_may_read_and_neither_change(late: bool) -> None:
    def kernel(x: Any) -> Any:
        rank = nl.program_id(0)
        shared = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm, name="shared")
        zeros = nl.zeros((64, 24), nl.float32)
        nisa.dma_copy(dst=shared, src=zeros)
        mine = load(shared[32 * rank : 32 * rank + 32])
        if late:
            nisa.dma_copy(dst=shared[32 * rank : 32 * rank + 32], src=nl.add(mine, 1.0))
        return shared

    if late:
        with pytest.raises(RaceError, match="core 1 writes it by dma_copy"):
            launch(kernel, X, lnc=2, strict=False)
    else:
        np.testing.assert_array_equal(launch(kernel, X, lnc=2, strict=False).outputs, np.zeros_like(X))


def test_results_in_private_memory_are_returned_with_a_warning() -> None:
    def kernel(x: Any) -> Any:
        result = nl.ndarray(x.shape, x.dtype, buffer=nl.hbm)
        nisa.dma_copy(dst=result, src=x)
        return result

    with pytest.warns(UserWarning, match="is returned but not in shared_hbm: the compiler refuses it"):
        np.testing.assert_array_equal(lenient(kernel, X), X)
    with pytest.raises(NkiValidationError, match="is returned but not in shared_hbm"):
        outputs(kernel, X)


def test_tiles_of_columns() -> None:
    def kernel(x: Any) -> Any:
        tile, result = load(x), nl.ndarray((64, 24), nl.float32, buffer=nl.psum)
        for column in (0, 32):
            nisa.nc_matmul(
                dst=result[column : column + 24],
                stationary=tile,
                moving=tile,
                tile_position=(0, column),
                tile_size=(64, 32),
            )
        return store(result[32:56])

    np.testing.assert_allclose(lenient(kernel, X), X.astype(np.float64).T @ X, atol=1e-4)
    with pytest.raises(NkiValidationError, match="columns are not tiled"):
        outputs(kernel, X)
