# SPDX-License-Identifier: Apache-2.0
"""Per-channel columns: statistics, parameters and the coefficients made of them, one float32 per partition.

A column costs nothing beside the elements, so everything that can be done per channel is done here, in full float32.
Operands of element passes are good to 18 significant bits only (measured on trn2), hence the split of the mean.
"""

import nki.isa as nisa
import nki.language as nl

# Positions in the column tile.
MEAN = 0
VAR = 1
GAMMA = 2
BETA = 3
HI = 4
LO = 5
RSTD = 6
SCALE = 7
SUMS = 8  # two columns: sum dy', sum dy'*(x - hi)
RECEIVED = 10  # two columns
DGAMMA = 12
SLOPE = 13
OFFSET = 14
SHIFT = 15
MINUS_HI = 16
SCRATCH = 17  # three columns
RATIO = 20
ROOT_SHARE = 21
SCALE_SHARE = 22
RATIO_HI = 23
RATIO_LO = 24
FACTOR = 25
OLD_MEAN = 26
OLD_VAR = 27
SLOPE_SHARE = 28
COLUMN_COUNT = 29

# Steps of `reciprocal_root`.
ROOT_STEPS = 6
# Steps of `scale_and_shift`, with the shift and without.
SHIFT_STEPS = 3
SCALE_STEPS = 1

# Clearing the low 8 bits of a float32 leaves 16 significant bits.
KEEP_16_BITS = -256
# Clearing the low 16 bits leaves a bfloat16 number.
KEEP_8_BITS = -65536


def column_tile(tile: nl.NkiTensor, partitions: int, groups: int) -> nl.NkiTensor:
    """An SBUF tile as (partitions, columns, groups): every column once for each of several groups of channels."""
    return tile[0:partitions, 0 : COLUMN_COUNT * groups].reshape((partitions, COLUMN_COUNT, groups))


def column(columns: nl.NkiTensor, at: int) -> nl.NkiTensor:
    """One column of a (P, columns, G) tile as (P, G)."""
    return columns[:, at, :]


def load_column(
    columns: nl.NkiTensor, at: int, source: nl.NkiTensor, bands: int, groups: int = 1, aside: bool = False
) -> None:
    """One value per channel from HBM, repeated for every band of partitions; channels in ``groups`` equal groups."""
    by_channel = source.reshape((groups, source.size // groups)).permute((1, 0))
    copy_small(column(columns, at), by_channel.expand_dim(0).broadcast(0, bands), aside)


def store_column(
    tensor: nl.NkiTensor,
    columns: nl.NkiTensor,
    at: int,
    channel: int,
    channels: int,
    groups: int = 1,
    aside: bool = False,
) -> None:
    """One value per channel to a [C] or [C, 1] tensor."""
    copy_small(channel_view(tensor, channel, channels, groups), column(columns, at)[0:channels, :], aside)


def channel_view(tensor: nl.NkiTensor, channel: int, channels: int, groups: int) -> nl.NkiTensor:
    """The values of a [C] or [C, 1] tensor from ``channel`` on, as (channels, groups)."""
    return tensor.slice(0, channel, channel + channels * groups).reshape((groups, channels)).permute((1, 0))


def copy_small(dst: nl.NkiTensor, src: nl.NkiTensor, aside: bool) -> None:
    """A DMA of a few values; ``aside``: triggered by Scalar, past the queue of the elements (not on trn1)."""
    if aside:
        nisa.dma_copy(dst=dst, src=src, dge_mode=nisa.dge_mode.hwdge, engine=nisa.engine.scalar)
    else:
        nisa.dma_copy(dst=dst, src=src)


def reciprocal_root(columns: nl.NkiTensor, flag: nl.NkiTensor, eps: float) -> None:
    """rstd = 1/sqrt(var + eps): rsqrt of GpSimd, and one Newton step on Vector where it is defined.

    The step is skipped where the first value is 0 or infinite (var infinite, or var + eps = 0).
    """
    for step in range(ROOT_STEPS):
        root_step(columns, flag, eps, step)


def root_step(columns: nl.NkiTensor, flag: nl.NkiTensor, eps: float, step: int) -> None:
    """One of the ``ROOT_STEPS`` steps of :func:`reciprocal_root`, each of which waits for the one before.

    The Newton step is root*(1.5 - value*root*root/2); value*root*root is near 1.
    """
    value = column(columns, SCRATCH)
    root = column(columns, RSTD)
    product = column(columns, SCRATCH + 1)
    better = column(columns, SCRATCH + 2)
    if step == 0:
        nisa.tensor_scalar(dst=value, data=column(columns, VAR), op0=nl.add, operand0=eps)
    elif step == 1:
        nisa.tensor_scalar(dst=root, data=value, op0=nl.rsqrt, operand0=0.0, engine=nisa.engine.gpsimd)
    elif step == 2:
        nisa.tensor_tensor(dst=product, data1=value, data2=root, op=nl.multiply)
    elif step == 3:
        nisa.scalar_tensor_tensor(
            dst=product, data=product, op0=nl.multiply, operand0=-0.5, op1=nl.multiply, operand1=root
        )
    elif step == 4:
        nisa.scalar_tensor_tensor(dst=better, data=product, op0=nl.add, operand0=1.5, op1=nl.multiply, operand1=root)
        nisa.tensor_scalar(dst=flag, data=product, op0=nl.less, operand0=-0.25)
    else:
        nisa.tensor_copy_predicated(dst=root, src=better, predicate=flag)


def split_mean(columns: nl.NkiTensor) -> None:
    """mean = hi + lo, with hi of 16 significant bits: x - hi is then exact whatever the precision of operands."""
    cut_column(columns, HI, MEAN, KEEP_16_BITS)
    difference_of(columns, LO, MEAN, HI)
    nisa.tensor_scalar(dst=column(columns, MINUS_HI), data=column(columns, HI), op0=nl.multiply, operand0=-1.0)


def cut_column(columns: nl.NkiTensor, dst: int, source: int, mask: int) -> None:
    """Column ``dst`` = column ``source`` without the bits that are 0 in the mask."""
    nisa.tensor_scalar(
        dst=column(columns, dst).view(nl.int32),
        data=column(columns, source).view(nl.int32),
        op0=nl.bitwise_and,
        operand0=mask,
    )


def scale_and_shift(columns: nl.NkiTensor, with_shift: bool) -> None:
    """scale = gamma*rstd and, when y is recomputed, shift = beta - lo*scale, so that y = (x - hi)*scale + shift."""
    steps = SCALE_STEPS
    if with_shift:
        steps = SHIFT_STEPS
    for step in range(steps):
        shift_step(columns, step)


def shift_step(columns: nl.NkiTensor, step: int) -> None:
    """One of the instructions of :func:`scale_and_shift`, each of which waits for the one before."""
    scale = column(columns, SCALE)
    shift = column(columns, SHIFT)
    if step == 0:
        nisa.tensor_tensor(dst=scale, data1=column(columns, GAMMA), data2=column(columns, RSTD), op=nl.multiply)
    if step == 1:
        nisa.tensor_tensor(dst=shift, data1=column(columns, LO), data2=scale, op=nl.multiply)
    if step == 2:
        nisa.tensor_tensor(dst=shift, data1=column(columns, BETA), data2=shift, op=nl.subtract)


def combine_bands(columns: nl.NkiTensor, channels: int, bands: int) -> None:
    """Add the sums of all bands and give every band the total.

    Bands start at multiples of 32 partitions, between which engines can copy: nothing mixes channels.
    """
    sums = columns[:, SUMS : SUMS + 2, 0]
    moved = columns[:, RECEIVED : RECEIVED + 2, 0]
    for band in range(1, bands):
        rows = nl.ds(band * channels, channels)
        nisa.tensor_copy(dst=moved[0:channels, :], src=sums[rows, :])
        nisa.tensor_tensor(dst=sums[0:channels, :], data1=sums[0:channels, :], data2=moved[0:channels, :], op=nl.add)
    for band in range(1, bands):
        nisa.tensor_copy(dst=sums[nl.ds(band * channels, channels), :], src=sums[0:channels, :])


def exchange_sums(columns: nl.NkiTensor) -> None:
    """Add the sums of the other core."""
    sums = columns[:, SUMS : SUMS + 2, 0]
    received = columns[:, RECEIVED : RECEIVED + 2, 0]
    other = 1 - nl.program_id(0)
    nisa.sendrecv(src=sums, dst=received, send_to_rank=other, recv_from_rank=other, pipe_id=0)
    nisa.tensor_tensor(dst=sums, data1=sums, data2=received, op=nl.add)


def gamma_gradient(columns: nl.NkiTensor) -> None:
    """dgamma = rstd*(sum dy'*(x - hi) - lo*sum dy')."""
    dgamma = column(columns, DGAMMA)
    nisa.tensor_tensor(dst=dgamma, data1=column(columns, LO), data2=column(columns, SUMS), op=nl.multiply)
    nisa.tensor_tensor(dst=dgamma, data1=column(columns, SUMS + 1), data2=dgamma, op=nl.subtract)
    nisa.tensor_tensor(dst=dgamma, data1=dgamma, data2=column(columns, RSTD), op=nl.multiply)


def input_coefficients(columns: nl.NkiTensor, count: int, folded: bool) -> None:
    """slope and offset such that dx = scale*dy' - (slope*(x - hi) + offset), or slope*x + offset when ``folded``.

    slope = scale*rstd*dgamma/N and offset = scale*dbeta/N - slope*lo (or - slope*mean).
    """
    slope = column(columns, SLOPE)
    offset = column(columns, OFFSET)
    moved = column(columns, SCRATCH)
    scale = column(columns, SCALE)
    nisa.tensor_tensor(dst=slope, data1=column(columns, DGAMMA), data2=column(columns, RSTD), op=nl.multiply)
    nisa.tensor_scalar(dst=slope, data=slope, op0=nl.multiply, operand0=1.0 / count)
    nisa.tensor_tensor(dst=slope, data1=slope, data2=scale, op=nl.multiply)
    nisa.tensor_scalar(dst=offset, data=column(columns, SUMS), op0=nl.multiply, operand0=1.0 / count)
    nisa.tensor_tensor(dst=offset, data1=offset, data2=scale, op=nl.multiply)
    center = LO
    if folded:
        center = MEAN
    nisa.tensor_tensor(dst=moved, data1=slope, data2=column(columns, center), op=nl.multiply)
    nisa.tensor_tensor(dst=offset, data1=offset, data2=moved, op=nl.subtract)


def share_columns(columns: nl.NkiTensor, count: int) -> None:
    """-rstd/N, -scale/N and -rstd*scale/N: what of the coefficients of dx does not depend on the sums."""
    share = -1.0 / count
    nisa.scalar_tensor_tensor(
        dst=column(columns, SLOPE_SHARE),
        data=column(columns, RSTD),
        op0=nl.multiply,
        operand0=share,
        op1=nl.multiply,
        operand1=column(columns, SCALE),
    )
    nisa.tensor_scalar(dst=column(columns, ROOT_SHARE), data=column(columns, RSTD), op0=nl.multiply, operand0=share)
    nisa.tensor_scalar(dst=column(columns, SCALE_SHARE), data=column(columns, SCALE), op0=nl.multiply, operand0=share)


def product_of(columns: nl.NkiTensor, dst: int, left: int, right: int) -> None:
    """Column ``dst`` = column ``left`` * column ``right``."""
    nisa.tensor_tensor(
        dst=column(columns, dst), data1=column(columns, left), data2=column(columns, right), op=nl.multiply
    )


def difference_of(columns: nl.NkiTensor, dst: int, left: int, right: int) -> None:
    """Column ``dst`` = column ``left`` - column ``right``."""
    nisa.tensor_tensor(
        dst=column(columns, dst), data1=column(columns, left), data2=column(columns, right), op=nl.subtract
    )
