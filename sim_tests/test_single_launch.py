# SPDX-License-Identifier: Apache-2.0
"""Synchronised steps of one launch per replica: the global batch in float64, the plain kernel where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from judging import joined, same_bits

from nki_bn import batch_norm_bwd, batch_norm_fwd, pair, planner, reference, tolerances
from nki_bn.comparison import compare
from nki_bn.execute import simulation
from nki_bn.problem import Array, BackwardCase, BackwardProblem, ForwardCase, ForwardProblem
from nki_bn.requests import prepare_backward, prepare_forward
from nki_bn.simulator import RunOptions
from nki_bn.simulator.timing import model
from nki_bn.synchronised import MODES, backward_in_one_launch, forward_in_one_launch, launches
from nki_bn.synchronised.launches import Exchange, backward_plans, dry_trace, forward_plans, meetings
from nki_bn.verify import arithmetic_of

MOMENTUM = 0.1
BF16 = ml_dtypes.bfloat16


@dataclass(frozen=True)
class Step:
    """Shards of a batch of ``sizes`` [n, C, *space], and how they are run. ``relu``: none, mask or recompute."""

    sizes: tuple[int, ...]
    channels: int = 3
    space: tuple[int, ...] = (3, 4)
    dtype: Any = np.float32
    mode: str = "two_round"
    lnc: int = 1
    relu: str = "none"
    add: bool = False
    mean: float = 1.0

    @property
    def arrays(self) -> tuple[Array, ...]:
        """x, dy, residual; gamma, beta, running mean and variance."""
        rng = np.random.default_rng(len(self.sizes) + self.channels)
        shape = (sum(self.sizes), self.channels, *self.space)
        drawn = ((m + s * rng.standard_normal(shape)).astype(self.dtype) for m, s in ((self.mean, 2), (0, 1), (0, 1)))
        columns = (c + 0.5 * rng.standard_normal(self.channels) for c in (1.0, 0.0, 0.3, 2.0))
        return (*drawn, *(column.astype(np.float32) for column in columns))

    def cut(self, array: Array) -> list[Array]:
        """The replicas' parts."""
        return np.split(array, np.cumsum(self.sizes)[:-1])

    def forwards(self) -> list[ForwardCase]:
        """The forward of every replica."""
        x, _, residual, gamma, beta, old_mean, old_var = self.arrays
        columns = gamma, beta, old_mean, np.abs(old_var), MOMENTUM, 1e-5, True, self.relu != "none"
        return [
            ForwardCase(part, *columns, more if self.add else None, save_relu_mask=self.relu == "mask")
            for part, more in zip(self.cut(x), self.cut(residual), strict=True)
        ]

    def backwards(self, made: Sequence[Any]) -> list[BackwardCase]:
        """The backward of every replica, on what the forward made."""
        dy = self.cut(self.arrays[1])
        return [
            pair.backward_case(case, part, one.mean, one.var, one.relu_mask)
            for case, part, one in zip(self.forwards(), dy, made, strict=True)
        ]

    def arithmetic(self, numerics: str = "trn2") -> tolerances.Arithmetic:
        """How the plans of the replicas round."""
        options = RunOptions(numerics=numerics)
        forwards = [prepare_forward(case, self.lnc, part=True).problem for case in self.forwards()]
        plans = forward_plans(forwards, Exchange(tuple(problem.count for problem in forwards), self.mode))
        narrow = any(arithmetic_of(*both, options).narrow for both in zip(forwards, plans, strict=True))
        nothing = [replace_statistics(self, case) for case in self.forwards()]
        backs = [prepare_backward(case, lnc=self.lnc).problem for case in nothing]
        second = backward_plans(backs, Exchange(tuple(problem.count for problem in backs), self.mode))
        rounding = [arithmetic_of(*both, options) for both in zip(backs, second, strict=True)]
        return replace(
            rounding[0],
            narrow=narrow,
            staged=any(one.staged for one in rounding),
            tensor=any(one.tensor for one in rounding),
            replicas=len(self.sizes),
        )


def replace_statistics(step: Step, case: ForwardCase) -> BackwardCase:
    columns = np.ones(step.channels, np.float32)
    mask = np.zeros(case.x.shape, np.uint8) if step.relu == "mask" else None
    return pair.backward_case(case, case.x, columns, columns, mask)


def run_and_judge(step: Step, numerics: str = "trn2") -> None:
    """Everything that a step makes, against torch's float64 autograd of the global batch."""
    with simulation(RunOptions(numerics=numerics)):
        made = forward_in_one_launch(step.forwards(), step.mode, step.lnc)
        back = backward_in_one_launch(step.backwards(made), lnc=step.lnc)
    x, dy, residual, gamma, beta, old_mean, old_var = step.arrays
    sums = (np.sum([one[at] for one in back], axis=0, dtype=np.float64).astype(np.float32) for at in (1, 2))
    outputs = joined([one.y for one in made]), joined([one[0] for one in back]), *sums
    case = ForwardCase(x, gamma, beta, fuse_relu=step.relu != "none", residual=residual if step.add else None)
    arithmetic = step.arithmetic(numerics)
    rows = [*pair.judge_pair(case, dy, outputs, arithmetic), *judged_statistics(step, made, arithmetic)]
    assert len(rows) == 8 and all(row.ok for row in rows), rows


def judged_statistics(step: Step, made: Sequence[Any], arithmetic: tolerances.Arithmetic) -> list[Any]:
    """Mean, variance and running statistics: the same bits on all replicas, and those of the global batch."""
    x, *_, old_mean, old_var = step.arrays
    names = ("mean", "var", "running_mean", "running_var")
    for one in made[1:]:
        for name in names:
            same_bits(getattr(one, name), getattr(made[0], name))
    mean, var = reference.statistics(x)
    allowed = tolerances.statistics(x, mean, var, arithmetic)
    total = x.size // x.shape[1]
    rows = [compare("mean", made[0].mean, mean, allowed["mean"]), compare("var", made[0].var, var, allowed["var"])]
    moves = (("mean", old_mean, mean, 1.0), ("var", np.abs(old_var), var, total / (total - 1)))
    for name, old, batch, factor in moves:
        wanted = (1 - MOMENTUM) * old.astype(np.float64) + MOMENTUM * factor * batch
        terms = (1 - MOMENTUM) * np.abs(old) + MOMENTUM * factor * np.abs(batch)
        error = MOMENTUM * factor * allowed[name].error + tolerances.RUNNING * terms
        rows.append(
            compare(f"running_{name}", getattr(made[0], f"running_{name}"), wanted, tolerances.everywhere(error))
        )
    return rows


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("sizes", "lnc"), [((2, 2), 1), ((1, 3, 2), 2), ((3, 0, 1, 2), 1), ((3, 0, 1, 2), 2), ((2, 2, 2, 2), 1)], ids=str
)
def test_a_step_is_that_of_the_global_batch(sizes: tuple[int, ...], lnc: int, mode: str) -> None:
    run_and_judge(Step(sizes, mode=mode, lnc=lnc))


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
