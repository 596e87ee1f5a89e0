# SPDX-License-Identifier: Apache-2.0
"""Questions to syntax trees that need no knowledge of the module."""

from __future__ import annotations

import ast
from collections.abc import Iterator

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
DefinitionNode = FunctionNode | ast.ClassDef
ACCESSORS = frozenset({"property", "classmethod", "cached_property", "setter", "getter", "deleter"})
KERNEL_BASES = frozenset({"NKIObject", "Enum", "NamedTuple"})


def own_nodes(outer: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function or module, without those inside its functions and classes (the definitions count)."""
    for child in ast.iter_child_nodes(outer):
        yield child
        if not isinstance(child, DefinitionNode | ast.Lambda):
            yield from own_nodes(child)


def parameters(function: FunctionNode) -> list[ast.arg]:
    """All parameters of a function, in order of definition."""
    args = function.args
    starred = [arg for arg in (args.vararg, args.kwarg) if arg]
    return [*args.posonlyargs, *args.args, *args.kwonlyargs, *starred]


def defaults(function: FunctionNode) -> Iterator[tuple[str, ast.expr]]:
    """The parameters that have a default value, with it."""
    positional = [*function.args.posonlyargs, *function.args.args]
    yield from zip((arg.arg for arg in reversed(positional)), reversed(function.args.defaults), strict=False)
    for arg, value in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
        if value is not None:
            yield arg.arg, value


def bound_names(outer: DefinitionNode) -> set[str]:
    """The local names of a function or class and of the functions inside it."""
    nodes = [node for node in ast.walk(outer) if node is not outer]
    declared = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
    return {name for node in nodes if (name := bound_name(node))} - declared


def argument(call: ast.Call, position: int, keyword: str) -> ast.expr | None:
    """The argument of a call given by position or by keyword."""
    for given in call.keywords:
        if given.arg == keyword:
            return given.value
    return call.args[position] if position < len(call.args) else None


def base_names(node: ast.ClassDef) -> list[str]:
    """The last component of every base of a class: ``NKIObject`` for ``nl.NKIObject``; '' for other expressions."""
    return [last_name(base) for base in node.bases]


def last_name(node: ast.AST) -> str:
    """``c`` of ``a.b.c``, the name of a plain name, '' of anything else."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def is_kernel_class(node: ast.AST) -> bool:
    """Whether a node defines a class that both front ends know."""
    return isinstance(node, ast.ClassDef) and not KERNEL_BASES.isdisjoint(base_names(node))


def bound_name(node: ast.AST) -> str | None:
    """The name that a single node binds, if any. Imports are left to the module."""
    if isinstance(node, ast.Name):
        return node.id if isinstance(node.ctx, ast.Store) else None
    if isinstance(node, ast.arg):
        return node.arg
    return node.name if isinstance(node, DefinitionNode) else None


def assigned_values(function: FunctionNode, name: str) -> list[ast.expr]:
    """Every value that a local name is assigned; none when it is bound in another way too."""
    bound = [node for node in ast.walk(function) if node is not function and bound_name(node) == name]
    values = [
        node.value
        for node in own_nodes(function)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id == name
    ]
    return values if len(values) == len(bound) else []
