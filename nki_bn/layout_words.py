# SPDX-License-Identifier: Apache-2.0
"""The layout of a plan in words: who works on what, in which pieces, and what stays in SBUF."""

from __future__ import annotations

from dataclasses import replace

from nki_bn.kernels.plan import (
    BackwardPlan,
    ForwardPlan,
    ResidentForwardPlan,
    ResidentPlan,
    TransposedForwardPlan,
    TransposedPlan,
)
from nki_bn.kernels.resident_fwd_plan import forward_layout, forward_size
from nki_bn.kernels.resident_geometry import extent_of_core
from nki_bn.kernels.resident_layout import group_size
from nki_bn.kernels.resident_layout import layout_of as resident_layout_of
from nki_bn.kernels.resident_turn import combines_by_tensor
from nki_bn.kernels.sizing import PARTITIONS, ceil_div, geometry_of, width_of
from nki_bn.kernels.transposed_layout import block_size, row_chunks
from nki_bn.predict import Plan

# Chunks that a share of an engine is counted in.
_EIGHTHS = 8

STRATEGIES = {
    "resident": "every element is read once and written once; one group of channels at a time stays in SBUF",
    "reread": "two passes over one group of channels at a time; every element is read twice and written once",
    "staged": "two passes over tiles of 128 channels; the gradient that leaves SBUF in between is staged as bfloat16",
    "transposed": "rows are loaded as they lie, batches on partitions; Tensor turns blocks of channels, and back",
    "two_read": "two passes over tiles of 128 channels; x is read again where it leaves SBUF in between",
}
_SPLITS = {"channel": "half of the channels", "batch": "half of the batches", "spatial": "half of the positions"}


def words_of(plan: Plan) -> dict[str, str]:
    """The layout as (what, how) in the order of reading."""
    words = {"cores": "1, with all of the work" if plan.cores == 1 else f"2, each with {_SPLITS[plan.split]}"}
    if isinstance(plan, ResidentPlan):
        return words | _resident(plan)
    if isinstance(plan, ResidentForwardPlan):
        return words | _resident_forward(plan)
    return words | (_transposed(plan) if isinstance(plan, TransposedPlan | TransposedForwardPlan) else _tiled(plan))


def brief(plan: Plan) -> str:
    """The free choices of a plan in a few words."""
    if isinstance(plan, ResidentPlan):
        return (
            f"groups of {plan.group_sets} x {plan.set_channels} channels, {plan.batch_bands} x {plan.space_bands} "
            f"bands, chunks of {_widest(plan, 'dy')}, {plan.slots} slots, {_engines(plan)}"
        )
    if isinstance(plan, ResidentForwardPlan):
        return (
            f"groups of {plan.group_channels} channels, {plan.batch_bands} x {plan.space_bands} bands, "
            f"chunks of {_chunk_columns(plan)}, {_ring_slots(plan)} slots"
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
    sets, chunks = (
        ceil_div(owned, plan.set_channels),
        group_size(
            plan.shape, plan.cores, replace(resident_layout_of(plan), short_start=False, short_end=False)
        ).chunks,
    )
    groups = ceil_div(sets, plan.group_sets)
    ring = f"room for {plan.slots / chunks:.1f} groups" if groups > 1 else "room for the one group"
    return {
        "sets": f"{sets} on a core, of {plan.set_channels} channels, which lie on partitions together",
        "groups": f"{groups} on a core, of {plan.group_sets} sets, which have their turn together",
        "bands": f"{plan.lane_bands} a channel ({plan.batch_bands} of batches x {plan.space_bands} of positions): "
        f"{plan.lane_bands * plan.set_channels} of {PARTITIONS} partitions",
        "chunks": f"{chunks} a group, of at most {_widest(plan, 'dy')} columns",
        "slots": f"{plan.slots}, {ring}" if plan.strategy == "resident" else f"{plan.slots}",
        "sums": _sums(plan),
        "dx": _combinations(plan),
    }


def _resident_forward(plan: ResidentForwardPlan) -> dict[str, str]:
    owned = extent_of_core(plan.shape, plan.split, 0, plan.cores).channels
    chunks = forward_size(plan.shape, plan.cores, replace(forward_layout(plan), short_start=False)).chunks
    groups = ceil_div(owned, plan.group_channels)
    slots = _ring_slots(plan)
    if plan.strategy == "reread" or not plan.training:
        ring = f"{slots}"
    else:
        ring = f"{slots}, " + (f"room for {slots / chunks:.1f} groups" if groups > 1 else "room for the one group")
    return {
        "groups": f"{groups} on a core, of {plan.group_channels} channels, which lie on partitions together",
        "bands": f"{plan.lane_bands} a channel ({plan.batch_bands} of batches x {plan.space_bands} of positions): "
        f"{plan.lane_bands * plan.group_channels} of {PARTITIONS} partitions",
        "chunks": f"{chunks} a group, of at most {_chunk_columns(plan)} columns",
        "slots": ring,
        "statistics": "by Vector, merged over bands by its turn" if plan.training else "given",
        "y": _outputs(plan),
    }


def _outputs(plan: ResidentForwardPlan) -> str:
    """Which engines make y of x and the coefficients."""
    if not plan.need_y:
        return "not needed"
    if plan.relu:
        return "by Vector and Scalar, with the ReLU"
    if plan.dtype == "float32":
        return "by Vector, which subtracts the mean and scales, and Scalar"
    if plan.dtype == "bfloat16" and plan.training:
        return (
            f"the mean is subtracted in {plan.dtype}, beside statistics by Scalar in one of {plan.scalar_turns} chunks "
            "and else by GpSimd, after them by Vector; Scalar does the rest"
        )
    return f"by Vector, which subtracts the mean in {plan.dtype}, and Scalar"


def _chunk_columns(plan: ResidentForwardPlan) -> int:
    return _widest(plan, "again" if plan.strategy == "reread" and not plan.training else "x")


def _ring_slots(plan: ResidentForwardPlan) -> int:
    slots: int = plan.slots if plan.training or plan.strategy == "resident" else plan.late_slots
    return slots


def _engines(plan: ResidentPlan) -> str:
    """Who adds up, and what another engine takes over."""
    share = f"{plan.eighths}/{_EIGHTHS}"
    if plan.tensor_sums:
        return f"Tensor adds, combines {share}" + (
            f", last x-terms {plan.term_eighths}/{_EIGHTHS}" if plan.folded else ""
        )
    return f"Scalar adds, Vector {share} of dy" + (f", x-terms {plan.term_eighths}/{_EIGHTHS}" if plan.folded else "")


def _sums(plan: ResidentPlan) -> str:
    """Which engines add up."""
    if plan.tensor_sums:
        return f"by Tensor, {plan.slice} columns at a time"
    return f"by Scalar, but of dy in {plan.eighths} of {_EIGHTHS} chunks by Vector"


def _combinations(plan: ResidentPlan) -> str:
    """Which engines make dx of dy, x and the coefficients."""
    if not plan.need_dx:
        return "not needed"
    if not plan.training:
        return "by Scalar"
    if not plan.folded:
        return "by Scalar and Vector, which end it in turns"
    term = f", the x-term in {plan.dtype}" if plan.fast else ""
    tensor = f", but in {plan.eighths} of {_EIGHTHS} chunks by Tensor and Scalar" if combines_by_tensor(plan) else ""
    where = " of the last groups" if plan.tensor_sums else ""
    vector = (
        f", which also makes the x-term in {plan.term_eighths} of {_EIGHTHS} chunks{where}" if plan.term_eighths else ""
    )
    return f"by Scalar and Vector{vector}{term}{tensor}"


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


def _widest(plan: ResidentPlan | ResidentForwardPlan, slots: str) -> int:
    """Columns of the slots of this name."""
    columns: int = next(buffer.columns for buffer in plan.buffers if buffer.name == slots)
    return columns
