# SPDX-License-Identifier: Apache-2.0
"""A synchronised step in several processes, each of which launches on a core of its own, judged as one step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import distributed

from nki_bn import ops, verify
from nki_bn.bench.launches import EPS
from nki_bn.cases import Draw
from nki_bn.comparison import Comparison
from nki_bn.planner import plan_backward, plan_forward
from nki_bn.problem import Array, BackwardCase
from nki_bn.requests import prepare_backward, prepare_forward
from nki_bn.synchronised import ArrayGroup, SiteOptions, bn_back_site, bn_fwd_site, bn_gamma_site

# Examples of the replicas: not equal, and odd.
SIZES = (5, 4)
SHAPE = (sum(SIZES), 40, 6, 6)
OPTIONS = SiteOptions(beta="beta", eps=EPS, fuse_relu=True, lnc=1)


class Processes(ArrayGroup):
    """The processes of torch.distributed, which exchange columns on the host."""

    @property
    def size(self) -> int:
        """R."""
        return distributed.get_world_size()

    def all_gather(self, name: str, values: Array) -> Array:
        """See ``ArrayGroup``."""
        mine = torch.from_numpy(np.ascontiguousarray(values))
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        distributed.all_gather(parts, mine)
        return torch.stack(parts).numpy()


def step(rank: int, mode: str) -> dict[str, Array]:
    """Forward and backward of this rank's shard."""
    os.environ.setdefault("NEURON_RT_VISIBLE_CORES", str(rank))
    draw = Draw(SHAPE, mean=1.0)
    case = draw.forward("mask", eps=EPS)
    bounds = np.cumsum((0, *SIZES))[rank : rank + 2]
    x, dy = (values[slice(*bounds)] for values in (case.x, draw.gradient()))
    assert case.gamma is not None and case.beta is not None
    parameters, group, options = {"gamma": case.gamma, "beta": case.beta}, Processes(), replace(OPTIONS, mode=mode)
    forward = bn_fwd_site(x, parameters, group, "gamma", options)
    sums = bn_gamma_site(dy, x, parameters, "gamma", forward, options)
    backward = bn_back_site(dy, x, parameters, group, "gamma", forward, sums, options)
    assert forward.relu_mask is not None
    statistics = {"mean": forward.statistics.mean, "var": forward.statistics.var}
    made = {"y": forward.y, "mask": forward.relu_mask, "dx": backward.dx}
    return made | statistics | {"dgamma": sums.dgamma, "dbeta": sums.dbeta}


def judged(made: Sequence[dict[str, Array]]) -> list[Comparison]:
    """What all ranks made, as the step of one batch; their statistics agree to the bit."""
    draw = Draw(SHAPE, mean=1.0)
    case = draw.forward("mask", eps=EPS)
    mean, var = made[0]["mean"], made[0]["var"]
    assert all(np.array_equal(part["mean"], mean) and np.array_equal(part["var"], var) for part in made)
    y, mask, dx = (np.concatenate([part[name] for part in made]) for name in ("y", "mask", "dx"))
    dgamma, dbeta = (np.sum([part[name] for part in made], axis=0, dtype=np.float32) for name in ("dgamma", "dbeta"))
    problem = replace(prepare_forward(case, 1).problem, training=False)
    arithmetic = verify.arithmetic_of(problem, plan_forward(problem), verify.DEFAULT_OPTIONS)
    outputs = ops.BatchNormForward(y, mean, var, None, None, mask)
    unmoved = replace(case, running_mean=None, running_var=None)
    rows = verify.judge_forward(unmoved, outputs, replace(arithmetic, replicas=len(made)))
    back = BackwardCase(draw.gradient(), case.x, mean, var, case.gamma, case.beta, EPS, True, mask)
    asked = prepare_backward(back, lnc=1).problem
    arithmetic = verify.arithmetic_of(asked, plan_backward(asked), verify.DEFAULT_OPTIONS)
    return [*rows, *verify.judge_backward(back, (dx, dgamma, dbeta), replace(arithmetic, replicas=len(made)))]
