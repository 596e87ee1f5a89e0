# SPDX-License-Identifier: Apache-2.0
"""Instructions of the GpSimd engine that work on index patterns."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from nki_bn.simulator.isa import alu, checks
from nki_bn.simulator.isa.operands import Operands
from nki_bn.simulator.isa.registers import VirtualRegister
from nki_bn.simulator.issue import NkiInstruction, issue, raw, read_index
from nki_bn.simulator.numerics import Array, cast
from nki_bn.simulator.operators import Sentinel
from nki_bn.simulator.tensor import NkiTensor, require

_MAX_PAIRS = 4
Pattern = Sequence[Sequence[int]]


def iota(
    dst: NkiTensor,
    pattern: Pattern,
    offset: int | VirtualRegister = 0,
    channel_multiplier: int = 0,
    name: str | None = None,
) -> NkiInstruction:
    """Fill ``dst`` with ``offset + partition * channel_multiplier + sum(index_k * step_k)``.

    Partitions count from 0 at the first of ``dst``. The arithmetic is int32 (an overflow, which is undocumented,
    wraps); the result is cast to the dtype of ``dst``, where int32 and uint32 keep all bits.

    Args:
        dst: (P, F) tile in SBUF.
        pattern: up to four pairs [step, count], outermost first; the counts multiply to F.
        offset: integer or register.

    Raises:
        TypeError: wrong Python types.
        NkiValidationError: ``dst`` is not in SBUF, or the pattern is too long or of another size.
    """
    operands = Operands("iota")
    dst = operands.tile("dst", dst, checks.SBUF)
    steps = _check_pattern("iota", pattern, offset, channel_multiplier, dst)

    def compute() -> list[Array]:
        values = _affine(steps, offset, channel_multiplier, dst.shape[0])
        return [values.view(np.uint32) if dst.dtype == "uint32" else values]

    return issue("iota", "gpsimd", [dst], operands.indices, compute, name=name)


def affine_select(
    dst: NkiTensor,
    pattern: Pattern,
    channel_multiplier: int,
    on_true_tile: NkiTensor,
    on_false_value: Any,
    cmp_op: Any = Sentinel("equal"),  # noqa: B008 - an operator name, never changed
    offset: int | VirtualRegister = 0,
    name: str | None = None,
) -> NkiInstruction:
    """``dst = on_true_tile where (affine cmp_op 0) else on_false_value``, with the affine value of :func:`iota`.

    Elements keep their bits when the dtypes are equal, else they go through float32.

    Args:
        dst, on_true_tile: (P, F) tiles in SBUF, any dtypes.
        pattern, channel_multiplier, offset: as in :func:`iota`.
        on_false_value: number, used as float32.
        cmp_op: a comparison: equal, not_equal, greater_equal, greater, less_equal or less.

    Raises:
        TypeError: wrong Python types.
        NkiValidationError: a tile is not in SBUF, layouts or the pattern do not fit, or ``cmp_op`` is no comparison.
    """
    operands = Operands("affine_select")
    dst, source = operands.tile("dst", dst, checks.SBUF), operands.tile("on_true_tile", on_true_tile, checks.SBUF)
    checks.same_layout("affine_select", on_true_tile=source, dst=dst)
    steps = _check_pattern("affine_select", pattern, offset, channel_multiplier, dst)
    operator = alu.find("affine_select", "cmp_op", cmp_op).name
    require(
        operator in alu.COMPARISONS,
        f"affine_select cmp_op nl.{operator} is no comparison; accepted: {', '.join(sorted(alu.COMPARISONS))}",
    )
    checks.number("affine_select", "on_false_value", on_false_value)

    def compute() -> list[Array]:
        mask = alu.evaluate(operator, _affine(steps, offset, channel_multiplier, dst.shape[0]), np.int32(0))
        values = raw(source) if source.dtype == dst.dtype else alu.read(source)
        fill = cast(np.asarray(on_false_value, np.float32), values.dtype)
        return [np.where(mask, values, fill)]

    return issue("affine_select", "gpsimd", [dst], [source, *operands.indices], compute, name=name, op=operator)


def _check_pattern(instruction: str, pattern: Pattern, offset: Any, channel_multiplier: Any, dst: NkiTensor) -> Pattern:
    """The pairs of ``pattern``, which the kernel may change afterwards.

    Checked are: integers everywhere, at most four pairs, and as many elements as ``dst`` has per partition.
    """
    if not isinstance(pattern, (list, tuple)) or not all(isinstance(pair, (list, tuple)) for pair in pattern):
        raise TypeError(f"{instruction} pattern must be a list of pairs [step, count], got {pattern!r}")
    require(
        len(pattern) <= _MAX_PAIRS and all(len(pair) == 2 for pair in pattern),
        f"{instruction} pattern must have at most {_MAX_PAIRS} pairs [step, count], got {pattern!r}",
    )
    numbers = [number for pair in pattern for number in pair] + [channel_multiplier]
    if not isinstance(offset, VirtualRegister):
        numbers.append(offset)
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, (int, np.integer)):
            raise TypeError(f"{instruction} pattern, offset and channel_multiplier must be integers, got {number!r}")
    size = prod(count for _, count in pattern)
    require(
        size == checks.columns(dst) and all(count >= 1 for _, count in pattern),
        f"{instruction} pattern {pattern!r} has {size} elements, dst has {checks.columns(dst)} per partition",
    )
    return tuple((step, count) for step, count in pattern)


def _affine(pattern: Pattern, offset: int | VirtualRegister, channel_multiplier: int, partitions: int) -> Array:
    """The affine values, int32 of shape (partitions, elements)."""
    start = read_index(offset) if isinstance(offset, VirtualRegister) else int(offset)
    values = np.full(1, start, np.int64)
    for step, count in pattern:
        values = (values[:, None] + np.arange(count, dtype=np.int64) * int(step)).reshape(-1)
    lanes = np.arange(partitions, dtype=np.int64)[:, None] * int(channel_multiplier)
    return (lanes + values).astype(np.int32)
