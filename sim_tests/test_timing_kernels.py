# SPDX-License-Identifier: Apache-2.0
"""What holds for the timeline of any kernel, on those of this project."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import pytest
from timelines import DMA, TIMING, close

from nki_bn import planner
from nki_bn.bench.launches import launch_of
from nki_bn.bench.roofline import minimum_bytes
from nki_bn.problem import BackwardProblem, ForwardProblem, Problem
from nki_bn.simulator import RunOptions, Shaped, run
from nki_bn.simulator.timing import Timeline, model
from nki_bn.simulator.timing.jobs import Job, jobs_of, semaphore
from nki_bn.simulator.timing.spans import Span

# One tile and several, bands, both splits, more tiles than slots, ragged channels, a mask, short rows.
PROBLEMS: dict[str, Problem] = {
    "backward": BackwardProblem((4, 64, 8, 8), "float32"),
    "backward, many tiles": BackwardProblem((32, 64, 112, 112), "bfloat16"),
    "backward, channel tiles": BackwardProblem((8, 600, 14, 14), "bfloat16", lnc=1),
    "backward, mask": BackwardProblem((4, 128, 28, 28), "float16", relu="mask"),
    "backward, recomputed mask": BackwardProblem((3, 5, 49), "float32", relu="recompute", lnc=1),
    "forward": ForwardProblem((4, 64, 8, 8), "float32"),
    "forward, many tiles": ForwardProblem((32, 64, 112, 112), "bfloat16", relu="mask"),
    "forward, frozen": ForwardProblem((8, 300, 7, 7), "bfloat16", training=False, lnc=1),
}


@dataclass(frozen=True)
class Modelled:
    timeline: Timeline
    jobs: list[Job]


@cache
def modelled(name: str) -> Modelled:
    problem = PROBLEMS[name]
    launch = launch_of(problem, planner.plan(problem), Shaped)
    trace = run(launch.kernel, launch.arguments, {}, launch.lnc, RunOptions(dry=True)).trace
    return Modelled(model(trace), jobs_of(trace))


def by_engine(timeline: Timeline) -> dict[tuple[int, str], list[Span]]:
    groups: dict[tuple[int, str], list[Span]] = defaultdict(list)
    for span in timeline.spans:
        groups[span.record.core, span.engine].append(span)
    return groups


@pytest.mark.parametrize("name", PROBLEMS)
def test_engines_do_one_thing_at_a_time_in_order(name: str) -> None:
    for spans in by_engine(modelled(name).timeline).values():
        assert all(first.free <= second.start for first, second in pairwise(spans))
        triggers = [span.start for span in spans if span.flight is not None]
        assert all(second - first >= DMA.spacing - 1e-6 for first, second in pairwise(triggers))


@pytest.mark.parametrize("name", PROBLEMS)
def test_nothing_starts_before_what_it_waits_for(name: str) -> None:
    timeline, jobs = modelled(name).timeline, modelled(name).jobs
    for span, job in zip(timeline.spans, jobs, strict=True):
        for edge in job.edges:
            delay = semaphore(jobs[edge.producer], job, TIMING.semaphore)
            assert span.start >= timeline.spans[edge.producer].done + delay


@pytest.mark.parametrize("name", PROBLEMS)
def test_nothing_starts_later_than_its_cause(name: str) -> None:
    """Every start is explained: an edge that came just then, or an engine that was free just then."""
    timeline, jobs = modelled(name).timeline, modelled(name).jobs
    for span, job in zip(timeline.spans, jobs, strict=True):
        if span.cause.record is None:
            assert span.start == 0
            continue
        producer = timeline.spans[span.cause.record]
        delay = semaphore(jobs[span.cause.record], job, TIMING.semaphore)
        expected = {
            "order": span.table_load[1] if span.table_load else producer.free,
            "peer": producer.start,
            "spacing": producer.start + DMA.spacing,
        }
        assert close(span.start, expected.get(span.cause.why, producer.done + delay))


@pytest.mark.parametrize("name", PROBLEMS)
def test_transfers_take_at_least_their_work_and_the_kernel_its_bytes(name: str) -> None:
    timeline = modelled(name).timeline
    for flight in timeline.flights:
        assert flight.last - flight.begun >= max(flight.transfer.work) - 1e-6 and flight.begun >= flight.arrival
    hbm_bytes = sum(flight.transfer.hbm_bytes for flight in timeline.flights)
    assert timeline.total >= hbm_bytes / min(TIMING.hbm.pair, timeline.cores * TIMING.roofline.peak)
    assert timeline.total >= max(timeline.dma_busy) and hbm_bytes >= minimum_bytes(PROBLEMS[name])


@pytest.mark.parametrize("name", PROBLEMS)
def test_all_time_is_accounted_for(name: str) -> None:
    timeline = modelled(name).timeline
    assert all(close(use.busy + sum(use.stalls.values()), timeline.total) for use in timeline.engines)
    path = timeline.critical_path
    assert path[0].begin == 0 and path[-1].end == timeline.total
    assert all(close(first.end, second.begin) for first, second in pairwise(path))
