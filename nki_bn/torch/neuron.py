# SPDX-License-Identifier: Apache-2.0
"""The operators on tensors of a Neuron device: the kernels, launched on these tensors by the vendor's nki."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from nki_bn import execute
from nki_bn.execute import BackwardInputs, ForwardInputs
from nki_bn.planner import plan
from nki_bn.problem import GRADIENTS, BackwardProblem, ForwardProblem, Problem, resolve_lnc
from nki_bn.torch import unfilled
from nki_bn.torch.calls import (
    Backward,
    Forward,
    Gradients,
    Moved,
    Outputs,
    backward_gradients,
    forward_outputs,
    recomputing,
    track,
)
from nki_bn.torch.formats import in_format_of

Tensor = torch.Tensor

TARGET = "trn2"
# A plan takes milliseconds, and a network asks for the same ones in every step.
_planned = lru_cache(maxsize=1024)(plan)
_moments_plan = lru_cache(maxsize=1024)(execute.moments_plan)
_input_gradient_plan = lru_cache(maxsize=1024)(execute.input_gradient_plan)


def launch(kernel: Any, lnc: int, arguments: tuple[Any, ...]) -> Any:
    """The results of ``kernel`` on ``lnc`` physical cores.

    Raises:
        RuntimeError: the vendor's nki is not installed.
    """
    if execute.which_nki().kind == "embedded":
        raise RuntimeError("the input is on a Neuron device, for which the vendor's nki has to be installed")
    return kernel[lnc](*arguments)


def forward(call: Forward) -> Outputs:
    """y, the statistics, the mask; the running statistics are moved in place, but not if a backward repeats a forward.

    With momentum None the kernel gives the statistics of the batch, which are averaged in outside: a momentum is part
    of the compiled kernel, and one that changed with every batch would have it compiled for every batch.
    """
    problem = ForwardProblem(**_common(call), relu=_relu(call.relu, call.save_mask), residual=call.residual is not None)
    if problem.count:
        outputs, moved = _launched(call, problem)
    else:
        outputs = Outputs(*(output.zero_() for output in unfilled.forward(call)))
        moved = (call.running_mean, call.running_var)
    if call.training and not recomputing():
        track(call, moved, call.averages)
    return outputs


def backward(call: Backward) -> Gradients:
    """The gradients that are needed: dx and dresidual like x, dgamma and dbeta [C] float32."""
    problem = _backward_problem(call)
    if not problem.count:
        dx, dweight, dbias, dresidual = (gradient.zero_() for gradient in unfilled.backward(call))
        return dx, dweight, dbias, dresidual
    kernel, arguments = execute.backward_call(_backward_inputs(call, problem), problem, _planned(problem))
    return backward_gradients(call, launch(kernel, problem.lnc, arguments))


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance [C] float32 of a shard; zeros if it is empty."""
    call = Forward(x, None, None, None, None, None, None, 0.0, 1.0, relu=False, save_mask=False)
    problem = ForwardProblem(**_common(call))
    if not problem.count:
        mean, var = (output.zero_() for output in unfilled.moments(x))
        return mean, var
    kernel, arguments = execute.forward_call(_forward_inputs(call, problem), problem, _moments_plan(problem))
    _, mean, var, *_ = launch(kernel, problem.lnc, arguments)
    return mean, var


def input_gradient(call: Backward, dweight: Tensor, dbias: Tensor) -> Tensor:
    """dx like x, from the sums of all replicas over the number of all values."""
    problem = _backward_problem(call)
    if not problem.count:
        return torch.zeros_like(call.x)
    sums = dweight.reshape(-1, 1).contiguous(), dbias.reshape(-1, 1).contiguous()
    plan = _input_gradient_plan(problem)
    # The number of values would be part of the compiled kernel, and is not known here: the sums come divided.
    kernel, arguments = execute.input_gradient_call(_backward_inputs(call, problem), sums, 1, problem, plan)
    return in_format_of(call.x, launch(kernel, problem.lnc, arguments).reshape(call.x.shape))


def _backward_problem(call: Backward) -> BackwardProblem:
    relu = _relu(call.relu, call.mask is not None)
    need = tuple(name for name, wanted in zip(GRADIENTS, call.need, strict=True) if wanted)
    residual = relu == "recompute" and call.residual is not None
    return BackwardProblem(**_common(call), relu=relu, residual=residual, need=need)


def _backward_inputs(call: Backward, problem: BackwardProblem) -> BackwardInputs:
    columns: dict[str, Any] = {"mean": call.mean, "var": call.var}
    return BackwardInputs(
        dy=_laid_out(call.dy, problem),
        x=_laid_out(call.x, problem),
        gamma=_parameter(call.weight, 1.0, call.x),
        beta=_parameter(call.bias, 0.0, call.x),
        eps=call.eps,
        relu_mask=_laid_out(call.mask, problem),
        residual=_laid_out(call.residual if problem.residual else None, problem),
        **columns,
    )


def _launched(call: Forward, problem: ForwardProblem) -> tuple[Outputs, Moved]:
    """The outputs, and what the running statistics become, or those of the batch where they are averaged in."""
    kernel, arguments = execute.forward_call(_forward_inputs(call, problem), problem, _planned(problem))
    y, mean, var, *moved, mask = launch(kernel, problem.lnc, arguments)
    if not call.training:
        assert call.running_mean is not None and call.running_var is not None
        mean, var = (statistic.float().clone() for statistic in (call.running_mean, call.running_var))
    return forward_outputs(call, y, mean, var, mask), (moved[0], moved[1])


def _forward_inputs(call: Forward, problem: ForwardProblem) -> ForwardInputs:
    # To be averaged in: the batch has weight 1 in the kernel, and zeros have weight 0, of which an infinity makes NaN.
    statistics = (call.running_mean, call.running_var)
    running_mean, running_var = (
        None if old is None else torch.zeros_like(old.float()) if call.averages else old.float() for old in statistics
    )
    columns: dict[str, Any] = {"running_mean": running_mean, "running_var": running_var}
    return ForwardInputs(
        x=_laid_out(call.x, problem),
        gamma=_parameter(call.weight, 1.0, call.x),
        beta=_parameter(call.bias, 0.0, call.x),
        residual=_laid_out(call.residual, problem),
        momentum=1.0 if call.momentum is None else call.momentum,
        eps=call.eps,
        **columns,
    )


def _common(call: Forward | Backward) -> dict[str, Any]:
    x = call.x
    shape, dtype, target = tuple(x.shape), str(x.dtype).removeprefix("torch."), TARGET
    cores = resolve_lnc(None, target)
    return {"shape": shape, "dtype": dtype, "training": call.training, "lnc": cores, "target": target}


def _relu(fused: bool, with_mask: bool) -> str:
    """One of ``nki_bn.problem.RELU_MODES``."""
    return "none" if not fused else "mask" if with_mask else "recompute"


def _laid_out(tensor: Tensor | None, problem: Problem) -> Any:
    return None if tensor is None else tensor.contiguous().reshape(problem.layout)


def _parameter(values: Tensor | None, missing: float, x: Tensor) -> Any:
    """[C, 1] float32."""
    if values is None:
        return x.new_full((x.shape[1], 1), missing, dtype=torch.float32)
    return values.detach().float().contiguous().reshape(-1, 1)
