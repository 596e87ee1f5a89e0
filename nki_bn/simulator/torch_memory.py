# SPDX-License-Identifier: Apache-2.0
"""Torch tensors and NumPy arrays over the same memory; NumPy knows some dtypes through ml_dtypes only."""

from __future__ import annotations

from typing import Any

import numpy as np

from nki_bn.simulator import dtypes
from nki_bn.simulator.numerics import Array


def torch_memory(tensor: Any) -> Array:
    """A view of a CPU torch tensor's memory, of whatever strides (of a copy, where the tensor is on a device).

    bfloat16 and float8 pass through their bits. The storage stays resizable, which it would not after
    ``tensor.numpy()``: sharded training frees and refills the storage of parameters.
    """
    tensor = tensor.detach().resolve_neg()
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    name = str(tensor.dtype).removeprefix("torch.")
    if name == "bfloat16" or name.startswith("float8"):
        import torch

        bits = np.from_dlpack(tensor.view(torch.int16 if name == "bfloat16" else torch.uint8))
        return bits.view(dtypes.to_numpy(dtypes.normalize(name)))
    return np.from_dlpack(tensor)


def to_torch(array: Array) -> Any:
    """A torch tensor over the memory of ``array``."""
    import torch

    name = array.dtype.name
    if name == "bfloat16" or name.startswith("float8"):
        bits = torch.from_numpy(array.view(np.int16 if name == "bfloat16" else np.uint8))
        return bits.view(getattr(torch, name))
    return torch.from_numpy(array)
