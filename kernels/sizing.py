# SPDX-License-Identifier: Apache-2.0
"""The rule that sizes a launch: who works on what, and the largest tiles that fit.

It is written in the NKI subset, because a kernel without a plan sizes itself with the same rule as the host.
"""

from dataclasses import dataclass

import nki.language as nl

from nki_bn.kernels.columns import COLUMN_COUNT
from nki_bn.kernels.plan import BackwardPlan, Buffer, ForwardPlan, total_bytes

# Partitions of SBUF: `nl.tile_size.pmax` on every target of the Neuron architecture guides. A number, because plans are
# made where no kernel runs and no target is chosen.
PARTITIONS = 128
# float32 numbers of a bank of PSUM, likewise: `nl.tile_size.psum_bank_fmax`.
BANK_COLUMNS = 512
# Columns of one `bn_stats`, likewise: `nl.tile_size.bn_stats_fmax`.
STATS_COLUMNS = 512
# A sum keeps one partial per chunk of at most this many columns, so that no float32 accumulator runs over a whole row.
CHUNK_COLUMNS = 2048
# Partials are added in groups of this many, whose sums are added at the end.
PARTIAL_COLUMNS = 512
# Results of bn_stats are merged in groups of this many.
GROUP_PIECES = 64
# Widths of tiles that are tried, widest first.
WIDEST_TILE = 16384
NARROWEST_TILE = 64
# Bytes per partition left free: sources disagree by this much about what a kernel may use of SBUF on trn2.
SBUF_SLACK_BYTES = 256
# From this number of channel tiles on, one more for one core costs less than to exchange the sums of all of them.
MANY_TILES = 9
# Channel tiles whose columns the backward makes together.
BLOCK_TILES = 16


@dataclass(frozen=True)
class Geometry(nl.NKIObject):
    """How the data is divided: between cores, over bands of partitions, and what the larger share of a band is.

    ``channel_tiles`` are those of the core that has more of them.
    """

    split: str
    bands: int
    batches: int
    positions: int
    channel_tiles: int


@dataclass(frozen=True)
class Width(nl.NKIObject):
    """A width of tiles, and how many tiles and chunks there are at most."""

    columns: int
    tiles: int
    chunks: int


def ceil_div(value: int, divisor: int) -> int:
    """``value / divisor``, rounded up."""
    return (value + divisor - 1) // divisor


def share_of(count: int, core: int, cores: int) -> tuple[int, int]:
    """The part [start, end) of ``count`` things that ``core`` takes; core 0 has the larger one."""
    return (core * count + cores - 1) // cores, ((core + 1) * count + cores - 1) // cores


def geometry_of(shape: tuple[int, int, int], cores: int) -> Geometry:
    """The division of (batches, channels, positions) over cores and bands."""
    batch, channels, spatial = shape
    split = split_of(batch, channels, spatial, cores)
    batches = batch
    positions = spatial
    if split == "batch":
        batches = ceil_div(batch, cores)
    if split == "spatial":
        positions = ceil_div(spatial, cores)
    bands = 1
    if split != "batch" or batch % cores == 0:
        bands = bands_of(channels, batches)
    channel_tiles = ceil_div(channels, PARTITIONS)
    if split == "channel":
        channel_tiles = ceil_div(channel_tiles, cores)
    return Geometry(split, bands, batches // bands, positions, channel_tiles)


def split_of(batch: int, channels: int, spatial: int, cores: int) -> str:
    """What the cores divide: channel tiles when they come out even or nearly so, else batches, else space."""
    if cores == 1:
        return "none"
    tiles = ceil_div(channels, PARTITIONS)
    if tiles % 2 == 0 or tiles >= MANY_TILES:
        return "channel"
    if batch % 2 == 0:
        return "batch"
    if spatial > 1:
        return "spatial"
    if batch > 1:
        return "batch"
    return "channel"


def bands_of(channels: int, batches: int) -> int:
    """Partition bands per channel: 32 and 64 channels are replicated when the batches divide."""
    if channels == 32 and batches % 4 == 0:
        return 4
    if (channels == 64 or channels == 32) and batches % 2 == 0:
        return 2
    return 1


def width_of(geometry: Geometry, columns: int, chunk: int) -> Width:
    """Equal tiles of at most ``columns`` columns (whole batches, or pieces of one), in chunks of ``chunk`` columns."""
    batches = geometry.batches
    positions = geometry.positions
    if positions > columns:
        pieces = ceil_div(positions, columns)
        piece = ceil_div(positions, pieces)
        return Width(piece, batches * pieces, batches * pieces * ceil_div(piece, chunk))
    tiles = ceil_div(batches, columns // positions)
    together = ceil_div(batches, tiles)
    tiles = ceil_div(batches, together)
    return Width(together * positions, tiles, tiles * ceil_div(together * positions, chunk))


@dataclass(frozen=True)
class StagedBuffers(nl.NKIObject):
    """What the backward strategy ``staged`` allocates."""

    dtype: str
    relu: str
    residual: bool
    staging: bool
    channel_tiles: int

    def chunk(self) -> int:
        """Columns per instruction."""
        return CHUNK_COLUMNS

    def buffers(self, width: Width, depth: int) -> list[Buffer]:
        """The list for tiles of ``width`` and ``depth`` slots."""
        buffers = [Buffer("dy", depth, width.columns, self.dtype), Buffer("x", depth, width.columns, self.dtype)]
        if self.staging:
            buffers.append(Buffer("staged", depth, width.columns, nl.bfloat16))
        else:
            buffers.append(Buffer("copy", 1, min(width.columns, CHUNK_COLUMNS), nl.bfloat16))
        if self.relu != "none":
            buffers.append(Buffer("mask", depth, width.columns, nl.uint8))
        if self.residual:
            buffers.append(Buffer("residual", depth, width.columns, self.dtype))
        buffers.append(Buffer("work", 2, min(width.columns, CHUNK_COLUMNS), nl.float32))
        buffers.append(Buffer("partials", 2, min(width.chunks, PARTIAL_COLUMNS), nl.float32))
        buffers.append(Buffer("totals", 2, ceil_div(width.chunks, PARTIAL_COLUMNS), nl.float32))
        # Two blocks by turns, where there can be two: a last channel tile with fewer channels is one for itself.
        groups = min(self.channel_tiles, BLOCK_TILES)
        buffers.append(Buffer("columns", min(self.channel_tiles, 2), COLUMN_COUNT * groups, nl.float32))
        buffers.append(Buffer("flag", 1, 4 * ceil_div(groups, 4), nl.uint8))
        return buffers


def staged_plan(
    shape: tuple[int, int, int],
    dtype: str,
    relu: str,
    cores: int,
    sbuf_bytes: int,
    residual: bool = False,
    training: bool = True,
    need: tuple[bool, ...] = (True, True, True, False),
) -> BackwardPlan:
    """The largest ``staged`` configuration that fits.

    Args:
        shape: (batches, channels, positions).
        dtype: of x and dy.
        relu: "none", "mask" or "recompute".
        cores: 1 or 2.
        sbuf_bytes: what may be used per partition.
        residual: the residual is read, to recompute the mask.
        training: statistics are those of the batch.
        need: (dx, dgamma, dbeta, dresidual).
    """
    geometry = geometry_of(shape, cores)
    # Sized as if everything were needed: the sums are then added in the same order whatever the outputs are.
    everything = StagedBuffers(dtype, relu, residual, True, geometry.channel_tiles)
    width, depth = largest_that_fits(everything, geometry, sbuf_bytes, geometry.channel_tiles)
    staging = training and need[0] and width.tiles > depth
    buffers = StagedBuffers(dtype, relu, residual, staging, geometry.channel_tiles).buffers(width, depth)
    return BackwardPlan(
        "staged",
        shape,
        dtype,
        cores,
        geometry.split,
        geometry.bands,
        width.columns,
        depth,
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


@dataclass(frozen=True)
class ForwardBuffers(nl.NKIObject):
    """What the forward allocates; y is formed in the slot of x."""

    dtype: str
    relu: bool
    residual: bool
    save_mask: bool
    training: bool

    def chunk(self) -> int:
        """Columns per instruction of the longest kind of list: pieces of bn_stats."""
        return STATS_COLUMNS

    def buffers(self, width: Width, depth: int) -> list[Buffer]:
        """The list for tiles of ``width`` and ``depth`` slots."""
        chunk = min(width.columns, CHUNK_COLUMNS)
        buffers = [Buffer("x", depth, width.columns, self.dtype)]
        if self.residual:
            buffers.append(Buffer("residual", depth, width.columns, self.dtype))
        if self.save_mask:
            buffers.append(Buffer("mask", depth, width.columns, nl.uint8))
        if self.relu:
            buffers.append(Buffer("stopped", 2, chunk, nl.uint8))
        buffers.append(Buffer("work", 2, chunk, nl.float32))
        if self.training:
            buffers.append(Buffer("pieces", 1, 6 * min(width.chunks, GROUP_PIECES), nl.float32))
            buffers.append(Buffer("groups", 1, 3 * ceil_div(width.chunks, GROUP_PIECES), nl.float32))
            # One triple per band or core.
            buffers.append(Buffer("parts", 1, 12, nl.float32))
        buffers.append(Buffer("columns", 1, COLUMN_COUNT, nl.float32))
        buffers.append(Buffer("flag", 1, 4, nl.uint8))
        return buffers


def two_read_plan(
    shape: tuple[int, int, int],
    dtype: str,
    cores: int,
    sbuf_bytes: int,
    training: bool = True,
    need: tuple[bool, ...] = (True, True),
    relu: bool = False,
    residual: bool = False,
) -> ForwardPlan:
    """The largest ``two_read`` configuration of the forward that fits.

    Args:
        shape: (batches, channels, positions).
        dtype: of x and y.
        cores: 1 or 2.
        sbuf_bytes: what may be used per partition.
        training: the statistics are made from x.
        need: (y, relu_mask).
        relu: a ReLU follows.
        residual: a residual is added before the ReLU.
    """
    geometry = geometry_of(shape, cores)
    # Sized as if everything were made: the statistics then have the same bits whatever is needed beside them.
    width, depth = largest_that_fits(ForwardBuffers(dtype, True, True, True, True), geometry, sbuf_bytes)
    buffers = ForwardBuffers(dtype, relu, residual, relu and need[1], training).buffers(width, depth)
    return ForwardPlan(
        "two_read",
        shape,
        dtype,
        cores,
        geometry.split,
        geometry.bands,
        width.columns,
        depth,
        relu,
        residual,
        training,
        need[0],
        relu and need[1],
        tuple(buffers),
        total_bytes(buffers),
    )


def largest_that_fits(
    recipe: StagedBuffers | ForwardBuffers, geometry: Geometry, sbuf_bytes: int, rounds: int = 1
) -> tuple[Width, int]:
    """What :func:`widest_that_fits` finds; the host asks before it comes here."""
    found = widest_that_fits(recipe, geometry, sbuf_bytes, rounds)
    assert found != None, f"no tile of {NARROWEST_TILE} columns fits into {sbuf_bytes} bytes of SBUF per partition"
    return found


def widest_that_fits(
    recipe: StagedBuffers | ForwardBuffers, geometry: Geometry, sbuf_bytes: int, rounds: int = 1
) -> tuple[Width, int] | None:
    """The widest tile of which two slots fit and are used, and as many slots as fit: depth is given up first.

    The slots serve all tiles of ``rounds`` channel tiles. One slot is enough for a tile that is one instruction.
    """
    columns = WIDEST_TILE
    while columns >= NARROWEST_TILE:
        width = width_of(geometry, columns, recipe.chunk())
        fixed = total_bytes(recipe.buffers(width, 0))
        slot = total_bytes(recipe.buffers(width, 1)) - fixed
        fitting = (sbuf_bytes - SBUF_SLACK_BYTES - fixed) // slot
        depth = min(fitting, width.tiles * rounds)
        if depth >= 2 or (fitting >= 2 and width.columns <= CHUNK_COLUMNS):
            return width, depth
        columns = columns // 2
    return None
