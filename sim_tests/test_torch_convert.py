# SPDX-License-Identifier: Apache-2.0
"""Conversion of models and back: what becomes of layers, and what is left alone and named."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch_judging import drawn, with_drawn_state
from torch_models import small_resnet

import nki_bn.torch as nbt


@pytest.fixture(autouse=True)
def warnings_are_errors() -> Any:
    """Nothing is left alone without a test that expects it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def state_of(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Everything a layer holds, by identity where that is what counts."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    held = {name: (id(tensor), tensor.dtype, tensor._version, tensor.requires_grad) for name, tensor in tensors}
    return held | {name: (id(module), module.training) for name, module in model.named_modules()}


@pytest.mark.parametrize("fuse_relu", [False, True])
def test_there_and_back(fuse_relu: bool) -> None:
    """Only classes change on the way there, and back there is what there was."""
    model = small_resnet()
    model[3].bn1.eval()
    model[3].bn2.weight.requires_grad_(False)
    classes = {name: type(module) for name, module in model.named_modules()}
    before = state_of(model)
    assert nbt.convert_batch_norm(model, fuse_relu=fuse_relu) is model
    converted = state_of(model)
    assert {name for name in before if converted[name] != before[name]} == ({"2"} if fuse_relu else set())
    assert type(model[1]) is (nbt.BatchNormReLU2d if fuse_relu else nbt.BatchNorm2d)
    assert nbt.revert_batch_norm(model) is model
    assert state_of(model) == before
    assert {name: type(module) for name, module in model.named_modules()} == classes
    assert not {"backend", "relu_mask"} & set(vars(model[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_dtypes_survive(dtype: torch.dtype) -> None:
    model = nn.Sequential(with_drawn_state(nn.BatchNorm2d(3)).to(dtype))
    before = copy.deepcopy(model.state_dict())
    after = nbt.revert_batch_norm(nbt.convert_batch_norm(model)).state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) and after[name].dtype == before[name].dtype for name in before)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_module_that_is_a_batch_norm(rank: int) -> None:
    kind = getattr(nn, f"BatchNorm{rank}d")
    module = nbt.convert_batch_norm(kind(3, momentum=None), backend="simulator")
    assert type(module) is getattr(nbt, f"BatchNorm{rank}d") and module.backend == "simulator"
    assert type(nbt.convert_batch_norm(module)) is type(module) and module.backend == "simulator"
    assert type(nbt.revert_batch_norm(module)) is kind


def test_converting_again_changes_what_is_asked() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nbt.BatchNormReLU2d(3, backend="torch"))
    nbt.convert_batch_norm(model, backend="simulator")
    assert type(model[0]) is nbt.BatchNorm2d and model[0].backend == model[2].backend == "simulator"
    nbt.convert_batch_norm(model, fuse_relu=True, relu_mask="recompute")
    assert type(model[0]) is nbt.BatchNormReLU2d and model[0].backend == "simulator"
    assert (model[0].relu_mask, model[2].relu_mask) == ("recompute", "save")
    nbt.convert_batch_norm(model, backend="torch", fuse_relu=True)
    assert model[0].backend == "torch" and type(model[2]) is nbt.BatchNormReLU2d


def test_a_converted_layer_with_hooks_is_not_fused() -> None:
    model = nbt.convert_batch_norm(nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()))
    model[0].register_forward_hook(lambda module, inputs, output: None)
    nbt.convert_batch_norm(model, fuse_relu=True)
    assert type(model[0]) is nbt.BatchNorm2d and type(model[1]) is nn.ReLU


def test_outputs_are_those_of_the_model() -> None:
    model, x = small_resnet().eval(), drawn((2, 3, 8, 8))
    wanted = model(x)
    for fuse_relu in (False, True):
        converted = nbt.convert_batch_norm(copy.deepcopy(model), backend="torch", fuse_relu=fuse_relu)
        assert torch.equal(converted(x), wanted)
        assert torch.equal(nbt.revert_batch_norm(converted)(x), wanted)


def test_shared_modules_and_parameters_stay_shared() -> None:
    norm, twin = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    twin.weight = norm.weight
    inner = nn.Sequential(norm, nn.ReLU())
    model = nn.ModuleDict({"a": inner, "b": nn.Sequential(norm, nn.ReLU(), norm), "c": inner, "d": twin})
    nbt.convert_batch_norm(model, fuse_relu=True)
    assert model["a"][0] is model["b"][0] is model["b"][2] is norm
    assert type(norm) is nbt.BatchNorm2d, "its ReLU stands behind it at some places only"
    assert model["d"].weight is norm.weight and type(model["d"]) is nbt.BatchNorm2d


def test_a_shared_sequence_is_fused_once() -> None:
    inner = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU())
    model = nn.Sequential(inner, inner)
    x = drawn((2, 3, 4, 4))
    wanted = copy.deepcopy(model)(x)
    nbt.convert_batch_norm(model, fuse_relu=True, relu_mask="recompute")
    assert model[0] is model[1] and type(inner[0]) is nbt.BatchNormReLU2d and inner[0].relu_mask == "recompute"
    assert torch.equal(model(x), wanted)
    assert type(nbt.revert_batch_norm(model)[1][1]) is nn.ReLU


class OwnOrder(nn.Sequential):
    """A sequence that is none: what stands behind a layer does not follow it."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self[0](input)


@pytest.mark.parametrize(
    "model",
    [
        OwnOrder(nn.BatchNorm2d(3), nn.ReLU()),
        nn.Sequential(nn.BatchNorm2d(3), nn.Identity(), nn.ReLU()),
        nn.Sequential(nn.BatchNorm2d(3), nn.ReLU6()),
        nn.ModuleList([nn.BatchNorm2d(3), nn.ReLU()]),
    ],
    ids=["forward of its own", "something between", "another activation", "a list"],
)
def test_what_is_not_fused(model: Any) -> None:
    nbt.convert_batch_norm(model, fuse_relu=True)
    assert type(model[0]) is nbt.BatchNorm2d


def test_a_relu_with_hooks_is_not_fused() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU())
    model[1].register_forward_hook(lambda module, inputs, output: None)
    nbt.convert_batch_norm(model, fuse_relu=True)
    assert type(model[0]) is nbt.BatchNorm2d and type(model[1]) is nn.ReLU


def test_fusion_is_done_only_when_asked() -> None:
    model = nbt.convert_batch_norm(nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()))
    assert type(model[0]) is nbt.BatchNorm2d and type(model[1]) is nn.ReLU


def with_hook(register: str) -> nn.Module:
    module = nn.BatchNorm2d(3)
    getattr(module, register)(lambda *arguments: None)
    return module


def with_own_forward() -> nn.Module:
    module = nn.BatchNorm2d(3)
    module.forward = lambda input: input  # type: ignore[method-assign]
    return module


def parametrised() -> nn.Module:
    module = nn.BatchNorm2d(3)
    nn.utils.parametrize.register_parametrization(module, "weight", nn.Softplus())
    return module


LEFT_ALONE: dict[str, Any] = {
    "it has hooks": lambda: with_hook("register_forward_hook"),
    "it has hooks ": lambda: with_hook("register_forward_pre_hook"),
    "it has hooks  ": lambda: with_hook("register_full_backward_hook"),
    "it has hooks   ": lambda: with_hook("register_state_dict_pre_hook"),
    "it has a forward of its own": with_own_forward,
    "it is a ParametrizedBatchNorm2d": parametrised,
    "it is a LazyBatchNorm2d": nn.LazyBatchNorm2d,
    "it is a SyncBatchNorm": lambda: nn.SyncBatchNorm(3),
}


@pytest.mark.parametrize("reason", LEFT_ALONE)
def test_what_is_left_alone_is_named(reason: str) -> None:
    layer = LEFT_ALONE[reason]()
    kind = type(layer)
    model = nn.Sequential(nn.Sequential(nn.BatchNorm2d(3)), layer, nn.ReLU())
    with pytest.warns(UserWarning, match=rf"^batch norms not converted \(1: {reason.strip()}"):
        nbt.convert_batch_norm(model, fuse_relu=True)
    assert model[1] is layer and type(layer) is kind and type(model[2]) is nn.ReLU
    assert type(model[0][0]) is nbt.BatchNorm2d
    with pytest.warns(UserWarning, match="the module: it"):
        nbt.convert_batch_norm(LEFT_ALONE[reason]())


def test_a_lazy_layer_is_converted_once_it_knows_its_size() -> None:
    model = nn.Sequential(nn.LazyBatchNorm2d())
    model(drawn((2, 3, 4, 4)))
    assert type(nbt.convert_batch_norm(model)[0]) is nbt.BatchNorm2d


def test_attributes_are_carried_over() -> None:
    module: Any = nn.BatchNorm2d(3)
    module.qconfig = marker = object()
    assert nbt.convert_batch_norm(module).qconfig is marker


def test_layers_that_do_more_are_not_reverted() -> None:
    model = nn.Sequential(nbt.BatchNormReLU2d(3), nbt.BatchNorm2d(3))
    with pytest.warns(UserWarning, match=r"not reverted \(0: it does more than torch's batch norm\)"):
        nbt.revert_batch_norm(model)
    assert [type(layer) for layer in model] == [nbt.BatchNormReLU2d, nn.BatchNorm2d]


def test_wrong_options_are_refused_before_anything_changes() -> None:
    model = small_resnet()
    with pytest.raises(ValueError, match="backend is 'cuda'; accepted: 'neuron', 'simulator', 'torch' and None"):
        nbt.convert_batch_norm(model, backend="cuda")
    with pytest.raises(ValueError, match="relu_mask is 'keep'"):
        nbt.convert_batch_norm(model, relu_mask="keep")
    assert type(model[1]) is nn.BatchNorm2d


def test_an_optimiser_goes_on_with_the_converted_model() -> None:
    """Its parameters are the model's, and so is what it has gathered for them."""
    model, x = small_resnet(), drawn((2, 3, 8, 8))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for convert in (nn.Module.train, nbt.convert_batch_norm, nbt.revert_batch_norm):
        convert(model)
        before = model[1].weight.detach().clone()
        optimiser.zero_grad()
        model(x).square().sum().backward()
        optimiser.step()
        assert not torch.equal(model[1].weight, before)


SYNCHRONISED = {
    "BatchNorm1d": "SyncBatchNorm",
    "BatchNorm2d": "SyncBatchNorm",
    "BatchNorm3d": "SyncBatchNorm",
    "BatchNormReLU1d": "SyncBatchNormReLU",
    "BatchNormReLU2d": "SyncBatchNormReLU",
    "BatchNormReLU3d": "SyncBatchNormReLU",
    "BatchNormAddReLU2d": "SyncBatchNormAddReLU",
    "BatchNormAddReLU3d": "SyncBatchNormAddReLU",
    "SyncBatchNorm": "SyncBatchNorm",
    "SyncBatchNormReLU": "SyncBatchNormReLU",
    "SyncBatchNormAddReLU": "SyncBatchNormAddReLU",
}


@pytest.mark.parametrize("kind", SYNCHRONISED)
def test_every_batch_norm_can_be_synchronised(kind: str) -> None:
    """Only class, group and mode change; without a group it goes on computing what it did."""
    layer = with_drawn_state(getattr(nbt, kind)(3, momentum=0.3, eps=0.01, backend="torch"))
    model = nn.Sequential(layer)
    before, held = copy.deepcopy(model), state_of(model)
    assert nbt.convert_sync_batch_norm(model, mode="one_round") is model
    changed = {name for name, value in state_of(model).items() if value != held[name]}
    assert changed == set() and type(layer) is getattr(nbt, SYNCHRONISED[kind])
    settings = (layer.mode, layer.process_group, layer.momentum, layer.eps, layer.backend)
    assert settings == ("one_round", None, 0.3, 0.01, "torch")
    spatial = [2] * {"1": 0, "3": 3}.get(kind[-2], 2)
    x = [drawn((4, 3, *spatial))] * (2 if "Add" in kind else 1)
    for training in (True, False):
        assert torch.equal(layer.train(training)(*x), before[0].train(training)(*x))


def test_torchs_layers_are_synchronised_too_and_keep_their_group() -> None:
    theirs = nn.SyncBatchNorm(3)
    theirs.process_group = "a group"
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm2d(3), nn.BatchNorm3d(3), theirs)
    nbt.convert_sync_batch_norm(model)
    assert {type(layer) for layer in model} == {nbt.SyncBatchNorm}
    assert [layer.process_group for layer in model] == [None, None, None, "a group"]
    assert [layer.process_group for layer in nbt.convert_sync_batch_norm(model, "another")] == ["another"] * 4
    assert "mode=two_round" in repr(model) and list(model[0].state_dict()) == list(nn.BatchNorm1d(3).state_dict())


def test_what_cannot_be_synchronised_is_named() -> None:
    hooked = nn.BatchNorm2d(3)
    hooked.register_forward_hook(lambda *_: None)
    model = nn.Sequential(hooked, nn.LazyBatchNorm2d(), nn.InstanceNorm2d(3))
    with pytest.warns(UserWarning, match="not converted .0: it has hooks; 1: it is a LazyBatchNorm2d"):
        nbt.convert_sync_batch_norm(model)
    assert [type(layer) for layer in model] == [nn.BatchNorm2d, nn.LazyBatchNorm2d, nn.InstanceNorm2d]


def test_fusion_comes_before_synchronisation_and_there_is_no_way_back() -> None:
    model = nbt.convert_sync_batch_norm(nbt.convert_batch_norm(small_resnet(), fuse_relu=True))
    assert type(model[1]) is nbt.SyncBatchNormReLU and type(model[3].bn1) is nbt.SyncBatchNorm
    with pytest.warns(UserWarning, match="not reverted .1: it does more than torch's batch norm; 3.bn1: "):
        nbt.revert_batch_norm(model)
    assert type(model[1]) is nbt.SyncBatchNormReLU


@pytest.mark.parametrize("wrong", [{"mode": "three_round"}, {"backend": "gpu"}])
def test_unknown_ways_to_synchronise_are_refused_before_anything_changes(wrong: dict[str, str]) -> None:
    model = nn.Sequential(nn.BatchNorm2d(3))
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is '.*; accepted: "):
        nbt.convert_sync_batch_norm(model, **wrong)
    assert type(model[0]) is nn.BatchNorm2d


@pytest.mark.parametrize("module", [None, nn.BatchNorm2d, [nn.BatchNorm2d(3)]])
def test_what_is_no_module_is_refused(module: Any) -> None:
    with pytest.raises(TypeError, match=r"module is .*; accepted: a torch.nn.Module"):
        nbt.convert_batch_norm(module)
