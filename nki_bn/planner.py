# SPDX-License-Identifier: Apache-2.0
"""From a problem to a plan: how a kernel will work, decided on the host.

Every strategy offers candidates that fit into SBUF; the one with the least predicted time is the plan. See
docs/planner.md.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from nki_bn.fitting import fits, require_fit
from nki_bn.hardware import load_target
from nki_bn.kernels.plan import (
    BackwardPlan,
    ForwardPlan,
    ResidentForwardPlan,
    ResidentPlan,
    TransposedForwardPlan,
    TransposedPlan,
)
from nki_bn.kernels.sizing import staged_plan, two_read_plan
from nki_bn.predict import INSTRUCTIONS, Candidate, Plan, predict
from nki_bn.problem import (
    GRADIENTS,
    OUTPUTS,
    BackwardProblem,
    ForwardProblem,
    Problem,
    require_statistics,
    require_values,
)
from nki_bn.resident_forward_planner import resident_forward_candidates
from nki_bn.resident_planner import resident_candidates
from nki_bn.transposed_planner import SHORT_ROW, transposed_candidates

# Problems whose candidates are remembered.
_REMEMBERED = 256
# By so much another strategy has to be predicted faster than tile after tile: by less it may be slower.
DOUBT = 0.01


def plan(problem: Problem) -> Plan:
    """The plan of a forward or a backward pass.

    Raises:
        TypeError: the problem is neither a ForwardProblem nor a BackwardProblem.
        ValueError: a size is 0, so that there is nothing to plan; a forward in training has one value per channel; or
            nothing fits into SBUF.
    """
    return candidates(problem)[0].plan


def candidates(problem: Problem) -> tuple[Candidate, ...]:
    """All plans that were predicted, the chosen one first; errors as for :func:`plan`.

    Plans of more than ``INSTRUCTIONS`` come last, the shortest of them first: one is chosen when nothing else fits. A
    backward is planned as if it made ``OUTPUTS``, so that each output has the same bits whatever else is needed.
    """
    # Before they are looked up: what is no problem need not have a hash.
    if not isinstance(problem, ForwardProblem | BackwardProblem):
        raise TypeError(f"problem must be a ForwardProblem or a BackwardProblem, got {type(problem).__name__}")
    require_values(problem)
    require_statistics(problem)
    return remembered_candidates(problem)


@lru_cache(_REMEMBERED)
def remembered_candidates(problem: ForwardProblem | BackwardProblem) -> tuple[Candidate, ...]:
    """:func:`candidates` of what is known to be a problem with something to plan, searched for once."""
    if isinstance(problem, ForwardProblem):
        return tuple(sorted(_forward_candidates(problem), key=_rank))
    found = _backward_candidates(replace(problem, need=OUTPUTS))
    if problem.need == OUTPUTS:
        return found
    return tuple(_predicted(problem, _with_outputs(problem, candidate.plan)) for candidate in found)


def exchanging_candidates(problem: ForwardProblem, sbuf_bytes: int) -> list[Candidate]:
    """Plans of a forward that can exchange statistics with other replicas inside its launch, the fastest first.

    ``sbuf_bytes`` may be used per partition. Errors as for :func:`plan_two_read`, which is taken if nothing else fits.
    """
    return sorted(_forward_candidates(problem, sbuf_bytes), key=_rank)


def _forward_candidates(problem: ForwardProblem, sbuf_bytes: int | None = None) -> list[Candidate]:
    """Of ``reread`` only where no layout of ``resident`` fits."""
    found: list[Candidate] = []
    if problem.count:
        for reread in (False, True):
            found = found or resident_forward_candidates(problem, reread, sbuf_bytes)
        found += _transposed(problem)
    if not found or fits(problem, _budget(problem, sbuf_bytes)):
        found.append(_predicted(problem, plan_two_read(problem, sbuf_bytes)))
    return found


def _backward_candidates(problem: BackwardProblem) -> tuple[Candidate, ...]:
    found = resident_candidates(problem)
    staged = [_predicted(problem, plan_staged(problem))] if fits(problem, _budget(problem, None)) else []
    best = min((*found, *staged), key=_rank, default=None)
    if not found or (best in staged and any(buffer.name == "staged" for buffer in staged[0].plan.buffers)):
        # Data leaves SBUF between the phases at any rate.
        spent = sum(candidate.prediction.steps for candidate in found)
        found += resident_candidates(problem, strategy="reread", spent=spent)
    # If nothing fits, what is wrong with staged is the error.
    found += _transposed(problem)
    return tuple(sorted(found + staged, key=_rank)) or (_predicted(problem, plan_staged(problem)),)


def _with_outputs(problem: BackwardProblem, chosen: Plan) -> Plan:
    """A plan that makes what the problem needs; all but ``staged`` allocate the same for all outputs."""
    if not isinstance(chosen, ResidentPlan | TransposedPlan):
        return plan_staged(problem)
    needed: dict[str, Any] = {f"need_{name}": name in problem.need for name in GRADIENTS}
    return replace(chosen, **needed)


def _predicted(problem: ForwardProblem | BackwardProblem, chosen: Plan) -> Candidate:
    return Candidate(chosen, predict(chosen))


def _rank(candidate: Candidate) -> tuple[bool, float]:
    prediction = candidate.prediction
    over = prediction.instructions > INSTRUCTIONS
    staged = isinstance(candidate.plan, BackwardPlan | ForwardPlan)
    return over, prediction.instructions if over else prediction.ns * (1 - staged * DOUBT)


def plan_forward(problem: ForwardProblem) -> ForwardPlan | ResidentForwardPlan | TransposedForwardPlan:
    """The plan of a forward pass: the candidate with the least predicted time."""
    chosen = plan(problem)
    assert isinstance(chosen, ForwardPlan | ResidentForwardPlan | TransposedForwardPlan), (
        "a forward problem has a forward plan"
    )
    return chosen


def plan_two_read(problem: ForwardProblem, sbuf_bytes: int | None = None) -> ForwardPlan:
    """The plan of a forward pass of strategy ``two_read``: the widest tiles that fit into SBUF.

    ``sbuf_bytes`` may be used per partition; None stands for all that the target has.
    """
    chosen: ForwardPlan = two_read_plan(
        _extents(problem, sbuf_bytes),
        problem.dtype,
        problem.lnc,
        _budget(problem, sbuf_bytes),
        training=problem.training,
        need=(True, problem.relu == "mask"),
        relu=problem.relu != "none",
        residual=problem.residual,
    )
    return chosen


def plan_backward(problem: BackwardProblem) -> BackwardPlan | ResidentPlan | TransposedPlan:
    """The plan of a backward pass: the candidate with the least predicted time."""
    chosen = plan(problem)
    assert isinstance(chosen, BackwardPlan | ResidentPlan | TransposedPlan), "a backward problem has a backward plan"
    return chosen


def _transposed(problem: ForwardProblem | BackwardProblem) -> list[Candidate]:
    """The best layouts of ``transposed``, for problems that it is considered for."""
    return transposed_candidates(problem) if problem.count and problem.spatial < SHORT_ROW else []


def plan_staged(problem: BackwardProblem, sbuf_bytes: int | None = None) -> BackwardPlan:
    """The plan of a backward pass of strategy ``staged``: the widest tiles that fit into SBUF, as for the forward."""
    chosen: BackwardPlan = staged_plan(
        _extents(problem, sbuf_bytes),
        problem.dtype,
        problem.relu,
        problem.lnc,
        _budget(problem, sbuf_bytes),
        residual=problem.residual,
        training=problem.training,
        need=tuple(name in problem.need for name in GRADIENTS),
    )
    return chosen


def _extents(problem: Problem, sbuf_bytes: int | None) -> tuple[int, int, int]:
    """The extents of a problem that has something to plan, which fits."""
    require_values(problem)
    require_fit(problem, _budget(problem, sbuf_bytes))
    return problem.extents


def _budget(problem: Problem, sbuf_bytes: int | None) -> int:
    return load_target(problem.target).sbuf_partition_bytes if sbuf_bytes is None else sbuf_bytes
