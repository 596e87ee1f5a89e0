# SPDX-License-Identifier: Apache-2.0
"""Documented instructions that the simulator does not execute: the names exist and refuse with their own name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from nki_bn.simulator.errors import UnsupportedError


def refusing(full_name: str) -> Callable[..., Any]:
    """A function called ``full_name`` that raises :class:`UnsupportedError` whatever it is given."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(f"{full_name} is documented, but this simulator does not execute it")

    refuse.__name__ = refuse.__qualname__ = full_name.rpartition(".")[2]
    refuse.__doc__ = f"{full_name}: documented, not executed by this simulator; raises UnsupportedError."
    return refuse


dropout = refusing("nki.isa.dropout")
local_gather = refusing("nki.isa.local_gather")
max8 = refusing("nki.isa.max8")
nc_find_index8 = refusing("nki.isa.nc_find_index8")
nc_match_replace8 = refusing("nki.isa.nc_match_replace8")
nc_matmul_mx = refusing("nki.isa.nc_matmul_mx")
nc_n_gather = refusing("nki.isa.nc_n_gather")
nonzero_with_count = refusing("nki.isa.nonzero_with_count")
quantize_mx = refusing("nki.isa.quantize_mx")
rand2 = refusing("nki.isa.rand2")
rand_get_state = refusing("nki.isa.rand_get_state")
rand_set_state = refusing("nki.isa.rand_set_state")
range_select = refusing("nki.isa.range_select")
rng = refusing("nki.isa.rng")
sequence_bounds = refusing("nki.isa.sequence_bounds")
set_rng_seed = refusing("nki.isa.set_rng_seed")
topk = refusing("nki.isa.topk")
