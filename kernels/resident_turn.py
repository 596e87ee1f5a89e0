# SPDX-License-Identifier: Apache-2.0
"""Per-channel work of the ``resident`` strategy: the columns of all groups, and the turn between the phases of one.

Groups of equally many channels form a block. The columns of a block are made together, one per group, so that what does
not depend on the data costs a few instructions for all of them.
"""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_bn.kernels.backward_phases import BackwardTensors, needs_products
from nki_bn.kernels.columns import (
    BETA,
    DGAMMA,
    GAMMA,
    MEAN,
    SUMS,
    VAR,
    column,
    gamma_gradient,
    load_column,
    reciprocal_root,
    scale_and_shift,
    split_mean,
)
from nki_bn.kernels.plan import ResidentPlan, TransposedPlan
from nki_bn.kernels.sums import add_columns


@dataclass(frozen=True)
class Block(nl.NKIObject):
    """Groups ``first`` to ``first + groups`` of ``channels`` channels each, on ``lanes`` partitions.

    ``columns`` is (lanes, columns, groups), ``flag`` (lanes, groups).
    """

    first: int
    groups: int
    channel: int
    channels: int
    lanes: int
    columns: nl.NkiTensor
    flag: nl.NkiTensor


@dataclass(frozen=True)
class TurnTiles(nl.NKIObject):
    """Scratch of a turn: the sums as rows, of channels and of lanes, and what the other core sends."""

    by_channel: nl.NkiTensor
    received: nl.NkiTensor
    by_lane: nl.NkiTensor


def start_block(tensors: BackwardTensors, plan: ResidentPlan | TransposedPlan, block: Block, eps: float) -> None:
    """Load the columns of a block and derive what phase 1 needs."""
    columns = block.columns
    rows = nl.ds(block.channel, block.groups * block.channels)
    bands = block.lanes // block.channels
    load_column(columns, MEAN, tensors.means[rows], bands, block.groups)
    load_column(columns, VAR, tensors.variances[rows], bands, block.groups)
    load_column(columns, GAMMA, tensors.gamma[rows, :], bands, block.groups)
    if plan.relu == "recompute":
        load_column(columns, BETA, tensors.beta[rows, :], bands, block.groups)
    reciprocal_root(columns, block.flag, eps)
    split_mean(columns)
    scale_and_shift(columns, plan.relu == "recompute")


def group_columns(block: Block, group: int) -> nl.NkiTensor:
    """The columns of one group, as (lanes, columns, 1)."""
    at = group - block.first
    return block.columns[:, :, at : at + 1]


def finish_group(
    plan: ResidentPlan, block: Block, group: int, partials: list[nl.NkiTensor], count: int, tiles: TurnTiles
) -> None:
    """From ``count`` partials of each lane to the sums of the group, on all its lanes, and to dgamma."""
    columns = group_columns(block, group)
    lanes = block.lanes
    add_columns(column(columns, SUMS), partials[0][0:lanes, 0:count])
    if needs_products(plan):
        add_columns(column(columns, SUMS + 1), partials[1][0:lanes, 0:count])
    else:
        nisa.memset(dst=column(columns, SUMS + 1), value=0.0)
    if lanes > block.channels or plan.split == "batch" or plan.split == "spatial":
        combine_lanes(plan, block, columns, tiles)
    if needs_products(plan):
        gamma_gradient(columns)


def combine_lanes(plan: ResidentPlan, block: Block, columns: nl.NkiTensor, tiles: TurnTiles) -> None:
    """Add the sums of all bands, and of the other core, and give every lane the total of its channel.

    The sums are transposed into rows, added there along the free dimension, repeated and transposed back: bit-exact
    moves on trn2, so that nothing leaks from one channel into another.
    """
    lanes = block.lanes
    channels = block.channels
    bands = lanes // channels
    sums = columns[:, SUMS : SUMS + 2, 0]
    rows = nl.ndarray((2, lanes), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=rows, data=sums)
    by_channel = tiles.by_channel[:, 0:channels]
    banded = rows.reshape((2, bands, channels)).permute((0, 2, 1))
    nisa.tensor_reduce(dst=by_channel, op=nl.add, data=banded, axis=2)
    if plan.split == "batch" or plan.split == "spatial":
        other = 1 - nl.program_id(0)
        received = tiles.received[:, 0:channels]
        nisa.sendrecv(src=by_channel, dst=received, send_to_rank=other, recv_from_rank=other, pipe_id=0)
        nisa.tensor_tensor(dst=by_channel, data1=by_channel, data2=received, op=nl.add)
    by_lane = tiles.by_lane[:, 0:lanes]
    nisa.tensor_copy(dst=by_lane.reshape((2, bands, channels)), src=by_channel.expand_dim(1).broadcast(1, bands))
    back = nl.ndarray((lanes, 2), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=back, data=by_lane)
    nisa.tensor_copy(dst=sums, src=back)


def store_block(tensors: BackwardTensors, plan: ResidentPlan | TransposedPlan, block: Block) -> None:
    """dbeta and dgamma of all groups of a block to HBM, one DMA each."""
    if (plan.split == "batch" or plan.split == "spatial") and nl.program_id(0) != 0:
        return
    if plan.need_dbeta:
        store_column(tensors.dbeta, block, SUMS)
    if plan.need_dgamma:
        store_column(tensors.dgamma, block, DGAMMA)


def store_column(tensor: nl.NkiTensor, block: Block, at: int) -> None:
    """One value per channel to a [C, 1] tensor."""
    rows = tensor[nl.ds(block.channel, block.groups * block.channels), :]
    view = rows.reshape((block.groups, block.channels)).permute((1, 0))
    nisa.dma_copy(dst=view, src=column(block.columns, at)[0 : block.channels, :])
