# SPDX-License-Identifier: Apache-2.0
"""Columns of many sets at once, loaded as rows and turned by Tensor.

As a column each value is a DMA descriptor of its own, for every band again, and each takes its turn with one of the
elements. A row of a set's channels is one descriptor; transposes are bit-exact, so nothing leaks between channels.
"""

import nki.isa as nisa
import nki.language as nl

from nki_bn.kernels.backward_tensors import BackwardTensors
from nki_bn.kernels.column_blocks import Block
from nki_bn.kernels.columns import MEAN, column, copy_small
from nki_bn.kernels.sizing import PARTITIONS


def are_turned(sets: int, channels: int) -> bool:
    """Whether columns of ``sets`` sets come as rows: there are several, but no more than partitions."""
    return channels > 1 and 1 < sets and sets <= PARTITIONS


def kinds_of(relu: str) -> int:
    """Number of columns that are loaded: mean, variance, gamma and, for a recomputed mask, beta."""
    if relu == "recompute":
        return 4
    return 3


def turned_tile(blocks: list[Block], relu: str) -> nl.NkiTensor | None:
    """The loaded columns of the first block in PSUM, as (lanes, kinds, sets), if they come as rows."""
    if len(blocks) == 0 or not are_turned(blocks[0].sets, blocks[0].channels):
        return None
    block = blocks[0]
    tile = nl.ndarray((block.lanes, kinds_of(relu) * block.sets), dtype=nl.float32, buffer=nl.psum)
    return tile.reshape((block.lanes, kinds_of(relu), block.sets))


def turn_columns(tensors: BackwardTensors, block: Block, rows: nl.NkiTensor, turned: nl.NkiTensor) -> None:
    """Load the columns of a block as rows (sets, kinds*channels), turn them, and take the mean, which is needed first.

    Others come with :func:`take_others`.
    """
    sources = [tensors.means, tensors.variances, tensors.gamma, tensors.beta]
    kinds = turned.shape[1]
    bands = block.lanes // block.channels
    by_set = rows[0 : block.sets, :].reshape((block.sets, kinds, block.channels))
    for i in range(kinds):
        values = sources[i].slice(0, block.channel, block.channel + block.sets * block.channels)
        copy_small(by_set[:, i, :], values.reshape((block.sets, block.channels)), True)
    for i in range(kinds):
        nisa.nc_transpose(dst=turned[:, i, :], data=by_set[:, i, :].expand_dim(1).broadcast(1, bands))
    nisa.tensor_copy(dst=column(block.columns, MEAN), src=turned[:, 0, :], engine=nisa.engine.vector)


def take_others(block: Block, turned: nl.NkiTensor) -> None:
    """The loaded columns after the mean, which follow each other."""
    kinds = turned.shape[1]
    others = block.columns[:, MEAN + 1 : MEAN + kinds, :]
    nisa.tensor_copy(dst=others, src=turned[:, 1:kinds, :], engine=nisa.engine.vector)
