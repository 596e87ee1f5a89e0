# SPDX-License-Identifier: Apache-2.0
"""``nl.tile_size``: capacities of the target, as attributes."""

from __future__ import annotations

import os

from nki_bn.hardware import Target, load_target
from nki_bn.simulator import dtypes
from nki_bn.simulator.launch import options_from_environment
from nki_bn.simulator.machine import running

_FLOAT32_BYTES = dtypes.size_of("float32")


class TileSize:
    """Capacities of the running kernel's target; outside a kernel, of the one that the environment names.

    Names that end in ``fmax`` count float32 elements of one partition, names with ``bytes`` count bytes.
    """

    pmax = property(lambda self: _target().partitions, doc="Partitions of an on-chip tile, at most.")
    psum_bank_fmax_bytes = property(lambda self: _target().psum_bank_bytes, doc="Bytes per partition of a PSUM bank.")
    psum_bank_fmax = property(
        lambda self: _target().psum_bank_bytes // _FLOAT32_BYTES, doc="Float32 elements per partition of a PSUM bank."
    )
    psum_fmax = psum_bank_fmax
    gemm_stationary_fmax = property(lambda self: _target().partitions, doc="Columns of a stationary matmul operand.")
    # nc_matmul of gen4 takes more, but kernels size their PSUM tiles by this and take it for that of a bank.
    gemm_moving_fmax = psum_bank_fmax
    bn_stats_fmax = property(lambda self: _target().bn_stats_columns, doc="Elements per partition of one bn_stats.")
    sbuf_size_bytes = property(lambda self: _target().sbuf_total_bytes, doc="Bytes of SBUF, all partitions.")
    sbuf_fmax_bytes = property(lambda self: _target().sbuf_partition_bytes, doc="Usable bytes of SBUF per partition.")
    total_available_sbuf_size = sbuf_fmax_bytes
    sbuf_fmax = property(
        lambda self: _target().sbuf_partition_bytes // _FLOAT32_BYTES, doc="Float32 elements of SBUF per partition."
    )
    psum_min_align = property(lambda self: _FLOAT32_BYTES, doc="Alignment in bytes of an address in PSUM.")
    sbuf_min_align = property(lambda self: 1, doc="Alignment in bytes of an address in SBUF.")

    @property
    def psum_num_banks(self) -> int:
        """PSUM banks a kernel may use; one is the compiler's where it turns DMA transposes into Tensor-engine ones."""
        target = _target()
        asked = os.environ.get("NKI_DMA_TRANSPOSE_AS_PE_TRANSPOSE", "").lower() == "true"
        return target.psum_banks - int(asked and target.generation > 2)


def _target() -> Target:
    core = running()
    return core.run.target if core is not None else load_target(options_from_environment().target)


tile_size = TileSize()
