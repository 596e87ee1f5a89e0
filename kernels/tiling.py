# SPDX-License-Identifier: Apache-2.0
"""Which part of a [B, C, S] tensor a core works on, and how that part falls into tiles."""

from dataclasses import dataclass

import nki.language as nl
from nki_bn.kernels.plan import ceil_div, share_of


@dataclass(frozen=True)
class Share(nl.NKIObject):
    """What one core owns: channel tiles [first, last), batches and positions."""

    first: int
    last: int
    batch: int
    batches: int
    start: int
    length: int


@dataclass(frozen=True)
class Tile(nl.NKIObject):
    """Columns of one load: ``batches`` batches from ``batch`` on (counted inside a band), ``length`` positions each.

    ``column`` is where it stands in the row of all columns.
    """

    batch: int
    batches: int
    start: int
    length: int
    column: int

    def width(self) -> int:
        """Columns per partition."""
        return self.batches * self.length


def share_of_core(shape: tuple[int, ...], split: str) -> Share:
    """The :class:`Share` of this core."""
    batch, channels, spatial = shape
    tiles = ceil_div(channels, nl.tile_size.pmax)
    core = nl.program_id(0)
    cores = nl.num_programs(0)
    if split == "channel":
        first, last = share_of(tiles, core, cores)
        return Share(first, last, 0, batch, 0, spatial)
    if split == "batch":
        start, end = share_of(batch, core, cores)
        return Share(0, tiles, start, end - start, 0, spatial)
    if split == "spatial":
        start, end = share_of(spatial, core, cores)
        return Share(0, tiles, 0, batch, start, end - start)
    return Share(0, tiles, 0, batch, 0, spatial)


def tiles_of(share: Share, bands: int, f_tile: int) -> list[Tile]:
    """The tiles of a share, in memory order."""
    tiles = []
    batches = share.batches // bands
    column = 0
    if share.length <= f_tile:
        together = f_tile // share.length
        for i in range(ceil_div(batches, together)):
            count = min(together, batches - i * together)
            tiles.append(Tile(i * together, count, share.start, share.length, column))
            column += count * share.length
        return tiles
    for i in range(batches):
        for j in range(ceil_div(share.length, f_tile)):
            length = min(f_tile, share.length - j * f_tile)
            tiles.append(Tile(i, 1, share.start + j * f_tile, length, column))
            column += length
    return tiles


def tile_view(
    tensor: nl.NkiTensor, share: Share, bands: int, channel: int, channels: int, tile: Tile,
) -> nl.NkiTensor:
    """The elements of a tile in a [B, C, S] HBM tensor, as (bands, channels, batches, positions)."""
    owned = tensor.slice(0, share.batch, share.batch + share.batches)
    banded = owned.reshape_dim(0, (bands, share.batches // bands))
    part = banded[:, nl.ds(tile.batch, tile.batches), nl.ds(channel, channels), nl.ds(tile.start, tile.length)]
    return part.permute((0, 2, 1, 3))
