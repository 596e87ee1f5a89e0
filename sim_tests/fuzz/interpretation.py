# SPDX-License-Identifier: Apache-2.0
"""Instructions interpreted with NumPy: what each computes of whole operands, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from instructions import ARITHMETIC, BITVEC, pointer

from fuzz.memory import Array, Path, Refused, View
from nki_bn.simulator.dtypes import ALL_DTYPES

F32 = np.float32
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32")
FLOATS = ("float32", "bfloat16", "float16", "float8_e4m3", "float8_e5m2")


@dataclass(frozen=True)
class Operand:
    """A view of tile number ``tile``."""

    tile: int
    path: Path = ()


@dataclass(frozen=True)
class Step:
    """An instruction: the operands that are tensors by name, ``dst`` first, and its other arguments.

    Arguments named ``op...`` are names in ``nki.language``; ``engine`` is one in its enumeration.
    """

    name: str
    operands: dict[str, Operand]
    arguments: dict[str, Any] = field(default_factory=dict)


def wide(values: Array) -> Array:
    """As float32."""
    return values.astype(F32)


def cast(values: Array, dtype: str) -> Array:
    """As an engine writes it: to nearest even; integers saturate, and NaN is 0."""
    to = ALL_DTYPES[dtype]
    if values.dtype == to:
        return values
    values = wide(values)
    if to.kind not in "iu":
        return values.astype(to)
    info = np.iinfo(to)
    exact = np.where(np.isnan(values), 0.0, np.rint(values.astype(np.float64)))
    return np.clip(exact, info.min, info.max).astype(to)


def _require(condition: bool) -> None:
    if not condition:
        raise Refused


def _on_chip(views: dict[str, View], places: tuple[str, ...] = ("sbuf", "psum")) -> None:
    for view in views.values():
        _require(view.memory.tile.place in places and view.index.shape[0] <= 128)


def _starts(views: dict[str, View]) -> None:
    """Engines reach partitions from 0, 32, 64 or 96 on, and more than 32 or 64 of them from fewer places."""
    for view in views.values():
        rows = view.index.shape[0]
        _require(not view.outside and view.start in ((0,) if rows > 64 else (0, 64) if rows > 32 else (0, 32, 64, 96)))


def _alike(*views: View) -> None:
    for view in views:
        _require(view.rows.shape == views[0].rows.shape)


def _binary(name: str, a: Array, b: Array, dtype: Any) -> Array:
    made = (BITVEC if name in BITVEC else ARITHMETIC)[name](a, b)
    return np.asarray(made).astype(dtype)


def _bits(view: View, values: Array) -> Array:
    return values.view(f"u{view.itemsize}").reshape(view.rows.shape)


def _rows(view: View) -> Array:
    return view.read().reshape(view.rows.shape)


def _memset(views: dict[str, View], arguments: dict[str, Any], numerics: str) -> Array:
    dst = views["dst"]
    value = arguments["value"]
    if dst.dtype in INTEGERS:
        info = np.iinfo(ALL_DTYPES[dst.dtype])
        _require(isinstance(value, int) and info.min <= value <= info.max)
        return np.full(dst.index.shape, value, ALL_DTYPES[dst.dtype])
    return np.full(dst.index.shape, F32(value))


def _tensor_copy(views: dict[str, View], arguments: dict[str, Any], numerics: str) -> Array:
    _alike(views["dst"], views["src"])
    return views["src"].read()


def _tensor_tensor(views: dict[str, View], arguments: dict[str, Any], numerics: str) -> Array:
    dst, first, second, op = views["dst"], views["data1"], views["data2"], arguments["op"]
    _alike(dst, first, second)
    _require(not first.memory.tile.place == second.memory.tile.place == "psum")
    if op in BITVEC:
        _require(all(view.dtype in INTEGERS and view.itemsize == dst.itemsize for view in views.values()))
        made = BITVEC[op](_bits(first, _rows(first)), _bits(second, _rows(second)))
        return made.view(ALL_DTYPES[dst.dtype])
    words = all(view.dtype in ("int32", "uint32") for view in views.values())
    psum = any(view.memory.tile.place == "psum" for view in views.values())
    if words and not psum:
        made = ARITHMETIC[op](_rows(first).astype(np.int64), _rows(second).astype(np.int64))
        return np.asarray(made).astype(np.int64).astype(ALL_DTYPES[dst.dtype])
    return _binary(op, wide(_rows(first)), wide(_rows(second)), F32)


def _stage(values: Array, views: dict[str, View], arguments: dict[str, Any], place: str, numerics: str) -> Array:
    op, reverse = arguments[f"op{place}"], arguments.get(f"reverse{place}", False)
    column = views.get(f"operand{place}")
    if column is None:
        other: Any = F32(arguments[f"operand{place}"])
    else:
        _require(column.index.size == column.index.shape[0] == len(values))
        _require(column.dtype == "float32" or "operand1" in views)
        other = wide(_rows(column)) if numerics == "ideal" else pointer(wide(_rows(column)))
    return _binary(op, other, values, F32) if reverse else _binary(op, values, other, F32)


def _tensor_scalar(views: dict[str, View], arguments: dict[str, Any], numerics: str) -> Array:
    _alike(views["dst"], views["data"])
    made = wide(_rows(views["data"]))
    for place in "01":
        if f"op{place}" in arguments:
            made = _stage(made, views, arguments, place, numerics)
    return made


def _scalar_tensor_tensor(views: dict[str, View], arguments: dict[str, Any], numerics: str) -> Array:
    data, other = views["data"], views["operand1"]
    _alike(views["dst"], data, other)
    _require(not data.memory.tile.place == other.memory.tile.place == "psum")
    made = _stage(wide(_rows(data)), views, arguments, "0", numerics)
    a, b = made, wide(_rows(other))
    return _binary(arguments["op1"], *((b, a) if arguments.get("reverse1") else (a, b)), F32)


def _tensor_reduce(views: dict[str, View], arguments: dict[str, Any], numerics: str) -> Array:
    data, dst = views["data"], views["dst"]
    kept = data.index.shape[1 : data.index.ndim - len(arguments["axis"])]
    _require(dst.rows.shape == (data.index.shape[0], int(np.prod(kept))))
    values = wide(data.read()).reshape(*dst.rows.shape, -1)
    made = {"maximum": np.max, "minimum": np.min, "add": np.sum}[arguments["op"]](np.ascontiguousarray(values), axis=-1)
    return made * F32(-1) if arguments.get("negate") else made


def _tensor_tensor_scan(views: dict[str, View], arguments: dict[str, Any], numerics: str) -> Array:
    first, second = views["data0"], views["data1"]
    _alike(views["dst"], first, second)
    _require(not first.memory.tile.place == second.memory.tile.place == "psum")
    left, right = wide(_rows(first)), wide(_rows(second))
    made, carry = np.empty_like(left), np.full(len(left), F32(arguments["initial"]))
    for column in range(left.shape[1]):
        inner = _binary(arguments["op0"], left[:, column], carry, F32)
        carry = made[:, column] = _binary(arguments["op1"], inner, right[:, column], F32)
    return made


def _activation(views: dict[str, View], arguments: dict[str, Any], numerics: str) -> Array:
    _alike(views["dst"], views["data"])
    scaled = wide(_rows(views["data"])) * F32(arguments["scale"]) + F32(arguments["bias"])
    return {"copy": lambda x: x, "relu": lambda x: np.maximum(x, F32(0)), "square": np.square}[arguments["op"]](scaled)


def _dma_copy(views: dict[str, View], arguments: dict[str, Any], numerics: str) -> Array:
    dst, src = views["dst"], views["src"]
    _require(dst.index.size == src.index.size and "psum" not in (dst.memory.tile.place, src.memory.tile.place))
    return src.read()


def _nc_transpose(views: dict[str, View], arguments: dict[str, Any], numerics: str) -> Array:
    dst, data = views["dst"], views["data"]
    tensor = data.memory.tile.place == "sbuf" and dst.memory.tile.place == "psum"
    _require(dst.rows.shape == data.rows.shape[::-1] and max(data.rows.shape) <= (128 if tensor else 32))
    _require(dst.dtype == data.dtype or (tensor and dst.dtype == "float32" and data.dtype in FLOATS))
    return _rows(data).T


def _iota(views: dict[str, View], arguments: dict[str, Any], numerics: str) -> Array:
    dst = views["dst"]
    made = _affine(dst, arguments)
    return made.view(np.uint32) if dst.dtype == "uint32" else made


def _affine(dst: View, arguments: dict[str, Any]) -> Array:
    rows = dst.rows.shape
    counts = tuple(count for _, count in arguments["pattern"])
    _require(int(np.prod(counts)) == rows[1])
    made = np.empty(rows, np.int64)
    for lane in range(rows[0]):
        for column, at in enumerate(np.ndindex(counts)):
            steps = sum(step * i for (step, _), i in zip(arguments["pattern"], at, strict=True))
            made[lane, column] = arguments["offset"] + lane * arguments["channel_multiplier"] + steps
    return made.astype(np.int32)


def _affine_select(views: dict[str, View], arguments: dict[str, Any], numerics: str) -> Array:
    dst, source = views["dst"], views["on_true_tile"]
    _alike(dst, source)
    chosen = ARITHMETIC[arguments["cmp_op"]](_affine(dst, arguments), 0)
    values = cast(_rows(source), dst.dtype)
    return np.where(chosen, values, cast(np.full(values.shape, F32(arguments["on_false_value"])), dst.dtype))


def _tensor_copy_predicated(views: dict[str, View], arguments: dict[str, Any], numerics: str) -> tuple[Array, Array]:
    dst, src, predicate = views["dst"], views["src"], views["predicate"]
    _alike(dst, src, predicate)
    _require(predicate.dtype in ("uint8", "uint16", "uint32") and src.dtype == dst.dtype)
    _require(not src.memory.tile.place == predicate.memory.tile.place == "psum")
    return _rows(src), (_rows(predicate) != 0) ^ arguments["reverse_pred"]


def _tensor_partition_reduce(views: dict[str, View], arguments: dict[str, Any], numerics: str) -> Array:
    dst, data = views["dst"], views["data"]
    _require(dst.rows.shape == (1, data.rows.shape[1]))
    return wide(_rows(data)).max(0)


def _nc_stream_shuffle(views: dict[str, View], arguments: dict[str, Any], numerics: str) -> tuple[Array, Array]:
    dst, src, mask = views["dst"], views["src"], arguments["shuffle_mask"]
    lanes, given = dst.rows.shape[0], src.rows.shape[0]
    _require(dst.dtype == src.dtype and dst.rows.shape[1] == src.rows.shape[1])
    active = -(-max(lanes, given) // 32) * 32
    for view in views.values():
        _require(view.start in ((0,) if active > 64 else (0, 64) if active > 32 else (0, 32, 64, 96)))
    made, moved = np.zeros(dst.rows.shape, ALL_DTYPES[dst.dtype]), np.zeros(dst.rows.shape, np.bool_)
    values = _rows(src)
    for lane in range(lanes):
        source = mask[lane % 32]
        if source != 255:
            _require(lane // 32 * 32 + source < given)
            made[lane], moved[lane] = values[lane // 32 * 32 + source], True
    return made, moved


Computed = Array | tuple[Array, Array]
_CHIP, _SBUF, _DMA = ("sbuf", "psum"), ("sbuf",), ("sbuf", "hbm")
# What an instruction computes, and where its operands may lie.
INSTRUCTIONS: dict[str, tuple[Callable[[dict[str, View], dict[str, Any], str], Computed], tuple[str, ...]]] = {
    "memset": (_memset, _CHIP),
    "tensor_copy": (_tensor_copy, _CHIP),
    "tensor_tensor": (_tensor_tensor, _CHIP),
    "tensor_scalar": (_tensor_scalar, _CHIP),
    "scalar_tensor_tensor": (_scalar_tensor_tensor, _CHIP),
    "tensor_reduce": (_tensor_reduce, _CHIP),
    "tensor_tensor_scan": (_tensor_tensor_scan, _CHIP),
    "activation": (_activation, _CHIP),
    "dma_copy": (_dma_copy, _DMA),
    "nc_transpose": (_nc_transpose, _CHIP),
    "iota": (_iota, _SBUF),
    "affine_select": (_affine_select, _SBUF),
    "tensor_copy_predicated": (_tensor_copy_predicated, _CHIP),
    "tensor_partition_reduce": (_tensor_partition_reduce, _SBUF),
    "nc_stream_shuffle": (_nc_stream_shuffle, _CHIP),
}


def interpret(step: Step, views: dict[str, View], numerics: str) -> None:
    """Carry a step out on memories.

    Raises:
        Refused: a rule is broken; nothing has changed.
    """
    compute, places = INSTRUCTIONS[step.name]
    _on_chip(views, places) if "dma" not in step.name else None
    if "dma" not in step.name:
        _starts(views)
    _require(not any(view.outside for view in views.values()))
    with np.errstate(all="ignore"):
        made = compute(views, step.arguments, numerics)
        values, mask = made if isinstance(made, tuple) else (made, None)
        values = cast(values, views["dst"].dtype)
    views["dst"].write(values, mask)
