# SPDX-License-Identifier: Apache-2.0
"""What the strategies have in common that take channels in tiles of 128 and data in tiles of slots.

Plans with many tiles are run with fewer: once they repeat themselves, each further tile adds the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nki_bn.hardware import Timing
from nki_bn.kernels.plan import BackwardPlan, ForwardPlan
from nki_bn.kernels.resident_geometry import extent_of_core
from nki_bn.kernels.sizing import BLOCK_TILES, CHUNK_COLUMNS, PARTITIONS, ceil_div
from nki_bn.pipeline import Paces, Pipeline, Prediction, Transfer
from nki_bn.predict_columns import Columns

# Channel tiles, and tiles beyond those in slots, that are run when there are more; and how many more, to see what they
# add.
CHANNEL_TILES, MORE_CHANNEL_TILES = 2, 1
# Channel tiles in slots at a time, beyond which more change nothing.
MOST_CHANNEL_TILES = 64
TILES, MORE_TILES = 8, 4


@dataclass(frozen=True)
class Walk:
    """The tiles of one channel tile on core 0, all or the last of them, and the channel tiles, likewise.

    Attributes:
        bands: partitions per channel.
        tiles: (batches, positions) of each tile.
        channels: channels of each channel tile, on this core and on the other.
        block: channel tiles, at most, whose columns the backward makes together.
        contiguous: the batches of a channel follow each other in memory.
    """

    bands: int
    tiles: tuple[tuple[int, int], ...]
    channels: tuple[tuple[int, int], ...]
    block: int
    contiguous: bool

    def chunks(self, at: int, columns: int = CHUNK_COLUMNS) -> list[int]:
        """The widths of the chunks of tile ``at``."""
        batches, positions = self.tiles[at]
        width = batches * positions
        return [min(columns, width - start) for start in range(0, width, columns)]


def predict_walk(plan: BackwardPlan | ForwardPlan, run: Callable[[Walk], Prediction]) -> Prediction:
    """The prediction of ``run`` for the slower core.

    That is core 0, or the one with a smaller last channel tile, whose columns are a block of their own.
    """
    channels = plan.shape[1]
    found = _predicted(plan, 0, run)
    if plan.split != "channel" or channels % PARTITIONS == 0 or ceil_div(channels, PARTITIONS) % plan.cores > 0:
        return found
    return max(found, _predicted(plan, 1, run), key=lambda prediction: prediction.ns)


def _predicted(plan: BackwardPlan | ForwardPlan, core: int, run: Callable[[Walk], Prediction]) -> Prediction:
    """The prediction of ``run`` over all tiles of a core, extrapolated where there are many."""
    _, channels, positions = plan.shape
    extent = extent_of_core(plan.shape, "none" if plan.split == "channel" else plan.split, 0, plan.cores)
    batches, length = extent.batches // plan.bands, extent.length
    owned = ceil_div(channels, PARTITIONS)
    if plan.split == "channel":
        owned = ceil_div(owned, plan.cores)
    total = _tile_count(batches, length, plan.f_tile)

    def over_tiles(count: int) -> Prediction:
        tiles = tuple(_tile(batches, length, plan.f_tile, at) for at in range(total - count, total))

        def over_channels(number: int, block: int = BLOCK_TILES) -> Prediction:
            walked = tuple(_channels_at(plan, at, owned, core) for at in range(owned - number, owned))
            return run(Walk(plan.bands, tiles, walked, block, channels == 1 and length == positions))

        # The slots hold the tiles of several channel tiles, if those have few.
        few = CHANNEL_TILES + min(plan.interleave // count, MOST_CHANNEL_TILES)
        found = extrapolated(over_channels, owned, few, MORE_CHANNEL_TILES)
        blocks = ceil_div(owned, BLOCK_TILES) - ceil_div(min(owned, few + MORE_CHANNEL_TILES), BLOCK_TILES)
        if blocks > 0:
            found = found.prolonged(over_channels(2, 2), over_channels(2, 1), blocks)
        return found

    return extrapolated(over_tiles, total, plan.interleave + TILES, MORE_TILES)


def _channels_at(plan: BackwardPlan | ForwardPlan, at: int, tiles: int, core: int) -> tuple[int, int]:
    """Channels of channel tile ``at`` of the ``tiles`` of a core, and what the other core works on meanwhile."""
    channels = plan.shape[1]

    def size(tile: int) -> int:
        rest: int = channels - tile * PARTITIONS
        return max(min(rest, int(PARTITIONS)), 0)

    if plan.cores == 1:
        return size(at), 0
    if plan.split != "channel":
        return size(at), size(at)
    return size(at + core * tiles), size(at + (1 - core) * tiles)


def extrapolated(run: Callable[[int], Prediction], count: int, few: int, more: int) -> Prediction:
    """``run(count)``, from two shorter runs if ``count`` is above what those have."""
    if count <= few + more:
        return run(count)
    short, long = run(few), run(few + more)
    return long.prolonged(short, long, (count - few - more) / more)


def _tile_count(batches: int, length: int, f_tile: int) -> int:
    if length <= f_tile:
        return int(ceil_div(batches, f_tile // length))
    return batches * int(ceil_div(length, f_tile))


def _tile(batches: int, length: int, f_tile: int, at: int) -> tuple[int, int]:
    """(batches, positions) of tile number ``at``."""
    if length <= f_tile:
        together = f_tile // length
        return min(together, batches - at * together), length
    piece = at % ceil_div(length, f_tile)
    return 1, min(f_tile, length - piece * f_tile)


class TileRun:
    """One core at work on tiles: the parts of the state that both passes over data have."""

    def __init__(self, plan: BackwardPlan | ForwardPlan, walk: Walk, timing: Timing) -> None:
        self.walk = walk
        self.timing = timing
        self._paces: dict[float, Paces] = {}
        self.pipeline = Pipeline(timing)
        self.depth = plan.interleave
        self.ahead = min(1, plan.interleave - 1)
        self.take(0)
        self.shared = plan.split in ("batch", "spatial")

    def channel_tiles(self) -> Iterator[int]:
        """Each channel tile in turn becomes the one at work."""
        for at in range(len(self.walk.channels)):
            self.take(at)
            yield self.channels

    def take(self, at: int) -> None:
        """Channel tile ``at`` becomes the one at work."""
        mine, others = self.walk.channels[at]
        self.channels = mine
        # Fewer partitions use fewer DMA engines, and leave more of HBM to this core.
        share = others / mine
        if share not in self._paces:
            self._paces[share] = Paces(self.timing, share)
        self.paces = self._paces[share]

    def columns(self, groups: int = 1) -> Columns:
        """The columns of the channel tile at work, or of as many like it."""
        return Columns(self.pipeline, self.paces, self.channels * self.walk.bands, groups)

    def transfer(self, at: int, itemsize: int) -> Transfer:
        """The DMA of tile ``at`` of the channel tile at work."""
        batches, positions = self.walk.tiles[at]
        descriptors = 1 if self.walk.contiguous else batches
        return self.paces.transfer(self.channels * self.walk.bands, descriptors, batches * positions * itemsize)

    def row(self, at: int, itemsize: int) -> Transfer:
        """The DMA of tile ``at`` to or from a row of its own."""
        batches, positions = self.walk.tiles[at]
        return self.paces.transfer(self.channels * self.walk.bands, 1, batches * positions * itemsize)
