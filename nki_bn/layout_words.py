# SPDX-License-Identifier: Apache-2.0
"""The layout of a plan in words: who works on what, in which pieces, and what stays in SBUF."""

from __future__ import annotations

from nki_bn.kernels.plan import BackwardPlan, ForwardPlan, ResidentPlan, TransposedForwardPlan, TransposedPlan
from nki_bn.kernels.resident_geometry import extent_of_core
from nki_bn.kernels.resident_layout import group_size
from nki_bn.kernels.resident_layout import layout_of as resident_layout_of
from nki_bn.kernels.sizing import PARTITIONS, ceil_div, geometry_of, width_of
from nki_bn.kernels.transposed_layout import block_size, row_chunks
from nki_bn.predict import Plan

STRATEGIES = {
    "resident": "every element is read once and written once; one group of channels at a time stays in SBUF",
    "staged": "two passes over tiles of 128 channels; the gradient that leaves SBUF in between is staged as bfloat16",
    "transposed": "rows are loaded as they lie, batches on partitions; Tensor turns blocks of channels, and back",
    "two_read": "two passes over tiles of 128 channels; x is read again where it leaves SBUF in between",
}
_SPLITS = {"channel": "half of the channels", "batch": "half of the batches", "spatial": "half of the positions"}


def layout_of(plan: Plan) -> dict[str, str]:
    """The layout as (what, how) in the order of reading."""
    words = {"cores": "1, with all of the work" if plan.cores == 1 else f"2, each with {_SPLITS[plan.split]}"}
    if isinstance(plan, ResidentPlan):
        return words | _resident(plan)
    return words | (_transposed(plan) if isinstance(plan, TransposedPlan | TransposedForwardPlan) else _tiled(plan))


def brief(plan: Plan) -> str:
    """The free choices of a plan in a few words."""
    if isinstance(plan, ResidentPlan):
        channels = counted(plan.set_channels * plan.group_sets, "channel")
        return (
            f"{channels} a group, {plan.batch_bands} x {plan.space_bands} bands, "
            f"chunks of {_widest(plan)}, {plan.slots} slots"
        )
    if isinstance(plan, TransposedPlan | TransposedForwardPlan):
        again = ", rows read twice" if plan.reload else ""
        blocks, tiles = counted(plan.group_blocks, "block"), counted(plan.tiles, "tile")
        return f"split by {plan.split}, {blocks} a group, {tiles} a slot, {plan.slots} slots{again}"
    return f"tiles of {plan.f_tile} columns, {plan.interleave} slots"


def counted(count: int, noun: str) -> str:
    """A number and its noun, which forms its plural with an s."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def owned_part(plan: Plan) -> float:
    """The part of the elements that the core with the larger share works on."""
    batch, channels, positions = plan.shape
    extent = extent_of_core(plan.shape, plan.split, 0, plan.cores)
    owned = extent.channels
    if plan.split == "channel" and isinstance(plan, BackwardPlan | ForwardPlan):
        owned = min(channels, ceil_div(ceil_div(channels, PARTITIONS), 2) * PARTITIONS)
    part: float = owned * extent.batches * extent.length / (batch * channels * positions)
    return part


def _resident(plan: ResidentPlan) -> dict[str, str]:
    owned = extent_of_core(plan.shape, plan.split, 0, plan.cores).channels
    channels = plan.set_channels * plan.group_sets
    groups, chunks = ceil_div(owned, channels), group_size(plan.shape, plan.cores, resident_layout_of(plan)).chunks
    sets = f", in {counted(plan.group_sets, 'set')} side by side" if plan.group_sets > 1 else ""
    ring = f"room for {plan.slots / chunks:.1f} groups" if groups > 1 else "room for the one group"
    return {
        "groups": f"{groups} on a core, of {counted(channels, 'channel')}{sets}",
        "bands": f"{plan.lane_bands} a channel ({plan.batch_bands} of batches x {plan.space_bands} of positions): "
        f"{plan.lane_bands * plan.set_channels} of {PARTITIONS} partitions",
        "chunks": f"{chunks} a group, of at most {_widest(plan)} columns",
        "slots": f"{plan.slots}, {ring}",
    }


def _transposed(plan: TransposedPlan | TransposedForwardPlan) -> dict[str, str]:
    extent = extent_of_core(plan.shape, plan.split, 0, plan.cores)
    size = block_size(plan.shape, plan.split, plan.cores)
    blocks = ceil_div(extent.channels, size)
    chunks = row_chunks(extent, plan.tiles, plan.positions, plan.dtype)
    rows, columns = max(chunk.rows for chunk in chunks), max(chunk.columns() for chunk in chunks)
    groups = ceil_div(blocks, plan.group_blocks)
    if plan.reload:
        ring = "rows are read again in the second phase"
    elif plan.slots >= groups * len(chunks):
        ring = "room for all rows"
    else:
        ring = f"room for {plan.slots / len(chunks):.1f} groups"
    return {
        "blocks": f"{blocks} on a core, of at most {size} channels",
        "groups": f"{groups}, of {counted(plan.group_blocks, 'block')}",
        "chunks": f"{len(chunks)} a group, of at most {counted(plan.tiles, 'tile')} of {rows} batches on partitions: "
        f"{columns} columns a block once turned",
        "slots": f"{plan.slots}, {ring}",
    }


def _tiled(plan: BackwardPlan | ForwardPlan) -> dict[str, str]:
    geometry = geometry_of(plan.shape, plan.cores)
    tiles = width_of(geometry, plan.f_tile, plan.f_tile).tiles
    channel_tiles = ceil_div(plan.shape[1], PARTITIONS)
    owned = ceil_div(channel_tiles, 2) if plan.split == "channel" else channel_tiles
    lanes = min(plan.shape[1], PARTITIONS) * plan.bands
    leaving = max(tiles - plan.interleave, 0)
    return {
        "channel tiles": f"{owned} on a core, of at most {PARTITIONS} channels",
        "bands": f"{plan.bands} a channel: {lanes} of {PARTITIONS} partitions",
        "tiles": f"{tiles} a channel tile, of at most {plan.f_tile} columns",
        "slots": f"{plan.interleave}; {leaving} of {tiles} tiles leave SBUF between the passes",
    }


def _widest(plan: ResidentPlan) -> int:
    columns: int = next(buffer.columns for buffer in plan.buffers if buffer.name == "dy")
    return columns
