# SPDX-License-Identifier: Apache-2.0
"""Kernels of single instructions, in the NKI subset: they run on a device, in the vendor's simulator, and embedded."""

import nki
import nki.isa as nisa
import nki.language as nl


def tile_of(source):
    """A tensor of HBM in a new tile."""
    tile = nl.ndarray(source.shape, dtype=source.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=source)
    return tile


def stored(tile):
    """A tile in a new tensor that can be returned."""
    out = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=tile)
    return out


@nki.jit
def operand_probe(data_hbm, operand_hbm, place):
    """``data`` [128, N] with a per-partition operand [128, 1], float32, in the instruction and position ``place``."""
    data = tile_of(data_hbm)
    operand = tile_of(operand_hbm)
    dst = nl.ndarray(data.shape, dtype=nl.float32, buffer=nl.sbuf)
    if place == "tensor_scalar multiply":
        nisa.tensor_scalar(dst=dst, data=data, op0=nl.multiply, operand0=operand)
    elif place == "tensor_scalar add":
        nisa.tensor_scalar(dst=dst, data=data, op0=nl.add, operand0=operand)
    elif place == "tensor_scalar subtract":
        nisa.tensor_scalar(dst=dst, data=data, op0=nl.subtract, operand0=operand, reverse0=True)
    elif place == "tensor_scalar second operand":
        nisa.tensor_scalar(dst=dst, data=data, op0=nl.multiply, operand0=1.0, op1=nl.add, operand1=operand)
    elif place == "scalar_tensor_tensor":
        zero = nl.ndarray(data.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=zero, value=0.0)
        nisa.scalar_tensor_tensor(dst=dst, data=data, op0=nl.add, operand0=operand, op1=nl.add, operand1=zero)
    elif place == "activation scale":
        nisa.activation(dst=dst, op=nl.copy, data=data, scale=operand)
    else:
        assert place == "activation bias", f"place is {place}"
        nisa.activation(dst=dst, op=nl.copy, data=data, bias=operand)
    return stored(dst)


@nki.jit
def statistics_probe(data_hbm):
    """bn_stats [128, 6] of rows [128, N], and bn_aggr [128, 2] of that."""
    data = tile_of(data_hbm)
    triples = nl.ndarray((128, 6), dtype=nl.float32, buffer=nl.sbuf)
    nisa.bn_stats(dst=triples, data=data)
    moments = nl.ndarray((128, 2), dtype=nl.float32, buffer=nl.sbuf)
    nisa.bn_aggr(dst=moments, data=triples)
    return stored(triples), stored(moments)


@nki.jit
def root_probe(data_hbm):
    """1/sqrt of [128, N] float32: by GpSimd, by GpSimd and one Newton step, and by Scalar."""
    data = tile_of(data_hbm)
    gpsimd = nl.ndarray(data.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=gpsimd, data=data, op0=nl.rsqrt, operand0=0.0, engine=nisa.engine.gpsimd)
    product = nl.ndarray(data.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=product, data1=data, data2=gpsimd, op=nl.multiply)
    nisa.scalar_tensor_tensor(
        dst=product, data=product, op0=nl.multiply, operand0=-0.5, op1=nl.multiply, operand1=gpsimd
    )
    better = nl.ndarray(data.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(dst=better, data=product, op0=nl.add, operand0=1.5, op1=nl.multiply, operand1=gpsimd)
    scalar = nl.ndarray(data.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=scalar, op=nl.rsqrt, data=data)
    return stored(gpsimd), stored(better), stored(scalar)


@nki.jit
def instruction_probe(data_hbm, other_hbm, column_hbm, which):
    """One instruction on ``data`` and ``other`` [128, N] and ``column`` [128, 1], float32, by its name."""
    data = tile_of(data_hbm)
    other = tile_of(other_hbm)
    column = tile_of(column_hbm)
    dst = nl.ndarray(data.shape, dtype=nl.float32, buffer=nl.sbuf)
    single = nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.sbuf)
    if which == "tensor_copy":
        nisa.tensor_copy(dst=dst, src=data)
    elif which == "tensor_copy through bfloat16":
        narrow = nl.ndarray(data.shape, dtype=nl.bfloat16, buffer=nl.sbuf)
        nisa.tensor_copy(dst=narrow, src=data)
        nisa.tensor_copy(dst=dst, src=narrow)
    elif which == "tensor_copy through int32":
        whole = nl.ndarray(data.shape, dtype=nl.int32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=whole, src=data)
        nisa.tensor_copy(dst=dst, src=whole)
    elif which == "tensor_tensor":
        nisa.tensor_tensor(dst=dst, data1=data, data2=other, op=nl.multiply)
    elif which == "tensor_scalar":
        nisa.tensor_scalar(dst=dst, data=data, op0=nl.subtract, operand0=column, op1=nl.maximum, operand1=0.0)
    elif which == "scalar_tensor_tensor":
        nisa.scalar_tensor_tensor(dst=dst, data=data, op0=nl.subtract, operand0=column, op1=nl.multiply, operand1=other)
    elif which == "tensor_reduce":
        nisa.tensor_reduce(dst=single, op=nl.add, data=data, axis=1)
        dst = single
    elif which == "activation":
        nisa.activation(dst=dst, op=nl.relu, data=data, scale=column)
    elif which == "activation with a sum":
        nisa.activation(
            dst=dst,
            op=nl.copy,
            data=data,
            reduce_op=nl.add,
            reduce_res=single,
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )
        dst = single
    elif which == "tensor_copy_predicated":
        mask = nl.ndarray(data.shape, dtype=nl.uint8, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=mask, data=other, op0=nl.greater, operand0=0.0)
        nisa.memset(dst=dst, value=2.0)
        nisa.tensor_copy_predicated(dst=dst, src=data, predicate=mask)
    elif which == "nc_transpose":
        turned = nl.ndarray((data.shape[1], 128), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_transpose(dst=turned, data=data)
        dst = nl.ndarray((data.shape[1], 128), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=dst, src=turned)
    elif which == "nc_matmul":
        product = nl.ndarray((data.shape[1], other.shape[1]), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=product, stationary=data, moving=other)
        dst = nl.ndarray((data.shape[1], other.shape[1]), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=dst, src=product)
    elif which == "iota":
        index = nl.ndarray(data.shape, dtype=nl.int32, buffer=nl.sbuf)
        nisa.iota(dst=index, pattern=[[3, data.shape[1]]], offset=5, channel_multiplier=2)
        nisa.tensor_copy(dst=dst, src=index)
    elif which == "affine_select":
        nisa.affine_select(
            dst=dst,
            pattern=[[1, data.shape[1]]],
            channel_multiplier=-1,
            on_true_tile=data,
            on_false_value=0.0,
            cmp_op=nl.greater_equal,
        )
    else:
        assert which == "nc_stream_shuffle", f"which is {which}"
        mask = []
        for partition in range(32):
            mask.append(31 - partition)
        nisa.nc_stream_shuffle(dst=dst, src=data, shuffle_mask=mask)
    return stored(dst)
