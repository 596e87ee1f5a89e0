# SPDX-License-Identifier: Apache-2.0
"""sendrecv and core_barrier: what arrives, what they refuse, and what they leave in the trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from launching import launch, load, nisa, nl, outputs

from nki_bn.simulator import DeadlockError, NkiValidationError, RaceError

RNG = np.random.default_rng(3)
X = RNG.normal(size=(2, 48, 20)).astype(np.float32)


def refuse(
    kernel: Callable[..., Any],
    match: str,
    *,
    error: type[Exception] = NkiValidationError,
    lnc: int = 2,
    target: str = "trn2",
) -> None:
    with pytest.raises(error, match=match):
        launch(kernel, X, lnc=lnc, target=target)


def exchanged(x: Any, pipe: int = 0, **options: Any) -> Any:
    """out[r] is what core r received; core r sent x[r]."""
    rank = nl.program_id(0)
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    mine = load(x[rank], x.shape[1:])
    theirs = nl.ndarray(mine.shape, mine.dtype)
    nisa.sendrecv(src=mine, dst=theirs, send_to_rank=1 - rank, recv_from_rank=1 - rank, pipe_id=pipe, **options)
    nisa.dma_copy(dst=out[rank], src=theirs)
    return out


# --- sendrecv -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int32, np.uint8])
def test_cores_swap_tiles(dtype: Any) -> None:
    x = (100 * X).astype(dtype)
    np.testing.assert_array_equal(outputs(exchanged, x, lnc=2), x[::-1])


def test_the_dma_of_gpsimd_moves_256_elements_per_partition() -> None:
    def kernel(x: Any) -> Any:
        return exchanged(x, dma_engine=nisa.dma_engine.gpsimd_dma)

    x = RNG.normal(size=(2, 4, 256)).astype(np.float32)
    np.testing.assert_array_equal(outputs(kernel, x, lnc=2), x[::-1])
    wide = np.zeros((2, 4, 257), np.float16)
    with pytest.raises(NkiValidationError, match="at most 512 bytes per partition of float16, src has 514"):
        launch(kernel, wide, lnc=2)


def test_a_tile_may_be_sent_and_received_in_place() -> None:
    def kernel(x: Any) -> Any:
        rank = nl.program_id(0)
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        tile = load(x[rank])
        nisa.sendrecv(tile, tile, 1 - rank, 1 - rank, 0)
        nisa.dma_copy(dst=out[rank], src=tile)
        return out

    np.testing.assert_array_equal(outputs(kernel, X, lnc=2), X[::-1])


def test_what_is_sent_is_the_value_at_the_call() -> None:
    def kernel(x: Any) -> Any:
        rank = nl.program_id(0)
        out = nl.ndarray((2, 48, 20), x.dtype, buffer=nl.shared_hbm)
        mine, theirs = load(x[rank]), nl.ndarray((48, 20), x.dtype)
        nisa.sendrecv(mine, theirs, 1 - rank, 1 - rank, 0)
        nisa.memset(mine, 0.0)
        nisa.dma_copy(dst=out[rank], src=theirs)
        return out

    np.testing.assert_array_equal(outputs(kernel, X, lnc=2), X[::-1])


def test_an_exchange_keeps_no_tile_alive() -> None:
    def kernel(x: Any) -> None:
        rank = nl.program_id(0)
        mine, theirs = (nl.ndarray((128, 25000), nl.float32) for _ in range(2))
        nisa.memset(mine, 0.0)
        nisa.sendrecv(mine, theirs, 1 - rank, 1 - rank, 0)
        del mine, theirs
        # Fits only where both are gone, also on the core whose peer has not gone on yet.
        nl.ndarray((128, 50000), nl.float32)

    assert launch(kernel, X, lnc=2).sbuf_high_water == (200000, 200000)


def test_calls_of_one_pipe_meet_in_order_and_pipes_are_independent() -> None:
    def kernel(x: Any) -> Any:
        rank = nl.program_id(0)
        out = nl.ndarray((2, 3), nl.float32, buffer=nl.shared_hbm)
        send, got = nl.ndarray((1, 3), nl.float32), nl.ndarray((1, 3), nl.float32)
        # The value says which call sent it.
        for step in range(3):
            nisa.memset(send[:, step : step + 1], 10.0 * rank + step)
            pipe = 0 if step < 2 else 5
            nisa.sendrecv(send[:, step : step + 1], got[:, step : step + 1], 1 - rank, 1 - rank, pipe)
        nisa.dma_copy(dst=out[rank], src=got)
        return out

    np.testing.assert_array_equal(outputs(kernel, X, lnc=2), [[10, 11, 12], [0, 1, 2]])


def test_sendrecv_does_not_order_shared_memory() -> None:
    def kernel(x: Any) -> None:
        rank = nl.program_id(0)
        shared = nl.ndarray(X.shape, x.dtype, buffer=nl.shared_hbm)
        mine, theirs = load(x[rank]), nl.ndarray((48, 20), x.dtype)
        nisa.dma_copy(dst=shared[rank], src=mine)
        nisa.sendrecv(mine, theirs, 1 - rank, 1 - rank, 0)
        load(shared[1 - rank])

    refuse(kernel, "race", error=RaceError)


def sending(**change: Any) -> Callable[..., None]:
    def kernel(x: Any) -> None:
        rank = nl.program_id(0)
        arguments = {
            "src": load(x[rank]),
            "dst": nl.ndarray((48, 20), x.dtype),
            "send_to_rank": 1 - rank,
            "recv_from_rank": 1 - rank,
            "pipe_id": 0,
        }
        nisa.sendrecv(**{**arguments, **{key: make() if callable(make) else make for key, make in change.items()}})

    return kernel


def test_sendrecv_refusals_on_one_side() -> None:
    refuse(sending(), r"needs a launch on two cores, kernel\[2\]\(...\); this one has 1", lnc=1)
    refuse(sending(), "sendrecv needs gen3", lnc=1, target="trn1")
    refuse(sending(dst=lambda: nl.ndarray((48, 20), nl.float32, buffer=nl.psum)), "dst is in psum; accepted: sbuf")
    refuse(sending(src=lambda: nl.ndarray((48, 20), nl.float32, buffer=nl.shared_hbm)), "src is in shared_hbm")
    refuse(sending(dst=lambda: nl.ndarray((48, 10), nl.float32)), r"shape of src, \(48, 20\), got \(48, 10\)")
    refuse(sending(dst=lambda: nl.ndarray((48, 20), nl.bfloat16)), "dtype of src, float32, got bfloat16")
    refuse(sending(send_to_rank=2), "send_to_rank must be 0 or 1, got 2")
    refuse(sending(recv_from_rank=-1), "recv_from_rank must be 0 or 1, got -1")
    refuse(sending(pipe_id="a"), "pipe_id must be an integer", error=TypeError)
    refuse(sending(dma_engine=1), "dma_engine must be a member", error=TypeError)
    refuse(sending(use_gpsimd_dma=True), "unexpected keyword", error=TypeError)


def test_both_sides_must_fit() -> None:
    def shapes(x: Any) -> None:
        columns = 4 + nl.program_id(0)
        tile = nl.ndarray((8, columns), nl.float32)
        nisa.memset(tile, 0.0)
        nisa.sendrecv(tile, tile, 1 - nl.program_id(0), 1 - nl.program_id(0), 0)

    def types(x: Any) -> None:
        tile = nl.ndarray((8, 4), (nl.float32, nl.int32)[nl.program_id(0)])
        nisa.memset(tile, 0)
        nisa.sendrecv(tile, tile, 1 - nl.program_id(0), 1 - nl.program_id(0), 0)

    def ranks(x: Any) -> None:
        tile = nl.ndarray((8, 4), nl.float32)
        nisa.memset(tile, 0)
        nisa.sendrecv(tile, tile, 0, 1 - nl.program_id(0), 0)

    refuse(shapes, r"has shape \(8, [45]\), but core [01] sends shape \(8, [45]\) at .*test_isa_sync.py")
    refuse(types, "has dtype (int32, but core 0 sends dtype float32|float32, but core 1 sends dtype int32)")
    refuse(ranks, "receives from core 0, which sends to core 0 at .*test_isa_sync.py")


def test_a_partner_that_never_comes_is_a_deadlock() -> None:
    def kernel(x: Any) -> None:
        if nl.program_id(0) == 0:
            sending()(x)

    refuse(
        kernel, "core 0 waits for sendrecv with pipe_id 0 at .*test_isa_sync.py.*core 1 has ended", error=DeadlockError
    )


# --- core_barrier ---------------------------------------------------------------------------------


def handed_over(x: Any, cores: Any = (0, 1), **options: Any) -> Any:
    """Each core writes half of a shared tensor, then reads the other half."""
    rank = nl.program_id(0)
    shared = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=shared[rank], src=x[rank])
    nisa.core_barrier(data=shared, cores=cores, **options)
    nisa.dma_copy(dst=out[rank], src=shared[1 - rank])
    return out


@pytest.mark.parametrize("cores", [(0, 1), [0, 1]])
@pytest.mark.parametrize("engine", [nisa.engine.gpsimd, nisa.engine.sync, nisa.engine.vector])
def test_a_barrier_orders_writes_and_reads(cores: Any, engine: Any) -> None:
    result = launch(lambda x: handed_over(x, cores, engine=engine), X, lnc=2)
    np.testing.assert_array_equal(result.outputs, X[::-1])
    barriers = [record for record in result.trace if record.opcode == "core_barrier"]
    assert [(record.core, record.engine) for record in barriers] in (
        [(0, engine.name), (1, engine.name)],
        [(1, engine.name), (0, engine.name)],
    )
    assert len({(record.attributes["memory"], record.attributes["sequence"]) for record in barriers}) == 1


def test_a_barrier_orders_only_its_own_tensor() -> None:
    def kernel(x: Any) -> None:
        rank = nl.program_id(0)
        first, second = (nl.ndarray(X.shape, x.dtype, buffer=nl.shared_hbm) for _ in range(2))
        for tensor in (first, second):
            nisa.dma_copy(dst=tensor[rank], src=x[rank])
        nisa.core_barrier(first, (0, 1))
        load(first[1 - rank])
        load(second[1 - rank])

    refuse(kernel, "race", error=RaceError)


def test_a_barrier_on_a_tile_orders_all_shared_tensors() -> None:
    def kernel(x: Any) -> Any:
        rank = nl.program_id(0)
        first, second, out = (nl.ndarray(X.shape, x.dtype, buffer=nl.shared_hbm) for _ in range(3))
        tile = load(x[rank])
        for tensor in (first, second):
            nisa.dma_copy(dst=tensor[rank], src=tile)
        nisa.core_barrier(tile, (0, 1))
        load(first[1 - rank])
        nisa.dma_copy(dst=out[rank], src=second[1 - rank])
        return out

    np.testing.assert_array_equal(outputs(kernel, X, lnc=2), X[::-1])


def test_accesses_after_a_barrier_race_again() -> None:
    def kernel(x: Any) -> None:
        rank = nl.program_id(0)
        shared = nl.ndarray(X.shape, x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=shared[rank], src=x[rank])
        nisa.core_barrier(shared, (0, 1))
        nisa.dma_copy(dst=shared[0], src=x[rank])

    refuse(kernel, "race", error=RaceError)


def test_barrier_refusals() -> None:
    refuse(handed_over, "core_barrier needs a launch on two cores", lnc=1)
    refuse(handed_over, "core_barrier needs gen3", lnc=1, target="trn1")
    refuse(lambda x: handed_over(x, (0,)), r"cores must be \(0, 1\), got \(0,\)")
    refuse(lambda x: handed_over(x, (1, 0)), r"cores must be \(0, 1\)")
    refuse(lambda x: handed_over(x, engine="gpsimd"), "engine must be a member", error=TypeError)
    refuse(
        lambda x: nisa.core_barrier(nl.ndarray((4,), nl.float32, buffer=nl.private_hbm), (0, 1)),
        "data is in private_hbm",
    )
    refuse(lambda x: nisa.core_barrier(None, (0, 1)), "data must be a tensor", error=TypeError)


def test_barriers_of_both_cores_are_on_the_same_tensor() -> None:
    def kernel(x: Any) -> None:
        tensors = [nl.ndarray((4,), nl.float32, buffer=nl.shared_hbm, name=name) for name in ("left", "right")]
        nisa.core_barrier(tensors[nl.program_id(0)], (0, 1))

    refuse(kernel, "core_barrier is on .*(left|right).* here, but on .*(left|right).* at .*test_isa_sync.py")


def test_crossed_waits_are_a_deadlock_that_names_both() -> None:
    def kernel(x: Any) -> None:
        shared = nl.ndarray((4,), nl.float32, buffer=nl.shared_hbm, name="shared")
        if nl.program_id(0) == 0:
            nisa.core_barrier(shared, (0, 1))
        else:
            sending()(x)

    refuse(
        kernel,
        r"core 0 waits for core_barrier on NkiTensor\(shared.*; core 1 waits for sendrecv with pipe_id 0",
        error=DeadlockError,
    )
