# SPDX-License-Identifier: Apache-2.0
"""What autograd asks of the operators: which gradients, what is kept for them, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch_judging import SHAPES, STATISTICS, drawn, drawn_step, with_drawn_state

import nki_bn.torch as nbt
from nki_bn import ops

SHAPE = SHAPES[4]


def simulated(kind: str = "BatchNorm2d", **options: Any) -> Any:
    return with_drawn_state(getattr(nbt, kind)(3, backend="simulator", **options))


class Asked:
    """Stands before ``nki_bn.batch_norm_bwd`` and notes what is asked of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.needs: list[tuple[set[str], bool]] = []
        self._backward = ops.batch_norm_bwd
        monkeypatch.setattr(ops, "batch_norm_bwd", self)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.needs.append((set(named["need"]), named["residual_grad"]))
        return self._backward(*arguments, **named)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("subset", range(1, 16))
def test_only_the_gradients_that_are_needed_are_made(
    subset: int, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(monkeypatch)
    module = simulated("BatchNormAddReLU2d").train(training)
    leaves = {"dx": drawn(SHAPE), "dgamma": module.weight, "dbeta": module.bias, "dresidual": drawn(SHAPE, seed=1)}
    chosen = {name for bit, name in enumerate(leaves) if subset >> bit & 1}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name in chosen)
    module(leaves["dx"], leaves["dresidual"]).sum().backward()
    assert asked.needs == [(chosen - {"dresidual"}, "dresidual" in chosen)]
    assert {name for name, leaf in leaves.items() if leaf.grad is not None} == chosen


def test_without_a_relu_no_kernel_copies_the_gradient_of_the_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    x, residual, dy = (drawn(SHAPE, seed=seed).requires_grad_() for seed in range(3))
    arguments = (x, None, None, residual, None, None, None, 0.1, 1e-5, False, False)
    y = torch.ops.nki_bn.batch_norm_training(*arguments)[0]
    y.backward(dy.detach())
    assert torch.equal(residual.grad, dy) and asked.needs == [({"dx"}, False)]


SAVED = {
    ("BatchNorm2d", "save"): {"x", "weight", "statistics"},
    ("BatchNormReLU2d", "save"): {"x", "weight", "statistics", "mask"},
    ("BatchNormReLU2d", "recompute"): {"x", "weight", "statistics", "bias"},
    ("BatchNormAddReLU2d", "save"): {"x", "weight", "statistics", "mask"},
    ("BatchNormAddReLU2d", "recompute"): {"x", "weight", "statistics", "bias", "residual"},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind, relu_mask", SAVED)
def test_bytes_held_for_the_backward(kind: str, relu_mask: str, dtype: torch.dtype) -> None:
    module = simulated(kind, **({} if kind == "BatchNorm2d" else {"relu_mask": relu_mask}))
    inputs = [drawn(SHAPE, dtype, seed).requires_grad_() for seed in range(2 if "Add" in kind else 1)]
    held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: held.append(tensor) or tensor, lambda tensor: tensor):
        module(*inputs)
    elements, column = inputs[0].numel(), 3 * 4
    sizes = {"x": elements * dtype.itemsize, "residual": elements * dtype.itemsize, "mask": elements}
    sizes |= {"weight": column, "bias": column, "statistics": 2 * column}
    assert sum(tensor.nbytes for tensor in held) == sum(sizes[name] for name in SAVED[kind, relu_mask])


def test_without_gradients_nothing_is_kept_and_no_mask_made(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = []
    forward = ops.batch_norm_fwd

    def noted(*arguments: Any, **named: Any) -> Any:
        masks.append(named["save_relu_mask"])
        return forward(*arguments, **named)

    monkeypatch.setattr(ops, "batch_norm_fwd", noted)
    module = simulated("BatchNormReLU2d")
    with torch.no_grad():
        assert module(drawn(SHAPE)).grad_fn is None
    module(drawn(SHAPE))
    assert masks == [False, True]


@pytest.mark.parametrize("kind", ["BatchNormReLU2d", "BatchNormAddReLU2d"])
def test_a_saved_and_a_recomputed_mask_are_the_same(kind: str) -> None:
    step = drawn_step(SHAPE, torch.bfloat16, residual="Add" in kind)
    saved, recomputed = (step.run(simulated(kind, relu_mask=mask)) for mask in ("save", "recompute"))
    assert {name: values.tobytes() for name, values in saved.items()} == {n: v.tobytes() for n, v in recomputed.items()}


def test_second_derivatives_are_refused_and_those_of_torch_right() -> None:
    x = drawn(SHAPE, torch.float64).requires_grad_()
    (slope,) = torch.autograd.grad(simulated()(x.float()).pow(3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives; accepted for a loss that needs them: backend='tor"):
        slope.square().sum().backward()
    module = nbt.BatchNorm2d(3, backend="torch").double()
    assert torch.autograd.gradgradcheck(module, (drawn((2, 3, 2, 2), torch.float64).requires_grad_(),))


def test_function_transforms_are_refused() -> None:
    module = simulated().eval()
    with pytest.raises(RuntimeError, match="cannot be differentiated by torch.func; accepted there: backend='torch'"):
        torch.func.grad(lambda x: module(x).sum())(drawn(SHAPE))


@pytest.mark.parametrize("momentum", [None, 0.1])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("backend", ["simulator", "torch"])
def test_checkpointing_moves_the_statistics_once(backend: str, reentrant: bool, momentum: float | None) -> None:
    plain = with_drawn_state(nbt.BatchNormReLU2d(3, momentum=momentum, backend=backend))
    repeated = copy.deepcopy(plain)
    inputs = [drawn(SHAPE).requires_grad_() for _ in range(2)]
    plain(inputs[0]).square().sum().backward()
    checkpoint(repeated, inputs[1], use_reentrant=reentrant).square().sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad) and torch.equal(plain.weight.grad, repeated.weight.grad)
    assert int(repeated.num_batches_tracked) == 1
    assert all(torch.equal(values, repeated.state_dict()[name]) for name, values in plain.state_dict().items())


def test_gradients_accumulate() -> None:
    module, steps = simulated(), [drawn_step(SHAPE, torch.float32, seed=seed) for seed in range(2)]
    alone = []
    for step in steps:
        alone.append(step.run(module)["dgamma"].copy())
    module.zero_grad()
    for step in steps:
        module(step.x).backward(step.dy)
    assert torch.equal(module.weight.grad, torch.from_numpy(alone[0] + alone[1]))


def test_the_module_as_a_function_of_its_state() -> None:
    module, x = simulated(), drawn(SHAPE)
    state = {name: values.detach().clone() for name, values in module.state_dict().items()}
    other = {name: values.clone() for name, values in with_drawn_state(nbt.BatchNorm2d(3)).state_dict().items()}
    other["weight"].mul_(2).requires_grad_()
    y = torch.func.functional_call(module, other, (x,))
    y.sum().backward()
    assert other["weight"].grad is not None and int(other["num_batches_tracked"]) == 1
    assert all(torch.equal(values, state[name]) for name, values in module.state_dict().items())
    assert not torch.equal(other["running_mean"], state["running_mean"])


def test_parameters_that_change_before_the_backward_are_noticed() -> None:
    module = simulated()
    y = module(drawn(SHAPE))
    with torch.no_grad():
        module.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_moving_statistics_is_seen_by_autograd() -> None:
    """Whoever saved the running statistics for a backward of their own has to hear that they moved."""
    module = simulated()
    before = [getattr(module, name)._version for name in STATISTICS]
    factor = torch.ones(3, requires_grad=True)
    product = factor * module.running_mean
    module(drawn(SHAPE))
    assert [getattr(module, name)._version for name in STATISTICS] == [version + 1 for version in before]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=len)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_the_result_may_be_changed_in_place(training: bool, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """As by the ReLUs of most networks."""
    norm = {2: nbt.BatchNorm1d, 3: nbt.BatchNorm1d, 4: nbt.BatchNorm2d, 5: nbt.BatchNorm3d}[len(shape)]
    x, results = drawn(shape, dtype), []
    for inplace in (True, False):
        module = with_drawn_state(norm(3, backend="simulator")).train(training)
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        assert not y._is_view()
        torch.nn.functional.relu(y, inplace=inplace).sum().backward()
        results.append(leaf.grad)
    assert torch.equal(*results)


FORMATS: dict[str, Any] = {
    "contiguous": lambda: drawn((4, 3, 5, 6)),
    "channels_last": lambda: drawn((4, 3, 5, 6)).contiguous(memory_format=torch.channels_last),
    "channels_last_3d": lambda: drawn((2, 3, 4, 5, 6)).contiguous(memory_format=torch.channels_last_3d),
    "transposed": lambda: drawn((4, 3, 6, 5)).transpose(2, 3),
    "strided": lambda: drawn((4, 6, 5, 6))[:, ::2],
    "expanded": lambda: drawn((4, 3, 1, 6)).expand(4, 3, 5, 6),
    "offset": lambda: drawn((5, 3, 5, 6))[1:],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", FORMATS)
def test_memory_formats_are_kept(layout: str, dtype: torch.dtype) -> None:
    """Of the input, by y and by dx; the values are those for the contiguous input."""
    made = FORMATS[layout]()
    x = made if dtype == torch.float32 else torch.empty_like(made, dtype=dtype).copy_(made)
    kind = nbt.BatchNorm3d if x.dim() == 5 else nbt.BatchNorm2d
    results = []
    for values in (x.detach(), x.detach().contiguous()):
        leaf = values.requires_grad_()
        y = kind(3, backend="simulator")(leaf)
        y.backward(torch.ones_like(y).cumsum(0))
        results.append((y, leaf.grad))
    strides = torch.empty_like(x).stride()
    assert results[0][0].stride() == results[0][1].stride() == strides
    assert all(torch.equal(got, want) for got, want in zip(*results, strict=True))


def test_autocast_leaves_the_layer_in_the_dtype_of_its_input() -> None:
    layers = torch.nn.Sequential(torch.nn.Conv2d(3, 3, 1), simulated("BatchNormReLU2d"))
    with torch.autocast("cpu", torch.bfloat16):
        y = layers(drawn(SHAPE))
        y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert layers[1].weight.dtype == layers[1].weight.grad.dtype == layers[1].running_mean.dtype == torch.float32


def test_a_residual_of_a_wider_dtype_widens_the_result() -> None:
    module, x, residual = simulated("BatchNormAddReLU2d"), drawn(SHAPE, torch.bfloat16), drawn(SHAPE, seed=1)
    leaves = x.requires_grad_(), residual.requires_grad_()
    y = module(*leaves)
    y.sum().backward()
    assert y.dtype == torch.float32 and (leaves[0].grad.dtype, leaves[1].grad.dtype) == (x.dtype, residual.dtype)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_storages_stay_resizable(requires_grad: bool) -> None:
    """Sharded training frees the storage of a parameter and fills it again."""
    module = simulated()
    x = drawn(SHAPE).requires_grad_(requires_grad)
    module(x).sum().backward()
    tensors = (x, module.weight, module.bias, module.running_mean, module.running_var)
    assert all(tensor.untyped_storage().resizable() for tensor in tensors)
