# SPDX-License-Identifier: Apache-2.0
"""What a DMA asks of the DMA engines: who triggers it, its descriptors, and their work on each engine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import lcm, prod

import numpy as np
import numpy.typing as npt

from nki_bn.hardware import DmaTiming
from nki_bn.simulator import dtypes
from nki_bn.simulator.trace import Access, Record

Counts = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

LOAD, STORE, WITHIN_HBM, WITHIN_SBUF = "load", "store", "hbm copy", "sbuf copy"


@dataclass(frozen=True)
class Issuer:
    """The engine that triggers a DMA, and whether GpSimd builds the descriptors in software."""

    engine: str
    software: bool


@dataclass(frozen=True)
class Transfer:
    """The work of one DMA.

    Attributes:
        direction: load, store, hbm copy or sbuf copy.
        descriptors: on each engine.
        work: ns on each engine when it serves nothing else.
        nbytes: what the engines move; of a cast, the larger side.
        hbm_bytes: read from and written to HBM.
        written: of these, written.
    """

    direction: str
    descriptors: tuple[float, ...]
    work: tuple[float, ...]
    nbytes: int
    hbm_bytes: int
    written: int


def issuer_of(record: Record) -> Issuer:
    """Who triggers a DMA: what the kernel chose, else Sync with hardware descriptors, or GpSimd in software for a cast.

    Prepared descriptors (``dge_mode.none``) are taken to cost what hardware ones cost.
    """
    if record.opcode == "sendrecv":
        software = record.attributes["dma_engine"] == "gpsimd_dma"
        return Issuer("gpsimd" if software else "sync", software)
    mode = record.attributes["dge_mode"]
    if mode == "swdge" or (mode == "unknown" and (_casts(record) or _gathers(record))):
        return Issuer("gpsimd", True)
    engine = record.attributes.get("issuer", "unknown")
    return Issuer("sync" if engine == "unknown" else engine, False)


def transfer_of(record: Record, dma: DmaTiming) -> Transfer | None:
    """The transfer of a DMA; None if it was skipped."""
    if not record.writes:
        return None
    sources = record.reads[: record.attributes.get("sources", 1)]
    dst = _shape_of(record.writes[0])
    return _together([_transfer(*dst, *_shape_of(source), record.opcode, dma) for source in sources])


def _together(transfers: list[Transfer]) -> Transfer:
    """The work of a DMA that reads several sources and writes their sum once."""
    if len(transfers) == 1:
        return transfers[0]
    descriptors = tuple(map(sum, zip(*(part.descriptors for part in transfers), strict=True)))
    work = tuple(map(sum, zip(*(part.work for part in transfers), strict=True)))
    again = (len(transfers) - 1) * transfers[0].written
    nbytes, hbm = sum(part.nbytes for part in transfers), sum(part.hbm_bytes for part in transfers) - again
    return Transfer(transfers[0].direction, descriptors, work, nbytes, hbm, transfers[0].written)


def _gathers(record: Record) -> bool:
    return any(access.around for access in (*record.writes, *record.reads))


def _casts(record: Record) -> bool:
    return bool(record.writes) and record.writes[0].dtype != record.reads[0].dtype


@dataclass(frozen=True)
class _Side:
    """One side of a transfer, in elements: size of a lane's row (all of HBM) and of a contiguous run."""

    on_chip: bool
    itemsize: int
    elements: int
    row: int
    run: int
    indirect: bool


def _shape_of(access: Access) -> tuple[_Side, tuple[int, ...]]:
    """The side, and the partition of each of its rows."""
    size = dtypes.size_of(access.dtype)
    side = _Side(
        access.region.on_chip, size, prod(access.shape), access.columns, access.run_bytes() // size, bool(access.around)
    )
    if not side.on_chip:
        return side, ()
    step = access.strides[0]
    return side, tuple((access.offset + row * step) // access.pitch for row in range(access.shape[0]))


@cache
def _transfer(
    dst: _Side, to: tuple[int, ...], src: _Side, start: tuple[int, ...], opcode: str, dma: DmaTiming
) -> Transfer:
    size = max(dst.itemsize, src.itemsize)
    transposes = opcode == "dma_transpose"
    if transposes or not (dst.on_chip or src.on_chip):
        # No partition decides, or it is unknown how. A transpose is taken as a slower copy into rows of the tile.
        runs, elements = _evenly(src.elements, (src.run, dst.run), dma.engines)
    else:
        tile, partitions, other = (dst, to, src) if dst.on_chip else (src, start, dst)
        runs, elements = _by_partition(tile, partitions, other, dma)
    descriptor = dma.indirect_descriptor if dst.indirect or src.indirect else dma.descriptor
    work = runs * descriptor + elements * size / dma.rate
    if transposes:
        work *= dma.transpose_sbuf if src.on_chip else dma.transpose_load
    hbm = sum(side.elements * side.itemsize for side in (dst, src) if not side.on_chip)
    written = 0 if dst.on_chip else dst.elements * dst.itemsize
    return Transfer(_direction(dst, src), tuple(runs.tolist()), tuple(work.tolist()), src.elements * size, hbm, written)


def _direction(dst: _Side, src: _Side) -> str:
    if dst.on_chip:
        return WITHIN_SBUF if src.on_chip else LOAD
    return STORE if src.on_chip else WITHIN_HBM


def _by_partition(tile: _Side, partitions: tuple[int, ...], other: _Side, dma: DmaTiming) -> tuple[Counts, Counts]:
    """Descriptors and elements per engine where the partitions of a tile decide."""
    starts = np.arange(len(partitions), dtype=np.int64) * tile.row
    runs = _common_runs(starts, tile.row, (tile.run, other.run))
    descriptors, elements = np.zeros(dma.engines), np.zeros(dma.engines)
    served_by = np.array(partitions) // dma.partitions_per_engine % dma.engines
    np.add.at(descriptors, served_by, runs)
    np.add.at(elements, served_by, tile.row)
    return descriptors, elements


def _evenly(elements: int, runs: tuple[int, int], engines: int) -> tuple[Counts, Counts]:
    """The same on every engine, at least one descriptor."""
    count = max(int(_common_runs(np.zeros(1, np.int64), elements, runs)[0]), engines)
    return np.full(engines, count / engines), np.full(engines, elements / engines)


def _common_runs(starts: Indices, length: int, runs: tuple[int, int]) -> Indices:
    """How many pieces [start, start + length) falls into where the runs of both sides end.

    Elements pair up in row-major order, so runs of a side end at the multiples of its length, and a start is one.
    """
    first, second = runs

    def multiples(number: int) -> Indices:
        found: Indices = -(-(starts + length) // number) - -(-starts // number)
        return found

    return multiples(first) + multiples(second) - multiples(lcm(first, second))
