# SPDX-License-Identifier: Apache-2.0
"""Boxes of accesses, the ledger of a memory, and the edges that follow."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import launch, nisa, nl
from timelines import hbm, tile

from nki_bn.simulator.memory import MemoryRegion
from nki_bn.simulator.timing.dependencies import Edge
from nki_bn.simulator.timing.footprint import Box, Ledger, Touch, boxes_of, everything, levels_of
from nki_bn.simulator.timing.jobs import jobs_of
from nki_bn.simulator.trace import Access


def edges(kernel: Callable[..., Any], *args: Any, lnc: int = 1) -> list[set[tuple[int, str]]]:
    """The edges into each record."""
    trace = launch(kernel, *(args or (hbm(1),)), lnc=lnc, dry=True).trace
    return [{(edge.producer, edge.kind) for edge in job.edges} for job in jobs_of(trace)]


def fill(target: Any, engine: Any = nisa.engine.vector) -> Any:
    return nisa.memset(target, 0.0, engine=engine)


def move(dst: Any, src: Any, engine: Any = nisa.engine.gpsimd) -> Any:
    return nisa.tensor_copy(dst, src, engine=engine)


def test_the_three_kinds() -> None:
    def kernel(_: Any) -> None:
        a, b = tile(8), tile(8)
        fill(a)
        move(b, a)
        fill(a)
        fill(a, nisa.engine.gpsimd)

    # Record 3 replaces what record 2 wrote, and that replaced what record 1 had read.
    assert edges(kernel) == [set(), {(0, "RAW")}, {(1, "WAR")}, {(2, "WAW")}]


def test_replacing_on_one_engine_needs_no_edge_but_reading_does() -> None:
    def kernel(_: Any) -> None:
        a, b = tile(8), tile(8)
        fill(a)
        fill(a)
        move(b, a, nisa.engine.vector)
        fill(a)

    assert edges(kernel) == [set(), set(), {(1, "RAW")}, set()]


def test_dmas_of_one_queue_wait_for_each_other() -> None:
    def kernel(x: Any) -> None:
        a = tile(8)
        nisa.dma_copy(a, x)
        nisa.dma_copy(a, x)

    assert edges(kernel, hbm(128, 8)) == [set(), {(0, "WAW")}]


def test_disjoint_columns_and_partitions_do_not_meet() -> None:
    def kernel(_: Any) -> None:
        a = tile(8)
        fill(a[:, 0:4])
        fill(a[:, 4:8], nisa.engine.gpsimd)
        fill(a[0:32, 2:6], nisa.engine.gpsimd)
        fill(a[64:128, 0:1], nisa.engine.gpsimd)
        move(tile(8, partitions=32), a[32:64, :], nisa.engine.scalar)

    assert edges(kernel) == [set(), set(), {(0, "WAW")}, {(0, "WAW")}, {(0, "RAW"), (1, "RAW")}]


def test_a_covering_write_stands_for_what_it_covers() -> None:
    def kernel(_: Any) -> None:
        a = tile(8)
        fill(a[:, 0:4])
        fill(a[:, 4:8])
        fill(a, nisa.engine.gpsimd)
        move(tile(4), a[:, 0:4], nisa.engine.scalar)

    assert edges(kernel) == [set(), set(), {(0, "WAW"), (1, "WAW")}, {(2, "RAW")}]


def test_accumulation_in_psum_stays_in_order() -> None:
    def kernel(_: Any) -> None:
        a, b, sums = tile(128, nl.bfloat16), tile(64, nl.bfloat16), tile(64, buffer=nl.psum)
        nisa.nc_matmul(sums, a, b, accumulate=False)
        nisa.nc_matmul(sums, a, b, accumulate=True)
        move(tile(64), sums, nisa.engine.vector)
        nisa.nc_matmul(sums, a, b, accumulate=False)

    assert edges(kernel) == [set(), set(), {(1, "RAW")}, {(2, "WAR")}]


def test_pointers_are_waited_for() -> None:
    def kernel(_: Any) -> None:
        column, a = tile(1), tile(8)
        fill(column, nisa.engine.gpsimd)
        nisa.tensor_scalar(a, a, nl.multiply, column, engine=nisa.engine.vector)

    assert edges(kernel) == [set(), {(0, "RAW")}]


def test_asked_for_edges() -> None:
    def kernel(_: Any) -> None:
        a, b = tile(8), tile(8)
        first = fill(a)
        fill(b, nisa.engine.gpsimd).depends_on(first)
        with nl.no_reorder():
            fill(a)
            fill(b, nisa.engine.gpsimd)

    assert edges(kernel) == [set(), {(0, "after")}, set(), {(2, "after")}]


def test_memory_that_the_allocator_gives_again_is_replaced() -> None:
    def kernel(_: Any) -> None:
        fill(tile(8))
        fill(tile(8), nisa.engine.gpsimd)

    assert edges(kernel) == [set(), {(0, "WAW")}]


def test_tiles_of_one_tensor_that_interleave_in_memory_do_not_meet() -> None:
    """[2, 256, 10] stored by channel tile and by halves of the positions, all batches at once."""

    def kernel(x: Any) -> None:
        for channels, positions in itertools.product((nl.ds(0, 128), nl.ds(128, 128)), (nl.ds(0, 5), nl.ds(5, 5))):
            nisa.dma_copy(x[:, channels, positions].permute((1, 0, 2)), tile(10))

    assert edges(kernel, hbm(2, 256, 10)) == [set()] * 4


def test_bands_of_batches_that_interleave_do_not_meet() -> None:
    """[16, 12, 10]: channels 0 to 7 in two bands of 8 batches, 3 of each at a time; the others in 8 bands of 2."""

    def kernel(x: Any) -> None:
        for first in (0, 3, 6):
            batches = x.reshape((2, 8, 12, 10))[:, nl.ds(first, min(3, 8 - first)), nl.ds(0, 8), :]
            nisa.dma_copy(batches.permute((0, 2, 1, 3)), tile(10 * min(3, 8 - first))[0:16, :])
        rest = x.reshape((8, 2, 12, 10))[:, :, nl.ds(8, 4), :]
        nisa.dma_copy(rest.permute((0, 2, 1, 3)), tile(20)[0:32, :])

    assert edges(kernel, hbm(16, 12, 10)) == [set()] * 4


def test_what_only_one_core_writes_is_ordered_by_a_barrier() -> None:
    def kernel(x: Any) -> None:
        shared = nl.ndarray((128, 8), nl.float32, buffer=nl.shared_hbm)
        a = tile(8)
        if nl.program_id(0) == 0:
            nisa.dma_copy(shared, a)
        nisa.core_barrier(shared, (0, 1))
        if nl.program_id(0) == 1:
            nisa.dma_copy(a, shared)

    trace = launch(kernel, hbm(1), lnc=2, dry=True).trace
    found = {(job.record.core, job.record.opcode): job for job in jobs_of(trace)}
    store, load = found[0, "dma_copy"], found[1, "dma_copy"]
    assert found[0, "core_barrier"].edges == [Edge(store.record.index, "barrier")]
    assert found[1, "core_barrier"].edges == []
    assert load.edges == [Edge(found[1, "core_barrier"].record.index, "RAW")]


@pytest.mark.parametrize("named", [True, False])
def test_a_barrier_orders_its_tensor_or_all(named: bool) -> None:
    def kernel(x: Any) -> None:
        first, second = (nl.ndarray((128, 8), nl.float32, buffer=nl.shared_hbm) for _ in range(2))
        a = tile(8)
        rows = nl.ds(64 * nl.program_id(0), 64)
        nisa.dma_copy(second[rows, :], a[0:64, :])
        nisa.dma_copy(first[rows, :], a[0:64, :])
        nisa.core_barrier(first if named else a, (0, 1))

    trace = launch(kernel, hbm(1), lnc=2, dry=True).trace
    counts = [len(job.edges) for job in jobs_of(trace) if job.record.opcode == "core_barrier"]
    assert counts == ([1, 1] if named else [2, 2])


# --- boxes against sets of bytes -------------------------------------------------------------------------------------

SHAPE = (3, 4, 5)


def covered(access: Access) -> frozenset[int]:
    grids = np.meshgrid(*[np.arange(size) for size in access.shape], indexing="ij")
    starts = sum((grid * step for grid, step in zip(grids, access.strides, strict=True)), access.offset)
    return frozenset(int(start) + byte for start in np.ravel(starts) for byte in range(4))


def part_of(bounds: list[tuple[int, int]]) -> Access:
    """A block of a contiguous float32 tensor of ``SHAPE`` in HBM."""
    strides = (4 * SHAPE[1] * SHAPE[2], 4 * SHAPE[2], 4)
    offset = sum(low * step for (low, _), step in zip(bounds, strides, strict=True))
    shape = tuple(high - low for low, high in bounds)
    return Access(MemoryRegion.private_hbm, 0, "x", offset, shape, strides, "float32", 0)


def ranges(size: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(0, size - 1), st.integers(1, size)).map(
        lambda pair: (min(pair), max(pair[1], min(pair) + 1))
    )


blocks = st.tuples(*map(ranges, SHAPE)).map(lambda bounds: part_of(list(bounds)))
# Any strided pattern inside 4 * 60 bytes, aligned to an element.
dimensions = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 6)), min_size=1, max_size=3)
patterns = st.tuples(st.integers(0, 20), dimensions).map(
    lambda parts: Access(
        MemoryRegion.private_hbm,
        0,
        "x",
        4 * parts[0],
        tuple(size for size, _ in parts[1]),
        tuple(4 * step for _, step in parts[1]),
        "float32",
        0,
    )
)


def meet(first: tuple[Box, ...], second: tuple[Box, ...]) -> bool:
    return any(
        all(a < d and c < b for (a, b), (c, d) in zip(one, two, strict=True))
        for one, two in itertools.product(first, second)
    )


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(blocks, patterns), min_size=2, max_size=5))
def test_accesses_that_share_bytes_have_boxes_that_meet(accesses: list[Access]) -> None:
    levels = levels_of(accesses)
    boxes = [boxes_of(access, levels) for access in accesses]
    for (one, first), (two, second) in itertools.combinations(zip(accesses, boxes, strict=True), 2):
        assert meet(first, second) or not covered(one) & covered(two)


@settings(max_examples=100, deadline=None)
@given(st.lists(blocks, min_size=2, max_size=4))
def test_blocks_of_a_tensor_meet_only_if_they_share_bytes(accesses: list[Access]) -> None:
    """If some access cuts every dimension, so that all strides are known."""
    levels = levels_of([*accesses, part_of([(0, 2), (0, 2), (0, 2)])])
    boxes = [boxes_of(access, levels) for access in accesses]
    for (one, first), (two, second) in itertools.combinations(zip(accesses, boxes, strict=True), 2):
        assert meet(first, second) == bool(covered(one) & covered(two))


small_boxes = st.tuples(*[st.tuples(st.integers(0, 5), st.integers(1, 4)).map(lambda p: (p[0], p[0] + p[1]))] * 2)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(small_boxes, st.booleans()), min_size=1, max_size=120))
def test_the_ledger_finds_every_conflict_directly_or_through_others(touches: list[tuple[Box, bool]]) -> None:
    ledger, before = Ledger(2), [set[int]() for _ in touches]
    for index, (box, writes) in enumerate(touches):
        for touch in ledger.conflicts(box, writes):
            before[index] |= before[touch.record] | {touch.record}
        ledger.note(box, Touch(index, f"queue {index}", writes))
        conflicting = {at for at in range(index) if meet((touches[at][0],), (box,)) and (writes or touches[at][1])}
        assert conflicting <= before[index]


def test_the_ledger_keeps_the_last_touch_of_a_queue() -> None:
    ledger = Ledger(2)
    box = ((0, 4), (0, 4))
    for record in range(3):
        ledger.note(box, Touch(record, "vector", writes=False))
    ledger.note(box, Touch(3, "scalar", writes=False))
    assert [touch.record for touch in ledger.conflicts(everything((8,)), writing=True)] == [2, 3]
    assert ledger.conflicts(box, writing=False) == []
