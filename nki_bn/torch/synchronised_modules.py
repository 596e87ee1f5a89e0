# SPDX-License-Identifier: Apache-2.0
"""Synchronised batch norm as modules."""

from __future__ import annotations

import copy
import itertools
import weakref
from typing import Any

import torch

from nki_bn.synchronised.exchange import MODES, check_mode
from nki_bn.torch import synchronised
from nki_bn.torch.modules import AddingBatchNorm, FusedBatchNorm, KernelBatchNorm
from nki_bn.torch.process_groups import check_agreement, replicas_of
from nki_bn.torch.synchronised import Exchange

Tensor = torch.Tensor

_numbers = itertools.count()
# By their numbers, which compiled code can hold on to.
_layers: weakref.WeakValueDictionary[int, SyncBatchNorm] = weakref.WeakValueDictionary()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _agree(number: int, group: str, wide: bool, device: str) -> None:
    """Compare a layer over the ranks of a group at first use, which in compiled code is when it is compiled."""
    check_agreement(group, number, _layers[number]._settings(wide), device)


class SyncBatchNorm(KernelBatchNorm):
    """``torch.nn.SyncBatchNorm``, [B, C, ...], by the kernel, on the CPU too: in training with all ranks of a group.

    In eval, without torch.distributed and alone in its group it is the plain batch norm and never communicates.

    Args:
        process_group: of torch; None for all ranks.
        mode: "two_round" (two all-reduces in the forward) or "one_round" (one all-gather).
        arguments, named: those of :class:`KernelBatchNorm`.

    Raises:
        ValueError: ``mode`` or ``backend`` is unknown. In training: a setting differs between the ranks; all ranks
            together have one value per channel; this rank is not in the group.
    """

    mode = "two_round"
    process_group: Any = None

    def __init__(
        self,
        *arguments: Any,
        process_group: Any = None,
        mode: str = "two_round",
        backend: str | None = None,
        **named: Any,
    ) -> None:
        super().__init__(*arguments, backend=backend, **named)
        self.synchronise(process_group, mode)

    def synchronise(self, process_group: Any, mode: str) -> None:
        """Choose the group and the mode."""
        self.process_group, self.mode = process_group, check_mode(mode)
        self._register()

    def _register(self) -> None:
        self._number = next(_numbers)
        _layers[self._number] = self

    def extra_repr(self) -> str:
        """That of the plain layer, and the mode."""
        return f"{super().extra_repr()}, mode={self.mode}"

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        """A copy of everything but the process group, which is a connection and cannot be copied."""
        made = type(self).__new__(type(self))
        memo |= {id(self): made, id(self.process_group): self.process_group}
        vars(made).update(copy.deepcopy(vars(self), memo))
        made._register()
        return made

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._register()

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def _normalise(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        group = replicas_of(self.process_group) if self.training else None
        if group is None:
            return super()._normalise(input, residual)
        call = self._call(input, residual)
        if input.shape[1] != self.num_features:
            raise ValueError(f"input has {input.shape[1]} channels; accepted: {self.num_features}, as all ranks have")
        _agree(self._number, group.key, input.dtype == torch.float64, input.device.type)
        return synchronised.run(call, self.backend, Exchange(group, self.mode))

    def _settings(self, wide: bool) -> tuple[tuple[str, float], ...]:
        """What has to be the same on all ranks, as numbers; momentum None is -1."""
        values = {
            "num_features": self.num_features,
            "eps": self.eps,
            "momentum": -1.0 if self.momentum is None else self.momentum,
            "mode (0: two_round, 1: one_round)": MODES.index(self.mode),
            "fused ReLU": self._relu,
            "track_running_stats": self.track_running_stats,
            "a float64 input": wide,
        }
        return tuple((name, float(value)) for name, value in values.items())


class SyncBatchNormReLU(FusedBatchNorm, SyncBatchNorm):
    """:class:`SyncBatchNorm` and a ReLU. Arguments: those of both bases."""


class SyncBatchNormAddReLU(AddingBatchNorm, SyncBatchNorm):
    """:class:`SyncBatchNorm`, a residual and a ReLU. Arguments: those of both bases."""
