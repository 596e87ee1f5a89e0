# SPDX-License-Identifier: Apache-2.0
"""range_select: keep the elements whose position lies between two bounds of their partition (attention masks)."""

from __future__ import annotations

from typing import Any

import numpy as np

from nki_bn.simulator import dtypes
from nki_bn.simulator.isa import alu, checks
from nki_bn.simulator.isa.accumulators import row_maximum
from nki_bn.simulator.isa.enums import nc_version
from nki_bn.simulator.isa.enums import reduce_cmd as commands
from nki_bn.simulator.isa.operands import Operands
from nki_bn.simulator.issue import NkiInstruction, issue
from nki_bn.simulator.numerics import Array
from nki_bn.simulator.operators import Sentinel
from nki_bn.simulator.tensor import NkiTensor, integer, require

_FILL = float(np.finfo(np.float32).min)
_COMPARISONS = ("equal", "less", "less_equal", "greater", "greater_equal")
# Float32 counts exactly up to here.
_MOST = 2**24


def range_select(
    dst: NkiTensor,
    on_true_tile: NkiTensor,
    comp_op0: Any,
    comp_op1: Any,
    bound0: NkiTensor,
    bound1: NkiTensor,
    reduce_cmd: commands = commands.reset_reduce,
    reduce_res: NkiTensor | None = None,
    reduce_op: Any = Sentinel("maximum"),  # noqa: B008 - an operator name, never changed
    range_start: int = 0,
    on_false_value: float = _FILL,
    name: str | None = None,
) -> NkiInstruction:
    """``dst = on_true_tile where (i comp_op0 bound0) and (i comp_op1 bound1) else on_false_value``, on Vector.

    ``i`` is ``range_start`` plus the position among the flattened free elements; the comparison is float32, with all
    bits of the bounds. The maximum of every partition, before the cast to the dtype of ``dst``, goes into Vector's
    accumulators: reset_reduce starts from -inf, reduce from what they hold. From gen3.

    Args:
        dst: (P, F) tile in SBUF or PSUM.
        on_true_tile: (P, F) tile of a float dtype in SBUF or PSUM.
        comp_op0, comp_op1: equal, less, less_equal, greater or greater_equal.
        bound0, bound1: (P, 1) float32 tiles.
        reduce_res: None or (P, 1) tile, written after ``dst``.
        reduce_op: ``nl.maximum``.
        range_start: integer; all positions stay within 2^24.
        on_false_value: the smallest float32 number; in a narrower ``dst`` it becomes -inf.

    Raises:
        TypeError: wrong Python types.
        NkiValidationError: a rule above is broken.
    """
    opcode = "range_select"
    checks.at_least(opcode, nc_version.gen3)
    operands = Operands(opcode)
    dst, data = operands.tile("dst", dst), operands.tile("on_true_tile", on_true_tile)
    checks.same_layout(opcode, on_true_tile=data, dst=dst)
    checks.check_dtypes(opcode, (*dtypes.FLOATS, "tfloat32"), on_true_tile=data)
    comparisons = _comparison("comp_op0", comp_op0), _comparison("comp_op1", comp_op1)
    bounds = [_bound(operands, key, value, data) for key, value in (("bound0", bound0), ("bound1", bound1))]
    _check_fill(on_false_value)
    positions = _positions(range_start, checks.columns(data))
    accumulation = row_maximum(
        operands, reduce_op, reduce_cmd, reduce_res, data, (commands.reset_reduce, commands.reduce)
    )

    def compute() -> list[Array]:
        first, second = (
            alu.evaluate(comparison, positions, alu.read(bound))
            for comparison, bound in zip(comparisons, bounds, strict=True)
        )
        values = np.where(first & second, alu.read(data), np.float32(_FILL))
        return [values, *accumulation.run(dst, values)]

    return issue(
        opcode,
        "vector",
        [dst, *accumulation.results],
        [data, *bounds, *operands.indices],
        compute,
        name=name,
        ops=comparisons,
        pointers=len(bounds),
        **accumulation.attributes,
    )


def _comparison(argument: str, op: Any) -> str:
    name = alu.find("range_select", argument, op).name
    require(
        name in _COMPARISONS, f"range_select {argument} nl.{name} is not accepted; accepted: {', '.join(_COMPARISONS)}"
    )
    return name


def _bound(operands: Operands, argument: str, value: Any, data: NkiTensor) -> NkiTensor:
    if not isinstance(value, NkiTensor):
        raise TypeError(f"range_select {argument} must be a tile of shape ({data.shape[0]}, 1), got {value!r}")
    bound: NkiTensor = operands.column(argument, value, data)
    return bound


def _check_fill(value: Any) -> None:
    checks.number("range_select", "on_false_value", value)
    with np.errstate(over="ignore"):
        require(
            float(np.float32(value)) == _FILL,
            f"range_select on_false_value must be the smallest float32 number, {np.float32(_FILL)}, got {value!r}",
        )


def _positions(range_start: Any, columns: int) -> Array:
    start = integer(range_start, "range_select range_start")
    require(
        -_MOST <= start and start + columns <= _MOST,
        f"range_select range_start {start} with {columns} elements per partition leaves the integers of float32, "
        f"-{_MOST} to {_MOST}",
    )
    return np.arange(start, start + columns, dtype=np.float32)[None]
