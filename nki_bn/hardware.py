# SPDX-License-Identifier: Apache-2.0
"""Capacities and timing of the supported chips, read from ``configs/hardware/*.toml``, the one place for them."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from importlib import resources
from typing import Any, NewType, get_type_hints

TARGETS = ("trn1", "trn2", "trn3")

# A parameter that something is divided by.
Positive = NewType("Positive", float)
# Groups of names.
Groups = tuple[tuple[str, ...], ...]

_ENTRY = {"value", "unit", "source", "confidence"}
_CONFIDENCE = ("high", "medium", "low")
_HEADER: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "target": ("a name", lambda value: _is_name(value)),
    "generation": ("a whole number above 0", lambda value: type(value) is int and value > 0),
    "aliases": ("a list of names", lambda value: isinstance(value, list) and all(map(_is_name, value))),
}


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


@dataclass(frozen=True)
class Cost:
    """An instruction class: ``cycles`` per element of a lane, and the ns after this streaming until the engine can take
    the next instruction (``occupancy``) and until results can be seen (``latency``)."""

    cycles: float
    occupancy: float
    latency: float


@dataclass(frozen=True)
class Clocks:
    """GHz."""

    tensor: Positive
    vector: Positive
    scalar: Positive
    gpsimd: Positive


@dataclass(frozen=True)
class Strided:
    """From an innermost stride of ``bytes`` on, an operand makes the streaming ``factor`` times as long."""

    bytes: float
    factor: Positive


@dataclass(frozen=True)
class VectorTiming:
    """Instruction classes of Vector."""

    plain: Cost
    copy_16bit: Cost
    scalar_16bit: Cost
    plain_16bit_half: Cost
    copy_widening: Cost
    pointer: Cost
    tensor_tensor: Cost
    tensor_tensor_16bit: Cost
    scalar_tensor_tensor: Cost
    scalar_tensor_tensor_16bit: Cost
    reduce: Cost
    bn_stats: Cost
    bn_aggr: Cost
    reciprocal: Cost
    scan: Cost
    scan_seed: Cost
    memset: Cost
    predicated: Cost
    shuffle: Cost
    transpose: Cost
    search: Cost
    masked: Cost
    random: Cost
    psum: Cost
    read_out: Cost


@dataclass(frozen=True)
class ScalarTiming:
    """Instruction classes of Scalar, and the ns of loading a table of functions."""

    copy: Cost
    copy_psum: Cost
    activation: Cost
    activation_psum: Cost
    extra_pointer: Cost
    read_out: Cost
    table_load: float
    shared_tables: Groups


@dataclass(frozen=True)
class GpSimdTiming:
    """Instruction classes of GpSimd."""

    index: Cost
    one_tile: Cost
    two_tiles: Cost
    gather: Cost
    positions: Cost
    random: Cost
    partition_reduce: Cost


@dataclass(frozen=True)
class TensorTiming:
    """Instruction classes of Tensor; until ``cold_ns`` busy it takes ``cold_factor`` times as long."""

    matmul: Cost
    matmul_float32: Cost
    matmul_float32_onezero: Cost
    transpose: Cost
    transpose_float32: Cost
    weight_load_cycles: float
    cold_factor: Positive
    cold_ns: float


@dataclass(frozen=True)
class SyncTiming:
    """ns of register instructions."""

    register_move: float
    register_memory: float


@dataclass(frozen=True)
class SemaphoreTiming:
    """ns from a result that can be seen to the start of what waited for it."""

    engine: float
    tensor: float
    hardware_trigger: float
    software_trigger: float


@dataclass(frozen=True)
class DmaTiming:
    """Triggers, descriptors and engines of the DMA of a core; times in ns, rates in bytes per ns."""

    engines: int
    partitions_per_engine: int
    rate: Positive
    descriptor: float
    indirect_descriptor: float
    hardware_trigger: float
    software_trigger: float
    spacing: float
    first_load: float
    first_store: float
    first_software: float
    completion: float
    transpose_load: Positive
    transpose_sbuf: Positive


@dataclass(frozen=True)
class HbmTiming:
    """Bytes per ns of the stack that a pair of cores shares."""

    pair: Positive


@dataclass(frozen=True)
class CoresTiming:
    """ns of what two cores do together."""

    sendrecv: float
    barrier: float


@dataclass(frozen=True)
class Roofline:
    """Bytes per ns that roofline shares refer to, for one core and for a pair; ``peak`` is what no core exceeds."""

    core: Positive
    pair: Positive
    peak: Positive


@dataclass(frozen=True)
class Timing:
    """All timing parameters of a target; ``launch_ns`` is the fixed cost of a launch."""

    launch_ns: float
    floor_cycles: float
    clock: Clocks
    strided: Strided
    vector: VectorTiming
    scalar: ScalarTiming
    gpsimd: GpSimdTiming
    tensor: TensorTiming
    sync: SyncTiming
    semaphore: SemaphoreTiming
    dma: DmaTiming
    hbm: HbmTiming
    cores: CoresTiming
    roofline: Roofline


def load_target(name: str) -> Target:
    """The capacities of ``name``: trn1, trn2, trn3 or one of their aliases (inf2, gen2, gen3, gen4).

    Raises:
        TypeError: the name is not a string.
        ValueError: the name is unknown.
    """
    if not isinstance(name, str):
        raise TypeError(f"target must be a string, got {type(name).__name__}")
    for known in TARGETS:
        target = _target(known)
        if name == known or name in target.aliases:
            return target
    raise ValueError(f"target {name!r} is unknown; accepted: trn1 (inf2, gen2), trn2 (gen3), trn3 (gen4)")


def load_timing(name: str) -> Timing:
    """The timing parameters of the target ``name``.

    Raises:
        TypeError, ValueError: as :func:`load_target`.
        ValueError: the target has none, or its file lacks a parameter or has a wrong one.
    """
    return _timing(load_target(name).name)


def capacities_of(file: str, table: Mapping[str, Any]) -> Target:
    """The capacities in the contents of a hardware file called ``file``.

    Raises:
        ValueError: a parameter is missing, unknown or malformed, negative, or 0 where it must not be; names file and
            key.
    """
    header = {key: table[key] for key in _HEADER if key in table}
    names = {field.name for field in fields(Target)} - {"name", "generation", "aliases"}
    entries = {key: value for key, value in table.items() if key not in (*_HEADER, "timing")}
    _check_keys(file, "", header, set(_HEADER))
    for key, (accepted, fits) in _HEADER.items():
        if not fits(header[key]):
            raise ValueError(f"{file}: {key} is {header[key]!r}; accepted: {accepted}")
    _check_keys(file, "", entries, names)
    values = {key: _entry(file, key, entry, int) for key, entry in entries.items()}
    return Target(header["target"], header["generation"], tuple(header["aliases"]), **values)


def timing_of(file: str, table: Mapping[str, Any]) -> Timing:
    """The timing parameters in the contents of a hardware file called ``file``; errors as :func:`capacities_of`."""
    if "timing" not in table:
        raise ValueError(f"{file} has no timing: only capacities of this target are known")
    timing: Timing = _group(file, "timing", table["timing"], Timing)
    return timing


def parameters_of(file: str, table: Mapping[str, Any], kind: type) -> Any:
    """An instance of the dataclass ``kind`` from the contents of a file with an entry for each of its fields; errors
    as :func:`capacities_of`."""
    return _group(file, "", table, kind)


@cache
def _target(name: str) -> Target:
    return capacities_of(*_read(name))


@cache
def _timing(name: str) -> Timing:
    return timing_of(*_read(name))


def _read(name: str) -> tuple[str, dict[str, Any]]:
    file = f"{name}.toml"
    text = resources.files("nki_bn.configs").joinpath("hardware", file).read_text(encoding="utf-8")
    return file, tomllib.loads(text)


def _group(file: str, path: str, table: Any, kind: type) -> Any:
    """An instance of the dataclass ``kind`` from a table with an entry or a table for each of its fields."""
    hints = get_type_hints(kind)
    _check_keys(file, path, table, set(hints))
    values = {}
    for key, hint in hints.items():
        where = f"{path}.{key}" if path else key
        grouped = is_dataclass(hint) and hint is not Cost
        values[key] = _group(file, where, table[key], hint) if grouped else _entry(file, where, table[key], hint)
    return kind(**values)


def _entry(file: str, key: str, entry: Any, hint: Any) -> Any:
    value = _value(file, key, entry)
    if hint is Cost:
        _check_keys(file, key, value, {field.name for field in fields(Cost)})
        return Cost(**{name: _number(file, f"{key}.{name}", number, 0) for name, number in value.items()})
    if hint == Groups:
        return _groups(file, key, value)
    if hint is int and not isinstance(value, int):
        raise ValueError(f"{file}: {key} is {value!r}; accepted: whole numbers above 0")
    return _number(file, key, value, 0 if hint is float else math.ulp(0))


def _value(file: str, key: str, entry: Any) -> Any:
    _check_keys(file, key, entry, _ENTRY)
    if entry["confidence"] not in _CONFIDENCE:
        raise ValueError(f"{file}: {key} has confidence {entry['confidence']!r}; accepted: {', '.join(_CONFIDENCE)}")
    return entry["value"]


def _groups(file: str, key: str, value: Any) -> Groups:
    if not isinstance(value, list) or not all(isinstance(group, list) and all(map(_is_name, group)) for group in value):
        raise ValueError(f"{file}: {key} is {value!r}; accepted: a list of lists of names")
    return tuple(tuple(group) for group in value)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _number(file: str, key: str, value: Any, least: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
        accepted = "numbers above 0" if least else "numbers from 0 up"
        raise ValueError(f"{file}: {key} is {value!r}; accepted: {accepted}")
    return value


def _check_keys(file: str, path: str, table: Any, accepted: set[str]) -> None:
    if not isinstance(table, dict):
        raise ValueError(f"{file}: {path} is {table!r}; accepted: a table")
    prefix = f"{path}." if path else ""
    for problem, keys in (("is missing", accepted - set(table)), ("is unknown", set(table) - accepted)):
        if keys:
            raise ValueError(f"{file}: {prefix}{min(keys)} {problem}")
