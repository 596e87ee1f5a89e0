# SPDX-License-Identifier: Apache-2.0
"""Names of a module, or of a function around a kernel, whose objects change after their definition."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from nki_bn.lint.tree import FunctionNode, bound_names

_MUTABLE_CALLS = frozenset({"list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict"})
_MUTABLE_LITERALS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
_MUTATORS = frozenset(
    "append extend insert remove pop clear sort reverse update setdefault popitem add discard appendleft".split()
)


def changing_names(outer: ast.Module | FunctionNode) -> frozenset[str]:
    """The names of containers that something in ``outer`` changes, and those rebound by ``global`` or ``nonlocal``."""
    rebinding = ast.Global if isinstance(outer, ast.Module) else ast.Nonlocal
    containers = {name for statement in outer.body for name in _containers(statement)}
    rebound = {name for node in ast.walk(outer) if isinstance(node, rebinding) for name in node.names}
    changed = {name for statement in outer.body for name in _changed(statement, frozenset())}
    return frozenset(containers & changed | rebound)


def _containers(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value and _is_mutable(statement.value):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def _is_mutable(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return getattr(value.func, "id", getattr(value.func, "attr", None)) in _MUTABLE_CALLS
    return isinstance(value, _MUTABLE_LITERALS)


def _changed(node: ast.AST, local: frozenset[str]) -> Iterator[str]:
    """Names whose objects are changed in place below a node, where they are not ``local``."""
    if isinstance(node, FunctionNode):
        local = local | bound_names(node)
    target = _mutated(node)
    if isinstance(target, ast.Name) and target.id not in local:
        yield target.id
    for child in ast.iter_child_nodes(node):
        yield from _changed(child, local)


def _mutated(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _MUTATORS:
        return node.func.value
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        return node.value
    return node.target if isinstance(node, ast.AugAssign) else None
