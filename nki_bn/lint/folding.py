# SPDX-License-Identifier: Apache-2.0
"""Numbers that stand in the text: literals, constants of the module, arithmetic on both."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Set
from typing import Any

from nki_bn.lint.module import Module

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}
_LARGEST_POWER = 1024  # 2 to this is beyond any number of a kernel, and still quickly computed
_DEPTH = 8


def constant_value(node: ast.expr, module: Module, hidden: Set[str], depth: int = _DEPTH) -> int | float | None:
    """The number an expression stands for; None when it is no constant. Names in ``hidden`` are local."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, int | float) and not isinstance(node.value, bool) else None
    if depth == 0:
        return None
    if isinstance(node, ast.Name):
        value = module.constants.get(node.id) if node.id not in hidden else None
        return constant_value(value, module, frozenset(), depth - 1) if value is not None else None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        operand = constant_value(node.operand, module, hidden, depth - 1)
        return None if operand is None else -operand
    return _operation(node, module, hidden, depth - 1) if isinstance(node, ast.BinOp) else None


def _operation(node: ast.BinOp, module: Module, hidden: Set[str], depth: int) -> int | float | None:
    left, right = (constant_value(part, module, hidden, depth) for part in (node.left, node.right))
    function = _OPERATORS.get(type(node.op))
    if left is None or right is None or function is None:
        return None
    if isinstance(node.op, ast.Pow | ast.LShift) and abs(right) > _LARGEST_POWER:
        return None
    try:
        value = function(left, right)
    except (ArithmeticError, TypeError, ValueError):  # left to Python
        return None
    return value if isinstance(value, int | float) else None
