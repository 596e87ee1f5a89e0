# SPDX-License-Identifier: Apache-2.0
"""How the ``resident`` strategy lays data out: channel groups, each channel spread over bands of partitions.

Partition = band*channels + channel, where a band takes some of the batches or a piece of every image. What does not
divide runs as smaller units of the same group, on its first partitions.
"""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_bn.kernels.columns import COLUMN_COUNT
from nki_bn.kernels.plan import Buffer, ResidentPlan, total_bytes
from nki_bn.kernels.sizing import PARTITIONS, ceil_div, share_of
from nki_bn.kernels.tiling import Tile


@dataclass(frozen=True)
class Extent(nl.NKIObject):
    """What one core owns: channels, batches and positions, each from a start on."""

    channel: int
    channels: int
    batch: int
    batches: int
    start: int
    length: int


@dataclass(frozen=True)
class Unit(nl.NKIObject):
    """A box of the data in which every band has equally much: ``batch_bands`` times ``space_bands`` bands."""

    extent: Extent
    batch_bands: int
    space_bands: int

    def lanes(self) -> int:
        """Partitions in use."""
        return self.batch_bands * self.space_bands * self.extent.channels

    def batches(self) -> int:
        """Batches of one band."""
        return self.extent.batches // self.batch_bands

    def positions(self) -> int:
        """Positions of one band."""
        return self.extent.length // self.space_bands


@dataclass(frozen=True)
class Step(nl.NKIObject):
    """One chunk: a tile of a unit of group number ``group``; ``last`` of its group or not."""

    group: int
    unit: Unit
    tile: Tile
    partial: int
    last: bool


def extent_of_core(shape: tuple[int, int, int], split: str, core: int, cores: int) -> Extent:
    """The :class:`Extent` of one core; core 0 has the largest."""
    batch, channels, spatial = shape
    if split == "channel":
        first, last = share_of(channels, core, cores)
        return Extent(first, last - first, 0, batch, 0, spatial)
    if split == "batch":
        first, last = share_of(batch, core, cores)
        return Extent(0, channels, first, last - first, 0, spatial)
    if split == "spatial":
        first, last = share_of(spatial, core, cores)
        return Extent(0, channels, 0, batch, first, last - first)
    return Extent(0, channels, 0, batch, 0, spatial)


def units_of(extent: Extent, batch_bands: int, space_bands: int) -> list[Unit]:
    """The units of a group: what divides over the bands, then what is left of batches and of positions."""
    units: list[Unit] = []
    even_batches = extent.batches - extent.batches % batch_bands
    even_length = extent.length - extent.length % space_bands
    add_unit(units, extent, (0, even_batches), (0, even_length), batch_bands, space_bands)
    odd_batches = (even_batches, extent.batches)
    add_unit(units, extent, odd_batches, (0, even_length), extent.batches - even_batches, space_bands)
    add_unit(units, extent, (0, even_batches), (even_length, extent.length), batch_bands, 1)
    add_unit(units, extent, odd_batches, (even_length, extent.length), extent.batches - even_batches, 1)
    return units


def add_unit(
    units: list[Unit],
    extent: Extent,
    batches: tuple[int, int],
    positions: tuple[int, int],
    batch_bands: int,
    space_bands: int,
) -> None:
    """Append the unit of a range of batches and positions, unless it is empty."""
    if batches[1] > batches[0] and positions[1] > positions[0]:
        part = Extent(
            extent.channel,
            extent.channels,
            extent.batch + batches[0],
            batches[1] - batches[0],
            extent.start + positions[0],
            positions[1] - positions[0],
        )
        units.append(Unit(part, batch_bands, space_bands))


def tiles_of_unit(unit: Unit, columns: int) -> list[Tile]:
    """The tiles of a unit, of at most ``columns`` columns: whole batches together, or equal pieces of one."""
    tiles: list[Tile] = []
    positions = unit.positions()
    if positions <= columns:
        together = columns // positions
        for i in range(ceil_div(unit.batches(), together)):
            count = min(together, unit.batches() - i * together)
            tiles.append(Tile(i * together, count, 0, positions, 0))
        return tiles
    pieces = ceil_div(positions, columns)
    piece = ceil_div(positions, pieces)
    for i in range(unit.batches()):
        for j in range(pieces):
            tiles.append(Tile(i, 1, j * piece, min(piece, positions - j * piece), 0))
    return tiles


def steps_of(extent: Extent, group_channels: int, batch_bands: int, space_bands: int, columns: int) -> list[Step]:
    """All chunks of a core in the order of work, group after group."""
    steps: list[Step] = []
    for group in range(ceil_div(extent.channels, group_channels)):
        channel = extent.channel + group * group_channels
        channels = min(group_channels, extent.channel + extent.channels - channel)
        part = Extent(channel, channels, extent.batch, extent.batches, extent.start, extent.length)
        units = units_of(part, batch_bands, space_bands)
        partial = 0
        for i in range(len(units)):
            tiles = tiles_of_unit(units[i], columns)
            for j in range(len(tiles)):
                last = i == len(units) - 1 and j == len(tiles) - 1
                steps.append(Step(group, units[i], tiles[j], partial, last))
                partial += 1
    return steps


def step_view(tensor: nl.NkiTensor, step: Step) -> nl.NkiTensor:
    """The elements of a chunk in a [B, C, S] tensor: (batch bands, space bands, channels, batches, positions)."""
    unit = step.unit
    extent = unit.extent
    tile = step.tile
    batches = tensor.slice(0, extent.batch, extent.batch + extent.batches)
    banded = batches.reshape_dim(0, (unit.batch_bands, unit.batches()))
    owned = banded[
        :,
        nl.ds(tile.batch, tile.batches),
        nl.ds(extent.channel, extent.channels),
        nl.ds(extent.start, extent.length),
    ]
    pieces = owned.reshape_dim(3, (unit.space_bands, unit.positions()))
    return pieces[:, :, :, :, nl.ds(tile.start, tile.length)].permute((0, 3, 2, 1, 4))


def step_part(slots: list[nl.NkiTensor], at: int, step: Step) -> nl.NkiTensor:
    """The part of slot ``at`` (of a ring) that holds the chunk."""
    return slots[at % len(slots)][0 : step.unit.lanes(), 0 : step.tile.width()]


def load_step(dst: nl.NkiTensor, tensor: nl.NkiTensor, step: Step) -> None:
    """Fill an SBUF tile with a chunk, all bands in one DMA."""
    nisa.dma_copy(dst=dst, src=step_view(tensor, step))


def store_step(tensor: nl.NkiTensor, src: nl.NkiTensor, step: Step) -> None:
    """Write an SBUF tile to where its chunk belongs, all bands in one DMA."""
    nisa.dma_copy(dst=step_view(tensor, step), src=src)


@dataclass(frozen=True)
class ResidentLayout(nl.NKIObject):
    """The free choices of a resident plan."""

    split: str
    group_channels: int
    batch_bands: int
    space_bands: int
    chunk: int
    slots: int


@dataclass(frozen=True)
class GroupSize(nl.NKIObject):
    """What a group takes on either core, at most: partitions, columns per slot, chunks.

    ``ragged``: some chunks take fewer partitions.
    """

    lanes: int
    columns: int
    chunks: int
    ragged: bool


def group_size(shape: tuple[int, int, int], cores: int, layout: ResidentLayout) -> GroupSize:
    """The :class:`GroupSize` of a layout."""
    channels = min(layout.group_channels, extent_of_core(shape, layout.split, 0, cores).channels)
    lanes = 0
    fewest = PARTITIONS
    columns = 0
    chunks = 0
    for core in range(cores):
        extent = extent_of_core(shape, layout.split, core, cores)
        group = Extent(0, channels, 0, extent.batches, 0, extent.length)
        units = units_of(group, layout.batch_bands, layout.space_bands)
        count = 0
        for i in range(len(units)):
            lanes = max(lanes, units[i].lanes())
            fewest = min(fewest, units[i].lanes())
            tiles = tiles_of_unit(units[i], layout.chunk)
            count += len(tiles)
            for j in range(len(tiles)):
                columns = max(columns, tiles[j].width())
        chunks = max(chunks, count)
    return GroupSize(lanes, columns, chunks, fewest < lanes)


def resident_plan(
    shape: tuple[int, int, int],
    dtype: str,
    relu: str,
    cores: int,
    layout: ResidentLayout,
    residual: bool = False,
    training: bool = True,
    need: tuple[bool, ...] = (True, True, True, False),
) -> ResidentPlan:
    """The plan of one layout; arguments as for ``staged_plan``. Whether it fits into SBUF is for the caller to see."""
    owned = extent_of_core(shape, layout.split, 0, cores).channels
    other = extent_of_core(shape, layout.split, cores - 1, cores).channels
    channels = min(layout.group_channels, owned)
    size = group_size(shape, cores, layout)
    chosen = ResidentLayout(layout.split, channels, layout.batch_bands, layout.space_bands, layout.chunk, layout.slots)
    buffers = resident_buffers(dtype, relu, residual, chosen, size.columns, size.chunks, owned, other)
    return ResidentPlan(
        "resident",
        shape,
        dtype,
        cores,
        layout.split,
        channels,
        layout.batch_bands,
        layout.space_bands,
        size.lanes // channels,
        size.ragged,
        layout.chunk,
        layout.slots,
        relu,
        residual,
        training,
        dtype != nl.float32,
        need[0],
        need[1],
        need[2],
        need[3],
        tuple(buffers),
        total_bytes(buffers),
    )


def resident_buffers(
    dtype: str,
    relu: str,
    residual: bool,
    layout: ResidentLayout,
    columns: int,
    partials: int,
    channels: int,
    other: int,
) -> list[Buffer]:
    """What is allocated: ``columns`` per slot, ``partials`` per group, ``channels`` and ``other`` channels per core."""
    slots = layout.slots
    buffers = [Buffer("dy", slots, columns, dtype), Buffer("x", slots, columns, dtype)]
    if relu != "none":
        buffers.append(Buffer("mask", slots, columns, nl.uint8))
    if residual:
        buffers.append(Buffer("residual", slots, columns, dtype))
    buffers.append(Buffer("products", 2, columns, nl.float32))
    buffers.append(Buffer("terms", 3, columns, nl.float32))
    buffers.append(Buffer("copies", 1, columns, nl.bfloat16))
    buffers.append(Buffer("partials", 4, partials, nl.float32))
    buffers.append(Buffer("turn", 3, PARTITIONS, nl.float32))
    whole = max(channels // layout.group_channels, 1)
    buffers.append(Buffer("columns", 1, COLUMN_COUNT * whole, nl.float32))
    buffers.append(Buffer("flag", 1, whole, nl.uint8))
    if has_last_block(channels, layout.group_channels) or has_last_block(other, layout.group_channels):
        buffers.append(Buffer("last columns", 1, COLUMN_COUNT, nl.float32))
        buffers.append(Buffer("last flag", 1, 1, nl.uint8))
    return buffers


def has_last_block(channels: int, group_channels: int) -> bool:
    """Whether some groups are whole and one is not."""
    return channels > group_channels and channels % group_channels > 0
