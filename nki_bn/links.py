# SPDX-License-Identifier: Apache-2.0
"""What lies between replicas, from ``configs/collectives/*.toml``, the one place for it."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any

from nki_bn.hardware import Positive, load_target, parameters_of

# How a collective is taken to work: every rank sends to all others at once, or what is sent goes round.
MESH, RING = "mesh", "ring"
TOPOLOGIES = (MESH, RING)

_NS_PER_US = 1e3


@dataclass(frozen=True)
class Links:
    """Between replicas: us from one rank to the next, and bytes per us."""

    hop: float
    rate: float

    def mesh(self, size: int) -> float:
        """us of a collective in which every rank sends ``size`` bytes to all others at once."""
        return self.hop + size / self.rate

    def ring(self, size: int, replicas: int) -> float:
        """us of a collective whose parts of ``size`` bytes go through all ``replicas`` one after the other."""
        return (replicas - 1) * self.mesh(size)


@dataclass(frozen=True)
class _Parameters:
    """The entries of a file: us, and bytes per ns."""

    hop: float
    rate: Positive


def load_links(target: str) -> Links:
    """The parameters of a target.

    Raises:
        TypeError, ValueError: the target is unknown, there are none for it, or its file is malformed.
    """
    known = load_target(target).name
    files = _files()
    if known not in files:
        raise ValueError(f"target is {target!r}; accepted with replicas: {', '.join(linked_targets())}")
    text = files[known].read_text(encoding="utf-8")
    found: _Parameters = parameters_of(files[known].name, tomllib.loads(text), _Parameters)
    return Links(found.hop, found.rate * _NS_PER_US)


def linked_targets() -> tuple[str, ...]:
    """The targets that have parameters."""
    return tuple(sorted(_files()))


def _files() -> dict[str, Any]:
    folder = resources.files("nki_bn.configs").joinpath("collectives")
    return {file.name.removesuffix(".toml"): file for file in folder.iterdir() if file.name.endswith(".toml")}
