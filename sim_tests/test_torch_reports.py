# SPDX-License-Identifier: Apache-2.0
"""Inputs that broke other batch-norm modules, on both paths of the CPU, each with the right answer worked out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch_judging import drawn

import nki_bn.torch as nbt


@pytest.fixture(params=["simulator", "torch"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("between", ["training", "assignment"])
def test_the_gradient_belongs_to_the_statistics_of_its_forward(backend: str, between: str) -> None:
    """Torch's own gives 0.3 to 0.6 here: it reads the running statistics when it goes backward."""
    module = nbt.BatchNorm1d(3, backend=backend).eval()
    x = drawn((6, 3)).requires_grad_()
    y = module(x)
    if between == "training":
        module.train()(drawn((6, 3), seed=1) * 9 + 5)
    else:
        module.running_var.fill_(100.0)
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.full((6, 3), 1 / (1 + 1e-5) ** 0.5), rtol=2**-17, atol=0)


def test_an_average_over_all_batches(backend: str) -> None:
    """Batches k - 1, k + 1 have mean k and unbiased variance 2; the initial variance 1 is dropped at the first."""
    module = nbt.BatchNorm1d(1, momentum=None, backend=backend)
    means = []
    for k in (3.0, 6.0, 9.0):
        module(torch.tensor([[k - 1], [k + 1]]))
        means.append(module.running_mean.item())
        assert abs(module.running_var.item() - 2) < 1e-5
    assert means == pytest.approx([3, 4.5, 6], abs=1e-5) and int(module.num_batches_tracked) == 3
    module.reset_running_stats()
    module(torch.tensor([[0.0], [2.0]]))
    assert module.running_mean.item() == 1 and int(module.num_batches_tracked) == 1


class WithReLU(torch.nn.BatchNorm2d):
    """A subclass that does more than its base."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).relu()


def test_conversion_keeps_what_a_subclass_does(backend: str) -> None:
    model = torch.nn.Sequential(WithReLU(3)).eval()
    x = drawn((2, 3, 4, 4))
    wanted = model(x)
    with pytest.warns(UserWarning, match="not converted .0: it is a WithReLU, accepted: BatchNorm1d, "):
        converted = nbt.convert_batch_norm(model, backend=backend)
    assert torch.equal(converted(x), wanted) and (wanted == 0).any()


def test_partial_and_old_states_load(backend: str) -> None:
    module = nbt.BatchNorm2d(3, backend=backend)
    module.num_batches_tracked.fill_(7)
    module.load_state_dict({}, strict=False)
    assert int(module.num_batches_tracked) == 7
    old = torch.nn.BatchNorm2d(3).state_dict()
    del old["num_batches_tracked"]
    old._metadata[""]["version"] = 1
    module.load_state_dict(old)
    assert int(module.num_batches_tracked) == 7
    torch.nn.BatchNorm2d(3).load_state_dict(module.state_dict())


def test_channels_last_gradients_vanish_where_they_must(backend: str) -> None:
    """For the sum of the output, dgamma and dx are 0 up to rounding: 256 terms of size 1, each to 2^-17."""
    x = drawn((4, 3, 8, 8)).contiguous(memory_format=torch.channels_last).requires_grad_()
    module = nbt.BatchNorm2d(3, backend=backend)
    module(x).sum().backward()
    assert module.weight.grad.abs().max() < 256 * 2**-17 and x.grad.abs().max() < 1e-4


def test_a_permuted_input_is_the_contiguous_one(backend: str) -> None:
    permuted = drawn((4, 5, 2, 3, 7)).permute(0, 4, 1, 2, 3)
    made, wanted = nbt.BatchNorm3d(7, backend=backend)(permuted), torch.nn.BatchNorm3d(7)(permuted)
    torch.testing.assert_close(made, wanted, rtol=0, atol=1e-4)
    torch.testing.assert_close(made, nbt.BatchNorm3d(7, backend=backend)(permuted.contiguous()))


@pytest.mark.parametrize("rows", [1000, 1024])
def test_a_long_batch_of_single_values(rows: int, backend: str) -> None:
    """(N, C), (N, C, 1) and (N, C, 1, 1) are one problem; a gradient that counts rows shows those read twice."""
    x, dy = drawn((rows, 2)), torch.arange(2.0 * rows).reshape(rows, 2) / rows
    made = []
    for kind, extra in ((nbt.BatchNorm1d, ()), (nbt.BatchNorm1d, (1,)), (nbt.BatchNorm2d, (1, 1))):
        module: Any = kind(2, backend=backend)
        leaf = x.reshape(rows, 2, *extra).clone().requires_grad_()
        y = module(leaf)
        y.backward(dy.reshape(y.shape))
        made.append([part.flatten() for part in (y, leaf.grad, module.weight.grad, module.bias.grad)])
    for one, other in zip(made * 2, made[1:] + made[2:] + made[:1], strict=False):
        for got, want in zip(one, other, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    normalised = (x.double() - x.double().mean(0)) / (x.double().var(0, correction=0) + 1e-5).sqrt()
    torch.testing.assert_close(made[0][2].double(), (dy * normalised).sum(0), rtol=1e-3, atol=1e-2)


def test_nan_stays_in_its_channel_through_a_fused_relu(backend: str) -> None:
    x = drawn((2, 3, 4))
    x[0, 1, 2] = torch.nan
    y = nbt.BatchNormReLU1d(3, backend=backend)(x)
    assert y[:, 1].isnan().all() and y[:, [0, 2]].isfinite().all()


def test_statistics_stay_wide_where_activations_are_narrow(backend: str) -> None:
    """1000/sqrt(1e6) is 1, and 1e-3/sqrt(0 + 1e-8) is 10: in float16 a variance of 1e6 is infinite, 1e-8 is 0."""
    module = nbt.BatchNorm1d(2, eps=1e-8, backend=backend).eval()
    module.running_var.copy_(torch.tensor([1e6, 0.0]))
    y = module.half()(torch.tensor([[1000.0, 1e-3]], dtype=torch.float16))
    torch.testing.assert_close(y.float(), torch.tensor([[1.0, 10.0]]), rtol=0, atol=0.02)
