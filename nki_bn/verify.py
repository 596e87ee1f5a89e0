# SPDX-License-Identifier: Apache-2.0
"""Running a kernel and comparing what it returns with the float64 reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nki_bn import execute, ops, reference, tolerances
from nki_bn.comparison import Comparison, compare
from nki_bn.kernels.plan import BackwardPlan
from nki_bn.planner import plan_backward
from nki_bn.problem import OUTPUTS, Array, BackwardCase, Problem
from nki_bn.simulator import RunOptions
from nki_bn.tolerances import Arithmetic

DEFAULT_OPTIONS = RunOptions(numerics="trn2")


@dataclass(frozen=True)
class Verification:
    """What was run, and the verdict on each output."""

    problem: Problem
    arithmetic: Arithmetic
    comparisons: tuple[Comparison, ...]

    @property
    def ok(self) -> bool:
        """Whether all outputs agree with the reference."""
        return all(comparison.ok for comparison in self.comparisons)


def verify_backward(
    case: BackwardCase, request: ops.BackwardRequest, options: RunOptions = DEFAULT_OPTIONS
) -> Verification:
    """Run ``request``, which was prepared from ``case``, under these options of the simulator and judge the outputs."""
    plan = plan_backward(request.problem)
    with execute.simulation(options):
        outputs = ops.run(request, plan)
    arithmetic = arithmetic_of(request.problem, plan, options)
    return Verification(request.problem, arithmetic, judge_backward(case, outputs, arithmetic))


def judge_backward(
    case: BackwardCase, outputs: Sequence[Array | None], arithmetic: Arithmetic
) -> tuple[Comparison, ...]:
    """Compare (dx, dgamma, dbeta) with the reference of ``case``; None is not judged."""
    mask = case.relu_mask if case.fuse_relu else None
    undecided: Array = np.zeros(case.x.shape, np.bool_)
    if case.relu == "recompute":
        z = reference.pre_activation(case.x, case.mean, case.var, case.gamma, case.beta, case.eps)
        mask = z.value > 0
        undecided = tolerances.near_kink(case, z, arithmetic)
    want = reference.batch_norm_bwd(
        case.dy, case.x, case.mean, case.var, case.gamma, case.eps, mask, case.training
    )
    allowances = tolerances.backward(case, want, arithmetic, undecided)
    return tuple(
        compare(name, got, getattr(want, name).value, allowances[name])
        for name, got in zip(OUTPUTS, outputs, strict=True)
        if got is not None
    )


def arithmetic_of(problem: Problem, plan: BackwardPlan, options: RunOptions) -> Arithmetic:
    """What decides the tolerances of a run; a device computes as the "trn2" mode does."""
    numerics = options.numerics if execute.which_nki().kind == "embedded" else "trn2"
    staged = any(buffer.name == "staged" for buffer in plan.buffers)
    return Arithmetic(problem.dtype, numerics, options.accumulate, staged)


def table(comparisons: Sequence[Comparison]) -> str:
    """The verdicts, aligned, one line per output."""
    lines = [("output", "max error", "tolerance", "worst ratio", "bias", "not judged", "ok")]
    for row in comparisons:
        bias = "-" if row.bias is None else f"{row.bias:.3f}"
        figures = (f"{row.max_error:.3e}", f"{row.tolerance:.3e}", f"{row.worst_ratio:.3f}", bias, str(row.excluded))
        lines.append((row.output, *figures, "ok" if row.ok else "NOT OK"))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)
