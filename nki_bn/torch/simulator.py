# SPDX-License-Identifier: Apache-2.0
"""The operators on CPU tensors: the NumPy functions of the package, which run the kernels in the simulator."""

from __future__ import annotations

import torch

from nki_bn import ops
from nki_bn.problem import GRADIENTS, OUTPUTS, Array
from nki_bn.simulator.torch_memory import to_torch, torch_memory
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
    results = ops.batch_norm_bwd(
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
        residual=None if call.residual is None else torch_memory(call.residual),
        training=call.training,
        need=[name for name in needed if name in OUTPUTS],
        residual_grad="dresidual" in needed,
    )
    return backward_gradients(call, [_optional(result) for result in results])


def _column(values: torch.Tensor | None) -> Array | None:
    """A parameter or statistic in float32, which a kernel takes; narrower ones are exact in it."""
    return None if values is None else torch_memory(values.detach().float())


def _optional(made: Array | None) -> torch.Tensor | None:
    return None if made is None else to_torch(made)
