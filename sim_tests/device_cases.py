# SPDX-License-Identifier: Apache-2.0
"""Launches on a Neuron device, a stand-in that records them; ``test_torch_paths`` has them run in another process.

A device, once it is there, is there for all of torch: checkpoints, for one, look for its random numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from stand_in import DeviceTensor, Recorder
from torch_judging import SHAPES, drawn, with_drawn_state

import nki_bn.torch as nbt
from nki_bn.kernels.plan import ResidentForwardPlan, ResidentPlan
from nki_bn.planner import plan
from nki_bn.problem import BackwardProblem, ForwardProblem
from nki_bn.torch import neuron, synchronised_modules

SHAPE = SHAPES[4]
OPERATORS = torch.ops.nki_bn


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """Launches on the stand-in; no thread is there that would go backward for its device."""
    made = Recorder()
    monkeypatch.setattr(neuron, "launch", made)
    with torch.autograd.set_multithreading_enabled(False):
        yield made


def test_a_device_without_the_vendors_nki_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="the input is on a Neuron device, for which the vendor's nki has to be"):
        nbt.batch_norm(DeviceTensor(drawn(SHAPE)), None, None, training=True)


def on_device(module: torch.nn.Module) -> Any:
    moved = copy.deepcopy(module)
    for part in moved.modules():
        for name, parameter in part._parameters.items():
            part._parameters[name] = None if parameter is None else torch.nn.Parameter(DeviceTensor(parameter))
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else DeviceTensor(buffer)
    return moved


@pytest.mark.parametrize("momentum", [None, 0.1])
@pytest.mark.parametrize("kind", ["BatchNorm2d", "BatchNormReLU2d", "BatchNormAddReLU2d"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_device_computes_what_the_simulator_does(
    dtype: torch.dtype, kind: str, momentum: float | None, recorder: Recorder
) -> None:
    module = with_drawn_state(getattr(nbt, kind)(3, momentum=momentum))
    there, here = on_device(module), module
    here.backend = "simulator"
    assert "path=neuron" in repr(there)
    for training in (True, True, False):
        values = [drawn(SHAPE, dtype, seed).contiguous(memory_format=torch.channels_last) for seed in range(2)]
        values = values if "Add" in kind else values[:1]
        leaves = [value.clone().requires_grad_() for value in values]
        moved = [DeviceTensor(value).requires_grad_() for value in values]
        y, got = here.train(training)(*leaves), there.train(training)(*moved)
        y.square().sum().backward()
        got.square().sum().backward()
        assert got.device.type == "neuron" and got.stride() == y.stride() and torch.equal(got.values, y)
        assert all(torch.equal(a.grad.values, b.grad) for a, b in zip(moved, leaves, strict=True))
    for name, parameter in here.named_parameters():
        assert torch.equal(dict(there.named_parameters())[name].grad.values, parameter.grad)
    for name, buffer in here.named_buffers():
        # The average over all batches is formed outside the kernel there, and inside it here: roundings apart.
        torch.testing.assert_close(
            dict(there.named_buffers())[name].values, buffer, rtol=0 if momentum else 3e-7, atol=0
        )


def test_what_is_launched(recorder: Recorder) -> None:
    """The kernels by name, on the cores of the logical core, with the planner's plan and the tensors themselves."""
    module = on_device(with_drawn_state(nbt.BatchNormReLU2d(3, momentum=0.25, eps=1e-3)))
    x = DeviceTensor(drawn(SHAPE, torch.bfloat16)).requires_grad_()
    module(x).sum().backward()
    (forward, forward_lnc, given), (backward, backward_lnc, back) = recorder.launches
    assert (forward, forward_lnc, backward, backward_lnc) == ("batch_norm_fwd", 2, "batch_norm_bwd", 2)
    problem = {"shape": SHAPE, "dtype": "bfloat16", "relu": "mask"}
    assert given[-1] == plan(ForwardProblem(**problem)) and isinstance(given[-1], ResidentForwardPlan)
    assert back[9] == plan(BackwardProblem(**problem)) and isinstance(back[9], ResidentPlan)
    layout = (3, 3, 1, 4, 5)
    assert given[0].shape == back[0].shape == back[1].shape == back[8].shape == layout
    assert torch.equal(given[0].values.reshape(SHAPE), x.values) and back[8].dtype == torch.uint8
    assert given[1].shape == given[2].shape == (3, 1) and given[3] is given[4] is given[7] is None
    assert given[8:11] == (0.25, 1e-3, True) and back[6:8] == (1e-3, True) and back[10] is None


def test_with_frozen_statistics_only_what_is_needed_is_launched(recorder: Recorder) -> None:
    module = on_device(with_drawn_state(nbt.BatchNorm2d(3))).eval().requires_grad_(False)
    x = DeviceTensor(drawn(SHAPE)).requires_grad_()
    module(x).sum().backward()
    (_, _, given), (_, _, back) = recorder.launches
    assert torch.equal(given[3].values, module.running_mean.values) and given[5] is given[6] is None
    assert back[9] == plan(BackwardProblem(SHAPE, "float32", training=False, need=("dx",)))


def test_momentum_none_does_not_change_the_kernel(recorder: Recorder) -> None:
    """A momentum is compiled in: one that changed with every batch would compile a kernel for every batch."""
    module = on_device(nbt.BatchNorm2d(3, momentum=None))
    for seed in range(3):
        module(DeviceTensor(drawn(SHAPE, seed=seed)))
    assert {arguments[8:] for _, _, arguments in recorder.launches} == {recorder.launches[0][2][8:]}
    batches = torch.stack([drawn(SHAPE, seed=seed).mean((0, 2, 3)) for seed in range(3)])
    torch.testing.assert_close(module.running_mean.values, batches.mean(0))


def test_an_empty_batch_launches_nothing(recorder: Recorder) -> None:
    module = on_device(nbt.BatchNormReLU2d(3))
    x = DeviceTensor(drawn((0, 3, 4, 4))).requires_grad_()
    module(x).sum().backward()
    assert recorder.launches == [] and x.grad.shape == x.shape and not module.weight.grad.values.any()
    assert int(module.num_batches_tracked.values) == 1 and not module.running_mean.values.any()


def test_the_device_of_torch_xla_has_the_same_operators(recorder: Recorder) -> None:
    """Its tensors cannot be made here: the operator is sent to where it goes for them."""
    xla = torch._C.DispatchKeySet(torch._C.DispatchKey.XLA)
    x, columns = drawn(SHAPE), [torch.ones(3), torch.zeros(3), None, torch.zeros(3), torch.ones(3), torch.tensor(0)]
    arguments = (x, *columns, 0.1, 1e-5, False, False)
    y, mean, var, _ = OPERATORS.batch_norm_training.default.redispatch(xla, *arguments)
    assert torch.equal(y, nbt.BatchNorm2d(3, backend="simulator")(x))
    statistics = (mean, var, columns[0], columns[1])
    gradients = OPERATORS.batch_norm_backward.default.redispatch(
        xla, x, x, *statistics, None, None, True, 1e-5, False, [True, True, False, False]
    )
    assert [gradient.numel() for gradient in gradients] == [x.numel(), 3, 0, 0]
    eval_arguments = (x, *columns[:5], 1e-5, False, False)
    assert OPERATORS.batch_norm_inference.default.redispatch(xla, *eval_arguments)[0].shape == x.shape
    assert [name for name, _, _ in recorder.launches] == ["batch_norm_fwd", "batch_norm_bwd", "batch_norm_fwd"]


class Twins:
    """A group of two ranks that hold the same shard."""

    key, size = "", 2

    def join(self, parts: Any) -> Any:
        return torch.cat(list(parts))

    def all_reduce(self, name: str, values: torch.Tensor) -> torch.Tensor:
        return values + values

    def all_gather(self, name: str, values: torch.Tensor) -> torch.Tensor:
        return torch.stack([values, values])


@pytest.mark.parametrize("mode", ["two_round", "one_round"])
@pytest.mark.parametrize("kind", ["SyncBatchNorm", "SyncBatchNormReLU", "SyncBatchNormAddReLU"])
def test_a_synchronised_step_on_a_device(
    kind: str, mode: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the simulator computes, by four launches, none of which depends on how many values all ranks have."""
    monkeypatch.setattr(synchronised_modules, "replicas_of", lambda group: Twins())
    monkeypatch.setattr(synchronised_modules, "check_agreement", lambda *arguments: None)
    here = with_drawn_state(getattr(nbt, kind)(3, mode=mode))
    there, here.backend = on_device(here), "simulator"
    values = [drawn(SHAPE, torch.bfloat16, seed) for seed in range(2 if "Add" in kind else 1)]
    leaves = [value.clone().requires_grad_() for value in values]
    moved = [DeviceTensor(value).requires_grad_() for value in values]
    y, got = here(*leaves), there(*moved)
    y.square().sum().backward()
    got.square().sum().backward()
    assert torch.equal(got.values, y)
    assert all(torch.equal(a.grad.values, b.grad) for a, b in zip(moved, leaves, strict=True))
    for name, parameter in here.named_parameters():
        assert torch.equal(dict(there.named_parameters())[name].grad.values, parameter.grad)
    for name, buffer in here.named_buffers():
        assert torch.equal(dict(there.named_buffers())[name].values, buffer)
    names = [name for name, _, _ in recorder.launches]
    assert names == ["batch_norm_fwd", "batch_norm_fwd", "batch_norm_bwd", "input_gradient"]
    assert recorder.launches[3][2][8] == 1


def test_an_empty_shard_launches_nothing(recorder: Recorder) -> None:
    x, columns = DeviceTensor(drawn((0, 3, 4, 4))), [DeviceTensor(torch.ones(3)) for _ in range(4)]
    mean, var = OPERATORS.batch_norm_moments(x)
    assert not mean.values.any() and not var.values.any()
    dx = OPERATORS.batch_norm_input_gradient(x, x, *columns[:2], None, None, None, None, *columns[2:], 1e-5, False)
    assert dx.shape == x.shape and recorder.launches == []
