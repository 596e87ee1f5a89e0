# SPDX-License-Identifier: Apache-2.0
"""Two cores: races, failures, determinism, branches, and launches inside and beside launches."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from launching import launch, load, nisa, nki, nl, outputs, store

from nki_bn.simulator import DeadlockError, NkiValidationError, RaceError
from nki_bn.simulator.trace import Record

RNG = np.random.default_rng(4)
X = RNG.normal(size=(2, 16, 8)).astype(np.float32)


def line_of(function: Callable[..., Any], offset: int) -> str:
    return f"test_simulator_cores.py:{function.__code__.co_firstlineno + offset} in "


def race(kernel: Callable[..., Any], *lines: str) -> None:
    """``kernel`` races, and the message names all ``lines``."""
    with pytest.raises(RaceError, match="no core_barrier") as caught:
        launch(kernel, X, lnc=2)
    assert all(line in str(caught.value) for line in lines), str(caught.value)


def writer(shared: Any, x: Any) -> None:
    nisa.dma_copy(dst=shared[0], src=x[0])


def reader(shared: Any, x: Any) -> None:
    nisa.dma_copy(dst=nl.ndarray((16, 8), x.dtype), src=shared[0])


def filler(shared: Any, x: Any) -> None:
    nisa.dma_copy(dst=shared, src=x)


WRITE, READ, FILL = line_of(writer, 1), line_of(reader, 1), line_of(filler, 1)


def pair(first: Callable[..., Any], second: Callable[..., Any], begins: int) -> Callable[..., None]:
    """A kernel whose core 0 does ``first`` and core 1 ``second`` to a written tensor, core ``begins`` earlier."""

    def kernel(x: Any) -> None:
        rank = nl.program_id(0)
        shared, other = (nl.ndarray(X.shape, x.dtype, buffer=nl.shared_hbm) for _ in range(2))
        if rank == 0:
            filler(shared, x)
        nisa.core_barrier(shared, (0, 1))
        act = (first, second)[rank]
        if rank == begins:
            act(shared, x)
        # A barrier on another tensor fixes the order of the cores without ordering their accesses to this one.
        nisa.core_barrier(other, (0, 1))
        if rank != begins:
            act(shared, x)

    return kernel


@pytest.mark.parametrize("begins", [0, 1])
def test_two_writes_race(begins: int) -> None:
    race(pair(writer, filler, begins), WRITE, FILL)


@pytest.mark.parametrize("begins", [0, 1])
@pytest.mark.parametrize("acts", [(writer, reader), (reader, writer)])
def test_a_write_and_a_read_race_in_any_order(acts: tuple[Any, Any], begins: int) -> None:
    race(pair(*acts, begins), WRITE, READ)


def test_the_message_names_the_access_that_collides() -> None:
    def several(shared: Any, x: Any) -> None:
        reader(shared, x)
        nisa.dma_copy(dst=shared[1], src=x[1])
        writer(shared, x)

    with pytest.raises(RaceError) as caught:
        launch(pair(several, reader, 0), X, lnc=2)
    message = str(caught.value)
    assert "core 1 reads it by dma_copy" in message and "core 0 writes it by dma_copy" in message
    assert READ in message and WRITE in message and line_of(several, 2) not in message


def test_reads_do_not_race() -> None:
    launch(pair(reader, reader, 0), X, lnc=2)


def test_disjoint_writes_do_not_race() -> None:
    def kernel(x: Any) -> Any:
        rank = nl.program_id(0)
        out = nl.ndarray(X.shape, x.dtype, buffer=nl.shared_hbm)
        # Columns of the same rows: interleaved bytes, none of them shared.
        nisa.dma_copy(dst=out[:, :, rank::2], src=x[:, :, rank::2])
        return out

    np.testing.assert_array_equal(outputs(kernel, X, lnc=2), X)


def test_one_shared_element_is_enough() -> None:
    def kernel(x: Any, start: int) -> None:
        out = nl.ndarray((16,), x.dtype, buffer=nl.shared_hbm)
        first = start * nl.program_id(0)
        nisa.dma_copy(dst=out[first : first + 8], src=x[0, 0:1, 0:8])

    launch(kernel, X, 8, lnc=2)
    with pytest.raises(RaceError):
        launch(kernel, X, 7, lnc=2)


def test_inputs_race_too() -> None:
    def kernel(x: Any) -> None:
        (writer if nl.program_id(0) else reader)(x, nl.shared_constant(X))

    race(kernel, WRITE, READ)


def test_a_core_does_not_race_with_itself() -> None:
    def kernel(x: Any) -> Any:
        out = nl.ndarray(X.shape, x.dtype, buffer=nl.shared_hbm)
        if nl.program_id(0) == 1:
            for _ in range(2):
                filler(out, x)
                reader(out, x)
        return out

    np.testing.assert_array_equal(outputs(kernel, X, lnc=2), X)


def test_what_belongs_to_a_core_does_not_race() -> None:
    def kernel(x: Any) -> Any:
        rank = nl.program_id(0)
        out = nl.ndarray((2,), nl.float32, buffer=nl.shared_hbm)
        scratch = nl.ndarray((1, 1), nl.float32, buffer=nl.private_hbm)
        tile = nl.ndarray((1, 1), nl.float32)
        nisa.memset(tile, float(rank))
        nisa.dma_copy(dst=scratch, src=tile)
        nisa.core_barrier(out, (0, 1))
        nisa.dma_copy(dst=out[rank : rank + 1], src=scratch)
        return out

    np.testing.assert_array_equal(outputs(kernel, X, lnc=2), [0, 1])


# --- shared tensors -------------------------------------------------------------------------------


def test_the_nth_shared_tensor_is_the_same_on_both_cores() -> None:
    def kernel(x: Any) -> Any:
        rank = nl.program_id(0)
        if rank == 1:
            for _ in range(3):
                nl.ndarray((2, 2), x.dtype, buffer=nl.private_hbm)
        outs = tuple(nl.ndarray((2, 4), x.dtype, buffer=nl.shared_hbm) for _ in range(2))
        for number, out in enumerate(outs):
            tile = nl.ndarray((1, 4), x.dtype)
            nisa.memset(tile, 10.0 * number + rank)
            nisa.dma_copy(dst=out[rank], src=tile)
        return outs

    first, second = outputs(kernel, X, lnc=2)
    np.testing.assert_array_equal(first, [[0] * 4, [1] * 4])
    np.testing.assert_array_equal(second, [[10] * 4, [11] * 4])


@pytest.mark.parametrize("difference", ["shape", "dtype"])
def test_shared_tensors_that_differ_are_refused(difference: str) -> None:
    def kernel(x: Any) -> None:
        rank = nl.program_id(0)
        shape = (4, 2 + rank) if difference == "shape" else (4, 2)
        dtype = (nl.float32, nl.int32)[rank] if difference == "dtype" else nl.float32
        nl.ndarray(shape, dtype, buffer=nl.shared_hbm, name="result")

    with pytest.raises(
        NkiValidationError, match="shared_hbm tensor 0 is result .* on one core and result .* on the other"
    ):
        launch(kernel, X, lnc=2)


# --- control --------------------------------------------------------------------------------------


def test_cores_may_take_different_branches() -> None:
    def kernel(x: Any) -> Any:
        rank = nl.program_id(0)
        out = nl.ndarray((2, 4), nl.float32, buffer=nl.shared_hbm)
        tile = nl.ndarray((1, 4), nl.float32)
        nisa.memset(tile, 1.0)
        if rank == 1:
            for column in range(4):
                nisa.memset(tile[:, column : column + 1], float(column))
        nisa.dma_copy(dst=out[rank], src=tile)
        assert (nl.num_programs(0), nl.program_ndim()) == (2, 1)
        return out if rank == 0 else None

    np.testing.assert_array_equal(outputs(kernel, X, lnc=2), [[1, 1, 1, 1], [0, 1, 2, 3]])


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("waits", [False, True])
def test_an_exception_on_one_core_ends_the_run_with_it(failing: int, waits: bool) -> None:
    def kernel(x: Any) -> None:
        shared = nl.ndarray((4,), nl.float32, buffer=nl.shared_hbm)
        if waits:
            nisa.core_barrier(shared, (0, 1))
        if nl.program_id(0) == failing:
            raise KeyError("of the kernel")
        nisa.core_barrier(shared, (0, 1))

    before = threading.active_count()
    with pytest.raises(KeyError, match="of the kernel"):
        launch(kernel, X, lnc=2)
    assert threading.active_count() == before


def test_a_deadlock_leaves_no_thread_behind() -> None:
    def kernel(x: Any) -> None:
        if nl.program_id(0) == 1:
            nisa.core_barrier(nl.ndarray((4,), nl.float32, buffer=nl.shared_hbm), (0, 1))

    before = threading.active_count()
    with pytest.raises(DeadlockError, match="deadlock: core 1 waits for core_barrier .*; core 0 has ended"):
        launch(kernel, X, lnc=2)
    assert threading.active_count() == before


def busy(x: Any) -> Any:
    rank = nl.program_id(0)
    out = nl.ndarray(X.shape, x.dtype, buffer=nl.shared_hbm)
    tile = load(x[rank])
    for step in range(6):
        theirs = nl.ndarray(tile.shape, tile.dtype)
        nisa.sendrecv(tile, theirs, 1 - rank, 1 - rank, step % 2)
        if step % (2 + rank) == 0:
            nisa.core_barrier(out, (0, 1)) if step == 0 else nisa.memset(nl.ndarray((1, 1), nl.float32), 0.0)
        tile = theirs
    nisa.dma_copy(dst=out[rank], src=tile)
    return out


def story(record: Record) -> tuple[Any, ...]:
    return record.core, record.opcode, record.source.line, [access.offset for access in (*record.writes, *record.reads)]


def test_runs_are_deterministic() -> None:
    first = launch(busy, X, lnc=2)
    np.testing.assert_array_equal(first.outputs, X)
    for _ in range(5):
        again = launch(busy, X, lnc=2)
        assert [story(record) for record in again.trace] == [story(record) for record in first.trace]


# --- launches beside and inside launches ----------------------------------------------------------


def test_launches_from_several_threads_do_not_meet() -> None:
    inputs = [RNG.normal(size=X.shape).astype(np.float32) for _ in range(6)]
    barrier = threading.Barrier(3)

    def together(x: Any) -> Any:
        barrier.wait(timeout=30)
        return outputs(busy, x, lnc=2)

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(together, inputs))
    for x, result in zip(inputs, results, strict=True):
        np.testing.assert_array_equal(result, x)


@pytest.mark.parametrize("lnc", [1, 2])
def test_a_launch_inside_a_kernel_is_a_run_of_its_own(lnc: int) -> None:
    inner: list[Any] = []

    def kernel(x: Any) -> Any:
        tile = load(x[nl.program_id(0)])
        inner.append(outputs(busy, X, lnc=2))
        assert nl.num_programs(0) == lnc
        return store(tile) if nl.program_id(0) == 0 else nl.ndarray((16, 8), x.dtype, buffer=nl.shared_hbm)

    result = launch(kernel, X, lnc=lnc)
    np.testing.assert_array_equal(result.outputs, X[0])
    assert len(inner) == lnc and all((values == X).all() for values in inner)
    assert not any(record.opcode == "sendrecv" for record in result.trace)


def test_a_kernel_called_in_a_kernel_is_inlined() -> None:
    @nki.jit
    def double(tile: Any) -> Any:
        both = nl.ndarray((16, 16), tile.dtype)
        nisa.tensor_copy(dst=both[:, 0:8], src=tile)
        nisa.tensor_copy(dst=both[:, 8:16], src=tile)
        return both

    def kernel(x: Any) -> Any:
        return store(double(load(x[0])))

    result = launch(kernel, X)
    np.testing.assert_array_equal(result.outputs, np.hstack([X[0], X[0]]))
    assert result.trace.count("tensor_copy") == 2
