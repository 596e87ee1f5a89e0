# SPDX-License-Identifier: Apache-2.0
"""The walk over a unit of kernel code, with what surrounds each node."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from dataclasses import dataclass, replace

from nki_bn.lint.module import Definition, Module
from nki_bn.lint.reach import Unit
from nki_bn.lint.tree import FunctionNode
from nki_bn.lint.values import Kind, Values, is_dynamic_range


@dataclass(frozen=True)
class Place:
    """Where a node stands. ``loops``: for each loop of the innermost function, whether it runs on the device."""

    unit: Unit
    parent: ast.AST
    values: Values
    loops: tuple[bool, ...] = ()
    in_no_reorder: bool = False

    @property
    def module(self) -> Module:
        """The module whose names the code uses."""
        return self.unit.module

    def resolve(self, node: ast.AST) -> Definition | None:
        """The function or class a node stands for, unless a local name hides it."""
        hidden = isinstance(node, ast.Name) and node.id in self.unit.names
        return None if hidden else self.module.resolve(node)

    def builtin(self, node: ast.AST) -> str | None:
        """The builtin a name stands for, None when it stands for anything else."""
        if not isinstance(node, ast.Name) or node.id in self.unit.names or node.id in self.module.names:
            return None
        return node.id if hasattr(builtins, node.id) else None

    def inside(self, node: ast.AST) -> Place:
        """The place of the children of a node."""
        if isinstance(node, FunctionNode):
            return replace(self, parent=node, values=Values(node, self.module, self.values), loops=())
        if isinstance(node, ast.For):
            return replace(self, parent=node, loops=(*self.loops, is_dynamic_range(self.module, node.iter)))
        if isinstance(node, ast.While):
            return replace(self, parent=node, loops=(*self.loops, self.values.kind(node.test) is Kind.REGISTER))
        if isinstance(node, ast.With) and any(is_no_reorder(self.module, item) for item in node.items):
            return replace(self, parent=node, in_no_reorder=True)
        return replace(self, parent=node)


def is_no_reorder(module: Module, item: ast.withitem) -> bool:
    """Whether a context manager is ``nl.no_reorder()``."""
    call = item.context_expr
    return isinstance(call, ast.Call) and module.dotted(call.func) == "nki.language.no_reorder"


def walk(unit: Unit) -> Iterator[tuple[ast.AST, Place]]:
    """The nodes of a unit with their places; of a class only its own node, as its methods are units themselves."""
    node = unit.node
    place = Place(unit, unit.module.parents[node], Values(node, unit.module))
    yield node, place
    if isinstance(node, ast.ClassDef):
        return
    for statement in node.body:
        yield from _walk(statement, replace(place, parent=node))


def _walk(node: ast.AST, place: Place) -> Iterator[tuple[ast.AST, Place]]:
    yield node, place
    inner = place.inside(node)
    for child in _code(node):
        yield from _walk(child, inner)


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """The children of a node that run: no annotations, no decorators, no class bodies."""
    if isinstance(node, ast.ClassDef | ast.arg):
        return
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list", "type_params"):
            children = value if isinstance(value, list) else [value]
            yield from (child for child in children if isinstance(child, ast.AST))
