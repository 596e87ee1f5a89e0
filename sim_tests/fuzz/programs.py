# SPDX-License-Identifier: Apache-2.0
"""Random NKI programs: a few tiles, and instructions on views of them, most of which fit together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from instructions import ARITHMETIC, BITVEC

from fuzz.interpretation import FLOATS, INTEGERS, Operand, Step
from fuzz.memory import Memory, Path, Refused, Tile, view_of
from nki_bn.simulator.dtypes import ALL_DTYPES

COMPARISONS = ("equal", "not_equal", "greater_equal", "greater", "less_equal", "less")
NUMBERS = (0, 1, -1, 2, 3, 0.5, -2.25, 100, 255, 70000, 1e30)
_PARTITIONS = (1, 2, 3, 8, 31, 32, 33, 40, 64, 65, 96, 97, 128)


@dataclass(frozen=True)
class Program:
    """Tiles and the instructions on them, in order."""

    tiles: tuple[Tile, ...]
    steps: tuple[Step, ...]
    numerics: str


@st.composite
def tiles(draw: st.DrawFn) -> tuple[Tile, ...]:
    """A few tiles, several with as many partitions and columns, so that instructions fit."""
    partitions, columns = draw(st.sampled_from(_PARTITIONS)), draw(st.integers(1, 12))
    made = []
    for _ in range(draw(st.integers(2, 4))):
        shape = (
            partitions if draw(st.integers(0, 3)) else draw(st.sampled_from(_PARTITIONS)),
            columns if draw(st.integers(0, 2)) else draw(st.integers(1, 12)),
        )
        dtype = draw(st.sampled_from(["float32", "float32", *FLOATS, *INTEGERS]))
        place = draw(st.sampled_from(["sbuf", "sbuf", "sbuf", "psum", "hbm"]))
        made.append(Tile(shape, dtype, place, draw(st.none() | st.integers(0, 99)) if draw(st.booleans()) else 1))
    return tuple(made)


def _interval(draw: st.DrawFn, size: int, steps: bool = True) -> slice:
    start = draw(st.integers(0, size - 1))
    stop = draw(st.integers(start + 1, size)) if draw(st.integers(0, 19)) else size + 1
    return slice(start, stop, draw(st.integers(1, 3)) if steps else 1)


@st.composite
def paths(draw: st.DrawFn, tile: Tile) -> Path:
    """A view of ``tile``: all of it, a part, an access pattern, or the result of several steps."""
    made: list[tuple[str, tuple[Any, ...]]] = []
    kind = draw(st.sampled_from(["all", "all", "part", "pattern", "steps"]))
    if kind == "pattern":
        rows = draw(st.integers(1, tile.shape[0]))
        first = draw(st.sampled_from([0, 0, 32, 64])) % tile.shape[0]
        free = draw(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4)), min_size=1, max_size=3))
        offset = first * tile.shape[1] + draw(st.integers(0, tile.shape[1] - 1))
        return (("ap", (((tile.shape[1], min(rows, tile.shape[0] - first)), *free), offset)),)
    if kind in ("part", "steps"):
        lanes = slice(0, tile.shape[0], 1)
        if draw(st.booleans()):
            start = draw(st.sampled_from([0, 32, 64, 96, 5]))
            lanes = slice(start, draw(st.integers(start + 1, max(start + 1, tile.shape[0]))), 1)
        made.append(("__getitem__", ((lanes, _interval(draw, tile.shape[1])),)))
    for _ in range(draw(st.integers(1, 3)) if kind == "steps" else 0):
        step = _step(draw, tile, tuple(made))
        if step is not None:
            made.append(step)
    return tuple(made)


def _step(draw: st.DrawFn, tile: Tile, path: Path) -> tuple[str, tuple[Any, ...]] | None:
    """One more step of a view."""
    try:
        shape = view_of(Memory(tile), path).index.shape
    except Refused:
        return None
    name = draw(st.sampled_from(["permute", "select", "expand_dim", "broadcast", "reshape_dim", "reshape", "view"]))
    dim = draw(st.integers(1, len(shape) - 1))
    if name == "permute":
        return name, (tuple([0, *draw(st.permutations(range(1, len(shape))))]),)
    if name == "select":
        return (name, (dim, draw(st.integers(0, shape[dim] - 1)))) if len(shape) > 2 else None
    if name == "expand_dim":
        return (name, (draw(st.integers(1, len(shape))),)) if len(shape) < 4 else None
    if name == "broadcast":
        return name, (dim, draw(st.integers(1, 4)))
    if name == "view":
        return name, (draw(st.sampled_from(INTEGERS + FLOATS)),)
    divisors = [size for size in range(1, shape[dim] + 1) if shape[dim] % size == 0]
    part = draw(st.sampled_from(divisors))
    if name == "reshape_dim":
        return (name, (dim, (part, shape[dim] // part))) if len(shape) < 5 else None
    return name, ((shape[0], int(np.prod(shape[1:]))),)


def _operand(draw: st.DrawFn, made: tuple[Tile, ...]) -> Operand:
    tile = draw(st.integers(0, len(made) - 1))
    return Operand(tile, draw(paths(made[tile])))


def _fitting(draw: st.DrawFn, made: tuple[Tile, ...], model: Operand, columns: int | None = None) -> Operand:
    """An operand with the partitions of ``model`` and as many elements, or ``columns``; else whatever is drawn."""
    try:
        rows = view_of(Memory(made[model.tile]), model.path).rows.shape
    except Refused:
        return _operand(draw, made)
    wanted = rows[1] if columns is None else columns
    able = [at for at, tile in enumerate(made) if tile.shape[0] >= rows[0] and tile.shape[1] >= wanted]
    if not able or not draw(st.integers(0, 9)):
        return _operand(draw, made)
    at = draw(st.sampled_from(able))
    start = draw(st.integers(0, made[at].shape[1] - wanted))
    lane = draw(st.sampled_from([0, *(lane for lane in (32, 64, 96) if lane + rows[0] <= made[at].shape[0])]))
    return Operand(at, (("__getitem__", ((slice(lane, lane + rows[0], 1), slice(start, start + wanted, 1)),)),))


def _number(draw: st.DrawFn) -> Any:
    return draw(st.sampled_from(NUMBERS))


def _pattern(draw: st.DrawFn, columns: int) -> tuple[tuple[int, int], ...]:
    outer = draw(st.sampled_from([size for size in range(1, columns + 1) if columns % size == 0]))
    steps = draw(st.tuples(st.integers(-5, 5), st.integers(-5, 5)))
    return (steps[0], outer), (steps[1], columns // outer)


@st.composite
def instructions_on(draw: st.DrawFn, made: tuple[Tile, ...]) -> Step:
    """An instruction; nine in ten have operands that fit together."""
    name = draw(st.sampled_from(sorted(_ARGUMENTS)))
    names, arguments = _ARGUMENTS[name]
    first = _operand(draw, made)
    operands = {"dst": first}
    try:
        view = view_of(Memory(made[first.tile]), first.path)
        columns, rank = view.rows.shape[1], view.index.ndim
    except Refused:
        columns, rank = 1, 2
    for other in names:
        operands[other] = _fitting(draw, made, first)
    given = arguments(draw, columns)
    if name in ("tensor_reduce", "tensor_partition_reduce"):
        operands = {"data": first, "dst": _fitting(draw, made, first, 1)}
        if name == "tensor_partition_reduce":
            lanes = slice(0, 1, 1)
            operands["dst"] = Operand(
                first.tile, (("__getitem__", ((lanes, slice(0, made[first.tile].shape[1], 1)),)),)
            )
        else:
            given["axis"] = tuple(range(draw(st.integers(1, rank - 1)), rank))
    if name in ("tensor_scalar", "scalar_tensor_tensor") and draw(st.booleans()):
        operands["operand0"] = _fitting(draw, made, first, 1)
        del given["operand0"]
    return Step(name, {"dst": operands.pop("dst"), **operands}, given)


def _of_tensor_scalar(draw: st.DrawFn, columns: int) -> dict[str, Any]:
    made = {
        "op0": draw(st.sampled_from(sorted(ARITHMETIC))),
        "operand0": _number(draw),
        "reverse0": draw(st.booleans()),
    }
    if draw(st.booleans()):
        made |= {"op1": draw(st.sampled_from(sorted(ARITHMETIC))), "operand1": _number(draw)}
    return made


def _of_scalar_tensor_tensor(draw: st.DrawFn, columns: int) -> dict[str, Any]:
    ops = draw(st.tuples(*[st.sampled_from(sorted(ARITHMETIC))] * 2))
    return {"op0": ops[0], "operand0": _number(draw), "op1": ops[1], "reverse1": draw(st.booleans())}


def _of_iota(draw: st.DrawFn, columns: int) -> dict[str, Any]:
    offset, multiplier = draw(st.tuples(st.integers(-9, 9), st.integers(-3, 3)))
    return {"pattern": _pattern(draw, columns), "offset": offset, "channel_multiplier": multiplier}


def _of_affine_select(draw: st.DrawFn, columns: int) -> dict[str, Any]:
    return _of_iota(draw, columns) | {"on_false_value": _number(draw), "cmp_op": draw(st.sampled_from(COMPARISONS))}


def _of_shuffle(draw: st.DrawFn, columns: int) -> dict[str, Any]:
    entry = st.integers(0, 31) if draw(st.integers(0, 3)) else st.sampled_from([0, 1, 255])
    return {"shuffle_mask": draw(st.lists(entry, min_size=32, max_size=32))}


def _of_scan(draw: st.DrawFn, columns: int) -> dict[str, Any]:
    ops = draw(st.tuples(*[st.sampled_from(sorted(ARITHMETIC))] * 2))
    return {"initial": _number(draw), "op0": ops[0], "op1": ops[1]}


# Per instruction: the operands beside dst that are as large, and what draws its other arguments.
_ARGUMENTS: dict[str, tuple[tuple[str, ...], Any]] = {
    "memset": ((), lambda draw, columns: {"value": _number(draw)}),
    "tensor_copy": (("src",), lambda draw, columns: {}),
    "dma_copy": (("src",), lambda draw, columns: {}),
    "nc_transpose": (("data",), lambda draw, columns: {}),
    "tensor_tensor": (
        ("data1", "data2"),
        lambda draw, columns: {"op": draw(st.sampled_from(sorted({**ARITHMETIC, **BITVEC})))},
    ),
    "tensor_scalar": (("data",), _of_tensor_scalar),
    "scalar_tensor_tensor": (("data", "operand1"), _of_scalar_tensor_tensor),
    "tensor_reduce": (
        (),
        lambda draw, columns: {
            "op": draw(st.sampled_from(["add", "maximum", "minimum"])),
            "negate": draw(st.booleans()),
        },
    ),
    "tensor_tensor_scan": (("data0", "data1"), _of_scan),
    "activation": (
        ("data",),
        lambda draw, columns: {
            "op": draw(st.sampled_from(["copy", "relu", "square"])),
            "scale": float(_number(draw)),
            "bias": float(_number(draw)),
        },
    ),
    "iota": ((), _of_iota),
    "affine_select": (("on_true_tile",), _of_affine_select),
    "tensor_copy_predicated": (("src", "predicate"), lambda draw, columns: {"reverse_pred": draw(st.booleans())}),
    "tensor_partition_reduce": ((), lambda draw, columns: {"op": "maximum"}),
    "nc_stream_shuffle": (("src",), _of_shuffle),
}


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Up to eight instructions on up to four tiles."""
    made = draw(tiles())
    steps = draw(st.lists(instructions_on(made), min_size=1, max_size=8))
    return Program(made, tuple(steps), draw(st.sampled_from(["ideal", "trn2"])))


def contents(tile: Tile) -> Any:
    """What a tile is filled with: small numbers, fractions, the ends of the range, and in floats NaN and infinity."""
    assert tile.seed is not None
    rng, dtype = np.random.default_rng(tile.seed), ALL_DTYPES[tile.dtype]
    if tile.dtype in INTEGERS:
        info = np.iinfo(dtype)
        values = rng.integers(max(info.min, -9), 10, tile.shape)
        ends = rng.random(tile.shape)
        values = np.where(ends < 0.05, info.max, np.where(ends > 0.95, info.min, values))
        return values.astype(dtype)
    chosen = rng.choice([0.0, -0.0, 1.0, -3.0, 2.5, 0.1, 7.0, 1e-3, 300.0], tile.shape)
    if tile.seed % 3 == 0:
        special = rng.random(tile.shape)
        chosen = np.where(special < 0.05, np.nan, np.where(special > 0.95, -np.inf, chosen))
    with np.errstate(all="ignore"):
        return chosen.astype(dtype)
