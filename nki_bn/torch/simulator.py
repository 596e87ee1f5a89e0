# SPDX-License-Identifier: Apache-2.0
"""The operators on CPU tensors: the NumPy functions of the package, which run the kernels in the simulator."""

from __future__ import annotations

import torch

from nki_bn import execute, ops
from nki_bn.problem import GRADIENTS, OUTPUTS, Array, BackwardCase, ForwardCase
from nki_bn.requests import prepare_backward, prepare_forward
from nki_bn.simulator.torch_memory import to_torch, torch_memory
from nki_bn.torch import unfilled
from nki_bn.torch.calls import (
    Backward,
    Forward,
    Gradients,
    Outputs,
    backward_gradients,
    forward_outputs,
    recomputing,
    track,
)
from nki_bn.torch.formats import in_format_of


def forward(call: Forward) -> Outputs:
    """y, the statistics, the mask; the running statistics are moved in place, but not if a backward repeats a forward.

    Raises:
        TypeError, ValueError: as ``nki_bn.batch_norm_fwd``.
    """
    counter = call.num_batches_tracked if call.momentum is None else None
    out = ops.batch_norm_fwd(
        torch_memory(call.x),
        _column(call.weight),
        _column(call.bias),
        _column(call.running_mean),
        _column(call.running_var),
        call.momentum,
        call.eps,
        call.training,
        call.relu,
        None if call.residual is None else torch_memory(call.residual),
        num_batches_tracked=None if counter is None else int(counter),
        save_relu_mask=call.save_mask,
    )
    if call.training and not recomputing():
        track(call, (_optional(out.running_mean), _optional(out.running_var)))
    return forward_outputs(call, to_torch(out.y), to_torch(out.mean), to_torch(out.var), _optional(out.relu_mask))


def backward(call: Backward) -> Gradients:
    """The gradients that are needed: dx and dresidual like x, dgamma and dbeta [C] float32."""
    needed = [name for name, wanted in zip(GRADIENTS, call.need, strict=True) if wanted]
    case = _backward_case(call)
    results = ops.batch_norm_bwd(
        case.dy,
        case.x,
        case.mean,
        case.var,
        case.gamma,
        case.beta,
        case.eps,
        case.fuse_relu,
        case.relu_mask,
        residual=case.residual,
        training=case.training,
        need=[name for name in needed if name in OUTPUTS],
        residual_grad="dresidual" in needed,
    )
    return backward_gradients(call, [_optional(result) for result in results])


def moments(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and biased variance [C] float32 of a shard; zeros if it is empty."""
    request = prepare_forward(ForwardCase(torch_memory(x), None, None), part=True)
    if not request.problem.count:
        mean, var = (output.zero_() for output in unfilled.moments(x))
        return mean, var
    made = execute.run_moments(request.inputs, request.problem)
    return to_torch(made[0]), to_torch(made[1])


def input_gradient(call: Backward, dweight: torch.Tensor, dbias: torch.Tensor) -> torch.Tensor:
    """dx like x, from the sums of all replicas over the number of all values."""
    request = prepare_backward(_backward_case(call), ("dx",))
    if not request.problem.count:
        return torch.zeros_like(call.x)
    sums = torch_memory(dweight.contiguous()), torch_memory(dbias.contiguous())
    made = execute.run_input_gradient(request.inputs, *sums, 1, request.problem)
    return in_format_of(call.x, to_torch(made).reshape(call.x.shape))


def _backward_case(call: Backward) -> BackwardCase:
    return BackwardCase(
        torch_memory(call.dy),
        torch_memory(call.x),
        torch_memory(call.mean),
        torch_memory(call.var),
        _column(call.weight),
        # Asked for, a gradient needs its parameter; the value of this one is read where a mask is recomputed only.
        _column(call.mean.new_zeros(len(call.mean)) if call.bias is None else call.bias),
        call.eps,
        call.relu,
        None if call.mask is None else torch_memory(call.mask),
        call.training,
        None if call.residual is None else torch_memory(call.residual),
    )


def _column(values: torch.Tensor | None) -> Array | None:
    """A parameter or statistic in float32, which a kernel takes; narrower ones are exact in it."""
    return None if values is None else torch_memory(values.detach().float())


def _optional(made: Array | None) -> torch.Tensor | None:
    return None if made is None else to_torch(made)
