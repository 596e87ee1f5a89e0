# SPDX-License-Identifier: Apache-2.0
"""Synchronised steps of one launch per replica: the global batch in float64, the plain kernel where there is one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from judging import same_bits
from single_steps import MOMENTUM, Step, judged_statistics, run_and_judge

from nki_bn import batch_norm_bwd, batch_norm_fwd, pair, planner
from nki_bn.links import MESH, RING, TOPOLOGIES
from nki_bn.problem import BackwardProblem, ForwardCase, ForwardProblem
from nki_bn.requests import prepare_forward
from nki_bn.simulator.timing import model
from nki_bn.synchronised import MODES, backward_in_one_launch, forward_in_one_launch, launches
from nki_bn.synchronised.launches import Exchange, backward_plans, dry_trace, forward_plans, meetings

BF16 = ml_dtypes.bfloat16


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("sizes", "lnc"),
    [
        ((2, 2), 1),
        ((1, 3, 2), 2),
        ((3, 0, 1, 2), 1),
        ((3, 0, 1, 2), 2),
        ((2, 2, 2, 2), 1),
        ((1,) * 8, 2),
        ((2, 1, 0, 3, 1, 1, 2, 1), 1),
    ],
    ids=str,
)
def test_a_step_is_that_of_the_global_batch(sizes: tuple[int, ...], lnc: int, mode: str) -> None:
    run_and_judge(Step(sizes, mode=mode, lnc=lnc))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("mean", "lnc"), [(2e3, 1), (2e6, 1), (2e6, 2)])
def test_means_of_many_deviations(mean: float, lnc: int, mode: str) -> None:
    """A thousand deviations, and a million."""
    run_and_judge(Step((3, 0, 1, 2), 3, (6, 7), mode=mode, lnc=lnc, mean=mean))


CASES = {
    "two channel tiles, the last with two channels, fused": Step(
        (2, 1), 130, (5, 5), BF16, "two_round", 2, "mask", True
    ),
    "one channel, which the cores share": Step((2, 2), 1, (5, 6), BF16, "one_round", 2),
    "one channel, odd batches, shared by space": Step((3, 3), 1, (5, 6), np.float32, "two_round", 2),
    "float16, the mask made again": Step((4, 2), 64, (7, 7), np.float16, "one_round", 1, "recompute", True),
    "bands": Step((4, 4), 32, (6, 6), np.float32, "two_round", 2, "mask"),
    "a mean of a hundred deviations": Step((2, 0, 2), 5, (8, 8), np.float32, "one_round", 1, mean=200.0),
    "one value on a replica": Step((1, 3), 4, (), np.float32, "two_round", 1),
}


@pytest.mark.parametrize("name", CASES)
def test_layouts_dtypes_and_fusion(name: str) -> None:
    run_and_judge(CASES[name])


def test_float32_operands() -> None:
    run_and_judge(Step((1, 3, 2), mode="one_round"), "ideal")


STRATEGIES = [("two_read", "staged"), ("resident", "resident"), ("reread", "reread"), ("resident", "tensor")]


def strategy_of(plan: Any) -> str:
    return "tensor" if getattr(plan, "tensor_sums", False) else plan.strategy


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize(("forward", "backward"), STRATEGIES)
def test_every_strategy_exchanges(forward: str, backward: str, lnc: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bits, as Tensor adds up only those, with so little SBUF for two_read that it has several tiles."""

    def forwards(problem: ForwardProblem, sbuf_bytes: int) -> list[Any]:
        if forward == "two_read":
            return [planner._predicted(problem, planner.plan_two_read(problem, 6_000))]
        found = planner.resident_forward_candidates(problem, forward == "reread", sbuf_bytes)
        return [one for one in found if one.plan.strategy == forward]

    def backwards(problem: BackwardProblem) -> list[Any]:
        if backward == "staged":
            return [planner._predicted(problem, planner.plan_staged(problem, 8_000))]
        found = planner.resident_candidates(problem, strategy="reread" if backward == "reread" else "resident")
        return [one for one in found if strategy_of(one.plan) == backward]

    monkeypatch.setattr(launches, "exchanging_candidates", forwards)
    monkeypatch.setattr(launches, "candidates", backwards)
    step = Step((4, 4), 2, (112, 112) if backward == "tensor" else (40, 41), BF16, "one_round", lnc)
    problem = prepare_forward(step.forwards()[0], lnc, part=True).problem
    exchange = Exchange((problem.count,) * 2, step.mode)
    back = BackwardProblem(problem.shape, "bfloat16", lnc=lnc)
    assert strategy_of(forward_plans([problem] * 2, exchange)[0]) == forward
    assert strategy_of(backward_plans([back] * 2, exchange)[0]) == backward
    run_and_judge(step)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("lnc", "channels", "together"), [(1, 5, (2, 2, 1)), (2, 9, (2, 2, 1)), (1, 7, (2, 1, 1))])
def test_groups_exchange_together(
    mode: str, lnc: int, channels: int, together: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two by two, and the last one alone; with 7 channels groups of 2, and a last one of 1; and an empty replica."""
    in_group = 2 if channels == 7 else 1

    def forwards(problem: ForwardProblem, sbuf_bytes: int) -> list[Any]:
        found = planner.resident_forward_candidates(problem, False, sbuf_bytes)
        return [one for one in found if one.plan.group_channels == in_group and one.plan.slots >= 4][:1]

    monkeypatch.setattr(launches, "exchanging_candidates", forwards)
    monkeypatch.setattr(launches, "_TOGETHER", (2,))
    step = Step((4, 0, 4), channels, (16, 16), BF16, mode, lnc)
    problem = prepare_forward(step.forwards()[0], lnc, part=True).problem
    plan = forward_plans([problem] * 3, Exchange((problem.count,) * 3, mode))[0]
    rounds, each = (2, 1) if mode == "two_round" else (1, 3)
    met = meetings(problem, plan, mode, 3)[0]
    assert [shape[1] // each for shape in met[::rounds]] == list(together)
    run_and_judge(step)


@pytest.mark.parametrize(
    "problem", [ForwardProblem((16, 256, 28, 28), "bfloat16"), BackwardProblem((16, 256, 28, 28), "bfloat16")]
)
def test_where_collectives_take_longer_there_are_fewer(problem: Any) -> None:
    """Round a ring of 16 each takes 15 hops: larger groups, or several together, though the rest takes longer."""
    found = {}
    for topology in TOPOLOGIES:
        exchange = Exchange((problem.count,) * 16, "two_round", topology)
        found[topology] = (forward_plans if isinstance(problem, ForwardProblem) else backward_plans)(
            [problem] * 16, exchange
        )[0]
    mesh, ring = (found[topology] for topology in (MESH, RING))
    counts = [len(meetings(problem, plan, "two_round", 16)[0]) for plan in (mesh, ring)]
    assert counts[1] < counts[0]
    over_mesh, over_ring = (launches.modelled(problem, plan, "two_round", 16) for plan in (mesh, ring))
    assert over_mesh[MESH] < over_ring[MESH] and over_ring[RING] < over_mesh[RING]


def test_targets_without_links_take_the_plan_without_its_collectives() -> None:
    step = Step((2, 2), 3)
    made = forward_in_one_launch(step.forwards(), "two_round", 1, "trn3")
    rows = judged_statistics(step, made, step.arithmetic())
    assert len(rows) == 4 and all(row.ok for row in rows), rows


def test_plans_let_groups_exchange_together_where_that_is_faster() -> None:
    """A layer of many small groups: fewer collectives, and less time than with one for each group."""
    problem = ForwardProblem((8, 2048, 7, 7), "bfloat16", lnc=1)
    exchange = Exchange((problem.count,) * 16, "two_round")
    plan = forward_plans([problem] * 16, exchange)[0]
    traces = [dry_trace(problem, one, "two_round", 16) for one in (plan, launches._exchanging(plan, 0, 1))]
    few, many = (sum(record.engine == "collective" for record in trace) for trace in traces)
    assert few < many == 2 * 2048 // plan.group_channels
    fast, slow = (model(trace).total for trace in traces)
    assert fast < 0.9 * slow


@pytest.mark.parametrize("mode", MODES)
def test_alone_it_is_the_plain_kernel(mode: str) -> None:
    step = Step((5,), 7, relu="mask", add=True, mode=mode)
    (forward,), (made,) = step.forwards(), forward_in_one_launch(step.forwards(), mode, 1)
    for one, other in zip(made, plain_forward(forward), strict=True):
        same_bits(one, other)
    (back,) = step.backwards([made])
    (gradients,) = backward_in_one_launch([back], lnc=1)
    columns = back.mean, back.var, back.gamma, back.beta
    wanted = batch_norm_bwd(back.dy, back.x, *columns, back.eps, True, back.relu_mask, residual=back.residual, lnc=1)
    for one, other in zip(gradients, wanted, strict=True):
        same_bits(one, other)


def plain_forward(case: ForwardCase) -> Any:
    columns = case.gamma, case.beta, case.running_mean, case.running_var, MOMENTUM, case.eps
    return batch_norm_fwd(case.x, *columns, fuse_relu=case.fuse_relu, residual=case.residual, lnc=1)


@pytest.mark.parametrize(("mode", "sizes"), [("two_round", (2, 2)), ("one_round", (2, 2)), ("one_round", (1, 3, 2))])
def test_equal_means_come_back_exactly(mode: str, sizes: tuple[int, ...]) -> None:
    """By weights that are powers of two, or by bn_aggr whatever they are."""
    gamma = np.ones(2, np.float32)
    shards = [np.full((size, 2, 3, 4), np.float32(0.1)) for size in sizes]
    made = forward_in_one_launch([ForwardCase(x, gamma, gamma) for x in shards], mode, 1)
    for x, one in zip(shards, made, strict=True):
        same_bits(one.mean, batch_norm_fwd(x, gamma, gamma, lnc=1).mean)


@pytest.mark.parametrize(("mode", "forward"), [("two_round", 2), ("one_round", 1)])
@pytest.mark.parametrize("lnc", [1, 2])
def test_the_number_of_collectives(mode: str, forward: int, lnc: int) -> None:
    """Per group of channels two or one in the forward and one in the backward, on every core that has channels."""
    problem, back = ForwardProblem((4, 6, 9, 9), "float32", lnc=lnc), BackwardProblem((4, 6, 9, 9), "float32", lnc=lnc)
    exchange = Exchange((problem.count,) * 4, mode)
    (plan, *_), (second, *_) = forward_plans([problem] * 4, exchange), backward_plans([back] * 4, exchange)
    for core in meetings(problem, plan, mode, 4):
        assert sum(shape[0] for shape in core) == forward * 6 // lnc
        assert {shape[1:] for shape in core} == {(1,) if mode == "two_round" else (3,)}
    opcodes = {"two_round": {"all_reduce"}, "one_round": {"all_gather"}}[mode]
    trace = dry_trace(problem, plan, mode, 4)
    assert {record.opcode for record in trace if record.engine == "collective"} == opcodes
    trace = dry_trace(back, second, mode, 4)
    assert {record.opcode for record in trace if record.engine == "collective"} == {"all_reduce"}
    for core in meetings(back, second, mode, 4):
        # Two sums of every channel, as rows of channels or as a column of them.
        assert all(2 in shape for shape in core)
        assert sum(shape[0] * shape[1] // 2 for shape in core) == 6 // lnc


@pytest.mark.parametrize("shape", [(4, 6, 9, 9), (64, 6)])
def test_gradients_of_parameters_take_no_collective(shape: tuple[int, ...]) -> None:
    problem = BackwardProblem(shape, "float32", need=("dgamma", "dbeta"))
    for candidate in planner.candidates(problem):
        trace = dry_trace(problem, candidate.plan, "two_round", 4)
        assert not [record for record in trace if record.engine == "collective"]


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(("mode", "space"), [("two_round", (6, 7)), ("one_round", (6, 7)), ("one_round", ())])
def test_what_is_not_finite_stays_in_its_channel(mode: str, space: tuple[int, ...], value: float) -> None:
    """In bands, and in short rows: on every replica, as the statistics are those of all."""
    step = Step((3, 2), 5, space, mode=mode)
    forwards = step.forwards()
    forwards[1].x[1, 2] = value
    made = forward_in_one_launch(forwards, mode, 1)
    shards = zip(forwards, step.cut(step.arrays[1]), made, strict=True)
    cases = [pair.backward_case(case, dy, one.mean, one.var, None) for case, dy, one in shards]
    for one, back in zip(made, backward_in_one_launch(cases, lnc=1), strict=True):
        for elements in (one.y, back[0]):
            assert elements is not None
            by_channel = np.isfinite(elements).all(axis=(0, *range(2, elements.ndim)))
            assert by_channel.tolist() == [True, True, False, True, True]


def test_elements_move_once() -> None:
    """What the launches between collectives cannot: x comes in once and y goes out once, dy and x in and dx out."""
    shape, size = (8, 16, 28, 28), 8 * 16 * 28 * 28 * 2
    for problem, plans, moved in (
        (ForwardProblem(shape, "bfloat16", lnc=1), forward_plans, 2 * size),
        (BackwardProblem(shape, "bfloat16", lnc=1), backward_plans, 3 * size),
    ):
        exchange = Exchange((problem.count,) * 8, "two_round")
        plan = plans([problem] * 8, exchange)[0]  # type: ignore[operator]
        timeline = model(dry_trace(problem, plan, "two_round", 8))
        assert moved <= timeline.nbytes < 1.01 * moved


def test_too_unequal_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """When each has a plan of its own alone, which exchanges other groups."""

    def one_channel_more(problem: ForwardProblem, sbuf_bytes: int) -> list[Any]:
        found = planner.resident_forward_candidates(problem, False, sbuf_bytes)
        wanted = {2: 2, 3: 4}[problem.batch]
        return [one for one in found if one.plan.group_channels == wanted][:1]

    monkeypatch.setattr(launches, "exchanging_candidates", one_channel_more)
    with pytest.raises(ValueError, match=r"shards have shapes \(2, 8, 40, 40\), \(3, 8, 40, 40\), for which no plans"):
        forward_in_one_launch(Step((2, 3), 8, (40, 40)).forwards(), "two_round", 1)


def test_wrong_shards_are_refused() -> None:
    good = Step((2, 2)).forwards()
    wrong = {
        "shards is empty": [],
        "eps 1e-05 on replica 0 and 0.001 on 1": [good[0], replace(good[1], eps=1e-3)],
        "momentum 0.1 on replica 0 and 0.2 on 1": [good[0], replace(good[1], momentum=0.2)],
        "dtype 'float32' on replica 0 and 'bfloat16' on 1": [good[0], Step((2, 2), dtype=BF16).forwards()[1]],
        "channels 3 on replica 0 and 4 on 1": [good[0], Step((2, 2), 4).forwards()[1]],
        "relu 'none' on replica 0": [good[0], replace(good[1], fuse_relu=True)],
        "running_mean given True on replica 0": [good[0], replace(good[1], running_mean=None, running_var=None)],
        "training is False on replica 0": [replace(case, training=False) for case in good],
        "1 value per channel on all replicas": [
            replace(case, x=case.x[:n, :, :1, :1]) for case, n in zip(good, (1, 0), strict=True)
        ],
    }
    for message, shards in wrong.items():
        with pytest.raises(ValueError, match=message):
            forward_in_one_launch(shards, "two_round", 1)
    with pytest.raises(ValueError, match="mode is 'three_round'"):
        forward_in_one_launch(good, "three_round", 1)


def test_nothing_at_all() -> None:
    """Shards without any values: empty outputs, and running statistics that stay."""
    made = forward_in_one_launch(Step((0, 0)).forwards(), "two_round", 1)
    old = Step((0, 0)).arrays[5]
    for one in made:
        assert one.y.shape == (0, 3, 3, 4)
        same_bits(one.running_mean, old)
    back = backward_in_one_launch(Step((0, 0)).backwards(made), lnc=1)
    assert [one[0].shape for one in back if one[0] is not None] == [(0, 3, 3, 4)] * 2


def test_without_dx_nothing_is_exchanged() -> None:
    step = Step((2, 0))
    made = forward_in_one_launch(step.forwards(), "two_round", 1)
    whole = backward_in_one_launch(step.backwards(made), lnc=1)
    sums = backward_in_one_launch(step.backwards(made), ("dgamma", "dbeta"), 1)
    for one, other in zip(whole, sums, strict=True):
        assert other[0] is None
        same_bits(one[1], other[1])
        same_bits(one[2], other[2])
