# SPDX-License-Identifier: Apache-2.0
"""What a sweep runs and what it found: a case, and the record of a case, which is one line of JSON."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import asdict, dataclass, fields
from typing import Any, Union, get_args, get_origin, get_type_hints

from nki_bn.hardware import TARGETS
from nki_bn.problem import DTYPES, PRECISIONS, RELU_MODES

OPERATIONS = ("bwd", "fwd", "eval")
MODELLED, MEASURED = "modelled", "measured"
OK, FAILED = "ok", "failed"


@dataclass(frozen=True)
class Case:
    """One batch norm to time.

    Attributes:
        model, layer: where the shape comes from; ``layer`` is [C, ...] as 64x112x112.
        count: how many batch norms of the model have this input.
        op: "bwd", "fwd" (training) or "eval" (forward with running statistics).
        shape: [B, C, ...], B being that of a logical core.
        dtype: of x.
        relu: "none", "mask" or "recompute".
        precision: "high" or "fast".
        lnc, target: physical cores of the logical core, and the chip.
        strategy: what was asked for; "planned" is the planner's own choice.
    """

    model: str
    layer: str
    count: int
    op: str
    shape: tuple[int, ...]
    dtype: str
    relu: str
    precision: str
    lnc: int
    target: str
    strategy: str

    @property
    def case(self) -> Case:
        """The case alone."""
        return Case(*(getattr(self, field.name) for field in fields(Case)))


@dataclass(frozen=True)
class Record(Case):
    """What was found for a case; figures are None where the case failed, or where a method does not give them.

    Attributes:
        timing: "modelled" or "measured": where the time comes from. Rows of both kinds are never compared.
        method: how the time was found, in words.
        status: "ok" or "failed".
        error: why it failed.
        checked_shape: the shape at which the outputs of this code path agreed with the float64 reference.
        plan: the plan's fields.
        instructions: of all cores.
        modelled_us, measured_us: the one that ``timing`` names is there if the status is "ok". Without launch cost.
        roofline_us: hbm_bytes_min at the DMA limit of the cores.
        roofline_share: roofline_us over the time.
        hbm_bytes: read from and written to HBM.
        hbm_bytes_min: every element of what is read and of what is made, once.
        bound_by: the resource that was busy longest; "latency" if none was for half of the time.
        engine_busy_us: busy time by engine and core, as "vector.0"; "dma.0" is that of the busiest DMA engine.
        sbuf_high_water: bytes per partition, by core.
        version: of nki_bn.
        environment: what else may matter: Python, NumPy, the nki in use, the hardware parameters.
    """

    timing: str
    method: str
    status: str
    error: str | None
    checked_shape: tuple[int, ...] | None
    plan: dict[str, Any] | None
    instructions: int | None
    modelled_us: float | None
    measured_us: float | None
    roofline_us: float
    roofline_share: float | None
    hbm_bytes: int | None
    hbm_bytes_min: int
    bound_by: str | None
    engine_busy_us: dict[str, float] | None
    sbuf_high_water: tuple[int, ...] | None
    version: str
    environment: dict[str, str]

    @property
    def ok(self) -> bool:
        """Whether there is a time."""
        return self.status == OK

    @property
    def time_us(self) -> float:
        """The time, modelled or measured.

        Raises:
            ValueError: the case failed.
        """
        time = self.modelled_us if self.timing == MODELLED else self.measured_us
        if time is None:
            raise ValueError(f"{self.model} {self.layer} {self.strategy} has no time: {self.error}")
        return time

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self), allow_nan=False)


_HINTS = get_type_hints(Record)
_CHOICES = {
    "op": OPERATIONS,
    "dtype": tuple(DTYPES),
    "relu": RELU_MODES,
    "precision": PRECISIONS,
    "target": TARGETS,
    "timing": (MODELLED, MEASURED),
    "status": (OK, FAILED),
}
_POSITIVE = "count lnc modelled_us measured_us roofline_us roofline_share hbm_bytes hbm_bytes_min".split()
_SHAPES = ("shape", "checked_shape")
# What an integer of a row may be at most: that of 64 bits.
_LARGEST = 2**63 - 1


def record_from(row: Any) -> Record:
    """The record in a parsed line.

    Raises:
        ValueError: a key is missing, unknown, or has a value of the wrong kind; names the key. It is not an object.
    """
    if not isinstance(row, dict):
        raise ValueError(f"is {type(row).__name__}; accepted: an object")
    for key in _HINTS:
        if key not in row:
            raise ValueError(f"{key} is missing")
    for key, value in row.items():
        if key not in _HINTS:
            raise ValueError(f"{key} is unknown")
        _check(key, value)
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    record = Record(**values)
    _check_time(record)
    return record


def _check(key: str, value: Any) -> None:
    if not _matches(value, _HINTS[key]):
        raise ValueError(f"{key} is {value!r}; accepted: {_words(_HINTS[key])}")
    if key in _CHOICES and value not in _CHOICES[key]:
        raise ValueError(f"{key} is {value!r}; accepted: {', '.join(_CHOICES[key])}")
    if key in _POSITIVE and value is not None and value <= 0:
        raise ValueError(f"{key} is {value!r}; accepted: numbers above 0")
    if key in _SHAPES and value is not None and not (2 <= len(value) <= 5 and min(value) > 0):
        raise ValueError(f"{key} is {value!r}; accepted: 2 to 5 numbers above 0")


def _check_time(record: Record) -> None:
    """A time where the case went well, an error where it failed."""
    needed = "error" if not record.ok else f"{record.timing}_us"
    if getattr(record, needed) is None:
        raise ValueError(f"{needed} is None; accepted with status {record.status!r}: a value")


def _matches(value: Any, hint: Any) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_matches(value, option) for option in args)
    if origin is tuple:
        return isinstance(value, list) and all(_matches(item, args[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_matches(item, args[1]) for item in value.values())
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _LARGEST
    return hint is Any or isinstance(value, hint)


_WORDS: dict[Any, str] = {str: "a string", int: "an integer", float: "a number", type(None): "null"}


def _words(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(map(_words, get_args(hint)))
    if get_origin(hint) is tuple:
        return "a list of integers"
    if get_origin(hint) is dict:
        values = get_args(hint)[1]
        return "an object" if values is Any else f"an object, each value {_words(values)}"
    return _WORDS[hint]
