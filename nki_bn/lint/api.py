# SPDX-License-Identifier: Apache-2.0
"""Rules on the use of nki itself: launch, removed names, buffers and outputs."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from nki_bn.lint.module import Module
from nki_bn.lint.rule import ERROR, WARNING, Hit, Table
from nki_bn.lint.tree import FunctionNode, argument, defaults, own_nodes
from nki_bn.lint.walk import Place

API = Table("Use of nki")
OLD_PACKAGE = API.rule("NKI501", "neuronxcc.nki", "refused in kernels since 0.4.0; import nki", ERROR, ERROR)
LIST_DEFAULT = API.rule(
    "NKI502", "list as a kernel argument", "kernels have taken no lists since 0.3.0; use a tuple", ERROR, ERROR
)
STRING_BUFFER = API.rule(
    "NKI503",
    "string as buffer",
    "refused since 0.3.0; use nl.sbuf, nl.psum, nl.shared_hbm or nl.private_hbm",
    ERROR,
    ERROR,
)
JIT_MODE = API.rule("NKI504", "mode= of nki.jit", "deprecated and ignored; drop it", WARNING, WARNING)
JIT_TARGET = API.rule(
    "NKI505", "platform_target= of nki.jit", "raises since 0.3.0; set NEURON_PLATFORM_TARGET_OVERRIDE", ERROR, ERROR
)
REMOVED_LAUNCH = API.rule(
    "NKI506", "removed function of nki", "the current API raises an error; see nki.jit and nki.simulate", ERROR, ERROR
)
REMOVED_NAME = API.rule(
    "NKI507",
    "removed name or argument",
    "gone since 0.2.0; use slices, clipped with min at the edge, and plain numbers",
    ERROR,
    ERROR,
)
FLAT_TILE = API.rule(
    "NKI508", "one-dimensional tile", "tiles on chip have at least two dimensions; use (P, 1) or (1, N)", ERROR, ERROR
)
PRIVATE_OUTPUT = API.rule(
    "NKI509", "output in private HBM", "returned tensors have to be in nl.shared_hbm since 0.3.0", ERROR, ERROR
)

_NL = "nki.language."
_REMOVED_LAUNCHES = {f"nki.{name}" for name in ("benchmark", "profile", "baremetal", "simulate_kernel")}
_REMOVED_NAMES = {_NL + name for name in ("mgrid", "arange", "fp32")}
_BUFFER_POSITIONS = {_NL + "ndarray": 2, _NL + "zeros": 2, _NL + "ones": 2, _NL + "full": 3}
_ALL_BUFFER_POSITIONS = {**_BUFFER_POSITIONS, _NL + "zeros_like": 2, _NL + "empty_like": 2}
_ON_CHIP = {_NL + "sbuf", _NL + "psum"}
_PRIVATE = {_NL + "hbm", _NL + "private_hbm"}


def file_hits(module: Module) -> Iterator[Hit]:
    """Violations outside of kernel code: imports, launches, arguments of nki.jit."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from _old_imports(node)
        elif isinstance(node, ast.Call) and module.dotted(node.func) == "nki.jit":
            yield from _jit_arguments(node)
        elif isinstance(node, ast.Attribute | ast.Name) and module.dotted(node) in _REMOVED_LAUNCHES:
            yield Hit(REMOVED_LAUNCH, node, module.dotted(node) or "")


def _old_imports(node: ast.Import | ast.ImportFrom) -> Iterator[Hit]:
    names = [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{name}" for name in names if not node.level]
    for name in names:
        if f"{name}.".startswith("neuronxcc.nki."):
            yield Hit(OLD_PACKAGE, node, f"import of {name}")


def _jit_arguments(node: ast.Call) -> Iterator[Hit]:
    for keyword in node.keywords:
        if keyword.arg == "mode":
            yield Hit(JIT_MODE, keyword.value)
        elif keyword.arg == "platform_target":
            yield Hit(JIT_TARGET, keyword.value)


@API.on("FunctionDef")
def list_default(node: FunctionNode, place: Place) -> Iterator[Hit]:
    """Lists as default arguments of kernels."""
    if place.unit.entry and node is place.unit.node:
        for name, value in defaults(node):
            if isinstance(value, ast.List):
                yield Hit(LIST_DEFAULT, value, f"list as default of {name}")


@API.on("Call")
def string_buffer(node: ast.Call, place: Place) -> Iterator[Hit]:
    """Buffers given as strings."""
    dotted = place.module.dotted(node.func) or ""
    position = _ALL_BUFFER_POSITIONS.get(dotted)
    buffer = argument(node, position, "buffer") if position is not None else None
    if isinstance(buffer, ast.Constant) and isinstance(buffer.value, str):
        yield Hit(STRING_BUFFER, buffer, f"buffer {buffer.value!r}")


@API.on("Call")
def flat_tile(node: ast.Call, place: Place) -> Iterator[Hit]:
    """Tiles of one dimension in SBUF or PSUM."""
    dotted = place.module.dotted(node.func) or ""
    if dotted in _BUFFER_POSITIONS:
        shape = argument(node, 0, "shape")
        buffer = argument(node, _BUFFER_POSITIONS[dotted], "buffer")
        on_chip = buffer is None or place.module.dotted(buffer) in _ON_CHIP
        if on_chip and isinstance(shape, ast.Tuple | ast.List) and len(shape.elts) == 1:
            yield Hit(FLAT_TILE, shape, f"one-dimensional tile {ast.unparse(shape)}")


@API.on("Attribute", "Name")
def removed_name(node: ast.Attribute | ast.Name, place: Place) -> Iterator[Hit]:
    """Names of the old API."""
    dotted = place.module.dotted(node)
    if dotted in _REMOVED_NAMES:
        yield Hit(REMOVED_NAME, node, dotted.replace(_NL, "nl."))


@API.on("Call")
def removed_argument(node: ast.Call, place: Place) -> Iterator[Hit]:
    """`mask=` of the old API."""
    if (place.module.dotted(node.func) or "").startswith((_NL, "nki.isa.")):
        for keyword in node.keywords:
            if keyword.arg == "mask":
                yield Hit(REMOVED_NAME, keyword.value, "mask=")


@API.on("Return")
def private_output(node: ast.Return, place: Place) -> Iterator[Hit]:
    """Results of a kernel that were allocated in private HBM."""
    function = place.unit.node
    if not place.unit.entry or next(place.module.functions_around(node)) is not function:
        return
    private = {name for item in own_nodes(function) for name in _private(item, place.module)}
    results = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
    for result in results:
        if isinstance(result, ast.Name) and result.id in private:
            yield Hit(PRIVATE_OUTPUT, result, f"output {result.id} in private HBM")


def _private(node: ast.AST, module: Module) -> Iterator[str]:
    """Names that a statement binds to a new tensor in private HBM."""
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
        position = _BUFFER_POSITIONS.get(module.dotted(node.value.func) or "")
        buffer = argument(node.value, position, "buffer") if position is not None else None
        if buffer is not None and module.dotted(buffer) in _PRIVATE:
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
