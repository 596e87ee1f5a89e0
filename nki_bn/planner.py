# SPDX-License-Identifier: Apache-2.0
"""From a problem to a plan: how a kernel will work, decided on the host."""

from __future__ import annotations

from nki_bn.hardware import load_target
from nki_bn.kernels.plan import BackwardPlan
from nki_bn.kernels.sizing import staged_plan
from nki_bn.problem import OUTPUTS, Problem


def plan_backward(problem: Problem) -> BackwardPlan:
    """The plan of a backward pass: strategy ``staged``, the widest tiles that fit into SBUF of the target."""
    need = (*(name in problem.need for name in OUTPUTS), False)
    shape = (problem.batch, problem.channels, problem.spatial)
    budget = load_target(problem.target).sbuf_partition_bytes
    plan: BackwardPlan = staged_plan(
        shape, problem.dtype, problem.relu, problem.lnc, budget, training=problem.training, need=need
    )
    return plan
