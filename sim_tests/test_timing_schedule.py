# SPDX-License-Identifier: Apache-2.0
"""Small kernels in time: what the event loop makes of them, against times computed by hand from the parameters."""

from __future__ import annotations

from typing import Any

import pytest
from launching import launch, nisa, nl
from timelines import DMA, TIMING, close, hbm, load_time, spans, store_time, tile, timeline, transfer_time

from nki_bn.simulator.timing import model
from nki_bn.simulator.timing.spans import Cause

ROW = 1024  # float32 columns: 4 KiB per partition
X = hbm(128, ROW)
VECTOR, SCALAR, TENSOR, COPY = TIMING.vector, TIMING.scalar, TIMING.tensor, TIMING.vector.plain
STREAM = ROW * COPY.cycles / TIMING.clock.vector
ON_SCALAR = {"dge_mode": nisa.dge_mode.hwdge, "engine": nisa.engine.scalar}


def copied(dst: Any, src: Any, engine: Any = nisa.engine.vector) -> None:
    nisa.tensor_copy(dst, src, engine=engine)


def times(kernel: Any, *args: Any, lnc: int = 1) -> list[tuple[float, float, float]]:
    return [(span.start, span.free, span.done) for span in spans(kernel, *args, lnc=lnc)]


def test_one_load() -> None:
    (span,) = spans(lambda x: nisa.dma_copy(tile(ROW), x) and None, X)
    flight = span.flight
    assert (span.engine, span.start, span.free) == ("sync", 0, DMA.hardware_trigger) and flight is not None
    assert (flight.arrival, flight.begun) == (DMA.first_load, DMA.first_load)
    assert close(flight.last, 1330 + 8 * (4.7 + 4096 / 27.2))
    assert close(span.done, load_time(4096)) and close(span.done, flight.last + 370)


def test_load_compute_store() -> None:
    def kernel(x: Any) -> None:
        a, b = tile(ROW), tile(ROW)
        nisa.dma_copy(a, x)
        copied(b, a)
        nisa.dma_copy(x, b)

    load, copy, store = spans(kernel, X)
    assert close(copy.start, load.done) and copy.cause == Cause(0, "RAW")
    assert close(copy.done, copy.start + STREAM + COPY.latency)
    assert close(copy.free, copy.start + STREAM + COPY.occupancy)
    assert close(store.start, copy.done + TIMING.semaphore.hardware_trigger) and store.cause == Cause(1, "RAW")
    assert close(store.done, store.start + store_time(4096))
    assert close(timeline(kernel, X).total, store.done)


def test_two_engines_overlap() -> None:
    def kernel(_: Any) -> None:
        a, b, c = tile(ROW), tile(ROW), tile(ROW)
        copied(b, a)
        copied(c, a, nisa.engine.scalar)
        copied(a, b)
        copied(a, c, nisa.engine.scalar)

    first, second, third, fourth = spans(kernel, X)
    scalar_stream = ROW / TIMING.clock.scalar
    assert (first.start, second.start) == (0, 0)
    # The third reads what the first wrote and replaces what the second read.
    second_done = scalar_stream + SCALAR.copy.latency
    assert close(second.done, second_done) and close(third.start, second_done + TIMING.semaphore.engine)
    assert third.cause == Cause(1, "WAR") and close(third.stalled, third.start - first.free)
    assert close(fourth.start, third.done + TIMING.semaphore.engine) and fourth.cause == Cause(2, "WAW")


def test_independent_instructions_of_one_engine_follow_at_its_occupancy() -> None:
    def kernel(_: Any) -> None:
        a, b, c = tile(ROW), tile(ROW), tile(ROW)
        copied(b, a)
        copied(c, a)
        copied(tile(ROW), c)

    first, second, third = spans(kernel, X)
    assert close(second.start, first.free) and second.cause == Cause(0, "order") and second.stalled == 0
    assert close(third.start, second.done + TIMING.semaphore.engine) and third.cause == Cause(1, "RAW")


def test_short_instructions_are_64_cycles_apart() -> None:
    def kernel(_: Any) -> None:
        a = tile(4)
        nisa.memset(a[:, 0:1], 0.0)
        nisa.memset(a[:, 1:2], 0.0)

    first, second = spans(kernel, X)
    assert close(second.start, 64 / TIMING.clock.vector) and 64 / TIMING.clock.vector > VECTOR.memset.occupancy + 1
    assert close(first.done, VECTOR.memset.cycles / TIMING.clock.vector + VECTOR.memset.latency)


def test_a_slot_is_reused_when_its_reader_is_done() -> None:
    def kernel(x: Any) -> None:
        slot, b = tile(ROW), tile(ROW)
        nisa.dma_copy(slot, x)
        copied(b, slot)
        nisa.dma_copy(slot, x)

    load, copy, again = spans(kernel, X)
    assert close(again.start, copy.done + TIMING.semaphore.hardware_trigger) and again.cause == Cause(1, "WAR")
    assert close(again.stalled, again.start - load.free)


def test_triggers_of_one_engine_keep_their_distance() -> None:
    def kernel(x: Any) -> None:
        a, b, c = tile(ROW), tile(ROW), tile(ROW)
        nisa.dma_copy(a, x)
        nisa.dma_copy(b, x)
        nisa.dma_copy(c, x, **ON_SCALAR)

    first, second, third = spans(kernel, X)
    assert (second.start, second.stalled) == (580, 580 - 565) and second.cause == Cause(0, "spacing")
    assert third.start == 0


def test_software_triggers_are_short_and_as_far_apart() -> None:
    def kernel(x: Any, y: Any) -> None:
        a, b, c = tile(ROW), tile(ROW), tile(ROW)
        nisa.dma_copy(a, x, dge_mode=nisa.dge_mode.swdge)
        nisa.dma_copy(b, x, dge_mode=nisa.dge_mode.swdge)
        copied(c, c)
        nisa.dma_copy(y, c, dge_mode=nisa.dge_mode.swdge)

    first, second, copy, store = spans(kernel, X, X)
    assert (first.engine, first.free, second.start) == ("gpsimd", DMA.software_trigger, DMA.spacing)
    assert first.flight is not None and first.flight.arrival == DMA.first_software
    assert close(store.start, copy.done + TIMING.semaphore.software_trigger)


def test_a_queue_is_first_in_first_out() -> None:
    def kernel(x: Any) -> None:
        a, b = tile(ROW), tile(ROW)
        nisa.dma_copy(a, x)
        nisa.dma_copy(b, x)

    first, second = (span.flight for span in spans(kernel, X))
    assert first is not None and second is not None
    assert close((second.arrival, second.begun), (580 + 1330, first.last)) and second.behind == 0
    assert close(second.last, first.last + 8 * transfer_time(4096)) and first.behind is None


def test_two_queues_share_the_engines() -> None:
    """Equal descriptors take turns: both transfers take twice as long."""

    def kernel(x: Any) -> None:
        a, b = tile(ROW), tile(ROW)
        nisa.dma_copy(a, x)
        nisa.dma_copy(b, x, **ON_SCALAR)

    for span in spans(kernel, X):
        assert span.flight is not None and close(span.flight.last, DMA.first_load + 16 * transfer_time(4096))


def test_longer_descriptors_get_more_of_an_engine() -> None:
    """Turns by descriptor: 8 of 4 KiB against 64 of 512 B; when the first are through, the others have the engine."""

    def kernel(x: Any, y: Any) -> None:
        a, b = tile(ROW), tile(ROW)
        nisa.dma_copy(a, x)
        nisa.dma_copy(b, y[:, :, 0], **ON_SCALAR)

    long, short = (span.flight for span in spans(kernel, X, hbm(128, 8, 2, 128)))
    assert long is not None and short is not None
    turn = transfer_time(4096) + transfer_time(512)
    assert close(long.last, DMA.first_load + 8 * turn)
    assert close(short.last, DMA.first_load + 8 * turn + 56 * transfer_time(512))


def test_transfers_on_other_engines_do_not_wait() -> None:
    def kernel(x: Any) -> None:
        a = tile(ROW)
        nisa.dma_copy(a[0:64, :], x[0:64, :])
        nisa.dma_copy(a[64:128, :], x[64:128, :])

    first, second = (span.flight for span in spans(kernel, X))
    assert second is not None and first is not None and second.behind is None
    assert close(second.last, 580 + DMA.first_load + 8 * transfer_time(4096)) and second.begun < first.last


def test_two_cores_share_hbm() -> None:
    """One core moves 422 GB/s with 4 KiB rows; two together what the stack gives."""

    def kernel(x: Any) -> None:
        nisa.dma_copy(tile(ROW), x)

    alone = 16 * 4096 / transfer_time(4096)
    assert alone < TIMING.hbm.pair < 2 * alone
    (one,) = spans(kernel, X)
    for span in spans(kernel, X, lnc=2):
        assert span.flight is not None and one.flight is not None
        slower = 2 * alone / TIMING.hbm.pair
        assert close(span.flight.last - DMA.first_load, slower * (one.flight.last - DMA.first_load))


def test_a_copy_within_hbm_counts_twice_for_the_stack() -> None:
    def kernel(x: Any) -> None:
        nisa.dma_copy(nl.ndarray((256, 4096), nl.float32, buffer=nl.private_hbm), x[:, 0:4096])

    (span,) = spans(kernel, hbm(256, 4097))
    nbytes = 256 * 16384
    assert span.flight is not None and close(span.flight.last - DMA.first_load, 2 * nbytes / TIMING.hbm.pair)


def test_a_change_of_function_loads_a_table() -> None:
    """The first table is part of the launch; loading does not wait for operands."""

    def kernel(x: Any) -> None:
        a, b = tile(ROW), tile(ROW)
        nisa.dma_copy(a, x)
        nisa.activation(b, nl.square, b)
        nisa.activation(b, nl.copy, b)
        nisa.activation(b, nl.exp, a)
        nisa.activation(b, nl.rsqrt, b)

    load, square, copy, exp, rsqrt = spans(kernel, X)
    assert square.start == 0 and square.table_load is None and copy.table_load is None
    assert exp.table_load is not None and close(exp.table_load, (copy.free, copy.free + 1283))
    assert close(exp.start, max(exp.table_load[1], load.done, copy.done + TIMING.semaphore.engine))
    assert rsqrt.table_load is not None and close(rsqrt.table_load, (exp.free, exp.free + 1283))
    assert close(rsqrt.start, rsqrt.table_load[1]) and rsqrt.stalled == 0


def test_reading_the_accumulators_out_holds_scalar() -> None:
    def kernel(_: Any) -> None:
        a, b, c, column, other = tile(ROW), tile(ROW), tile(ROW), tile(1), tile(1)
        nisa.activation(b, nl.copy, a, reduce_op=nl.add, reduce_res=column, reduce_cmd=nisa.reduce_cmd.reset_reduce)
        copied(c, a, nisa.engine.scalar)
        copied(other, column)

    summed, following, reader = spans(kernel, X)
    stream = ROW / TIMING.clock.scalar
    assert close(summed.free, stream + SCALAR.activation.occupancy + SCALAR.read_out.occupancy)
    assert close(following.start, summed.free)
    assert close(reader.start, stream + SCALAR.activation.occupancy + SCALAR.read_out.latency + TIMING.semaphore.engine)


def product_kernel(count: int, pause: int = 0) -> Any:
    """``count`` independent products, and after a pause of ``pause`` columns on Vector one that waits for it."""

    def kernel(_: Any) -> None:
        a, b = tile(128, nl.bfloat16), tile(512, nl.bfloat16)
        for _ in range(count):
            nisa.nc_matmul(nl.ndarray((128, 512), nl.float32, buffer=nl.psum, address=(0, 0)), a, b)
        if pause:
            copied(tile(pause)[:, 0:pause], tile(pause))
            nisa.memset(a, 0.0, engine=nisa.engine.vector)
            nisa.nc_matmul(nl.ndarray((128, 512), nl.float32, buffer=nl.psum, address=(0, 0)), a, b)

    return kernel


def test_tensor_is_cold_until_it_has_worked_for_a_while() -> None:
    """Products of 512 columns: 213 ns warm, twice that cold; the one in which it gets warm is in between."""
    warm = 512 / TIMING.clock.tensor
    cold = 2 * warm
    got = times(product_kernel(12), X)
    starts = [start for start, _, _ in got]
    steps = [later - start for start, later in zip(starts, starts[1:], strict=False)]
    whole = int(TENSOR.cold_ns // (cold + 2))
    assert close(steps[:whole], [cold + 2] * whole) and close(steps[whole + 1 :], [warm + 2] * (len(steps) - whole - 1))
    rest = TENSOR.cold_ns - whole * (cold + 2)
    assert close(steps[whole], rest + (warm - rest / 2) + 2)
    assert close(got[0][2], cold + TENSOR.matmul.latency)


@pytest.mark.parametrize(("pause", "warm"), [(4000, True), (20000, False)])
def test_a_long_pause_cools_tensor(pause: int, warm: bool) -> None:
    """After the pause weights are loaded where nothing hides it, at the speed that Tensor has then."""
    *before, fill, last = spans(product_kernel(20, pause), X)
    idle = last.start - before[19].free
    assert (idle < TENSOR.cold_ns) == warm and last.cause.why == "RAW"
    columns = 512 + TENSOR.weight_load_cycles
    assert close(last.free - last.start, columns / TIMING.clock.tensor * (1 if warm else 2) + 2)
    assert close(last.start, fill.done + TIMING.semaphore.tensor)


def exchange(x: Any) -> None:
    a, b = tile(2), tile(2)
    other = 1 - nl.program_id(0)
    if nl.program_id(0) == 1:
        copied(tile(ROW), tile(ROW))
        nisa.memset(a, 1.0)
    nisa.sendrecv(a, b, other, other, pipe_id=0)
    copied(a, b)


def test_sendrecv_starts_when_both_cores_are_there() -> None:
    by_core = [[span for span in spans(exchange, X, lnc=2) if span.record.core == core] for core in (0, 1)]
    (early, after_early), (_, fill, late, after_late) = by_core
    start = fill.done + TIMING.semaphore.hardware_trigger
    done = start + TIMING.cores.sendrecv + 8 * transfer_time(8)
    assert close([early.start, late.start], [start] * 2) and close([early.done, late.done], [done] * 2)
    assert close(early.free, start + DMA.hardware_trigger) and early.engine == "sync"
    assert early.cause == Cause(late.record.index, "peer") and late.cause == Cause(fill.record.index, "RAW")
    assert close([after_early.start, after_late.start], [done] * 2)


def test_a_barrier_holds_its_engine_until_both_cores_are_there() -> None:
    def kernel(x: Any) -> None:
        shared = nl.ndarray((256, ROW), nl.float32, buffer=nl.shared_hbm)
        a = tile(ROW)
        core = nl.program_id(0)
        nisa.dma_copy(shared[nl.ds(128 * core, 64 + 64 * core), :], a[0 : 64 + 64 * core, :])
        nisa.core_barrier(shared, (0, 1))
        nisa.dma_copy(a, shared[nl.ds(128 - 128 * core, 128), :])

    first, second = [[span for span in spans(kernel, X, lnc=2) if span.record.core == core] for core in (0, 1)]
    start = max(first[0].done, second[0].done)
    for store, barrier, load in (first, second):
        assert barrier.engine == "gpsimd" and close((barrier.start, barrier.free), (start, start + 2000))
        assert close(load.start, barrier.done + TIMING.semaphore.hardware_trigger) and store.done <= start
        assert load.cause == Cause(barrier.record.index, "RAW")


def test_a_skipped_copy_moves_nothing() -> None:
    def kernel(x: Any) -> None:
        register = nisa.register_alloc(9)
        nisa.dma_copy(tile(ROW), x.ap([[ROW, 128], [1, ROW]], scalar_offset=register), oob_mode=nisa.oob_mode.skip)

    import numpy as np

    trace = launch(kernel, np.zeros((128, ROW), np.float32)).trace
    (span,) = model(trace).spans
    assert trace.records[0].attributes["skipped"] and span.flight is None and span.done == DMA.hardware_trigger


def test_an_edge_to_a_later_instruction_of_the_same_engine_is_refused() -> None:
    def kernel(_: Any) -> None:
        first = nisa.memset(tile(8), 0.0)
        first.depends_on(nisa.memset(tile(8), 0.0))

    with pytest.raises(ValueError, match="instructions wait for others that come later on their engine: memset at"):
        timeline(kernel, X)


def test_an_edge_to_a_later_instruction_of_another_engine_is_kept() -> None:
    def kernel(_: Any) -> None:
        a, b = tile(8), tile(8)
        first = nisa.memset(a, 0.0)
        first.depends_on(nisa.memset(b, 0.0, engine=nisa.engine.gpsimd))

    vector, gpsimd = spans(kernel, X)
    assert close(vector.start, gpsimd.done + TIMING.semaphore.engine) and vector.cause == Cause(1, "after")


def test_the_model_is_deterministic() -> None:
    first, second = (spans(exchange, X, lnc=2) for _ in range(2))
    assert [(s.start, s.free, s.done, s.cause, s.stalled) for s in first] == [
        (s.start, s.free, s.done, s.cause, s.stalled) for s in second
    ]


@pytest.mark.parametrize("target", ["trn1", "trn3", "gen4"])
def test_only_trn2_is_modelled(target: str) -> None:
    trace = launch(exchange, X, lnc=2, dry=True).trace
    with pytest.raises(ValueError, match=r"trn[13]\.toml has no timing"):
        model(trace, target)
    assert model(trace, "gen3").target == "trn2"
