# SPDX-License-Identifier: Apache-2.0
"""Rules on tensors and instructions: buffers, shapes, element types, names, outputs."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from nki_bn.lint.module import Module
from nki_bn.lint.rule import ERROR, Hit, Table
from nki_bn.lint.signatures import ENUMERATIONS, signatures
from nki_bn.lint.tree import FunctionNode, argument, assigned_values
from nki_bn.lint.values import TENSOR_MAKERS, VIEW_METHODS
from nki_bn.lint.walk import Place

TENSORS = Table("Tensors and instructions")
STRING_BUFFER = TENSORS.rule(
    "NKI503",
    "string as buffer",
    "refused since 0.3.0; use nl.sbuf, nl.psum, nl.shared_hbm or nl.private_hbm",
    ERROR,
    ERROR,
)
FLAT_TILE = TENSORS.rule(
    "NKI508", "tile below two dimensions", "tiles on chip have at least two; use (P, 1) or (1, N)", ERROR, ERROR
)
OUTPUT = TENSORS.rule(
    "NKI509", "output outside shared HBM", "returned tensors have to be in nl.shared_hbm since 0.3.0", ERROR, ERROR
)
ENUMERATION = TENSORS.rule(
    "NKI510", "number or string for an Enum member", "refused since 0.3.0; write the member", ERROR, ERROR
)
UNEQUAL_DTYPES = TENSORS.rule(
    "NKI511",
    "hwdge between dtypes",
    "hardware descriptors move bytes; cast with another mode or by tensor_copy",
    ERROR,
    ERROR,
)

_NL = "nki.language."
_BUFFER_POSITIONS = {f"{_NL}{name}": 2 for name in ("ndarray", "zeros", "ones", "rand")} | {f"{_NL}full": 3}
_LIKE = {f"{_NL}zeros_like": 2, f"{_NL}empty_like": 2}
_DTYPE_POSITIONS = {**{name: 1 for name in _BUFFER_POSITIONS}, f"{_NL}full": 2}
_ON_CHIP = {f"{_NL}sbuf", f"{_NL}psum"}
_PLACES = {
    **dict.fromkeys(_ON_CHIP, "on chip"),
    **dict.fromkeys((f"{_NL}hbm", f"{_NL}private_hbm"), "in private HBM"),
}
_MAKERS = {f"{_NL}{name}" for name in TENSOR_MAKERS} - {f"{_NL}shared_constant", f"{_NL}expand_dims"}
_RETYPING = frozenset({"view", "reinterpret_cast", "ap"})


@TENSORS.on("Call")
def string_buffer(node: ast.Call, place: Place) -> Iterator[Hit]:
    """Buffers given as strings."""
    position = {**_BUFFER_POSITIONS, **_LIKE}.get(place.module.dotted(node.func) or "")
    buffer = argument(node, position, "buffer") if position is not None else None
    if isinstance(buffer, ast.Constant) and isinstance(buffer.value, str):
        yield Hit(STRING_BUFFER, buffer, f"buffer {buffer.value!r}")


@TENSORS.on("Call")
def flat_tile(node: ast.Call, place: Place) -> Iterator[Hit]:
    """Tiles of one dimension, or of none, in SBUF or PSUM."""
    if _buffer(node, place.module) not in _ON_CHIP:
        return
    shape = argument(node, 0, "shape")
    for value in _meanings(shape, place.unit.node) if shape is not None else ():
        number = isinstance(value, ast.Constant) and isinstance(value.value, int)
        if number or (isinstance(value, ast.Tuple | ast.List) and _is_short(value)):
            yield Hit(FLAT_TILE, shape or node, f"tile of shape {ast.unparse(value)}")


def _is_short(shape: ast.Tuple | ast.List) -> bool:
    return len(shape.elts) < 2 and not any(isinstance(size, ast.Starred) for size in shape.elts)


@TENSORS.on("Return")
def output(node: ast.Return, place: Place) -> Iterator[Hit]:
    """Results of a kernel that were allocated elsewhere than in shared HBM."""
    function = place.unit.node
    if not place.unit.entry or next(place.module.functions_around(node)) is not function:
        return
    results = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
    for result in results:
        meanings = _meanings(_tensor(result), function) if result is not None else []
        places = {_where(_tensor(meaning), place.module) for meaning in meanings}
        if result is not None and len(places) == 1 and (where := places.pop()):
            yield Hit(OUTPUT, result, f"output {ast.unparse(result)} {where}")


def _where(value: ast.expr, module: Module) -> str:
    """The wrong place of a new tensor; '' for a right one and for other expressions."""
    if not isinstance(value, ast.Call) or module.dotted(value.func) not in _MAKERS:
        return ""
    return _PLACES.get(_buffer(value, module), "")


def _buffer(call: ast.Call, module: Module) -> str:
    """The buffer a call allocates in, '' when the text does not say."""
    dotted = module.dotted(call.func) or ""
    if dotted in _BUFFER_POSITIONS:
        buffer = argument(call, _BUFFER_POSITIONS[dotted], "buffer")
        return f"{_NL}sbuf" if buffer is None else module.dotted(buffer) or ""
    return f"{_NL}sbuf" if dotted in _MAKERS - set(_LIKE) else ""


def _tensor(value: ast.expr) -> ast.expr:
    """The tensor below views of it."""
    while True:
        if isinstance(value, ast.Subscript):
            value = value.value
        elif isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in VIEW_METHODS:
            value = value.func.value
        else:
            return value


def _meanings(value: ast.expr, function: ast.AST) -> list[ast.expr]:
    """What a name of the function was assigned, or the expression itself; nothing when it cannot be known."""
    if not isinstance(value, ast.Name):
        return [value]
    return assigned_values(function, value.id) if isinstance(function, FunctionNode) else []


@TENSORS.on("Call")
def enumeration(node: ast.Call, place: Place) -> Iterator[Hit]:
    """Numbers and strings where nki.isa takes members of its enumerations."""
    known = signatures().get(place.module.dotted(node.func) or "")
    if known is None or not (place.module.dotted(node.func) or "").startswith("nki.isa."):
        return
    for position, name in enumerate(known.parameters):
        value = argument(node, position, name) if name in ENUMERATIONS else None
        if isinstance(value, ast.Constant) and value.value is not None:
            yield Hit(ENUMERATION, value, f"{name}={value.value!r} (members of nisa.{ENUMERATIONS[name]})")


@TENSORS.on("Call")
def unequal_dtypes(node: ast.Call, place: Place) -> Iterator[Hit]:
    """Copies by hardware descriptors between tensors whose element types the text shows to differ."""
    mode = argument(node, 4, "dge_mode")
    dotted = place.module.dotted(node.func)
    if dotted != "nki.isa.dma_copy" or mode is None or place.module.dotted(mode) != "nki.isa.dge_mode.hwdge":
        return
    sides = [argument(node, position, name) for position, name in enumerate(("dst", "src"))]
    dtypes = [_dtype(side, place) for side in sides if side is not None]
    if len(dtypes) == 2 and "" not in dtypes and dtypes[0] != dtypes[1]:
        yield Hit(UNEQUAL_DTYPES, node, f"hwdge from {dtypes[1]} to {dtypes[0]}")


def _dtype(value: ast.expr, place: Place) -> str:
    """The element type of a tensor or view, '' when the text does not show it."""
    if any(isinstance(item, ast.Attribute) and item.attr in _RETYPING for item in ast.walk(value)):
        return ""
    found = {_new_dtype(meaning, place.module) for meaning in _meanings(_tensor(value), place.unit.node)}
    return found.pop() if len(found) == 1 else ""


def _new_dtype(value: ast.expr, module: Module) -> str:
    position = _DTYPE_POSITIONS.get(module.dotted(value.func) or "") if isinstance(value, ast.Call) else None
    if position is None or not isinstance(value, ast.Call):
        return ""
    dtype = argument(value, position, "dtype")
    dotted = module.dotted(dtype) if dtype is not None else None
    return dotted.replace(_NL, "nl.") if dotted and dotted.startswith(_NL) else ""
