# SPDX-License-Identifier: Apache-2.0
"""What public kernels do, one test per habit: modules and arguments, memory, instructions."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from launching import nisa, nki, nl

from nki_bn.simulator import RaceError, RunOptions

BF16 = np.dtype(ml_dtypes.bfloat16)
RNG = np.random.default_rng(3)
X = RNG.normal(size=(64, 48)).astype(np.float32)
LENIENT = RunOptions(strict=False, numerics="ideal")

# --- modules and arguments -------------------------------------------------------------------------------------------

# Names that modules use while they are imported.
MAX_VALUE = {nl.float8_e4m3: 240.0, nl.float8_e5m2: 57344.0, nl.float32: 3.4028235e38}
TILE = nl.tile_size.pmax


def annotated(x: nl.ndarray, y: nl.NkiTensor, dtype: nki.dtype = nl.bfloat16) -> nl.ndarray:
    return x


class Mode(enum.Enum):
    double = 0
    keep = 1


@dataclass(frozen=True)
class Frozen(nl.NKIObject):
    factor: float
    sizes: list[int] = field(default_factory=lambda: [1, 2])


@dataclass
class State(nl.NKIObject):
    tile: nl.NkiTensor
    names: list[str] = field(default_factory=list)
    columns: int = 0

    def __post_init__(self) -> None:
        self.columns = self.tile.shape[1]


class Plain(nl.NKIObject):
    def __init__(self, offset: float) -> None:
        self.offset = offset


def simulate(kernel: Callable[..., Any], *args: Any, lnc: int = 1, **keywords: Any) -> Any:
    return nki.simulate(nki.jit(kernel)[lnc], LENIENT)(*args, **keywords)


def load(source: Any) -> Any:
    tile = nl.ndarray(source.shape, source.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=source)
    return tile


def store(tile: Any, dtype: Any = None) -> Any:
    out = nl.ndarray(tile.shape, dtype or tile.dtype, buffer=nl.shared_hbm)
    if tile.buffer == nl.psum:
        tile = nl.copy(tile)
    nisa.dma_copy(dst=out, src=tile)
    return out


def test_names_work_while_modules_are_imported() -> None:
    assert MAX_VALUE["float8_e4m3"] == 240.0 and TILE == 128 and annotated.__defaults__ == ("bfloat16",)


def test_objects_enums_functions_and_dtypes_are_arguments() -> None:
    def kernel(
        x: Any, frozen: Any, plain: Any, mode: Any, op: Any, shape: Any, missing: Any, text: Any, dtype: Any
    ) -> Any:
        assert missing is None and missing == None and text == "name" and mode == Mode.double  # noqa: E711
        state = State(load(x), names=[text])
        assert state.columns == shape[1] and frozen.sizes == [1, 2]
        result = nl.ndarray(shape, dtype, buffer=nl.sbuf)
        nisa.tensor_scalar(
            dst=result, data=state.tile, op0=op, operand0=frozen.factor, op1=nl.add, operand1=plain.offset
        )
        return store(result)

    result = simulate(kernel, X, Frozen(2.0), Plain(0.5), Mode.double, nl.multiply, (64, 48), None, "name", nl.float32)
    np.testing.assert_array_equal(result, X * 2 + np.float32(0.5))


def test_fields_need_neither_annotation_nor_dataclass() -> None:
    @dataclass
    class Assigned(nl.NKIObject):
        first = None
        second = 5

    class Bare(nl.NKIObject):
        shape: tuple[int, ...]
        scale: float = 2.0
        note: str
        left_out: int

        def __post_init__(self) -> None:
            self.rank = len(self.shape)

        def doubled(self) -> float:
            return self.scale * 2

    assert vars(Assigned(first=3)) == {"first": 3, "second": 5}
    bare = Bare((4, 5), note="x")
    assert (bare.shape, bare.scale, bare.note, bare.rank, bare.doubled()) == ((4, 5), 2.0, "x", 2, 4.0)
    assert Bare((4,)).note is None and bare.left_out is None
    with pytest.raises(TypeError, match="has 4 fields, got 5"):
        Bare((1,), 2.0, "x", 5, 6)


def test_plain_functions_are_kernels_and_kernels_call_helpers() -> None:
    def doubled(tile: Any) -> Any:
        result = nl.ndarray(tile.shape, tile.dtype, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=result, data=tile, op0=nl.multiply, operand0=2.0)
        return result

    def kernel(x: Any) -> Any:
        return store(doubled(doubled(load(x))))

    for made in (nki.jit(kernel), nki.simulate(kernel), nki.jit(kernel)[1], nki.jit()(kernel)):
        np.testing.assert_array_equal(made(X), X * 4)


def test_outputs_come_in_as_arguments_and_change_in_the_callers_arrays() -> None:
    def kernel(x: Any, out: Any, returns: bool = True) -> Any:
        nisa.dma_copy(dst=out, src=load(x))
        if returns:
            return out
        return None

    out = np.zeros_like(X)
    np.testing.assert_array_equal(simulate(kernel, X, out), X)
    np.testing.assert_array_equal(out, X)
    strided = np.zeros((64, 96), np.float32)[:, ::2]
    assert simulate(kernel, X, strided, returns=False) is None
    np.testing.assert_array_equal(strided, X)


def test_dtypes_and_none_compare_to_plain_bools() -> None:
    def kernel(x: Any) -> Any:
        assert x.dtype == nl.bfloat16 and x.dtype in (nl.bfloat16, nl.float16) and x.dtype != nl.float32
        assert {nl.bfloat16: 2}[x.dtype] == 2 and getattr(nl, str(x.dtype).split(".")[-1]) == x.dtype
        tile = load(x)
        assert (tile == None) is False and (tile != None) is True and tile is not None  # noqa: E711
        # In the vendor's simulator a tensor is an object like any other; strict runs refuse the question.
        assert bool(tile) is True
        return store(tile)

    assert simulate(kernel, X.astype(BF16)).dtype == BF16


# --- memory ----------------------------------------------------------------------------------------------------------


def test_allocators_place_and_reuse_addresses() -> None:
    def kernel(x: Any) -> Any:
        size = x.shape[1] * 4
        for step in range(4):
            # Two sections in turns: the third and fourth tile take the addresses of the first two.
            tile = nl.ndarray(x.shape, x.dtype, buffer=nl.sbuf, address=(0, step % 2 * size), name=f"tile_{step}")
            nisa.dma_copy(dst=tile, src=x)
            nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=float(step))
        automatic = nl.ndarray(x.shape, x.dtype, buffer=nl.sbuf, address=None)
        total = nl.ndarray(x.shape, nl.float32, buffer=nl.psum, address=(0, 3 * 2048))
        earlier = nl.ndarray(x.shape, x.dtype, buffer=nl.sbuf, address=(0, 0), name="alias")
        nisa.tensor_tensor(dst=total, data1=tile, data2=earlier, op=nl.subtract)
        nisa.tensor_copy(dst=automatic, src=total)
        return store(automatic)

    np.testing.assert_allclose(simulate(kernel, X), np.ones_like(X), atol=1e-6)


def test_cores_share_the_nth_tensor_and_exchange_by_rendezvous() -> None:
    def kernel(x: Any) -> Any:
        core, half = nl.program_id(0), x.shape[0] // 2
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        own = nl.ndarray((half, x.shape[1]), x.dtype, buffer=nl.private_hbm)
        mine = load(x[core * half : (core + 1) * half])
        nisa.dma_copy(dst=own, src=mine)
        if core == 0:
            # Another branch with more work, and pieces of another shape.
            nisa.dma_copy(dst=out[0:8], src=own[0:8])
            nisa.dma_copy(dst=out[8:half], src=own[8:half])
        else:
            nisa.dma_copy(dst=out[half:], src=own)
        nisa.core_barrier(out, cores=(0, 1))
        theirs = nl.ndarray(mine.shape, mine.dtype, buffer=nl.sbuf)
        nisa.sendrecv(src=mine, dst=theirs, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=0)
        nisa.tensor_tensor(dst=mine, data1=mine, data2=theirs, op=nl.add)
        total = nl.ndarray(mine.shape, mine.dtype, buffer=nl.shared_hbm)
        if core == 1:
            nisa.dma_copy(dst=total, src=mine)
        return out, total, core

    out, total, core = simulate(kernel, X, lnc=2)
    np.testing.assert_array_equal(out, X)
    np.testing.assert_array_equal(total, X[:32] + X[32:])
    # The result is what core 0 returned.
    assert core == 0


def test_both_cores_may_store_the_same_values() -> None:
    def kernel(x: Any, factor: float) -> Any:
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        tile = nl.multiply(load(x), 1.0 + factor * nl.program_id(0))
        nisa.dma_copy(dst=out, src=tile)
        return out

    np.testing.assert_array_equal(simulate(kernel, X, 0.0, lnc=2), X)
    with pytest.raises(RaceError, match="no core_barrier on it between"):
        simulate(kernel, X, 1.0, lnc=2)
    # A strict run wants a result stored once.
    with pytest.raises(RaceError):
        nki.simulate(nki.jit(kernel)[2], RunOptions())(X, 0.0)


def test_dma_copies_between_shapes_of_equal_size() -> None:
    def kernel(vector: Any, matrix: Any) -> Any:
        column = nl.ndarray((48, 1), vector.dtype, buffer=nl.sbuf)
        row = nl.ndarray((1, 48), vector.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=column, src=vector)
        nisa.dma_copy(dst=row, src=vector)
        tile = load(matrix)
        assert matrix[3].shape == (48,) and matrix[3, 4].shape == (1,)
        assert tile[3].shape == (1, 48) and tile[:, 4].shape == (64, 1)
        nisa.dma_copy(dst=row, src=matrix[3])
        result = nl.ndarray((2, 48), vector.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=result[0], src=column)
        nisa.dma_copy(dst=result[1], src=row)
        return result

    np.testing.assert_array_equal(simulate(kernel, X[0].copy(), X), X[[0, 3]])


def test_views_of_views() -> None:
    def kernel(x: Any) -> Any:
        tile = load(x[8:40].reshape((32, 6, 8)).slice(dim=1, start=1, end=5))
        assert x[0:4].shape == (4, 48)
        # Pairs as tuples; zero stride repeats the first column of every partition.
        repeated = tile.ap(pattern=((32, 32), (0, 3), (8, 4)))
        result = nl.ndarray((32, 3, 8), x.dtype, buffer=nl.sbuf)
        nisa.tensor_copy(dst=result[:, :, 0:4], src=repeated)
        nisa.tensor_copy(dst=result.ap([[24, 32], [8, 3], [1, 4]], offset=4), src=tile[:, 0:3, ::2])
        # A strided destination.
        nisa.tensor_scalar(dst=result[:, :, ::4], data=result[:, :, ::4], op0=nl.multiply, operand0=-1.0)
        return store(result)

    tile = X[8:40].reshape(32, 6, 8)[:, 1:5]
    expected = np.concatenate([np.repeat(tile[:, None, :, 0], 3, 1), tile[:, 0:3, ::2]], axis=2)
    expected[:, :, ::4] *= -1
    np.testing.assert_array_equal(simulate(kernel, X), expected)


def test_run_time_indices_into_a_reshaped_tensor() -> None:
    def kernel(x: Any, at: Any) -> Any:
        index, row = load(at), nl.ndarray((1, 4), x.dtype, buffer=nl.sbuf)
        flat = x.reshape((1, 3072))
        nisa.dma_copy(dst=row, src=flat.ap([[3072, 1], [1, 4]], offset=2, scalar_offset=index, indirect_dim=1))
        return store(row)

    np.testing.assert_array_equal(simulate(kernel, X, np.array([[100]], np.int32)), X.reshape(1, -1)[:, 102:106])


def test_patterns_outside_a_tensor_are_refused_when_used() -> None:
    def kernel(x: Any, used: bool) -> Any:
        tile = load(x)
        pattern = tile.ap([[48, 64], [12, 4]], offset=12)
        if used:
            nisa.memset(pattern, 0.0)
        return store(tile)

    np.testing.assert_array_equal(simulate(kernel, X, False), X)
    with pytest.raises(AssertionError, match="crosses its partitions"):
        simulate(kernel, X, True)


def test_unwritten_parts_of_tiles_stay_in_their_lanes() -> None:
    def kernel(x: Any) -> Any:
        tile = nl.ndarray((128, 64), x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile[0:40, 0:48], src=x[0:40])
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=2.0)
        turned = nl.ndarray((64, 128), x.dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=turned, data=tile)
        return store(turned)

    result = simulate(kernel, X)
    np.testing.assert_array_equal(result[0:48, 0:40], 2 * X[0:40].T)
    assert np.isnan(result[48:]).all() and np.isnan(result[:, 40:]).all()


# --- instructions ----------------------------------------------------------------------------------------------------


def test_operands_are_numbers_or_columns_and_comparisons_give_one_and_zero() -> None:
    def kernel(x: Any) -> Any:
        tile = load(x)
        flags = nl.ndarray(x.shape, nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=flags, data=tile, op0=nl.subtract, operand0=tile[:, 0], op1=nl.greater_equal, operand1=0)
        return store(flags)

    np.testing.assert_array_equal(simulate(kernel, X), (X - X[:, :1] >= 0).astype(np.float32))


def test_accumulators_collect_over_calls_also_with_fewer_partitions() -> None:
    def kernel(x: Any) -> Any:
        tile, scratch = load(x), nl.ndarray(x.shape, nl.float32, buffer=nl.sbuf)
        total = nl.ndarray((64, 1), nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=scratch, op=nl.square, data=tile, reduce_op=nl.add, reduce_cmd=nisa.reduce_cmd.reset_reduce)
        nisa.activation(
            dst=scratch[0:32], op=nl.copy, data=tile[0:32], reduce_op=nl.add, reduce_cmd=nisa.reduce_cmd.reduce
        )
        nisa.activation(
            dst=scratch,
            op=nl.copy,
            data=tile,
            scale=3.0,
            reduce_op=nl.add,
            reduce_res=total,
            reduce_cmd=nisa.reduce_cmd.reduce,
        )
        return store(total)

    wide = X.astype(np.float64)
    expected = (wide**2 + 3 * wide).sum(1)
    expected[:32] += wide[:32].sum(1)
    np.testing.assert_allclose(simulate(kernel, X)[:, 0], expected, rtol=1e-5)


@pytest.mark.parametrize("case", ["automatic", "true", "index", "columns"])
def test_matmul_accumulates_as_asked(case: str) -> None:
    def kernel(x: Any) -> Any:
        tile = load(x)
        product = nl.ndarray((48, 48), nl.float32, buffer=nl.psum)
        if case == "automatic":
            nisa.memset(dst=product, value=0)
            for _ in range(3):
                nisa.nc_matmul(dst=product, stationary=tile, moving=tile)
        elif case == "true":
            nisa.memset(dst=product, value=0)
            for _ in range(3):
                nisa.nc_matmul(dst=product, stationary=tile, moving=tile, accumulate=True)
        elif case == "index":
            nisa.memset(dst=product, value=7.0)
            for i in range(3):
                nisa.nc_matmul(dst=product, stationary=tile, moving=tile, accumulate=(i > 0))
        else:
            # Each column of the tile is a region of its own: overwritten once, then added to.
            for column in range(48):
                for _ in range(3):
                    nisa.nc_matmul(dst=product[:, column], stationary=tile, moving=tile[:, column])
        return store(product)

    np.testing.assert_allclose(simulate(kernel, X), 3 * (X.T.astype(np.float64) @ X), rtol=1e-5, atol=1e-3)


def test_a_fresh_psum_tile_is_overwritten_whatever_it_held() -> None:
    def kernel(x: Any) -> Any:
        tile = load(x)
        for _ in range(2):
            product = nl.ndarray((48, 48), nl.float32, buffer=nl.psum, address=(0, 0))
            nisa.nc_matmul(dst=product, stationary=tile, moving=tile)
        return store(product)

    np.testing.assert_allclose(simulate(kernel, X), X.T.astype(np.float64) @ X, rtol=1e-5, atol=1e-3)


def test_tiles_that_take_turns_at_one_address_begin_their_own_sums() -> None:
    def kernel(x: Any) -> Any:
        tile = load(x)
        out = nl.ndarray((4, 48, 48), nl.float32, buffer=nl.shared_hbm)
        # All allocated beforehand: the third shares its bank with the first, the fourth with the second.
        products = [nl.ndarray((48, 48), nl.float32, buffer=nl.psum, address=(0, 2048 * (i % 2))) for i in range(4)]
        for i, product in enumerate(products):
            for _ in range(i + 1):
                nisa.nc_matmul(dst=product, stationary=tile, moving=tile)
            nisa.dma_copy(dst=out[i], src=nl.copy(product))
        return out

    once = X.T.astype(np.float64) @ X
    np.testing.assert_allclose(simulate(kernel, X), [once, 2 * once, 3 * once, 4 * once], rtol=1e-5, atol=1e-3)


def test_transposes_by_the_identity_into_float32_and_of_a_repeated_column() -> None:
    def kernel(x: Any) -> Any:
        tile = load(x)
        identity = nl.shared_identity_matrix(64, dtype=nl.bfloat16)
        by_matmul = nl.ndarray((48, 64), nl.bfloat16, buffer=nl.psum)
        nisa.nc_matmul(dst=by_matmul, stationary=tile, moving=identity, is_transpose=True)
        wide = nl.ndarray((48, 64), nl.float32, buffer=nl.psum)
        nisa.nc_transpose(dst=wide, data=tile)
        rows = nl.ndarray((5, 64), nl.bfloat16, buffer=nl.psum)
        nisa.nc_transpose(dst=rows, data=tile.ap([[48, 64], [0, 5]], offset=7))
        return store(by_matmul), store(wide), store(rows)

    x = X.astype(BF16)
    by_matmul, wide, rows = simulate(kernel, x)
    np.testing.assert_array_equal(by_matmul, x.T)
    np.testing.assert_array_equal(wide, x.T.astype(np.float32))
    np.testing.assert_array_equal(rows, np.repeat(x[None, :, 7], 5, axis=0))


def test_shuffles_broadcast_a_partition_in_place_and_leave_others() -> None:
    def kernel(x: Any) -> Any:
        tile = load(x[0:32])
        wide = nl.ndarray((32, 48), x.dtype, buffer=nl.sbuf)
        nisa.nc_stream_shuffle(dst=wide, src=tile[0:1], shuffle_mask=[0] * 32)
        nisa.nc_stream_shuffle(dst=tile, src=tile, shuffle_mask=[255] * 16 + [0] * 16)
        return store(wide), store(tile)

    wide, tile = simulate(kernel, X)
    np.testing.assert_array_equal(wide, np.repeat(X[:1], 32, axis=0))
    np.testing.assert_array_equal(tile, np.concatenate([X[:16], np.repeat(X[:1], 16, axis=0)]))


def test_constants_of_other_kinds_and_converting_dma() -> None:
    def kernel(x: Any) -> Any:
        infinite, minus_one, one = (nl.ndarray((4, 4), dtype) for dtype in (nl.float32, nl.int32, nl.bfloat16))
        nisa.memset(dst=infinite, value=-float("inf"))
        nisa.memset(dst=minus_one, value=-1)
        nisa.memset(dst=one, value=1.0)
        converted = nl.ndarray((64, 48), nl.bfloat16, buffer=nl.sbuf)
        nisa.dma_copy(dst=converted, src=x)
        return store(infinite), store(minus_one), store(one), store(converted, nl.float32)

    infinite, minus_one, one, converted = simulate(kernel, X)
    assert np.isneginf(infinite).all() and (minus_one == -1).all() and (one == 1).all() and one.dtype == BF16
    np.testing.assert_array_equal(converted, X.astype(BF16).astype(np.float32))


def test_older_spellings_of_engines_and_modes() -> None:
    def kernel(x: Any) -> Any:
        tile = nl.ndarray(x.shape, x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=x, dge_mode=3)
        copies = nl.ndarray((64, 96), x.dtype, buffer=nl.sbuf)
        nisa.tensor_copy(dst=copies[:, 0:48], src=tile, engine=nisa.scalar_engine)
        nisa.tensor_copy(dst=copies[:, 48:96], src=tile, engine=nisa.engine.vector)
        return store(copies)

    np.testing.assert_array_equal(simulate(kernel, X), np.concatenate([X, X], axis=1))
