# SPDX-License-Identifier: Apache-2.0
"""The operators ``torch.ops.nki_bn.*``: schemas, kernels by device, and the shapes of their results.

Autograd is in ``nki_bn.torch.gradients``.
"""

from __future__ import annotations

from typing import Any

import torch

from nki_bn.torch import neuron, simulator, unfilled
from nki_bn.torch.calls import Backward, Forward

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
    # What replicas do between their reductions. The sums are those of all replicas over the number of all values.
    "batch_norm_moments": "(Tensor x) -> (Tensor mean, Tensor var)",
    "batch_norm_input_gradient": "(Tensor dy, Tensor x, Tensor mean, Tensor var, Tensor? weight, Tensor? bias, "
    "Tensor? relu_mask, Tensor? residual, Tensor dweight, Tensor dbias, float eps, bool relu) -> Tensor",
}
# By the dispatch keys of the CPU, of torch-xla and of the native backend for Neuron devices.
_BACKENDS: dict[str, Any] = {"CPU": simulator, "XLA": neuron, "PrivateUse1": neuron}


def _inference(x: Any, weight: Any, bias: Any, residual: Any, *rest: Any) -> Forward:
    mean, var, eps, relu, save_mask = rest
    return Forward(x, weight, bias, residual, mean, var, None, 0.0, eps, relu, save_mask, training=False)


def _implementations(backend: Any) -> dict[str, Any]:
    return {
        "batch_norm_training": lambda *arguments: tuple(backend.forward(Forward(*arguments))),
        "batch_norm_inference": lambda *arguments: tuple(backend.forward(_inference(*arguments))),
        "batch_norm_backward": lambda *arguments: backend.backward(Backward(*arguments)),
        "batch_norm_moments": backend.moments,
        "batch_norm_input_gradient": lambda *arguments: backend.input_gradient(*_from_sums(*arguments)),
    }


def _from_sums(*arguments: Any) -> tuple[Backward, Any, Any]:
    dy, x, mean, var, weight, bias, mask, residual, dweight, dbias, eps, relu = arguments
    saved = (mean, var, weight, bias, mask, residual)
    return Backward(dy, x, *saved, True, eps, relu, [True, False, False, False]), dweight, dbias


def _register() -> None:
    for name, schema in SCHEMAS.items():
        LIBRARY.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
    for key, backend in _BACKENDS.items():
        for name, kernel in _implementations(backend).items():
            LIBRARY.impl(name, kernel, key)
    for name, kernel in _implementations(unfilled).items():
        torch.library.register_fake(f"nki_bn::{name}", kernel, lib=LIBRARY)


_register()
