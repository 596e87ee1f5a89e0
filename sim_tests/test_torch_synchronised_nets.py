# SPDX-License-Identifier: Apache-2.0
"""Whole networks on ranks with synchronised batch norms, data parallel, against one process on the global batch.

In float64, what remains between them are other orders of sums: judged by what torch loses in float32, times 2^-29 for
the narrower unit and 64 for the orders. With the kernels it is the drift of the losses that is bounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from perturbed import allowed_drift
from ranks import Ranks, ranks_in
from replica_training import Results, Tensors, Training, losses_alone, train_alone, train_on_rank

ORDERS = 64
SIZES = ((8,), (4, 4), (5, 3), (2, 2, 2, 2), (3, 0, 1, 4))
NARROW = "cifar with bfloat16 convolutions"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with ranks_in(tmp_path_factory.mktemp("ranks"), 4) as made:
        yield made


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As on the ranks: threads that wait for each other on a busy machine take longer than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def alone(training: Training) -> Results:
    return train_alone(training)


def lost(training: Training, field: str) -> Tensors:
    """What torch loses in float32."""
    wide = getattr(alone(training.alone), field)
    narrow = getattr(alone(replace(training.alone, dtype=torch.float32)), field)
    return {name: (narrow[name] - value).abs() for name, value in wide.items()}


def judge(training: Training, field: str, got: Tensors, more: Tensors | None = None) -> None:
    """Tensors of the global batch; ``more`` is allowed in addition. The bounds are far below the values."""
    want, errors = getattr(alone(training.alone), field), lost(training, field)
    assert set(got) == set(want)
    for name, value in want.items():
        bound = ORDERS * 2.0**-29 * errors[name].max()
        error = (got[name] - value).abs() - (0 if more is None else more[name])
        assert error.max() <= bound, (name, float(error.max()), float(bound))
        assert bound < 2.0**-18 * value.abs().max() or name in idle(training), name


def idle(training: Training) -> set[str]:
    """What a batch norm behind it takes away again, so that its gradient is 0 but for rounding.

    Biases of convolutions, and of the last batch norm of a block where only a 1x1 convolution follows.
    """
    if training.network == "mobilenet":
        return {"3.layers.7.bias"}
    layers = {name: layer for name, layer in training.model().named_modules() if isinstance(layer, torch.nn.Conv2d)}
    return {f"{name}.bias" for name, layer in layers.items() if layer.bias is not None}


def members_of(ranks: Ranks, training: Training) -> list[Results]:
    """The results of the ranks, which all have the same gradients and parameters to the bit."""
    members = ranks.run(train_on_rank, training)[: len(training.sizes)]
    for member in members[1:]:
        for field in ("gradients", "parameters"):
            first, other = getattr(members[0], field), getattr(member, field)
            assert all(torch.equal(first[name], other[name]) for name in first)
    return list(members)


def joined(members: list[Results], field: str, factor: float = 1.0) -> Tensors:
    parts = [getattr(member, field) for member in members]
    return {name: torch.cat([part[name] for part in parts]) / factor for name in parts[0]}


@pytest.mark.parametrize("mode", ["two_round", "one_round"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_outputs_cotangents_and_gradients_are_those_of_the_global_batch(
    ranks: Ranks, sizes: tuple[int, ...], mode: str
) -> None:
    """Of every layer of the CIFAR net, and all 38 parameters; the cotangents are R times the shard."""
    training = Training("cifar", sizes=sizes, mode=mode, steps=1)
    members = members_of(ranks, training)
    assert len(members[0].gradients) == 38
    judge(training, "outputs", joined(members, "outputs"))
    judge(training, "cotangents", joined(members, "cotangents", len(sizes)))
    judge(training, "gradients", members[0].gradients)


@pytest.mark.parametrize("optimiser", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("sizes", [(8,), (5, 3), (2, 2, 2, 2)], ids=str)
def test_three_steps_lead_to_the_parameters_of_the_global_batch(
    ranks: Ranks, sizes: tuple[int, ...], optimiser: str
) -> None:
    """Adam divides a gradient that is rounding alone by its own size, so it moves idle biases anywhere."""
    training = Training("cifar", optimiser, sizes)
    members = members_of(ranks, training)
    unjudged = idle(training) if optimiser == "adam" else set()
    more = {name: value.abs() * (name in unjudged) for name, value in alone(training.alone).parameters.items()}
    judge(training, "parameters", members[0].parameters, more)


@pytest.mark.parametrize("sizes", [(4, 4), (2, 2, 2, 2)], ids=str)
def test_convolutions_in_bfloat16(ranks: Ranks, sizes: tuple[int, ...]) -> None:
    """Ranks round their own gradient of a convolution where one alone rounds the sum: half a unit of each."""
    training = Training(NARROW, sizes=sizes, steps=1)
    members = members_of(ranks, training)
    judge(training, "outputs", joined(members, "outputs"))
    judge(training, "cotangents", joined(members, "cotangents", len(sizes)))
    convolutions = {name.removesuffix("bias") + end for name in idle(training) for end in ("weight", "bias")}
    rounded = convolutions if len(sizes) > 1 else set()
    own = {name: sum(member.own[name].abs() for member in members) / len(sizes) for name in members[0].own}
    more = {name: 2 * 2.0**-8 * size * (name in rounded) for name, size in own.items()}
    judge(training, "gradients", members[0].gradients, more)


@pytest.mark.parametrize("network", ["resnet", "mobilenet"])
@pytest.mark.parametrize(("sizes", "mode"), [((5, 3), "two_round"), ((2, 2, 2, 2), "one_round")], ids=str)
def test_residual_and_depthwise_networks(ranks: Ranks, network: str, sizes: tuple[int, ...], mode: str) -> None:
    """Gradients, and parameters after three steps with momentum."""
    training = Training(network, "momentum", sizes, mode)
    members = members_of(ranks, training)
    judge(training, "gradients", members[0].gradients)
    judge(training, "parameters", members[0].parameters)


KERNELS = [
    ("cifar", "adam", (5, 3), "two_round"),
    (NARROW, "momentum", (8,), "two_round"),
    ("resnet", "momentum", (4, 4), "one_round"),
]
MORE_KERNELS = [
    ("cifar", "sgd", (8,), "two_round"),
    ("cifar", "momentum", (2, 2, 2, 2), "two_round"),
    ("cifar", "adam", (2, 2, 2, 2), "one_round"),
    ("mobilenet", "sgd", (3, 0, 1, 4), "two_round"),
]


@pytest.mark.parametrize(
    ("network", "optimiser", "sizes", "mode"),
    [*KERNELS, *(pytest.param(*case, marks=pytest.mark.nightly) for case in MORE_KERNELS)],
)
def test_networks_with_kernels(ranks: Ranks, network: str, optimiser: str, sizes: tuple[int, ...], mode: str) -> None:
    """The losses of the global batch, as far as batch norms that round differently let them drift."""
    training = Training(network, optimiser, sizes, mode, "simulator", torch.float32)
    members = members_of(ranks, training)
    wide = replace(training.alone, dtype=torch.float64)
    want = alone(wide).losses
    train = partial(losses_alone, optimiser=optimiser)
    bound = allowed_drift(wide.model(), *wide.data(), training.steps, train)
    got = [sum(losses) / len(sizes) for losses in zip(*(member.losses for member in members), strict=True)]
    assert max(bound) < 0.02 * want[0], "the bound says something"
    assert all(abs(a - b) <= limit for a, b, limit in zip(got, want, bound, strict=True)), (got, want, bound)
