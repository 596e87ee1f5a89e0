# SPDX-License-Identifier: Apache-2.0
"""Descriptors, their place on the engines, directions and issuers of DMAs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import nisa, nl
from timelines import DMA, close, hbm, records, tile, transfer_time

from nki_bn.simulator import dtypes
from nki_bn.simulator.timing.dma import Transfer, issuer_of, transfer_of
from nki_bn.simulator.trace import Access, Record

ENGINES = 16


def only(kernel: Callable[..., Any], *args: Any, lnc: int = 1) -> Record:
    return records(kernel, *args, lnc=lnc)[0]


def transfer(kernel: Callable[..., Any], *args: Any) -> Transfer:
    found = transfer_of(only(kernel, *args), DMA)
    assert found is not None
    return found


def load_of(shape: tuple[int, ...], view: Callable[[Any], Any] = lambda x: x, partitions: int = 128) -> Transfer:
    def kernel(x: Any) -> None:
        source = view(x)
        nisa.dma_copy(tile(source.size // partitions, x.dtype, partitions=partitions), source)

    return transfer(kernel, hbm(*shape))


def test_a_full_tile_uses_every_engine_for_eight_partitions() -> None:
    got = load_of((128, 1024))
    assert got.direction == "load" and got.nbytes == got.hbm_bytes == 128 * 4096
    assert got.descriptors == (8,) * ENGINES and close(got.work, [8 * transfer_time(4096)] * ENGINES)


def test_rows_of_512_bytes_cost_more_than_rows_of_4096() -> None:
    """The same bytes: 8 descriptors of 512 B per partition against one of 4 KiB."""
    long = load_of((128, 1024))
    short = load_of((128, 8, 2, 128), lambda x: x[:, :, 0])
    assert short.nbytes == long.nbytes and short.descriptors == (64,) * ENGINES
    assert close(short.work, [64 * transfer_time(512)] * ENGINES) and transfer_time(512) > transfer_time(4096) / 8
    assert close(short.work[0] - long.work[0], 56 * DMA.descriptor)


@pytest.mark.parametrize(("partitions", "engines"), [(1, 1), (4, 1), (8, 1), (9, 2), (64, 8), (128, 16)])
def test_fewer_partitions_use_fewer_engines(partitions: int, engines: int) -> None:
    got = load_of((partitions, 256), partitions=partitions)
    assert sum(work > 0 for work in got.work) == engines
    assert sum(got.descriptors) == partitions and got.descriptors[engines - 1] == partitions - 8 * (engines - 1)


def test_the_first_partition_decides_which_engines() -> None:
    def kernel(x: Any) -> None:
        nisa.dma_copy(tile(256)[64:96, :], x)

    assert np.flatnonzero(transfer(kernel, hbm(32, 256)).work).tolist() == [8, 9, 10, 11]


def test_descriptors_end_where_either_side_breaks() -> None:
    """Tile rows of two pieces (columns 0-2 and 4-6), HBM rows of two columns: 2 + 1 | 1 + 2 elements per partition."""

    def kernel(x: Any) -> None:
        whole = tile(8, partitions=1).reshape_dim(1, (2, 4))
        nisa.dma_copy(whole[:, :, 0:3], x[:, 0:2])

    got = transfer(kernel, hbm(3, 5))
    assert got.descriptors[0] == 4 and close(got.work[0], 4 * DMA.descriptor + 24 / DMA.rate)


def test_a_broadcast_source_is_read_element_by_element() -> None:
    def kernel(x: Any) -> None:
        nisa.dma_copy(tile(16), x.reshape((128, 1)).broadcast(1, 16))

    got = transfer(kernel, hbm(128))
    assert got.descriptors == (8 * 16,) * ENGINES and got.nbytes == 128 * 16 * 4


def addresses(access: Access) -> np.ndarray[Any, Any]:
    """The byte address of every element, in row-major order."""
    grids = np.meshgrid(*[np.arange(size) for size in access.shape], indexing="ij")
    steps = (grid * step for grid, step in zip(grids, access.strides, strict=True))
    return np.asarray(sum(steps, access.offset)).ravel()


def pieces(record: Record) -> int:
    """Descriptors by brute force: neighbours that follow each other on both sides, in one partition, are together."""
    breaks = np.zeros(np.prod(record.writes[0].shape) - 1, bool)
    for access in (record.writes[0], record.reads[0]):
        place = addresses(access)
        breaks |= np.diff(place) != dtypes.size_of(access.dtype)
        if access.region.on_chip:
            breaks |= np.diff(place // access.pitch) != 0
    return int(breaks.sum()) + 1


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(1, 6), st.integers(1, 7)),
    st.permutations([0, 1, 2]),
    st.tuples(*[st.booleans()] * 4),
    st.booleans(),
)
def test_descriptors_are_counted_exactly(
    shape: tuple[int, int, int, int], order: list[int], cuts: tuple[bool, ...], whole: bool
) -> None:
    """Any view of HBM into a tile (contiguous or with a gap in each row): the count is that of the brute force."""

    def kernel(x: Any) -> None:
        view = x.permute((*order, 3))
        ends = (size - 1 if cut and size > 1 else size for size, cut in zip(view.shape, cuts, strict=True))
        part = view[tuple(slice(0, end) for end in ends)]
        row = part.size // part.shape[0]
        room = tile(row if whole else 2 * row, partitions=part.shape[0])
        nisa.dma_copy(room if whole else room.reshape_dim(1, (row, 2))[:, :, 0], part)

    record = only(kernel, hbm(*shape))
    got = transfer_of(record, DMA)
    assert got is not None and sum(got.descriptors) == pieces(record)


def test_directions_and_bytes_of_hbm() -> None:
    def store(x: Any) -> None:
        nisa.dma_copy(x, tile(64))

    def within_hbm(x: Any) -> None:
        nisa.dma_copy(nl.ndarray((128, 64), nl.float32, buffer=nl.private_hbm), x)

    def within_sbuf(_: Any) -> None:
        nisa.dma_copy(tile(64), tile(64))

    size = 128 * 64 * 4
    got = [transfer(kernel, hbm(128, 64)) for kernel in (store, within_hbm, within_sbuf)]
    assert [(t.direction, t.nbytes, t.hbm_bytes) for t in got] == [
        ("store", size, size),
        ("hbm copy", size, 2 * size),
        ("sbuf copy", size, 0),
    ]


def test_a_copy_within_hbm_spreads_evenly() -> None:
    def kernel(x: Any) -> None:
        nisa.dma_copy(nl.ndarray((64, 256), nl.float32, buffer=nl.private_hbm), x[:, 0:256])

    got = transfer(kernel, hbm(64, 300))
    assert got.descriptors == (4,) * ENGINES and close(got.work, [4 * transfer_time(1024)] * ENGINES)


def test_a_cast_counts_the_larger_side_and_runs_in_software() -> None:
    def kernel(x: Any) -> None:
        nisa.dma_copy(tile(256, nl.bfloat16), x)

    record = only(kernel, hbm(128, 256))
    got = transfer_of(record, DMA)
    assert got is not None and got.nbytes == 128 * 1024 and got.hbm_bytes == 128 * 1024
    assert (issuer_of(record).engine, issuer_of(record).software) == ("gpsimd", True)


@pytest.mark.parametrize(
    ("options", "engine", "software"),
    [
        ({}, "sync", False),
        ({"dge_mode": nisa.dge_mode.hwdge}, "sync", False),
        ({"dge_mode": nisa.dge_mode.hwdge, "engine": nisa.engine.scalar}, "scalar", False),
        ({"dge_mode": nisa.dge_mode.hwdge, "engine": nisa.engine.sync}, "sync", False),
        ({"dge_mode": nisa.dge_mode.swdge}, "gpsimd", True),
        ({"dge_mode": nisa.dge_mode.none}, "sync", False),
    ],
)
def test_issuers(options: dict[str, Any], engine: str, software: bool) -> None:
    def kernel(x: Any) -> None:
        nisa.dma_copy(tile(256), x, **options)

    issuer = issuer_of(only(kernel, hbm(128, 256)))
    assert (issuer.engine, issuer.software) == (engine, software)


def test_transposes_are_slower_than_copies() -> None:
    """As copies into 128 rows of 128 bytes, spread evenly, at 90 % of the rate from HBM and 50 % from SBUF."""

    def from_hbm(x: Any) -> None:
        nisa.dma_transpose(tile(64, nl.bfloat16), x)

    def from_sbuf(x: Any) -> None:
        nisa.dma_transpose(tile(64, nl.bfloat16), tile(128, nl.bfloat16, partitions=64))

    plain = 8 * transfer_time(128)
    for kernel, factor in ((from_hbm, DMA.transpose_load), (from_sbuf, DMA.transpose_sbuf)):
        got = transfer(kernel, hbm(64, 128, dtype="bfloat16"))
        assert close(got.work, [factor * plain] * ENGINES)
    assert abs(DMA.transpose_load * 0.9 - 1) < 1e-4 and close(DMA.transpose_sbuf, 2)
