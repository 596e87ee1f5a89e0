# SPDX-License-Identifier: Apache-2.0
"""What both passes of the strategy ``transposed`` have in common: the order of kernels/transposed_blocks.py.

An instruction names the tiles that it reads and writes, and waits for those who used them on other engines. The methods
have the names of the kernel's functions: what changes there changes here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from nki_bn.kernels.plan import TransposedForwardPlan, TransposedPlan, size_of
from nki_bn.kernels.resident_geometry import Extent
from nki_bn.kernels.sizing import ceil_div
from nki_bn.kernels.transposed_blocks import RESULT_BANKS, Ground, Rows, rows_of
from nki_bn.kernels.transposed_layout import STAGES, RowChunk, bank_columns
from nki_bn.kernels.transposed_schedule import Scope, Step, blocks_of, step_of
from nki_bn.pipeline import DMA, SCALAR, TENSOR, VECTOR, Beside, Duration, Paces, Pipeline, Products
from nki_bn.predict_columns import Columns


@dataclass(slots=True)
class Tile:
    """When the last instruction of each engine that wrote a tile can be seen, and of each that read it."""

    written: dict[str, float] = field(default_factory=dict)
    read: dict[str, float] = field(default_factory=dict)

    def readable(self, more: float = 0.0) -> float:
        """When everything that was written is there; ``more``: ns that a semaphore takes longer than most."""
        latest = 0.0
        for name, time in self.written.items():
            latest = max(latest, time if name == DMA else time + more)
        return latest

    def free(self, engine: str, more: float = 0.0) -> float:
        """When ``engine`` may write: one engine is executed in order, DMAs are not."""
        latest = 0.0
        for used in (self.written, self.read):
            for name, time in used.items():
                if name == DMA:
                    latest = max(latest, time)
                elif name != engine:
                    latest = max(latest, time + more)
        return latest


class RowRun:
    """One core at work on rows and turned blocks.

    Args:
        slots: names of the tensors that have slots.
        tiles: names of the work tiles of jobs, besides the banks of PSUM.
    """

    def __init__(
        self,
        plan: TransposedPlan | TransposedForwardPlan,
        ground: Ground,
        scope: Scope,
        paces: Paces,
        slots: Iterable[str],
        tiles: Iterable[str],
    ) -> None:
        self.scope, self.ground, self.paces = scope, ground, paces
        self.pipeline = Pipeline(paces.timing)
        self.itemsize = size_of(plan.dtype)
        self.bank = bank_columns(plan.dtype)
        self.spatial = plan.shape[2]
        self.shared = plan.split == "batch"
        self.more = paces.timing.semaphore.tensor - paces.timing.semaphore.engine
        self.first_core = ground.extent.batch == 0
        self.slots = {name: [[Tile() for _ in range(scope.group_blocks)] for _ in range(scope.slots)] for name in slots}
        counts = {"x bank": STAGES, "other bank": STAGES, "result": RESULT_BANKS} | dict.fromkeys(tiles, STAGES)
        self.tiles = {name: [Tile() for _ in range(count)] for name, count in counts.items()}

    def rows_of(self, step: Step) -> Rows:
        """What a step is about."""
        rows: Rows = rows_of(self.ground, self.scope, step)
        return rows

    def smaller(self, block: int) -> bool:
        """Whether this is the last block of the core, and has fewer channels than the others: its columns lie apart."""
        return bool((block + 1) * self.ground.size > self.ground.extent.channels)

    def blocks(self, first: int, count: int) -> Iterator[Columns]:
        """The columns of ``count`` blocks from ``first`` on: the full ones together, and a smaller last one."""
        whole, rest = divmod(self.ground.extent.channels, self.ground.size)
        full = min(whole - first, count)
        if full > 0:
            yield Columns(self.pipeline, self.paces, self.ground.size, full, self.ground.size == 1)
        if rest and first + count > whole:
            yield Columns(self.pipeline, self.paces, rest)

    def all_blocks(self) -> Iterator[Columns]:
        """The columns of all blocks of the core."""
        return self.blocks(0, self.scope.blocks)

    def blocks_of(self, step: Step) -> Iterator[Columns]:
        """The columns of the blocks of a step's group."""
        return self.blocks(step.group * self.scope.group_blocks, blocks_of(self.scope, step.group))

    def run(
        self, engine: str, work: Duration, reads: tuple[Tile, ...], writes: tuple[Tile, ...], ready: float = 0.0
    ) -> float:
        """An instruction of Vector or Scalar; when its results can be seen."""
        done = self.pipeline.run(engine, work, self.wait(engine, reads, writes, ready))
        return self.note(engine, done, reads, writes)

    def wait(self, engine: str, reads: tuple[Tile, ...], writes: tuple[Tile, ...], ready: float = 0.0) -> float:
        """When all tiles can be used."""
        more = self.more if engine == TENSOR else 0.0
        for tile in reads:
            ready = max(ready, tile.readable(more))
        for tile in writes:
            ready = max(ready, tile.free(engine, more))
        return ready

    def note(self, engine: str, done: float, reads: tuple[Tile, ...], writes: tuple[Tile, ...]) -> float:
        """Remember that the tiles are used until ``done``."""
        for tile in reads:
            tile.read[engine] = done
        for tile in writes:
            tile.written[engine] = done
        return done

    def ring(self, name: str, at: int) -> Tile:
        """The tile of a ring that job number ``at`` uses."""
        ring = self.tiles[name]
        return ring[at % len(ring)]

    def slot(self, name: str, visit: int, rows: Rows) -> Tile:
        """The part of a slot that belongs to a block; with several tiles the parts of all blocks interleave."""
        parts: list[Tile] = self.slots[name][visit % self.scope.slots]
        return parts[0 if rows.chunk.tiles > 1 else int(rows.first // self.ground.size)]

    def load_rows(self, name: str, visit: int, rows: Rows, itemsize: int) -> None:
        """Fill a slot."""
        parts = tuple(self.slots[name][visit % self.scope.slots])
        ready = self.wait(DMA, (), parts)
        self.note(DMA, self.pipeline.load(self.paces.transfer(*self.runs(rows, itemsize)), ready), (), parts)

    def store_rows(self, name: str, visit: int, rows: Rows, itemsize: int) -> None:
        """Write a slot to where it belongs."""
        parts = tuple(self.slots[name][visit % self.scope.slots])
        ready = self.wait(DMA, parts, ())
        self.note(DMA, self.pipeline.store(self.paces.transfer(*self.runs(rows, itemsize)), ready), parts, ())

    def runs(self, rows: Rows, itemsize: int) -> tuple[int, int, int]:
        """Partitions of a slot, contiguous runs in HBM and bytes in each of them."""
        chunk = rows.chunk
        runs = chunk.tiles * (1 if chunk.length == self.spatial else rows.channels)
        return chunk.rows, runs, chunk.tiles * rows.channels * chunk.length * itemsize

    def beside(self, tensors: float) -> Beside:
        """The loads of the first ring, of as many bytes as ``tensors`` tensors of elements have."""
        dma = self.paces.timing.dma
        steps = [step_of(self.scope, "load", visit, 0) for visit in range(min(self.scope.slots, self.scope.visits()))]
        moved = [self.runs(self.rows_of(step), self.itemsize) for step in steps]
        _, runs, nbytes = moved[0]
        each = self.paces.transfer(*moved[0]).work
        end = dma.first_load + tensors * sum(max(self.paces.transfer(*one).shared, dma.spacing) for one in moved)
        return Beside(dma.descriptor + nbytes / runs / dma.rate, min(each / dma.spacing, 1.0), end)

    def slow(self, rows: Rows, length: int, itemsize: int, by_channel: bool) -> float:
        """How much longer it takes to pass over a part of a slot; ``by_channel``: the innermost dimension is that."""
        chunk, strided = rows.chunk, self.paces.timing.strided
        by_tile = rows.channels * chunk.length
        channel, tile, position = (rows.count, chunk.length), (chunk.tiles, by_tile), (length, 1)
        order = (channel, tile, position) if by_channel else (position, channel, tile)
        stride = next((stride for size, stride in order if size > 1), 0)
        return strided.factor if stride * itemsize >= strided.bytes else 1

    def turn(self, products: Products, reads: tuple[Tile, ...], writes: tuple[Tile, ...]) -> None:
        """Transposes of Tensor."""
        done = self.pipeline.multiply(products, self.wait(TENSOR, reads, writes))
        self.note(TENSOR, done, reads, writes)

    def turn_in(self, bank: str, at: int, slot: str, visit: int, rows: Rows) -> Tile:
        """A block of rows to its turned form in a bank, which is returned."""
        chunk, turned = rows.chunk, self.ring(bank, at)
        products = self.paces.transposes(chunk.rows, chunk.length * chunk.tiles, self.itemsize == 4)
        self.turn(products, (self.slot(slot, visit, rows),), (turned,))
        return turned

    def turn_out(
        self, slot: str, visit: int, at: int, turned: Tile, rows: Rows, by_scalar: bool, itemsize: int
    ) -> None:
        """A turned block back to rows, by way of banks from number ``at`` on."""
        chunk = rows.chunk
        together = min(self.bank // (chunk.tiles * rows.count), chunk.length)
        for i in range(ceil_div(chunk.length, together)):
            length = min(together, chunk.length - i * together)
            bank, parts = self.ring("result", at + i), length * chunk.tiles
            self.turn(self.paces.transposes(rows.count, parts, self.itemsize == 4), (turned,), (bank,))
            columns = parts * rows.count * self.slow(rows, length, itemsize, True)
            work = self.paces.copied(columns) if by_scalar else self.paces.vector_psum("plain", columns)
            self.run(SCALAR if by_scalar else VECTOR, work, (bank,), (self.slot(slot, visit, rows),))

    def scaled(self, at: int, width: int, ready: float) -> Tile:
        """(x - hi)*scale of a job, in its wide tile, which is returned."""
        value = self.ring("wide", at)
        self.run(VECTOR, self.paces.vector_psum("pointed", width), (self.ring("x bank", at),), (value,), ready)
        return value

    def pre_activation(self, at: int, width: int, residual: bool, ready: float) -> None:
        """The value under the ReLU, in the wide tile."""
        value = self.scaled(at, width, ready)
        if residual:
            work = self.paces.vector_psum("scalar_tensor_tensor", width)
            self.run(VECTOR, work, (value, self.ring("other bank", at)), (value,))
        else:
            self.run(VECTOR, self.paces.vector("pointed", width), (value,), (value,))


def shortened(ground: Ground, scope: Scope, groups: int, chunks: int) -> tuple[Ground, Scope]:
    """``groups`` groups of blocks, the last of them like the last of all, of the last ``chunks`` chunks.

    A ring that has those of a group keeps the slots that it has besides them, or those for everything; a smaller one,
    whose data is read again or once only, keeps all.
    """
    whole, few = scope.groups(), len(ground.chunks)
    extent = ground.extent
    blocks = scope.blocks - (whole - groups) * scope.group_blocks
    channels = extent.channels - (scope.blocks - blocks) * ground.size
    slots = scope.slots
    if slots >= few and not scope.reload:
        slots = groups * chunks if slots >= scope.visits() else min(slots - few + chunks, groups * chunks)
    part = Extent(extent.channel, channels, extent.batch, extent.batches, extent.start, extent.length)
    rows: list[RowChunk] = ground.chunks[few - chunks :]
    return replace(ground, extent=part, chunks=rows), replace(scope, blocks=blocks, chunks=chunks, slots=slots)
