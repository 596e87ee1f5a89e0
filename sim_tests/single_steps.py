# SPDX-License-Identifier: Apache-2.0
"""Synchronised steps of one launch per replica, for tests: what replicas get, and a judgement of all that they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from judging import joined, same_bits

from nki_bn import pair, reference, tolerances
from nki_bn.comparison import compare
from nki_bn.execute import simulation
from nki_bn.problem import Array, BackwardCase, ForwardCase
from nki_bn.requests import prepare_backward, prepare_forward
from nki_bn.simulator import RunOptions
from nki_bn.synchronised import backward_in_one_launch, forward_in_one_launch
from nki_bn.synchronised.launches import Exchange, backward_plans, forward_plans
from nki_bn.verify import arithmetic_of

MOMENTUM = 0.1


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
        columns = np.ones(self.channels, np.float32)
        backs = []
        for case in self.forwards():
            mask = np.zeros(case.x.shape, np.uint8) if self.relu == "mask" else None
            backs.append(pair.backward_case(case, case.x, columns, columns, mask))
        return arithmetic_of_plans(self.forwards(), backs, self.mode, self.lnc, numerics)


def arithmetic_of_plans(
    forwards: Sequence[ForwardCase], backwards: Sequence[BackwardCase], mode: str, lnc: int, numerics: str = "trn2"
) -> tolerances.Arithmetic:
    """How the plans round that the replicas of a step take."""
    options = RunOptions(numerics=numerics)
    problems = [prepare_forward(case, lnc, part=True).problem for case in forwards]
    exchange = Exchange(tuple(problem.count for problem in problems), mode)
    narrow = any(
        arithmetic_of(*both, options).narrow for both in zip(problems, forward_plans(problems, exchange), strict=True)
    )
    backs = [prepare_backward(case, lnc=lnc).problem for case in backwards]
    rounding = [arithmetic_of(*both, options) for both in zip(backs, backward_plans(backs, exchange), strict=True)]
    return replace(
        rounding[0],
        narrow=narrow,
        staged=any(one.staged for one in rounding),
        tensor=any(one.tensor for one in rounding),
        replicas=len(forwards),
    )


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
