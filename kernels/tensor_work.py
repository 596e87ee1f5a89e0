# SPDX-License-Identifier: Apache-2.0
"""What the Tensor engine does for the backward where all lanes hold one channel: sums, and combinations of dx.

A product contracts over lanes, so a NaN on one lane reaches all: that is right within a channel, and nowhere else.
"""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_bn.kernels.columns import RATIO_HI, column
from nki_bn.kernels.plan import ResidentPlan, allocate
from nki_bn.kernels.sizing import ceil_div

# Banks of PSUM for combinations: two for what Scalar reads while Tensor fills the others.
COMBINATION_BANKS = 4


@dataclass(frozen=True)
class TensorWork(nl.NKIObject):
    """Stationary matrices in SBUF, and banks of PSUM.

    ``ones`` has the dtype of dy, ``wide_ones`` is float32. ``accumulators`` are those of two groups by turns.
    ``diagonals`` (lanes, 2, lanes) hold -rstd*dgamma/N as the sum of two bfloat16 numbers. A bank has the partial sums
    of ``pairs`` sets, ``stride`` columns for each of their two.
    """

    ones: list[nl.NkiTensor]
    wide_ones: list[nl.NkiTensor]
    identity: list[nl.NkiTensor]
    accumulators: list[nl.NkiTensor]
    combinations: list[nl.NkiTensor]
    diagonals: list[nl.NkiTensor]
    pairs: int
    stride: int


def allocate_tensor_work(plan: ResidentPlan, combines: bool) -> TensorWork:
    """The matrices of the plan's list, filled, and as many banks as its groups take."""
    lanes = nl.tile_size.pmax
    ones = allocate(plan.buffers, "ones", lanes)
    wide_ones = allocate(plan.buffers, "wide ones", lanes)
    identity = allocate(plan.buffers, "identity", lanes)
    accumulators: list[nl.NkiTensor] = []
    combinations: list[nl.NkiTensor] = []
    diagonals: list[nl.NkiTensor] = []
    pairs = 1
    if plan.tensor_sums:
        nisa.memset(dst=ones[0], value=1.0)
        if len(wide_ones) > 0:
            nisa.memset(dst=wide_ones[0], value=1.0)
        else:
            wide_ones = ones
        pairs = nl.tile_size.psum_fmax // (2 * plan.slice)
        for _ in range(2 * ceil_div(plan.group_sets, pairs)):
            accumulators.append(bank())
    if combines:
        nisa.affine_select(
            dst=identity[0], pattern=[[-1, lanes]], channel_multiplier=1, on_true_tile=ones[0], on_false_value=0.0
        )
        for _ in range(COMBINATION_BANKS):
            combinations.append(bank())
    # A plan allocates the same whatever outputs are needed.
    for tile in allocate(plan.buffers, "diagonals", lanes):
        diagonals.append(tile.reshape((lanes, 2, lanes)))
    stride = nl.tile_size.psum_fmax // (2 * pairs)
    return TensorWork(ones, wide_ones, identity, accumulators, combinations, diagonals, pairs, stride)


def bank() -> nl.NkiTensor:
    """A bank of PSUM as float32."""
    return nl.ndarray((nl.tile_size.pmax, nl.tile_size.psum_fmax), dtype=nl.float32, buffer=nl.psum)


def accumulator(tensor: TensorWork, group: int, number: int, kind: int) -> nl.NkiTensor:
    """Partial sums of set ``number`` of a group: kind 0 of dy', 1 of the product; (lanes, stride)."""
    per_group = len(tensor.accumulators) // 2
    tile = tensor.accumulators[group % 2 * per_group + number // tensor.pairs]
    return tile[:, nl.ds((number % tensor.pairs * 2 + kind) * tensor.stride, tensor.stride)]


def accumulate(
    tensor: TensorWork, group: int, number: int, kind: int, data: nl.NkiTensor, used: int, first: bool
) -> None:
    """Add a tile to the partial sums of set ``number``, slice by slice of ``used`` columns; ``first`` starts them."""
    ones = tensor.ones[0]
    if data.dtype == nl.float32:
        ones = tensor.wide_ones[0]
    lanes, columns = data.shape
    into = accumulator(tensor, group, number, kind)
    for i in range(ceil_div(columns, used)):
        count = min(used, columns - i * used)
        nisa.nc_matmul(
            dst=into[:, 0:count],
            stationary=ones[0:lanes, :],
            moving=data[:, nl.ds(i * used, count)],
            is_stationary_onezero=True,
            accumulate=not first or i > 0,
        )


def add_accumulators(tensor: TensorWork, sums: nl.NkiTensor, group: int, used: int) -> None:
    """sums (lanes, kinds, sets) = the totals of the partial sums, ``used`` columns each; of kind 0 alone or of both."""
    lanes, kinds, sets = sums.shape
    per_group = len(tensor.accumulators) // 2
    for i in range(ceil_div(sets, tensor.pairs)):
        count = min(tensor.pairs, sets - i * tensor.pairs)
        tile = tensor.accumulators[group % 2 * per_group + i][0:lanes, 0 : 2 * count * tensor.stride]
        partials = tile.reshape((lanes, count, 2, tensor.stride))[:, :, 0:kinds, 0:used]
        nisa.tensor_reduce(
            dst=sums[:, :, nl.ds(i * tensor.pairs, count)],
            op=nl.add,
            data=partials.permute((0, 2, 1, 3)),
            axis=3,
        )


def make_diagonals(tensor: TensorWork, columns: nl.NkiTensor, at: int) -> None:
    """Both pieces of the ratio column (lanes, 1) on the diagonals of matrices ``at`` (of a ring), by Scalar."""
    lanes = columns.shape[0]
    diagonals = tensor.diagonals[at % len(tensor.diagonals)]
    for piece in range(2):
        nisa.activation(
            dst=diagonals[0:lanes, piece, 0:lanes],
            op=nl.copy,
            data=tensor.identity[0][0:lanes, 0:lanes],
            scale=column(columns, RATIO_HI + piece),
        )


def combine_slice(tensor: TensorWork, dy: nl.NkiTensor, x: nl.NkiTensor, number: int, at: int) -> nl.NkiTensor:
    """dy' + ratio*x in bank ``at`` (of a ring), as (lanes, columns), with diagonals ``number``; it must fit there."""
    lanes, columns = dy.shape
    into = tensor.combinations[at % len(tensor.combinations)][0:lanes, 0:columns]
    nisa.nc_matmul(
        dst=into,
        stationary=tensor.identity[0][0:lanes, 0:lanes],
        moving=dy,
        is_stationary_onezero=True,
        accumulate=False,
    )
    for piece in range(2):
        diagonal = tensor.diagonals[number % len(tensor.diagonals)][0:lanes, piece, 0:lanes]
        nisa.nc_matmul(dst=into, stationary=diagonal, moving=x, accumulate=True)
    return into
