# SPDX-License-Identifier: Apache-2.0
"""Views of tensors: indexing and view methods against NumPy, on chip and in HBM, and what they refuse."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import launch, load, nisa, nl, outputs, store

from nki_bn.simulator import NkiValidationError

PLACES = ("hbm", "sbuf", "psum")
few = settings(max_examples=60, deadline=None)


def numbered(*shape: int, dtype: Any = np.int32) -> Any:
    return np.arange(prod(shape)).reshape(shape).astype(dtype)


def placed(x: Any, place: str) -> Any:
    """Inside a kernel: the HBM tensor ``x``, or a tile with its elements that starts inside a partition and a bank."""
    if place == "hbm":
        return x
    address = (64, 2048) if x.shape[0] <= 64 else (0, 2048)
    tile = nl.ndarray(x.shape, x.dtype, buffer=nl.psum if place == "psum" else nl.sbuf, address=address)
    nisa.tensor_copy(dst=tile, src=load(x)) if place == "psum" else nisa.dma_copy(dst=tile, src=x)
    return tile


def seen(x: Any, view: Callable[[Any], Any], place: str) -> Any:
    """The elements of ``view(tensor)`` for a tensor with the elements of ``x``."""
    found: list[Any] = []

    def kernel(x: Any) -> None:
        result = view(placed(x, place))
        values = result.array()
        assert (result.shape, result.ndim, result.size) == (values.shape, values.ndim, values.size)
        found.append(values.copy())

    launch(kernel, x)
    return found[0]


def same(x: Any, view: Callable[[Any], Any], expected: Any, places: tuple[str, ...] = PLACES) -> None:
    for place in places:
        result = seen(x, view, place)
        assert result.shape == expected.shape, place
        np.testing.assert_array_equal(result, expected)


def refuse(
    x: Any,
    view: Callable[[Any], Any],
    match: str,
    places: tuple[str, ...] = PLACES,
    error: type[Exception] = NkiValidationError,
) -> None:
    for place in places:
        with pytest.raises(error, match=match):
            seen(x, view, place)


ON_CHIP = PLACES[1:]


# --- indexing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "on_chip", "in_hbm"),
    [
        ((0, 0, 10), (1, 1), (1,)),
        ((slice(None), 0), (64, 64), (64, 64)),
        ((slice(None), 0, 10), (64, 1), (64,)),
        ((0, ..., slice(None)), (1, 64, 64), (64, 64)),
        ((slice(None), slice(None), slice(None, None, 2)), (64, 64, 32), (64, 64, 32)),
        ((3,), (1, 64, 64), (64, 64)),
        ((slice(2, 5), -1, slice(60, 64)), (3, 4), (3, 4)),
        ((...,), (64, 64, 64), (64, 64, 64)),
    ],
)
def test_shapes_of_indexed_tensors(key: Any, on_chip: tuple[int, ...], in_hbm: tuple[int, ...]) -> None:
    shapes: dict[str, Any] = {}

    def kernel(x: Any) -> None:
        shapes["hbm"] = x[key].shape
        shapes["sbuf"] = nl.ndarray((64, 64, 64), nl.uint8)[key].shape

    launch(kernel, np.zeros((64, 64, 64), np.uint8))
    assert shapes == {"hbm": in_hbm, "sbuf": on_chip}


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[:, 0:2.0],
        lambda t: t[:, 0 : 4 : np.float32(2)],
        lambda t: t[:, True:],
        lambda t: t.slice(1, 0.0, 2),
        lambda t: t.slice(1, False, 2),
        lambda t: t[:, 0:1].broadcast(1, 2.0),
        lambda t: t[:, 0:1].broadcast(1, True),
        lambda t: t.ap([[12, 8], [1, 2.0]]),
        lambda t: t.ap([[12, 8], [1.0, 2]]),
        lambda t: t.ap([[12, 8], [1, 2]], offset=0.0),
        lambda t: t.select(1, 0.5),
        lambda t: t.select(1, "a"),
        lambda t: t.select(1, True),
        lambda t: t.reshape((8, 3.0, 4)),
    ],
)
def test_sizes_and_indices_are_integers(view: Callable[[Any], Any]) -> None:
    refuse(numbered(8, 12), view, "must be an integer, got", error=TypeError)


@pytest.mark.parametrize("size", [0, -1])
def test_a_broadcast_has_a_size(size: int) -> None:
    refuse(numbered(8, 1), lambda t: t.broadcast(1, size), f"broadcast size must be at least 1, got {size}")


def kept_rank(x: Any, key: Any, place: str) -> Any:
    """NumPy's ``x[key]`` with the rank rules: on chip the partition stays and there are two dimensions, in HBM one."""
    if place == "hbm":
        return np.atleast_1d(x[key])
    first = key[0]
    if isinstance(first, int):
        key = (slice(first % x.shape[0], first % x.shape[0] + 1), *key[1:])
    values = x[key]
    return values if values.ndim >= 2 else values[:, None]


@st.composite
def indexed(draw: Any, place: str) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=2, max_size=4)))
    key: list[Any] = []
    for dim, size in enumerate(shape[: draw(st.integers(1, len(shape)))]):
        if draw(st.booleans()):
            key.append(draw(st.integers(-size, size - 1)))
            continue
        start = draw(st.integers(0, size - 1))
        stop = draw(st.integers(start + 1, size))
        step = draw(st.integers(1, 3)) if dim or place == "hbm" else None
        negative = draw(st.booleans())
        key.append(slice(start - size if negative else start, stop - size if negative and stop < size else stop, step))
    if len(key) == len(shape) and draw(st.booleans()) and len(shape) > 2:
        # The same with the middle left out.
        key = [key[0], Ellipsis, key[-1]]
    return shape, tuple(key)


@pytest.mark.parametrize("place", PLACES)
@given(data=st.data())
@few
def test_indexing_agrees_with_numpy(place: str, data: Any) -> None:
    shape, key = data.draw(indexed(place))
    x = numbered(*shape)
    expected = kept_rank(x, key, place)
    result = seen(x, lambda t: t[key], place)
    assert result.shape == expected.shape
    np.testing.assert_array_equal(result, expected)


def test_ds_and_numpy_integers_index() -> None:
    x = numbered(6, 10)
    same(x, lambda t: t[nl.ds(np.int64(1), 4), nl.ds(3, 5)], x[1:5, 3:8])
    same(x, lambda t: t[:, np.int32(4)], x[:, 4:5], ON_CHIP)


def test_views_of_views_share_the_storage() -> None:
    x = numbered(8, 12)
    same(x, lambda t: t[2:7][1:3, 4:][:, 1::2][0:1], x[3:4, 5::2])

    def kernel(x: Any) -> Any:
        tile = load(x)
        nisa.memset(tile[0:5][:, 3:9][:, ::3], -1)
        return store(tile)

    expected = x.copy()
    expected[0:5, 3:9:3] = -1
    np.testing.assert_array_equal(outputs(kernel, x), expected)


@pytest.mark.parametrize(
    ("key", "match"),
    [
        ((slice(0, 9),), r"slice \[0:9:None\] of dimension 0 of shape \(8, 12\) is empty or out of range"),
        ((slice(3, 3),), "empty"),
        ((slice(5, 3),), "empty"),
        ((slice(None), slice(-13, 2)), "out of range"),
        ((8,), "index 8 is out of range for dimension 0"),
        ((0, -13), "index -13 is out of range"),
        ((slice(None), slice(8, 2, -1)), "step must be at least 1"),
        ((0, 0, 0), "3 indices for shape"),
        ((..., ...), "one Ellipsis"),
    ],
)
def test_refused_indices(key: Any, match: str) -> None:
    refuse(numbered(8, 12), lambda t: t[key], match)


@pytest.mark.parametrize("key", [None, [0, 1], True, 1.0, "a", np.array([0, 1]), (slice(None), None)])
def test_refused_kinds_of_indices(key: Any) -> None:
    refuse(numbered(8, 12), lambda t: t[key], "cannot index a tensor", error=TypeError)


def test_partitions_cannot_be_strided() -> None:
    x = numbered(8, 12)
    refuse(x, lambda t: t[0:8:2], "partitions cannot be strided", ON_CHIP)
    same(x, lambda t: t[0:8:2], x[::2], ("hbm",))


# --- queries --------------------------------------------------------------------------------------


def test_a_fresh_tensor_is_row_major_and_its_partition_stride_counts_free_elements() -> None:
    def kernel(x: Any) -> None:
        tile = nl.ndarray((128, 64), nl.float32, name="tile")
        assert (tile.strides, tile.offset, tile.dtype, tile.buffer, tile.name) == (
            (64, 1),
            0,
            nl.float32,
            nl.sbuf,
            "tile",
        )
        assert tile[2:5, 4:20:3].get_pattern() == [[64, 3], [3, 6]]
        assert tile[2:5, 4:20:3].offset == 132
        assert x.strides == (12, 4, 1) and x.get_pattern() == [[12, 2], [4, 3], [1, 4]]

    launch(kernel, numbered(2, 3, 4))


def test_contiguity() -> None:
    def kernel(x: Any) -> None:
        tile = nl.ndarray((8, 4, 6), nl.float32)
        assert tile.is_contiguous() and tile[0:3].is_contiguous() and not tile[:, 0:2, 0:3].is_contiguous()
        # On chip the partition stride does not count; a dimension of size 1 never does.
        assert tile[:, 0:2].is_contiguous() and tile[:, :, 2:3].is_contiguous() is False
        assert not x[:, 0:2].is_contiguous() and x[0:1, 0:2].is_contiguous()

    launch(kernel, numbered(2, 3, 4))


def test_comparisons_with_none_are_plain_bools_and_tensors_have_no_truth() -> None:
    def kernel(x: Any) -> None:
        assert (x == None) is False and (x != None) is True  # noqa: E711
        with pytest.raises(TypeError, match="no truth value"):
            bool(x)
        with pytest.raises(TypeError, match="item assignment"):
            x[0] = 1

    launch(kernel, numbered(2, 3))


# --- view methods ---------------------------------------------------------------------------------


@given(data=st.data())
@few
def test_slice_and_select_are_indexing(data: Any) -> None:
    x = numbered(4, 5, 3)
    dim = data.draw(st.integers(0, 2))
    start = data.draw(st.integers(0, x.shape[dim] - 1))
    end = data.draw(st.integers(start + 1, x.shape[dim]))
    step = data.draw(st.integers(1, 3))
    key = (slice(None),) * dim
    places = PLACES if dim or step == 1 else ("hbm",)
    same(x, lambda t: t.slice(dim, start, end, step), x[(*key, slice(start, end, step))], places)
    same(x, lambda t: t.select(dim, start), x[(*key, start)], ("hbm",))
    same(x, lambda t: t.select(dim, start), kept_rank(x, (*key, start), "sbuf"), ON_CHIP)


def test_refused_slices_and_selects() -> None:
    x = numbered(4, 5)
    for arguments in ((1, 0, 6), (1, -1, 3), (1, 2, 2), (1, 0, 5, 0)):
        refuse(x, lambda t, arguments=arguments: t.slice(*arguments), "out of range")
    refuse(x, lambda t: t.slice(2, 0, 1), "dim 2 is not a dimension")
    refuse(x, lambda t: t.select(1, 5), "index 5 is out of range")


def test_a_run_time_index_selects_when_an_instruction_runs() -> None:
    def kernel(x: Any) -> Any:
        index = nisa.register_alloc(2)
        view = x.select(0, index)
        assert view.is_indirect() and not x.is_indirect() and view.shape == (5, 3)
        nisa.register_move(index, 3)
        return store(load(view))

    x = numbered(4, 5, 3)
    np.testing.assert_array_equal(outputs(kernel, x), x[3])
    refuse(x, lambda t: t.select(0, nisa.register_alloc(0)), "partition dimension", ON_CHIP)
    refuse(
        x, lambda t: t.select(1, nisa.register_alloc(0)).select(1, nisa.register_alloc(0)), "one run-time index only"
    )


@given(order=st.permutations(range(4)))
@few
def test_permute(order: list[int]) -> None:
    x = numbered(2, 3, 4, 5)
    same(x, lambda t: t.permute(order), x.transpose(order), PLACES if order[0] == 0 else ("hbm",))
    if order[0]:
        refuse(x, lambda t: t.permute(order), "would move the partition dimension", ON_CHIP)


def test_broadcast_expand_and_squeeze() -> None:
    x = numbered(4, 1, 5)
    same(x, lambda t: t.broadcast(1, 7), np.repeat(x, 7, axis=1))
    same(x, lambda t: t.squeeze_dim(1), x[:, 0])
    for dim in (1, 2, 3):
        same(x, lambda t, dim=dim: t.expand_dim(dim), np.expand_dims(x, dim))
    same(x, lambda t: t.expand_dim(0), x[None], ("hbm",))
    same(x[:1], lambda t: t.squeeze_dim(0), x[0], ("hbm",))
    same(x[:1], lambda t: t.broadcast(0, 3), np.repeat(x[:1], 3, axis=0), ("hbm",))
    refuse(x, lambda t: t.broadcast(2, 5), "needs size 1 in dimension 2")
    refuse(x, lambda t: t.squeeze_dim(2), "needs size 1 in dimension 2")
    refuse(x[:1], lambda t: t.squeeze_dim(0), "partition dimension", ON_CHIP)
    refuse(x[:1], lambda t: t.broadcast(0, 3), "partition dimension", ON_CHIP)
    refuse(x, lambda t: t.expand_dim(0), "not possible", ON_CHIP)
    refuse(numbered(4, 1), lambda t: t.squeeze_dim(1), "too few", ON_CHIP)


@given(sizes=st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4), free=st.booleans())
@few
def test_reshape_keeps_row_major_order(sizes: list[int], free: bool) -> None:
    x = numbered(6, 4 * prod(sizes))
    shape = [6, *sizes, -1] if free and len(sizes) < 4 else [6, *sizes[:3], prod(sizes[3:]) * 4]
    same(x, lambda t: t.reshape(shape), x.reshape(shape))


def test_reshape_of_strided_views_and_refusals() -> None:
    x = numbered(6, 8, 4)
    same(x, lambda t: t[:, 2:6].reshape((6, 2, 8)), x[:, 2:6].reshape(6, 2, 8))
    same(x, lambda t: t[:, ::2].reshape((6, 2, 2, 4)), x[:, ::2].reshape(6, 2, 2, 4))
    refuse(x, lambda t: t[:, :, ::2].permute((0, 2, 1)).reshape((6, 16)), "would need a copy")
    refuse(x, lambda t: t.reshape((6, 31)), r"shape \(6, 31\) does not hold the 192 elements")
    refuse(x, lambda t: t.reshape((-1, -1)), "more than one -1")
    refuse(x, lambda t: t.reshape((12, 16)), "would change the partition dimension", ON_CHIP)
    same(x, lambda t: t.reshape((12, 16)), x.reshape(12, 16), ("hbm",))


def test_reshape_dim_and_flatten_dims() -> None:
    x = numbered(6, 12, 2)
    for shape in ((3, 4), (2, -1), (-1, 2, 3), (1, 12)):
        sizes = x[0, :, 0].reshape(shape).shape
        same(x, lambda t, shape=shape: t.reshape_dim(1, shape), x.reshape(6, *sizes, 2))
    same(x, lambda t: t.reshape_dim(0, (2, 3)), x.reshape(2, 3, 12, 2), ("hbm",))
    same(x, lambda t: t.reshape_dim(0, (6, 1)), x[:, None])
    same(x, lambda t: t[:, ::3].reshape_dim(1, (2, 2)), x[:, ::3].reshape(6, 2, 2, 2))
    refuse(x, lambda t: t.reshape_dim(0, (2, 3)), "partition dimension", ON_CHIP)
    refuse(x, lambda t: t.reshape_dim(1, (5, -1)), "does not hold the 12 elements")
    same(x, lambda t: t.flatten_dims(1, 2), x.reshape(6, 24))
    same(x, lambda t: t.flatten_dims(0, 1), x.reshape(72, 2), ("hbm",))
    refuse(x, lambda t: t.flatten_dims(0, 1), "partition dimension", ON_CHIP)
    refuse(x, lambda t: t[:, 0:6].permute((0, 2, 1)).flatten_dims(1, 2), "would need a copy")
    refuse(x, lambda t: t.flatten_dims(2, 1), "not a range")


@pytest.mark.parametrize(
    ("src", "dst", "sizes", "einsum"),
    [
        (("b", ("h", "w")), ("b", "w", "h"), {"h": 4}, lambda x: x.reshape(6, 4, 6).transpose(0, 2, 1)),
        (("b", ("h", "w")), ("b", "h", "w"), {"w": 8}, lambda x: x.reshape(6, 3, 8)),
        (("b", "n"), ("b", "n"), None, lambda x: x),
        (("b", ("x", "y", "z")), ("b", "y", ("x", "z")), {"x": 1, "y": 4}, lambda x: x.reshape(6, 4, 6)),
    ],
)
def test_rearrange(src: Any, dst: Any, sizes: Any, einsum: Callable[[Any], Any]) -> None:
    x = numbered(6, 24)
    same(x, lambda t: t.rearrange(src, dst, sizes), einsum(x))


def test_rearrange_moves_and_merges_dimensions_in_hbm() -> None:
    x = numbered(2, 3, 4)
    same(x, lambda t: t.rearrange(("n", "c", "s"), ("c", "n", "s")), x.transpose(1, 0, 2), ("hbm",))
    same(x, lambda t: t.rearrange(("n", "c", "s"), (("n", "c"), "s")), x.reshape(6, 4), ("hbm",))
    refuse(x, lambda t: t.rearrange(("n", "c", "s"), ("c", "n", "s")), "partition dimension", ON_CHIP)
    refuse(x, lambda t: t.rearrange(("n", "c", "s"), ("n", "c")), "must hold the same names")
    refuse(x, lambda t: t.rearrange(("n", "c"), ("n", "c")), "has 2 entries for shape")


@pytest.mark.parametrize(("dtype", "numpy"), [("uint16", np.uint16), ("uint8", np.uint8), ("float32", np.float32)])
def test_view_reads_the_same_bits(dtype: str, numpy: Any) -> None:
    x = np.random.default_rng(0).integers(0, 2**31, size=(6, 10)).astype(np.int32)
    same(x, lambda t: t.view(dtype), x.view(numpy))
    same(x, lambda t: t[2:4, 3:7].reinterpret_cast(dtype), np.ascontiguousarray(x[2:4, 3:7]).view(numpy))
    back = x.view(np.uint8).reshape(6, 5, 8)
    same(back, lambda t: t[:, 1:3].view("int32"), back.view(np.int32)[:, 1:3])


def test_refused_views() -> None:
    x = numbered(6, 10, dtype=np.int16)
    refuse(x, lambda t: t[:, ::2].view("int32"), "contiguous last dimension")
    refuse(x, lambda t: t[:, 0:3].view("int32"), "not divisible")
    refuse(x, lambda t: t[:, 1:3].view("int32"), "not divisible")
    refuse(x, lambda t: t.select(1, nisa.register_alloc(0)).view("uint16"), "run-time index")
    refuse(x, lambda t: t.view("int64"), "no NKI counterpart", error=TypeError)


def test_views_have_at_most_five_dimensions() -> None:
    x = numbered(2, 2, 2, 2, 2)
    same(x, lambda t: t[:], x)
    refuse(x, lambda t: t.expand_dim(1), "at most 5 dimensions")


# --- access patterns ------------------------------------------------------------------------------


@st.composite
def patterns(draw: Any, size: int) -> tuple[list[list[int]], int]:
    pairs = [[draw(st.integers(0, 6)), draw(st.integers(1, 3))] for _ in range(draw(st.integers(1, 4)))]
    reach = sum(stride * (count - 1) for stride, count in pairs)
    return pairs, draw(st.integers(0, max(size - 1 - reach, 0)))


def strided(x: Any, pattern: list[list[int]], offset: int) -> Any:
    flat = np.ascontiguousarray(x).reshape(-1)[offset:]
    strides = [stride * flat.itemsize for stride, _ in pattern]
    return np.lib.stride_tricks.as_strided(flat, [count for _, count in pattern], strides)


@given(data=st.data())
@few
def test_patterns_over_hbm(data: Any) -> None:
    x = numbered(9, 7)
    pattern, offset = data.draw(patterns(x.size))
    same(x, lambda t: t.ap(pattern, offset=offset), strided(x, pattern, offset), ("hbm",))


@given(data=st.data())
@few
def test_patterns_over_tiles_keep_the_partition_stride(data: Any) -> None:
    x = numbered(8, 40)
    free, start = data.draw(patterns(40))
    first = data.draw(st.integers(0, 7))
    pattern = [[40, data.draw(st.integers(1, 8 - first))], *free]
    same(x, lambda t: t.ap(pattern, offset=first * 40 + start), strided(x, pattern, first * 40 + start), ON_CHIP)


def test_patterns_take_tuples_and_reinterpret() -> None:
    x = numbered(6, 10)
    same(x, lambda t: t.ap(((10, 6), (2, 5))), x[:, ::2])
    same(x, lambda t: t.ap([[20, 6], [1, 4]], offset=2, dtype=nl.int16), x.view(np.int16)[:, 2:6])
    same(x, lambda t: t[:].ap(t.get_pattern()), x)


def test_a_run_time_offset_counts_elements_of_the_base_tensor() -> None:
    def kernel(x: Any) -> Any:
        index = nisa.register_alloc(2)
        rows = load(x.ap([[20, 3], [1, 20]], scalar_offset=index, indirect_dim=0, dtype=nl.int16))
        return store(rows)

    x = numbered(6, 10)
    np.testing.assert_array_equal(outputs(kernel, x), x.view(np.int16)[2:5])


def test_a_pattern_on_a_view_that_starts_elsewhere_warns() -> None:
    x = numbered(6, 10)
    with pytest.warns(UserWarning, match="a view at offset 3"):
        same(x, lambda t: t[:, 3:].ap([[10, 6], [1, 4]]), x[:, 3:7])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(x, lambda t: t[:, 0:3].ap([[10, 6], [1, 4]]), x[:, :4])


def test_refused_patterns() -> None:
    x = numbered(6, 10)
    refuse(x, lambda t: t.ap([[10, 7], [1, 4]]), "leaves")
    refuse(x, lambda t: t.ap([[10, 6], [1, 4]], offset=-1), "leaves")
    refuse(x, lambda t: t.ap([]), "must be pairs")
    refuse(x, lambda t: t.ap([[10, 6], [1, 0]]), "count at least 1")
    refuse(x, lambda t: t.ap([[10, 6], [-1, 4]], offset=5), "negative stride")
    refuse(x, lambda t: t.ap([[20, 3], [1, 4]]), "the partition stride of .* is 10", ON_CHIP)
    refuse(x, lambda t: t.ap([[10, 6], [2, 6]]), "crosses its partitions", ON_CHIP)
    refuse(x, lambda t: t.ap([[10, 6]]), "at least 2 dimensions", ON_CHIP)
    refuse(x, lambda t: t.ap([[1, 1]] * 6), "at most 5 dimensions")
    both = {"scalar_offset": 1, "vector_offset": 2}
    refuse(x, lambda t: t.ap([[10, 6], [1, 4]], **both), "exclude each other")
    refuse(x, lambda t: t.ap([[10, 6], [1, 4]], scalar_offset=1, indirect_dim=2), "indirect_dim 2 is not a dimension")
