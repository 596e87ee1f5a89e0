# SPDX-License-Identifier: Apache-2.0
"""Dtypes and memory formats of tensors."""

from __future__ import annotations

import torch

# What a kernel takes as x; parameters and statistics of these dtypes are exact in float32.
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def is_narrow(tensor: torch.Tensor) -> bool:
    """Whether it is one of the 16-bit floating formats."""
    return tensor.dtype in (torch.float16, torch.bfloat16)


def in_format_of(like: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """``made`` (contiguous, shaped like ``like``) with the strides of ``torch.empty_like(like)``.

    That is the memory format of ``like``, channels_last and other permutations included. Copies only if it has to.
    """
    strides = torch.empty_like(like, device="meta").stride()
    return made if made.stride() == strides else torch.empty_like(like).copy_(made)
