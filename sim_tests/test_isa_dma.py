# SPDX-License-Identifier: Apache-2.0
"""dma_copy and dma_transpose: values against NumPy, and what they refuse."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from launching import launch, load, nisa, nl, outputs, store

from nki_bn.simulator import NkiValidationError, UninitializedReadError

RNG = np.random.default_rng(0)
BF16 = np.dtype(ml_dtypes.bfloat16)


def normal(*shape: int, dtype: Any = np.float32) -> Any:
    return RNG.normal(size=shape).astype(dtype)


def round_trip(x: Any) -> Any:
    return store(load(x))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16, np.int32, np.uint8, np.bool_])
def test_copies_every_dtype_bit_by_bit(dtype: Any) -> None:
    x = (100 * normal(128, 33)).astype(dtype)
    result = outputs(round_trip, x)
    assert result.dtype == x.dtype
    np.testing.assert_array_equal(result, x)


def test_keeps_integers_that_float32_cannot_hold() -> None:
    x = np.array([[2**31 - 1, 2**24 + 1, -(2**31)]], np.int32)
    np.testing.assert_array_equal(outputs(round_trip, x), x)


def test_keeps_the_payload_of_nan() -> None:
    x = np.array([[0x7FC01234, 0xFFC00001]], np.uint32).view(np.float32)
    np.testing.assert_array_equal(outputs(round_trip, x).view(np.uint32), x.view(np.uint32))


def converted(x: Any, dtype: Any) -> Any:
    result = nl.ndarray(x.shape, dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=result, src=x)
    return result


@pytest.mark.parametrize(
    ("given", "wanted", "expected"),
    [
        (np.array([1.0 + 2**-9, 3e38], np.float32), "bfloat16", np.array([1.0, 3e38]).astype(BF16)),
        (np.array([2**24 + 1], np.int32), "int16", np.array([2**15 - 1], np.int16)),
        (np.array([0.5, 1.5, -2.5, 300.0], np.float32), "uint8", np.array([0, 2, 0, 255], np.uint8)),
        (np.array([2**24 + 1], np.int32), "float32", np.array([2**24], np.float32)),
        (np.array([2**24 + 1], np.int32), "uint32", np.array([2**24], np.uint32)),
    ],
)
def test_converts_through_float32(given: Any, wanted: str, expected: Any) -> None:
    np.testing.assert_array_equal(outputs(converted, given, wanted), expected)


@pytest.mark.parametrize("shape", [(6, 1), (1, 6), (2, 3), (6,)])
def test_pairs_elements_of_any_shapes_in_row_major_order(shape: tuple[int, ...]) -> None:
    x = normal(6)

    def kernel(x: Any) -> Any:
        result = nl.ndarray(shape, x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=result, src=x)
        return result

    np.testing.assert_array_equal(outputs(kernel, x), x.reshape(shape))


def test_fills_all_partition_bands_with_one_copy() -> None:
    x = normal(4, 8, 5)

    def kernel(x: Any) -> Any:
        return store(load(x.permute((1, 0, 2)), (32, 5)))

    np.testing.assert_array_equal(outputs(kernel, x), x.transpose(1, 0, 2).reshape(32, 5))


def test_source_may_repeat_with_stride_zero_and_destination_may_be_strided() -> None:
    x = normal(1, 5)

    def kernel(x: Any) -> Any:
        result = nl.ndarray((7, 10), x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=result[:, 0::2], src=x.ap([[0, 7], [1, 5]]))
        nisa.dma_copy(dst=result[:, 1::2], src=x.broadcast(0, 7))
        return result

    np.testing.assert_array_equal(outputs(kernel, x), np.broadcast_to(np.repeat(x, 2, axis=1), (7, 10)))


def test_copies_within_sbuf_and_within_hbm() -> None:
    x = normal(4, 6)

    def kernel(x: Any) -> Any:
        tile = nl.ndarray((96, 6), x.dtype)
        between = nl.ndarray((4, 6), x.dtype, buffer=nl.private_hbm)
        nisa.dma_copy(dst=between, src=x)
        nisa.dma_copy(dst=tile[32:36], src=between)
        nisa.dma_copy(dst=tile[64:68], src=tile[32:36])
        return store(tile[64:68])

    np.testing.assert_array_equal(outputs(kernel, x), x)


def row(x: Any, index: Any, **options: Any) -> Any:
    """Row ``index`` of x (a tile or register, read at run time), over a tile of zeros."""
    tile = nl.ndarray((1, x.shape[1]), x.dtype)
    nisa.memset(tile, 0)
    nisa.dma_copy(
        dst=tile, src=x.ap([[x.shape[1], 1], [1, x.shape[1]]], scalar_offset=index, indirect_dim=0), **options
    )
    return store(tile)


def from_register(x: Any, value: int, **options: Any) -> Any:
    return row(x, nisa.register_alloc(value), **options)


def from_tile(x: Any, index: Any) -> Any:
    return row(x, load(index))


@pytest.mark.parametrize("kernel", [from_register, from_tile])
def test_reads_the_row_that_a_run_time_index_selects(kernel: Any) -> None:
    x = normal(5, 3)
    index = 3 if kernel is from_register else np.array([[3]], np.int32)
    np.testing.assert_array_equal(outputs(kernel, x, index), x[3:4])


def test_writes_the_row_that_a_run_time_index_selects() -> None:
    x = normal(1, 3)

    def kernel(x: Any, out: Any) -> None:
        nisa.dma_copy(dst=out.ap([[3, 1], [1, 3]], scalar_offset=nisa.register_alloc(2), indirect_dim=0), src=x)

    out = np.zeros((4, 3), np.float32)
    launch(kernel, x, out)
    np.testing.assert_array_equal(out, np.vstack([np.zeros((2, 3)), x, np.zeros((1, 3))]))


@pytest.mark.parametrize("index", [5, -1])
def test_a_run_time_index_out_of_range_raises_or_skips(index: int) -> None:
    x = normal(5, 3)
    with pytest.raises(NkiValidationError, match=rf"run-time index {index} is out of range"):
        launch(from_register, x, index)

    def skipping(x: Any) -> Any:
        return from_register(x, index, oob_mode=nisa.oob_mode.skip)

    result = launch(skipping, x)
    np.testing.assert_array_equal(result.outputs, np.zeros((1, 3)))
    assert [record.attributes.get("skipped") for record in result.trace if record.opcode == "dma_copy"] == [True, None]


def test_a_run_time_index_whose_rows_end_outside_raises() -> None:
    def kernel(x: Any) -> Any:
        index = nisa.register_alloc(4)
        return store(load(x.ap([[3, 2], [1, 3]], scalar_offset=index, indirect_dim=0)))

    with pytest.raises(NkiValidationError, match="leads outside"):
        launch(kernel, normal(5, 3))


def test_an_index_that_was_never_written_is_found() -> None:
    def kernel(x: Any) -> Any:
        return row(x, nl.ndarray((1, 1), nl.int32))

    with pytest.raises(UninitializedReadError, match="run-time index"):
        launch(kernel, normal(5, 3))


def copy_with(x: Any, dtype: Any = None, **options: Any) -> Any:
    result = nl.ndarray(x.shape, dtype or x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=result, src=x, **options)
    return result


def refusal(match: str, *, error: type[Exception] = NkiValidationError, target: str = "trn2", **options: Any) -> None:
    with pytest.raises(error, match=match):
        launch(lambda x: copy_with(x, **options), normal(4, 4), target=target)


def test_modes_engines_and_priorities_that_are_accepted() -> None:
    x = normal(4, 4)
    hwdge = {"dge_mode": nisa.dge_mode.hwdge}
    cases: list[dict[str, Any]] = [
        {},
        {"dge_mode": nisa.dge_mode.none},
        {"dge_mode": nisa.dge_mode.swdge},
        {"dge_mode": 3},
        hwdge,
        {**hwdge, "engine": nisa.engine.sync},
        {**hwdge, "engine": nisa.scalar_engine},
    ]
    for options in cases:
        result = launch(lambda x, options=options: copy_with(x, **options), x)
        np.testing.assert_array_equal(result.outputs, x)
    record = result.trace.records[-1]
    assert (record.attributes["dge_mode"], record.attributes["issuer"]) == ("hwdge", "scalar")
    assert launch(lambda x: copy_with(x, priority=0), x, target="trn3").trace.records[0].attributes["priority"] == 0


def test_refuses_modes_engines_and_priorities() -> None:
    hwdge = nisa.dge_mode.hwdge
    refusal("hwdge needs gen3", target="trn1", dge_mode=hwdge)
    refusal("raw bytes: dst is bfloat16, src is float32", dtype=nl.bfloat16, dge_mode=hwdge)
    refusal("engine must be sync or scalar, got vector", dge_mode=hwdge, engine=nisa.engine.vector)
    refusal("engine sync needs dge_mode.hwdge", engine=nisa.engine.sync)
    refusal("priority must be 0, 1, 2 or 3, got 4", target="trn3", priority=4)
    refusal("priority needs gen4", priority=1)
    refusal("dge_mode must be a member", error=TypeError, dge_mode=7)
    refusal("dge_mode must be a member", error=TypeError, dge_mode="hwdge")
    refusal("oob_mode must be a member", error=TypeError, oob_mode=1)
    refusal("engine must be a member", error=TypeError, engine=6)
    refusal("unexpected keyword", error=TypeError, dst_rmw_op=nl.add)


def test_refuses_psum_and_unequal_counts_and_arrays() -> None:
    def from_psum(x: Any) -> None:
        nisa.dma_copy(dst=x, src=nl.ndarray(x.shape, x.dtype, buffer=nl.psum))

    def into_psum(x: Any) -> None:
        nisa.dma_copy(dst=nl.ndarray(x.shape, x.dtype, buffer=nl.psum), src=x)

    def too_few(x: Any) -> None:
        nisa.dma_copy(dst=nl.ndarray((4, 3), x.dtype), src=x)

    def no_tensor(x: Any) -> None:
        nisa.dma_copy(dst=nl.ndarray((4, 4), x.dtype), src=1.0)

    x = normal(4, 4)
    for kernel, match in (
        (from_psum, "src is in psum"),
        (into_psum, "dst is in psum"),
        (too_few, "dst has 12 .* src has 16"),
    ):
        with pytest.raises(NkiValidationError, match=match):
            launch(kernel, x)
    with pytest.raises(TypeError, match="src must be a tensor, got float"):
        launch(no_tensor, x)


AXES = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}


def transposed(x: Any, dst: tuple[int, ...], **options: Any) -> Any:
    tile = nl.ndarray(dst, x.dtype)
    nisa.dma_transpose(dst=tile, src=x, **options)
    return store(tile)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("from_sbuf", [False, True])
@pytest.mark.parametrize("shape", [(5, 7), (5, 3, 7), (5, 3, 2, 7)])
def test_transposes_by_rank(shape: tuple[int, ...], from_sbuf: bool, given: bool) -> None:
    x = normal(*shape, dtype=BF16)
    axes = AXES[len(shape)]

    def kernel(x: Any) -> Any:
        return transposed(load(x) if from_sbuf else x, expected.shape, axes=axes if given else None)

    expected = x.transpose(axes)
    np.testing.assert_array_equal(outputs(kernel, x), expected)


def transpose_refusal(
    match: str, shape: tuple[int, ...], dst: tuple[int, ...], dtype: Any = BF16, **options: Any
) -> None:
    with pytest.raises(NkiValidationError, match=match):
        launch(lambda x: transposed(x, dst, **options), normal(*shape, dtype=dtype))


def test_transpose_refusals() -> None:
    hwdge = {"dge_mode": nisa.dge_mode.hwdge}
    transpose_refusal(r"must have shape \(7, 5\)", (5, 7), (5, 7))
    transpose_refusal(r"must have shape \(7, 3, 5\)", (5, 3, 7), (7, 15))
    transpose_refusal(r"axes must be \(2, 1, 0\)", (5, 3, 7), (7, 3, 5), axes=(2, 0, 1))
    transpose_refusal("2, 3 or 4 dimensions", (6,), (6, 1))
    transpose_refusal("swdge needs a src with a vector_offset", (5, 7), (7, 5), dge_mode=nisa.dge_mode.swdge)
    transpose_refusal("skip needs a src with a run-time index", (5, 7), (7, 5), oob_mode=nisa.oob_mode.skip)
    transpose_refusal("must have 2 bytes", (16, 7), (7, 16), np.float32, **hwdge)
    transpose_refusal("first dimension must be one of", (8, 7), (7, 8), **hwdge)
    transpose_refusal("must be a multiple of 16", (4, 3, 7), (7, 3, 4), **hwdge)


def test_transpose_refuses_axes_that_are_no_sequence() -> None:
    with pytest.raises(TypeError, match="dma_transpose axes must be a sequence of dimensions or None, got 3"):
        launch(lambda x: transposed(x, (7, 5), axes=3), normal(5, 7, dtype=BF16))


def test_hardware_transpose_within_its_limits() -> None:
    x = normal(16, 9, dtype=np.float16)
    kernel = lambda x: transposed(x, (9, 16), dge_mode=nisa.dge_mode.hwdge)  # noqa: E731
    np.testing.assert_array_equal(outputs(kernel, x), x.T)


def test_transpose_refuses_another_dtype_or_place() -> None:
    def casting(x: Any) -> None:
        nisa.dma_transpose(dst=nl.ndarray((7, 5), nl.float32), src=x)

    def into_hbm(x: Any) -> None:
        nisa.dma_transpose(dst=nl.ndarray((7, 5), x.dtype, buffer=nl.shared_hbm), src=x)

    x = normal(5, 7, dtype=BF16)
    for kernel, match in ((casting, "dtype of src, bfloat16, got float32"), (into_hbm, "dst is in shared_hbm")):
        with pytest.raises(NkiValidationError, match=match):
            launch(kernel, x)
