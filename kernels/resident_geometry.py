# SPDX-License-Identifier: Apache-2.0
"""How the ``resident`` strategies lay data out: sets of channels, each channel spread over bands of partitions.

Partition = band*channels + channel, where a band takes some of the batches or a piece of every image. What does not
divide runs as smaller units of the same set, on its first partitions. Sets that lie side by side form a group.
"""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_bn.kernels.sizing import ceil_div, share_of
from nki_bn.kernels.tiling import Tile

# A short start cuts chunks from this width on in two: what is narrower costs more in instructions than it gains.
SHORT_COLUMNS = 1024


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
    """One chunk: the same tile of the same unit of ``sets`` sets, side by side; ``unit`` is that of the first set.

    Group number ``group`` has ``group_sets`` sets from ``group_first`` on, where sets are counted over the core.
    ``partial`` counts the chunks of a set, ``widest`` is the width of the first one; ``last`` of its group or not.
    """

    group: int
    group_first: int
    group_sets: int
    first_set: int
    sets: int
    unit: Unit
    tile: Tile
    partial: int
    widest: int
    last: bool

    def columns(self) -> int:
        """Columns of all sets."""
        return self.sets * self.tile.width()


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


def count_tiles(unit: Unit, columns: int) -> tuple[int, int]:
    """How many tiles a unit has, and the width of the first, which is the widest."""
    positions = unit.positions()
    batches = unit.batches()
    if positions <= columns:
        together = columns // positions
        return ceil_div(batches, together), min(together, batches) * positions
    pieces = ceil_div(positions, columns)
    return batches * pieces, ceil_div(positions, pieces)


def steps_of(
    extent: Extent, set_channels: int, batch_bands: int, space_bands: int, columns: int, group_sets: int = 1
) -> list[Step]:
    """The chunks of :func:`steps_in_bands` where a last set with fewer channels has the bands of all."""
    widths = (batch_bands, space_bands, columns)
    return steps_in_bands(extent, set_channels, group_sets, widths, widths, False, False)


def steps_in_bands(
    extent: Extent,
    set_channels: int,
    group_sets: int,
    widths: tuple[int, int, int],
    last_widths: tuple[int, int, int],
    short_start: bool,
    short_end: bool,
) -> list[Step]:
    """All chunks of a core in the order of work: group after group.

    The sets of a group come one after the other, or several in a chunk where they are that small. The widths are batch
    bands, space bands, and columns of a chunk: of whole sets, and of the last one if the channels do not divide.
    ``short_start``: the very first chunk is a small one, so that the engines can begin as soon as it is there.
    ``short_end``: the very last one is, so that the last sums, and the last store, are soon made.
    """
    steps: list[Step] = []
    whole = extent.channels // set_channels
    groups = ceil_div(whole, group_sets)
    rest = extent.channels % set_channels > 0
    for group in range(groups):
        sets = min(group_sets, whole - group * group_sets)
        short = (short_start and group == 0, short_end and group == groups - 1 and not rest)
        part = set_of(extent, group * group_sets, set_channels)
        add_group(steps, part, group, group * group_sets, sets, widths, short)
    if rest:
        short = (short_start and groups == 0, short_end)
        add_group(steps, set_of(extent, whole, set_channels), groups, whole, 1, last_widths, short)
    return steps


def set_of(extent: Extent, number: int, set_channels: int) -> Extent:
    """What set ``number`` of an extent takes; the last one has fewer channels if they do not divide."""
    start = number * set_channels
    channels = min(set_channels, extent.channels - start)
    return Extent(extent.channel + start, channels, extent.batch, extent.batches, extent.start, extent.length)


def add_group(
    steps: list[Step],
    first: Extent,
    group: int,
    first_set: int,
    sets: int,
    widths: tuple[int, int, int],
    short: tuple[bool, bool],
) -> None:
    """Append the chunks of the group of ``sets`` sets, the ``first`` of which has this extent.

    ``widths`` are batch bands, space bands, and columns of a chunk; ``short``: whether the first chunk is a small one,
    and whether the last one is.
    """
    batch_bands, space_bands, columns = widths
    units = units_of(first, batch_bands, space_bands)
    widest = tiles_of_unit(units[0], columns)[0].width()
    if short[0]:
        widest = halved(tiles_of_unit(units[0], columns))[0].width()
    partial = 0
    for i in range(len(units)):
        tiles = tiles_of_unit(units[i], columns)
        together = sets_together(len(tiles), tiles[0].width(), columns, sets, first.channels)
        start = 0
        while start < sets:
            count = min(together, sets - start)
            pieces = tiles
            if short[0] and start + i == 0:
                count = 1
                pieces = halved(tiles)
            if short[1] and i == len(units) - 1 and start + count == sets:
                if count > 1:
                    count -= 1
                else:
                    pieces = pieces[0 : len(pieces) - 1] + halved(pieces[len(pieces) - 1 :])
            unit = moved_unit(units[i], start * first.channels)
            for j in range(len(pieces)):
                last = i == len(units) - 1 and j == len(pieces) - 1 and start + count == sets
                at_set = first_set + start
                steps.append(Step(group, first_set, sets, at_set, count, unit, pieces[j], partial + j, widest, last))
            start += count
        partial += len(tiles)
        if short[0] and i == 0:
            partial += 1


def halved(tiles: list[Tile]) -> list[Tile]:
    """The tiles with the first one cut in two, unless it is narrow."""
    tile = tiles[0]
    if tile.width() < SHORT_COLUMNS:
        return tiles
    if tile.batches > 1:
        half = tile.batches // 2
        first = Tile(tile.batch, half, tile.start, tile.length, 0)
        second = Tile(tile.batch + half, tile.batches - half, tile.start, tile.length, 0)
    else:
        half = tile.length // 2
        first = Tile(tile.batch, 1, tile.start, half, 0)
        second = Tile(tile.batch, 1, tile.start + half, tile.length - half, 0)
    return [first, second] + tiles[1:]


def sets_together(tiles: int, width: int, columns: int, sets: int, channels: int) -> int:
    """How many sets, of single channels, a chunk of ``columns`` columns takes; one set has ``tiles``, of that width."""
    if tiles > 1 or channels > 1:
        return 1
    return max(min(columns // width, sets), 1)


def moved_unit(unit: Unit, channels: int) -> Unit:
    """The unit as many channels further on."""
    extent = unit.extent
    moved = Extent(
        extent.channel + channels, extent.channels, extent.batch, extent.batches, extent.start, extent.length
    )
    return Unit(moved, unit.batch_bands, unit.space_bands)


def step_view(tensor: nl.NkiTensor, step: Step) -> nl.NkiTensor:
    """The elements of a chunk in a [B, C, S] tensor: (batch bands, space bands, channels, batches, positions).

    Several channels are either those of one set, on lanes, or one channel of each set, side by side.
    """
    unit = step.unit
    extent = unit.extent
    tile = step.tile
    batches = tensor.slice(0, extent.batch, extent.batch + extent.batches)
    banded = batches.reshape_dim(0, (unit.batch_bands, unit.batches()))
    owned = banded[
        :,
        nl.ds(tile.batch, tile.batches),
        nl.ds(extent.channel, step.sets * extent.channels),
        nl.ds(extent.start, extent.length),
    ]
    pieces = owned.reshape_dim(3, (unit.space_bands, unit.positions()))
    return pieces[:, :, :, :, nl.ds(tile.start, tile.length)].permute((0, 3, 2, 1, 4))


def step_part(slots: list[nl.NkiTensor], at: int, step: Step) -> nl.NkiTensor:
    """The part of slot ``at`` (of a ring) that holds the chunk."""
    return slots[at % len(slots)][0 : step.unit.lanes(), 0 : step.columns()]


def store_parts(step: Step, number: int, final: bool) -> list[Step]:
    """What is stored after set ``number`` of a chunk: the chunk after its last set, or in the ``final`` chunk of all
    each set for itself, in two parts where it is wide, since nothing can be done beside the last store."""
    if not final:
        if number < step.sets - 1:
            return []
        return [step]
    parts: list[Step] = []
    unit = moved_unit(step.unit, number * step.unit.extent.channels)
    tiles = halved([step.tile])
    for i in range(len(tiles)):
        at_set = step.first_set + number
        parts.append(
            Step(
                step.group,
                step.group_first,
                step.group_sets,
                at_set,
                1,
                unit,
                tiles[i],
                step.partial,
                step.widest,
                step.last,
            )
        )
    return parts


def set_part(tile: nl.NkiTensor, step: Step, number: int) -> nl.NkiTensor:
    """The columns of set ``number`` of the chunk in a tile that holds the chunk."""
    width = step.tile.width()
    return tile[:, nl.ds(number * width, width)]


def load_step(dst: nl.NkiTensor, tensor: nl.NkiTensor, step: Step) -> None:
    """Fill an SBUF tile with a chunk, all bands in one DMA."""
    nisa.dma_copy(dst=dst, src=step_view(tensor, step))


def store_step(tensor: nl.NkiTensor, src: nl.NkiTensor, step: Step) -> None:
    """Write an SBUF tile to where its chunk belongs, all bands in one DMA."""
    nisa.dma_copy(dst=step_view(tensor, step), src=src)
