# SPDX-License-Identifier: Apache-2.0
"""nc_matmul: products against NumPy, accumulation per location, modes of the array, and what it refuses."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from launching import launch, load, nisa, nl, outputs, store

from nki_bn.simulator import NkiValidationError, UninitializedReadError

RNG = np.random.default_rng(2)
BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3)
A = RNG.normal(size=(96, 40)).astype(np.float32)
B = RNG.normal(size=(96, 200)).astype(np.float32)
PRODUCT = A.astype(np.float64).T @ B


def close(result: Any, expected: Any, terms: int = 96) -> None:
    """Float32 sums of that many products of order one."""
    np.testing.assert_allclose(np.asarray(result, np.float64), expected, rtol=1e-5, atol=terms * 1e-6)


def refuse(
    kernel: Callable[..., Any],
    match: str,
    *args: Any,
    error: type[Exception] = NkiValidationError,
    target: str = "trn2",
) -> None:
    with pytest.raises(error, match=match):
        launch(kernel, *(args or (A, B)), target=target)


def product(a: Any, b: Any, shape: tuple[int, ...] | None = None, dtype: Any = nl.float32, **options: Any) -> Any:
    to = nl.ndarray(shape or (a.shape[1], b.shape[1]), dtype, buffer=nl.psum)
    nisa.nc_matmul(dst=to, stationary=load(a), moving=load(b), **options)
    return store(to)


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["trn1", "trn2", "trn3"])
def test_contracts_over_partitions(target: str) -> None:
    close(outputs(product, A, B, target=target), PRODUCT)


@pytest.mark.parametrize(("left", "right"), [(BF16, BF16), (BF16, np.float16), (np.float16, FP8), (FP8, FP8)])
def test_narrow_operands_are_multiplied_exactly(left: Any, right: Any) -> None:
    a, b = A.astype(left), B.astype(right)
    close(outputs(product, a, b), a.astype(np.float64).T @ b.astype(np.float64))


def test_flattens_free_dimensions() -> None:
    def kernel(a: Any, b: Any) -> Any:
        to = nl.ndarray((40, 20, 10), nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=to, stationary=load(a, (96, 8, 5)), moving=load(b, (96, 2, 4, 25)))
        return store(to)

    close(outputs(kernel, A, B), PRODUCT.reshape(40, 20, 10))


def test_a_nan_reaches_its_row_and_column_only() -> None:
    a = A.copy()
    a[3, 7] = np.nan
    result = outputs(product, a, B)
    assert np.isnan(result[7]).all() and not np.isnan(np.delete(result, 7, axis=0)).any()


def test_zero_times_nan_is_nan() -> None:
    ones = np.eye(96, dtype=np.float32)
    b = B.copy()
    b[3, 7] = np.nan
    result = outputs(product, ones, b)
    assert np.isnan(result[:, 7]).all() and not np.isnan(np.delete(result, 7, axis=1)).any()


def test_products_of_columns_of_ones_are_sums_over_partitions() -> None:
    ones = np.ones((96, 1), np.float32)
    close(outputs(product, ones, B), B.astype(np.float64).sum(axis=0, keepdims=True))


# --- accumulation ---------------------------------------------------------------------------------


def repeated(flags: list[bool | None], start: float | None = None) -> Callable[..., Any]:
    def kernel(a: Any, b: Any) -> Any:
        to = nl.ndarray((40, 200), nl.float32, buffer=nl.psum)
        if start is not None:
            nisa.memset(to, start)
        left, right = load(a), load(b)
        for flag in flags:
            nisa.nc_matmul(dst=to, stationary=left, moving=right, accumulate=flag)
        return store(to)

    return kernel


@pytest.mark.parametrize(
    ("flags", "start", "times"),
    [
        ([None], None, 1),
        ([None, None, None], None, 3),
        ([False, True], None, 2),
        ([False, False], None, 1),
        ([None, False, None], None, 2),
        ([None], 0.0, 1),
        ([True], 0.0, 1),
        ([np.bool_(False), np.bool_(True)], None, 2),
    ],
)
def test_accumulation_flags(flags: list[bool | None], start: float | None, times: int) -> None:
    close(outputs(repeated(flags, start), A, B), times * PRODUCT)


def test_adds_to_what_a_memset_left() -> None:
    close(outputs(repeated([None], 5.0), A, B), PRODUCT + 5)


def test_tracks_every_location_by_itself() -> None:
    def kernel(a: Any, b: Any) -> Any:
        to = nl.ndarray((40, 200), nl.float32, buffer=nl.psum)
        left, right = load(a), load(b)
        nisa.nc_matmul(dst=to[:, 0:120], stationary=left, moving=right[:, 0:120])
        nisa.nc_matmul(dst=to[:, 80:200], stationary=left, moving=right[:, 80:200])
        return store(to)

    expected = PRODUCT.copy()
    expected[:, 80:120] *= 2
    close(outputs(kernel, A, B), expected)


def test_fills_one_tile_column_by_column() -> None:
    def kernel(a: Any, b: Any) -> Any:
        to = nl.ndarray((40, 4), nl.float32, buffer=nl.psum)
        left, right = load(a), load(b)
        for column in range(4):
            for part in range(3):
                rows = nl.ds(32 * part, 32)
                nisa.nc_matmul(
                    dst=to[:, column : column + 1], stationary=left[rows], moving=right[rows, column : column + 1]
                )
        return store(to)

    close(outputs(kernel, A, B), PRODUCT[:, :4])


@pytest.mark.parametrize("address", [None, (0, 2048)])
def test_a_new_tile_starts_a_new_sum(address: Any) -> None:
    def kernel(a: Any, b: Any) -> Any:
        left, right = load(a), load(b)
        for _ in range(3):
            to = nl.ndarray((40, 200), nl.float32, buffer=nl.psum, address=address)
            nisa.nc_matmul(dst=to, stationary=left, moving=right)
            result = store(to)
            del to
        return result

    close(outputs(kernel, A, B), PRODUCT)


def test_a_new_tile_in_other_partitions_leaves_a_sum_alone() -> None:
    def kernel(a: Any, b: Any) -> Any:
        left, right = load(a), load(b)
        to = nl.ndarray((40, 200), nl.float32, buffer=nl.psum, address=(0, 0))
        nisa.nc_matmul(dst=to, stationary=left, moving=right)
        other = nl.ndarray((40, 200), nl.float32, buffer=nl.psum, address=(64, 0))
        nisa.nc_matmul(dst=to, stationary=left, moving=right)
        nisa.nc_matmul(dst=other, stationary=left, moving=right)
        return store(to), store(other)

    both, once = outputs(kernel, A, B)
    close(both, 2 * PRODUCT)
    close(once, PRODUCT)


def test_adding_to_unwritten_memory_is_an_error_or_a_warning() -> None:
    with pytest.raises(UninitializedReadError, match="nc_matmul"):
        launch(repeated([True]), A, B)
    with pytest.warns(UserWarning, match="nothing has written"):
        assert np.isnan(outputs(repeated([True]), A, B, strict=False)).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        close(outputs(repeated([None, True]), A, B, strict=False), 2 * PRODUCT)


# --- modes ----------------------------------------------------------------------------------------


def transposed(x: Any, identity: Any, dtype: Any = None) -> Any:
    return product(x, identity, dtype=dtype or x.dtype, is_transpose=True)


@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16])
def test_transpose_mode_moves_bits(dtype: Any) -> None:
    x = RNG.integers(0, 2**16, size=(96, 80), dtype=np.uint16).view(dtype)
    result = outputs(transposed, x, np.eye(96, dtype=dtype))
    assert result.dtype == dtype
    np.testing.assert_array_equal(result.copy().view(np.uint16), x.T.copy().view(np.uint16))


def test_transpose_mode_widens_into_float32() -> None:
    x = A.astype(BF16)
    np.testing.assert_array_equal(
        outputs(lambda x, i: transposed(x, i, nl.float32), x, np.eye(96, dtype=BF16)), x.astype(np.float32).T
    )


def test_transpose_mode_overwrites() -> None:
    def kernel(a: Any, identity: Any) -> Any:
        to = nl.ndarray((40, 96), nl.float32, buffer=nl.psum)
        for _ in range(2):
            nisa.nc_matmul(dst=to, stationary=load(a), moving=load(identity), is_transpose=True)
        return store(to)

    np.testing.assert_array_equal(outputs(kernel, A, np.eye(96, dtype=np.float32)), A.T)


def test_transpose_mode_is_a_label_on_gen2() -> None:
    x = A.copy()
    x[3, 7] = np.nan
    identity = np.eye(96, dtype=np.float32)
    result = outputs(transposed, x, identity, target="trn1")
    assert np.isnan(result[7]).all()
    np.testing.assert_array_equal(outputs(transposed, x, identity), x.T)


def test_double_row_contracts_two_rows_per_partition() -> None:
    a, b = A[:, :40].astype(FP8), B.astype(FP8)
    wide = outputs(
        lambda a, b: product(a, b, (20, 100), perf_mode=nisa.matmul_perf_mode.double_row),
        a.reshape(96, 2, 20),
        b.reshape(96, 2, 100),
    )
    expected = np.einsum(
        "krm,krn->mn", a.reshape(96, 2, 20).astype(np.float64), b.reshape(96, 2, 100).astype(np.float64)
    )
    close(wide, expected, terms=192)


@pytest.mark.parametrize(("start", "rows"), [(0, 32), (96, 32), (64, 64), (0, 128)])
def test_row_tiles(start: int, rows: int) -> None:
    def kernel(a: Any, b: Any) -> Any:
        return product(a, b, tile_position=(start, 0), tile_size=(rows, 128))

    k = min(rows, 96)
    close(outputs(kernel, A[:k], B[:k]), A[:k].astype(np.float64).T @ B[:k])


def test_records_what_decides_its_time() -> None:
    def kernel(a: Any, b: Any) -> Any:
        return product(a, b, is_stationary_onezero=True, tile_position=(0, 0), tile_size=(128, 128))

    (record,) = [record for record in launch(kernel, A, B).trace if record.opcode == "nc_matmul"]
    assert record.engine == "tensor"
    assert record.attributes["stationary_onezero"] is True and record.attributes["moving_onezero"] is False
    assert [access.shape for access in record.reads] == [(96, 40), (96, 200)]
    assert [access.shape for access in record.writes] == [(40, 200)]


# --- refusals -------------------------------------------------------------------------------------


def test_refuses_wrong_places() -> None:
    def kernel(places: tuple[Any, Any, Any]) -> Callable[..., None]:
        def inner(a: Any, b: Any) -> None:
            shapes = ((40, 200), (96, 40), (96, 200))
            to, left, right = (
                nl.ndarray(shape, nl.float32, buffer=place) for shape, place in zip(shapes, places, strict=True)
            )
            nisa.nc_matmul(dst=to, stationary=left, moving=right)

        return inner

    refuse(kernel((nl.sbuf, nl.sbuf, nl.sbuf)), "dst is in sbuf; accepted: psum")
    refuse(kernel((nl.psum, nl.psum, nl.sbuf)), "stationary is in psum; accepted: sbuf")
    refuse(kernel((nl.psum, nl.sbuf, nl.hbm)), "moving is in private_hbm; accepted: sbuf")


def test_refuses_wrong_shapes() -> None:
    def wide(columns: int) -> Any:
        return np.zeros((96, columns), np.float32)

    refuse(product, "moving has 64 partitions, stationary has 96", A, B[:64])
    refuse(lambda a, b: product(a, b, (128, 10)), "stationary has 129 columns, at most 128", wide(129), wide(10))
    refuse(lambda a, b: product(a, b, (40, 512)), "moving has 513 columns, at most 512 on trn2", A, wide(513))
    refuse(lambda a, b: product(a, b, (40, 199)), r"dst must have shape \(40, 200\), got \(40, 199\)")
    close(outputs(product, A, wide(512)), np.zeros((40, 512)))


def test_later_cores_take_more_columns() -> None:
    b = RNG.normal(size=(96, 8192)).astype(BF16)
    a = A.astype(BF16)
    expected = a.astype(np.float64).T @ b.astype(np.float64)
    close(outputs(product, a, b[:, :4096], target="trn3"), expected[:, :4096])
    result = outputs(lambda a, b: product(a, b, dtype=nl.bfloat16), a, b, target="trn3")
    np.testing.assert_allclose(result.astype(np.float64), expected, rtol=2**-8, atol=1e-4)
    refuse(
        lambda a, b: product(a, b, (40, 4096)), "moving has 4097 columns, at most 4096", a, b[:, :4097], target="trn3"
    )


def test_refuses_a_destination_across_banks() -> None:
    def kernel(a: Any, b: Any) -> None:
        to = nl.ndarray((40, 1024), nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=to[:, 400:600], stationary=load(a), moving=load(b))

    refuse(kernel, "more than one bank of 2048")
    launch(kernel, A, B, target="trn3")


def test_refuses_wrong_dtypes() -> None:
    refuse(product, "stationary is int32; accepted on gen3", A.astype(np.int32), B)
    refuse(
        product, "pairs float32 or tfloat32 only with float32 or tfloat32, got float32 and bfloat16", A, B.astype(BF16)
    )
    refuse(product, "moving is float8_e4m3fn; accepted on gen3", A.astype(BF16), B.astype(ml_dtypes.float8_e4m3fn))
    refuse(
        product,
        "cannot mix float8_e4m3 with float8_e4m3fn",
        A.astype(FP8),
        B.astype(ml_dtypes.float8_e4m3fn),
        target="trn3",
    )
    for target in ("trn1", "trn2"):
        refuse(lambda a, b: product(a, b, dtype=nl.bfloat16), "dst is bfloat16; accepted here: float32", target=target)
    refuse(
        lambda a, b: product(a, b, dtype=nl.float16), "dst is float16; accepted here: float32, bfloat16", target="trn3"
    )


def test_refuses_wrong_modes() -> None:
    double = nisa.matmul_perf_mode.double_row
    a8, b8 = A.astype(FP8), B.astype(FP8)
    refuse(lambda a, b: product(a, b, perf_mode=double), "double_row takes float8 operands, stationary is float32")
    refuse(lambda a, b: product(a, b, perf_mode=double), r"stationary of shape \(K, 2, ...\)", a8, b8)
    refuse(
        lambda a, b: product(a, b, (20, 100), perf_mode=double),
        "needs gen3",
        a8.reshape(96, 2, 20),
        b8.reshape(96, 2, 100),
        target="trn1",
    )
    refuse(lambda a, b: product(a, b, perf_mode="double_row"), "perf_mode must be a member", error=TypeError)
    refuse(lambda a, b: product(a, b, accumulate=1), "accumulate must be True, False or None", error=TypeError)
    refuse(lambda a, b: product(a, b, is_transpose=True), "needs an identity as moving", A, A)
    refuse(
        lambda a, b: product(a, b, is_transpose=True, accumulate=True),
        "must be None or False with is_transpose",
        A,
        np.eye(96, dtype=np.float32),
    )


@pytest.mark.parametrize(
    ("position", "size", "match"),
    [
        ((0, 0), (), "give both"),
        ((), (64, 128), "give both"),
        ((0,), (64,), "as pairs"),
        ((16, 0), (32, 128), "multiple of 32"),
        ((128, 0), (64, 128), "below 128"),
        ((0, 0), (16, 128), "32, 64, 128 rows"),
        ((0, 32), (32, 128), "columns are not tiled"),
        ((0, 0), (128, 64), "columns are not tiled"),
        ((0, 0), (64, 128), "contracts over 96 partitions, the tile has 64 rows"),
    ],
)
def test_refuses_wrong_tiles(position: tuple[int, ...], size: tuple[int, ...], match: str) -> None:
    refuse(lambda a, b: product(a, b, tile_position=position, tile_size=size), match)


def test_row_tiles_of_32_need_gen3() -> None:
    refuse(
        lambda a, b: product(a, b, tile_position=(0, 0), tile_size=(32, 128)),
        "64, 128 rows",
        A[:32],
        B[:32],
        target="trn1",
    )
