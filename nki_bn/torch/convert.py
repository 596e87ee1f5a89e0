# SPDX-License-Identifier: Apache-2.0
"""Turning the batch norms of a model into those of this package, and back.

A layer changes its class and nothing else: it stays the same object with the same parameters, buffers and attributes,
so that whatever holds it or them (optimisers, several parents, lists) goes on holding it.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from nki_bn.synchronised.exchange import check_mode
from nki_bn.torch import modules
from nki_bn.torch.functional import saves_mask
from nki_bn.torch.modules import KernelBatchNorm
from nki_bn.torch.paths import check_backend
from nki_bn.torch.synchronised_modules import SyncBatchNorm, SyncBatchNormAddReLU, SyncBatchNormReLU

Module = TypeVar("Module", bound=nn.Module)

_PLAIN: dict[type[nn.Module], type[KernelBatchNorm]] = {
    nn.BatchNorm1d: modules.BatchNorm1d,
    nn.BatchNorm2d: modules.BatchNorm2d,
    nn.BatchNorm3d: modules.BatchNorm3d,
}
_FUSED: dict[type[nn.Module], type[KernelBatchNorm]] = {
    modules.BatchNorm1d: modules.BatchNormReLU1d,
    modules.BatchNorm2d: modules.BatchNormReLU2d,
    modules.BatchNorm3d: modules.BatchNormReLU3d,
}
_SYNCHRONISED: dict[type[nn.Module], type[SyncBatchNorm]] = {
    **dict.fromkeys((*_PLAIN, *_PLAIN.values(), nn.SyncBatchNorm, SyncBatchNorm), SyncBatchNorm),
    **dict.fromkeys((*_FUSED.values(), SyncBatchNormReLU), SyncBatchNormReLU),
    modules.BatchNormAddReLU2d: SyncBatchNormAddReLU,
    modules.BatchNormAddReLU3d: SyncBatchNormAddReLU,
    SyncBatchNormAddReLU: SyncBatchNormAddReLU,
}
_TORCH = {ours: theirs for theirs, plain in _PLAIN.items() for ours in (plain, _FUSED[plain])}
# What each conversion takes.
_CONVERTED = (*_PLAIN, *_FUSED)
_SYNCHRONISABLE = tuple(_SYNCHRONISED)


class FusedReLU(nn.Identity):
    """Stands where a ReLU was that the batch norm before it has taken over, and keeps it for the way back."""

    def __init__(self, relu: nn.ReLU) -> None:
        super().__init__()
        # In a tuple it is no submodule.
        self.relu = (relu,)


def _check_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is {module!r}; accepted: a torch.nn.Module")


def convert_batch_norm(
    module: Module, *, backend: str | None = None, fuse_relu: bool = False, relu_mask: str = "save"
) -> Module:
    """Make every batch norm in ``module`` one of this package, in place.

    Args:
        module: a model, or a batch norm itself.
        backend: that of the layers, those that were converted before included: "neuron", "simulator" or "torch"; None
            leaves it as it is, which for new ones is the choice by the device.
        fuse_relu: let a batch norm that a ReLU follows directly in an ``nn.Sequential`` take that over. Not done if the
            model holds the batch norm at several places.
        relu_mask: "save" or "recompute", for these.

    Returns:
        ``module``. Layers keep their identity, parameters, buffers and attributes.

    Warns:
        UserWarning: names the layers that are left as they are, because they are of a subclass (whose ``forward`` may
            do more), have hooks or a ``forward`` of their own, or are not initialised yet.

    Raises:
        TypeError: ``module`` is none.
        ValueError: ``backend`` or ``relu_mask`` is unknown.
    """
    _check_module(module)
    check_backend(backend)
    saves_mask(relu_mask)
    foreign = ((name, layer) for name, layer in _batch_norms(module) if not isinstance(layer, KernelBatchNorm))
    _warn("not converted", {name: _obstacle(layer, _CONVERTED) for name, layer in foreign})
    for _, layer in _batch_norms(module):
        if type(layer) in _PLAIN and not _obstacle(layer, _CONVERTED):
            layer.__class__ = _PLAIN[type(layer)]
        if backend is not None and isinstance(layer, KernelBatchNorm):
            layer.backend = backend
    for parent, norm_name, relu_name in _fusible(module) if fuse_relu else ():
        norm, relu = parent._modules[norm_name], parent._modules[relu_name]
        assert isinstance(norm, KernelBatchNorm) and isinstance(relu, nn.ReLU)
        norm.__class__, norm.relu_mask = _FUSED[type(norm)], relu_mask
        parent._modules[relu_name] = FusedReLU(relu)
    return module


def convert_sync_batch_norm(
    module: Module, process_group: Any = None, *, mode: str = "two_round", backend: str | None = None
) -> Module:
    """Make every batch norm in ``module`` synchronise over the ranks of a process group in training, in place.

    Those of torch, ``torch.nn.SyncBatchNorm`` included, become ``SyncBatchNorm``; fused ones of this package keep their
    ReLU and residual. Layers keep their identity, parameters, buffers and attributes.

    Args:
        module: a model, or a batch norm itself.
        process_group: of torch.distributed; None for all ranks, or for the group that a layer has already.
        mode: "two_round" or "one_round".
        backend: as for :func:`convert_batch_norm`.

    Returns:
        ``module``.

    Warns:
        UserWarning: names the layers that are left as they are, as :func:`convert_batch_norm` does.

    Raises:
        ValueError: ``mode`` or ``backend`` is unknown.
    """
    check_backend(backend)
    check_mode(mode)
    found = list(_batch_norms(module))
    obstacles = {name: _obstacle(layer, _SYNCHRONISABLE) for name, layer in found}
    _warn("not converted", obstacles)
    for name, layer in found:
        if obstacles[name]:
            continue
        group = getattr(layer, "process_group", None) if process_group is None else process_group
        layer.__class__ = _SYNCHRONISED[type(layer)]
        assert isinstance(layer, SyncBatchNorm)
        layer.synchronise(group, mode)
        if backend is not None:
            layer.backend = backend
    return module


def revert_batch_norm(module: Module) -> Module:
    """Undo :func:`convert_batch_norm`, in place; parameters and buffers are as they are, to the bit and in dtype.

    Returns:
        ``module``.

    Warns:
        UserWarning: names the layers that are left as they are: batch norms with a ReLU that were not made by
            ``convert_batch_norm``, and subclasses.
    """
    for parent in module.modules():
        for norm_name, relu_name in _neighbours(parent):
            norm, stand_in = parent._modules[norm_name], parent._modules[relu_name]
            if type(norm) in _TORCH and isinstance(stand_in, FusedReLU):
                assert isinstance(norm, KernelBatchNorm)
                _return(norm)
                parent._modules[relu_name] = stand_in.relu[0]
    for _, layer in _batch_norms(module):
        if isinstance(layer, KernelBatchNorm) and type(layer) in _PLAIN.values():
            _return(layer)
    fused = (name for name, layer in _batch_norms(module) if isinstance(layer, KernelBatchNorm))
    _warn("not reverted", dict.fromkeys(fused, "it does more than torch's batch norm"))
    return module


def _batch_norms(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every batch norm once, with the first of its names."""
    return ((name or "the module", layer) for name, layer in module.named_modules() if isinstance(layer, _BatchNorm))


def _obstacle(layer: nn.Module, accepted: tuple[type[nn.Module], ...]) -> str | None:
    """Why ``layer`` is not converted or fused; None if it can be."""
    if type(layer) not in accepted:
        return f"it is a {type(layer).__qualname__}, accepted: BatchNorm1d, BatchNorm2d and BatchNorm3d themselves"
    if "forward" in vars(layer):
        return "it has a forward of its own"
    return "it has hooks" if _has_hooks(layer) else None


def _has_hooks(layer: nn.Module) -> bool:
    return any(value for name, value in vars(layer).items() if name.endswith("_hooks"))


def _warn(what: str, reasons: dict[str, str | None]) -> None:
    named = [f"{name}: {reason}" for name, reason in reasons.items() if reason]
    if named:
        warnings.warn(f"batch norms {what} ({'; '.join(named)})", stacklevel=3)


def _neighbours(parent: nn.Module) -> Iterator[tuple[str, str]]:
    """The names of every two children that ``parent`` calls one after the other; none unless it is a plain sequence."""
    runs_in_order = isinstance(parent, nn.Sequential) and type(parent).forward is nn.Sequential.forward
    names = list(parent._modules) if runs_in_order else []
    return zip(names, names[1:], strict=False)


def _fusible(module: nn.Module) -> list[tuple[nn.Module, str, str]]:
    """Parent, name of the batch norm and name of the ReLU of every pair that may become one."""
    places = Counter(id(child) for parent in module.modules() for child in parent._modules.values())
    found = []
    for parent in module.modules():
        for names in _neighbours(parent):
            norm, relu = (parent._modules[name] for name in names)
            plain = norm is not None and type(norm) in _FUSED and not _obstacle(norm, _CONVERTED)
            if plain and places[id(norm)] == 1 and type(relu) is nn.ReLU and not _has_hooks(relu):
                found.append((parent, *names))
    return found


def _return(layer: KernelBatchNorm) -> None:
    plain = _TORCH[type(layer)]
    layer.__class__ = plain  # type: ignore[assignment]
    for option in ("backend", "relu_mask"):
        vars(layer).pop(option, None)
