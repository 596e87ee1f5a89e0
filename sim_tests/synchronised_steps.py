# SPDX-License-Identifier: Apache-2.0
"""A step of a synchronised layer on ranks, and its global batch judged against torch's float64 autograd."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from ranks import first_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from torch_judging import Step, case_of, judge_running, wide_twin

import nki_bn.torch as nbt
from nki_bn import pair, verify
from nki_bn.planner import plan_forward
from nki_bn.problem import GRADIENTS, Array
from nki_bn.requests import prepare_forward
from nki_bn.simulator import RunOptions
from nki_bn.simulator.torch_memory import torch_memory

KINDS = {"plain": nbt.SyncBatchNorm, "relu": nbt.SyncBatchNormReLU, "add": nbt.SyncBatchNormAddReLU}


class Communication(TorchDispatchMode):
    """Notes the names of collectives, and whether a value of a tensor was read from Python."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[str] = []
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith(("_c10d_functional.", "c10d.")) and "wait_tensor" not in name:
            self.collectives.append(name.split(".")[1])
        self.reads += name.startswith("aten._local_scalar_dense")
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Case:
    """A global batch, how it is divided, and a layer.

    ``sizes`` are the examples of the first ranks; other ranks stand by.
    """

    sizes: tuple[int, ...]
    mode: str = "two_round"
    backend: str = "simulator"
    kind: str = "plain"
    dtype: torch.dtype = torch.float32
    inner: tuple[int, ...] = (3, 3, 4)
    mean: float = 1.0
    std: float = 2.0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def residual(self) -> bool:
        """Whether the layer adds one."""
        return self.kind == "add"

    def drawn(self) -> list[torch.Tensor]:
        """x, dy and a residual."""
        generator = torch.Generator().manual_seed(1)
        shape = (sum(self.sizes), *self.inner)
        x, dy, residual = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
        return [part.to(self.dtype) for part in (self.mean + self.std * x, dy, residual)]

    def layer(self, group: Any = None) -> Any:
        """The layer, with parameters and statistics that are not those of a new one."""
        options = {"mode": self.mode, "backend": self.backend, "process_group": group} | self.options
        module = KINDS[self.kind](self.inner[0], **options)
        generator = torch.Generator().manual_seed(2)
        for name, values in module.state_dict().items():
            if values.is_floating_point():
                drawn = torch.randn(values.shape, generator=generator)
                values.copy_(drawn.abs() + 0.1 if name.endswith("var") else drawn)
        return module.double() if self.dtype == torch.float64 else module


def one_step(rank: int, case: Case) -> dict[str, Any] | None:
    """What this rank has after a step, as NumPy arrays under the names of ``nki_bn.problem.GRADIENTS``."""
    group = first_ranks(len(case.sizes))
    if rank >= len(case.sizes):
        return None
    x, dy, residual = (part.split(case.sizes)[rank].clone() for part in case.drawn())
    leaves = [part.requires_grad_() for part in ((x, residual) if case.residual else (x,))]
    module = case.layer(group)
    before = copy.deepcopy(module.state_dict())
    # At first use ranks compare their settings; every later step is like this one.
    module(*(leaf.detach() for leaf in leaves))
    module.load_state_dict(before)
    with Communication() as communication:
        y = module(*leaves)
        y.backward(dy)
    made = {"y": y.detach(), "dx": x.grad, "dresidual": residual.grad if case.residual else None}
    made |= {"dgamma": None if module.weight is None else module.weight.grad}
    made |= {"dbeta": None if module.bias is None else module.bias.grad}
    made |= {name: getattr(module, name) for name in ("running_mean", "running_var", "num_batches_tracked")}
    found: dict[str, Any] = {name: None if t is None else torch_memory(t).copy() for name, t in made.items()}
    return found | {"collectives": communication.collectives, "reads": communication.reads}


def judge(case: Case, made: list[Any]) -> None:
    """y, all gradients and the running statistics of all ranks, by the table of tolerances; ranks agree to the bit."""
    members = made[: len(case.sizes)]
    x, dy, residual = case.drawn()
    module = case.layer()
    step = Step(x, dy, residual if case.residual else None)
    forward = case_of(module, step, case.kind != "plain")
    twin = wide_twin(module, x.dim())
    twin(x.double())
    numerics = "trn2" if case.backend == "simulator" else "ideal"
    # y is made by a forward with given statistics.
    problem = replace(prepare_forward(forward).problem, training=False)
    one = verify.arithmetic_of(problem, plan_forward(problem), RunOptions(numerics=numerics))
    arithmetic = replace(one, replicas=len(case.sizes))
    outputs = tuple(combined(name, [member[name] for member in members]) for name in ("y", *GRADIENTS))
    rows = [*pair.judge_pair(forward, torch_memory(dy), outputs, arithmetic)]
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert all(np.array_equal(member[name], members[0][name]) for member in members), name
        if members[0][name] is not None:
            getattr(module, name).copy_(torch.from_numpy(members[0][name]))
    rows += judge_running(module, twin, forward, arithmetic)
    assert all(row.ok for row in rows), rows
    assert {row.output for row in rows} >= {"y", "dx"}


def combined(name: str, parts: list[Array | None]) -> Array | None:
    """The global batch from its shards, and the sum of the ranks' own sums."""
    arrays = [part for part in parts if part is not None]
    if not arrays:
        return None
    if name in ("dgamma", "dbeta"):
        return np.sum(arrays, axis=0, dtype=np.float64).astype(np.float32)
    return np.concatenate(arrays)
