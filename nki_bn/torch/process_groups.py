# SPDX-License-Identifier: Apache-2.0
"""The replicas of torch.distributed: their collectives, and a check that they agree on a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.distributed_c10d import GroupName

Tensor = torch.Tensor

_COLLECTIVES = torch.ops._c10d_functional
# (process group, layer, settings) of what was found to agree.
_AGREED: set[tuple[Any, ...]] = set()


@dataclass(frozen=True)
class ProcessGroup:
    """A :class:`nki_bn.synchronised.Group` of tensors: the functional collectives of a process group.

    Attributes:
        key: by which torch.distributed knows the group.
        size: R, the number of ranks.
    """

    key: str
    size: int

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """One tensor of several.

        Padded and added. Concatenated parts would share the memory of the result in code compiled by Inductor (torch
        2.13), and a collective that works in place would change them under who reads them afterwards.
        """
        length, joined, before = sum(len(part) for part in parts), None, 0
        for part in parts:
            padded = torch.nn.functional.pad(part, (before, length - before - len(part)))
            joined = padded if joined is None else joined + padded
            before += len(part)
        assert joined is not None
        return joined

    def all_reduce(self, name: str, values: Tensor) -> Tensor:
        """The sum over all ranks of ``values``, on each of them."""
        reduced: Tensor = _COLLECTIVES.wait_tensor(_COLLECTIVES.all_reduce(values, "sum", self.key))
        return reduced

    def all_gather(self, name: str, values: Tensor) -> Tensor:
        """[R, K]: ``values`` [K] of all ranks, on each of them."""
        gathered = _COLLECTIVES.all_gather_into_tensor(values, self.size, self.key)
        rows: Tensor = _COLLECTIVES.wait_tensor(gathered)
        return rows.reshape(self.size, -1)


def replicas_of(group: Any) -> ProcessGroup | None:
    """The replicas in ``group``, a process group of torch or None for all ranks.

    None if there is nobody to exchange with: nothing is initialised, or this rank is alone.

    Raises:
        ValueError: this rank is not in the group.
    """
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    chosen = distributed.group.WORLD if group is None else group
    if not isinstance(chosen, distributed.ProcessGroup):
        raise ValueError("process_group is one without this rank; accepted: a group with it, or None for all ranks")
    return ProcessGroup(chosen.group_name, chosen.size()) if chosen.size() > 1 else None


def check_agreement(group: str, layer: int, settings: tuple[tuple[str, float], ...], device: str) -> None:
    """Compare the settings of a layer over the ranks of a group, by a collective at first use.

    Args:
        group: the key of the process group.
        layer: a number of the layer in this process.
        settings: (name, value), the same names on all ranks.
        device: type of the device that the group communicates from.

    Raises:
        ValueError: on all ranks: a setting differs; names it, and its values by rank.
        RuntimeError: from torch: a rank did not come within the timeout of the group.
    """
    key = (group, layer, settings)
    if key in _AGREED:
        return
    names = [name for name, _ in settings]
    process_group = _resolve_process_group(GroupName(group))
    mine = torch.tensor([value for _, value in settings], dtype=torch.float32, device=device)
    gathered = [torch.empty_like(mine) for _ in range(process_group.size())]
    distributed.all_gather(gathered, mine, group=process_group)
    by_name = zip(names, zip(*(row.tolist() for row in gathered), strict=True), strict=True)
    differing = [f"{name} is {_listed(values)}" for name, values in by_name if len(set(values)) > 1]
    if differing:
        raise ValueError(f"the ranks of a batch norm differ: {'; '.join(differing)}; accepted: the same on all ranks")
    _AGREED.add(key)


def _listed(values: tuple[float, ...]) -> str:
    """The values by rank."""
    return ", ".join(f"{value:g} on rank {rank}" for rank, value in enumerate(values))
