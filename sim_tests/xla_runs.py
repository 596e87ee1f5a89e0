# SPDX-License-Identifier: Apache-2.0
"""StableHLO text on XLA's CPU backend, in a process of its own with several host devices, one per replica.

jax only hands the text over, and arrays in and out.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from typing import Any

import numpy as np

from nki_bn.problem import Array

DEVICES = 4


class Xla:
    """The process; ``with`` ends it."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, get_context("spawn"), _prepare)

    def __enter__(self) -> Xla:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()

    def run(self, text: str, arguments: Sequence[Sequence[Array]]) -> list[list[Array]]:
        """The results on every replica of the ``main`` of a module, given the arguments of each."""
        made: list[list[Array]] = self._pool.submit(_run, text, arguments).result()
        return made

    def parsed(self, text: str) -> str:
        """A module once more, as it was read and checked, with its locations."""
        return self._pool.submit(_parsed, text).result()

    def compiled(self, text: str, replicas: int) -> str:
        """A module as XLA's own text, after it was compiled."""
        return self._pool.submit(_compiled, text, replicas).result()


def _prepare() -> None:
    # Read when jax is imported, which is in this process alone.
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    os.environ["JAX_PLATFORMS"] = "cpu"


def _parsed(text: str) -> str:
    from jax.interpreters.mlir import make_ir_context
    from jaxlib.mlir import ir

    with make_ir_context():
        module = ir.Module.parse(text)
        assert module.operation.verify()
        return str(module.operation.get_asm(enable_debug_info=True))


@cache
def _compile(text: str, replicas: int) -> Any:
    import jax
    from jaxlib import xla_client

    devices = jax.devices("cpu")[:replicas]
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = replicas, 1
    options.device_assignment = xla_client.DeviceAssignment.create(np.arange(replicas).reshape(replicas, 1))
    return devices[0].client.compile_and_load(text, xla_client.DeviceList(tuple(devices)), options)


def _compiled(text: str, replicas: int) -> str:
    return str(_compile(text, replicas).hlo_modules()[0].to_string())


def _run(text: str, arguments: Sequence[Sequence[Array]]) -> list[list[Array]]:
    executable = _compile(text, len(arguments))
    placed = [_on_devices(shards) for shards in zip(*arguments, strict=True)]
    results = executable.execute_sharded(placed).disassemble_into_single_device_arrays()
    return [[np.asarray(shards[rank]) for shards in results] for rank in range(len(arguments))]


def _on_devices(shards: Sequence[Array]) -> Any:
    """One array per device, as one of jax's that is cut along its first axis."""
    import jax

    devices = jax.devices("cpu")[: len(shards)]
    cut = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(devices), ("replica",)), jax.P("replica"))
    shape = len(shards) * shards[0].shape[0], *shards[0].shape[1:]
    buffers = [jax.device_put(shard, device) for shard, device in zip(shards, devices, strict=True)]
    return jax.make_array_from_single_device_arrays(shape, cut, buffers)
