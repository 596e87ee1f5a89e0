# SPDX-License-Identifier: Apache-2.0
"""The functions of nki.isa, nki.language and nki.collectives with their parameters, as documented for NKI 0.6.

Names of 0.7 alone are in ``LATER``. What stands here is checked: a call with other arguments raises in both versions.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

_ISA = """
dma_copy(dst, src, priority=None, oob_mode=0, dge_mode=0, engine=0, name=None)
dma_transpose(dst, src, axes=None, priority=None, dge_mode=0, oob_mode=0, name=None)
dma_compute(dst, srcs, reduce_op, scales=None, unique_indices=True, oob_mode=0, name=None)
tensor_copy(dst, src, engine=0, name=None)
tensor_copy_predicated(dst, src, predicate, reverse_pred=False, name=None)
memset(dst, value, engine=0, name=None)
iota(dst, pattern, offset=0, channel_multiplier=0, name=None)
affine_select(dst, pattern, channel_multiplier, on_true_tile, on_false_value, cmp_op=0, offset=0, name=None)
nc_transpose(dst, data, engine=0, name=None)
nc_stream_shuffle(dst, src, shuffle_mask, name=None)
sendrecv(src, dst, send_to_rank, recv_from_rank, pipe_id, dma_engine=0, name=None)
core_barrier(data, cores, engine=0, name=None)
nc_matmul(dst, stationary, moving, is_stationary_onezero=False, is_moving_onezero=False, is_transpose=False,\
 accumulate=None, tile_position=(), tile_size=(), perf_mode=0, name=None)
nc_matmul_mx(dst, stationary, moving, stationary_scale, moving_scale, tile_position=None, tile_size=None,\
 accumulate=None, name=None)
quantize_mx(dst, src, dst_scale, name=None)
tensor_tensor(dst, data1, data2, op, engine=0, name=None)
tensor_scalar(dst, data, op0, operand0, reverse0=False, op1=None, operand1=None, reverse1=False, engine=0, name=None)
scalar_tensor_tensor(dst, data, op0, operand0, op1, operand1, reverse0=False, reverse1=False, name=None)
tensor_scalar_reduce(dst, data, op0, operand0, reduce_op, reduce_res=None, reverse0=False, reduce_cmd=0,\
 reduce_init=None, reduce_res_negate=False, name=None)
tensor_scalar_cumulative(dst, src, op0, op1, imm0, imm1=None, reduce_cmd=0, name=None)
tensor_tensor_scan(dst, data0, data1, initial, op0, op1, reverse0=False, reverse1=False, name=None)
select_reduce(dst, predicate, on_true, on_false, reduce_res=None, reduce_cmd=0, reduce_op=0, reverse_pred=False,\
 name=None)
range_select(dst, on_true_tile, comp_op0, comp_op1, bound0, bound1, reduce_cmd=0, reduce_res=None, reduce_op=0,\
 range_start=0, on_false_value=0, name=None)
max8(dst, src, name=None)
nc_find_index8(dst, data, vals, name=None)
nc_match_replace8(dst, data, vals, imm, dst_idx=None, name=None)
reciprocal(dst, data, name=None)
exponential(dst, src, max_value=0.0, reduce_res=None, reduce_cmd=0, reduce_init=0.0, name=None)
activation(dst, op, data, bias=None, scale=1.0, reduce_op=None, reduce_res=None, reduce_cmd=0, name=None)
activation_reduce(dst, op, data, reduce_op, reduce_res, bias=None, scale=1.0, name=None)
activate2(dst, op, data, imm0, imm1, op0, op1, relu_param=0.0, reverse0=False, reverse1=False, reduce_op=None,\
 reduce_res=None, reduce_cmd=0, name=None)
tensor_reduce(dst, op, data, axis, negate=False, keepdims=False, name=None)
tensor_partition_reduce(dst, op, data, name=None)
bn_stats(dst, data, name=None)
bn_aggr(dst, data, name=None)
rng(dst, engine=0, name=None)
set_rng_seed(src_seeds, name=None)
rand_set_state(src_seeds, engine=0, name=None)
rand_get_state(dst, engine=0, name=None)
rand2(dst, min, max, name=None)
dropout(dst, data, prob, name=None)
register_alloc(x=None)
register_move(dst, src)
register_load(dst, src)
register_store(dst, src)
local_gather(dst, src_buffer, index, num_elem_per_idx=1, num_valid_indices=None, name=None)
nc_n_gather(dst, data, indices, name=None)
sequence_bounds(dst, segment_ids, name=None)
nonzero_with_count(dst, src, index_offset=0, padding_val=-1, name=None)
topk(val_dst, idx_dst, src, n, name=None)
get_nc_version()
get_nc_sub_version()
"""
_LANGUAGE = """
ndarray(shape, dtype, buffer=0, name='', address=None)
zeros(shape, dtype, buffer=0, name='')
ones(shape, dtype, buffer=0, name='')
full(shape, fill_value, dtype, buffer=0, name='')
zeros_like(x, dtype=None, buffer=None, name='')
empty_like(x, dtype=None, buffer=None, name='')
rand(shape, dtype, buffer=0, name='')
random_seed(seed)
shared_constant(constant)
shared_identity_matrix(n, dtype=0, dst=None)
load(src, dtype=None)
store(dst, value)
copy(x, dtype=None)
load_transpose2d(src, dtype=None)
gather_flattened(data, indices, axis=0, dtype=None)
transpose(x, dtype=None)
broadcast_to(x, shape, dtype=None)
expand_dims(x, axis)
ds(start, size)
softmax(x, axis=-1, dtype=None)
rms_norm(x, w, axis, n, epsilon=1e-6, dtype=None, compute_dtype=None)
where(condition, x, y, dtype=None)
dropout(x, rate, dtype=None)
matmul(x, y, transpose_x=False)
all(x, axis, dtype=None)
device_print(print_prefix, tensor)
affine_range(start, stop=None, step=1)
sequential_range(start, stop=None, step=1)
static_range(start, stop=None, step=1)
dynamic_range(start, stop=None, step=1)
fori_loop(lower, upper, body_fun, step=1)
while_loop(init, body_fun)
program_id(axis=0)
num_programs(axes=0)
program_ndim()
"""
_BINARY = (
    "add subtract multiply divide maximum minimum abs_max abs_min power equal not_equal less less_equal greater"
    " greater_equal bitwise_and bitwise_or bitwise_xor left_shift right_shift logical_and logical_or logical_xor"
    " fmod mod"
)
_UNARY = (
    "abs square invert logical_not exp log sqrt rsqrt tanh sigmoid relu gelu gelu_apprx_sigmoid gelu_apprx_tanh gelu_dx"
    " gelu_apprx_sigmoid_dx silu silu_dx softplus mish erf erf_dx reciprocal sin cos tan arctan ceil floor trunc"
    " negative sign"
)
_REDUCTIONS = "sum max min mean prod var"
_COLLECTIVES = """
all_reduce(srcs, dsts, replica_group, op, priority=None, name=None)
all_gather(srcs, dsts, replica_group, collective_dim, priority=None, name=None)
reduce_scatter(srcs, dsts, replica_group, collective_dim, op, priority=None, name=None)
all_to_all(srcs, dsts, replica_group, collective_dim, priority=None, name=None)
collective_permute(srcs, dsts, source_target_pairs, priority=None, name=None)
rank_id(name=None)
"""
LATER = frozenset(
    {
        "nki.isa.NkiScalar",
        "nki.isa.scalar_load",
        "nki.isa.scalar_store",
        "nki.language.alloc_tiles",
        "nki.language.alloc_blocks",
        "nki.collectives.all_to_all_v_prepare",
        "nki.collectives.all_to_all_v_trigger",
    }
)
# Parameters of nki.isa that take members of an enumeration of the same module.
ENUMERATIONS = {
    "engine": "engine",
    "dge_mode": "dge_mode",
    "oob_mode": "oob_mode",
    "dma_engine": "dma_engine",
    "reduce_cmd": "reduce_cmd",
    "perf_mode": "matmul_perf_mode",
}


class Signature(NamedTuple):
    """Parameters in order, and those without a default. ``open``: any further keyword is taken."""

    parameters: tuple[str, ...]
    required: frozenset[str]
    open: bool = False
    starred: bool = False


@cache
def signatures() -> dict[str, Signature]:
    """The signature of every function by its full name, such as ``nki.isa.dma_copy``."""
    return dict(_signatures())


def signature(function: ast.FunctionDef | ast.AsyncFunctionDef, bound: bool = False) -> Signature:
    """The signature of a defined function; ``bound`` leaves out its first parameter."""
    given = function.args
    positional = [arg.arg for arg in (*given.posonlyargs, *given.args)]
    keyword = [arg.arg for arg in given.kwonlyargs]
    optional = set(positional[len(positional) - len(given.defaults) :]) if given.defaults else set()
    optional |= {name for name, value in zip(keyword, given.kw_defaults, strict=True) if value is not None}
    names = positional[1:] if bound else positional
    required = frozenset({*names, *keyword} - optional)
    return Signature((*names, *keyword), required, given.kwarg is not None, given.vararg is not None)


def _signatures() -> Iterator[tuple[str, Signature]]:
    for module, text in (("isa", _ISA), ("language", _LANGUAGE), ("collectives", _COLLECTIVES)):
        for line in text.strip().split("\n"):
            (function,) = ast.parse(f"def {line}: ...").body
            if isinstance(function, ast.FunctionDef):
                yield f"nki.{module}.{function.name}", signature(function)
    for names, text in ((_BINARY, "x, y, dtype"), (_UNARY, "x, dtype"), (_REDUCTIONS, "x, axis, dtype, keepdims")):
        parameters = tuple(text.split(", "))
        required = frozenset(parameters) - {"dtype", "keepdims"}
        yield from ((f"nki.language.{name}", Signature(parameters, required)) for name in names.split())
