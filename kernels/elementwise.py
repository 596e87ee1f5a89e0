# SPDX-License-Identifier: Apache-2.0
"""The passes over elements that forward and backward have in common.

A mask that the backward recomputes equals the forward's on any hardware, because both run these same instructions.
"""

import nki.isa as nisa
import nki.language as nl

from nki_bn.kernels.columns import HI, SCALE, SHIFT, column


def scaled(dst: nl.NkiTensor, x: nl.NkiTensor, columns: nl.NkiTensor) -> None:
    """dst = (x - hi)*scale, in float32."""
    nisa.tensor_scalar(
        dst=dst,
        data=x,
        op0=nl.subtract,
        operand0=column(columns, HI),
        op1=nl.multiply,
        operand1=column(columns, SCALE),
    )


def pre_activation(
    dst: nl.NkiTensor,
    x: nl.NkiTensor,
    residual: nl.NkiTensor | None,
    columns: nl.NkiTensor,
    mask: nl.NkiTensor | None = None,
) -> None:
    """dst = (x - hi)*scale + shift [+ residual], in float32: the value under the ReLU, before rounding; its mask."""
    scaled(dst, x, columns)
    if residual == None:
        shift = column(columns, SHIFT)
        if mask != None:
            passed_shifted(mask, dst, shift)
        nisa.tensor_scalar(dst=dst, data=dst, op0=nl.add, operand0=shift)
    else:
        add_residual(dst, residual, columns)
        if mask != None:
            passed(mask, dst)


def recompute_mask(
    mask: nl.NkiTensor, scratch: nl.NkiTensor, x: nl.NkiTensor, residual: nl.NkiTensor | None, columns: nl.NkiTensor
) -> None:
    """The mask of :func:`pre_activation` alone; ``scratch`` is float32."""
    scaled(scratch, x, columns)
    gate(mask, scratch, residual, columns)


def gate(mask: nl.NkiTensor, value: nl.NkiTensor, residual: nl.NkiTensor | None, columns: nl.NkiTensor) -> None:
    """The mask from value = (x - hi)*scale, which may be overwritten."""
    if residual == None:
        passed_shifted(mask, value, column(columns, SHIFT))
    else:
        add_residual(value, residual, columns)
        passed(mask, value)


def add_residual(value: nl.NkiTensor, residual: nl.NkiTensor, columns: nl.NkiTensor) -> None:
    """value += shift + residual, from left to right."""
    shift = column(columns, SHIFT)
    nisa.scalar_tensor_tensor(dst=value, data=value, op0=nl.add, operand0=shift, op1=nl.add, operand1=residual)


def passed(mask: nl.NkiTensor, value: nl.NkiTensor) -> None:
    """mask = 1 where the ReLU lets a value through (value > 0), else 0."""
    nisa.tensor_scalar(dst=mask, data=value, op0=nl.greater, operand0=0.0)


def passed_shifted(mask: nl.NkiTensor, value: nl.NkiTensor, shift: nl.NkiTensor) -> None:
    """mask = 1 where the ReLU lets value + shift through (it is above 0), else 0."""
    nisa.tensor_scalar(dst=mask, data=value, op0=nl.add, operand0=shift, op1=nl.greater, operand1=0.0)


def stopped(dst: nl.NkiTensor, value: nl.NkiTensor) -> None:
    """dst = 1 where the ReLU gives 0 (value <= 0), else 0; a NaN is not stopped."""
    nisa.tensor_scalar(dst=dst, data=value, op0=nl.less_equal, operand0=0.0)


def rectify(y: nl.NkiTensor, value: nl.NkiTensor, zero: nl.NkiTensor) -> None:
    """y = value through the ReLU, a NaN stays a NaN; ``zero`` is uint8 scratch."""
    stopped(zero, value)
    nisa.select_reduce(dst=y, predicate=zero, on_true=value, on_false=0.0, reverse_pred=True)
