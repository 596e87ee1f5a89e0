# SPDX-License-Identifier: Apache-2.0
"""Instructions of the Scalar engine: activation functions with an affine input and an accumulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nki_bn.simulator.isa import activation_functions, alu, checks
from nki_bn.simulator.isa.accumulators import Accumulation, command
from nki_bn.simulator.isa.enums import nc_version
from nki_bn.simulator.isa.enums import reduce_cmd as commands
from nki_bn.simulator.isa.operands import Operands
from nki_bn.simulator.issue import NkiInstruction, issue
from nki_bn.simulator.numerics import Array, Float32
from nki_bn.simulator.tensor import NkiTensor, require

_COMMANDS = (commands.idle, commands.reset, commands.reduce, commands.reset_reduce)


def activation(
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    bias: Any = None,
    scale: Any = 1.0,
    reduce_op: Any = None,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: commands = commands.idle,
    name: str | None = None,
) -> NkiInstruction:
    """``dst = op(data * scale + bias)`` in float32, and optionally sums of it in the accumulators of the Scalar engine.

    ``reduce_cmd`` reset and reset_reduce zero the accumulators of the lanes, reduce and reset_reduce then add the
    float32 results (before they are cast to the dtype of ``dst``); ``reduce_res`` reads the accumulators out, after
    ``dst`` is written.

    Args:
        dst, data: (P, F) tiles in SBUF or PSUM, any dtypes.
        op: an activation function.
        bias: None, (P, 1) tile of any dtype but tfloat32, or (from gen3) a number.
        scale: number, or (P, 1) float32 tile.
        reduce_op: None or ``nl.add``; needed when the command reduces.
        reduce_res: None or (P, 1) tile.

    Raises:
        TypeError: wrong Python types.
        NkiValidationError: a rule above is broken.
        UnsupportedError: the slope of ``nl.prelu`` is undocumented.
    """
    operands = Operands("activation")
    form = _form(operands, dst, op, data, bias, scale)
    chosen = command("activation", reduce_cmd, _COMMANDS)
    reducing = chosen in (commands.reduce, commands.reset_reduce)
    require(reduce_op is not None or not reducing, f"activation reduce_cmd {chosen.name} needs reduce_op=nl.add")
    if reduce_op is not None:
        alu.find_reduction("activation", "reduce_op", reduce_op, ("add",))
    result = operands.result("reduce_res", reduce_res, form.data)
    return form.issue(Accumulation("scalar", "add", chosen, result), name)


def activation_reduce(
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    reduce_op: Any,
    reduce_res: NkiTensor | None,
    bias: Any = None,
    scale: Any = 1.0,
    name: str | None = None,
) -> NkiInstruction:
    """:func:`activation` that zeroes the accumulators, adds, and reads them out into ``reduce_res`` (None: keeps them).

    Arguments and errors are those of :func:`activation`; ``reduce_op`` must be ``nl.add``.
    """
    operands = Operands("activation_reduce")
    form = _form(operands, dst, op, data, bias, scale)
    alu.find_reduction("activation_reduce", "reduce_op", reduce_op, ("add",))
    result = operands.result("reduce_res", reduce_res, form.data)
    return form.issue(Accumulation("scalar", "add", commands.reset_reduce, result), name)


@dataclass(frozen=True)
class _Form:
    """``dst = function(data * scale + bias)``, checked."""

    operands: Operands
    dst: NkiTensor
    function: str
    data: NkiTensor
    bias: Any
    scale: Any

    def issue(self, accumulation: Accumulation, name: str | None) -> NkiInstruction:
        """Execute it, the results going into ``accumulation`` too."""
        columns = [value for value in (self.scale, self.bias) if isinstance(value, NkiTensor)]

        def compute() -> list[Array]:
            values = activation_functions.evaluate(self.function, self._input())
            return [values, *accumulation.run(self.dst, values)]

        return issue(
            self.operands.instruction,
            "scalar",
            [self.dst, *accumulation.results],
            [self.data, *columns, *self.operands.indices],
            compute,
            name=name,
            function=self.function,
            pointers=len(columns),
            **accumulation.attributes,
        )

    def _input(self) -> Float32:
        values = alu.read(self.data)
        scaled = isinstance(self.scale, NkiTensor) or self.scale != 1
        if scaled:
            values = np.multiply(values, checks.operand_values(self.scale))
        if self.bias is None:
            return values
        return np.add(values, checks.operand_values(self.bias), out=values if scaled else None)


def _form(operands: Operands, dst: NkiTensor, op: Any, data: NkiTensor, bias: Any, scale: Any) -> _Form:
    dst, data = operands.pair(dst, data, indirect=True)
    function = activation_functions.find(operands.instruction, op)
    scale = operands.column("scale", scale, data)
    if bias is not None:
        bias = operands.column("bias", bias, data, float32_only=False)
        _check_bias(operands.instruction, function, bias)
    return _Form(operands, dst, function, data, bias, scale)


def _check_bias(instruction: str, function: str, bias: Any) -> None:
    pointer = isinstance(bias, NkiTensor)
    require(
        pointer or checks.version() > nc_version.gen2,
        f"{instruction} bias must be a tile of shape (P, 1) on gen2, got the number {bias!r}",
    )
    require(not pointer or bias.dtype != "tfloat32", f"{instruction} bias is tfloat32; accepted: any other dtype")
    require(
        function != "reciprocal" or checks.version() > nc_version.gen2,
        f"{instruction} op nl.reciprocal takes no bias on gen2",
    )
