# SPDX-License-Identifier: Apache-2.0
"""Torch tensors and NumPy arrays over the same memory; NumPy knows some dtypes through ml_dtypes only."""

from __future__ import annotations

from typing import Any

import numpy as np

from nki_bn.simulator import dtypes
from nki_bn.simulator.numerics import Array


def torch_memory(tensor: Any) -> Array:
    """A view of a CPU torch tensor's memory, of whatever strides (of a copy, where the tensor is on a device).

    bfloat16 and float8 pass through their bits.
    """
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    name = str(tensor.dtype).removeprefix("torch.")
    if name == "bfloat16" or name.startswith("float8"):
        import torch

        bits = tensor.view(torch.int16 if name == "bfloat16" else torch.uint8).numpy()
        return bits.view(dtypes.to_numpy(dtypes.normalize(name)))  # type: ignore[no-any-return]
    return tensor.numpy()  # type: ignore[no-any-return]


def to_torch(array: Array) -> Any:
    """A torch tensor over the memory of ``array``."""
    import torch

    name = array.dtype.name
    if name == "bfloat16" or name.startswith("float8"):
        bits = torch.from_numpy(array.view(np.int16 if name == "bfloat16" else np.uint8))
        return bits.view(getattr(torch, name))
    return torch.from_numpy(array)
