# SPDX-License-Identifier: Apache-2.0
"""The turn of a group between the phases of the ``resident`` strategies.

It is a chain of short instructions that wait for each other, given out step by step, to be issued between other work.
"""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_bn.kernels.backward_tensors import BackwardTensors, needs_input_sums, needs_products
from nki_bn.kernels.column_blocks import Block, shares_channels
from nki_bn.kernels.columns import (
    DGAMMA,
    KEEP_8_BITS,
    LO,
    LOCAL,
    MEAN,
    OFFSET,
    RATIO,
    RATIO_HI,
    RATIO_LO,
    ROOT_SHARE,
    RSTD,
    SCALE_SHARE,
    SCRATCH,
    SLOPE,
    SLOPE_SHARE,
    SUMS,
    cut_column,
    difference_of,
    product_of,
)
from nki_bn.kernels.plan import ResidentPlan, allocate
from nki_bn.kernels.replicas import WAITING, Replicas, add_over_replicas
from nki_bn.kernels.sizing import ceil_div
from nki_bn.kernels.tensor_work import TensorWork, add_accumulators

# Steps of the sums, without those over replicas; the one that has those of this replica.
SUMS_STEPS = 3
OWN_STEP = 1


@dataclass(frozen=True)
class Turn(nl.NKIObject):
    """The turn of one group: its block, its sets, its columns, and what it adds up.

    ``partials`` (lanes, 2, sets, chunks) are those of Scalar and Vector, None where Tensor adds up.
    """

    block: Block
    group: int
    sets: int
    columns: nl.NkiTensor
    partials: nl.NkiTensor
    slice: int


@dataclass(frozen=True)
class TurnTiles(nl.NKIObject):
    """Scratch of a turn: sums of lanes, sums as rows of channels, what the other core sends; and transposes in PSUM."""

    by_lane: nl.NkiTensor
    by_channel: nl.NkiTensor
    received: nl.NkiTensor
    rows: nl.NkiTensor
    back: nl.NkiTensor


def allocate_turn(plan: ResidentPlan) -> TurnTiles:
    """The scratch of the plan's list, and two tiles of PSUM unless Tensor adds up, which takes no transposes."""
    lanes = nl.tile_size.pmax
    tiles = allocate(plan.buffers, "turn", lanes)
    rows = None
    back = None
    if not plan.tensor_sums:
        rows = nl.ndarray((lanes, lanes), dtype=nl.float32, buffer=nl.psum)
        back = nl.ndarray((lanes, lanes), dtype=nl.float32, buffer=nl.psum)
    return TurnTiles(tiles[0], tiles[1], tiles[2], rows, back)


def combines_by_tensor(plan: ResidentPlan) -> bool:
    """Whether Tensor combines some chunks of dx."""
    return plan.tensor_sums and plan.folded and plan.eighths > 0 and needs_input_sums(plan)


def replicas_of(tensors: BackwardTensors, plan: ResidentPlan) -> Replicas | None:
    """The replicas whose sums the turns add up: dx needs them, dgamma and dbeta stay this replica's own."""
    if needs_input_sums(plan):
        return tensors.replicas
    return None


def turn_steps(plan: ResidentPlan, replicas: Replicas | None = None) -> int:
    """Number of steps of a turn."""
    steps = SUMS_STEPS
    if replicas != None:
        steps += 1 + WAITING
    if needs_products(plan):
        steps += 3
    if needs_input_sums(plan):
        steps += 3
    return steps


def turns_rows(plan: ResidentPlan, block: Block) -> bool:
    """Whether the sums of bands are added up as rows, between two transposes."""
    return block.lanes > block.channels and not plan.tensor_sums


def turn_pace(plan: ResidentPlan, by_rows: bool, chances: int, replicas: Replicas | None = None) -> int:
    """Steps that are due at a chance, so that ``chances`` do; two of them wait for Tensor and are taken alone.

    The first chance is let go by, since the last sums are under way.
    """
    steps = turn_steps(plan, replicas)
    if by_rows:
        return ceil_div(steps - 2, max(chances - 3, 1))
    return ceil_div(steps, max(chances, 1))


def turn_step(
    plan: ResidentPlan, turn: Turn, tiles: TurnTiles, tensor: TensorWork, replicas: Replicas | None, step: int
) -> None:
    """One step of a turn: the sums on all lanes, then dgamma, then the coefficients of phase 2."""
    number = step
    if replicas != None and step > OWN_STEP:
        # Between the sums of this replica and their way back to all lanes there is the way over all replicas.
        number = max(step - 1 - WAITING, OWN_STEP)
        if step == OWN_STEP + 1:
            own, total = sums_of_replicas(plan, turn, tiles)
            add_over_replicas(replicas, own, total)
        if number == OWN_STEP:
            return
    if number < SUMS_STEPS:
        sums_step(plan, turn, tiles, tensor, replicas, number)
    else:
        coefficient_step(plan, turn, number)


def coefficient_step(plan: ResidentPlan, turn: Turn, number: int) -> None:
    """One step from the sums to dgamma and to the coefficients of phase 2.

    These are ratio = -rstd*dgamma/N, slope = scale*ratio and offset, such that
    dx = scale*(dy' + ratio*(x - hi)) + offset, or, with another offset where the mean is folded,
    scale*dy' + slope*x + offset. Instructions of one step do not wait for each other.
    """
    columns = turn.columns
    if number == 3:
        product_of(columns, DGAMMA, LO, SUMS)
        if needs_input_sums(plan):
            product_of(columns, OFFSET, SUMS, SCALE_SHARE)
    elif number == 4:
        difference_of(columns, DGAMMA, SUMS + 1, DGAMMA)
    elif number == 5:
        product_of(columns, DGAMMA, DGAMMA, RSTD)
    elif number == 6:
        product_of(columns, SLOPE, DGAMMA, SLOPE_SHARE)
        product_of(columns, RATIO, DGAMMA, ROOT_SHARE)
    elif number == 7:
        center = LO
        if plan.folded:
            center = MEAN
        product_of(columns, SCRATCH, SLOPE, center)
        if combines_by_tensor(plan):
            cut_column(columns, RATIO_HI, RATIO, KEEP_8_BITS)
    else:
        difference_of(columns, OFFSET, OFFSET, SCRATCH)
        if combines_by_tensor(plan):
            difference_of(columns, RATIO_LO, RATIO, RATIO_HI)


def sums_step(
    plan: ResidentPlan, turn: Turn, tiles: TurnTiles, tensor: TensorWork, replicas: Replicas | None, number: int
) -> None:
    """One step of the sums: of a core, over bands (and cores) as rows of channels, as columns of lanes.

    The transposes are bit-exact, so nothing leaks between channels.
    """
    if number == 0:
        own_sums(plan, turn, tiles, tensor, replicas)
    if turns_rows(plan, turn.block):
        row_step(plan, turn, tiles, replicas, number)
    elif number == 1 and shares_channels(plan):
        exchange_lanes(turn, tiles, replicas)
    elif number == 2 and replicas != None:
        own, total = sums_of_replicas(plan, turn, tiles)
        shape = (turn.block.lanes, 2, turn.sets)
        nisa.tensor_copy(dst=turn.columns[:, LOCAL : LOCAL + 2, :], src=own.reshape(shape))
        nisa.tensor_copy(dst=turn.columns[:, SUMS : SUMS + 2, :], src=total.reshape(shape))


def sums_of_replicas(plan: ResidentPlan, turn: Turn, tiles: TurnTiles) -> tuple[nl.NkiTensor, nl.NkiTensor]:
    """Where the sums of this replica are before they are columns, and where those of all go: 2-D tiles."""
    count = 2 * turn.sets
    if turns_rows(plan, turn.block):
        channels = turn.block.channels
        return tiles.by_channel[0:count, 0:channels], tiles.received[0:count, 0:channels]
    lanes = turn.block.lanes
    return tiles.by_lane[0:lanes, 0:count], tiles.received[0:lanes, 0:count]


def row_step(plan: ResidentPlan, turn: Turn, tiles: TurnTiles, replicas: Replicas | None, number: int) -> None:
    """One step of the sums by rows, the first and last of which are transposes."""
    block = turn.block
    count = 2 * turn.sets
    bands = block.lanes // block.channels
    by_channel = tiles.by_channel[0:count, 0 : block.channels]
    back = tiles.back[0 : block.lanes, :]
    if number == 0:
        nisa.nc_transpose(dst=tiles.rows[0:count, 0 : block.lanes], data=tiles.by_lane[0 : block.lanes, 0:count])
    elif number == 1:
        banded = tiles.rows[0:count, 0 : block.lanes].reshape((count, bands, block.channels)).permute((0, 2, 1))
        nisa.tensor_reduce(dst=by_channel, op=nl.add, data=banded, axis=2)
        if shares_channels(plan):
            nisa.tensor_tensor(dst=by_channel, data1=by_channel, data2=exchanged(by_channel, tiles), op=nl.add)
        nisa.nc_transpose(dst=back[:, 0:count], data=by_channel.expand_dim(1).broadcast(1, bands))
    else:
        if replicas == None:
            sums_to_lanes(turn, back[:, 0:count], SUMS)
        else:
            sums_to_lanes(turn, back[:, 0:count], LOCAL)
            total = tiles.received[0:count, 0 : block.channels]
            nisa.nc_transpose(dst=back[:, count : 2 * count], data=total.expand_dim(1).broadcast(1, bands))
            sums_to_lanes(turn, back[:, count : 2 * count], SUMS)


def sums_to_lanes(turn: Turn, back: nl.NkiTensor, at: int) -> None:
    """Transposed sums into two columns."""
    sums = back.reshape((turn.block.lanes, 2, turn.sets))
    nisa.tensor_copy(dst=turn.columns[:, at : at + 2, :], src=sums, engine=nisa.engine.vector)


def own_sums(plan: ResidentPlan, turn: Turn, tiles: TurnTiles, tensor: TensorWork, replicas: Replicas | None) -> None:
    """The sums of this core on every lane: of its band, or of all bands where Tensor added them up."""
    block = turn.block
    sums = turn.columns[:, SUMS : SUMS + 2, :]
    if shares_channels(plan) or replicas != None or turns_rows(plan, block):
        sums = tiles.by_lane[0 : block.lanes, 0 : 2 * turn.sets].reshape((block.lanes, 2, turn.sets))
    made = sums
    if not needs_products(plan):
        made = sums[:, 0:1, :]
        nisa.memset(dst=sums[:, 1, :], value=0.0)
    if plan.tensor_sums:
        add_accumulators(tensor, made, turn.group, turn.slice)
    else:
        nisa.tensor_reduce(dst=made, op=nl.add, data=turn.partials[:, 0 : made.shape[1], :, :], axis=3)


def exchange_lanes(turn: Turn, tiles: TurnTiles, replicas: Replicas | None) -> None:
    """The sums of both cores, where every lane has its channel's own; for replicas they stay where these were."""
    lanes = turn.block.lanes
    own = tiles.by_lane[0:lanes, 0 : 2 * turn.sets]
    sums = turn.columns[:, SUMS : SUMS + 2, :]
    if replicas != None:
        sums = own.reshape((lanes, 2, turn.sets))
    nisa.tensor_tensor(
        dst=sums,
        data1=own.reshape((lanes, 2, turn.sets)),
        data2=exchanged(own, tiles).reshape((lanes, 2, turn.sets)),
        op=nl.add,
    )


def exchanged(own: nl.NkiTensor, tiles: TurnTiles) -> nl.NkiTensor:
    """What the other core has where this one has ``own``."""
    other = 1 - nl.program_id(0)
    received = tiles.received[0 : own.shape[0], 0 : own.shape[1]]
    nisa.sendrecv(src=own, dst=received, send_to_rank=other, recv_from_rank=other, pipe_id=0)
    return received
