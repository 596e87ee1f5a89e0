# SPDX-License-Identifier: Apache-2.0
"""Columns of several sets of channels at once.

Sets of equally many channels (as channel tiles are, but for the last one) form a block. The columns of a block are made
together, one per set, so that what does not depend on the data costs a few instructions for all of them.
"""

from dataclasses import dataclass

import nki.language as nl

from nki_bn.kernels.backward_tensors import BackwardTensors, needs_input_sums, needs_products
from nki_bn.kernels.columns import (
    BETA,
    DGAMMA,
    GAMMA,
    LOCAL,
    MEAN,
    ROOT_STEPS,
    SUMS,
    VAR,
    gamma_gradient,
    load_column,
    root_step,
    scale_and_shift,
    store_column,
)
from nki_bn.kernels.plan import BackwardPlan, ResidentForwardPlan, ResidentPlan, TransposedPlan

# Steps that derive the columns of a block.
BLOCK_STEPS = ROOT_STEPS + 1


@dataclass(frozen=True)
class Block(nl.NKIObject):
    """Sets ``first`` to ``first + sets`` of ``channels`` channels each, on ``lanes`` partitions.

    ``columns`` is (lanes, columns, sets), ``flag`` (uint8) and ``rounded`` (dtype of x) are scratch, (lanes, sets).
    """

    first: int
    sets: int
    channel: int
    channels: int
    lanes: int
    columns: nl.NkiTensor
    flag: nl.NkiTensor
    rounded: nl.NkiTensor | None = None


def load_block(tensors: BackwardTensors, plan: BackwardPlan | ResidentPlan | TransposedPlan, block: Block) -> None:
    """Load the columns of a block."""
    load_row(block, MEAN, tensors.means, plan)
    load_row(block, VAR, tensors.variances, plan)
    load_row(block, GAMMA, tensors.gamma, plan)
    if plan.relu == "recompute":
        load_row(block, BETA, tensors.beta, plan)


def load_row(block: Block, at: int, source: nl.NkiTensor, plan: BackwardPlan | ResidentPlan | TransposedPlan) -> None:
    """One value per channel, from a [C] or [C, 1] tensor; for ``resident`` past the queue of the elements."""
    rows = source.slice(0, block.channel, block.channel + block.sets * block.channels)
    bands = block.lanes // block.channels
    load_column(block.columns, at, rows, bands, block.sets, plan.strategy != "staged")


def start_block(plan: BackwardPlan | ResidentPlan | TransposedPlan, block: Block, eps: float) -> None:
    """Derive from the columns of a block what does not depend on the sums."""
    for i in range(BLOCK_STEPS):
        block_step(plan, block, eps, i)


def block_step(plan: BackwardPlan | ResidentPlan | TransposedPlan, block: Block, eps: float, number: int) -> None:
    """One of the ``BLOCK_STEPS`` steps of :func:`start_block`, each of which waits for the one before."""
    if number < ROOT_STEPS:
        root_step(block.columns, block.flag, eps, number)
    else:
        scale_and_shift(block.columns, plan.relu == "recompute")


def block_of(blocks: list[Block], number: int) -> Block:
    """The block that a set belongs to."""
    at = 0
    while number >= blocks[at].first + blocks[at].sets:
        at += 1
    return blocks[at]


def set_columns(block: Block, number: int, sets: int = 1) -> nl.NkiTensor:
    """The columns of ``sets`` sets from ``number`` on, as (lanes, columns, sets)."""
    return block.columns[:, :, nl.ds(number - block.first, sets)]


def shares_channels(plan: BackwardPlan | ResidentPlan | TransposedPlan | ResidentForwardPlan) -> bool:
    """Whether both cores have a part of every channel."""
    return plan.split == "batch" or plan.split == "spatial"


def store_block(tensors: BackwardTensors, plan: BackwardPlan | ResidentPlan | TransposedPlan, block: Block) -> None:
    """dbeta and dgamma of all sets of a block to HBM, one DMA each: this replica's own where there are several."""
    if shares_channels(plan) and nl.program_id(0) != 0:
        return
    aside = plan.strategy != "staged"
    sums = SUMS
    if tensors.replicas != None and needs_input_sums(plan):
        # The coefficients of dx have been made of the sums of all replicas.
        sums = LOCAL
        if needs_products(plan):
            gamma_gradient(block.columns, LOCAL)
    if plan.need_dbeta:
        store_column(tensors.dbeta, block.columns, sums, block.channel, block.channels, block.sets, aside)
    if plan.need_dgamma:
        store_column(tensors.dgamma, block.columns, DGAMMA, block.channel, block.channels, block.sets, aside)
