# SPDX-License-Identifier: Apache-2.0
"""On-chip copies, constants, shuffles, transposes and registers: values against NumPy, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import launch, load, nisa, nl, outputs, store

from nki_bn.simulator import NkiValidationError

RNG = np.random.default_rng(1)
BF16 = np.dtype(ml_dtypes.bfloat16)
X = RNG.normal(size=(64, 24)).astype(np.float32)


def refuse(
    kernel: Callable[..., Any],
    match: str,
    *args: Any,
    error: type[Exception] = NkiValidationError,
    target: str = "trn2",
) -> None:
    with pytest.raises(error, match=match):
        launch(kernel, *(args or (X,)), target=target)


def same_bits(left: Any, right: Any) -> None:
    assert left.dtype == right.dtype
    np.testing.assert_array_equal(np.ascontiguousarray(left).view(np.uint8), np.ascontiguousarray(right).view(np.uint8))


# --- tensor_copy ----------------------------------------------------------------------------------


def copied(
    x: Any,
    buffer: Any = nl.sbuf,
    dtype: Any = None,
    engine: Any = nisa.engine.unknown,
    shape: tuple[int, ...] | None = None,
) -> Any:
    to = nl.ndarray(shape or x.shape, dtype or x.dtype, buffer=buffer)
    nisa.tensor_copy(dst=to, src=load(x), engine=engine)
    return store(to)


@pytest.mark.parametrize("engine", [nisa.engine.vector, nisa.engine.scalar, nisa.engine.gpsimd, nisa.vector_engine])
def test_copies_of_one_dtype_keep_bits(engine: Any) -> None:
    x = np.array([[2**31 - 1, 2**24 + 1, -(2**31), 0x7FC01234]], np.int32)
    same_bits(outputs(lambda x: copied(x, engine=engine), x), x)
    same_bits(outputs(lambda x: copied(x, engine=engine), x.view(np.float32)), x.view(np.float32))


def test_copies_of_other_dtypes_go_through_float32() -> None:
    big = np.array([[2**24 + 1, -300, 70000]], np.int32)
    np.testing.assert_array_equal(outputs(lambda x: copied(x, dtype=nl.uint32), big), np.array([[2**24, 0, 70000]]))
    np.testing.assert_array_equal(
        outputs(lambda x: copied(x, dtype=nl.int8), X * 200), np.clip(np.rint(X * 200), -128, 127).astype(np.int8)
    )
    same_bits(outputs(lambda x: copied(x, dtype=nl.bfloat16), X), X.astype(BF16))


def test_copies_through_psum_between_ranks() -> None:
    np.testing.assert_array_equal(outputs(lambda x: copied(x, nl.psum, shape=(64, 4, 6)), X), X.reshape(64, 4, 6))


def test_copies_half_to_half_and_into_strided_columns() -> None:
    def kernel(x: Any) -> Any:
        tile = nl.ndarray((128, 48), x.dtype)
        nisa.dma_copy(dst=tile[0:64, 0:24], src=x)
        nisa.tensor_copy(dst=tile[64:128, 1::2], src=tile[0:64, 0:24])
        return store(tile[64:128, 1::2])

    np.testing.assert_array_equal(outputs(kernel, X), X)


def test_copies_onto_itself_shifted_from_a_snapshot() -> None:
    def kernel(x: Any) -> Any:
        tile = load(x)
        nisa.tensor_copy(dst=tile[:, 1:24], src=tile[:, 0:23])
        return store(tile)

    np.testing.assert_array_equal(outputs(kernel, X), np.hstack([X[:, :1], X[:, :-1]]))


def test_copies_the_columns_that_a_register_selects() -> None:
    def kernel(x: Any) -> Any:
        tile, part = load(x), nl.ndarray((64, 4), x.dtype)
        index = nisa.register_alloc(5)
        nisa.tensor_copy(dst=part, src=tile.ap([[24, 64], [1, 4]], scalar_offset=index, indirect_dim=1))
        return store(part)

    np.testing.assert_array_equal(outputs(kernel, X), X[:, 5:9])


def test_tensor_copy_refusals() -> None:
    for name in ("tensor", "dma", "sync"):
        refuse(lambda x, name=name: copied(x, engine=nisa.engine[name]), f"cannot run on engine {name}")
    refuse(lambda x: copied(x, nl.psum, engine=nisa.engine.gpsimd), "dst is in psum, which engine gpsimd cannot access")
    refuse(lambda x: copied(x, engine=nisa.engine.scalar), "scalar needs gen3", target="trn1")
    refuse(lambda x: copied(x, shape=(64, 23)), "dst has 23 elements per partition, src has 24")
    refuse(lambda x: copied(x, shape=(32, 48)), "dst has 32 partitions, src has 64")
    refuse(lambda x: copied(x, engine=5), "engine must be a member", error=TypeError)
    refuse(lambda x: nisa.tensor_copy(dst=nl.ndarray(x.shape, x.dtype), src=x), "src is in private_hbm")
    refuse(
        lambda x: nisa.tensor_copy(dst=nl.ndarray(x.shape, x.dtype), src=1.0), "src must be a tensor", error=TypeError
    )


# --- tensor_copy_predicated -----------------------------------------------------------------------

PREDICATE = RNG.integers(0, 3, size=X.shape).astype(np.uint8)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_copies_where_the_predicate_holds(dtype: Any, reverse: bool) -> None:
    def kernel(x: Any, y: Any, predicate: Any) -> Any:
        to = load(y)
        nisa.tensor_copy_predicated(dst=to, src=load(x), predicate=load(predicate, (64, 6, 4)), reverse_pred=reverse)
        return store(to)

    y = -X
    where = (PREDICATE != 0) != reverse
    np.testing.assert_array_equal(outputs(kernel, X, y, PREDICATE.astype(dtype)), np.where(where, X, y))


def test_copies_a_number_where_the_predicate_holds() -> None:
    def kernel(x: Any, predicate: Any) -> Any:
        to = load(x)
        nisa.tensor_copy_predicated(dst=to, src=-np.inf, predicate=load(predicate))
        return store(to)

    np.testing.assert_array_equal(outputs(kernel, X, PREDICATE), np.where(PREDICATE != 0, -np.inf, X))


def test_a_predicated_copy_writes_only_what_it_copies() -> None:
    def kernel(x: Any, predicate: Any) -> Any:
        to = nl.ndarray(x.shape, x.dtype)
        nisa.tensor_copy_predicated(dst=to, src=load(x), predicate=load(predicate))
        return store(to)

    result = outputs(kernel, X, PREDICATE, strict=False)
    np.testing.assert_array_equal(result, np.where(PREDICATE != 0, X, np.nan))
    with pytest.raises(NkiValidationError, match=f"{(PREDICATE == 0).sum()} elements were never written"):
        launch(kernel, X, PREDICATE)


def test_predicated_refusals() -> None:
    def kernel(x: Any, predicate: Any, dtype: Any = None, place: Any = nl.sbuf) -> None:
        source = nl.ndarray(x.shape, dtype or x.dtype, buffer=place)
        nisa.memset(source, 0.0)
        chosen = nl.ndarray(predicate.shape, predicate.dtype, buffer=place)
        nisa.memset(chosen, 1)
        nisa.tensor_copy_predicated(dst=load(x), src=source, predicate=chosen)

    refuse(kernel, "uint8, uint16 or uint32, got int8", X, PREDICATE.astype(np.int8))
    refuse(lambda x, p: kernel(x, p, nl.bfloat16), "dtype of dst, float32, got bfloat16", X, PREDICATE)
    refuse(lambda x, p: kernel(x, p, place=nl.psum), "both in psum", X, PREDICATE)
    refuse(kernel, "dst has 24 elements per partition, predicate has 23", X, PREDICATE[:, :23])


# --- memset ---------------------------------------------------------------------------------------


def filled(x: Any, value: Any, dtype: Any, **options: Any) -> Any:
    tile = nl.ndarray((4, 3), dtype, **{key: options.pop(key) for key in ("buffer",) if key in options})
    nisa.memset(tile, value, **options)
    return store(tile)


@pytest.mark.parametrize(
    ("value", "dtype", "numpy"),
    [
        (0, "float32", np.float32),
        (-3, "float32", np.float32),
        (float("-inf"), "float32", np.float32),
        (float("nan"), "float32", np.float32),
        (1.0, "bfloat16", BF16),
        (np.inf, "bfloat16", BF16),
        (1 / 3, "bfloat16", BF16),
        (-1, "int32", np.int32),
        (2**24 + 1, "int32", np.int32),
        (-1, "int8", np.int8),
        (255, "uint8", np.uint8),
        (2**32 - 1, "uint32", np.uint32),
        (np.float32(0.1), "float32", np.float32),
        (np.int64(7), "int16", np.int16),
    ],
)
def test_fills_with_a_constant(value: Any, dtype: str, numpy: Any) -> None:
    np.testing.assert_array_equal(outputs(lambda x: filled(x, value, dtype), X), np.full((4, 3), value, numpy))


def test_memset_refusals() -> None:
    refuse(lambda x: filled(x, 1.0, nl.int32), "value 1.0 for a int32 tile: integer dtypes take integers")
    refuse(lambda x: filled(x, 256, nl.uint8), "accepted are 0 to 255")
    refuse(lambda x: filled(x, -1, nl.uint32), "accepted are 0 to 4294967295")
    refuse(lambda x: filled(x, 1, nl.float8_e4m3fn_x4), "packed dtypes take 0 only")
    refuse(lambda x: filled(x, "0", nl.float32), "value must be a number", error=TypeError)
    refuse(lambda x: filled(x, 0, nl.float32, engine=nisa.engine.scalar), "cannot run on engine scalar")
    refuse(lambda x: filled(x, 0, nl.float32, engine=nisa.engine.gpsimd, buffer=nl.psum), "psum, which engine gpsimd")
    refuse(lambda x: nisa.memset(x, 0.0), "dst is in private_hbm")


# --- nc_stream_shuffle ----------------------------------------------------------------------------


def shuffled(x: Any, mask: list[int], rows: int, start: float | None = None) -> Any:
    source = load(x)
    to = nl.ndarray((rows, x.shape[1]), x.dtype)
    if start is not None:
        nisa.memset(to, start)
    nisa.nc_stream_shuffle(dst=to, src=source, shuffle_mask=mask)
    return store(to)


@given(mask=st.lists(st.sampled_from([*range(32), 255]), min_size=32, max_size=32))
@settings(max_examples=25, deadline=None)
def test_shuffles_every_quadrant_alike(mask: list[int]) -> None:
    expected = np.full_like(X, 9.0)
    for row in range(64):
        if mask[row % 32] != 255:
            expected[row] = X[row // 32 * 32 + mask[row % 32]]
    np.testing.assert_array_equal(outputs(lambda x: shuffled(x, mask, 64, 9.0), X), expected)


def test_shuffles_in_place() -> None:
    def kernel(x: Any) -> Any:
        tile = load(x)
        nisa.nc_stream_shuffle(dst=tile, src=tile, shuffle_mask=list(range(31, -1, -1)))
        return store(tile)

    np.testing.assert_array_equal(outputs(kernel, X), X.reshape(2, 32, 24)[:, ::-1].reshape(64, 24))


def test_spreads_one_partition_over_a_quadrant() -> None:
    x = X[:1]
    np.testing.assert_array_equal(outputs(lambda x: shuffled(x, [0] * 32, 32), x), np.repeat(x, 32, axis=0))


def test_shuffles_between_quadrants_and_keeps_bits() -> None:
    def kernel(x: Any) -> Any:
        tile = nl.ndarray((128, 24), x.dtype)
        nisa.dma_copy(dst=tile[32:64], src=x)
        nisa.nc_stream_shuffle(dst=tile[96:128], src=tile[32:64], shuffle_mask=[1, 0, *range(2, 32)])
        return store(tile[96:128])

    x = RNG.integers(0, 2**32, size=(32, 24), dtype=np.uint32).view(np.float32)
    same_bits(outputs(kernel, x), x[[1, 0, *range(2, 32)]])


@pytest.mark.parametrize("mask", [3, [0.5, *range(1, 32)]])
def test_a_shuffle_mask_is_a_sequence_of_integers(mask: Any) -> None:
    with pytest.raises(TypeError, match="nc_stream_shuffle shuffle_mask must be a"):
        outputs(lambda x: shuffled(x, mask, 64), X)


def test_shuffle_refusals() -> None:
    straight = list(range(32))
    refuse(lambda x: shuffled(x, straight[:31], 64), "must have 32 entries, got 31")
    refuse(lambda x: shuffled(x, [32, *straight[1:]], 64), "0 to 31 or 255")
    refuse(lambda x: shuffled(x, straight, 32), "reads partition 31 of src, which has 8", X[:8])

    def casting(x: Any) -> None:
        nisa.nc_stream_shuffle(dst=nl.ndarray(x.shape, nl.bfloat16), src=load(x), shuffle_mask=straight)

    def narrowing(x: Any) -> None:
        nisa.nc_stream_shuffle(dst=nl.ndarray((64, 23), x.dtype), src=load(x), shuffle_mask=straight)

    def starting(x: Any) -> None:
        tile = nl.ndarray((128, 24), x.dtype)
        nisa.memset(tile, 0.0)
        nisa.nc_stream_shuffle(dst=tile[32:64], src=tile[0:64], shuffle_mask=straight)

    refuse(casting, "dtype of src, float32, got bfloat16")
    refuse(narrowing, "dst has 23 elements per partition, src has 24")
    refuse(starting, "dst: 64 partitions may start at 0, 64, got 32")


# --- nc_transpose ---------------------------------------------------------------------------------


def turned(
    x: Any,
    buffer: Any = nl.psum,
    dtype: Any = None,
    engine: Any = nisa.engine.unknown,
    shape: tuple[int, ...] | None = None,
) -> Any:
    columns = int(np.prod(x.shape[1:]))
    to = nl.ndarray(shape or (columns, x.shape[0]), dtype or x.dtype, buffer=buffer)
    nisa.nc_transpose(dst=to, data=load(x), engine=engine)
    return store(to)


@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16])
def test_transposes_on_the_tensor_engine_keep_bits(dtype: Any) -> None:
    x = RNG.integers(0, 2**16, size=(128, 74), dtype=np.uint16).view(dtype)
    result = launch(turned, x)
    same_bits(result.outputs, x.T)
    assert [record.engine for record in result.trace if record.opcode == "nc_transpose"] == ["tensor"]


def test_transposes_flatten_free_dimensions() -> None:
    x = X.reshape(64, 4, 6)
    np.testing.assert_array_equal(outputs(turned, x), X.T)


def test_transposes_on_the_vector_engine() -> None:
    x = X[:32]
    for buffer, engine in ((nl.sbuf, nisa.engine.unknown), (nl.psum, nisa.engine.vector)):
        result = launch(lambda x, buffer=buffer, engine=engine: turned(x, buffer, engine=engine), x)
        np.testing.assert_array_equal(result.outputs, x.T)
        assert [record.engine for record in result.trace if record.opcode == "nc_transpose"] == ["vector"]


def test_transposes_widen_narrow_floats_into_a_float32_tile() -> None:
    x = X.astype(BF16)
    np.testing.assert_array_equal(outputs(lambda x: turned(x, dtype=nl.float32), x), x.astype(np.float32).T)


def test_transposes_a_column_repeated_with_stride_zero() -> None:
    def kernel(x: Any) -> Any:
        to = nl.ndarray((24, 64), x.dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=to, data=load(x)[:, 3:4].broadcast(1, 24))
        return store(to)

    np.testing.assert_array_equal(outputs(kernel, X), np.repeat(X[:, 3:4].T, 24, axis=0))


def test_nan_stays_in_its_lane_except_on_gen2() -> None:
    x = X[:24].copy()
    x[5, 7] = np.nan
    np.testing.assert_array_equal(outputs(turned, x), x.T)
    spread = outputs(turned, x, target="trn1")
    # A product with the identity: the row of the result that meets the NaN is lost, the others are exact.
    assert np.isnan(spread[7]).all()
    np.testing.assert_array_equal(np.delete(spread, 7, axis=0), np.delete(x.T, 7, axis=0))


def test_transposes_carry_unwritten_partitions_along_in_plain_runs() -> None:
    def kernel(x: Any) -> Any:
        tile, to = nl.ndarray((128, 24), x.dtype), nl.ndarray((24, 128), x.dtype, buffer=nl.psum)
        nisa.dma_copy(dst=tile[0:64], src=x)
        nisa.nc_transpose(dst=to, data=tile)
        return store(to)

    result = outputs(kernel, X, strict=False)
    np.testing.assert_array_equal(result[:, :64], X.T)
    assert np.isnan(result[:, 64:]).all()


def test_transpose_refusals() -> None:
    wide = np.zeros((64, 129), np.float32)
    refuse(lambda x: turned(x, shape=(128, 64)), "engine tensor takes at most 128 x 128", wide)
    refuse(lambda x: turned(x, nl.sbuf), "engine vector takes at most 32 x 32")
    refuse(lambda x: turned(x, nl.sbuf, engine=nisa.engine.tensor), "reads sbuf and writes psum; .* dst in sbuf")
    refuse(lambda x: turned(x, engine=nisa.engine.scalar), "cannot run on engine scalar")
    refuse(lambda x: turned(x, shape=(64, 24)), r"must have shape \(24, 64\)")
    refuse(lambda x: turned(x, dtype=nl.bfloat16), "dtype of data, float32, got bfloat16")
    refuse(lambda x: turned(x[0:32], nl.sbuf, nl.float32), "dtype of data, int32, got float32", X.astype(np.int32))


# --- registers ------------------------------------------------------------------------------------


def test_registers_load_move_and_store() -> None:
    def kernel(x: Any) -> Any:
        first, second = nisa.register_alloc(), nisa.register_alloc(7)
        nisa.register_load(first, x[0:1, 2:3])
        result, tile = nl.ndarray((1, 3), nl.int32, buffer=nl.shared_hbm), nl.ndarray((1, 1), nl.int32)
        nisa.register_store(result[0:1, 0:1], first)
        nisa.register_store(result[0:1, 1:2], second)
        nisa.register_move(second, first)
        nisa.register_move(first, -3)
        nisa.register_store(tile, nisa.register_alloc(load(x)[0:1, 0:1]))
        nisa.dma_copy(dst=result[0:1, 2:3], src=tile)
        assert (second.state, first.state) == (5, -3)
        return result

    np.testing.assert_array_equal(outputs(kernel, np.array([[9, 8, 5]], np.int32)), [[5, 7, 9]])


@pytest.mark.parametrize("use", [bool, int, range, lambda register: [0][register]])
def test_python_cannot_look_into_a_register(use: Callable[[Any], Any]) -> None:
    refuse(lambda x: use(nisa.register_alloc(1)), "unknown when a kernel is compiled", error=TypeError)


def test_register_refusals() -> None:
    refuse(lambda x: nisa.register_move(nisa.VirtualRegister(3, frozen=True), 1), "frozen")
    refuse(lambda x: nisa.register_load(nisa.VirtualRegister(3, frozen=True), x[0:1, 0:1]), "frozen")
    refuse(lambda x: nisa.register_move(nisa.register_alloc(), nisa.register_alloc()), "no value yet")
    refuse(lambda x: nisa.register_store(x[0:1, 0:1], nisa.register_alloc()), "no value yet")
    refuse(lambda x: nisa.register_load(nisa.register_alloc(), x), "one element, got shape")
    refuse(lambda x: nisa.register_load(nisa.register_alloc(), nl.ndarray((1, 1), nl.int32, buffer=nl.psum)), "in psum")
    refuse(lambda x: nisa.register_alloc(1.5), "integer", error=TypeError)
    refuse(lambda x: nisa.register_move(3, 1), "dst must be a register", error=TypeError)
