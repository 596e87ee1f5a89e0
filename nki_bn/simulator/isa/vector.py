# SPDX-License-Identifier: Apache-2.0
"""Elementwise instructions of the Vector engine, some of which GpSimd or Scalar can run too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nki_bn.simulator import dtypes
from nki_bn.simulator.isa import alu, checks
from nki_bn.simulator.isa.accumulators import Accumulation, command, registers, row_maximum
from nki_bn.simulator.isa.enums import engine as engines
from nki_bn.simulator.isa.enums import nc_version
from nki_bn.simulator.isa.enums import reduce_cmd as commands
from nki_bn.simulator.isa.operands import Operands
from nki_bn.simulator.issue import NkiInstruction, issue, raw
from nki_bn.simulator.machine import current_core
from nki_bn.simulator.memory import MemoryRegion
from nki_bn.simulator.numerics import Array, Float32
from nki_bn.simulator.operators import Sentinel
from nki_bn.simulator.tensor import NkiTensor, require

_WORDS = ("int32", "uint32")
_SELECT_COMMANDS = (commands.idle, commands.reset_reduce, commands.reduce)
_SHORT_INTEGERS = ("int8", "uint8", "int16", "uint16")
# What Scalar's tensor_scalar can do on gen3; later generations take any two of its operators.
_SCALAR_FORMS = (("multiply", "add"), ("multiply",), ("add",))
_SCANS = ("add", "subtract", "multiply", "maximum", "minimum")
_BESIDE_RSQRT = ("rsqrt", "add", "multiply")


def tensor_tensor(
    dst: NkiTensor,
    data1: NkiTensor,
    data2: NkiTensor,
    op: Any,
    engine: engines = engines.unknown,
    name: str | None = None,
) -> NkiInstruction:
    """``dst = data1 op data2`` elementwise, on Vector or GpSimd.

    Operands lie in SBUF or PSUM with equally many partitions and elements per partition; at most one input is in PSUM.
    Arithmetic is float32, cast to the dtype of ``dst``. Bitvec operators take integers of one width. When all three
    tiles are int32 or uint32, none in PSUM, and the engine is not forced to Vector, GpSimd computes exactly; a result
    beyond 32 bits wraps. ``nl.power`` runs on GpSimd only, in float32.

    Raises:
        TypeError: wrong Python types.
        NkiValidationError: a rule above is broken, or the engine has no such operator.
    """
    operands = Operands("tensor_tensor")
    dst, data1 = operands.indirect(dst, data1, "data1")
    data2 = operands.tile("data2", data2)
    checks.same_layout("tensor_tensor", data1=data1, data2=data2, dst=dst)
    checks.not_both_psum("tensor_tensor", data1=data1, data2=data2)
    operator = alu.find("tensor_tensor", "op", op)
    require(not operator.unary, f"tensor_tensor op nl.{operator.name} is unary; accepted: operators of two operands")
    if operator.bitvec:
        alu.check_bits("tensor_tensor", data1=data1, data2=data2, dst=dst)
    chosen = _tensor_tensor_engine(engine, operator, (dst, data1, data2))

    def compute() -> list[Array]:
        if operator.bitvec:
            return [alu.from_bits(alu.evaluate(operator.name, alu.bits(data1), alu.bits(data2)), dst)]
        if chosen is engines.gpsimd and _exact(operator, (dst, data1, data2)):
            return [alu.evaluate_integers(operator.name, raw(data1), raw(data2), dst.dtype)]
        return [alu.evaluate(operator.name, alu.read(data1), alu.read(data2))]

    return issue(
        "tensor_tensor", chosen.name, [dst], [data1, data2, *operands.indices], compute, name=name, op=operator.name
    )


def _exact(operator: alu.Operator, tensors: tuple[NkiTensor, ...]) -> bool:
    """Whether GpSimd computes ``operator`` with integers."""
    return not operator.bitvec and operator.name != "power" and all(tensor.dtype in _WORDS for tensor in tensors)


def _tensor_tensor_engine(chosen: engines, operator: alu.Operator, tensors: tuple[NkiTensor, ...]) -> engines:
    psum = any(tensor.buffer is MemoryRegion.psum for tensor in tensors)
    exact = _exact(operator, tensors)
    accepted = tuple(
        item
        for item in (engines.vector, engines.gpsimd)
        if item in operator.engines or (exact and item is engines.gpsimd)
    )
    default = engines.gpsimd if exact and not psum else accepted[0]
    picked = checks.pick_engine(f"tensor_tensor op nl.{operator.name}", chosen, default, accepted)
    require(
        picked is not engines.gpsimd or not psum,
        f"tensor_tensor op nl.{operator.name} on gpsimd has an operand in psum; accepted: sbuf",
    )
    return picked


def tensor_scalar(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: Any,
    reverse0: bool = False,
    op1: Any = None,
    operand1: Any = None,
    reverse1: bool = False,
    engine: engines = engines.unknown,
    name: str | None = None,
) -> NkiInstruction:
    """``dst = (data op0 operand0) op1 operand1``, each operand a number or one value per partition.

    ``reverse0`` and ``reverse1`` swap the operands of their operator. Both operators are arithmetic (float32
    throughout, operand columns float32) or both bitvec (integers of one width). Unary operators take None or 0 as
    operand. Vector runs all but ``nl.rsqrt``, which is GpSimd's; there it may stand with add, multiply or rsqrt. Scalar
    runs (multiply, add), multiply and add on gen3, any two of add and multiply from gen4.

    Args:
        dst, data: (P, F) tiles in SBUF or PSUM, any dtypes.
        operand0, operand1: number, or (P, 1) tile in SBUF or PSUM.

    Raises:
        TypeError: wrong Python types.
        NkiValidationError: a rule above is broken, or the engine has no such operator.
    """
    operands = Operands("tensor_scalar")
    dst, data = operands.pair(dst, data, indirect=True)
    stages = [alu.stage(operands, ("op0", "operand0"), op0, operand0, data, reverse=reverse0)]
    if op1 is not None:
        stages.append(alu.stage(operands, ("op1", "operand1"), op1, operand1, data, reverse=reverse1))
    require(op1 is not None or operand1 is None, "tensor_scalar operand1 is given without op1")
    bitvec = stages[0].operator.bitvec
    require(
        all(item.operator.bitvec == bitvec for item in stages),
        "tensor_scalar op0 and op1 must both be arithmetic or both bitvec",
    )
    if bitvec:
        alu.check_bits("tensor_scalar", data=data, dst=dst)
    columns = [column for item in stages for column in item.columns]
    chosen = _tensor_scalar_engine(engine, stages, [dst, data, *columns])

    def compute() -> list[Array]:
        values = stages[0].apply(alu.bits(data) if bitvec else alu.read(data))
        for item in stages[1:]:
            values = item.apply(values, out=values)
        return [alu.from_bits(values, dst) if bitvec else values]

    return issue(
        "tensor_scalar",
        chosen.name,
        [dst],
        [data, *columns, *operands.indices],
        compute,
        name=name,
        ops=tuple(item.operator.name for item in stages),
        pointers=len(columns),
    )


def _tensor_scalar_engine(chosen: engines, stages: list[alu.Stage], tensors: list[NkiTensor]) -> engines:
    operators = {f"op{index}": item.operator for index, item in enumerate(stages)}
    names = [operator.name for operator in operators.values()]
    what = f"tensor_scalar with {' and '.join(names)}"
    if "rsqrt" in names:
        require(
            all(item in _BESIDE_RSQRT for item in names),
            f"{what}: rsqrt runs on gpsimd; accepted beside it: {', '.join(_BESIDE_RSQRT)}",
        )
        accepted = [engines.gpsimd]
    else:
        if not stages[0].operator.bitvec:
            alu.require_vector("tensor_scalar", **operators)
        accepted = [engines.vector, engines.scalar] if _scalar_can(stages) else [engines.vector]
    picked = checks.pick_engine(what, chosen, accepted[0], tuple(accepted))
    for tensor in tensors:
        require(
            picked is not engines.gpsimd or tensor.buffer is MemoryRegion.sbuf,
            f"{what} on gpsimd has {tensor!r}; accepted: sbuf",
        )
    return picked


def _scalar_can(stages: list[alu.Stage]) -> bool:
    if checks.version() is nc_version.gen3:
        return tuple(item.operator.name for item in stages) in _SCALAR_FORMS
    return checks.version() >= nc_version.gen4 and all(engines.scalar in item.operator.engines for item in stages)


def scalar_tensor_tensor(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: Any,
    op1: Any,
    operand1: NkiTensor,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> NkiInstruction:
    """``dst = (data op0 operand0) op1 operand1`` on Vector, in float32; ``operand1`` is a whole tile.

    Args:
        dst, data, operand1: (P, F) tiles in SBUF or PSUM, any dtypes; data and operand1 not both in PSUM.
        operand0: number, or (P, 1) tile of any dtype in SBUF or PSUM.

    Raises:
        TypeError: wrong Python types.
        NkiValidationError: a bitvec operator, an operator that Vector lacks, or a broken rule above.
    """
    operands = Operands("scalar_tensor_tensor")
    dst, data = operands.pair(dst, data)
    operand1 = operands.tile("operand1", operand1)
    checks.same_layout("scalar_tensor_tensor", data=data, operand1=operand1)
    checks.not_both_psum("scalar_tensor_tensor", data=data, operand1=operand1)
    first = alu.stage(operands, ("op0", "operand0"), op0, operand0, data, reverse=reverse0, float32_only=False)
    second = _binary("scalar_tensor_tensor", "op1", op1)
    alu.require_vector("scalar_tensor_tensor", op0=first.operator)

    def compute() -> list[Array]:
        values = first.apply(alu.read(data))
        a, b = (alu.read(operand1), values) if reverse1 else (values, alu.read(operand1))
        return [alu.evaluate(second.name, a, b, out=values)]

    return issue(
        "scalar_tensor_tensor",
        "vector",
        [dst],
        [data, operand1, *first.columns, *operands.indices],
        compute,
        name=name,
        ops=(first.operator.name, second.name),
        pointers=len(first.columns),
    )


def _binary(instruction: str, argument: str, op: Any) -> alu.Operator:
    operator = alu.find(instruction, argument, op)
    alu.require_vector(instruction, **{argument: operator})
    require(not operator.unary, f"{instruction} {argument} nl.{operator.name} is unary; accepted: binary operators")
    return operator


def tensor_scalar_cumulative(
    dst: NkiTensor,
    src: NkiTensor,
    op0: Any,
    op1: Any,
    imm0: Any,
    imm1: Any = None,
    reduce_cmd: commands = commands.reset_reduce,
    name: str | None = None,
) -> NkiInstruction:
    """Running reduction along the free elements, on Vector: ``reg = (src[i] op0 imm0) op1 reg; dst[i] = reg``.

    ``reg`` is the float32 accumulator of the lane in Vector's bank. ``reduce_cmd`` reset_reduce starts from the
    identity of ``op1``, load_reduce from ``imm1``, reduce from what the accumulator holds. The documentation's
    pseudocode mentions a ``reverse0`` that the signature has not.

    Args:
        dst, src: (P, F) tiles in SBUF or PSUM, 16-bit or 32-bit floats, float8, or integers of 8 or 16 bits.
        op0, imm0: arithmetic operator with a number or a (P, 1) float32 tile; unary: None or 0.
        op1: ``nl.add``, ``nl.subtract``, ``nl.multiply``, ``nl.maximum`` or ``nl.minimum``.
        imm1: number or (P, 1) float32 tile with load_reduce, else None.

    Raises:
        TypeError: wrong Python types.
        NkiValidationError: a rule above is broken.
    """
    opcode = "tensor_scalar_cumulative"
    operands = Operands(opcode)
    dst, src = operands.pair(dst, src, "src", indirect=True)
    checks.check_dtypes(opcode, (*dtypes.FLOATS, *_SHORT_INTEGERS), src=src, dst=dst)
    stage = alu.stage(operands, ("op0", "imm0"), op0, imm0, src)
    alu.require_vector(opcode, op0=stage.operator)
    operator = alu.find_reduction(opcode, "op1", op1, _SCANS)
    chosen = command(opcode, reduce_cmd, (commands.reset_reduce, commands.reduce, commands.load_reduce))
    require(
        (imm1 is not None) == (chosen is commands.load_reduce),
        f"{opcode} imm1 belongs to reduce_cmd load_reduce, got {imm1!r} with {chosen.name}",
    )
    initial = None if imm1 is None else operands.column("imm1", imm1, src)
    accumulation = Accumulation("vector", operator.name, chosen, initial=initial)
    columns = [*stage.columns, *accumulation.columns]

    def compute() -> list[Array]:
        values = stage.apply(alu.read(src)).T
        lanes = accumulation.start(dst)
        result = _scan(src, lanes, lambda i, reg: alu.evaluate(operator.name, values[i], reg))
        lanes[...] = result[:, -1:]
        return [result]

    return issue(
        opcode,
        "vector",
        [dst],
        [src, *columns, *operands.indices],
        compute,
        name=name,
        ops=(stage.operator.name, operator.name),
        pointers=len(columns),
        **accumulation.attributes,
    )


def _scan(data: NkiTensor, start: Array, step: Callable[[int, Array], Array]) -> Float32:
    """All values of ``carry = step(column, carry)`` over the columns of ``data``, shape (partitions, columns)."""
    result = np.empty((checks.columns(data), data.shape[0]), np.float32)
    carry = np.broadcast_to(start, (data.shape[0], 1))[:, 0]
    for column in range(result.shape[0]):
        carry = step(column, carry)
        result[column] = carry
    return result.T


def tensor_tensor_scan(
    dst: NkiTensor,
    data0: NkiTensor,
    data1: NkiTensor,
    initial: Any,
    op0: Any,
    op1: Any,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> NkiInstruction:
    """Recurrence along the free elements, on Vector: ``r[i] = (data0[i] op0 r[i - 1]) op1 data1[i]``.

    ``initial`` stands for the value before the first one. ``reverse0`` and ``reverse1`` swap the operands of their
    operator. The carried value stays float32, whatever the dtype of ``dst``.

    Args:
        dst, data0, data1: (P, F) tiles in SBUF or PSUM, any dtypes; data0 and data1 not both in PSUM.
        initial: number, or (P, 1) float32 tile.
        op0, op1: binary arithmetic operators.

    Raises:
        TypeError: wrong Python types.
        NkiValidationError: a rule above is broken.
    """
    opcode = "tensor_tensor_scan"
    operands = Operands(opcode)
    dst, data0, data1 = operands.tile("dst", dst), operands.tile("data0", data0), operands.tile("data1", data1)
    checks.same_layout(opcode, data0=data0, data1=data1, dst=dst)
    checks.not_both_psum(opcode, data0=data0, data1=data1)
    start = operands.column("initial", initial, data0)
    first, second = _binary(opcode, "op0", op0).name, _binary(opcode, "op1", op1).name
    columns = [start] if isinstance(start, NkiTensor) else []

    def compute() -> list[Array]:
        left, right = alu.read(data0).T, alu.read(data1).T

        def step(i: int, carry: Array) -> Array:
            inner = alu.evaluate(first, carry, left[i]) if reverse0 else alu.evaluate(first, left[i], carry)
            return alu.evaluate(second, right[i], inner) if reverse1 else alu.evaluate(second, inner, right[i])

        return [_scan(data0, np.asarray(checks.operand_values(start)), step)]

    return issue(
        opcode,
        "vector",
        [dst],
        [data0, data1, *columns, *operands.indices],
        compute,
        name=name,
        ops=(first, second),
        pointers=len(columns),
    )


def reciprocal(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> NkiInstruction:
    """``dst = 1 / data`` in float32, on Vector; 1/0 is infinite (undocumented).

    ``dst`` and ``data`` are (P, F) tiles in SBUF or PSUM of any dtypes.

    Raises:
        TypeError: an operand is not a tensor.
        NkiValidationError: an operand is not on chip, or the layouts differ.
    """
    operands = Operands("reciprocal")
    dst, data = operands.pair(dst, data)
    return issue(
        "reciprocal", "vector", [dst], [data, *operands.indices], lambda: [np.reciprocal(alu.read(data))], name=name
    )


def select_reduce(
    dst: NkiTensor,
    predicate: NkiTensor,
    on_true: NkiTensor,
    on_false: Any,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: commands = commands.idle,
    reduce_op: Any = Sentinel("maximum"),  # noqa: B008 - an operator name, never changed
    reverse_pred: bool = False,
    name: str | None = None,
) -> NkiInstruction:
    """``dst = on_true where predicate else on_false`` on Vector, and optionally the maximum of it per partition.

    ``reverse_pred`` selects where the predicate is zero. ``reduce_cmd`` reset_reduce starts from -inf, reduce from what
    Vector's accumulators of the lanes hold. After idle their contents are unknown: a strict run sets them to NaN, and
    reading them out is refused.

    Args:
        dst, on_true: (P, F) tiles in SBUF or PSUM; on_true not tfloat32, int32 or uint32.
        predicate: (P, F) tile, int8, uint8, int16 or uint16; not in PSUM if on_true is.
        on_false: number, or (P, 1) tile.
        reduce_res: None or (P, 1) tile of a float dtype, written after ``dst``.
        reduce_op: ``nl.maximum``.

    Raises:
        TypeError: wrong Python types.
        NkiValidationError: a rule above is broken.
    """
    operands = Operands("select_reduce")
    dst, on_true, predicate = (
        operands.tile(key, value) for key, value in (("dst", dst), ("on_true", on_true), ("predicate", predicate))
    )
    checks.same_layout("select_reduce", on_true=on_true, predicate=predicate, dst=dst)
    checks.not_both_psum("select_reduce", on_true=on_true, predicate=predicate)
    checks.check_dtypes("select_reduce", (*dtypes.FLOATS, *_SHORT_INTEGERS, "bool_"), on_true=on_true)
    checks.check_dtypes("select_reduce", _SHORT_INTEGERS, predicate=predicate)
    other = operands.column("on_false", on_false, on_true, float32_only=False)
    accumulation = row_maximum(operands, reduce_op, reduce_cmd, reduce_res, on_true, _SELECT_COMMANDS)
    if accumulation.result is not None:
        chosen = accumulation.command
        require(
            chosen is not commands.idle, "select_reduce reduce_res with reduce_cmd idle would read unknown contents"
        )
        checks.check_dtypes("select_reduce", (*dtypes.FLOATS, "tfloat32"), reduce_res=accumulation.result)
    columns = [other] if isinstance(other, NkiTensor) else []

    def compute() -> list[Array]:
        mask = (raw(predicate) != 0) != bool(reverse_pred)
        values = np.where(mask, alu.read(on_true), checks.operand_values(other))
        if accumulation.command is commands.idle and current_core().options.strict:
            registers("vector", dst)[...] = np.nan
        return [values, *accumulation.run(dst, values)]

    return issue(
        "select_reduce",
        "vector",
        [dst, *accumulation.results],
        [on_true, predicate, *columns, *operands.indices],
        compute,
        name=name,
        pointers=len(columns),
        **accumulation.attributes,
    )
