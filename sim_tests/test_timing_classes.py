# SPDX-License-Identifier: Apache-2.0
"""The class of every instruction: cycles per element, occupancy and latency, as public tables have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from launching import nisa, nl
from timelines import TIMING, close, duration, records, tile

from nki_bn.simulator.timing.classes import duration_of
from nki_bn.simulator.trace import Record, Source

BF16, FP16, FP32, FP8, U8 = nl.bfloat16, nl.float16, nl.float32, nl.float8_e4m3, nl.uint8
WIDTH = 512
Build = Callable[[], Any]


def copy(dst: Any, src: Any, to: Any = nl.sbuf, start: Any = nl.sbuf, engine: Any = nisa.engine.vector) -> Build:
    return lambda: nisa.tensor_copy(tile(WIDTH, dst, to), tile(WIDTH, src, start), engine=engine)


def scaled(dst: Any, src: Any, to: Any = nl.sbuf, start: Any = nl.sbuf, pointers: int = 0) -> Build:
    def build() -> None:
        first = tile(1) if pointers > 0 else 2.0
        second = tile(1) if pointers > 1 else 1.0
        nisa.tensor_scalar(
            tile(WIDTH, dst, to),
            tile(WIDTH, src, start),
            nl.multiply,
            first,
            op1=nl.add,
            operand1=second,
            engine=nisa.engine.vector,
        )

    return build


def added(
    dst: Any, first: Any, second: Any, to: Any = nl.sbuf, start: Any = nl.sbuf, engine: Any = nisa.engine.vector
) -> Build:
    return lambda: nisa.tensor_tensor(
        tile(WIDTH, dst, to), tile(WIDTH, first, start), tile(WIDTH, second), nl.add, engine=engine
    )


def combined(dtype: Any, scalar: bool, start: Any = nl.sbuf) -> Build:
    return lambda: nisa.scalar_tensor_tensor(
        tile(WIDTH, dtype),
        tile(WIDTH, dtype, start),
        nl.subtract,
        tile(1) if scalar else 1.0,
        nl.multiply,
        tile(WIDTH, dtype),
    )


def reduced(dtype: Any, start: Any = nl.sbuf) -> Build:
    return lambda: nisa.tensor_reduce(tile(1), nl.add, tile(WIDTH, dtype, start), axis=1)


def scalar_reduced(pointer: bool, read_out: bool) -> Build:
    return lambda: nisa.tensor_scalar_reduce(
        tile(WIDTH),
        tile(WIDTH),
        nl.multiply,
        tile(1) if pointer else 2.0,
        nl.add,
        reduce_res=tile(1) if read_out else None,
    )


def scanned(seed: bool) -> Build:
    return lambda: nisa.tensor_tensor_scan(
        tile(WIDTH), tile(WIDTH), tile(WIDTH), tile(1) if seed else 0.0, nl.multiply, nl.add
    )


VECTOR = {
    "copy of float32": (copy(FP32, FP32), 0.5, 60, 157),
    "copy of bfloat16": (copy(BF16, BF16), 0.25, 60, 156),
    "copy of float16 to bfloat16": (copy(BF16, FP16), 0.25, 60, 156),
    "copy narrowing": (copy(BF16, FP32), 0.5, 60, 157),
    "copy to bytes": (copy(U8, FP32), 0.5, 60, 157),
    "copy widening": (copy(FP32, BF16), 0.77, 60, 153),
    "copy of float32 from PSUM": (copy(FP32, FP32, start=nl.psum), 1.0, 60, 157),
    "copy of bfloat16 from PSUM": (copy(BF16, BF16, start=nl.psum), 1.0, 60, 157),
    "copy of float32 to PSUM": (copy(FP32, FP32, to=nl.psum), 1.0, 60, 157),
    "copy of bfloat16 to PSUM": (copy(BF16, BF16, to=nl.psum), 0.5, 60, 157),
    "scalar on float32": (scaled(FP32, FP32), 0.5, 60, 157),
    "scalar on bfloat16": (scaled(BF16, BF16), 0.25, 60, 158),
    "scalar on mixed widths": (scaled(FP32, BF16), 0.5, 60, 157),
    "scalar to float8": (scaled(FP8, FP32), 0.5, 60, 157),
    "scalar with one pointer": (scaled(FP32, FP32, pointers=1), 0.5, 129, 215),
    "scalar with two pointers": (scaled(FP32, FP32, pointers=2), 0.5, 129, 215),
    "scalar with a pointer on bfloat16": (scaled(BF16, BF16, pointers=1), 0.25, 129, 215),
    "scalar with a pointer from PSUM": (scaled(FP32, FP32, start=nl.psum, pointers=1), 1.0, 129, 215),
    "two tiles of float32": (added(FP32, FP32, FP32), 1.0, 60, 160),
    "two tiles of bfloat16": (added(BF16, BF16, BF16), 0.5, 60, 160),
    "two tiles of bfloat16 to float32": (added(FP32, BF16, BF16), 1.0, 60, 160),
    "two tiles of float32 to bfloat16": (added(BF16, FP32, FP32), 1.0, 60, 160),
    "two tiles, one in PSUM": (added(BF16, BF16, BF16, start=nl.psum), 1.0, 60, 160),
    "two tiles to PSUM": (added(BF16, BF16, BF16, to=nl.psum), 1.0, 60, 160),
    "scalar and two tiles of float32": (combined(FP32, True), 1.0, 128, 200),
    "scalar and two tiles of bfloat16": (combined(BF16, True), 0.5, 128, 200),
    "scalar and two tiles, one in PSUM": (combined(BF16, True, nl.psum), 1.0, 128, 200),
    "number and two tiles": (combined(FP32, False), 1.0, 60, 160),
    "reduction of float32": (reduced(FP32), 1.0, 62, 153),
    "reduction of bfloat16": (reduced(BF16), 1.0, 62, 153),
    "reduction from PSUM": (reduced(FP32, nl.psum), 1.0, 62, 157),
    "scalar reduction": (scalar_reduced(False, False), 1.0, 62, 153),
    "scalar reduction with a pointer": (scalar_reduced(True, False), 1.0, 129, 215),
    "scalar reduction read out": (scalar_reduced(False, True), 1.0, 62 + 67, 153 + 67),
    "statistics": (lambda: nisa.bn_stats(tile(6), tile(WIDTH)), 1.0, 62, 155),
    "aggregation": (lambda: nisa.bn_aggr(tile(2), tile(3 * WIDTH)), 13.0, 62, 155),
    "reciprocal": (lambda: nisa.reciprocal(tile(WIDTH), tile(WIDTH)), 6.0, 60, 153),
    "scan": (scanned(False), 2.0, 60, 158),
    "scan with a seed": (scanned(True), 2.0, 60, 158 + 60),
    "fill": (lambda: nisa.memset(tile(WIDTH), 0.0), 0.8, 20, 58),
    "predicated copy": (lambda: nisa.tensor_copy_predicated(tile(WIDTH), tile(WIDTH), tile(WIDTH, U8)), 1.06, 60, 157),
    "selection": (lambda: nisa.select_reduce(tile(WIDTH), tile(WIDTH, U8), tile(WIDTH), 0.0), 1.06, 60, 157),
    "largest values": (lambda: nisa.max8(tile(8), tile(WIDTH)), 1.0, 60, 157),
    "indices of values": (lambda: nisa.nc_find_index8(tile(8, nl.uint32), tile(WIDTH), tile(8)), 1.0, 60, 157),
    "replaced values": (lambda: nisa.nc_match_replace8(tile(WIDTH), tile(WIDTH), tile(8), 0.0), 1.0, 60, 157),
    "range": (
        lambda: nisa.range_select(tile(WIDTH), tile(WIDTH), nl.less, nl.less, tile(1), tile(1)),
        1.0,
        129,
        215,
    ),
    "range read out": (
        lambda: nisa.range_select(tile(WIDTH), tile(WIDTH), nl.less, nl.less, tile(1), tile(1), reduce_res=tile(1)),
        1.0,
        129 + 67,
        215 + 67,
    ),
    "dropout": (lambda: nisa.dropout(tile(WIDTH), tile(WIDTH), 0.5), 1.0, 60, 157),
    "dropout by lane": (lambda: nisa.dropout(tile(WIDTH), tile(WIDTH), tile(1)), 1.0, 129, 215),
    "random bits": (lambda: nisa.rng(tile(WIDTH, nl.uint32)), 1.0, 60, 157),
    "shuffle": (lambda: nisa.nc_stream_shuffle(tile(WIDTH), tile(WIDTH), list(range(32))), 1.0, 60, 157),
}


def test_a_seed() -> None:
    agrees(lambda: nisa.set_rng_seed(tile(1, nl.uint32, partitions=1)), 0.96, 1, (1.0, 60, 157))


def agrees(build: Build, clock: float, elements: int, cost: Sequence[float]) -> None:
    cycles, occupancy, latency = cost
    got = duration(build)
    assert close((got.streaming, got.occupancy, got.latency), (elements * cycles / clock, occupancy, latency))
    assert close(got.least, 64 / clock)


@pytest.mark.parametrize("case", VECTOR)
def test_vector(case: str) -> None:
    build, *cost = VECTOR[case]
    agrees(build, 0.96, WIDTH, cost)


def test_a_transpose_on_vector() -> None:
    def build() -> None:
        nisa.nc_transpose(tile(32, partitions=32), tile(32, partitions=32), engine=nisa.engine.vector)

    agrees(build, 0.96, 32, (1.0, 60, 200))


def strided(dtype: Any, step: int) -> Build:
    def build() -> None:
        nisa.tensor_copy(tile(WIDTH, dtype), tile(step * WIDTH, dtype)[:, ::step], engine=nisa.engine.vector)

    return build


@pytest.mark.parametrize(
    ("dtype", "step", "cycles"),
    [(FP32, 2, 0.5), (FP32, 4, 2 * 0.5), (BF16, 2, 0.5), (BF16, 7, 0.5), (BF16, 8, 2 * 0.5)],
)
def test_strides_slow_vector_down_from_16_bytes_on(dtype: Any, step: int, cycles: float) -> None:
    """And 16-bit copies lose the fourfold mode at any stride."""
    agrees(strided(dtype, step), 0.96, WIDTH, (cycles, 60, 157))


def test_a_column_has_no_stride() -> None:
    def build() -> None:
        nisa.tensor_copy(tile(1), tile(WIDTH).reshape_dim(1, (4, WIDTH // 4))[:, 0, 0:1], engine=nisa.engine.vector)

    agrees(build, 0.96, 1, (0.5, 60, 157))


def activated(
    function: Any = nl.exp, start: Any = nl.sbuf, bias: bool = False, scale: bool = False, read_out: bool = False
) -> Build:
    def build() -> None:
        summed = {"reduce_op": nl.add, "reduce_res": tile(1), "reduce_cmd": nisa.reduce_cmd.reset_reduce}
        nisa.activation(
            tile(WIDTH),
            function,
            tile(WIDTH, buffer=start),
            bias=tile(1) if bias else None,
            scale=tile(1) if scale else 1.0,
            **(summed if read_out else {}),
        )

    return build


SCALAR = {
    "copy": (copy(FP32, FP32, engine=nisa.engine.scalar), 60, 190),
    "copy from PSUM": (copy(FP32, FP32, start=nl.psum, engine=nisa.engine.scalar), 52, 160),
    "activation": (activated(), 185, 290),
    "activation with a bias": (activated(bias=True), 185, 290),
    "activation with bias and scale": (activated(bias=True, scale=True), 185 + 45, 290 + 91),
    "activation from PSUM": (activated(start=nl.psum), 143, 260),
    "activation from PSUM with both": (activated(start=nl.psum, bias=True, scale=True), 143 + 45, 260 + 91),
    # Reading the accumulators out starts when the activation lets the engine go.
    "activation read out": (activated(read_out=True), 185 + 185, 185 + 279),
    "activation from PSUM read out": (activated(start=nl.psum, read_out=True), 143 + 185, 143 + 279),
}


@pytest.mark.parametrize("case", SCALAR)
def test_scalar(case: str) -> None:
    build, *overheads = SCALAR[case]
    agrees(build, 1.2, WIDTH, (1.0, *overheads))


def test_functions_that_share_a_table() -> None:
    tables = [duration(activated(function)).table for function in (nl.copy, nl.square, nl.rsqrt, nl.exp, nl.sigmoid)]
    assert tables == ["copy", "copy", "copy", "exp", "sigmoid"]
    assert duration(copy(FP32, FP32, engine=nisa.engine.scalar)).table is None


GPSIMD = {
    "iota": (lambda: nisa.iota(tile(WIDTH, nl.int32), [[1, WIDTH]]), 1.0, 125, 177),
    "selection": (lambda: nisa.affine_select(tile(WIDTH), [[1, WIDTH]], 0, tile(WIDTH), 0.0), 1.0, 125, 177),
    "copy": (copy(FP32, FP32, engine=nisa.engine.gpsimd), 1.0, 150, 200),
    "fill": (lambda: nisa.memset(tile(WIDTH), 0.0, engine=nisa.engine.gpsimd), 1.0, 150, 200),
    "two tiles": (added(FP32, FP32, FP32, engine=nisa.engine.gpsimd), 2.0, 150, 200),
    "random bits": (lambda: nisa.rng(tile(WIDTH, nl.uint32), engine=nisa.engine.gpsimd), 1.0, 150, 200),
    "gather by lane": (
        lambda: nisa.nc_n_gather(tile(WIDTH), tile(2 * WIDTH), tile(WIDTH, nl.uint32)),
        1.0,
        125,
        177,
    ),
    "positions": (
        lambda: nisa.nonzero_with_count(tile(WIDTH, nl.int32), tile(WIDTH - 1)),
        1.0,
        150,
        200,
    ),
    "bounds": (
        lambda: nisa.sequence_bounds(tile(WIDTH, partitions=1), tile(WIDTH // 2, partitions=1)),
        1.0,
        150,
        200,
    ),
    "over partitions": (
        lambda: nisa.tensor_partition_reduce(tile(WIDTH, partitions=1), nl.add, tile(WIDTH)),
        1.0,
        110000,
        110000,
    ),
}


@pytest.mark.parametrize("case", GPSIMD)
def test_gpsimd(case: str) -> None:
    build, *cost = GPSIMD[case]
    agrees(build, 1.2, WIDTH, cost)


def test_lanes_share_a_local_gather() -> None:
    """150 cycles, and the picked elements over the lanes."""
    build = lambda: nisa.local_gather(tile(1024), tile(WIDTH), tile(32, nl.uint16), 2, 512)  # noqa: E731
    agrees(build, 1.2, 1024 // 128, (1.0, 125, 177))


@pytest.mark.parametrize("call", [nisa.rand_get_state, nisa.rand_set_state])
def test_states_of_generators(call: Callable[..., Any]) -> None:
    agrees(lambda: call(tile(6, nl.uint32)), 1.2, 6, (1.0, 150, 200))


def product(dtype: Any, onezero: bool = False) -> Build:
    return lambda: nisa.nc_matmul(
        tile(WIDTH, buffer=nl.psum), tile(128, dtype), tile(WIDTH, dtype), is_stationary_onezero=onezero
    )


def transposed(dtype: Any, rows: int = 96) -> Build:
    return lambda: nisa.nc_transpose(tile(rows, dtype, nl.psum, 128), tile(128, dtype, partitions=rows))


TENSOR = {
    "product of bfloat16": (product(BF16), WIDTH, 1.0, 2, 1),
    "product of float32": (product(FP32), WIDTH, 4.0, 4, 2),
    "product of float32 with zeros and ones": (product(FP32, True), WIDTH, 2.0, 4, 2),
    "transpose of bfloat16": (transposed(BF16), 96, 1.0, 2, 1),
    "transpose of float32": (transposed(FP32), 96, 2.0, 2, 1),
}


@pytest.mark.parametrize("case", TENSOR)
def test_tensor(case: str) -> None:
    build, columns, cycles, occupancy, passes = TENSOR[case]
    agrees(build, 2.4, columns, (cycles, occupancy, 165))
    assert close(duration(build).weights, passes * 32 / 2.4)


def test_registers() -> None:
    def kernel() -> None:
        register = nisa.register_alloc(3)
        nisa.register_move(register, 4)
        nisa.register_store(tile(1, nl.int32, partitions=1), register)

    moved, stored = [duration_of(record, TIMING).streaming for record in records(kernel)]
    assert (moved, stored) == (68, 865)


@pytest.mark.parametrize(("engine", "opcode"), [("sync", "unheard_of"), ("dma", "dma_copy")])
def test_what_is_not_in_the_model_is_refused(engine: str, opcode: str) -> None:
    record = Record(0, 0, opcode, engine, (), (), Source("kernel.py", 7, "kernel"))
    with pytest.raises(ValueError, match=f"{opcode} at kernel.py:7 in kernel runs on engine"):
        duration_of(record, TIMING)
