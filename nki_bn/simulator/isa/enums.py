# SPDX-License-Identifier: Apache-2.0
"""Enumerations of ``nki.isa``."""

from __future__ import annotations

import functools
from enum import Enum


class engine(Enum):
    """Execution engines; ``unknown`` leaves the choice to the compiler."""

    unknown = 0
    tensor = 1
    scalar = 2
    gpsimd = 3
    dma = 4
    vector = 5
    sync = 6


class reduce_cmd(Enum):
    """What an instruction does with an accumulator."""

    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
    load_reduce = 4


class dge_mode(Enum):
    """Who builds the descriptors of a DMA."""

    unknown = 0
    swdge = 1
    hwdge = 2
    none = 3


class oob_mode(Enum):
    """What a run-time index out of range does."""

    error = 0
    skip = 1


class dma_engine(Enum):
    """Which DMA carries a ``sendrecv``."""

    dma = 1
    gpsimd_dma = 2


class matmul_perf_mode(Enum):
    """Performance modes of ``nc_matmul``."""

    none = "none"
    double_row = "double_row"


@functools.total_ordering
class nc_version(Enum):
    """Generations of the core; ordered."""

    gen2 = 2
    gen3 = 3
    gen4 = 4

    def __lt__(self, other: object) -> bool:
        return self.value < other.value if isinstance(other, nc_version) else NotImplemented
