# SPDX-License-Identifier: Apache-2.0
"""The parts of an expression or statement that Python computes with."""

from __future__ import annotations

import ast

from nki_bn.lint.values import is_none


def truth_operands(node: ast.AST) -> list[ast.expr]:
    """The expressions whose truth a node asks for. A while loop is left to its callers."""
    if isinstance(node, ast.If | ast.IfExp | ast.Assert):
        return [node.test]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return [node.operand]
    return node.values if isinstance(node, ast.BoolOp) else []


def arithmetic_operands(node: ast.AST) -> list[ast.expr]:
    """The operands of an operator or of a comparison by value; comparisons with None and ``in`` are none."""
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.AugAssign):
        return [node.target, node.value]
    if isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.Not):
        return [node.operand]
    if isinstance(node, ast.Compare):
        operands = [node.left, *node.comparators]
        by_value = not any(isinstance(op, ast.Is | ast.IsNot | ast.In | ast.NotIn) for op in node.ops)
        return operands if by_value and not any(map(is_none, operands)) else []
    return []
