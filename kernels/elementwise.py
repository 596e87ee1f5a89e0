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


def pre_activation(dst: nl.NkiTensor, x: nl.NkiTensor, residual: nl.NkiTensor | None, columns: nl.NkiTensor) -> None:
    """dst = (x - hi)*scale + shift [+ residual], in float32: the value under the ReLU, before rounding."""
    scaled(dst, x, columns)
    shift = column(columns, SHIFT)
    if residual == None:
        nisa.tensor_scalar(dst=dst, data=dst, op0=nl.add, operand0=shift)
    else:
        nisa.scalar_tensor_tensor(dst=dst, data=dst, op0=nl.add, operand0=shift, op1=nl.add, operand1=residual)


def passed(dst: nl.NkiTensor, value: nl.NkiTensor) -> None:
    """dst = 1 where the ReLU lets a value through (value > 0), else 0."""
    nisa.tensor_scalar(dst=dst, data=value, op0=nl.greater, operand0=0.0)


def stopped(dst: nl.NkiTensor, value: nl.NkiTensor) -> None:
    """dst = 1 where the ReLU gives 0 (value <= 0), else 0; a NaN is not stopped."""
    nisa.tensor_scalar(dst=dst, data=value, op0=nl.less_equal, operand0=0.0)


def rectify(y: nl.NkiTensor, value: nl.NkiTensor, mask: nl.NkiTensor | None, zero: nl.NkiTensor) -> None:
    """y = value through the ReLU, a NaN stays a NaN; the mask, if there is one; ``zero`` is uint8 scratch."""
    if mask != None:
        passed(mask, value)
    stopped(zero, value)
    nisa.select_reduce(dst=y, predicate=zero, on_true=value, on_false=0.0, reverse_pred=True)
