# SPDX-License-Identifier: Apache-2.0
"""Running a kernel and comparing what it returns with the float64 reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nki_bn import execute, ops, reference, tolerances
from nki_bn.comparison import Comparison, compare, compare_mask
from nki_bn.kernels.plan import ResidentPlan
from nki_bn.planner import plan_backward, plan_forward
from nki_bn.predict import Plan
from nki_bn.problem import GRADIENTS, Array, BackwardCase, ForwardCase, Problem, averaging_factor
from nki_bn.reference import BackwardReference
from nki_bn.requests import BackwardRequest, ForwardRequest
from nki_bn.simulator import RunOptions
from nki_bn.tolerances import Allowance, Arithmetic

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


def verify_forward(case: ForwardCase, request: ForwardRequest, options: RunOptions = DEFAULT_OPTIONS) -> Verification:
    """Run ``request``, which was prepared from ``case``, under these options of the simulator and judge the outputs."""
    plan = plan_forward(request.problem)
    with execute.simulation(options):
        outputs = ops.run_forward(request, plan)
    arithmetic = arithmetic_of(request.problem, plan, options)
    return Verification(request.problem, arithmetic, judge_forward(case, outputs, arithmetic))


def verify_backward(
    case: BackwardCase, request: BackwardRequest, options: RunOptions = DEFAULT_OPTIONS
) -> Verification:
    """Run ``request``, which was prepared from ``case``, under these options of the simulator and judge the outputs."""
    plan = plan_backward(request.problem)
    with execute.simulation(options):
        outputs = ops.run_backward(request, plan)
    arithmetic = arithmetic_of(request.problem, plan, options)
    return Verification(request.problem, arithmetic, judge_backward(case, outputs, arithmetic))


def judge_forward(case: ForwardCase, outputs: ops.BatchNormForward, arithmetic: Arithmetic) -> tuple[Comparison, ...]:
    """Compare the outputs with the reference of ``case``.

    The statistics are compared with those of x, everything else with the reference at the statistics returned. With
    frozen statistics all four are the running ones, bit for bit.
    """
    given = (outputs.mean, outputs.var)
    want = reference.batch_norm_fwd(case.x, case.gamma, case.beta, case.eps, case.fuse_relu, case.residual, given)
    error = tolerances.forward(case, want, arithmetic)
    rows = [compare("y", outputs.y, want.y, tolerances.everywhere(error))]
    rows += _judge_batch(case, outputs, arithmetic) if case.training else _judge_copies(case, outputs)
    if outputs.relu_mask is not None:
        rows.append(compare_mask("relu_mask", outputs.relu_mask, want.z.value > 0, np.abs(want.z.value) < error))
    return tuple(rows)


def _judge_batch(case: ForwardCase, outputs: ops.BatchNormForward, arithmetic: Arithmetic) -> list[Comparison]:
    """The statistics of the batch, and what became of the running ones."""
    mean, var = reference.statistics(case.x)
    allowed = tolerances.statistics(case.x, mean, var, arithmetic)
    rows = [compare("mean", outputs.mean, mean, allowed["mean"]), compare("var", outputs.var, var, allowed["var"])]
    count = case.x.size // case.x.shape[1]
    momentum = averaging_factor(case.momentum, case.num_batches_tracked, used=False) if count else 0.0
    unbiased = outputs.var.astype(np.float64) * (count / max(1, count - 1))
    for name, batch in (("running_mean", outputs.mean), ("running_var", unbiased)):
        old = getattr(case, name)
        if old is not None:
            want = reference.running(old, batch, momentum)
            rows.append(compare(name, getattr(outputs, name), want.value, tolerances.running(want)))
    return rows


def _judge_copies(case: ForwardCase, outputs: ops.BatchNormForward) -> list[Comparison]:
    """With frozen statistics all four are the running ones, bit for bit."""
    exact = tolerances.everywhere(np.zeros(case.x.shape[1]))
    names = {"mean": "running_mean", "var": "running_var", "running_mean": "running_mean", "running_var": "running_var"}
    return [
        compare(name, getattr(outputs, name), getattr(case, given).astype(np.float64), exact)
        for name, given in names.items()
    ]


def judge_backward(
    case: BackwardCase, outputs: Sequence[Array | None], arithmetic: Arithmetic
) -> tuple[Comparison, ...]:
    """Compare (dx, dgamma, dbeta), and dresidual if there, with the reference of ``case``; None is not judged."""
    mask = case.relu_mask if case.fuse_relu else None
    undecided: Array = np.zeros(case.x.shape, np.bool_)
    if case.relu == "recompute":
        z = reference.pre_activation(case.x, case.mean, case.var, case.gamma, case.beta, case.eps, case.residual)
        mask = z.value > 0
        undecided = tolerances.near_kink(case, z, arithmetic)
    want = reference.batch_norm_bwd(case.dy, case.x, case.mean, case.var, case.gamma, case.eps, mask, case.training)
    return judge_gradients(outputs, want, tolerances.backward(case, want, arithmetic, undecided))


def judge_gradients(
    outputs: Sequence[Array | None], want: BackwardReference, allowances: dict[str, Allowance]
) -> tuple[Comparison, ...]:
    """Compare (dx, dgamma, dbeta), and dresidual if there, with ``want``; None is not judged."""
    return tuple(
        compare(name, got, getattr(want, name).value, allowances[name])
        for name, got in zip(GRADIENTS, outputs, strict=False)
        if got is not None
    )


def arithmetic_of(problem: Problem, plan: Plan, options: RunOptions) -> Arithmetic:
    """What decides the tolerances of a run; a device computes as the "trn2" mode does."""
    numerics = options.numerics if execute.which_nki().kind == "embedded" else "trn2"
    names = {buffer.name for buffer in plan.buffers}
    tensor = isinstance(plan, ResidentPlan) and plan.tensor_sums and plan.eighths > 0
    narrow = "rounded" in names
    return Arithmetic(problem.dtype, numerics, options.accumulate, "staged" in names, tensor, is_fast(plan), narrow)


def is_fast(plan: Plan) -> bool:
    """Whether a plan rounds the x-term of dx to the dtype of x."""
    return isinstance(plan, ResidentPlan) and plan.fast


def table(comparisons: Sequence[Comparison]) -> str:
    """The verdicts, aligned, one line per output."""
    lines = [("output", "max error", "worst element", "its bound", "ratio", "bias", "not judged", "ok")]
    for row in comparisons:
        bias = "-" if row.bias is None else f"{row.bias:.3f}"
        errors = (f"{row.max_error:.3e}", f"{row.worst_error:.3e}", f"{row.tolerance:.3e}", f"{row.worst_ratio:.3f}")
        figures = (*errors, bias, str(row.excluded))
        lines.append((row.output, *figures, "ok" if row.ok else "NOT OK"))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)
