# SPDX-License-Identifier: Apache-2.0
"""Converted networks in training: the losses of torch's, alone and on two ranks."""

from __future__ import annotations

import copy
import os
import socket
from typing import Any

import pytest
import torch
from perturbed import allowed_drift
from torch import nn
from torch_models import cifar_net, small_resnet, train

import nki_bn.torch as nbt

STEPS = 10


@pytest.fixture(autouse=True)
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")


def images_and_labels(images: int, size: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(images, 3, size, size, generator=generator), torch.arange(images) % classes


NETWORKS: dict[str, Any] = {
    "cifar": (lambda: cifar_net((4, 4, 6, 6, 8, 8, 8, 8), (10, 8), 5, 16), (6, 16, 5)),
    "resnet": (small_resnet, (6, 8, 5)),
}


@pytest.mark.parametrize("network, fuse_relu", [("cifar", True), ("resnet", False)])
def test_ten_steps_have_the_losses_of_torch(network: str, fuse_relu: bool) -> None:
    make, sizes = NETWORKS[network]
    model, (images, labels) = make(), images_and_labels(*sizes)
    bound = allowed_drift(model, images, labels, STEPS)
    wanted = train(copy.deepcopy(model).double(), images.double(), labels, STEPS)
    converted = nbt.convert_batch_norm(model, backend="simulator", fuse_relu=fuse_relu)
    got = train(converted, images, labels, STEPS)
    assert wanted[-1] < 0.9 * wanted[0], "it learns"
    assert max(bound) < 0.02 * wanted[0], "the bound says something"
    assert all(abs(a - b) <= limit for a, b, limit in zip(got, wanted, bound, strict=True))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wrapped(model: nn.Module, kind: str) -> nn.Module:
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp":
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


def on_rank(rank: int, port: int, results: Any) -> None:
    """Train plain and converted networks, data parallel and sharded; put the losses of all into ``results``."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    images, labels = (part.chunk(2)[rank] for part in images_and_labels(8, 8, 5))
    losses = {}
    for kind in ("ddp", "fsdp", "fsdp2"):
        for converted in (False, True):
            model = small_resnet()
            if converted:
                nbt.convert_batch_norm(model, backend="simulator", fuse_relu=True)
            losses[kind, converted] = train(wrapped(model, kind), images, labels, 3)
    results[rank] = losses
    torch.distributed.destroy_process_group()


def test_two_ranks_data_parallel_and_sharded() -> None:
    """Statistics are each rank's own, as with torch's layers; gradients are averaged, parameters in pieces."""
    with torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.spawn(on_rank, (free_port(), results), nprocs=2)
        by_rank = [dict(results[rank]) for rank in range(2)]
    for losses in by_rank:
        plain = losses["ddp", False]
        for (kind, _), got in losses.items():
            # Three steps, whose drift test_ten_steps bounds; here ranks and pieces are what is looked at.
            assert got == pytest.approx(plain, rel=1e-3), kind
            assert got[0] != got[2]
    assert by_rank[0]["ddp", True] != by_rank[1]["ddp", True]
