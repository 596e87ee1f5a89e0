# SPDX-License-Identifier: Apache-2.0
"""The two phases of the forward over the tiles of one channel tile; see batch_norm_fwd.py for the whole."""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_bn.kernels.columns import (
    BETA,
    GAMMA,
    MEAN,
    VAR,
    column_tile,
    load_column,
    reciprocal_root,
    repeat_in_bands,
    scale_and_shift,
    split_mean,
)
from nki_bn.kernels.elementwise import pre_activation, rectify
from nki_bn.kernels.moments import add_piece, close_group, exchange_moments, finish_moments
from nki_bn.kernels.plan import ForwardPlan, ResidentForwardPlan, TransposedForwardPlan, allocate
from nki_bn.kernels.replicas import Replicas, exchange_at_once
from nki_bn.kernels.sizing import CHUNK_COLUMNS
from nki_bn.kernels.tiling import (
    Chunk,
    Place,
    Share,
    Tile,
    chunks_of,
    load_tile,
    part,
    place_of,
    share_of_core,
    slot_tile,
    store_tile,
    tiles_ahead,
)


@dataclass(frozen=True)
class ForwardTensors(nl.NKIObject):
    """Tensors of a launch in HBM: elements as [B, C, S], columns as they came; None where there is none.

    ``replicas`` are those that share the batch; None alone.
    """

    x: nl.NkiTensor
    gamma: nl.NkiTensor
    beta: nl.NkiTensor
    means: nl.NkiTensor
    variances: nl.NkiTensor
    residual: nl.NkiTensor
    running_mean: nl.NkiTensor
    running_var: nl.NkiTensor
    y: nl.NkiTensor
    mask: nl.NkiTensor
    mean_out: nl.NkiTensor
    var_out: nl.NkiTensor
    running_mean_out: nl.NkiTensor
    running_var_out: nl.NkiTensor
    replicas: Replicas | None = None


@dataclass(frozen=True)
class ForwardWork(nl.NKIObject):
    """What a core works with: its share, the plan, and the SBUF tiles that live through the launch."""

    share: Share
    plan: ForwardPlan
    x_slots: list[nl.NkiTensor]
    residual_slots: list[nl.NkiTensor]
    mask_slots: list[nl.NkiTensor]
    stopped: list[nl.NkiTensor]
    temporaries: list[nl.NkiTensor]


def allocate_work(flat: tuple[int, int, int], plan: ForwardPlan) -> ForwardWork:
    """The slots and temporaries of the plan's list."""
    partitions = min(flat[1], nl.tile_size.pmax) * plan.bands
    return ForwardWork(
        share_of_core(flat, plan.split),
        plan,
        allocate(plan.buffers, "x", partitions),
        allocate(plan.buffers, "residual", partitions),
        allocate(plan.buffers, "mask", partitions),
        allocate(plan.buffers, "stopped", partitions),
        allocate(plan.buffers, "work", partitions),
    )


@dataclass(frozen=True)
class Moments(nl.NKIObject):
    """Results of bn_stats, their groups, the parts of bands, cores or replicas, each as triples or pairs of triples."""

    pieces: list[nl.NkiTensor]
    groups: list[nl.NkiTensor]
    parts: list[nl.NkiTensor]
    gathered: list[nl.NkiTensor]


@dataclass(frozen=True)
class ChannelTile(nl.NKIObject):
    """Up to 128 channels: where they lie, their columns, and in training the moments on the way to these."""

    place: Place
    columns: nl.NkiTensor
    flag: nl.NkiTensor
    moments: Moments


def start_channel_tile(tensors: ForwardTensors, work: ForwardWork, index: int) -> ChannelTile:
    """Allocate what belongs to one channel tile."""
    plan = work.plan
    place = place_of(work.share, plan.bands, index, tensors.x.shape[1])
    columns = column_tile(allocate(plan.buffers, "columns", place.partitions)[0], place.partitions, 1)
    flag = allocate(plan.buffers, "flag", place.partitions)[0][:, 0:1]
    moments = Moments(
        allocate(plan.buffers, "pieces", place.partitions),
        allocate(plan.buffers, "groups", place.partitions),
        allocate(plan.buffers, "parts", place.partitions),
        allocate(plan.buffers, "gathered", place.channels),
    )
    return ChannelTile(place, columns, flag, moments)


def make_statistics(tensors: ForwardTensors, work: ForwardWork, group: ChannelTile, tiles: list[Tile]) -> None:
    """Phase 1: load all tiles and put mean and variance of the channels into their columns."""
    plan = work.plan
    place = group.place
    pieces = group.moments.pieces[0]
    groups = group.moments.groups[0]
    parts = group.moments.parts[0]
    piece = 0
    count = 0
    ahead = tiles_ahead(plan.interleave)
    for i in range(len(tiles) + ahead):
        if i < len(tiles):
            load_tile(slot_tile(work.x_slots, i, place, tiles[i]), tensors.x, place, tiles[i])
        if i >= ahead:
            tile = tiles[i - ahead]
            x = slot_tile(work.x_slots, i - ahead, place, tile)
            chunks = chunks_of(tile, nl.tile_size.bn_stats_fmax)
            for j in range(len(chunks)):
                add_piece(pieces, part(x, chunks[j]), piece)
                last = i - ahead == len(tiles) - 1 and j == len(chunks) - 1
                count = close_group(pieces, groups, piece, last, count + chunks[j].length)
                piece += 1
    columns_of_band = tiles[-1].column + tiles[-1].width()
    finish_moments(group.columns, groups, parts, piece, place.channels, plan.bands, columns_of_band)
    if plan.split == "batch" or plan.split == "spatial":
        exchange_moments(group.columns[:, MEAN : VAR + 1, 0], parts, values_per_core(tensors, plan.split))
    if tensors.replicas != None:
        synchronise(tensors.replicas, group, plan.bands)


def synchronise(replicas: Replicas, group: ChannelTile, bands: int) -> None:
    """Mean and variance columns of this replica become those of all."""
    moments = group.columns[:, MEAN : VAR + 1, 0]
    channels = group.place.channels
    gathered = None
    if replicas.mode == "one_round":
        gathered = group.moments.gathered[0]
    own = group.columns[0:channels, MEAN : VAR + 1, :]
    exchange_at_once(replicas, own, group.moments.parts[0][0:channels, 0:4], gathered)
    repeat_in_bands(moments, channels, bands)


def values_per_channel(tensors: ForwardTensors) -> int:
    """Of the batch: with replicas more than the tensors have."""
    if tensors.replicas != None:
        return tensors.replicas.total
    batch, channels, spatial = tensors.x.shape
    return batch * spatial


def values_per_core(tensors: ForwardTensors, split: str) -> tuple[int, int]:
    """Values per channel that core 0 and core 1 own; core 0 has the larger share."""
    batch, channels, spatial = tensors.x.shape
    if split == "batch":
        return (batch + 1) // 2 * spatial, batch // 2 * spatial
    return (spatial + 1) // 2 * batch, spatial // 2 * batch


def load_statistics(tensors: ForwardTensors, group: ChannelTile) -> None:
    """The given mean and variance into their columns."""
    place = group.place
    rows = nl.ds(place.channel, place.channels)
    load_column(group.columns, MEAN, tensors.means[rows], place.bands)
    load_column(group.columns, VAR, tensors.variances[rows], place.bands)


def writes_columns(plan: ForwardPlan | ResidentForwardPlan | TransposedForwardPlan) -> bool:
    """Whether this core writes the results that have one value per channel."""
    shared = plan.split == "batch" or plan.split == "spatial"
    return not shared or nl.program_id(0) == 0


def coefficients(tensors: ForwardTensors, group: ChannelTile, eps: float) -> None:
    """From mean and variance columns to those of the element passes: hi, lo, scale, shift."""
    place = group.place
    rows = nl.ds(place.channel, place.channels)
    load_column(group.columns, GAMMA, tensors.gamma[rows, :], place.bands)
    load_column(group.columns, BETA, tensors.beta[rows, :], place.bands)
    reciprocal_root(group.columns, group.flag, eps)
    split_mean(group.columns)
    scale_and_shift(group.columns, True)


def load_for_normalising(
    tensors: ForwardTensors, work: ForwardWork, group: ChannelTile, tile: Tile, at: int, resident: bool
) -> None:
    """Load the residual of a tile, and x unless it is ``resident`` in slot ``at``."""
    if not resident:
        load_tile(slot_tile(work.x_slots, at, group.place, tile), tensors.x, group.place, tile)
    if work.plan.residual:
        load_tile(slot_tile(work.residual_slots, at, group.place, tile), tensors.residual, group.place, tile)


def normalise_tile(tensors: ForwardTensors, work: ForwardWork, group: ChannelTile, tile: Tile, at: int) -> None:
    """Phase 2 for a tile of which slot ``at`` holds x: y, in the slot of x, and the mask."""
    plan = work.plan
    place = group.place
    chunks = chunks_of(tile, CHUNK_COLUMNS)
    for i in range(len(chunks)):
        normalise_chunk(work, group, tile, at, chunks[i], i)
    store_tile(tensors.y, slot_tile(work.x_slots, at, place, tile), place, tile)
    if plan.need_mask:
        store_tile(tensors.mask, slot_tile(work.mask_slots, at, place, tile), place, tile)


def normalise_chunk(work: ForwardWork, group: ChannelTile, tile: Tile, at: int, chunk: Chunk, turn: int) -> None:
    """y = (x - hi)*scale + shift [+ residual], through the ReLU if there is one; a NaN stays a NaN."""
    plan = work.plan
    place = group.place
    y = part(slot_tile(work.x_slots, at, place, tile), chunk)
    residual = None
    if plan.residual:
        residual = part(slot_tile(work.residual_slots, at, place, tile), chunk)
    value = work.temporaries[turn % 2][0 : place.partitions, 0 : chunk.length]
    mask = None
    if plan.need_mask:
        mask = part(slot_tile(work.mask_slots, at, place, tile), chunk)
    pre_activation(value, y, residual, group.columns, mask)
    if plan.relu:
        rectify(y, value, work.stopped[turn % 2][0 : place.partitions, 0 : chunk.length])
    else:
        nisa.activation(dst=y, op=nl.copy, data=value)
