# SPDX-License-Identifier: Apache-2.0
"""Instructions that exist from gen4 on: exponentials on Vector, activations with two ALU stages on Scalar."""

from __future__ import annotations

from typing import Any

import numpy as np

from nki_bn.simulator.isa import activation_functions, alu, checks
from nki_bn.simulator.isa.accumulators import Accumulation, command, registers
from nki_bn.simulator.isa.enums import nc_version
from nki_bn.simulator.isa.enums import reduce_cmd as commands
from nki_bn.simulator.isa.operands import Operands
from nki_bn.simulator.issue import NkiInstruction, issue
from nki_bn.simulator.machine import current_core
from nki_bn.simulator.numerics import Array, Float32
from nki_bn.simulator.operators import op_name
from nki_bn.simulator.tensor import NkiTensor, require

_FLOATS = ("float8_e4m3", "float8_e5m2", "float16", "bfloat16", "float32")
_INTEGERS = ("int8", "int16", "int32", "uint8", "uint16")
_REDUCTIONS = ("add", "maximum", "minimum", "abs_max", "abs_min")
_STAGES = (
    ("multiply", "add"),
    ("multiply", "subtract"),
    ("multiply", "bypass"),
    ("add", "bypass"),
    ("subtract", "bypass"),
    ("bypass", "bypass"),
)


def exponential(
    dst: NkiTensor,
    src: NkiTensor,
    max_value: Any = 0.0,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: commands = commands.idle,
    reduce_init: Any = 0.0,
    name: str | None = None,
) -> NkiInstruction:
    """``dst = exp(src - max_value)`` in float32 on Vector, and optionally its sums in the accumulators of the lanes.

    ``reduce_cmd`` idle leaves the accumulators undefined (NaN in a strict run), reset_reduce starts from 0, load_reduce
    from ``reduce_init``, reduce from what they hold. They add the float32 results, before these are cast to the dtype
    of ``dst``. ``reduce_res`` reads them out.

    Args:
        dst, src: (P, F) tiles in SBUF or PSUM, at most 4 dimensions; float8_e4m3, float8_e5m2, float16, bfloat16,
            float32, integers of 8, 16 or 32 bits; src also uint32, dst also tfloat32 but not uint32.
        max_value: number, or (P, 1) float32 tile.
        reduce_res: None or (P, 1) tile of a float dtype.
        reduce_init: number or (P, 1) float32 tile with load_reduce, else 0.0.

    Raises:
        TypeError: wrong Python types.
        NkiValidationError: a rule above is broken, or the target is older than gen4.
    """
    opcode = "exponential"
    checks.at_least(opcode, nc_version.gen4)
    operands = Operands(opcode)
    dst, src = operands.pair(dst, src, "src", indirect=True)
    _check_exponential(dst, src)
    largest = operands.column("max_value", max_value, src)
    chosen = command(opcode, reduce_cmd, (commands.idle, commands.reset_reduce, commands.reduce, commands.load_reduce))
    initial = operands.column("reduce_init", reduce_init, src)
    require(
        chosen is commands.load_reduce or (not isinstance(initial, NkiTensor) and initial == 0),
        f"{opcode} reduce_init belongs to reduce_cmd load_reduce, got {reduce_init!r} with {chosen.name}",
    )
    result = operands.result("reduce_res", reduce_res, src)
    require(
        result is None or result.dtype in (*_FLOATS, "tfloat32"),
        f"{opcode} reduce_res must be of a float dtype, got {result!r}",
    )
    accumulation = Accumulation("vector", "add", chosen, result, initial=initial)
    columns = [value for value in (largest, initial) if isinstance(value, NkiTensor)]

    def compute() -> list[Array]:
        values = activation_functions.evaluate("exp", alu.read(src) - checks.operand_values(largest))
        if chosen is commands.idle and current_core().options.strict:
            registers("vector", dst)[...] = np.nan
        return [values, *accumulation.run(dst, values)]

    return issue(
        opcode,
        "vector",
        [dst, *accumulation.results],
        [src, *columns, *operands.indices],
        compute,
        name=name,
        pointers=len(columns),
        **accumulation.attributes,
    )


def _check_exponential(dst: NkiTensor, src: NkiTensor) -> None:
    accepted = {"src": (*_FLOATS, *_INTEGERS, "uint32"), "dst": (*_FLOATS, *_INTEGERS, "tfloat32")}
    for label, tensor in (("src", src), ("dst", dst)):
        require(tensor.ndim <= 4, f"exponential {label} has at most 4 dimensions, got shape {tensor.shape}")
        require(
            tensor.dtype in accepted[label],
            f"exponential {label} is {tensor.dtype}; accepted: {', '.join(accepted[label])}",
        )


def activate2(
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    imm0: Any,
    imm1: Any,
    op0: Any,
    op1: Any,
    relu_param: Any = 0.0,
    reverse0: bool = False,
    reverse1: bool = False,
    reduce_op: Any = None,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: commands = commands.idle,
    name: str | None = None,
) -> NkiInstruction:
    """``dst = op((data op0 imm0) op1 imm1)`` in float32 on Scalar, and optionally a reduction in its accumulators.

    ``reverse0`` and ``reverse1`` swap the operands of their stage. Reset starts the accumulators from the identity of
    ``reduce_op`` (0 for abs_max and infinity for abs_min, which are undocumented).

    Args:
        dst, data: (P, F) tiles in SBUF or PSUM, any dtypes.
        op: an activation function; ``nl.prelu`` has the slope ``relu_param``.
        imm0, imm1: number or (P, 1) tile, of one dtype if both are tiles; not used where the stage is bypassed.
        op0, op1: multiply with add, subtract or bypass; add or subtract with bypass; or bypass twice.
        relu_param: number, or (P, 1) tile.
        reduce_op: None, or add, maximum, minimum, abs_max or abs_min; needed when the command reduces or resets.
        reduce_res: None or (P, 1) tile.
        reduce_cmd: idle, reset, reduce or reset_reduce.

    Raises:
        TypeError: wrong Python types.
        NkiValidationError: a rule above is broken, or the target is older than gen4.
    """
    opcode = "activate2"
    checks.at_least(opcode, nc_version.gen4)
    operands = Operands(opcode)
    dst, data = operands.pair(dst, data, indirect=True)
    function = "prelu" if op_name(opcode, "op", op) == "prelu" else activation_functions.find(opcode, op)
    stages = _stages(operands, data, ((op0, imm0, reverse0), (op1, imm1, reverse1)))
    slope = operands.column("relu_param", relu_param, data, float32_only=False)
    accumulation = _accumulation(operands, data, reduce_op, reduce_res, reduce_cmd)
    columns = [column for stage in stages for column in stage.columns]
    columns += [slope] if isinstance(slope, NkiTensor) else []

    def compute() -> list[Array]:
        values = alu.read(data)
        for stage in stages:
            values = stage.apply(values)
        values = _prelu(values, slope) if function == "prelu" else activation_functions.evaluate(function, values)
        return [values, *accumulation.run(dst, values)]

    return issue(
        opcode,
        "scalar",
        [dst, *accumulation.results],
        [data, *columns, *operands.indices],
        compute,
        name=name,
        function=function,
        pointers=len(columns),
        **accumulation.attributes,
    )


def _stages(
    operands: Operands, data: NkiTensor, given: tuple[tuple[Any, Any, bool], tuple[Any, Any, bool]]
) -> list[alu.Stage]:
    """The stages (operator, operand, reversed) that are not bypassed."""
    names = tuple(op_name("activate2", f"op{place}", item[0]) for place, item in enumerate(given))
    require(
        names in _STAGES,
        f"activate2 op0 and op1 are nl.{names[0]} and nl.{names[1]}; accepted: "
        f"{', '.join(f'{first} and {second}' for first, second in _STAGES)}",
    )
    stages = [
        alu.stage(operands, (f"op{place}", f"imm{place}"), op, imm, data, reverse=reverse, float32_only=False)
        for place, (op, imm, reverse) in enumerate(given)
        if names[place] != "bypass"
    ]
    dtypes = {column.dtype for stage in stages for column in stage.columns}
    require(len(dtypes) < 2, f"activate2 imm0 and imm1 must have one dtype, got {', '.join(sorted(dtypes))}")
    return stages


def _accumulation(operands: Operands, data: NkiTensor, reduce_op: Any, reduce_res: Any, given: Any) -> Accumulation:
    chosen = command("activate2", given, (commands.idle, commands.reset, commands.reduce, commands.reset_reduce))
    require(reduce_op is not None or chosen is commands.idle, f"activate2 reduce_cmd {chosen.name} needs a reduce_op")
    operator = "add"
    if reduce_op is not None:
        operator = alu.find_reduction("activate2", "reduce_op", reduce_op, _REDUCTIONS).name
    return Accumulation("scalar", operator, chosen, operands.result("reduce_res", reduce_res, data))


def _prelu(values: Array, slope: Any) -> Float32:
    return np.where(values > 0, values, values * checks.operand_values(slope))
