# SPDX-License-Identifier: Apache-2.0
"""Operands with offsets along their free dimensions (gen4): who takes them, which elements they are, limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from instructions import BF16, F32, execute, in_psum, refused, same, values
from launching import launch, load, nisa, nl, store

from nki_bn.simulator import NkiValidationError, UninitializedReadError, UnsupportedError
from nki_bn.simulator.errors import IndexRangeError

RNG = np.random.default_rng(8)
TRN3 = {"target": "trn3"}
COUNT = 40
X = values(64, 50, seed=1)
Y = values(64, COUNT, seed=2)
# Distinct offsets, so that scattering them is defined.
OFFSETS = RNG.permutation(50)[:COUNT]


def snake(offsets: Any, group: int, partitions: int) -> Any:
    """A tile whose groups of partitions all hold ``offsets``, offset i in row i % group, column i // group."""
    columns = -(-len(offsets) // group)
    one = np.zeros((group, columns), np.uint32)
    for place, offset in enumerate(offsets):
        one[place % group, place // group] = offset
    return np.tile(one, (partitions // group, 1))


INDEX = snake(OFFSETS, 16, 64)
PICKED = X[:, OFFSETS]


def spread(values: Any) -> Any:
    """Columns of zeros with ``values`` at the offsets."""
    out = np.zeros((len(values), 50), F32)
    out[:, OFFSETS] = values
    return out


def gather(call: Callable[..., Any], *arrays: Any, buffer: Any = nl.sbuf, dtype: Any = "float32") -> Any:
    """``call(dst, view, *tiles)`` with a view of the chosen columns of X."""

    def kernel(x: Any, index: Any, *others: Any) -> Any:
        source = load(x) if buffer == nl.sbuf else in_psum(load(x))
        dst = nl.ndarray((64, COUNT), dtype)
        extra = call(dst, source.indirect(load(index), COUNT), *[load(tensor) for tensor in others])
        return store(extra if hasattr(extra, "shape") else dst)

    return launch(kernel, X, INDEX, *arrays, **TRN3, numerics="ideal").outputs


def scatter(call: Callable[..., Any], *arrays: Any, buffer: Any = nl.sbuf) -> Any:
    """``call(view, *tiles)`` with a view of the chosen columns of zeros."""

    def kernel(index: Any, *others: Any) -> Any:
        out = nl.zeros((64, 50), nl.float32, buffer=buffer)
        call(out.indirect(load(index), COUNT), *[load(tensor) for tensor in others])
        return store(out)

    return launch(kernel, INDEX, *arrays, **TRN3, numerics="ideal").outputs


COLUMN = values(64, 1, seed=4)


@pytest.mark.parametrize("buffer", [nl.sbuf, nl.psum])
@pytest.mark.parametrize("engine", [nisa.engine.vector, nisa.engine.scalar])
def test_copies_gather(buffer: Any, engine: Any) -> None:
    same(gather(lambda d, v: nisa.tensor_copy(d, v, engine=engine), buffer=buffer), PICKED)


@pytest.mark.parametrize("buffer", [nl.sbuf, nl.psum])
def test_copies_scatter(buffer: Any) -> None:
    same(scatter(nisa.tensor_copy, Y, buffer=buffer), spread(Y))


def reduced(view: Any) -> Any:
    out = nl.ndarray((64, 1), nl.float32)
    nisa.tensor_reduce(out, nl.maximum, view, axis=1)
    return out


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda d, v, y, c: nisa.tensor_tensor(d, v, y, nl.add), PICKED + Y),
        (
            lambda d, v, y, c: nisa.tensor_scalar(d, v, nl.add, c, op1=nl.maximum, operand1=0.0),
            np.maximum(PICKED + COLUMN, 0),
        ),
        (lambda d, v, y, c: reduced(v), PICKED.max(1, keepdims=True)),
        (lambda d, v, y, c: nisa.tensor_scalar_reduce(d, v, nl.add, c, nl.maximum), PICKED + COLUMN),
        (
            lambda d, v, y, c: nisa.tensor_scalar_cumulative(d, v, nl.maximum, nl.maximum, -9.0),
            np.maximum.accumulate(PICKED, 1),
        ),
        (lambda d, v, y, c: nisa.activation(d, nl.relu, v), np.maximum(PICKED, 0)),
        (lambda d, v, y, c: nisa.activation_reduce(d, nl.relu, v, nl.add, None), np.maximum(PICKED, 0)),
        (lambda d, v, y, c: nisa.activate2(d, nl.relu, v, 0, 0, nl.bypass, nl.bypass), np.maximum(PICKED, 0)),
        (lambda d, v, y, c: nisa.exponential(d, v), np.exp(PICKED.astype(np.float64)).astype(F32)),
    ],
)
def test_instructions_that_gather(call: Any, expected: Any) -> None:
    same(gather(call, Y, COLUMN), expected.astype(F32))


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda v, y, c: nisa.tensor_tensor(v, y, y, nl.add), Y + Y),
        (lambda v, y, c: nisa.tensor_scalar(v, y, nl.add, c), Y + COLUMN),
        (lambda v, y, c: nisa.tensor_reduce(v, nl.add, y.expand_dim(2), axis=2), Y),
        (lambda v, y, c: nisa.tensor_scalar_reduce(v, y, nl.add, c, nl.maximum), Y + COLUMN),
        (lambda v, y, c: nisa.activation(v, nl.relu, y), np.maximum(Y, 0)),
        (lambda v, y, c: nisa.activate2(v, nl.relu, y, 0, 0, nl.bypass, nl.bypass), np.maximum(Y, 0)),
        (lambda v, y, c: nisa.exponential(v, y), np.exp(Y.astype(np.float64)).astype(F32)),
    ],
)
def test_instructions_that_scatter(call: Any, expected: Any) -> None:
    same(scatter(call, Y, COLUMN), spread(expected))


def test_a_predicate_gathers_and_its_destination_scatters() -> None:
    flags = (values(64, 50, seed=7) > 0).astype(np.uint8)

    def call(view: Any, y: Any, chosen: Any) -> None:
        index = load_index(view)
        nisa.tensor_copy_predicated(view, y, chosen.indirect(index, COUNT))

    def load_index(view: Any) -> Any:
        return view.dynamic.index

    same(scatter(call, Y, flags), spread(np.where(flags[:, OFFSETS] != 0, Y, 0)))


def test_both_sides_and_several_free_dimensions() -> None:
    """Offsets count the flattened free elements; a gather and a scatter may meet in one instruction."""

    def kernel(x: Any, index: Any) -> Any:
        offsets, out = load(index), nl.zeros((64, 50), nl.float32)
        nisa.tensor_copy(out.indirect(offsets, COUNT), load(x).reshape((64, 5, 10)).indirect(offsets, COUNT))
        return store(out)

    same(launch(kernel, X, INDEX, **TRN3).outputs, spread(PICKED))


def test_of_equal_offsets_the_last_element_stays() -> None:
    index = snake(np.zeros(16, np.uint32), 16, 16)

    def kernel(y: Any, index: Any) -> Any:
        out = nl.zeros((16, 3), nl.float32)
        nisa.tensor_copy(out.indirect(load(index)[:, 0:1], 16), load(y))
        return store(out)

    y = values(16, 16)
    result = launch(kernel, y, index, **TRN3).outputs
    same(result, np.concatenate([y[:, 15:], np.zeros((16, 2), F32)], 1))


@pytest.mark.parametrize("side", ["stationary", "moving", "dst"])
def test_products_read_offsets_from_groups_of_32(side: str) -> None:
    offsets = RNG.permutation(60)[:40]
    left, right = values(64, 60, seed=9).astype(BF16), values(64, 60, seed=10).astype(BF16)
    index = snake(offsets, 32, 64)

    def kernel(left: Any, right: Any, index: Any) -> Any:
        stationary, moving, chosen = load(left), load(right), load(index)
        shape = (40 if side == "stationary" else 60, 40 if side == "moving" else 60)
        if side == "dst":
            # Its partitions are the columns of the stationary operand.
            stationary, moving, shape = stationary[:, 0:60], moving[:, 0:40], (60, 60)
            tile = nl.ndarray((60, 2), chosen.dtype)
            nisa.memset(dst=tile, value=0)
            nisa.tensor_copy(tile[0:32], chosen[0:32])
            nisa.tensor_copy(tile[32:60], chosen[32:60])
            chosen = tile
        else:
            stationary = stationary.indirect(chosen, 40) if side == "stationary" else stationary
            moving = moving.indirect(chosen, 40) if side == "moving" else moving
        product = nl.zeros(shape, nl.float32, buffer=nl.psum)
        nisa.nc_matmul(product.indirect(chosen, 40) if side == "dst" else product, stationary, moving, accumulate=False)
        return store(product)

    a, b = left.astype(np.float64), right.astype(np.float64)
    if side == "dst":
        expected = np.zeros((60, 60))
        expected[:, offsets] = a[:, :60].T @ b[:, :40]
    else:
        expected = a[:, offsets].T @ b if side == "stationary" else a.T @ b[:, offsets]
    result = launch(kernel, left, right, index, **TRN3).outputs
    np.testing.assert_allclose(result, expected, atol=64 * 2.0**-24 * np.abs(a).max() * np.abs(b).max() * 64)


# --- limits -------------------------------------------------------------------------------------------------------


def refuse(match: str, call: Callable[..., Any], error: type[Exception] = NkiValidationError, **options: Any) -> None:
    refused(match, call, X, INDEX, error=error, shape=(64, COUNT), **{**TRN3, **options})


def test_needs_gen4() -> None:
    refuse(
        "indirect operands need gen4 or later, the target is gen3",
        lambda d, x, i: nisa.tensor_copy(d, x.indirect(i, COUNT)),
        target="trn2",
    )


def test_refused_views() -> None:
    refuse("must have shape \\(64, K\\), got \\(32, 3\\)", lambda d, x, i: x.indirect(i[0:32], 3))
    refuse("indirect index is float32", lambda d, x, i: x.indirect(x, 3))
    refuse("indirect index is in psum; accepted: sbuf", lambda d, x, i: x.indirect(in_psum(i), 3))
    refuse("num_elem must be 1 to 192, got 193", lambda d, x, i: x.indirect(i, 193))
    refuse("needs a tile on chip", lambda d, x, i: store(x).indirect(i, 3))
    refuse("one run-time index only", lambda d, x, i: x.indirect(i, 40).indirect(i, 3))
    refuse("is indirect: it cannot be sliced", lambda d, x, i: x.indirect(i, 40)[:, 0:3])
    refuse("would need a copy", lambda d, x, i: x.reshape((64, 5, 10))[:, :, 0:5].indirect(i, 3))
    with pytest.raises(TypeError, match="indirect index must be a tile in SBUF, got 4"):
        launch(lambda x: load(x).indirect(4), X, **TRN3)


def test_refused_indices() -> None:
    copy = lambda d, x, i, count=COUNT: nisa.tensor_copy(d[:, 0:count], x.indirect(i, count))  # noqa: E731
    refuse("has too few", lambda d, x, i: nisa.tensor_copy(nl.ndarray((64, 49), nl.float32), x.indirect(i, 49)))
    refuse("has too few", lambda d, x, i: nisa.tensor_copy(nl.ndarray((8, 9), nl.float32), x[0:8].indirect(i[0:8], 9)))
    far, other = INDEX.copy(), INDEX.copy()
    far[::16, 1] = 50
    refused("accepted: 0 to 49", copy, X, far, error=IndexRangeError, shape=(64, COUNT), **TRN3)
    other[16, 0] += 1
    refused("differs between partitions 0 and 16 on", copy, X, other, error=UnsupportedError, shape=(64, COUNT), **TRN3)
    refuse(
        "reads the run-time index", lambda d, x, i: copy(d, x, nl.ndarray((64, 3), nl.uint32)), UninitializedReadError
    )


def test_refused_operands() -> None:
    view = lambda x, i: x.indirect(i, COUNT)  # noqa: E731
    tensor = lambda call: lambda d, x, i: call(d, x[:, 0:COUNT], view(x, i))  # noqa: E731
    for label, call in (
        ("tensor_tensor data2", lambda d, x, v: nisa.tensor_tensor(d, x, v, nl.add)),
        (
            "tensor_copy_predicated src",
            lambda d, x, v: nisa.tensor_copy_predicated(d, v, nl.zeros((64, COUNT), nl.uint8)),
        ),
        ("scalar_tensor_tensor data", lambda d, x, v: nisa.scalar_tensor_tensor(d, v, nl.add, 1.0, nl.add, x)),
        ("reciprocal data", lambda d, x, v: nisa.reciprocal(d, v)),
        ("memset dst", lambda d, x, v: nisa.memset(v, 0.0)),
        ("bn_stats data", lambda d, x, v: nisa.bn_stats(d[:, 0:6], v)),
        ("nc_stream_shuffle src", lambda d, x, v: nisa.nc_stream_shuffle(d, v, list(range(32)))),
        (
            "nc_transpose data",
            lambda d, x, v: nisa.nc_transpose(nl.ndarray((COUNT, 64), nl.float32, buffer=nl.psum), v),
        ),
    ):
        refuse(f"{label} cannot be indirect", tensor(call))
    narrow = lambda c, i: nl.ndarray((64, 1), nl.float32).indirect(i, 1)  # noqa: E731
    refuse(
        "activation scale cannot be indirect",
        lambda d, x, i: nisa.activation(d, nl.exp, x[:, 0:COUNT], scale=narrow(x, i)),
    )


def test_scalar_does_not_scatter_into_psum() -> None:
    def into(d: Any, x: Any, i: Any, act: Callable[..., Any]) -> None:
        act(nl.ndarray((64, 50), nl.float32, buffer=nl.psum).indirect(i, COUNT), x[:, 0:COUNT])

    for act in (
        lambda v, x: nisa.activation(v, nl.exp, x),
        lambda v, x: nisa.tensor_copy(v, x, engine=nisa.engine.scalar),
        lambda v, x: nisa.activate2(v, nl.exp, x, 0, 0, nl.bypass, nl.bypass),
    ):
        refuse("on engine scalar cannot scatter into psum", lambda d, x, i, act=act: into(d, x, i, act))


def placed(partition: int, dtype: str, columns: int, byte: int, buffer: Any = nl.sbuf) -> Any:
    made = nl.ndarray((32, columns), dtype, buffer=buffer, address=(partition, byte))
    nisa.memset(dst=made, value=0)
    return made


def test_first_partitions_of_tiles_and_indices() -> None:
    def kernel(data: int, index: int, *, scatters: bool, buffer: Any = nl.sbuf) -> Any:
        def body(d: Any, x: Any, i: Any) -> None:
            tile, offsets = placed(data, "float32", 16, 0, buffer), placed(index, "uint32", 1, 2048)
            view = tile.indirect(offsets, 16)
            plain = placed(data, "float32", 16, 4096)
            if scatters:
                nisa.tensor_copy(placed(data, "float32", 20, 8192).indirect(offsets, 16), plain)
            else:
                nisa.tensor_copy(plain, view)

        return body

    lenient = {**TRN3, "strict": False}
    execute(kernel(32, 32, scatters=False), X, INDEX, **lenient)
    execute(kernel(64, 64, scatters=True), X, INDEX, **lenient)
    refuse("tensor_copy src: its index starts on partition 64, .* on partition 32", kernel(32, 64, scatters=False))
    refuse("tensor_copy dst: its index starts on partition 96, .* on partition 0", kernel(0, 96, scatters=True))
    inner = lambda d, x, i: nisa.tensor_copy(d[0:16], x[16:32].indirect(i[16:32], COUNT))  # noqa: E731
    refuse("index starts on partition 16; accepted: multiples of 32", inner)


def test_limits_of_products() -> None:
    def product(dtype: str, side: str, **options: Any) -> Any:
        def body(d: Any, x: Any, i: Any) -> None:
            both = {label: nl.zeros((64, 50), dtype) for label in ("stationary", "moving")}
            both[side] = both[side].indirect(i, 32)
            shape = (32, 50) if side == "stationary" else (50, 32)
            nisa.nc_matmul(nl.ndarray(shape, nl.float32, buffer=nl.psum), **both, **options)

        return body

    refuse("indirect stationary of float32; accepted: 16 bits or float8", product("float32", "stationary"))
    refuse("indirect moving of float32; accepted", product("float32", "moving"))
    refuse("indirect moving cannot be a transpose", product("bfloat16", "moving", is_transpose=True))
    tiled = {"tile_position": (64, 0), "tile_size": (64, 128)}
    refuse("indirect stationary takes no tile_position", product("bfloat16", "stationary", **tiled))


def test_only_elements_that_are_meant_have_to_be_written() -> None:
    def kernel(y: Any, index: Any) -> Any:
        wide, offsets = nl.ndarray((64, 50), nl.float32), load(index)
        nisa.tensor_copy(wide.indirect(offsets, COUNT), load(y))
        out = nl.ndarray((64, COUNT), nl.float32)
        nisa.tensor_copy(out, wide.indirect(offsets, COUNT))
        return store(out), wide

    same(launch(lambda y, i: kernel(y, i)[0], Y, INDEX, **TRN3).outputs, Y)
    with pytest.raises(UninitializedReadError, match="640 elements were never written"):
        launch(lambda y, i: store(kernel(y, i)[1]), Y, INDEX, **TRN3)
