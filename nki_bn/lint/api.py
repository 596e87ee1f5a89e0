# SPDX-License-Identifier: Apache-2.0
"""Rules on the use of nki itself: imports, launches, removed names."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from nki_bn.lint.module import Module
from nki_bn.lint.reach import is_jit
from nki_bn.lint.rule import ERROR, WARNING, Hit, Table
from nki_bn.lint.tree import FunctionNode, defaults
from nki_bn.lint.walk import Place

API = Table("Use of nki")
OLD_PACKAGE = API.rule("NKI501", "neuronxcc.nki", "refused in kernels since 0.4.0; import nki", ERROR, ERROR)
LIST_ARGUMENT = API.rule(
    "NKI502", "list as a kernel argument", "kernels have taken no lists since 0.3.0; use a tuple", ERROR, ERROR
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
    "gone since 0.2.0 to 0.4.0; use views, slices clipped with min at the edge, and plain numbers",
    ERROR,
    ERROR,
)
NO_ARGUMENTS = API.rule(
    "NKI514", "launch without arguments", "refused since 0.2.0; a kernel takes tensors", ERROR, ERROR
)
GRID = API.rule("NKI515", "launch grid", "kernel[n] takes the number of physical cores, 1 or 2", ERROR, ERROR)

_NL = "nki.language."
_REMOVED_LAUNCHES = {f"nki.{name}" for name in ("benchmark", "profile", "baremetal", "simulate_kernel")}
_REMOVED_NAMES = {_NL + name for name in ("mgrid", "arange", "fp32")}
_REMOVED_NAMES |= {"nki.isa.tensor_copy_dynamic_src", "nki.isa.tensor_copy_dynamic_dst"}


def file_hits(module: Module) -> Iterator[Hit]:
    """Violations outside of kernel code: imports, launches, arguments of nki.jit."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from _old_imports(node)
        elif isinstance(node, ast.Call) and module.dotted(node.func) == "nki.jit":
            yield from _jit_arguments(node)
        elif isinstance(node, ast.Call):
            yield from _launch(node, module)
        elif isinstance(node, ast.Attribute | ast.Name) and module.dotted(node) in _REMOVED_LAUNCHES:
            yield Hit(REMOVED_LAUNCH, node, module.dotted(node) or "")


def _launch(node: ast.Call, module: Module) -> Iterator[Hit]:
    """The grid and the arguments of a kernel's launch."""
    grid = node.func.slice if isinstance(node.func, ast.Subscript) else None
    kernel = node.func.value if isinstance(node.func, ast.Subscript) else node.func
    found = module.resolve(kernel)
    if not found or not isinstance(found.node, FunctionNode):
        return
    if not any(is_jit(found.module, decorator) for decorator in found.node.decorator_list):
        return
    if not node.args and not node.keywords:
        yield Hit(NO_ARGUMENTS, node, f"launch of {found.node.name} without arguments")
    if isinstance(grid, ast.Tuple) or (isinstance(grid, ast.Constant) and grid.value not in (1, 2)):
        yield Hit(GRID, grid, f"launch grid [{ast.unparse(grid)}]")
    for value in (*node.args, *(keyword.value for keyword in node.keywords)):
        if isinstance(value, ast.List):
            yield Hit(LIST_ARGUMENT, value, f"list as an argument of {found.node.name}")


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
                yield Hit(LIST_ARGUMENT, value, f"list as default of {name}")


@API.on("Attribute", "Name")
def removed_name(node: ast.Attribute | ast.Name, place: Place) -> Iterator[Hit]:
    """Names of the old API."""
    dotted = place.module.dotted(node)
    if dotted in _REMOVED_NAMES:
        yield Hit(REMOVED_NAME, node, dotted.replace(_NL, "nl.").replace("nki.isa.", "nisa."))


@API.on("Call")
def removed_argument(node: ast.Call, place: Place) -> Iterator[Hit]:
    """`mask=` of the old API."""
    if (place.module.dotted(node.func) or "").startswith((_NL, "nki.isa.")):
        for keyword in node.keywords:
            if keyword.arg == "mask":
                yield Hit(REMOVED_NAME, keyword.value, "mask=")
