# SPDX-License-Identifier: Apache-2.0
"""The arguments of the operators, in the order of their schemas, and what every backend does with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from nki_bn.torch.formats import in_format_of

Tensor = torch.Tensor

_VIEW_TRACKING = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


@dataclass(frozen=True)
class Forward:
    """A forward: with the statistics of the batch (training), or with the running ones.

    Attributes:
        x: [B, C, ...]; ``residual`` (or None) like it.
        weight, bias: [C], or None for 1 and 0.
        running_mean, running_var: [C]; None if not tracked. In training they are moved, with ``num_batches_tracked``.
        momentum: weight of this batch in them; None for the average over all batches that are counted.
        save_mask: return the mask of the ReLU.
    """

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    residual: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None
    momentum: float | None
    eps: float
    relu: bool
    save_mask: bool
    training: bool = True

    @property
    def averages(self) -> bool:
        """Whether the running statistics become the average over all batches."""
        return self.training and self.running_mean is not None and self.momentum is None


class Outputs(NamedTuple):
    """Of a forward: y like x; mean and (biased) var [C] float32, what x was normalised with; the mask of the ReLU.

    The mask is uint8, contiguous and shaped like x, or empty if it is not saved.
    """

    y: Tensor
    mean: Tensor
    var: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Backward:
    """A backward, with what its forward was given and returned.

    ``need`` says which of the gradients of x, weight, bias and residual to compute.
    """

    dy: Tensor
    x: Tensor
    mean: Tensor
    var: Tensor
    weight: Tensor | None
    bias: Tensor | None
    mask: Tensor | None
    residual: Tensor | None
    training: bool
    eps: float
    relu: bool
    need: list[bool]


# A mean and a variance, [C] each, where there are any.
Moved = tuple[Tensor | None, Tensor | None]
# The gradients of x, weight, bias and residual; one that is not needed is empty.
Gradients = tuple[Tensor, Tensor, Tensor, Tensor]


def recomputing() -> bool:
    """Whether a backward pass is under way: a forward inside it repeats one of before, as checkpointing does."""
    return torch._C._current_graph_task_id() != -1


def track(call: Forward, moved: Moved | None, averaging: bool = False) -> None:
    """Count a batch of training, and move the running statistics in place.

    ``moved`` is what they become or, ``averaging``, those of the batch, which enter the average over all batches; None
    if they have moved already.
    """
    counter = call.num_batches_tracked
    if counter is not None:
        counter.add_(1)
    for running, new in zip((call.running_mean, call.running_var), moved or (None, None), strict=True):
        if running is None or new is None:
            continue
        if averaging:
            assert counter is not None
            running.lerp_(new.to(running.dtype), counter.to(running.dtype).reciprocal())
        else:
            running.copy_(new)


def forward_outputs(call: Forward, y: Tensor, mean: Tensor, var: Tensor, mask: Tensor | None) -> Outputs:
    """What the kernel made, in the shape and memory format of x."""
    saved = absent(call.x, torch.uint8) if mask is None else mask.reshape(call.x.shape)
    return Outputs(_as_x(call.x, y), mean, var, saved)


def backward_gradients(call: Backward, made: Sequence[Tensor | None]) -> Gradients:
    """What the kernel made, the gradient of the residual perhaps left off, in the shape and memory format of x."""
    dx, dweight, dbias, dresidual = (*made, None)[:4]
    return _as_x(call.x, dx), _as_sum(call.x, dweight), _as_sum(call.x, dbias), _as_x(call.x, dresidual)


def _as_x(x: Tensor, made: Tensor | None) -> Tensor:
    if made is None:
        return absent(x, x.dtype)
    # Autograd must not see a view in it: what follows a batch norm may change the result in place, as a ReLU does.
    with torch._C._ExcludeDispatchKeyGuard(_VIEW_TRACKING):
        shaped = made.reshape(x.shape)
    return in_format_of(x, shaped)


def _as_sum(x: Tensor, made: Tensor | None) -> Tensor:
    return absent(x, torch.float32) if made is None else made.reshape(-1)


def absent(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What an operator returns for an output that is not made."""
    return x.new_empty(0, dtype=dtype)
