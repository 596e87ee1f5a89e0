# SPDX-License-Identifier: Apache-2.0
"""Columns of several groups of channels at once.

Groups of equally many channels form a block. The columns of a block are made together, one per group, so that what does
not depend on the data costs a few instructions for all of them.
"""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_bn.kernels.backward_tensors import BackwardTensors
from nki_bn.kernels.columns import (
    BETA,
    DGAMMA,
    GAMMA,
    MEAN,
    SUMS,
    VAR,
    column,
    load_column,
    reciprocal_root,
    scale_and_shift,
    split_mean,
)
from nki_bn.kernels.plan import BackwardPlan, ResidentPlan


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


def start_block(tensors: BackwardTensors, plan: BackwardPlan | ResidentPlan, block: Block, eps: float) -> None:
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


def block_of(blocks: list[Block], group: int) -> Block:
    """The block that a group belongs to."""
    at = 0
    while group >= blocks[at].first + blocks[at].groups:
        at += 1
    return blocks[at]


def group_columns(block: Block, group: int) -> nl.NkiTensor:
    """The columns of one group, as (lanes, columns, 1)."""
    at = group - block.first
    return block.columns[:, :, at : at + 1]


def store_block(tensors: BackwardTensors, plan: BackwardPlan | ResidentPlan, block: Block) -> None:
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
