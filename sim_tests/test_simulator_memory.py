# SPDX-License-Identifier: Apache-2.0
"""Physical memory of the simulator: capacity, placement, addresses, aliasing, and what unwritten memory holds."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from launching import launch, load, nisa, nl, outputs, store

from nki_bn.simulator import IncompleteOutputError, NkiValidationError, OutOfMemoryError, UninitializedReadError

SBUF_BYTES = 212984  # per partition of trn2
BANK_BYTES = 2048
X = np.arange(12, dtype=np.float32).reshape(3, 4)


def fault(error: type[Exception], match: str, kernel: Callable[..., Any], **options: Any) -> str:
    """The message of the ``error`` that ``kernel`` raises."""
    with pytest.raises(error, match=match) as caught:
        launch(kernel, X, **options)
    return str(caught.value)


# --- capacity -------------------------------------------------------------------------------------


def test_overflow_names_the_live_tiles() -> None:
    def kernel(x: Any) -> None:
        kept = nl.ndarray((128, 50000), nl.float32, name="weights")
        other = nl.ndarray((128, 100), nl.bfloat16, name="scales")
        nl.ndarray((128, 4000), nl.float32, name="late")
        del kept, other

    message = fault(OutOfMemoryError, "late .* needs 16000 bytes per partition of sbuf, which has 212984", kernel)
    assert "weights (128, 50000) float32" in message and "scales (128, 100) bfloat16" in message


def test_a_tile_may_take_all_and_not_a_byte_more() -> None:
    def kernel(x: Any, size: int) -> None:
        nl.ndarray((128, size), nl.uint8)

    assert launch(kernel, X, SBUF_BYTES).sbuf_high_water == (SBUF_BYTES,)
    with pytest.raises(OutOfMemoryError, match="live tiles: none"):
        launch(kernel, X, SBUF_BYTES + 1)


@pytest.mark.parametrize(("target", "capacity"), [("trn1", 180224), ("trn2", 212984), ("trn3", 245752)])
def test_capacity_is_that_of_the_target(target: str, capacity: int) -> None:
    def kernel(x: Any, size: int) -> None:
        nl.ndarray((1, size), nl.uint8)

    launch(kernel, X, capacity, target=target)
    with pytest.raises(OutOfMemoryError):
        launch(kernel, X, capacity + 1, target=target)


def test_psum_holds_eight_banks() -> None:
    def kernel(x: Any, banks: int) -> None:
        tiles = [nl.ndarray((128, 512), nl.float32, buffer=nl.psum) for _ in range(banks)]
        assert sorted(tile.address[1] for tile in tiles) == [BANK_BYTES * bank for bank in range(banks)] or banks < 8

    assert launch(kernel, X, 8).psum_high_water == (8 * BANK_BYTES,)
    with pytest.raises(OutOfMemoryError, match="needs 2048 bytes per partition of psum, which has 16384"):
        launch(kernel, X, 9)


def test_small_psum_tiles_stay_inside_a_bank() -> None:
    def kernel(x: Any) -> None:
        kept = []
        for columns in (300, 300, 100, 300, 212, 512, 700):
            tile = nl.ndarray((128, columns), nl.float32, buffer=nl.psum)
            start, size = tile.address[1], 4 * columns
            assert start // BANK_BYTES == (start + size - 1) // BANK_BYTES or (
                size > BANK_BYTES and start % BANK_BYTES == 0
            )
            kept.append(tile)

    launch(kernel, X)


# --- lifetime -------------------------------------------------------------------------------------


def test_a_tile_is_freed_when_nothing_refers_to_it() -> None:
    def kernel(x: Any) -> None:
        for _ in range(5):
            tile = nl.ndarray((128, 40000), nl.float32)
            del tile

    assert launch(kernel, X).sbuf_high_water == (160000,)


def test_a_view_keeps_its_tile_alive() -> None:
    def kernel(x: Any) -> None:
        view = nl.ndarray((128, 40000), nl.float32)[0:32, 0:1]
        assert view.shape == (32, 1)
        nl.ndarray((128, 40000), nl.float32)

    fault(OutOfMemoryError, "160000 bytes", kernel)


def test_memory_that_a_finished_run_held_is_returned() -> None:
    import weakref

    held: list[Any] = []

    def kernel(x: Any) -> None:
        held.append(weakref.ref(nl.ndarray((128, 1000), nl.float32).storage.bank))

    launch(kernel, X)
    gc.collect()
    assert held[0]() is None


def test_high_water_counts_what_lives_at_once() -> None:
    def kernel(x: Any) -> None:
        first = nl.ndarray((128, 100), nl.float32)
        second = nl.ndarray((1, 50), nl.float32)
        del first
        third = nl.ndarray((128, 30), nl.float32)
        del second, third

    assert launch(kernel, X).sbuf_high_water == (600,)


# --- addresses ------------------------------------------------------------------------------------


def test_a_tile_stands_where_its_address_says() -> None:
    def kernel(x: Any) -> None:
        tile = nl.ndarray((32, 10), nl.float32, address=(64, 1000))
        assert tile.address == (64, 1000)
        assert tile[0:32, 3:4].address == (64, 1012)

    launch(kernel, X)


def test_two_tiles_at_one_address_are_one_memory() -> None:
    def kernel(x: Any) -> Any:
        first = nl.ndarray((3, 4), nl.float32, address=(0, 64))
        nisa.dma_copy(dst=first, src=x)
        return store(nl.ndarray((3, 8), nl.uint16, address=(0, 64)))

    np.testing.assert_array_equal(outputs(kernel, X), X.view(np.uint16))


def test_stack_allocators_may_use_bytes_again() -> None:
    def kernel(x: Any) -> Any:
        lower = nl.ndarray((3, 4), nl.float32, address=(0, 0))
        nisa.dma_copy(dst=lower, src=x)
        result = store(lower)
        upper = nl.ndarray((3, 4), nl.float32, address=(0, 8))
        nisa.memset(upper, 0.0)
        nisa.dma_copy(dst=result[:, 2:4], src=lower[:, 2:4])
        return result

    expected = X.copy()
    expected[:, 2:4] = 0
    np.testing.assert_array_equal(outputs(kernel, X), expected)


def test_automatic_tiles_keep_clear_of_chosen_addresses() -> None:
    def kernel(x: Any) -> Any:
        top = nl.ndarray((3, 4), nl.float32, address=(0, SBUF_BYTES - 16))
        nisa.dma_copy(dst=top, src=x)
        nisa.memset(nl.ndarray((128, 1000), nl.float32), 1.0)
        return store(top)

    np.testing.assert_array_equal(outputs(kernel, X), X)


def test_a_chosen_address_on_an_automatic_tile_is_refused() -> None:
    def kernel(x: Any) -> None:
        tile = nl.ndarray((3, 4), nl.float32, name="own")
        nl.ndarray((3, 4), nl.float32, address=(0, tile.address[1] - 12))

    fault(NkiValidationError, "overlaps own", kernel)


@pytest.mark.parametrize("byte", [-4, SBUF_BYTES - 12])
def test_an_address_outside_the_partition_is_refused(byte: int) -> None:
    fault(OutOfMemoryError, "has 212984 bytes", lambda x: nl.ndarray((3, 4), nl.float32, address=(0, byte)))


def test_psum_addresses_are_starts_of_banks() -> None:
    def kernel(x: Any, byte: int) -> None:
        assert nl.ndarray((128, 512), nl.float32, buffer=nl.psum, address=(0, byte)).address == (0, byte)

    launch(kernel, X, 3 * BANK_BYTES)
    for byte in (4, 1024, 2052):
        with pytest.raises(NkiValidationError, match=f"multiples of 2048, got {byte}"):
            launch(kernel, X, byte)


@pytest.mark.parametrize(
    ("partitions", "legal"),
    [(1, (0, 32, 64, 96)), (32, (0, 32, 64, 96)), (33, (0, 64)), (64, (0, 64)), (65, (0,)), (128, (0,))],
)
def test_start_partitions(partitions: int, legal: tuple[int, ...]) -> None:
    def kernel(x: Any, start: int) -> None:
        nl.ndarray((partitions, 4), nl.float32, address=(start, 0))

    for start in (0, 16, 32, 64, 96):
        if start in legal:
            launch(kernel, X, start)
        else:
            with pytest.raises(NkiValidationError, match=f"{partitions} partitions may start at"):
                launch(kernel, X, start)


def test_the_start_rule_holds_for_operands_of_engines_but_not_for_dma() -> None:
    def by_dma(x: Any) -> Any:
        tile = nl.ndarray((128, 4), nl.float32)
        nisa.dma_copy(dst=tile[5:8], src=x)
        return store(tile[5:8])

    def by_vector(x: Any) -> None:
        tile = nl.ndarray((128, 4), nl.float32)
        nisa.memset(tile, 0.0)
        nisa.tensor_copy(dst=tile[0:3], src=tile[5:8])

    np.testing.assert_array_equal(outputs(by_dma, X), X)
    fault(NkiValidationError, "3 partitions may start at 0, 32, 64, 96, got 5", by_vector)


def test_more_than_128_partitions_are_refused() -> None:
    fault(NkiValidationError, "256 exceeds maximum 128", lambda x: nl.ndarray((256, 4), nl.float32))


@pytest.mark.parametrize("buffer", [nl.sbuf, nl.psum, nl.hbm])
@pytest.mark.parametrize("shape", [(4, 10**30), (128, 2**32, 2**32)])
def test_sizes_beyond_any_memory_are_refused(shape: tuple[int, ...], buffer: Any) -> None:
    fault(NkiValidationError, "less than 2\\*\\*63 bytes", lambda x: nl.ndarray(shape, nl.float32, buffer=buffer))


def test_addresses_are_refused_in_hbm() -> None:
    fault(NkiValidationError, "no address", lambda x: nl.ndarray((3, 4), nl.float32, buffer=nl.hbm, address=(0, 0)))


# --- what memory holds ----------------------------------------------------------------------------


def half_written(x: Any) -> Any:
    tile = nl.ndarray((3, 8), x.dtype, name="half")
    nisa.dma_copy(dst=tile[:, 0:4], src=x)
    return store(tile)


def test_strict_runs_name_tile_instruction_and_line_of_an_unwritten_read() -> None:
    message = fault(UninitializedReadError, "never written", half_written)
    line = store.__code__.co_firstlineno
    assert "dma_copy" in message and "half" in message and "12 elements" in message and "first: (0, 4)" in message
    assert any(f"launching.py:{line + offset}" in message for offset in range(10))


@pytest.mark.parametrize(
    ("dtype", "fill"), [(np.float32, np.nan), (ml_dtypes.bfloat16, np.nan), (np.int32, 4), (np.uint8, 4)]
)
def test_plain_runs_read_nan_or_four(dtype: Any, fill: float) -> None:
    result = outputs(half_written, X.astype(dtype), strict=False)
    np.testing.assert_array_equal(result[:, :4], X.astype(dtype))
    np.testing.assert_array_equal(result[:, 4:].astype(np.float64), np.full((3, 4), fill))


def test_a_freed_tile_leaves_nothing_for_the_next_one() -> None:
    def kernel(x: Any) -> Any:
        load(x)
        return store(nl.ndarray(x.shape, x.dtype))

    fault(UninitializedReadError, "12 elements were never written", kernel)
    assert np.isnan(outputs(kernel, X, strict=False)).all()


def test_what_was_written_at_an_address_stays_readable() -> None:
    def kernel(x: Any) -> Any:
        nisa.dma_copy(dst=nl.ndarray(x.shape, x.dtype, address=(0, 0)), src=x)
        return store(nl.ndarray(x.shape, x.dtype, address=(0, 0)))

    np.testing.assert_array_equal(outputs(kernel, X), X)
    np.testing.assert_array_equal(outputs(kernel, X, strict=False), X)


def test_unwritten_hbm_is_found_too() -> None:
    fault(UninitializedReadError, "never written", lambda x: load(nl.ndarray(x.shape, x.dtype, buffer=nl.private_hbm)))


def test_incomplete_outputs_are_errors_of_strict_runs() -> None:
    def kernel(x: Any) -> Any:
        result = nl.ndarray((3, 5), x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=result[:, 1:5], src=x)
        return result

    fault(IncompleteOutputError, r"3 elements were never written \(first: \(0, 0\)\)", kernel)
    result = outputs(kernel, X, strict=False)
    assert np.isnan(result[:, 0]).all() and (result[:, 1:] == X).all()


# --- without roundings ----------------------------------------------------------------------------


def test_imprecise_mode_holds_float32_in_narrow_tiles() -> None:
    def kernel(x: Any) -> Any:
        narrow = nl.ndarray(x.shape, nl.bfloat16)
        nisa.tensor_copy(dst=narrow, src=load(x))
        wide = nl.ndarray(x.shape, nl.float32)
        nisa.tensor_copy(dst=wide, src=narrow)
        return store(wide)

    x = X + np.float32(1 / 3)
    np.testing.assert_array_equal(outputs(kernel, x, precise_fp=False), x)
    np.testing.assert_array_equal(outputs(kernel, x), x.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_imprecise_mode_keeps_addresses_and_capacities() -> None:
    def kernel(x: Any) -> Any:
        both = nl.ndarray((3, 8), nl.bfloat16, address=(0, 0))
        nisa.dma_copy(dst=both[:, 0:4], src=x)
        nisa.dma_copy(dst=nl.ndarray((3, 4), nl.bfloat16, address=(0, 8)), src=x)
        return store(both)

    x = X + np.float32(1 / 3)
    result = launch(kernel, x, precise_fp=False)
    np.testing.assert_array_equal(result.outputs, np.hstack([x, x]))
    assert result.sbuf_high_water == (16,)
    fault(OutOfMemoryError, "212984", lambda x: nl.ndarray((128, SBUF_BYTES // 2 + 1), nl.bfloat16), precise_fp=False)


def test_imprecise_mode_refuses_views_of_bits() -> None:
    def by_view(x: Any) -> None:
        nl.ndarray(x.shape, nl.bfloat16).view(nl.uint16)

    def by_pattern(x: Any) -> None:
        nl.ndarray(x.shape, nl.float32).ap([[8, 3], [1, 4]], dtype=nl.uint16)

    for kernel in (by_view, by_pattern):
        launch(kernel, X)
        fault(NkiValidationError, "NKI_PRECISE_FP=0", kernel, precise_fp=False)
