# SPDX-License-Identifier: Apache-2.0
"""Copies through SBUF: what the model makes of buffers, row lengths and cores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from launching import launch, nisa, nl
from timelines import DMA, TIMING, hbm, load_time, store_time, tile, timeline, transfer_time

from nki_bn.simulator.timing import Timeline, model

COLUMNS = 1024
TILE_BYTES = 128 * 4 * COLUMNS
MIB = 2**20


def copy_kernel(buffers: int, row: int = COLUMNS) -> Callable[[Any], Any]:
    """Copy [tiles, 128, rows, 2, row] but for the second of the two, over ``buffers`` tiles of 4 KiB per partition.

    Loads are triggered on Sync, stores on Scalar, so that a store that waits holds up no load. With the gap behind
    every row, descriptors are as long as a row.
    """

    def kernel(x: Any) -> Any:
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm, name="out")
        slots = [tile(COLUMNS) for _ in range(buffers)]
        core, cores, tiles = nl.program_id(0), nl.num_programs(0), x.shape[0]
        for i in range(core * tiles // cores, (core + 1) * tiles // cores):
            slot = slots[i % buffers].reshape_dim(1, (COLUMNS // row, row))
            nisa.dma_copy(slot, x[i, :, :, 0])
            nisa.dma_copy(out[i, :, :, 0], slot, dge_mode=nisa.dge_mode.hwdge, engine=nisa.engine.scalar)
        return out

    return kernel


def copied(mib: int, buffers: int, row: int = COLUMNS, lnc: int = 1) -> Timeline:
    tiles = mib * MIB // TILE_BYTES
    return timeline(copy_kernel(buffers, row), hbm(tiles, 128, COLUMNS // row, 2, row), lnc=lnc)


def law(row_bytes: int) -> float:
    """GB/s of 16 engines that serve descriptors of this length."""
    return 16 * row_bytes / transfer_time(row_bytes)


def test_many_buffers_reach_the_descriptor_rate() -> None:
    result = copied(64, buffers=8)
    assert result.nbytes == 2 * 64 * MIB
    assert 340 <= result.bandwidth <= 425 and 0.95 * law(4096) < result.bandwidth < law(4096)


def test_one_buffer_pays_every_latency() -> None:
    """A load waits for the store before it, and that for its load."""
    result = copied(4, buffers=1)
    turn = load_time(4096) + store_time(4096)
    assert abs(result.total / (8 * turn) - 1) < 1e-9
    assert result.bandwidth < 0.5 * copied(4, buffers=8).bandwidth


def test_rows_of_128_bytes_are_as_much_slower_as_their_descriptors() -> None:
    short, long = copied(64, 8, row=32), copied(64, 8)
    assert short.nbytes == long.nbytes
    assert abs(short.bandwidth / long.bandwidth / (law(128) / law(4096)) - 1) < 0.03
    assert short.bandwidth < 0.55 * long.bandwidth


def test_two_cores_share_the_stack() -> None:
    """Not twice as fast as one: 716 GB/s for both."""
    one, two = copied(64, 8), copied(64, 8, lnc=2)
    assert two.cores == 2 and 0.93 * TIMING.hbm.pair < two.bandwidth < TIMING.hbm.pair
    assert 1.6 < one.total / two.total < 1.8


def test_small_transfers_are_bound_by_their_triggers() -> None:
    """Loads of 256 bytes per partition into tiles of their own: one every 580 ns."""

    def kernel(x: Any) -> None:
        tiles = [tile(64) for _ in range(50)]
        for i in range(50):
            nisa.dma_copy(tiles[i], x[i])

    result = timeline(kernel, hbm(50, 128, 64))
    assert abs(result.total - (49 * DMA.spacing + load_time(256))) < 1e-6


def test_a_dry_run_has_the_times_of_a_full_one() -> None:
    x = np.zeros((8, 128, 1, 2, COLUMNS), np.float32)
    full = model(launch(copy_kernel(8), x, strict=False).trace)
    assert [span.done for span in full.spans] == [span.done for span in copied(4, 8).spans]
