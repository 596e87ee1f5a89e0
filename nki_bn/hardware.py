# SPDX-License-Identifier: Apache-2.0
"""Capacities of the supported chips, read from ``configs/hardware/*.toml`` (the one place where they stand)."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

TARGETS = ("trn1", "trn2", "trn3")


@dataclass(frozen=True)
class Target:
    """Capacities of one core of a chip; sizes in bytes are per partition unless the name says total."""

    name: str
    generation: int
    aliases: tuple[str, ...]
    partitions: int
    sbuf_partition_bytes: int
    sbuf_total_bytes: int
    psum_bank_bytes: int
    psum_banks: int
    matmul_moving_columns: int
    bn_stats_columns: int
    logical_cores: int

    @property
    def psum_partition_bytes(self) -> int:
        """Bytes of PSUM in one partition (all banks)."""
        return self.psum_bank_bytes * self.psum_banks


@cache
def _read(name: str) -> Target:
    text = resources.files("nki_bn.configs").joinpath("hardware", f"{name}.toml").read_text(encoding="utf-8")
    table: dict[str, Any] = tomllib.loads(text)
    values = {key: entry["value"] for key, entry in table.items() if isinstance(entry, dict)}
    return Target(name=table["target"], generation=table["generation"], aliases=tuple(table["aliases"]), **values)


def load_target(name: str) -> Target:
    """The capacities of ``name``: trn1, trn2, trn3 or one of their aliases (inf2, gen2, gen3, gen4).

    Raises:
        TypeError: the name is not a string.
        ValueError: the name is unknown.
    """
    if not isinstance(name, str):
        raise TypeError(f"target must be a string, got {type(name).__name__}")
    for known in TARGETS:
        target = _read(known)
        if name == known or name in target.aliases:
            return target
    raise ValueError(f"target {name!r} is unknown; accepted: trn1 (inf2, gen2), trn2 (gen3), trn3 (gen4)")
