# SPDX-License-Identifier: Apache-2.0
"""Rows gathered and scattered by vectors of indices: values against NumPy, skipped rows, refusals, faults, time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from launching import launch, load, nisa, nl, outputs, store
from timelines import DMA, close, hbm, records, tile

from nki_bn.simulator import NkiValidationError, RaceError, UninitializedReadError
from nki_bn.simulator.errors import IndexRangeError
from nki_bn.simulator.timing.dependencies import dependencies
from nki_bn.simulator.timing.dma import issuer_of, transfer_of
from nki_bn.simulator.trace import Trace

RNG = np.random.default_rng(5)
BF16 = np.dtype(ml_dtypes.bfloat16)
TABLE = RNG.normal(size=(40, 3, 12)).astype(np.float32)
ROWS = RNG.integers(0, 40, (64, 1)).astype(np.uint32)
SKIP = nisa.oob_mode.skip


def filled(shape: tuple[int, ...], dtype: str, value: float = 7) -> Any:
    """Inside a kernel: a tile full of ``value``."""
    made = nl.ndarray(shape, dtype)
    nisa.memset(dst=made, value=value)
    return made


def gathered(view: Callable[[Any, Any], Any], **options: Any) -> Callable[..., Any]:
    """A kernel that gathers what ``view(table, index tile)`` says into a tile of sevens."""

    def kernel(table: Any, rows: Any) -> Any:
        source = view(table, load(rows))
        dst = filled(source.shape, table.dtype)
        nisa.dma_copy(dst=dst, src=source, **options)
        return store(dst)

    return kernel


def selected(table: Any, index: Any) -> Any:
    return table.vector_select(0, index)


def patterned(table: Any, index: Any) -> Any:
    return table.ap([[36, index.shape[0]], [12, 3], [1, 12]], vector_offset=index, indirect_dim=0)


@pytest.mark.parametrize("view", [selected, patterned])
@pytest.mark.parametrize("dtype", [np.float32, BF16, np.int32, np.uint8])
@pytest.mark.parametrize("index", [np.uint32, np.int32])
def test_gathers_rows_bit_by_bit(view: Any, dtype: Any, index: Any) -> None:
    table = (1000 * TABLE).astype(dtype)
    result = outputs(gathered(view), table, ROWS.astype(index))
    np.testing.assert_array_equal(result, table[ROWS[:, 0]])


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        # Views of the other dimensions go on after the selection.
        (lambda t, i: t.vector_select(0, i)[:, 1], lambda t, r: t[r, 1]),
        (lambda t, i: t.vector_select(0, i)[:, :, 3:11:2], lambda t, r: t[r, :, 3:11:2]),
        (lambda t, i: t.vector_select(0, i).permute((0, 2, 1)), lambda t, r: t[r].transpose(0, 2, 1)),
        (lambda t, i: t.vector_select(0, i).flatten_dims(1, 2), lambda t, r: t[r].reshape(-1, 36)),
        (lambda t, i: t.vector_select(0, i).reshape_dim(2, (3, -1)), lambda t, r: t[r].reshape(-1, 3, 3, 4)),
        (lambda t, i: t.vector_select(0, i).expand_dim(1), lambda t, r: t[r][:, None]),
        # And before it.
        (lambda t, i: t[:, 2].vector_select(0, i), lambda t, r: t[r, 2]),
        (lambda t, i: t[5:].vector_select(0, i), lambda t, r: t[5:][r]),
        # The leading stride of a pattern does not count; an offset does.
        (lambda t, i: t.ap([[1, 64], [1, 5]], offset=14, vector_offset=i), lambda t, r: t[r].reshape(-1, 36)[:, 14:19]),
        (lambda t, i: t.ap([[36, 64], [1, 1]], vector_offset=i), lambda t, r: t[r, 0, :1]),
        # Rows of a reshape of the whole tensor are its rows.
        (lambda t, i: t.reshape((120, 12)).ap([[12, 64], [1, 12]], vector_offset=i), lambda t, r: t.reshape(-1, 12)[r]),
        # Other element types: stride and offset count their elements.
        (
            lambda t, i: t.ap([[72, 64], [2, 36]], offset=1, dtype=nl.uint16, vector_offset=i).expand_dim(2),
            lambda t, r: t.view(np.uint16)[r].reshape(-1, 72, 1)[:, 1::2],
        ),
    ],
)
def test_views_around_a_gather(view: Any, expected: Any) -> None:
    rows = ROWS % 35

    def kernel(table: Any, index: Any) -> Any:
        source = view(table, load(index))
        dst = nl.ndarray(source.shape, source.dtype)
        nisa.dma_copy(dst=dst, src=source)
        return store(dst)

    np.testing.assert_array_equal(outputs(kernel, TABLE, rows), expected(TABLE, rows[:, 0]))


def test_a_gather_converts_through_float32() -> None:
    def kernel(table: Any, rows: Any) -> Any:
        dst = nl.ndarray((64, 3, 12), nl.bfloat16)
        nisa.dma_copy(dst=dst, src=table.vector_select(0, load(rows)), dge_mode=nisa.dge_mode.swdge)
        return store(dst)

    np.testing.assert_array_equal(outputs(kernel, TABLE, ROWS), TABLE[ROWS[:, 0]].astype(BF16))


def test_a_row_may_reach_beyond_its_own_as_far_as_the_tensor_goes() -> None:
    view = lambda t, i: t.ap([[36, 2], [1, 72]], vector_offset=i)  # noqa: E731 - two rows from each index on
    rows = np.array([[38], [0]], np.uint32)
    result = outputs(gathered(view), TABLE, rows)
    np.testing.assert_array_equal(result, TABLE.reshape(40, 36)[[[38, 39], [0, 1]]].reshape(2, 72))
    with pytest.raises(IndexRangeError, match="index 39 of row 1 is out of range for 39 rows"):
        outputs(gathered(view), TABLE, np.array([[0], [39]], np.uint32))


@pytest.mark.parametrize("bad", [40, 2**32 - 1])
def test_rows_out_of_range_raise_or_stay(bad: int) -> None:
    rows = ROWS.copy()
    rows[[3, 10], 0] = bad
    with pytest.raises(IndexRangeError, match=f"run-time index {bad} of row 3 is out of range for 40 rows"):
        outputs(gathered(selected), TABLE, rows)
    expected = TABLE[np.minimum(rows[:, 0], 39)]
    expected[[3, 10]] = 7
    np.testing.assert_array_equal(outputs(gathered(selected, oob_mode=SKIP), TABLE, rows), expected)


def test_negative_rows_are_out_of_range() -> None:
    rows = np.array([[-1], [2]], np.int32)
    with pytest.raises(IndexRangeError, match="index -1 of row 0"):
        outputs(gathered(selected), TABLE, rows)
    np.testing.assert_array_equal(outputs(gathered(selected, oob_mode=SKIP), TABLE, rows)[0], np.full((3, 12), 7))


def test_a_skipped_gather_keeps_integers_that_float32_cannot_hold() -> None:
    table = np.array([[2**31 - 1, 2**24 + 1]], np.int32)

    def kernel(table: Any, rows: Any) -> Any:
        dst = filled((2, 2), nl.int32, 2**30 + 1)
        nisa.dma_copy(dst=dst, src=table.vector_select(0, load(rows)), oob_mode=SKIP)
        return store(dst)

    result = outputs(kernel, table, np.array([[5], [0]], np.uint32))
    np.testing.assert_array_equal(result, [[2**30 + 1] * 2, table[0]])


def test_a_gather_of_which_nothing_is_in_range_moves_nothing() -> None:
    result = launch(gathered(selected, oob_mode=SKIP), TABLE, ROWS + 40)
    assert (result.outputs == 7).all()
    assert [record.attributes.get("skipped") for record in result.trace if record.opcode == "dma_copy"][1]


def scatter(out: Any, x: Any, rows: Any, **options: Any) -> None:
    nisa.dma_copy(dst=out.vector_select(0, load(rows)), src=load(x), **options)


def test_scatters_rows() -> None:
    rows = RNG.permutation(40)[:32].astype(np.uint32)[:, None]
    values = RNG.normal(size=(32, 3, 12)).astype(np.float32)
    out = TABLE.copy()
    launch(scatter, out, values, rows)
    expected = TABLE.copy()
    expected[rows[:, 0]] = values
    np.testing.assert_array_equal(out, expected)


def test_a_scatter_skips_rows_out_of_range() -> None:
    rows = np.array([[1], [77], [39], [40]], np.uint32)
    values = RNG.normal(size=(4, 3, 12)).astype(np.float32)
    out, expected = TABLE.copy(), TABLE.copy()
    launch(lambda *tensors: scatter(*tensors, oob_mode=SKIP), out, values, rows)
    expected[[1, 39]] = values[[0, 2]]
    np.testing.assert_array_equal(out, expected)
    with pytest.raises(IndexRangeError, match="index 77 of row 1"):
        launch(scatter, TABLE.copy(), values, rows)


def test_single_elements_scatter() -> None:
    """One element per partition into a table of one column, as routers of experts do."""
    rows = RNG.permutation(200)[:128].astype(np.int32)[:, None]
    values = RNG.normal(size=(128, 1)).astype(np.float32)
    out = np.zeros((200, 1), np.float32)
    launch(
        lambda o, x, r: nisa.dma_copy(dst=o.ap([[1, 128], [1, 1]], vector_offset=load(r)), src=load(x)),
        out,
        values,
        rows,
    )
    expected = np.zeros_like(out)
    expected[rows[:, 0]] = values
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("columns", [1, 2])
def test_transposes_gathered_rows(columns: int) -> None:
    table = RNG.normal(size=(300, 64)).astype(BF16)
    index = RNG.integers(0, 300, (128, columns)).astype(np.uint32)
    rows = 128 * columns - 16 * (columns - 1)

    def kernel(table: Any, index: Any) -> Any:
        dst = nl.ndarray((64, rows), table.dtype)
        nisa.dma_transpose(dst=dst, src=table.ap([[64, rows], [1, 64]], vector_offset=load(index)))
        return store(dst)

    # The indices are read column by column, and only as many as there are rows.
    np.testing.assert_array_equal(outputs(kernel, table, index), table[index.T.reshape(-1)[:rows]].T)


def test_transposes_gathered_blocks_and_skips() -> None:
    table = RNG.normal(size=(20, 1, 4, 32)).astype(BF16)
    index = RNG.integers(0, 20, (16, 1)).astype(np.uint32)
    index[5] = 20

    def kernel(table: Any, index: Any) -> Any:
        dst = filled((32, 1, 4, 16), table.dtype)
        nisa.dma_transpose(dst=dst, src=table.vector_select(0, load(index)), axes=(3, 1, 2, 0), oob_mode=SKIP)
        return store(dst)

    expected = table[np.minimum(index[:, 0], 19)].transpose(3, 1, 2, 0)
    expected[..., 5] = 7
    np.testing.assert_array_equal(outputs(kernel, table, index), expected)


def refused(match: str, call: Callable[..., Any], *arrays: Any, target: str = "trn2") -> None:
    with pytest.raises(NkiValidationError, match=match):
        launch(lambda *tensors: call(*tensors), *(arrays or (TABLE, ROWS)), target=target)


def copy_rows(view: Any, **options: Any) -> Any:
    return lambda t, i: nisa.dma_copy(dst=nl.ndarray((64, 3, 12), t.dtype), src=view(t, i), **options)


def test_refusals_of_views() -> None:
    both = {"vector_offset": None, "scalar_offset": 1}
    refused("vector_select dim must be 0, got 1", lambda t, i: t.vector_select(1, load(i)))
    refused("vector_offset is in private_hbm; accepted: sbuf", selected)
    refused("vector_offset is float32; accepted: int32, uint32", lambda t, i: selected(t, filled((64, 1), "float32")))
    refused("vector_offset must be \\(P, 1\\)", lambda t, i: selected(t, filled((8, 2), "uint32", 1)))
    refused("needs a tensor in HBM", lambda t, i: selected(load(t), load(i)))
    refused("one run-time index only", lambda t, i: selected(selected(t, load(i)), load(i)))
    refused("one run-time index only", lambda t, i: selected(t, load(i)).select(1, nisa.register_alloc(0)))
    refused("indirect_dim must be 0", lambda t, i: t.ap([[36, 64], [1, 12]], vector_offset=load(i), indirect_dim=1))
    refused("exclude each other", lambda t, i: t.ap([[36, 64], [1, 12]], **{**both, "vector_offset": load(i)}))
    refused("view of a tensor with a run-time index", lambda t, i: selected(t, load(i)).view(nl.int32))
    for view in (
        lambda t: t[0],
        lambda t: t[1:],
        lambda t: t.permute((1, 0, 2)),
        lambda t: t.flatten_dims(0, 1),
        lambda t: t.expand_dim(0),
        lambda t: t.reshape((128, 18)),
        lambda t: t.reshape_dim(0, (2, 32)),
    ):
        refused("dimension 0 of .* is selected by a vector", lambda t, i, view=view: view(selected(t, load(i))))
    with pytest.raises(TypeError, match="vector_offset must be a tile in SBUF, got 3"):
        launch(lambda t: t.vector_select(0, 3), TABLE)


def test_refusals_of_copies() -> None:
    hwdge, none = nisa.dge_mode.hwdge, nisa.dge_mode.none
    refused(
        "needs dge_mode.swdge or unknown, got dge_mode.hwdge",
        lambda t, i: copy_rows(selected, dge_mode=hwdge)(t, load(i)),
    )
    refused(
        "needs dge_mode.swdge or unknown, got dge_mode.none",
        lambda t, i: copy_rows(selected, dge_mode=none)(t, load(i)),
    )
    refused(
        "dst and src both have a vector_offset", lambda t, i: nisa.dma_copy(selected(t, load(i)), selected(t, load(i)))
    )
    short = lambda t, i: t.ap([[36, 64], [12, 3], [1, 12]], vector_offset=load(i)[0:32])  # noqa: E731
    refused("vector_offset must have shape \\(64, 1\\) .* got \\(32, 1\\)", copy_rows(short))
    column = load
    refused(
        "tensor_copy src is in private_hbm; accepted: sbuf or psum",
        lambda t, i: nisa.tensor_copy(load(t), selected(t, column(i))),
    )


@pytest.mark.parametrize(
    ("match", "table", "index", "shape"),
    [
        ("must have 2 bytes", ((32, 64), np.float32), ((16, 1), np.uint32), (16, 64)),
        ("first dimension must be a multiple of 16", ((32, 64), BF16), ((16, 1), np.uint32), (8, 64)),
        ("2 dimensions and be uint32", ((32, 64), BF16), ((16, 1), np.int32), (16, 64)),
        ("16, 32, ... or 128 partitions", ((32, 64), BF16), ((24, 1), np.uint32), (16, 64)),
        ("128 partitions, or 1 column", ((32, 64), BF16), ((64, 2), np.uint32), (16, 64)),
        ("at least 32 elements", ((32, 64), BF16), ((16, 1), np.uint32), (32, 64)),
        ("one of the two dimensions in the middle", ((32, 2, 2, 8), BF16), ((16, 1), np.uint32), (16, 2, 2, 8)),
    ],
)
def test_limits_of_gathered_transposes(match: str, table: Any, index: Any, shape: tuple[int, ...]) -> None:
    def kernel(table: Any, index: Any) -> None:
        strides = [int(np.prod(shape[place + 1 :])) for place in range(len(shape))]
        source = table.ap([list(pair) for pair in zip(strides, shape, strict=True)], vector_offset=load(index))
        order = (1, 0) if len(shape) == 2 else (3, 1, 2, 0)
        nisa.dma_transpose(dst=nl.ndarray(tuple(shape[axis] for axis in order), table.dtype), src=source)

    refused(match, kernel, np.zeros(*table), np.zeros(*index))
    if match == "must have 2 bytes":
        refused("needs gen3 or later", kernel, np.zeros((32, 64), BF16), np.zeros(*index), target="trn1")


def test_only_rows_that_are_read_have_to_be_written() -> None:
    def kernel(x: Any, rows: Any) -> Any:
        table = nl.ndarray((8, 4), x.dtype, buffer=nl.private_hbm)
        nisa.dma_copy(dst=table[2:5], src=x)
        dst = nl.ndarray((2, 4), x.dtype)
        nisa.dma_copy(dst=dst, src=table.vector_select(0, load(rows)))
        return store(dst)

    x = RNG.normal(size=(3, 4)).astype(np.float32)
    np.testing.assert_array_equal(outputs(kernel, x, np.array([[4], [2]], np.uint32)), x[[2, 0]])
    with pytest.raises(UninitializedReadError, match="4 elements were never written \\(first: \\(1, 0\\)\\)"):
        outputs(kernel, x, np.array([[4], [5]], np.uint32))


def test_unwritten_indices_are_found() -> None:
    with pytest.raises(UninitializedReadError, match="reads the run-time index"):
        launch(lambda t, i: nisa.dma_copy(load(t[0:1]), t.vector_select(0, nl.ndarray((1, 1), nl.uint32))), TABLE, ROWS)


def test_a_scatter_writes_only_its_rows() -> None:
    def kernel(x: Any, rows: Any) -> Any:
        out = nl.ndarray((8, 4), x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out.vector_select(0, load(rows)), src=load(x))
        return store(load(out[0:3]))

    x = RNG.normal(size=(3, 4)).astype(np.float32)
    np.testing.assert_array_equal(outputs(kernel, x, np.array([[2], [0], [1]], np.uint32)), x[[1, 2, 0]])
    with pytest.raises(UninitializedReadError, match="4 elements were never written \\(first: \\(1, 0\\)\\)"):
        outputs(kernel, x, np.array([[2], [0], [5]], np.uint32))


def both_scatter(first: list[int], second: list[int]) -> None:
    def kernel(x: Any, rows: Any) -> None:
        out = nl.ndarray((8, 4), x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out.vector_select(0, load(rows[nl.program_id(0)])), src=load(x))

    rows = np.array([first, second], np.uint32)[:, :, None]
    launch(kernel, np.ones((2, 4), np.float32), rows, lnc=2)


def test_cores_race_only_where_their_rows_meet() -> None:
    both_scatter([0, 2], [1, 3])
    with pytest.raises(RaceError, match="core 1 writes it by dma_copy .* and core 0 writes it by dma_copy"):
        both_scatter([0, 2], [3, 2])


# --- the trace and the timing model ------------------------------------------------------------------------------


def gathers(table: Any, rows: Any) -> Any:
    return gathered(selected)(table, rows)


def test_a_dry_run_has_the_trace_of_a_full_one() -> None:
    full, dry = (
        launch(gathers, *arguments, dry=dry).trace.records
        for dry, arguments in ((False, (TABLE, ROWS)), (True, (hbm(*TABLE.shape), hbm(64, 1, dtype="uint32"))))
    )
    assert [(r.opcode, r.engine, [(a.shape, a.strides, a.around) for a in (*r.writes, *r.reads)]) for r in full] == [
        (r.opcode, r.engine, [(a.shape, a.strides, a.around) for a in (*r.writes, *r.reads)]) for r in dry
    ]


def gather_record(rows: int, columns: int) -> Any:
    def kernel(table: Any) -> None:
        index = filled((rows, 1), "uint32", 0)
        nisa.dma_copy(dst=tile(columns, partitions=rows), src=table.vector_select(0, index))

    return records(kernel, hbm(1000, columns))[-1]


def test_a_gather_costs_software_descriptors_one_per_row() -> None:
    record = gather_record(128, 256)
    issuer, transfer = issuer_of(record), transfer_of(record, DMA)
    assert issuer.engine == "gpsimd" and issuer.software and transfer is not None
    assert transfer.direction == "load" and transfer.nbytes == transfer.hbm_bytes == 128 * 1024
    # Each engine serves eight partitions.
    assert transfer.descriptors == (8,) * 16
    assert close(transfer.work, [8 * DMA.indirect_descriptor + 8 * 1024 / DMA.rate] * 16)


def test_whatever_touches_a_row_that_could_be_meant_waits() -> None:
    def kernel(table: Any) -> None:
        index = filled((4, 1), "uint32", 0)
        data = tile(16, partitions=4)
        nisa.memset(dst=data, value=0)
        nisa.dma_copy(dst=table.vector_select(0, index), src=data)
        nisa.dma_copy(dst=tile(16, partitions=1), src=table[900:901])

    trace = Trace(records(kernel, hbm(1000, 16)))
    edges = dependencies(trace, ["dma gpsimd" if record.engine == "dma" else record.engine for record in trace])
    assert [edge.producer for edge in edges[3]] == [2]
