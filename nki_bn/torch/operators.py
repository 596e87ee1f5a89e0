# SPDX-License-Identifier: Apache-2.0
"""The operators ``torch.ops.nki_bn.*``: schemas, kernels by device, and the shapes of their results.

Autograd is in ``nki_bn.torch.gradients``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nki_bn.torch import neuron, simulator
from nki_bn.torch.calls import Backward, Forward, Gradients, Outputs, unfilled_gradients, unfilled_outputs

LIBRARY: Any = torch.library.Library("nki_bn", "DEF")  # type: ignore[no-untyped-call]
_RETURNS = "(Tensor y, Tensor mean, Tensor var, Tensor relu_mask)"
SCHEMAS = {
    "batch_norm_training": "(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, Tensor(a!)? running_mean, "
    "Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked, float? momentum, float eps, bool relu, bool save_mask)"
    f" -> {_RETURNS}",
    "batch_norm_inference": "(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, Tensor running_mean, "
    f"Tensor running_var, float eps, bool relu, bool save_mask) -> {_RETURNS}",
    "batch_norm_backward": "(Tensor dy, Tensor x, Tensor mean, Tensor var, Tensor? weight, Tensor? bias, "
    "Tensor? relu_mask, Tensor? residual, bool training, float eps, bool relu, bool[4] need)"
    " -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dresidual)",
}
# By the dispatch keys of the CPU, of torch-xla and of the native backend for Neuron devices.
_BACKENDS: dict[str, Any] = {"CPU": simulator, "XLA": neuron, "PrivateUse1": neuron}


def _inference(x: Any, weight: Any, bias: Any, residual: Any, *rest: Any) -> Forward:
    mean, var, eps, relu, save_mask = rest
    return Forward(x, weight, bias, residual, mean, var, None, 0.0, eps, relu, save_mask, training=False)


def _implementations(
    forward: Callable[[Forward], Outputs], backward: Callable[[Backward], Gradients]
) -> dict[str, Any]:
    return {
        "batch_norm_training": lambda *arguments: tuple(forward(Forward(*arguments))),
        "batch_norm_inference": lambda *arguments: tuple(forward(_inference(*arguments))),
        "batch_norm_backward": lambda *arguments: backward(Backward(*arguments)),
    }


def _register() -> None:
    for name, schema in SCHEMAS.items():
        LIBRARY.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
    for key, backend in _BACKENDS.items():
        for name, kernel in _implementations(backend.forward, backend.backward).items():
            LIBRARY.impl(name, kernel, key)
    for name, kernel in _implementations(unfilled_outputs, unfilled_gradients).items():
        torch.library.register_fake(f"nki_bn::{name}", kernel, lib=LIBRARY)


_register()
