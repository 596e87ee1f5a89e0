# SPDX-License-Identifier: Apache-2.0
"""Instructions that reduce a tile: along free dimensions on Vector, over the partitions on GpSimd."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from nki_bn.simulator.isa import alu, checks
from nki_bn.simulator.isa.accumulators import Accumulation, command
from nki_bn.simulator.isa.enums import reduce_cmd as commands
from nki_bn.simulator.isa.operands import Operands
from nki_bn.simulator.issue import NkiInstruction, issue
from nki_bn.simulator.machine import current_core
from nki_bn.simulator.numerics import Array
from nki_bn.simulator.operators import op_name
from nki_bn.simulator.tensor import NkiTensor, require

_PARTITION_OPERATORS = ("add", "average", "maximum", "bitwise_or", "bitwise_and")
_COMMANDS = (commands.reset_reduce, commands.reduce, commands.load_reduce)


def tensor_reduce(
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    axis: int | Sequence[int],
    negate: bool = False,
    keepdims: bool = False,
    name: str | None = None,
) -> NkiInstruction:
    """Reduce the last free dimensions of ``data``, on Vector.

    Arithmetic is float32, cast to the dtype of ``dst``; bitvec operators take integers of one width. ``negate``
    multiplies the result by -1. A ``subtract`` takes all later elements off the first one (its order is undocumented).

    Args:
        dst: tile in SBUF or PSUM with the partitions of ``data`` and as many elements per partition as are kept; its
            rank does not matter, with or without ``keepdims``.
        data: (P, D1, ...) tile in SBUF or PSUM.
        axis: the trailing dimensions to reduce, e.g. 2, (1, 2) or -1; never 0.

    Raises:
        TypeError: wrong Python types.
        NkiValidationError: a rule above is broken.
    """
    operands = Operands("tensor_reduce")
    dst, data = operands.indirect(dst, data)
    operator = alu.find_reduction("tensor_reduce", "op", op)
    kept = prod(data.shape[1 : _first_axis(axis, data)])
    require(
        dst.shape[0] == data.shape[0] and checks.columns(dst) == kept,
        f"tensor_reduce dst must have {data.shape[0]} partitions of {kept} elements, got shape {dst.shape}",
    )
    if operator.bitvec:
        require(not negate, f"tensor_reduce negate is for arithmetic operators, got nl.{operator.name}")
        alu.check_bits("tensor_reduce", data=data, dst=dst)
    shape = (data.shape[0], kept, -1)

    def compute() -> list[Array]:
        order = current_core().options.accumulate
        if operator.bitvec:
            return [alu.from_bits(alu.reduce(operator.name, alu.bits(data).reshape(shape), order), dst)]
        result = alu.reduce(operator.name, alu.read(data).reshape(shape), order)
        return [np.multiply(result, np.float32(-1)) if negate else result]

    return issue(
        "tensor_reduce", "vector", [dst], [data, *operands.indices], compute, name=name, op=operator.name, negate=negate
    )


def _first_axis(axis: int | Sequence[int], data: NkiTensor) -> int:
    """The first of the reduced dimensions."""
    axes: tuple[int, ...] = (axis,) if isinstance(axis, int) else tuple(axis) if isinstance(axis, (tuple, list)) else ()
    if not axes or not all(isinstance(item, int) and not isinstance(item, bool) for item in axes):
        raise TypeError(f"tensor_reduce axis must be an integer or a tuple of integers, got {axis!r}")
    dims = sorted(item + data.ndim if item < 0 else item for item in axes)
    require(
        dims == list(range(data.ndim - len(dims), data.ndim)) and dims[0] > 0,
        f"tensor_reduce axis {axis!r} must be the last free dimensions of shape {data.shape}, without dimension 0",
    )
    return dims[0]


def tensor_scalar_reduce(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: Any,
    reduce_op: Any,
    reduce_res: NkiTensor | None = None,
    reverse0: bool = False,
    reduce_cmd: commands = commands.reset_reduce,
    reduce_init: Any = None,
    reduce_res_negate: bool = False,
    name: str | None = None,
) -> NkiInstruction:
    """``dst = data op0 operand0`` on Vector, and a reduction of it over all free elements in Vector's accumulators.

    The reduction sees the float32 results, before they are cast to the dtype of ``dst``. ``reduce_cmd`` reset_reduce
    starts from the identity of ``reduce_op``, load_reduce from ``reduce_init``, reduce from what the accumulators of
    the lanes hold. ``reduce_res`` reads them out (negated if ``reduce_res_negate``), after ``dst`` is written.

    Args:
        dst, data: (P, F) tiles in SBUF or PSUM, any dtypes.
        op0, operand0: arithmetic operator with a number or a (P, 1) float32 tile; unary: None or 0.
        reduce_op: ``nl.add``, ``nl.multiply``, ``nl.maximum`` or ``nl.minimum``.
        reduce_res: None or (P, 1) tile.
        reverse0: must be False, the instruction set does not support it yet.
        reduce_init: number or (P, 1) float32 tile with load_reduce, else None.

    Raises:
        TypeError: wrong Python types.
        NkiValidationError: a rule above is broken.
    """
    opcode = "tensor_scalar_reduce"
    operands = Operands(opcode)
    dst, data = operands.pair(dst, data, indirect=True)
    require(not reverse0, f"{opcode} reverse0 is not supported by the instruction set, got {reverse0!r}")
    stage = alu.stage(operands, ("op0", "operand0"), op0, operand0, data)
    alu.require_vector(opcode, op0=stage.operator)
    operator = alu.find_reduction(opcode, "reduce_op", reduce_op, ("add", "multiply", "maximum", "minimum"))
    chosen = command(opcode, reduce_cmd, _COMMANDS)
    require(
        (reduce_init is not None) == (chosen is commands.load_reduce),
        f"{opcode} reduce_init belongs to reduce_cmd load_reduce, got {reduce_init!r} with {chosen.name}",
    )
    initial = None if reduce_init is None else operands.column("reduce_init", reduce_init, data)
    result = operands.result("reduce_res", reduce_res, data)
    accumulation = Accumulation("vector", operator.name, chosen, result, reduce_res_negate, initial)
    columns = [*stage.columns, *accumulation.columns]

    def compute() -> list[Array]:
        values = stage.apply(alu.read(data))
        return [values, *accumulation.run(dst, values)]

    return issue(
        opcode,
        "vector",
        [dst, *accumulation.results],
        [data, *columns, *operands.indices],
        compute,
        name=name,
        ops=(stage.operator.name,),
        pointers=len(columns),
        **accumulation.attributes,
    )


def tensor_partition_reduce(dst: NkiTensor, op: Any, data: NkiTensor, name: str | None = None) -> NkiInstruction:
    """Reduce over the partitions, on GpSimd: ``data`` (P, ...) to ``dst`` (1, ...), both in SBUF.

    ``op`` is ``nl.add``, ``nl.average`` (the sum over P; its divisor is undocumented), ``nl.max`` or ``nl.maximum``, in
    float32, cast to the dtype of ``dst``; or ``nl.bitwise_or`` or ``nl.bitwise_and`` on integers of one width.

    Raises:
        TypeError: wrong Python types.
        NkiValidationError: another operator, an operand outside SBUF, or a wrong shape of ``dst``.
    """
    opcode = "tensor_partition_reduce"
    operands = Operands(opcode)
    dst, data = operands.tile("dst", dst, checks.SBUF), operands.tile("data", data, checks.SBUF)
    require(
        dst.shape[0] == 1 and checks.columns(dst) == checks.columns(data),
        f"{opcode} dst must have 1 partition of {checks.columns(data)} elements, got shape {dst.shape}",
    )
    operator = _partition_operator(op)
    bitvec = operator.startswith("bitwise")
    if bitvec:
        alu.check_bits(opcode, data=data, dst=dst)

    def compute() -> list[Array]:
        order = current_core().options.accumulate
        if bitvec:
            return [alu.from_bits(alu.reduce(operator, alu.bits(data).T, order), dst)]
        result = alu.reduce("add" if operator == "average" else operator, alu.read(data).T, order)
        return [np.divide(result, np.float32(data.shape[0])) if operator == "average" else result]

    return issue(opcode, "gpsimd", [dst], [data, *operands.indices], compute, name=name, op=operator)


def _partition_operator(op: Any) -> str:
    if op_name("tensor_partition_reduce", "op", op) == "average":
        return "average"
    return alu.find_reduction("tensor_partition_reduce", "op", op, _PARTITION_OPERATORS).name
