# SPDX-License-Identifier: Apache-2.0
"""Operators as torch.library checks them; compiled, exported and traced models."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from torch_judging import drawn, with_drawn_state
from torch_models import small_resnet

import nki_bn.torch as nbt

OPERATORS = torch.ops.nki_bn


@pytest.fixture(autouse=True)
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing compiled before counts; one simulated core is enough."""
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def tensors(requires_grad: bool = True) -> dict[str, torch.Tensor]:
    """x, weight, bias, residual; statistics and counter."""
    made = {"x": drawn((3, 3, 4, 5)), "weight": drawn((3,), seed=1), "bias": drawn((3,), seed=2)}
    made["residual"] = drawn((3, 3, 4, 5), seed=3)
    for tensor in made.values():
        tensor.requires_grad_(requires_grad)
    return made | {"mean": torch.zeros(3), "var": torch.ones(3), "counter": torch.tensor(4)}


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("momentum, saves", [(0.1, True), (None, False)])
def test_the_training_operator_keeps_the_rules(momentum: float | None, saves: bool, requires_grad: bool) -> None:
    arguments = (*tensors(requires_grad).values(), momentum, 1e-5, True, saves)
    verdicts = torch.library.opcheck(OPERATORS.batch_norm_training, arguments)
    assert set(verdicts.values()) == {"SUCCESS"} and len(verdicts) == 4


def test_the_other_operators_keep_the_rules() -> None:
    made = list(tensors().values())
    forward = (*made[:6], 1e-5, True, True)
    assert set(torch.library.opcheck(OPERATORS.batch_norm_inference, forward).values()) == {"SUCCESS"}
    x, weight, bias, residual, mean, var, _ = tensors(requires_grad=False).values()
    for need in ([True] * 4, [False, True, False, False]):
        backward = (x, x + 1, mean, var, weight, bias, None, residual, True, 1e-5, True, need)
        assert set(torch.library.opcheck(OPERATORS.batch_norm_backward, backward).values()) == {"SUCCESS"}


def test_the_operators_between_reductions_keep_the_rules() -> None:
    x, weight, bias, residual, mean, var, _ = tensors(requires_grad=False).values()
    assert set(torch.library.opcheck(OPERATORS.batch_norm_moments, (x,)).values()) == {"SUCCESS"}
    sums = (mean + 0.1, var / 2)
    for saved in ((None, residual), (torch.ones(x.shape, dtype=torch.uint8), None)):
        arguments = (x, x + 1, mean, var, weight, bias, *saved, *sums, 1e-5, True)
        assert set(torch.library.opcheck(OPERATORS.batch_norm_input_gradient, arguments).values()) == {"SUCCESS"}


def test_the_schema_says_what_is_moved() -> None:
    moved = [a.name for a in OPERATORS.batch_norm_training.default._schema.arguments if a.alias_info is not None]
    assert moved == ["running_mean", "running_var", "num_batches_tracked"]
    assert not OPERATORS.batch_norm_inference.default._schema.is_mutable


def step(model: torch.nn.Module, call: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Loss, all gradients, and the state after a training step."""
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    loss = call(leaf).square().sum()
    loss.backward()
    gradients = {f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}
    return {"loss": loss.detach(), "dx": leaf.grad} | gradients | copy.deepcopy(dict(model.state_dict()))


@pytest.mark.parametrize("backend", ["simulator", "torch"])
def test_a_compiled_network_does_what_the_eager_one_does(backend: str) -> None:
    eager = nbt.convert_batch_norm(small_resnet(), backend=backend, fuse_relu=True)
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for seed in range(2):
        x = drawn((2, 3, 8, 8), seed=seed)
        got, want = step(model, compiled, x), step(eager, eager, x)
        assert all(torch.equal(got[name], want[name]) for name in want)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1
    x = drawn((2, 3, 8, 8), seed=3)
    assert torch.equal(compiled.eval()(x), eager.eval()(x))


@pytest.mark.nightly
def test_a_network_compiled_to_code() -> None:
    """Inductor reorders what stands around the layers, so only they agree to the bit."""
    eager = nbt.convert_batch_norm(small_resnet(), backend="simulator", fuse_relu=True)
    model = copy.deepcopy(eager)
    x = drawn((2, 3, 8, 8))
    got, want = step(model, torch.compile(model, fullgraph=True), x), step(eager, eager, x)
    for name, values in want.items():
        torch.testing.assert_close(got[name], values, rtol=1e-4, atol=1e-4)


def test_other_batch_sizes_need_no_other_graph() -> None:
    model = with_drawn_state(nbt.BatchNormReLU2d(3, momentum=None, backend="simulator"))
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch in (2, 3, 5):
        x = drawn((batch, 3, 4, 4), seed=batch).contiguous(memory_format=torch.channels_last)
        got, want = step(model, compiled, x), step(eager, eager, x)
        assert all(torch.equal(got[name], want[name]) for name in want)
    assert counters["stats"]["unique_graphs"] == 1


def test_compiled_code_keeps_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = with_drawn_state(nbt.BatchNorm2d(3)).eval(), drawn((3, 3, 4, 4))
    monkeypatch.setenv("NKI_SIMULATOR", "1")
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    simulated = compiled(x)
    monkeypatch.delenv("NKI_SIMULATOR")
    by_torch = module(x)
    assert not torch.equal(simulated, by_torch), "roundings tell them apart"
    assert torch.equal(compiled(x), simulated)


def test_checkpoints_and_compiled_code_move_the_statistics_once() -> None:
    plain = with_drawn_state(nbt.BatchNorm2d(3, backend="simulator"))
    inside, outside = copy.deepcopy(plain), copy.deepcopy(plain)
    compiled = torch.compile(outside, fullgraph=True, backend="aot_eager")

    @torch.compile(fullgraph=True, backend="aot_eager")
    def checkpointed(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(inside, x, use_reentrant=False)

    x = drawn((3, 3, 4, 4))
    want = step(plain, plain, x)
    for got in (
        step(inside, checkpointed, x),
        step(outside, lambda x: checkpoint(compiled, x, use_reentrant=False), x),
    ):
        assert all(torch.equal(got[name], want[name]) for name in want)
    assert int(plain.num_batches_tracked) == 1


@pytest.mark.parametrize("backend", ["simulator", "torch"])
def test_an_exported_model_runs(backend: str) -> None:
    model = nbt.convert_batch_norm(small_resnet(), backend=backend, fuse_relu=True).eval()
    x = drawn((2, 3, 8, 8))
    program = torch.export.export(model, (x,))
    assert torch.equal(program.module()(x), model(x))
    called = {str(node.target) for node in program.graph.nodes}
    assert ("nki_bn.batch_norm_inference.default" in called) == (backend == "simulator")
    assert not program.graph_signature.buffers_to_mutate


def test_an_exported_training_model_moves_its_statistics() -> None:
    model = with_drawn_state(nbt.BatchNorm2d(3, backend="simulator"))
    x = drawn((3, 3, 4, 4))
    program = torch.export.export(model, (x,)).run_decompositions()
    assert set(program.graph_signature.buffers_to_mutate.values()) == {
        "running_mean",
        "running_var",
        "num_batches_tracked",
    }


def test_a_symbolic_trace_keeps_the_layers_whole() -> None:
    model = nbt.convert_batch_norm(small_resnet(), backend="simulator", fuse_relu=True)
    traced = torch.fx.symbolic_trace(model)
    whole = {node.target for node in traced.graph.nodes if node.op == "call_module"}
    assert {"1", "3.bn1", "3.bn2", "4.downsample.1"} <= whole
    x = drawn((2, 3, 8, 8))
    assert torch.equal(traced.eval()(x), model.eval()(x))
    adding = torch.fx.symbolic_trace(Adding())
    assert torch.equal(adding(x), Adding()(x))


class Adding(torch.nn.Module):
    """A fused layer with its residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nbt.BatchNormAddReLU2d(3, backend="simulator")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x, x)
