# SPDX-License-Identifier: Apache-2.0
"""Rules on loops that run on the device and on the registers that control them (part of table 9.1)."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from nki_bn.lint.module import LOOPS
from nki_bn.lint.operands import arithmetic_operands, truth_operands
from nki_bn.lint.rule import ERROR, WARNING, Hit, Table
from nki_bn.lint.tree import FunctionNode, own_nodes
from nki_bn.lint.values import Kind, is_dynamic_range, is_none
from nki_bn.lint.walk import Place

DYNAMIC_LOOPS = Table("Dynamic loops")
JUMP = DYNAMIC_LOOPS.rule(
    "NKI140",
    "jump out of a dynamic loop",
    "the loop runs on the device, where nothing can leave its body early",
    ERROR,
    ERROR,
)
RANGE_ALIAS = DYNAMIC_LOOPS.rule(
    "NKI141", "nl.*_range", "a deprecated alias of range without any further meaning; write range", WARNING, WARNING
)
DYNAMIC_RANGE = DYNAMIC_LOOPS.rule(
    "NKI142", "nl.dynamic_range", "deprecated in 0.6 and removed in 0.7; use nl.fori_loop", WARNING, ERROR
)
WHILE_REGISTER = DYNAMIC_LOOPS.rule(
    "NKI143", "while on a register", "deprecated in 0.6 and removed in 0.7; use nl.while_loop", WARNING, ERROR
)
REGISTER_VALUE = DYNAMIC_LOOPS.rule(
    "NKI144",
    "register in a Python expression",
    "its value exists on the device only; use it as scalar_offset, loop bound or operand of nisa.register_*",
    ERROR,
    ERROR,
)
LOOP_RESULT = DYNAMIC_LOOPS.rule(
    "NKI145",
    "result of a loop body",
    "the body of nl.fori_loop returns nothing, that of nl.while_loop the next condition register",
    ERROR,
    ERROR,
)
LOOP_VARIABLE = DYNAMIC_LOOPS.rule(
    "NKI146",
    "assignment to a dynamic loop variable",
    "the loop counts by itself, a write has no effect on it",
    ERROR,
    ERROR,
)
LOOP_ORDER = DYNAMIC_LOOPS.rule(
    "NKI147",
    "dynamic loop inside nl.no_reorder()",
    "only static loops may stand there; put no_reorder into the body",
    ERROR,
    ERROR,
)

_ALIASES = {f"nki.language.{name}" for name in ("affine_range", "sequential_range", "static_range")}
_CONVERSIONS = frozenset({"int", "float", "bool", "range", "abs", "min", "max", "divmod"})


@DYNAMIC_LOOPS.on("Break", "Continue", "Return")
def jump(node: ast.stmt, place: Place) -> Iterator[Hit]:
    """break, continue and return belong to static loops."""
    leaves = any(place.loops) if isinstance(node, ast.Return) else place.loops[-1:] == (True,)
    if leaves:
        yield Hit(JUMP, node, f"{type(node).__name__.lower()} in a dynamic loop")


@DYNAMIC_LOOPS.on("Attribute", "Name")
def range_name(node: ast.Attribute | ast.Name, place: Place) -> Iterator[Hit]:
    """The range functions of nki.language."""
    dotted = place.module.dotted(node)
    if dotted in _ALIASES:
        yield Hit(RANGE_ALIAS, node, dotted.replace("nki.language", "nl"))
    elif dotted == "nki.language.dynamic_range":
        yield Hit(DYNAMIC_RANGE, node)


@DYNAMIC_LOOPS.on("While")
def while_register(node: ast.While, place: Place) -> Iterator[Hit]:
    """A while loop whose condition is a register."""
    if place.values.kind(node.test) is Kind.REGISTER:
        yield Hit(WHILE_REGISTER, node.test, f"while {ast.unparse(node.test)}")


@DYNAMIC_LOOPS.on("If", "IfExp", "Assert", "UnaryOp", "BoolOp", "BinOp", "AugAssign", "Compare", "Call")
def register_value(node: ast.AST, place: Place) -> Iterator[Hit]:
    """Registers where Python would need their value."""
    operands = [*truth_operands(node), *arithmetic_operands(node)]
    if isinstance(node, ast.Call) and place.builtin(node.func) in _CONVERSIONS:
        operands = node.args
    for operand in operands:
        if place.values.kind(operand) is Kind.REGISTER:
            yield Hit(REGISTER_VALUE, operand, f"register {ast.unparse(operand)} in a Python expression")


@DYNAMIC_LOOPS.on("FunctionDef")
def loop_result(node: FunctionNode, place: Place) -> Iterator[Hit]:
    """What loop bodies return."""
    loop = place.module.loop_bodies.get(node)
    returns = [item for item in own_nodes(node) if isinstance(item, ast.Return)]
    values = [item for item in returns if item.value and not is_none(item.value)]
    if loop == "nki.language.fori_loop" and values:
        yield Hit(LOOP_RESULT, values[0], f"{node.name} returns a value")
    elif loop == "nki.language.while_loop" and not values:
        yield Hit(LOOP_RESULT, node, f"{node.name} returns no register")


@DYNAMIC_LOOPS.on("FunctionDef")
def fori_variable(node: FunctionNode, place: Place) -> Iterator[Hit]:
    """The parameter of a fori_loop body is not assigned."""
    if place.module.loop_bodies.get(node) == "nki.language.fori_loop" and node.args.args:
        yield from _stores(node, node.args.args[0].arg)


@DYNAMIC_LOOPS.on("For")
def dynamic_range_variable(node: ast.For, place: Place) -> Iterator[Hit]:
    """The variable of a dynamic_range loop is not assigned in its body."""
    if is_dynamic_range(place.module, node.iter) and isinstance(node.target, ast.Name):
        for statement in node.body:
            yield from _stores(statement, node.target.id)


def _stores(outer: ast.AST, name: str) -> Iterator[Hit]:
    for node in [outer, *own_nodes(outer)]:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name:
            yield Hit(LOOP_VARIABLE, node, f"assignment to the dynamic loop variable {name}")


@DYNAMIC_LOOPS.on("Call")
def loop_order(node: ast.Call, place: Place) -> Iterator[Hit]:
    """Dynamic loops stay outside of nl.no_reorder()."""
    dotted = place.module.dotted(node.func)
    if place.in_no_reorder and (dotted in LOOPS or dotted == "nki.language.dynamic_range"):
        yield Hit(LOOP_ORDER, node)
