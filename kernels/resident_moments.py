# SPDX-License-Identifier: Apache-2.0
"""Per-channel work of the forward strategies ``resident`` and ``reread``: the turn from moments to coefficients.

A turn is a chain of short instructions, each of which waits for the one before. It is given out in steps, so that the
caller can put other work of Vector between them.

    gather         the moments of each lane; transposed into rows and, band by band, back to one row per channel
    merge          bn_aggr over the bands of a channel, and over cores; transposed and repeated back to all lanes
    coefficients   rstd, mean = hi + lo, scale, shift
"""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_bn.kernels.column_blocks import Block, set_columns, shares_channels
from nki_bn.kernels.columns import (
    BETA,
    FACTOR,
    GAMMA,
    HI,
    LO,
    MEAN,
    MINUS_HI,
    ROOT_STEPS,
    SCALE,
    SHIFT_STEPS,
    VAR,
    column,
    column_tile,
    load_column,
    root_step,
    shift_step,
    split_mean,
)
from nki_bn.kernels.forward_phases import ForwardTensors, values_per_core
from nki_bn.kernels.moments import exchange_moments
from nki_bn.kernels.plan import ResidentForwardPlan, allocate
from nki_bn.kernels.replicas import Replicas, exchange_step, exchange_steps
from nki_bn.kernels.resident_geometry import Extent, Unit, units_of

# Steps of a turn before the coefficients: the moments of lanes, those of bands, and a step of waiting for these.
BAND_STEPS = 7
# The one of these that has (mean, var) of this replica's channels.
MERGED_STEP = 4
# The step of the coefficients that ends with -hi.
MINUS_HI_STEP = 3
# Groups from which on the columns of one lie so far apart that bn_aggr would write them at half its rate.
FAR_GROUPS = 4
# The largest number of each 16-bit format.
LARGEST_BFLOAT16 = 3.3895313892515355e38
LARGEST_FLOAT16 = 65504.0
# From this |hi| on x - hi of two float16 numbers may exceed the largest one, and is halved.
HALVED_FROM = 16.0


@dataclass(frozen=True)
class TurnTiles(nl.NKIObject):
    """What a turn works in: ``across``, ``pairs`` and ``back`` in PSUM, all else in SBUF.

    ``merged`` has (mean, var) of the groups that exchange with replicas together, ``scratch`` is for that exchange.
    ``own`` is for (mean, var) of each lane, ``rows`` and ``across`` for the same transposed. ``counts`` holds 1 and the
    number of values for each band, ``triples`` that in the first of three places, ``gathered`` those of replicas.
    """

    own: nl.NkiTensor
    rows: nl.NkiTensor
    across: nl.NkiTensor
    pairs: nl.NkiTensor
    back: nl.NkiTensor
    counts: nl.NkiTensor
    triples: nl.NkiTensor
    merged: nl.NkiTensor
    parts: nl.NkiTensor
    scratch: nl.NkiTensor
    gathered: nl.NkiTensor


@dataclass(frozen=True)
class Turn(nl.NKIObject):
    """Whose moments are turned into coefficients: a group, with the results of bn_stats of its lanes."""

    block: Block
    group: int
    pieces: nl.NkiTensor


def is_narrow(plan: ResidentForwardPlan) -> bool:
    """Whether x - hi is kept in the 16 bits of x; under a ReLU it is not, as the backward's recomputed mask says."""
    return plan.dtype != nl.float32 and not plan.relu


def blocks_of(extent: Extent, plan: ResidentForwardPlan) -> list[Block]:
    """The blocks of a core: the groups of ``plan.group_channels`` channels, and what is left."""
    blocks: list[Block] = []
    whole = extent.channels // plan.group_channels
    rest = extent.channels % plan.group_channels
    if whole > 0:
        blocks.append(block_at(extent, plan, 0, whole, plan.group_channels, ""))
    if rest > 0:
        prefix = ""
        if whole > 0:
            prefix = "last "
        blocks.append(block_at(extent, plan, whole, 1, rest, prefix))
    return blocks


def block_at(extent: Extent, plan: ResidentForwardPlan, first: int, groups: int, channels: int, prefix: str) -> Block:
    """The block of ``groups`` groups of ``channels`` channels from group number ``first`` on."""
    channel = extent.channel + first * plan.group_channels
    lanes = bands_in_use(extent, plan) * channels
    partitions = nl.tile_size.pmax
    columns = column_tile(allocate(plan.buffers, prefix + "columns", partitions)[0], lanes, groups)
    flag = allocate(plan.buffers, prefix + "flag", partitions)[0][0:lanes, 0:groups]
    rounded = None
    if is_narrow(plan):
        rounded = allocate(plan.buffers, prefix + "rounded", partitions)[0][0:lanes, 0:groups]
    return Block(first, groups, channel, channels, lanes, columns, flag, rounded)


def units_of_core(extent: Extent, plan: ResidentForwardPlan) -> list[Unit]:
    """The units of any group of a core, as if it had one channel."""
    single = Extent(extent.channel, 1, extent.batch, extent.batches, extent.start, extent.length)
    return units_of(single, plan.batch_bands, plan.space_bands)


def bands_in_use(extent: Extent, plan: ResidentForwardPlan) -> int:
    """Bands of this core that have values."""
    bands = 0
    units = units_of_core(extent, plan)
    for i in range(len(units)):
        bands = max(bands, units[i].lanes())
    return bands


def load_parameters(tensors: ForwardTensors, block: Block) -> None:
    """Load the parameters of a block."""
    rows = nl.ds(block.channel, block.sets * block.channels)
    bands = block.lanes // block.channels
    load_column(block.columns, GAMMA, tensors.gamma[rows, :], bands, block.sets)
    load_column(block.columns, BETA, tensors.beta[rows, :], bands, block.sets)


def start_given(tensors: ForwardTensors, plan: ResidentForwardPlan, block: Block, eps: float) -> None:
    """Load given statistics of a block and derive its coefficients."""
    rows = nl.ds(block.channel, block.sets * block.channels)
    bands = block.lanes // block.channels
    load_column(block.columns, MEAN, tensors.means[rows], bands, block.sets)
    load_column(block.columns, VAR, tensors.variances[rows], bands, block.sets)
    for step in range(coefficient_steps(plan)):
        coefficient_step(plan, block.columns, block.flag, block.rounded, eps, step)


def start_turns(extent: Extent, plan: ResidentForwardPlan) -> TurnTiles:
    """Allocate what turns work in, and write the numbers of values that bands have."""
    lanes = nl.tile_size.pmax
    merged = allocate(plan.buffers, "merged", lanes)[0]
    rows = merged.shape[1]
    tiles = TurnTiles(
        allocate(plan.buffers, "own", lanes)[0],
        allocate(plan.buffers, "rows", rows)[0],
        nl.ndarray((rows, lanes), dtype=nl.float32, buffer=nl.psum),
        nl.ndarray((lanes, 2 * lanes), dtype=nl.float32, buffer=nl.psum),
        nl.ndarray((lanes, rows), dtype=nl.float32, buffer=nl.psum),
        allocate(plan.buffers, "counts", lanes)[0],
        allocate(plan.buffers, "triples", lanes)[0],
        merged,
        allocate(plan.buffers, "parts", lanes)[0],
        first_of(allocate(plan.buffers, "scratch", lanes)),
        first_of(allocate(plan.buffers, "gathered", lanes)),
    )
    units = units_of_core(extent, plan)
    bands = bands_in_use(extent, plan)
    factors = tiles.counts[:, 0 : 2 * bands].reshape((lanes, bands, 2))
    triples = tiles.triples[:, 0 : 3 * bands].reshape((lanes, bands, 3))
    nisa.memset(dst=factors, value=1.0, engine=nisa.engine.gpsimd)
    start = 0
    for _ in range(len(units)):
        # Bands from `start` on, up to where the next unit ends, have equally many values.
        end = bands
        count = 0
        for i in range(len(units)):
            if units[i].lanes() > start:
                end = min(end, units[i].lanes())
                count += units[i].batches() * units[i].positions()
        if end > start:
            nisa.memset(dst=factors[:, start:end, 1:2], value=float(count), engine=nisa.engine.gpsimd)
            nisa.memset(dst=triples[:, start:end, 0:1], value=float(count), engine=nisa.engine.gpsimd)
        start = end
    return tiles


def first_of(tiles: list[nl.NkiTensor]) -> nl.NkiTensor | None:
    """The one tile of a buffer that a plan need not have."""
    if len(tiles) == 0:
        return None
    return tiles[0]


@dataclass(frozen=True)
class Batch(nl.NKIObject):
    """Groups ``first`` to ``first + sets`` of a block, which exchange with replicas together; alone a single one."""

    first: int
    sets: int


def batch_of(block: Block, group: int, tiles: TurnTiles) -> Batch:
    """The batch that a group belongs to."""
    together = tiles.merged.shape[1] // 2
    first = block.first + (group - block.first) // together * together
    return Batch(first, min(together, block.first + block.sets - first))


def ends_batch(block: Block, group: int, tiles: TurnTiles) -> bool:
    """Whether the turn of a group goes on to the coefficients of its batch."""
    batch = batch_of(block, group, tiles)
    return group == batch.first + batch.sets - 1


def coefficient_steps(plan: ResidentForwardPlan) -> int:
    """Steps of the coefficients; float16 has one more, for its factors."""
    steps = ROOT_STEPS + SHIFT_STEPS
    if is_narrow(plan) and plan.dtype == nl.float16:
        steps += 1
    return steps


def merges(plan: ResidentForwardPlan, block: Block, replicas: Replicas | None) -> bool:
    """Whether the moments of a lane are not yet those of a channel."""
    return block.lanes > block.channels or shares_channels(plan) or replicas != None


def turn_steps(plan: ResidentForwardPlan, block: Block, group: int, tiles: TurnTiles, replicas: Replicas | None) -> int:
    """Steps of the turn of a group; but for the last one of a batch they end with the moments of this replica."""
    if not ends_batch(block, group, tiles):
        return MERGED_STEP + 1
    steps = moment_steps(plan, block, replicas)
    if plan.need_y:
        steps += coefficient_steps(plan)
    return steps


def moment_steps(plan: ResidentForwardPlan, block: Block, replicas: Replicas | None) -> int:
    """Steps to mean and variance; with nothing to merge the moments of lanes are those of channels."""
    if merges(plan, block, replicas):
        return BAND_STEPS + exchange_steps(replicas)
    return lane_steps(block.sets)


def lane_steps(groups: int) -> int:
    """Steps of :func:`lane_step` with so many groups in a block."""
    if groups < FAR_GROUPS:
        return 1
    return 2


def lane_step(block: Block, columns: nl.NkiTensor, tiles: TurnTiles, pieces: nl.NkiTensor, step: int) -> None:
    """The moments of lanes into their columns."""
    moments = columns[:, MEAN : VAR + 1, 0]
    own = tiles.own[0 : block.lanes, :]
    if block.sets < FAR_GROUPS:
        nisa.bn_aggr(dst=moments, data=pieces)
    elif step == 0:
        nisa.bn_aggr(dst=own, data=pieces)
    else:
        nisa.tensor_copy(dst=moments, src=own)


def turn_step(
    tensors: ForwardTensors, plan: ResidentForwardPlan, turn: Turn, tiles: TurnTiles, eps: float, step: int
) -> None:
    """One step of a turn."""
    block = turn.block
    batch = batch_of(block, turn.group, tiles)
    columns = set_columns(block, batch.first, batch.sets)
    first = moment_steps(plan, block, tensors.replicas)
    if step < first and merges(plan, block, tensors.replicas):
        if step == 0:
            nisa.bn_aggr(dst=tiles.own[0 : block.lanes, :], data=turn.pieces)
        merge_step(tensors, plan, turn, tiles, step)
    elif step < first:
        lane_step(block, columns, tiles, turn.pieces, step)
    else:
        sets = nl.ds(batch.first - block.first, batch.sets)
        rounded = block.rounded
        if rounded != None:
            rounded = rounded[:, sets]
        coefficient_step(plan, columns, block.flag[:, sets], rounded, eps, step - first)


def merge_step(tensors: ForwardTensors, plan: ResidentForwardPlan, turn: Turn, tiles: TurnTiles, step: int) -> None:
    """One of the steps over bands, cores and replicas; the last of these goes on with the way back to all lanes."""
    replicas = tensors.replicas
    exchange = exchange_steps(replicas)
    channels = turn.block.channels
    groups = batch_of(turn.block, turn.group, tiles).sets
    merged = tiles.merged[0:channels, 0 : 2 * groups]
    if step <= MERGED_STEP:
        band_step(tensors, plan, turn, tiles, step)
    elif step > MERGED_STEP + exchange:
        spread_step(turn, tiles, step - exchange)
    else:
        assert replicas != None, "steps of an exchange without replicas"
        gathered = None
        if replicas.mode == "one_round":
            gathered = tiles.gathered[0:channels, 0 : 3 * groups * replicas.size]
        moments = merged.reshape((channels, 2, groups))
        scratch = tiles.scratch[0:channels, 0 : 4 * groups]
        exchange_step(replicas, moments, scratch, gathered, step - MERGED_STEP - 1)
    if step == MERGED_STEP + exchange:
        nisa.nc_transpose(dst=tiles.across[0 : 2 * groups, 0:channels], data=merged)


def band_step(tensors: ForwardTensors, plan: ResidentForwardPlan, turn: Turn, tiles: TurnTiles, step: int) -> None:
    """One of the steps from (mean, var) of all lanes to those of their channels.

    Transposed into rows, and band by band back to one partition per channel, where all bands are merged. Transposes
    move bits on trn2, so that nothing leaks from one channel into another.
    """
    lanes = turn.block.lanes
    channels = turn.block.channels
    bands = lanes // channels
    rows = tiles.rows[0:2, 0:lanes]
    across = tiles.across[0:2, 0:lanes]
    pairs = tiles.pairs[0:channels, 0 : 2 * bands]
    triples = tiles.triples[0:channels, 0 : 3 * bands]
    if step == 0:
        nisa.nc_transpose(dst=across, data=tiles.own[0:lanes, :])
    if step == 1:
        nisa.tensor_copy(dst=rows, src=across)
        for band in range(bands):
            nisa.nc_transpose(dst=pairs[:, 2 * band : 2 * band + 2], data=rows[:, nl.ds(band * channels, channels)])
    if step == 3:
        shape = (channels, bands, 2)
        counts = tiles.counts[0:channels, 0 : 2 * bands].reshape(shape)
        moments = triples.reshape((channels, bands, 3))[:, :, 1:3]
        nisa.tensor_tensor(dst=moments, data1=pairs.reshape(shape), data2=counts, op=nl.multiply)
    if step == MERGED_STEP:
        batch = batch_of(turn.block, turn.group, tiles)
        of_batch = tiles.merged[0:channels, 0 : 2 * batch.sets].reshape((channels, 2, batch.sets))
        merged = of_batch[:, :, turn.group - batch.first]
        nisa.bn_aggr(dst=merged, data=triples)
        if shares_channels(plan):
            exchange_moments(merged, tiles.parts[0:channels, :], values_per_core(tensors, plan.split))


def spread_step(turn: Turn, tiles: TurnTiles, step: int) -> None:
    """One of the last of the ``BAND_STEPS``: from rows of channels back to all lanes."""
    lanes = turn.block.lanes
    channels = turn.block.channels
    batch = batch_of(turn.block, turn.group, tiles)
    count = 2 * batch.sets
    rows = tiles.rows[0:count, 0:lanes]
    if step == MERGED_STEP + 1:
        repeated = tiles.across[0:count, 0:channels].expand_dim(1).broadcast(1, lanes // channels)
        nisa.tensor_copy(dst=rows.reshape((count, lanes // channels, channels)), src=repeated)
        nisa.nc_transpose(dst=tiles.back[0:lanes, 0:count], data=rows)
    else:
        columns = set_columns(turn.block, batch.first, batch.sets)
        back = tiles.back[0:lanes, 0:count].reshape((lanes, 2, batch.sets))
        nisa.tensor_copy(dst=columns[:, MEAN : VAR + 1, :], src=back)


def coefficient_step(
    plan: ResidentForwardPlan,
    columns: nl.NkiTensor,
    flag: nl.NkiTensor,
    rounded: nl.NkiTensor | None,
    eps: float,
    step: int,
) -> None:
    """One of the :func:`coefficient_steps` from mean and variance to hi, scale and shift.

    The instructions of a step do not wait for each other, but for those of the step before.
    """
    if step < ROOT_STEPS:
        root_step(columns, flag, eps, step)
    elif step < ROOT_STEPS + SHIFT_STEPS:
        shift_step(columns, step - ROOT_STEPS)
    if is_narrow(plan):
        narrow_step(plan, columns, rounded, step)
    elif step == 0:
        split_mean(columns)


def narrow_step(plan: ResidentForwardPlan, columns: nl.NkiTensor, rounded: nl.NkiTensor, step: int) -> None:
    """What narrow plans have beside the rest: mean = hi + lo with hi a number of x's dtype, and factors for float16.

    x - hi is then exact in that dtype wherever x is within a factor of two of hi. float16 has too short a range for any
    x - hi: a large hi makes it (x - hi)/2, and the scale twice as large.
    """
    hi = column(columns, HI)
    minus_hi = column(columns, MINUS_HI)
    factor = column(columns, FACTOR)
    scale = column(columns, SCALE)
    if step == 0 and plan.training:
        # The mean of finite values is within the range of these.
        nisa.tensor_copy(dst=rounded, src=column(columns, MEAN), engine=nisa.engine.gpsimd)
    elif step == 0:
        largest = LARGEST_BFLOAT16
        if plan.dtype == nl.float16:
            largest = LARGEST_FLOAT16
        mean = column(columns, MEAN)
        nisa.tensor_scalar(dst=rounded, data=mean, op0=nl.minimum, operand0=largest, op1=nl.maximum, operand1=-largest)
    if step == 1:
        nisa.tensor_copy(dst=hi, src=rounded, engine=nisa.engine.gpsimd)
    if step == 2:
        nisa.tensor_tensor(dst=column(columns, LO), data1=column(columns, MEAN), data2=hi, op=nl.subtract)
    if step == MINUS_HI_STEP:
        nisa.tensor_scalar(dst=minus_hi, data=hi, op0=nl.multiply, operand0=-1.0)
    if plan.dtype == nl.float16:
        if step == 4:
            # 1 where hi is large, else 0.
            nisa.tensor_scalar(
                dst=factor, data=hi, op0=nl.abs, operand0=0.0, op1=nl.greater_equal, operand1=HALVED_FROM
            )
        if step == ROOT_STEPS + SHIFT_STEPS:
            nisa.scalar_tensor_tensor(dst=scale, data=factor, op0=nl.add, operand0=1.0, op1=nl.multiply, operand1=scale)
            nisa.tensor_scalar(dst=factor, data=factor, op0=nl.multiply, operand0=-0.5, op1=nl.add, operand1=1.0)
            nisa.tensor_tensor(dst=minus_hi, data1=minus_hi, data2=factor, op=nl.multiply)
