# SPDX-License-Identifier: Apache-2.0
"""Why a plan is what it is: its layout, its predicted figures, and what the other candidates would have taken."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from nki_bn.bench.roofline import minimum_bytes
from nki_bn.hardware import load_target, load_timing
from nki_bn.kernels.plan import BackwardPlan, ForwardPlan, total_bytes
from nki_bn.layout_words import STRATEGIES, brief, owned_part, words_of
from nki_bn.pipeline import Prediction
from nki_bn.planner import DOUBT, candidates
from nki_bn.predict import INSTRUCTIONS, TIMED, Candidate, Plan
from nki_bn.problem import BackwardProblem, Problem

# Work that differs by less is no reason for a difference in time.
_NOTABLE = 1.02


@dataclass(frozen=True)
class BufferUse:
    """``count`` tiles of ``columns`` elements in each partition of SBUF, ``nbytes`` together."""

    name: str
    count: int
    columns: int
    dtype: str
    nbytes: int


@dataclass(frozen=True)
class RunnerUp:
    """A plan that was not chosen, and why."""

    strategy: str
    layout: str
    predicted_us: float
    instructions: int
    reason: str


@dataclass(frozen=True)
class Explanation:
    """A plan with its figures, all modelled.

    Attributes:
        problem, plan: what was asked, and the plan.
        meaning: what the strategy does.
        layout: in words.
        predicted_us: from first instruction to last completion, without the launch.
        roofline_us: microseconds of the minimum bytes at the DMA limit of the cores.
        minimum_bytes, moved_bytes: what has to move from and to HBM, and what does.
        busy: share of the time at work, by engine of the core with the larger share; "dma" is its busiest DMA engine.
        bound: the engine that is busy longest, or "latency" if none is for half of the time.
        buffers, sbuf_bytes, sbuf_limit: bytes per partition.
        instructions, ceiling: of a core, and what a plan should not exceed.
        notes: what is out of the ordinary.
        runners_up: other candidates, the fastest first.
    """

    problem: Problem
    plan: Plan
    meaning: str
    layout: dict[str, str]
    predicted_us: float
    roofline_us: float
    minimum_bytes: int
    moved_bytes: int
    busy: dict[str, float]
    bound: str
    buffers: tuple[BufferUse, ...]
    sbuf_bytes: int
    sbuf_limit: int
    instructions: int
    ceiling: int
    notes: tuple[str, ...]
    runners_up: tuple[RunnerUp, ...]

    @property
    def roofline_share(self) -> float:
        """The time at the DMA limit over the predicted time."""
        return self.roofline_us / self.predicted_us

    def as_dict(self) -> dict[str, Any]:
        """Everything as what JSON can hold."""
        return asdict(self) | {"operation": operation_of(self.problem), "roofline_share": self.roofline_share}


def explain(problem: Problem) -> Explanation:
    """The plan of a problem and the reasons for it; errors as for :func:`nki_bn.plan`."""
    chosen, *others = candidates(problem)
    plan, prediction = chosen.plan, chosen.prediction
    return Explanation(
        problem=problem,
        plan=plan,
        meaning=STRATEGIES[plan.strategy],
        layout=words_of(plan),
        predicted_us=prediction.us,
        roofline_us=_roofline_us(problem),
        minimum_bytes=minimum_bytes(problem),
        moved_bytes=moved_bytes(chosen),
        busy={engine: time / prediction.ns for engine, time in prediction.busy.items() if time > 0},
        bound=prediction.bound,
        buffers=tuple(
            BufferUse(buffer.name, buffer.count, buffer.columns, buffer.dtype, total_bytes([buffer]))
            for buffer in plan.buffers
        ),
        sbuf_bytes=plan.sbuf_bytes,
        sbuf_limit=load_target(problem.target).sbuf_partition_bytes,
        instructions=prediction.instructions,
        ceiling=INSTRUCTIONS,
        notes=tuple(_notes(problem, prediction)),
        runners_up=tuple(_runner_up(chosen, other) for other in others),
    )


def operation_of(problem: Problem) -> str:
    """bwd, fwd or eval."""
    if isinstance(problem, BackwardProblem):
        return "bwd"
    return "fwd" if problem.training else "eval"


def moved_bytes(candidate: Candidate) -> int:
    """Bytes between HBM and the chip on all cores, each taken to move in proportion to its share."""
    prediction = candidate.prediction
    return round((prediction.loaded + prediction.stored) / owned_part(candidate.plan))


def _roofline_us(problem: Problem) -> float:
    limits = load_timing(TIMED).roofline
    return minimum_bytes(problem) / (limits.core if problem.lnc == 1 else limits.pair) / 1e3


def _notes(problem: Problem, prediction: Prediction) -> list[str]:
    notes = []
    if problem.target != TIMED:
        notes.append(f"times are those of {TIMED}: {problem.target} has no timing parameters")
    if prediction.instructions > INSTRUCTIONS:
        notes.append(f"above the ceiling of {INSTRUCTIONS} instructions: no plan that fits is below it")
    return notes


def _runner_up(chosen: Candidate, other: Candidate) -> RunnerUp:
    prediction = other.prediction
    reason = _reason(chosen, other)
    return RunnerUp(other.plan.strategy, brief(other.plan), prediction.us, prediction.instructions, reason)


def _reason(chosen: Candidate, other: Candidate) -> str:
    """The largest thing that the other does more of; else that it stands still for longer."""
    mine, theirs = chosen.prediction, other.prediction
    if theirs.instructions > INSTRUCTIONS:
        return f"{theirs.instructions} instructions, above the ceiling of {INSTRUCTIONS}"
    if isinstance(chosen.plan, BackwardPlan | ForwardPlan) and (1 - DOUBT) * mine.ns <= theirs.ns < mine.ns:
        return f"less than {DOUBT:.0%} faster, and predictions are not better than that"
    if theirs.ns < mine.ns:
        return "takes no longer here, but longer for all outputs, which keep their bits when fewer are needed"
    if moved_bytes(other) > _NOTABLE * moved_bytes(chosen):
        return f"moves {moved_bytes(other) / moved_bytes(chosen):.2f} times the bytes"
    longest = max(mine.busy.values())
    engine = max(theirs.busy, key=lambda name: theirs.busy[name])
    if theirs.busy[engine] > _NOTABLE * longest:
        return f"{engine} works for {theirs.busy[engine] / 1e3:.1f} us, none of the plan for over {longest / 1e3:.1f}"
    its, here = (theirs.ns - theirs.busy[engine]) / 1e3, (mine.ns - longest) / 1e3
    return f"its busiest engine, {engine}, waits for {its:.1f} us, that of the plan for {here:.1f}"
