# SPDX-License-Identifier: Apache-2.0
"""From a layout to the plan of the forward strategies ``resident`` and ``reread``, with all that it allocates."""

from dataclasses import dataclass

import nki.language as nl

from nki_bn.kernels.columns import COLUMN_COUNT
from nki_bn.kernels.plan import Buffer, ResidentForwardPlan, total_bytes
from nki_bn.kernels.resident_geometry import Extent, Step, extent_of_core, steps_in_bands
from nki_bn.kernels.resident_layout import GroupSize, ResidentLayout, group_size, has_last_block
from nki_bn.kernels.sizing import PARTITIONS, STATS_COLUMNS, ceil_div


@dataclass(frozen=True)
class ForwardLayout(nl.NKIObject):
    """The free choices of a forward plan; see :class:`ResidentForwardPlan`."""

    split: str
    group_channels: int
    batch_bands: int
    space_bands: int
    chunk: int
    slots: int
    short_start: bool = False
    scalar_turns: int = 2


def forward_layout(plan: ResidentForwardPlan) -> ForwardLayout:
    """The free choices of a plan."""
    return ForwardLayout(
        plan.split,
        plan.group_channels,
        plan.batch_bands,
        plan.space_bands,
        plan.chunk,
        plan.slots,
        plan.short_start,
        plan.scalar_turns,
    )


def forward_steps(plan: ResidentForwardPlan, extent: Extent) -> list[Step]:
    """All chunks of a core with this extent."""
    widths = (plan.batch_bands, plan.space_bands, plan.chunk)
    return steps_in_bands(extent, plan.group_channels, 1, widths, widths, plan.short_start, False)


def forward_size(shape: tuple[int, int, int], cores: int, layout: ForwardLayout) -> GroupSize:
    """What a group takes: one set of channels, with the same bands for a last one with fewer channels."""
    channels = min(layout.group_channels, extent_of_core(shape, layout.split, 0, cores).channels)
    bands = (layout.batch_bands, layout.space_bands)
    same = ResidentLayout(
        layout.split,
        channels,
        1,
        bands[0],
        bands[1],
        bands[0],
        bands[1],
        layout.chunk,
        layout.slots,
        False,
        0,
        0,
        layout.short_start,
    )
    return group_size(shape, cores, same)


def resident_forward_plan(
    shape: tuple[int, int, int],
    dtype: str,
    cores: int,
    layout: ForwardLayout,
    late_slots: int,
    reread: bool,
    training: bool = True,
    fused: tuple[bool, bool, bool, bool] = (True, False, False, False),
) -> ResidentForwardPlan:
    """The plan of one layout. Whether it fits into SBUF is for the caller to see.

    Args:
        shape: (batches, channels, positions).
        dtype: of x and y.
        cores: 1 or 2.
        layout: the free choices.
        late_slots: number of slots for what is loaded after the statistics.
        reread: x is loaded again then, and the slots of the layout are free after the statistics.
        training: the statistics are made from x.
        fused: (y is made, a ReLU follows, its mask is made, a residual is added).
    """
    need_y, relu, need_mask, residual = fused
    owned = extent_of_core(shape, layout.split, 0, cores).channels
    other = extent_of_core(shape, layout.split, cores - 1, cores).channels
    channels = min(layout.group_channels, owned)
    size = forward_size(shape, cores, layout)
    strategy = "resident"
    if reread:
        strategy = "reread"
    buffers = forward_buffers(dtype, layout, late_slots, size, reread, training, fused, (owned, other))
    return ResidentForwardPlan(
        strategy,
        shape,
        dtype,
        cores,
        layout.split,
        channels,
        layout.batch_bands,
        layout.space_bands,
        size.bands,
        size.ragged,
        layout.chunk,
        layout.slots,
        layout.short_start,
        layout.scalar_turns,
        late_slots,
        reread,
        relu,
        residual,
        training,
        need_y,
        relu and need_mask,
        tuple(buffers),
        total_bytes(buffers),
    )


def forward_buffers(
    dtype: str,
    layout: ForwardLayout,
    late_slots: int,
    size: GroupSize,
    reread: bool,
    training: bool,
    fused: tuple[bool, bool, bool, bool],
    channels: tuple[int, int],
) -> list[Buffer]:
    """What is allocated; ``channels`` of core 0, of the last core; the rest as for :func:`resident_forward_plan`."""
    need_y, relu, need_mask, residual = fused
    owned, other = channels
    in_group = min(layout.group_channels, owned)
    buffers = slot_buffers(dtype, layout.slots, late_slots, size, reread and need_y, training, fused)
    if training:
        add_turn_buffers(buffers, size, size.bands)
    narrow = dtype != nl.float32 and not relu
    add_column_buffers(buffers, dtype, max(owned // in_group, 1), "", narrow)
    if has_last_block(owned, in_group) or has_last_block(other, in_group):
        add_column_buffers(buffers, dtype, 1, "last ", narrow)
    return buffers


def slot_buffers(
    dtype: str,
    slots: int,
    late_slots: int,
    size: GroupSize,
    again: bool,
    training: bool,
    fused: tuple[bool, bool, bool, bool],
) -> list[Buffer]:
    """The slots, and the temporaries of phase 2; ``again``: x is loaded again."""
    need_y, relu, need_mask, residual = fused
    columns = size.columns
    buffers: list[Buffer] = []
    if training or not again:
        buffers.append(Buffer("x", slots, columns, dtype))
    if again:
        buffers.append(Buffer("again", late_slots, columns, dtype))
    if need_y:
        if residual:
            buffers.append(Buffer("residual", late_slots, columns, dtype))
        if relu and need_mask:
            buffers.append(Buffer("mask", late_slots, columns, nl.uint8))
        if relu:
            buffers.append(Buffer("stopped", 2, columns, nl.uint8))
        if relu or residual:
            buffers.append(Buffer("values", 2, columns, nl.float32))
    return buffers


def pieces_of(size: GroupSize) -> int:
    """Results of bn_stats per group, at most."""
    return size.chunks * ceil_div(size.columns, STATS_COLUMNS)


def add_turn_buffers(buffers: list[Buffer], size: GroupSize, bands: int) -> None:
    """What statistics are made in: the pieces of two groups, and what a turn works in."""
    buffers.append(Buffer("pieces", 2, 6 * pieces_of(size), nl.float32))
    buffers.append(Buffer("own", 1, 2, nl.float32))
    buffers.append(Buffer("rows", 1, PARTITIONS, nl.float32))
    buffers.append(Buffer("counts", 1, 2 * bands, nl.float32))
    buffers.append(Buffer("triples", 1, 3 * bands, nl.float32))
    buffers.append(Buffer("merged", 1, 2, nl.float32))
    buffers.append(Buffer("parts", 1, 6, nl.float32))


def add_column_buffers(buffers: list[Buffer], dtype: str, groups: int, prefix: str, narrow: bool) -> None:
    """The columns of the groups of one block, and their scratch."""
    buffers.append(Buffer(prefix + "columns", 1, COLUMN_COUNT * groups, nl.float32))
    buffers.append(Buffer(prefix + "flag", 1, groups, nl.uint8))
    if narrow:
        buffers.append(Buffer(prefix + "rounded", 1, groups, dtype))
