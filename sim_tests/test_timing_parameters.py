# SPDX-License-Identifier: Apache-2.0
"""The hardware file of trn2: what the loader refuses, and that the documentation has the same numbers."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nki_bn.hardware import TARGETS, Cost, capacities_of, load_target, load_timing, timing_of

ROOT = Path(__file__).resolve().parents[1]
FILES = {name: ROOT / "configs" / "hardware" / f"{name}.toml" for name in TARGETS}
TRN2: dict[str, Any] = tomllib.loads(FILES["trn2"].read_text(encoding="utf-8"))


def entries(table: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The parameters below ``table`` with their keys."""
    for key, entry in table.items():
        if isinstance(entry, dict):
            name = f"{path}.{key}" if path else key
            if "value" in entry:
                yield name, entry
            else:
                yield from entries(entry, name)


def changed(path: str, value: Any) -> dict[str, Any]:
    """The contents of the file with ``value`` at ``path``; None takes away what is there."""
    table = copy.deepcopy(TRN2)
    *parents, last = path.split(".")
    inner = table
    for key in parents:
        inner = inner[key]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return table


def refuses_timing(path: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^trn2.toml: {message}"):
        timing_of("trn2.toml", changed(path, value))


@pytest.mark.parametrize("path", [path for path, _ in entries(TRN2["timing"], "timing")])
def test_a_missing_parameter_is_refused(path: str) -> None:
    refuses_timing(path, None, rf"{path} is missing$")


@pytest.mark.parametrize("field", ["cycles", "occupancy", "latency"])
def test_a_cost_has_three_numbers(field: str) -> None:
    path = f"timing.vector.reduce.value.{field}"
    refuses_timing(path, None, rf"timing.vector.reduce.{field} is missing$")
    refuses_timing(path, -1, rf"timing.vector.reduce.{field} is -1; accepted: numbers from 0 up$")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("timing.dma.colour", {}, "timing.dma.colour is unknown"),
        ("timing.colour", {}, "timing.colour is unknown"),
        ("timing.vector.reduce.value.colour", 1, "timing.vector.reduce.colour is unknown"),
        ("timing.dma.rate.colour", 1, "timing.dma.rate.colour is unknown"),
        ("timing.dma.rate.source", None, "timing.dma.rate.source is missing"),
        ("timing.dma.rate.confidence", "sure", "timing.dma.rate has confidence 'sure'; accepted: high, medium, low"),
        ("timing.dma.spacing.value", -1, "timing.dma.spacing is -1; accepted: numbers from 0 up"),
        ("timing.dma.spacing.value", float("nan"), "timing.dma.spacing is nan; accepted: numbers from 0 up"),
        ("timing.dma.spacing.value", True, "timing.dma.spacing is True; accepted: numbers from 0 up"),
        ("timing.dma.spacing.value", "580", "timing.dma.spacing is '580'; accepted: numbers from 0 up"),
        ("timing.dma.engines.value", 16.5, "timing.dma.engines is 16.5; accepted: whole numbers above 0"),
        ("timing.dma.rate.value", 0, "timing.dma.rate is 0; accepted: numbers above 0"),
        ("timing.clock.vector.value", 0, "timing.clock.vector is 0; accepted: numbers above 0"),
        ("timing.dma.rate", 27.2, "timing.dma.rate is 27.2; accepted: a table"),
        ("timing.vector.reduce.value", 1.0, "timing.vector.reduce is 1.0; accepted: a table"),
        ("timing.scalar.shared_tables.value", ["copy"], r"timing.scalar.shared_tables is \['copy'\]; accepted: a list"),
    ],
)
def test_a_wrong_parameter_is_refused(path: str, value: Any, message: str) -> None:
    refuses_timing(path, value, message)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("psum_banks", None, "psum_banks is missing"),
        ("colour", {}, "colour is unknown"),
        ("target", None, "target is missing"),
        ("psum_banks.value", -1, "psum_banks is -1; accepted: numbers above 0"),
        ("psum_banks.value", 7.5, "psum_banks is 7.5; accepted: whole numbers above 0"),
        ("psum_banks.unit", None, "psum_banks.unit is missing"),
    ],
)
def test_a_wrong_capacity_is_refused(path: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^trn2.toml: {message}"):
        capacities_of("trn2.toml", changed(path, value))


def test_capacities_without_timing() -> None:
    assert load_timing("gen3") == load_timing("trn2") and load_target("trn2").sbuf_partition_bytes == 212984
    for name in ("trn1", "inf2", "trn3"):
        with pytest.raises(ValueError, match="has no timing"):
            load_timing(name)
    with pytest.raises(ValueError, match="target 'trn9' is unknown"):
        load_timing("trn9")


def test_a_parameter_reaches_the_model() -> None:
    timing = timing_of("trn2.toml", changed("timing.vector.reduce.value", {"cycles": 3, "occupancy": 1, "latency": 2}))
    assert timing.vector.reduce == Cost(3, 1, 2) and timing.vector.scan == load_timing("trn2").vector.scan


def test_every_source_says_something() -> None:
    found = [
        (name, entry)
        for file in FILES.values()
        for name, entry in entries(tomllib.loads(file.read_text(encoding="utf-8")))
    ]
    assert len(found) > 80 and {name for name, entry in found if len(entry["source"]) < 4 or not entry["unit"]} == set()


def shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{number:g}" for number in value.values())
    if isinstance(value, list):
        return "; ".join(", ".join(group) for group in value)
    return f"{value:g}"


def test_the_documentation_has_the_numbers_of_the_file() -> None:
    """The table of docs/timing.md, row by row."""
    rows = [
        f"| {name} | {shown(entry['value'])} | {entry['unit']} | {entry['confidence']} | {entry['source']} |"
        for name, entry in entries(TRN2["timing"])
    ]
    page = (ROOT / "docs" / "timing.md").read_text(encoding="utf-8").splitlines()
    start = page.index("| parameter | value | unit | confidence | source |") + 2
    assert page[start : start + len(rows)] == rows and not page[start + len(rows)].startswith("|")
