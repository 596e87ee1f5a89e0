# SPDX-License-Identifier: Apache-2.0
"""Batch norm as modules: subclasses of torch's, with the same constructor arguments and the same state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from nki_bn.torch import functional
from nki_bn.torch.calls import Forward
from nki_bn.torch.formats import is_narrow
from nki_bn.torch.paths import check_backend, path_of

Tensor = torch.Tensor

_STATISTICS = ("running_mean", "running_var")


class KernelBatchNorm(_BatchNorm):
    """What the modules below have in common; it stands before a class of torch's among their bases.

    Args:
        backend: "neuron", "simulator" or "torch"; None chooses by the device (see ``nki_bn.torch.paths``).
        arguments, named: those of torch's class.

    Raises:
        ValueError: ``backend`` is unknown.
    """

    # Of the class, so that a module of torch's that becomes one of these has them.
    backend: str | None = None
    relu_mask: str = "save"
    _relu = False

    def __init__(self, *arguments: Any, backend: str | None = None, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.backend = check_backend(backend)
        for name in _STATISTICS:
            statistic = self._buffers[name]
            if statistic is not None and is_narrow(statistic):
                self._buffers[name] = statistic.float()

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input``, as torch's class does.

        Raises:
            ValueError, RuntimeError: as torch's.
            TypeError: the kernel does not take this dtype.
        """
        if isinstance(input, torch.fx.Proxy):
            return self._as_leaf(input)
        return self._normalise(input)

    def _as_leaf(self, *inputs: Any) -> Any:
        """The node of a symbolic trace, which keeps the module whole as it does torch's own."""
        tracer = inputs[0].tracer
        return tracer.create_proxy("call_module", tracer.path_of_module(self), inputs, {})

    def extra_repr(self) -> str:
        """The constructor's arguments, and the path for the device that the module is on."""
        mask = f", relu_mask={self.relu_mask}" if self._relu else ""
        plain = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{plain}{mask}, path={self.backend or self._path()}"

    def _path(self) -> str:
        tensors = [*self.parameters(recurse=False), *self.buffers(recurse=False)]
        try:
            path: str = path_of(tensors[0].device.type if tensors else "cpu", None)
        except ValueError as error:  # A model can be printed in any environment.
            return f"none, as {error}"
        return path

    def _normalise(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        return functional.run(self._call(input, residual), self.backend)

    def _call(self, input: Tensor, residual: Tensor | None) -> Forward:
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        mean, var = self.running_mean, self.running_var
        counted = self.training and self.track_running_stats
        if self.training and not counted:
            mean = var = None
        counter = self.num_batches_tracked if counted else None
        # Torch leaves the statistics alone if they are to be averaged and nothing counts.
        momentum = 0.0 if self.momentum is None and counter is None else self.momentum
        training = self.training or (mean is None and var is None)
        relu = (self._relu, self._relu and functional.saves_mask(self.relu_mask))
        statistics = (mean, var, counter, momentum, self.eps)
        return Forward(input, self.weight, self.bias, residual, *statistics, *relu, training)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = {name: self._buffers[name] for name in _STATISTICS}
        module = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, statistic in before.items():
            after = self._buffers[name]
            if statistic is not None and after is not None and is_narrow(after) and not is_narrow(statistic):
                # A running average in 16 bits stops moving; what the conversion cut off is still in `statistic`.
                self._buffers[name] = statistic.to(after.device, torch.float32)
        return module


class BatchNorm1d(KernelBatchNorm, torch.nn.BatchNorm1d):
    """``torch.nn.BatchNorm1d``, [B, C] or [B, C, L], by the kernel. Arguments: :class:`KernelBatchNorm`."""


class BatchNorm2d(KernelBatchNorm, torch.nn.BatchNorm2d):
    """``torch.nn.BatchNorm2d``, [B, C, H, W], by the kernel. Arguments: :class:`KernelBatchNorm`."""


class BatchNorm3d(KernelBatchNorm, torch.nn.BatchNorm3d):
    """``torch.nn.BatchNorm3d``, [B, C, D, H, W], by the kernel. Arguments: :class:`KernelBatchNorm`."""


class FusedBatchNorm(KernelBatchNorm):
    """Batch norm that ends in a ReLU.

    Args:
        relu_mask: "save" keeps the mask of the ReLU for the backward, a byte per element; "recompute" keeps none and
            makes it again from the input.

    Raises:
        ValueError: ``relu_mask`` or ``backend`` is unknown.
    """

    _relu = True

    def __init__(self, *arguments: Any, relu_mask: str = "save", **named: Any) -> None:
        super().__init__(*arguments, **named)
        functional.saves_mask(relu_mask)
        self.relu_mask = relu_mask


class BatchNormReLU1d(FusedBatchNorm, BatchNorm1d):
    """:class:`BatchNorm1d` and a ReLU. Arguments: :class:`FusedBatchNorm`."""


class BatchNormReLU2d(FusedBatchNorm, BatchNorm2d):
    """:class:`BatchNorm2d` and a ReLU. Arguments: :class:`FusedBatchNorm`."""


class BatchNormReLU3d(FusedBatchNorm, BatchNorm3d):
    """:class:`BatchNorm3d` and a ReLU. Arguments: :class:`FusedBatchNorm`."""


class AddingBatchNorm(FusedBatchNorm):
    """Batch norm, then a residual is added, then a ReLU; with ``relu_mask="recompute"`` the residual is kept."""

    def forward(self, input: Tensor, residual: Tensor) -> Tensor:  # type: ignore[override]
        """relu(batch_norm(input) + residual).

        Raises:
            ValueError: ``residual`` has another shape than ``input``; or as torch's batch norm.
            TypeError, RuntimeError: as :meth:`KernelBatchNorm.forward`.
        """
        if isinstance(input, torch.fx.Proxy):
            return self._as_leaf(input, residual)
        functional.check_residual(input, residual)
        return self._normalise(input, residual)


class BatchNormAddReLU2d(AddingBatchNorm, BatchNorm2d):
    """:class:`BatchNorm2d`, a residual and a ReLU. Arguments: :class:`FusedBatchNorm`."""


class BatchNormAddReLU3d(AddingBatchNorm, BatchNorm3d):
    """:class:`BatchNorm3d`, a residual and a ReLU. Arguments: :class:`FusedBatchNorm`."""
