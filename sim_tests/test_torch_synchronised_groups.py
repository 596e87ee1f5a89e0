# SPDX-License-Identifier: Apache-2.0
"""SyncBatchNorm and its groups: who communicates when, what is refused, and what happens if somebody is missing."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankError, Ranks, first_ranks, ranks_in
from synchronised_steps import Communication
from torch_judging import drawn, with_drawn_state

import nki_bn.torch as nbt

BACKENDS = ("simulator", "torch")
MODES = ("two_round", "one_round")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with ranks_in(tmp_path_factory.mktemp("ranks"), 2) as made:
        yield made


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("training", [True, False])
def test_without_a_process_group_it_is_the_plain_layer(backend: str, training: bool) -> None:
    x = drawn((4, 3, 2, 2))
    plain = with_drawn_state(nbt.BatchNorm2d(3, backend=backend)).train(training)
    module = nbt.SyncBatchNorm(3, backend=backend).train(training)
    module.load_state_dict(plain.state_dict())
    assert torch.equal(module(x), plain(x))
    for got, want in zip(module.state_dict().items(), plain.state_dict().items(), strict=True):
        assert got[0] == want[0] and torch.equal(got[1], want[1])


@pytest.mark.parametrize(
    "options", [{"affine": False}, {"track_running_stats": False}, {"affine": False, "track_running_stats": False}]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_affine_and_no_tracking_without_a_group(backend: str, options: dict[str, Any]) -> None:
    y = nbt.SyncBatchNorm(3, backend=backend, **options)(torch.randn(4, 3, 2, 2))
    assert y.mean().abs() < 1e-5


def evaluate_alone(rank: int, options: dict[str, Any]) -> bool:
    """Rank 1 evaluates, rank 0 does not."""
    if rank == 0:
        return True
    x = drawn((4, 3, 2, 2))
    module = nbt.SyncBatchNorm(3, **options).eval()
    with Communication() as communication:
        y = module(x)
    wanted = torch.nn.BatchNorm2d(3, **options).eval()(x)
    return torch.allclose(y, wanted, atol=1e-5) and not communication.collectives


@pytest.mark.parametrize("tracked", [True, False])
def test_eval_does_not_wait_for_others(ranks: Ranks, tracked: bool) -> None:
    assert ranks.run(evaluate_alone, {"track_running_stats": tracked}) == [True, True]


def train_alone(rank: int, backend: str) -> bool:
    """Rank 0 in a group of one is plain, to the bit and without a collective."""
    group = first_ranks(1)
    if rank == 1:
        return True
    x = drawn((4, 3, 2, 2))
    module, plain = nbt.SyncBatchNorm(3, process_group=group, backend=backend), nbt.BatchNorm2d(3, backend=backend)
    with Communication() as communication:
        y = module(x)
    same = torch.equal(y, plain(x)) and torch.equal(module.running_var, plain.running_var)
    return same and not communication.collectives


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_group_of_one_is_the_plain_layer(ranks: Ranks, backend: str) -> None:
    assert ranks.run(train_alone, backend) == [True, True]


def one_value(rank: int, values: tuple[float | None, float | None], options: dict[str, Any]) -> Any:
    """y, running mean and variance after a step on one value, or none."""
    value = values[rank]
    dtype = options.pop("input_dtype", torch.float32)
    x = torch.zeros((0, 1), dtype=dtype) if value is None else torch.tensor([[value]], dtype=dtype)
    module = nbt.SyncBatchNorm(1, **options)
    y = module(x)
    return [y.float().flatten().tolist(), module.running_mean.tolist(), module.running_var.tolist()]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_value_on_each_rank(ranks: Ranks, backend: str, mode: str, dtype: torch.dtype) -> None:
    """1 and 3: mean 2, variance 1, unbiased 2."""
    first, second = ranks.run(one_value, (1.0, 3.0), {"backend": backend, "mode": mode, "input_dtype": dtype})
    exact = 1 if dtype == torch.bfloat16 else (1 + 1e-5) ** -0.5
    assert first[0] == pytest.approx([-exact], rel=2**-16) and second[0] == pytest.approx([exact], rel=2**-16)
    assert first[1:] == second[1:]
    assert first[1] == pytest.approx([0.2]) and first[2] == pytest.approx([0.9 + 0.1 * 2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_value_on_all_ranks_together_is_refused(ranks: Ranks, backend: str) -> None:
    with pytest.raises(RankError) as caught:
        ranks.run(one_value, (1.0, None), {"backend": backend})
    for text in caught.value.args:
        assert "ValueError: Expected more than 1 value per channel on all ranks together" in text


def train_on_nothing(rank: int, backend: str) -> Any:
    """The running statistics and the counter after a step in which no rank has a value."""
    module = with_drawn_state(nbt.SyncBatchNorm(3, backend=backend))
    before = copy.deepcopy(module.state_dict())
    x = torch.zeros((0, 3, 2, 2)).requires_grad_()
    y = module(x)
    y.sum().backward()
    same = all(torch.equal(before[name], value) for name, value in module.state_dict().items() if "num" not in name)
    return same, tuple(y.shape), int(module.num_batches_tracked), module.weight.grad.tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_without_values_counts_and_moves_nothing(ranks: Ranks, backend: str) -> None:
    assert ranks.run(train_on_nothing, backend) == [(True, (0, 3, 2, 2), 1, [0.0] * 3)] * 2


def disagree(rank: int, options: tuple[dict[str, Any], dict[str, Any]]) -> None:
    mine = {"num_features": 3} | options[rank]
    nbt.SyncBatchNorm(**mine)(drawn((2, mine["num_features"], 2, 2)))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"num_features": 4}, "num_features is 3 on rank 0, 4 on rank 1"),
        ({"mode": "one_round"}, "mode (0: two_round, 1: one_round) is 0 on rank 0, 1 on rank 1"),
        ({"eps": 0.5}, "eps is 1e-05 on rank 0, 0.5 on rank 1"),
        ({"momentum": None}, "momentum is 0.1 on rank 0, -1 on rank 1"),
        ({"num_features": 5, "track_running_stats": False}, "track_running_stats is 1 on rank 0, 0 on rank 1"),
    ],
)
def test_ranks_that_differ_are_told_so(ranks: Ranks, other: dict[str, Any], message: str) -> None:
    with pytest.raises(RankError) as caught:
        ranks.run(disagree, ({}, other))
    for text in caught.value.args:
        assert "ValueError: the ranks of a batch norm differ: " in text and message in text


def other_channels(rank: int) -> str:
    try:
        nbt.SyncBatchNorm(4, affine=False, track_running_stats=False)(drawn((2, 3)))
    except ValueError as error:
        return str(error)
    return "nothing raised"


def test_an_input_of_other_channels_is_refused(ranks: Ranks) -> None:
    assert ranks.run(other_channels) == ["input has 3 channels; accepted: 4, as all ranks have"] * 2


def of_a_group_of_others(rank: int) -> str:
    group = first_ranks(1)
    try:
        if rank == 1:
            nbt.SyncBatchNorm(3, process_group=group)(drawn((2, 3)))
    except ValueError as error:
        return str(error)
    return "nothing raised"


def test_a_group_without_this_rank_is_refused(ranks: Ranks) -> None:
    message = "process_group is one without this rank; accepted: a group with it, or None for all ranks"
    assert ranks.run(of_a_group_of_others) == ["nothing raised", message]


def train_without(rank: int, leaves: bool, steps: int) -> float:
    """Seconds until rank 0 is told that rank 1 left, or did not come, after ``steps`` steps together."""
    module, x = nbt.SyncBatchNorm(3), drawn((2, 3, 2, 2))
    for _ in range(steps):
        module(x)
    if rank == 1:
        if leaves:
            os._exit(1)
        return 0.0
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        module(x).sum().backward()
    return time.monotonic() - start


@pytest.mark.parametrize("leaves", [True, False], ids=["dies", "stays away"])
@pytest.mark.parametrize("steps", [0, 1])
def test_a_rank_that_is_missing_is_an_error_on_the_others(tmp_path: Path, leaves: bool, steps: int) -> None:
    """Within the timeout of the group, at first use and later."""
    timeout = 2.0
    with ranks_in(tmp_path, 2, timeout) as pair:
        seconds = pair.first(train_without, leaves, steps)
    assert seconds < timeout + 5


def compiled(rank: int, compiler: str, backend: str, mode: str, kind: str) -> Any:
    """How far compiled and eager steps are apart, for batches of several sizes, and how many graphs there were."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    eager = with_drawn_state(getattr(nbt, kind)(3, mode=mode, backend=backend, process_group=first_ranks(2)))
    module = copy.deepcopy(eager)
    call = torch.compile(module, fullgraph=True, dynamic=True, backend=compiler)
    apart = 0.0
    for batch in (6, 8, 11):
        made = []
        for model, forward in ((eager, eager), (module, call)):
            model.zero_grad()
            x = drawn((batch + rank, 3, 4, 5), seed=batch + rank).requires_grad_()
            y = forward(x)
            y.square().mean().backward()
            gradients = (x.grad, model.weight.grad, model.bias.grad)
            made.append([y.detach(), *gradients, *copy.deepcopy(model.state_dict()).values()])
        apart = max(apart, *(float((one - other).abs().max()) for one, other in zip(*made, strict=True)))
    return apart, dict(counters["graph_break"]), counters["stats"]["unique_graphs"]


COMPILED = [("simulator", "two_round", "SyncBatchNormReLU"), ("torch", "one_round", "SyncBatchNorm")]


@pytest.mark.parametrize(("backend", "mode", "kind"), COMPILED)
def test_a_compiled_layer_does_what_the_eager_one_does(ranks: Ranks, backend: str, mode: str, kind: str) -> None:
    """To the bit, in one graph for all sizes of batches."""
    assert ranks.run(compiled, "aot_eager", backend, mode, kind) == [(0.0, {}, 1)] * 2


@pytest.mark.nightly
@pytest.mark.parametrize(("backend", "mode", "kind"), [*COMPILED, ("torch", "two_round", "SyncBatchNorm")])
def test_a_layer_compiled_to_code(ranks: Ranks, backend: str, mode: str, kind: str) -> None:
    """Roundings apart: values are below 100, sums have fewer than 2^9 terms."""
    for apart, breaks, graphs in ranks.run(compiled, "inductor", backend, mode, kind):
        assert apart < 100 * 2.0**-24 * 2**4 and breaks == {} and graphs == 1


def checkpointed(rank: int, reentrant: bool) -> Any:
    from torch.utils.checkpoint import checkpoint

    plain = with_drawn_state(nbt.SyncBatchNorm(3, backend="simulator"))
    module = copy.deepcopy(plain)
    made = []
    for model, call in ((plain, plain), (module, lambda x: checkpoint(module, x, use_reentrant=reentrant))):
        x = drawn((2 + rank, 3, 4)).requires_grad_()
        y = call(x)
        y.square().sum().backward()
        made.append([y.detach(), x.grad, model.weight.grad, *model.state_dict().values()])
    return [torch.equal(one, other) for one, other in zip(*made, strict=True)]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_moves_the_statistics_once(ranks: Ranks, reentrant: bool) -> None:
    assert ranks.run(checkpointed, reentrant) == [[True] * 8] * 2


def copied(rank: int) -> bool:
    module = with_drawn_state(nbt.SyncBatchNorm(3, process_group=first_ranks(2), mode="one_round"))
    model = torch.nn.Sequential(module, module)
    other = copy.deepcopy(model)
    same = all(torch.equal(a, b) and a is not b for a, b in zip(model.parameters(), other.parameters(), strict=True))
    x = drawn((2, 3, 4))
    return same and other[0] is other[1] is not module and torch.equal(model(x), other(x))


def test_a_copy_has_the_same_group(ranks: Ranks) -> None:
    assert ranks.run(copied) == [True, True]


def in_channels_last(rank: int, backend: str) -> Any:
    """Whether y and dx have the strides of x, and the values they have for contiguous memory."""
    made = []
    for memory_format in (torch.channels_last, torch.contiguous_format):
        module = with_drawn_state(nbt.SyncBatchNormReLU(3, backend=backend))
        x = drawn((2, 3, 4, 5), seed=rank).contiguous(memory_format=memory_format).requires_grad_()
        y = module(x)
        y.square().sum().backward()
        made.append((y.stride() == x.stride() == x.grad.stride(), y.detach(), x.grad))
    return [last if i == 0 else torch.allclose(last, made[1][i], atol=1e-5) for i, last in enumerate(made[0])]


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_formats(ranks: Ranks, backend: str) -> None:
    assert ranks.run(in_channels_last, backend) == [[True] * 3] * 2


def frozen_input(rank: int) -> Any:
    """The collectives of a step whose input needs no gradient, and the gradient of the weight."""
    module = nbt.SyncBatchNorm(3, backend="torch")
    x = drawn((2, 3, 4), seed=rank)
    module(x)
    with Communication() as communication:
        module(x).square().sum().backward()
    return communication.collectives, bool(module.weight.grad.abs().min() > 0)


def test_the_gradients_of_the_parameters_need_no_collective(ranks: Ranks) -> None:
    assert ranks.run(frozen_input) == [(["all_reduce", "all_reduce"], True)] * 2


def twice_differentiated(rank: int, backend: str) -> str:
    module = nbt.SyncBatchNorm(3, backend=backend)
    x = drawn((2, 3, 4)).requires_grad_()
    (dx,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    try:
        dx.sum().backward()
    except RuntimeError as error:
        return str(error)
    return "nothing raised"


@pytest.mark.parametrize("backend", BACKENDS)
def test_second_derivatives_are_refused(ranks: Ranks, backend: str) -> None:
    for text in ranks.run(twice_differentiated, backend):
        assert "differentiate twice" in text
