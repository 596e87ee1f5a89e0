# SPDX-License-Identifier: Apache-2.0
"""Documented instructions that the simulator does not execute: the names exist and refuse with their own name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from nki_bn.simulator.errors import UnsupportedError


def refusing(full_name: str, why: str = "") -> Callable[..., Any]:
    """A function called ``full_name`` that raises :class:`UnsupportedError` whatever it is given; ``why`` is added."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        reason = f": {why}" if why else ""
        raise UnsupportedError(f"{full_name} is documented, but this simulator does not execute it{reason}")

    refuse.__name__ = refuse.__qualname__ = full_name.rpartition(".")[2]
    refuse.__doc__ = f"{full_name}: documented, not executed by this simulator; raises UnsupportedError."
    return refuse


_MX = "there is no arithmetic on MX formats here, they are containers only"

nc_matmul_mx = refusing("nki.isa.nc_matmul_mx", _MX)
quantize_mx = refusing("nki.isa.quantize_mx", _MX)
topk = refusing("nki.isa.topk", "which partitions hold the results, and the order of equal values, are undocumented")
