# SPDX-License-Identifier: Apache-2.0
"""Rules on the names of tensors and instructions, and on names of nki that a version does not have."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple

from nki_bn.lint.module import Module
from nki_bn.lint.rule import ERROR, WARNING, Hit, Table
from nki_bn.lint.signatures import LATER, signatures
from nki_bn.lint.tree import FunctionNode, own_nodes
from nki_bn.lint.values import is_dynamic_range
from nki_bn.lint.walk import Place

NAMES = Table("Names")
DUPLICATE = NAMES.rule(
    "NKI512",
    "name given twice",
    "names of tensors and of instructions are unique in a kernel; build them from the loop variable",
    WARNING,
    WARNING,
)
LATER_NAME = NAMES.rule("NKI513", "name of NKI 0.7", "0.6 does not have it", ERROR)


class _Named(NamedTuple):
    """A call with a constant name; ``branches``: the sides of the conditions it stands in."""

    value: ast.Constant
    is_tensor: bool
    branches: dict[ast.AST, str]
    repeats: bool


@NAMES.on("FunctionDef")
def duplicate(node: FunctionNode, place: Place) -> Iterator[Hit]:
    """Constant names in static loops, and equal ones that both come about."""
    named = [_named(call, name, node, place.module) for call, name in _constant_names(node, place.module)]
    pairs = [pair for pair in combinations(named, 2) if _is_duplicate(*pair)]
    twice = {second.value for _, second in pairs} | {item.value for item in named if item.repeats}
    yield from (Hit(DUPLICATE, value, f"name {value.value!r} given twice") for value in twice)


def _constant_names(function: FunctionNode, module: Module) -> Iterator[tuple[ast.Call, ast.Constant]]:
    for call in own_nodes(function):
        if isinstance(call, ast.Call) and (module.dotted(call.func) or "") in signatures():
            for keyword in call.keywords:
                if keyword.arg == "name" and isinstance(keyword.value, ast.Constant) and keyword.value.value:
                    yield call, keyword.value


def _named(call: ast.Call, value: ast.Constant, function: FunctionNode, module: Module) -> _Named:
    branches: dict[ast.AST, str] = {}
    repeats = False
    child: ast.AST = call
    parent = module.parents[call]
    while child is not function:
        if isinstance(parent, ast.If | ast.IfExp):
            branches[parent] = _side(parent, child)
        repeats |= (
            isinstance(parent, ast.For) and any(child is item for item in parent.body) and _is_static(parent, module)
        )
        child, parent = parent, module.parents[parent]
    return _Named(value, (module.dotted(call.func) or "").startswith("nki.language."), branches, repeats)


def _side(condition: ast.If | ast.IfExp, child: ast.AST) -> str:
    sides = (("body", condition.body), ("orelse", condition.orelse))
    return next(
        (name for name, nodes in sides if child is nodes or (isinstance(nodes, list) and child in nodes)), "test"
    )


def _is_static(loop: ast.For, module: Module) -> bool:
    """Whether a loop is unrolled into more than one pass: a loop that ends by break may run once."""
    stops = any(isinstance(item, ast.Break | ast.Return) for item in own_nodes(loop))
    return not stops and not is_dynamic_range(module, loop.iter)


def _is_duplicate(first: _Named, second: _Named) -> bool:
    """Whether two calls give one name in the same run; a branch that returns rules what follows it out."""
    if first.value.value != second.value.value or first.is_tensor != second.is_tensor:
        return False
    shared = first.branches.keys() & second.branches.keys()
    exclusive = any(first.branches[item] != second.branches[item] for item in shared)
    alone = first.branches.keys() - shared
    return not exclusive and not any(isinstance(item, ast.Return) for branch in alone for item in ast.walk(branch))


@NAMES.on("Attribute", "Name")
def later_name(node: ast.Attribute | ast.Name, place: Place) -> Iterator[Hit]:
    """Names that 0.7 brought."""
    dotted = place.module.dotted(node)
    if dotted in LATER:
        yield Hit(LATER_NAME, node, dotted.replace("nki.language.", "nl.").replace("nki.isa.", "nisa."))
