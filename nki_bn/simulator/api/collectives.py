# SPDX-License-Identifier: Apache-2.0
"""What ``import nki.collectives`` gives: the names, as neither this nor the vendor's simulator executes them."""

from __future__ import annotations

from typing import Any

from nki_bn.simulator.isa.unsupported import refusing
from nki_bn.simulator.nki_object import NKIObject


class ReplicaGroup(NKIObject):
    """Groups of ranks that communicate: a list of lists of ranks, no rank twice.

    Raises:
        ValueError: a rank stands in two groups or twice in one.
    """

    def __init__(self, groups: Any) -> None:
        self.groups = tuple(tuple(group) for group in groups)
        ranks = [rank for group in self.groups for rank in group]
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"ReplicaGroup groups must not overlap, got {self.groups}")


all_gather = refusing("nki.collectives.all_gather")
all_gather_v = refusing("nki.collectives.all_gather_v")
all_reduce = refusing("nki.collectives.all_reduce")
all_to_all = refusing("nki.collectives.all_to_all")
all_to_all_v = refusing("nki.collectives.all_to_all_v")
collective_permute = refusing("nki.collectives.collective_permute")
collective_permute_implicit = refusing("nki.collectives.collective_permute_implicit")
collective_permute_implicit_current_processing_rank_id = refusing(
    "nki.collectives.collective_permute_implicit_current_processing_rank_id"
)
collective_permute_implicit_reduce = refusing("nki.collectives.collective_permute_implicit_reduce")
rank_id = refusing("nki.collectives.rank_id")
reduce_scatter = refusing("nki.collectives.reduce_scatter")

__all__ = [
    "ReplicaGroup",
    "all_gather",
    "all_gather_v",
    "all_reduce",
    "all_to_all",
    "all_to_all_v",
    "collective_permute",
    "collective_permute_implicit",
    "collective_permute_implicit_current_processing_rank_id",
    "collective_permute_implicit_reduce",
    "rank_id",
    "reduce_scatter",
]
