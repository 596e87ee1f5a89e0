# SPDX-License-Identifier: Apache-2.0
"""Edges by name and by handle, device loops around them, registers with values known only at run time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from launching import launch, load, nisa, nki, nl, outputs, store

from nki_bn.simulator import NkiValidationError, RunOptions, Shaped, run, simulate
from nki_bn.simulator.timing import model
from nki_bn.simulator.trace import Record

X = np.linspace(-2, 2, 64, dtype=np.float32).reshape(4, 16)


def two_branches(x: Any) -> Any:
    """Two instructions without data between them, on two engines, and their sum."""
    data = load(x)
    a, b, c = (nl.ndarray(x.shape, x.dtype) for _ in range(3))
    nisa.activation(dst=a, op=nl.exp, data=data, name="power")
    nisa.tensor_scalar(dst=b, data=data, op0=nl.add, operand0=1.0, name="plus1")
    nisa.tensor_tensor(dst=c, data1=a, data2=b, op=nl.add, name="sum")
    return store(c)


KERNEL = nki.jit(two_branches)
EXPECTED = np.exp(X.astype(np.float64)).astype(np.float32) + (X + np.float32(1))


def named(kernel: Any, lnc: int = 1, dry: bool = False) -> dict[str, Record]:
    """The records with names."""
    argument = Shaped(X.shape, "float32") if dry else X
    # Both cores of a pair store the same result, which only lenient runs allow.
    trace = run(kernel, (argument,), {}, lnc, RunOptions(dry=dry, strict=lnc == 1)).trace
    return {record.name: record for record in trace if record.name}


@pytest.mark.parametrize("producers", ["power", ["power"], ("power",)])
@pytest.mark.parametrize("dry", [False, True])
def test_a_schedule_adds_edges_and_changes_no_result(producers: Any, dry: bool) -> None:
    scheduled = KERNEL.with_schedule([("plus1", producers)])
    records = named(scheduled, dry=dry)
    assert records["plus1"].after == [records["power"].index]
    assert not records["sum"].after and not named(KERNEL, dry=dry)["plus1"].after
    np.testing.assert_array_equal(simulate(scheduled, RunOptions())(X), EXPECTED)


def test_pairs_with_one_consumer_add_up() -> None:
    records = named(KERNEL.with_schedule([("sum", "power"), ("sum", ["plus1"])]))
    assert records["sum"].after == [records["power"].index, records["plus1"].index]


def test_the_timing_model_waits_for_the_producer() -> None:
    def starts(kernel: Any) -> dict[str, Any]:
        trace = run(kernel, (Shaped(X.shape, "float32"),), {}, 1, RunOptions(dry=True)).trace
        spans = model(trace, "trn2").spans
        return {record.name: spans[record.index] for record in trace if record.name}

    free, bound = starts(KERNEL), starts(KERNEL.with_schedule([("plus1", "power")]))
    assert free["plus1"].start < free["power"].done <= bound["plus1"].start


def test_a_schedule_stays_with_the_kernel() -> None:
    scheduled = KERNEL.with_schedule([("plus1", "power")])
    for kernel in (scheduled[1], nki.simulate(scheduled), simulate(scheduled, RunOptions())[1]):
        assert named(kernel)["plus1"].after
    pair = named(scheduled[2], lnc=2)
    # Each core waits for its own instruction.
    assert pair["plus1"].core == 1 and pair["plus1"].after == [pair["power"].index]


@pytest.mark.parametrize(
    ("schedule", "error", "match"),
    [
        ("plus1", TypeError, "takes a list of pairs"),
        ([("plus1",)], TypeError, "takes pairs"),
        ([("plus1", 3)], TypeError, "takes names of instructions"),
        ([(1, "power")], TypeError, "takes names of instructions"),
        ([("plus1", ["power", None])], TypeError, "takes names of instructions"),
        ([("plus1", ["power", "plus1"])], NkiValidationError, "'plus1' cannot wait for itself"),
    ],
)
def test_refused_schedules(schedule: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        KERNEL.with_schedule(schedule)


@pytest.mark.parametrize("pair", [("plus2", "power"), ("plus1", ["power", "times"])])
def test_names_that_no_instruction_has(pair: Any) -> None:
    with pytest.raises(NkiValidationError, match="names no instruction: (plus2|times)$"):
        named(KERNEL.with_schedule([pair]))


def test_an_edge_against_the_order_of_the_program_gives_a_warning() -> None:
    with pytest.warns(UserWarning, match="'power' comes before 'plus1' in the program"):
        records = named(KERNEL.with_schedule([("power", "plus1")]))
    assert not records["power"].after


def looped(inside: Callable[[Any, Any], Any], outside: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """A kernel with a named instruction before a loop, one in it, and one after it."""

    def kernel(x: Any) -> Any:
        tiles = [load(x) for _ in range(3)]
        before = nisa.memset(dst=tiles[0], value=1.0, name="before")
        held = []

        def body(i: Any) -> None:
            first = nisa.memset(dst=tiles[1], value=2.0, name="first")
            inside(nisa.memset(dst=tiles[1], value=3.0, name="second"), (before, first))
            held.append(first)

        nl.fori_loop(0, 2, body)
        outside(nisa.memset(dst=tiles[2], value=4.0, name="after"), (before, held[-1]))
        return store(tiles[2])

    return kernel


def nothing(consumer: Any, producers: Any) -> None:
    pass


def test_an_instruction_in_a_loop_waits_for_its_own_pass_and_for_what_is_around() -> None:
    kernel = looped(lambda consumer, producers: consumer.depends_on(*producers), nothing)
    records = [record for record in launch(kernel, X).trace if record.name]
    before, *passes, after = records
    assert [record.name for record in passes] == ["first", "second"] * 2
    assert [passes[1].after, passes[3].after] == [[before.index, passes[0].index], [before.index, passes[2].index]]
    assert before.loops == after.loops == () and passes[0].loops == passes[3].loops != ()
    by_name = nki.jit(looped(nothing, nothing)).with_schedule([("second", ["before", "first"])])
    again = [record for record in run(by_name, (X,), {}, 1, RunOptions()).trace if record.name]
    assert [record.after for record in again] == [record.after for record in records]


def test_nothing_waits_for_an_instruction_inside_a_loop_that_it_is_not_in() -> None:
    kernel = looped(nothing, lambda consumer, producers: consumer.depends_on(producers[1]))
    with pytest.raises(NkiValidationError, match="in another device loop; accepted: a producer in the same loop"):
        launch(kernel, X)
    named_edge = nki.jit(looped(nothing, nothing)).with_schedule([("after", "second")])
    with pytest.raises(NkiValidationError, match="in another device loop"):
        run(named_edge, (X,), {}, 1, RunOptions())


def test_loops_nest_and_end() -> None:
    def kernel(x: Any) -> Any:
        tile = load(x)

        def outer(i: Any) -> None:
            nl.fori_loop(0, 2, lambda j: (nisa.memset(dst=tile, value=0.0, name="inner"), None)[1])
            nisa.memset(dst=tile, value=1.0, name="outer")

        nl.fori_loop(0, 2, outer)
        nisa.memset(dst=tile, value=2.0, name="end")
        return store(tile)

    depths = [(r.name, len(r.loops)) for r in launch(kernel, X).trace if r.name]
    assert depths == [*[("inner", 2), ("inner", 2), ("outer", 1)] * 2, ("end", 0)]


# --- registers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(np.int32, -(2**31)), (np.uint32, 2**32 - 1), (np.int8, -7), (np.uint16, 65535), (np.float32, 1.25)],
)
@pytest.mark.parametrize("place", ["sbuf", "hbm"])
def test_registers_load_and_store_one_element(dtype: Any, value: float, place: str) -> None:
    def kernel(x: Any) -> Any:
        register, other = nisa.register_alloc(), nisa.register_alloc(5)
        nisa.register_load(register, load(x) if place == "sbuf" else x)
        nisa.register_move(other, register)
        out = nl.ndarray((1, 1), x.dtype, buffer=nl.shared_hbm)
        tile = nl.ndarray((1, 1), x.dtype)
        nisa.register_store(out if place == "hbm" else tile, other)
        if place == "sbuf":
            nisa.dma_copy(dst=out, src=tile)
        return out

    given = np.array([[value]], dtype)
    np.testing.assert_array_equal(outputs(kernel, given), given)


def test_registers_are_loop_bounds_and_indices() -> None:
    def kernel(x: Any, bounds: Any) -> Any:
        lower, upper = nisa.register_alloc(), nisa.register_alloc()
        nisa.register_load(lower, bounds[0:1])
        nisa.register_load(upper, bounds[1:2])
        out = nl.zeros(x.shape, x.dtype, buffer=nl.shared_hbm)
        tile = load(x)
        nl.fori_loop(lower, upper, lambda i: (nisa.dma_copy(out.select(1, i), tile.select(1, i)), None)[1])
        return out

    expected = np.zeros_like(X)
    expected[:, 3:11] = X[:, 3:11]
    np.testing.assert_array_equal(outputs(kernel, X, np.array([3, 11], np.int32)), expected)


def test_what_a_dry_run_takes_registers_for() -> None:
    """Loop counters are known; what comes from memory is 0."""

    def kernel(x: Any, count: Any) -> Any:
        loaded = nisa.register_alloc()
        nisa.register_load(loaded, count)
        tile = load(x)
        nl.fori_loop(0, loaded, lambda i: (nisa.memset(dst=tile, value=0.0), None)[1])
        nl.fori_loop(2, 4, lambda i: (nisa.dma_copy(tile.select(1, i), x.select(1, i)), None)[1])
        return store(tile)

    arguments = (Shaped(X.shape, "float32"), Shaped((1, 1), "int32"))
    records = launch(kernel, *arguments, dry=True).trace.records
    assert not any(record.opcode == "memset" for record in records)
    assert [record.reads[0].offset for record in records if len(record.reads[0].shape) == 1] == [8, 12]


def test_every_instruction_takes_a_run_time_address_on_chip() -> None:
    def kernel(x: Any) -> Any:
        tile, register = load(x), nisa.register_alloc(5)
        nisa.memset(dst=tile.select(1, register), value=9.0)
        shuffled = nl.ndarray((4, 1), x.dtype)
        nisa.nc_stream_shuffle(
            shuffled, tile.ap([[16, 4], [1, 1]], scalar_offset=register, indirect_dim=1), [1, 0, 2, 3] * 8
        )
        nisa.tensor_copy(tile.ap([[16, 4], [1, 1]], scalar_offset=nisa.register_alloc(7), indirect_dim=1), shuffled)
        return store(tile)

    expected = X.copy()
    expected[:, [5, 7]] = 9
    np.testing.assert_array_equal(outputs(kernel, X), expected)


@pytest.mark.parametrize(
    ("index", "error", "match"),
    [
        (lambda x, i: 3.5, TypeError, "must be a register or a one-element tile, got 3.5"),
        (lambda x, i: i, NkiValidationError, "run-time index is in private_hbm; accepted: sbuf"),
        (lambda x, i: load(x), NkiValidationError, "a run-time index is one element"),
        (lambda x, i: nisa.register_alloc(), NkiValidationError, "before it was set"),
        (lambda x, i: nisa.register_alloc(4), NkiValidationError, "run-time index 4 is out of range"),
    ],
)
def test_refused_indices(index: Any, error: type[Exception], match: str) -> None:
    def kernel(x: Any, i: Any) -> None:
        nisa.dma_copy(nl.ndarray((1, 16), x.dtype), x.ap([[16, 1], [1, 16]], scalar_offset=index(x, i)))

    with pytest.raises(error, match=match):
        launch(kernel, X, np.zeros((1, 1), np.int32))
