# SPDX-License-Identifier: Apache-2.0
"""What ``import nki.collectives`` gives; collectives of variable size are names that refuse."""

from nki_bn.simulator.collectives import (
    ReplicaGroup,
    all_gather,
    all_reduce,
    all_to_all,
    collective_permute,
    collective_permute_implicit,
    collective_permute_implicit_current_processing_rank_id,
    collective_permute_implicit_reduce,
    rank_id,
    reduce_scatter,
)
from nki_bn.simulator.isa.unsupported import refusing

all_gather_v = refusing("nki.collectives.all_gather_v")
all_to_all_v = refusing("nki.collectives.all_to_all_v")

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
