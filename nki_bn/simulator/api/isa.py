# SPDX-License-Identifier: Apache-2.0
"""What ``import nki.isa`` gives: all instructions, their enumerations, and the older names of the engines."""

from nki_bn.simulator.errors import NkiValidationError
from nki_bn.simulator.isa.dma import dma_copy, dma_transpose
from nki_bn.simulator.isa.dma_sums import dma_compute
from nki_bn.simulator.isa.enums import dge_mode, dma_engine, engine, matmul_perf_mode, nc_version, oob_mode, reduce_cmd
from nki_bn.simulator.isa.gather import local_gather, nc_n_gather
from nki_bn.simulator.isa.gen4 import activate2, exponential
from nki_bn.simulator.isa.gpsimd import affine_select, iota
from nki_bn.simulator.isa.info import get_nc_sub_version, get_nc_version
from nki_bn.simulator.isa.movement import memset, nc_stream_shuffle, nc_transpose, tensor_copy, tensor_copy_predicated
from nki_bn.simulator.isa.positions import nonzero_with_count, sequence_bounds
from nki_bn.simulator.isa.random import dropout, rand2, rand_get_state, rand_set_state, rng, set_rng_seed
from nki_bn.simulator.isa.range_select import range_select
from nki_bn.simulator.isa.reductions import tensor_partition_reduce, tensor_reduce, tensor_scalar_reduce
from nki_bn.simulator.isa.registers import VirtualRegister, register_alloc, register_load, register_move, register_store
from nki_bn.simulator.isa.scalar import activation, activation_reduce
from nki_bn.simulator.isa.search import max8, nc_find_index8, nc_match_replace8
from nki_bn.simulator.isa.statistics import bn_aggr, bn_stats
from nki_bn.simulator.isa.sync import core_barrier, sendrecv
from nki_bn.simulator.isa.tensor_engine import nc_matmul
from nki_bn.simulator.isa.unsupported import (
    nc_matmul_mx,
    quantize_mx,
    topk,
)
from nki_bn.simulator.isa.vector import (
    reciprocal,
    scalar_tensor_tensor,
    select_reduce,
    tensor_scalar,
    tensor_scalar_cumulative,
    tensor_tensor,
    tensor_tensor_scan,
)
from nki_bn.simulator.issue import NkiInstruction

# Deprecated, and still common in public kernels.
tensor_engine = engine.tensor
vector_engine = engine.vector
scalar_engine = engine.scalar
gpsimd_engine = engine.gpsimd
unknown_engine = engine.unknown

__all__ = [
    "NkiInstruction",
    "NkiValidationError",
    "VirtualRegister",
    "activate2",
    "activation",
    "activation_reduce",
    "affine_select",
    "bn_aggr",
    "bn_stats",
    "core_barrier",
    "dge_mode",
    "dma_compute",
    "dma_copy",
    "dma_engine",
    "dma_transpose",
    "dropout",
    "engine",
    "exponential",
    "get_nc_sub_version",
    "get_nc_version",
    "gpsimd_engine",
    "iota",
    "local_gather",
    "matmul_perf_mode",
    "max8",
    "memset",
    "nc_find_index8",
    "nc_match_replace8",
    "nc_matmul",
    "nc_matmul_mx",
    "nc_n_gather",
    "nc_stream_shuffle",
    "nc_transpose",
    "nc_version",
    "nonzero_with_count",
    "oob_mode",
    "quantize_mx",
    "rand2",
    "rand_get_state",
    "rand_set_state",
    "range_select",
    "reciprocal",
    "reduce_cmd",
    "register_alloc",
    "register_load",
    "register_move",
    "register_store",
    "rng",
    "scalar_engine",
    "scalar_tensor_tensor",
    "select_reduce",
    "sendrecv",
    "sequence_bounds",
    "set_rng_seed",
    "tensor_copy",
    "tensor_copy_predicated",
    "tensor_engine",
    "tensor_partition_reduce",
    "tensor_reduce",
    "tensor_scalar",
    "tensor_scalar_cumulative",
    "tensor_scalar_reduce",
    "tensor_tensor",
    "tensor_tensor_scan",
    "topk",
    "unknown_engine",
    "vector_engine",
]
