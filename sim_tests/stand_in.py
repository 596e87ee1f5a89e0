# SPDX-License-Identifier: Apache-2.0
"""Tensors on a Neuron device that is not there, and what is launched on it.

A :class:`DeviceTensor` says that it is on a ``neuron`` device, so torch dispatches as for that device; its values are
on the CPU, where all operators but those of this package work on them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from nki_bn.simulator import RunOptions, run
from nki_bn.simulator.torch_memory import to_torch, torch_memory

_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
_setup_privateuseone_for_python_backend("neuron")


class DeviceTensor(torch.Tensor):
    """``values``, a CPU tensor, as a tensor on a device."""

    values: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, values.shape, values.stride(), dtype=values.dtype, device="neuron"
        )
        made.values = values.detach()
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"DeviceTensor({self.values})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "nki_bn":
            return func.redispatch(_KEYS, *args, **(kwargs or {}))
        wrapped: dict[int, DeviceTensor] = {}

        def unwrap(leaf: Any) -> Any:
            if isinstance(leaf, cls):
                wrapped[id(leaf.values)] = leaf
                return leaf.values
            return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "neuron" else leaf

        def wrap(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.device.type == "meta":
                return leaf
            return wrapped[id(leaf)] if id(leaf) in wrapped else cls(leaf)

        return pytree.tree_map(wrap, func(*pytree.tree_map(unwrap, args), **pytree.tree_map(unwrap, kwargs or {})))


@dataclass
class Recorder:
    """Takes the place of ``nki_bn.torch.neuron.launch``: records launches, and runs them in the simulator."""

    launches: list[tuple[str, int, tuple[Any, ...]]] = field(default_factory=list)

    def __call__(self, kernel: Any, lnc: int, arguments: tuple[Any, ...]) -> Any:
        self.launches.append((kernel.__name__, lnc, arguments))
        tensors = [argument for argument in arguments if isinstance(argument, DeviceTensor)]
        assert all(tensor.is_contiguous() for tensor in tensors)
        placed = DeviceTensor if tensors else torch.Tensor.clone
        given = [torch_memory(a.values) if isinstance(a, DeviceTensor) else _host(a) for a in arguments]
        made = run(kernel, tuple(given), {}, lnc, RunOptions()).outputs
        if not isinstance(made, tuple):
            return placed(to_torch(made))
        return tuple(None if output is None else placed(to_torch(output)) for output in made)


def _host(argument: Any) -> Any:
    return torch_memory(argument) if isinstance(argument, torch.Tensor) else argument
