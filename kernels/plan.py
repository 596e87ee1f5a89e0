# SPDX-License-Identifier: Apache-2.0
"""How a backward kernel will work: the plan types, and the rule that sizes the ``staged`` strategy.

Everything here is in the NKI subset, because a kernel without a plan sizes itself with the same rule as the host.
"""

from dataclasses import dataclass

import nki.language as nl
from nki_bn.kernels.columns import COLUMN_COUNT

# A sum keeps one partial per chunk of at most this many columns, so that no float32 accumulator runs over a whole row.
CHUNK_COLUMNS = 2048
# Partials are added in groups of this many, whose sums are added at the end.
PARTIAL_COLUMNS = 512
# Widths of tiles that are tried, widest first.
WIDEST_TILE = 16384
NARROWEST_TILE = 64
# Bytes per partition left free: sources disagree by this much about what a kernel may use of SBUF on trn2.
SBUF_SLACK_BYTES = 256


@dataclass(frozen=True)
class Buffer(nl.NKIObject):
    """``count`` SBUF tiles of ``columns`` elements per partition."""

    name: str
    count: int
    columns: int
    dtype: str


@dataclass(frozen=True)
class BackwardPlan(nl.NKIObject):
    """A backward launch, decided on the host (or by :func:`staged_plan` inside the kernel).

    Attributes:
        strategy: "staged".
        split: what the two cores of LNC 2 divide: "none", "channel", "batch" or "spatial".
        bands: partitions per channel.
        f_tile: columns per slot.
        interleave: number of slots.
        relu: "none", "mask" (supplied) or "recompute".
        training: statistics are those of the batch.
        need_dx, need_dgamma, need_dbeta: the outputs that are made.
        buffers: the one list of what is allocated in SBUF.
        sbuf_bytes: total of that list per partition.
    """

    strategy: str
    split: str
    bands: int
    f_tile: int
    interleave: int
    relu: str
    training: bool
    need_dx: bool
    need_dgamma: bool
    need_dbeta: bool
    buffers: tuple[Buffer, ...]
    sbuf_bytes: int


def size_of(dtype: str) -> int:
    """Bytes of one element of a dtype that the kernels use."""
    if dtype == nl.float32:
        return 4
    if dtype == nl.uint8:
        return 1
    return 2


def ceil_div(value: int, divisor: int) -> int:
    """``value / divisor``, rounded up."""
    return (value + divisor - 1) // divisor


def split_of(batch: int, channels: int, spatial: int, cores: int) -> str:
    """What the cores divide: channel tiles when they come out even, else batches, else space."""
    if cores == 1:
        return "none"
    if ceil_div(channels, nl.tile_size.pmax) % 2 == 0:
        return "channel"
    if batch % 2 == 0:
        return "batch"
    if spatial > 1:
        return "spatial"
    if batch > 1:
        return "batch"
    return "channel"


def share_of(count: int, core: int, cores: int) -> tuple[int, int]:
    """The part [start, end) of ``count`` things that ``core`` takes; core 0 has the larger one."""
    return (core * count + cores - 1) // cores, ((core + 1) * count + cores - 1) // cores


def owned_extent(batch: int, spatial: int, split: str, cores: int) -> tuple[int, int]:
    """(batches, positions) of the larger share of one core."""
    if split == "batch":
        return ceil_div(batch, cores), spatial
    if split == "spatial":
        return batch, ceil_div(spatial, cores)
    return batch, spatial


def bands_of(channels: int, batches_even: bool, batches: int) -> int:
    """Partition bands per channel: 32 and 64 channels are replicated when the batches of every core divide."""
    if not batches_even:
        return 1
    if channels == 32 and batches % 4 == 0:
        return 4
    if (channels == 64 or channels == 32) and batches % 2 == 0:
        return 2
    return 1


def tile_count(batches: int, positions: int, f_tile: int) -> int:
    """Number of tiles of at most ``f_tile`` columns: whole batches together, or pieces of one."""
    if positions <= f_tile:
        return ceil_div(batches, f_tile // positions)
    return batches * ceil_div(positions, f_tile)


def chunk_count(batches: int, positions: int, f_tile: int) -> int:
    """Upper bound of the number of chunks over all tiles."""
    widest = f_tile
    if positions * batches < widest:
        widest = positions * batches
    return tile_count(batches, positions, f_tile) * ceil_div(widest, CHUNK_COLUMNS)


def staged_buffers(dtype: str, relu: str, staging: bool, f_tile: int, interleave: int, chunks: int) -> list[Buffer]:
    """The buffers of the ``staged`` strategy for one choice of width and depth."""
    buffers = [
        Buffer("dy", interleave, f_tile, dtype),
        Buffer("x", interleave, f_tile, dtype),
    ]
    if staging:
        buffers.append(Buffer("staged", interleave, f_tile, nl.bfloat16))
    if relu != "none":
        buffers.append(Buffer("mask", interleave, f_tile, nl.uint8))
    chunk = f_tile
    if chunk > CHUNK_COLUMNS:
        chunk = CHUNK_COLUMNS
    buffers.append(Buffer("work", 2, chunk, nl.float32))
    group = chunks
    if group > PARTIAL_COLUMNS:
        group = PARTIAL_COLUMNS
    buffers.append(Buffer("partials", 2, group, nl.float32))
    buffers.append(Buffer("totals", 2, ceil_div(chunks, PARTIAL_COLUMNS), nl.float32))
    buffers.append(Buffer("columns", 1, COLUMN_COUNT, nl.float32))
    buffers.append(Buffer("flag", 1, 4, nl.uint8))
    return buffers


def total_bytes(buffers: list[Buffer]) -> int:
    """Bytes per partition of a list of buffers."""
    total = 0
    for i in range(len(buffers)):
        buffer = buffers[i]
        total += buffer.count * buffer.columns * size_of(buffer.dtype)
    return total


def find_buffer(plan: BackwardPlan, name: str) -> Buffer | None:
    """The buffer called ``name``, or None if the plan has none."""
    for i in range(len(plan.buffers)):
        if plan.buffers[i].name == name:
            return plan.buffers[i]
    return None


def staged_plan(
    shape: tuple[int, int, int],
    dtype: str,
    relu: str,
    cores: int,
    sbuf_bytes: int,
    training: bool = True,
    need: tuple[bool, ...] = (True, True, True),
) -> BackwardPlan:
    """The largest ``staged`` configuration that fits: widest tile first, depth given up before width.

    Args:
        shape: (batches, channels, positions).
        dtype: of x and dy.
        relu: "none", "mask" or "recompute".
        cores: 1 or 2.
        sbuf_bytes: what may be used per partition.
        training: statistics are those of the batch.
        need: (dx, dgamma, dbeta).
    """
    batch, channels, spatial = shape
    split = split_of(batch, channels, spatial, cores)
    batches, positions = owned_extent(batch, spatial, split, cores)
    bands = bands_of(channels, split != "batch" or batch % cores == 0, batches)
    batches = batches // bands
    staging = training and need[0]
    width = WIDEST_TILE
    while width >= NARROWEST_TILE:
        f_tile = fitted_width(batches, positions, width)
        tiles = tile_count(batches, positions, f_tile)
        chunks = chunk_count(batches, positions, f_tile)
        depth = deepest(dtype, relu, staging, f_tile, tiles, chunks, sbuf_bytes)
        if depth >= 2 or depth == tiles:
            buffers = staged_buffers(dtype, relu, staging, f_tile, depth, chunks)
            return BackwardPlan(
                "staged", split, bands, f_tile, depth, relu, training, need[0], need[1], need[2],
                tuple(buffers), total_bytes(buffers),
            )
        width = width // 2
    assert False, f"no tile of {NARROWEST_TILE} columns fits into {sbuf_bytes} bytes of SBUF per partition"


def fitted_width(batches: int, positions: int, width: int) -> int:
    """``width`` cut to what there is: whole batches, or equal pieces of one."""
    if positions > width:
        return ceil_div(positions, ceil_div(positions, width))
    together = width // positions
    if together > batches:
        together = batches
    return together * positions


def deepest(dtype: str, relu: str, staging: bool, f_tile: int, tiles: int, chunks: int, sbuf_bytes: int) -> int:
    """Most slots that fit, at most one per tile."""
    fixed = total_bytes(staged_buffers(dtype, relu, staging, f_tile, 0, chunks))
    slot = total_bytes(staged_buffers(dtype, relu, staging, f_tile, 1, chunks)) - fixed
    depth = (sbuf_bytes - SBUF_SLACK_BYTES - fixed) // slot
    if depth > tiles:
        depth = tiles
    return depth
