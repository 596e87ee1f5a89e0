# SPDX-License-Identifier: Apache-2.0
"""Synchronised batch norm as modules."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch

from nki_bn.synchronised.exchange import MODES, check_mode
from nki_bn.torch import synchronised
from nki_bn.torch.modules import AddingBatchNorm, FusedBatchNorm, KernelBatchNorm
from nki_bn.torch.process_groups import check_agreement, replicas_of
from nki_bn.torch.synchronised import Exchange

Tensor = torch.Tensor

_numbers = itertools.count()


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
        self._number = next(_numbers)

    def extra_repr(self) -> str:
        """That of the plain layer, and the mode."""
        return f"{super().extra_repr()}, mode={self.mode}"

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        """A copy of everything but the process group, which is a connection and cannot be copied."""
        made = type(self).__new__(type(self))
        memo |= {id(self): made, id(self.process_group): self.process_group}
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def _normalise(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        group = replicas_of(self.process_group) if self.training else None
        if group is None:
            return super()._normalise(input, residual)
        call = self._call(input, residual)
        check_agreement(group.key, self._number, self._settings(input), input.device.type)
        return synchronised.run(call, self.backend, Exchange(group, self.mode))

    def _settings(self, input: Tensor) -> tuple[tuple[str, float], ...]:
        """What has to be the same on all ranks, as numbers; momentum None is -1."""
        values = {
            "channels": input.shape[1],
            "eps": self.eps,
            "momentum": -1.0 if self.momentum is None else self.momentum,
            "mode (0: two_round, 1: one_round)": MODES.index(self.mode),
            "fused ReLU": self._relu,
            "track_running_stats": self.track_running_stats,
            "a float64 input": input.dtype == torch.float64,
        }
        return tuple((name, float(value)) for name, value in values.items())


class SyncBatchNormReLU(FusedBatchNorm, SyncBatchNorm):
    """:class:`SyncBatchNorm` and a ReLU. Arguments: those of both bases."""


class SyncBatchNormAddReLU(AddingBatchNorm, SyncBatchNorm):
    """:class:`SyncBatchNorm`, a residual and a ReLU. Arguments: those of both bases."""
