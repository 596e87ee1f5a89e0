# SPDX-License-Identifier: Apache-2.0
"""What has to move at least, and how long that takes at the DMA limit."""

from __future__ import annotations

from nki_bn.hardware import load_timing
from nki_bn.problem import BackwardProblem, Problem

_COLUMN_BYTES = 4
_MASK_BYTES = 1


def minimum_bytes(problem: Problem) -> int:
    """Bytes between HBM and the chip when every element that is read or made moves once.

    Backward: dy, x, dx and the columns mean, var, gamma, dgamma, dbeta, with a recomputed mask beta too. Forward: x, y
    and gamma, beta, running mean and variance; in training also both statistics and the new running ones. A stored mask
    and a residual come on top.
    """
    elements, columns = (_backward if isinstance(problem, BackwardProblem) else _forward)(problem)
    per_element = elements * problem.itemsize + _MASK_BYTES * (problem.relu == "mask")
    return problem.channels * (problem.count * per_element + columns * _COLUMN_BYTES)


def roofline_us(problem: Problem) -> float:
    """Microseconds of the minimum at the DMA limit of the cores.

    Raises:
        ValueError: the target has no timing parameters.
    """
    limits = load_timing(problem.target).roofline
    limit = limits.core if problem.lnc == 1 else limits.pair
    return minimum_bytes(problem) / limit / 1e3


def _backward(problem: Problem) -> tuple[int, int]:
    """Elements like x per element of x, and columns."""
    return 3 + problem.residual, 5 + (problem.relu == "recompute")


def _forward(problem: Problem) -> tuple[int, int]:
    return 2 + problem.residual, 8 if problem.training else 4
