# SPDX-License-Identifier: Apache-2.0
"""Which part of a [B, C, S] tensor a core works on, and how that part falls into tiles."""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_bn.kernels.plan import (
    BackwardPlan,
    ForwardPlan,
    ResidentForwardPlan,
    ResidentPlan,
    TransposedForwardPlan,
    TransposedPlan,
)
from nki_bn.kernels.sizing import ceil_div, share_of


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


@dataclass(frozen=True)
class Place(nl.NKIObject):
    """Where the work on one channel tile happens: partition = band*channels + channel - first channel."""

    share: Share
    bands: int
    channel: int
    channels: int
    partitions: int


def place_of(share: Share, bands: int, index: int, channels: int) -> Place:
    """The :class:`Place` of channel tile ``index`` of a tensor with ``channels`` channels."""
    channel = index * nl.tile_size.pmax
    count = min(nl.tile_size.pmax, channels - channel)
    return Place(share, bands, channel, count, count * bands)


def tiles_ahead(slots: int) -> int:
    """How many tiles loads run ahead of the work: DMAs start in program order, and a store would hold up a load."""
    return min(1, slots - 1)


def slot_tile(slots: list[nl.NkiTensor], at: int, place: Place, tile: Tile) -> nl.NkiTensor:
    """The part of slot ``at`` (of a ring) that holds ``tile``."""
    return slots[at % len(slots)][0 : place.partitions, 0 : tile.width()]


def tile_view(tensor: nl.NkiTensor, place: Place, tile: Tile) -> nl.NkiTensor:
    """The elements of a tile in a [B, C, S] HBM tensor, as (bands, channels, batches, positions)."""
    share = place.share
    owned = tensor.slice(0, share.batch, share.batch + share.batches)
    banded = owned.reshape_dim(0, (place.bands, share.batches // place.bands))
    channels = nl.ds(place.channel, place.channels)
    part = banded[:, nl.ds(tile.batch, tile.batches), channels, nl.ds(tile.start, tile.length)]
    return part.permute((0, 2, 1, 3))


def load_tile(dst: nl.NkiTensor, tensor: nl.NkiTensor, place: Place, tile: Tile) -> None:
    """Fill an SBUF tile from a [B, C, S] tensor, all bands in one DMA."""
    nisa.dma_copy(dst=dst, src=tile_view(tensor, place, tile))


def store_tile(tensor: nl.NkiTensor, src: nl.NkiTensor, place: Place, tile: Tile) -> None:
    """Write an SBUF tile to a [B, C, S] tensor, all bands in one DMA."""
    nisa.dma_copy(dst=tile_view(tensor, place, tile), src=src)


@dataclass(frozen=True)
class Chunk(nl.NKIObject):
    """Columns [start, start + length) of a tile: what one instruction works on."""

    start: int
    length: int


def chunks_of(tile: Tile, columns: int) -> list[Chunk]:
    """The chunks of a tile, of at most ``columns`` columns."""
    chunks = []
    for i in range(ceil_div(tile.width(), columns)):
        chunks.append(Chunk(i * columns, min(columns, tile.width() - i * columns)))
    return chunks


def part(tile: nl.NkiTensor, chunk: Chunk) -> nl.NkiTensor:
    """The columns of a chunk."""
    return tile[:, nl.ds(chunk.start, chunk.length)]


def flattened(tensor: nl.NkiTensor | None, flat: tuple[int, int, int]) -> nl.NkiTensor | None:
    """A [B, C, D, H, W] tensor as [B, C, S]; None stays None."""
    if tensor == None:
        return None
    return tensor.reshape(flat)


def output(needed: bool, shape: tuple[int, ...], dtype: str, name: str) -> nl.NkiTensor | None:
    """A result tensor in shared HBM, or None."""
    if not needed:
        return None
    return nl.ndarray(shape, dtype=dtype, buffer=nl.shared_hbm, name=name)


def check_made_for(
    plan: BackwardPlan | ResidentPlan | TransposedPlan | ForwardPlan | ResidentForwardPlan | TransposedForwardPlan,
    shape: tuple[int, int, int],
    dtype: str,
) -> None:
    """A plan is made for this shape, this dtype and as many cores as there are."""
    made = (plan.shape, plan.dtype, plan.cores)
    asked = (shape, dtype, nl.num_programs(0))
    assert made == asked, f"the plan is made for (shape, dtype, cores) {made}, the launch has {asked}"
