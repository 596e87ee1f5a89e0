# SPDX-License-Identifier: Apache-2.0
"""The turn of a group between the phases of the ``resident`` strategy."""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_bn.kernels.backward_tensors import needs_products
from nki_bn.kernels.column_blocks import Block, group_columns
from nki_bn.kernels.columns import SUMS, column, gamma_gradient
from nki_bn.kernels.plan import ResidentPlan
from nki_bn.kernels.sums import add_columns


@dataclass(frozen=True)
class TurnTiles(nl.NKIObject):
    """Scratch of a turn: the sums as rows, of channels and of lanes, and what the other core sends."""

    by_channel: nl.NkiTensor
    received: nl.NkiTensor
    by_lane: nl.NkiTensor


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
