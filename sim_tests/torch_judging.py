# SPDX-License-Identifier: Apache-2.0
"""A batch-norm module of the package against torch's in float64, by the table of tolerances."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

import nki_bn.torch as nbt
from nki_bn import pair, reference, tolerances, verify
from nki_bn.comparison import Comparison, compare
from nki_bn.planner import plan_forward
from nki_bn.problem import Array, ForwardCase
from nki_bn.requests import prepare_forward
from nki_bn.simulator import RunOptions
from nki_bn.simulator.torch_memory import torch_memory
from nki_bn.tolerances import Arithmetic, half_unit

RANKS = {2: "1d", 3: "1d", 4: "2d", 5: "3d"}
SHAPES = {2: (6, 3), 3: (4, 3, 5), 4: (3, 3, 4, 5), 5: (2, 3, 2, 3, 4)}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
STATISTICS = ("running_mean", "running_var")


def module_class(kind: str, rank: int) -> Any:
    """``BatchNorm``, ``BatchNormReLU`` or ``BatchNormAddReLU`` for inputs of this rank."""
    return getattr(nbt, kind + RANKS[rank])


def torch_class(rank: int) -> Any:
    """torch's batch norm for inputs of this rank."""
    return getattr(torch.nn, "BatchNorm" + RANKS[rank])


def drawn(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Values of deviation 2 about 1."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2 + 1).to(dtype)


def with_drawn_state(module: torch.nn.Module) -> Any:
    """``module`` with parameters and statistics that are not those of a new one."""
    for seed, (name, values) in enumerate(module.state_dict().items()):
        if values.is_floating_point():
            values.copy_(
                drawn(tuple(values.shape), seed=seed).abs() + 0.1 if name.endswith("var") else drawn((3,), seed=seed)
            )
    return module


def wide_twin(module: torch.nn.Module, rank: int) -> Any:
    """torch's module with the options and the state of ``module``, in float64."""
    options = {name: getattr(module, name) for name in ("eps", "momentum", "affine", "track_running_stats")}
    twin = torch_class(rank)(3, bias=module.bias is not None, **options)
    twin.load_state_dict(copy.deepcopy(module.state_dict()))
    return twin.double().train(module.training)


@dataclass(frozen=True)
class Step:
    """A forward and a backward of a module."""

    x: torch.Tensor
    dy: torch.Tensor
    residual: torch.Tensor | None = None

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """What the module is called with."""
        return (self.x,) if self.residual is None else (self.x, self.residual)

    def run(self, module: torch.nn.Module) -> dict[str, Array]:
        """y and the gradients, under their names in ``nki_bn.problem.GRADIENTS``; of parameters only if there."""
        module.zero_grad()
        leaves = [tensor.detach().requires_grad_() for tensor in self.inputs]
        y = module(*leaves)
        y.backward(self.dy)
        made = {"y": y.detach(), "dx": leaves[0].grad}
        made |= {name: p.grad for name, p in (("dgamma", module.weight), ("dbeta", module.bias)) if p is not None}
        made |= {"dresidual": leaves[1].grad} if self.residual is not None else {}
        return {name: torch_memory(tensor) for name, tensor in made.items()}


def drawn_step(shape: tuple[int, ...], dtype: torch.dtype, residual: bool = False, seed: int = 0) -> Step:
    """A step of drawn values."""
    tensors = [drawn(shape, dtype, 100 * seed + part) for part in range(3)]
    return Step(tensors[0], tensors[1], tensors[2] if residual else None)


def judge_step(module: Any, step: Step, relu: bool = False) -> None:
    """Run ``step``; judge y, the gradients, and how the running statistics moved, against torch in float64."""
    case = case_of(module, step, relu)
    twin = wide_twin(module, step.x.dim())
    twin(step.x.double())
    made = step.run(module)
    names = ("y", "dx", "dgamma", "dbeta", "dresidual")
    problem = prepare_forward(case).problem
    arithmetic = verify.arithmetic_of(problem, plan_forward(problem), RunOptions())
    rows = [*pair.judge_pair(case, torch_memory(step.dy), tuple(map(made.get, names)), arithmetic)]
    rows += judge_running(module, twin, case, arithmetic)
    assert all(row.ok for row in rows), rows
    assert {row.output for row in rows} >= {"y", "dx"}
    assert module.num_batches_tracked is None or int(module.num_batches_tracked) == int(twin.num_batches_tracked)


def case_of(module: Any, step: Step, relu: bool) -> ForwardCase:
    """The forward of a step, with the parameters and statistics that ``module`` has now."""
    parameters = [None if p is None else torch_memory(p.float()) for p in (module.weight, module.bias)]
    tracked = [None if s is None else torch_memory(s.float().clone()) for s in map(module._buffers.get, STATISTICS)]
    training = module.training or tracked[0] is None
    residual = None if step.residual is None else torch_memory(step.residual)
    case = ForwardCase(torch_memory(step.x), *parameters, *tracked, eps=module.eps, training=training)
    return replace(case, fuse_relu=relu, residual=residual)


def judge_running(module: Any, twin: Any, case: ForwardCase, arithmetic: Arithmetic) -> list[Comparison]:
    """The running statistics; those of the batch may be off as the table says, before they are weighted."""
    if module.running_mean is None:
        return []
    mean, var = reference.statistics(case.x)
    count = case.x.size // case.x.shape[1]
    momentum = 0.0
    if module.training:
        momentum = module.momentum if module.momentum is not None else 1 / int(twin.num_batches_tracked)
    allowed = tolerances.statistics(case.x, mean, var, arithmetic)
    rows = []
    for name, batch, scale in (("mean", mean, 1.0), ("var", var, count / (count - 1))):
        old, new = getattr(case, f"running_{name}"), getattr(module, f"running_{name}")
        want = reference.running(old, batch * scale, momentum)
        error = allowed[name].error + half_unit(np.abs(batch), np.dtype(np.float32))
        bound = tolerances.running(want).error + abs(momentum) * scale * error
        twins = torch_memory(getattr(twin, f"running_{name}"))
        rows.append(compare(f"running_{name}", torch_memory(new), twins, tolerances.everywhere(bound)))
    return rows
