# SPDX-License-Identifier: Apache-2.0
"""Rules on classes that kernel code uses (table 9.4)."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from nki_bn.lint.rule import ERROR, Hit, Table
from nki_bn.lint.tree import ACCESSORS, KERNEL_BASES, FunctionNode, last_name
from nki_bn.lint.walk import Place

CLASSES = Table("Classes")
BASE = CLASSES.rule(
    "NKI401",
    "base class",
    "the parser knows NKIObject, Enum and NamedTuple, one of them and no chains of classes",
    ERROR,
)
NO_BASE = CLASSES.rule("NKI402", "class without a base", "classes of kernels have to inherit NKIObject", ERROR)
CLASS_KEYWORD = CLASSES.rule("NKI403", "class keyword", "the parser has no metaclasses", ERROR)
TYPE_PARAMETER = CLASSES.rule("NKI404", "type parameter", "the parser has no generic classes and functions", ERROR)
ACCESSOR = CLASSES.rule(
    "NKI405", "property or class method", "not documented for the parser; write a method or a staticmethod", ERROR
)
SLOTS = CLASSES.rule("NKI406", "slots", "not documented for the parser, which keeps fields in __dict__", ERROR)
BODY = CLASSES.rule(
    "NKI407", "statement in a class body", "the parser takes a docstring, assignments, methods and pass", ERROR
)
CLASS_DECORATOR = CLASSES.rule("NKI408", "class decorator", "the parser knows dataclass only", ERROR)

_IN_BODY = (ast.Assign, ast.AnnAssign, ast.Pass, ast.FunctionDef)


@CLASSES.on("ClassDef")
def bases(node: ast.ClassDef, place: Place) -> Iterator[Hit]:
    """One base that both front ends know."""
    for position, base in enumerate(node.bases):
        if position or last_name(base) not in KERNEL_BASES:
            yield Hit(BASE, base, f"base class {ast.unparse(base)} of {node.name}")
    for keyword in node.keywords:
        yield Hit(CLASS_KEYWORD, keyword.value, f"class keyword {keyword.arg}")
    if not node.bases and not node.keywords:
        yield Hit(NO_BASE, node, f"class {node.name} without a base")


@CLASSES.on("ClassDef", "FunctionDef")
def type_parameters(node: ast.ClassDef | FunctionNode, place: Place) -> Iterator[Hit]:
    """`class A[T]` and `def f[T]`, from Python 3.12 on."""
    if getattr(node, "type_params", None):
        yield Hit(TYPE_PARAMETER, node, f"type parameter of {node.name}")


@CLASSES.on("ClassDef")
def accessors(node: ast.ClassDef, place: Place) -> Iterator[Hit]:
    """Properties and class methods."""
    for method in node.body:
        for decorator in method.decorator_list if isinstance(method, FunctionNode) else ():
            if last_name(decorator) in ACCESSORS:
                yield Hit(ACCESSOR, decorator, f"@{ast.unparse(decorator)}")


@CLASSES.on("ClassDef")
def body(node: ast.ClassDef, place: Place) -> Iterator[Hit]:
    """What stands in the class besides methods and fields."""
    for statement in node.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", statement)]
        if any(last_name(target) == "__slots__" for target in targets):
            yield Hit(SLOTS, statement, f"__slots__ of {node.name}")
        elif not isinstance(statement, _IN_BODY) and not _is_text(statement):
            yield Hit(BODY, statement, f"{type(statement).__name__} in the body of class {node.name}")


def _is_text(statement: ast.stmt) -> bool:
    """A docstring or an ellipsis."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


@CLASSES.on("ClassDef")
def decorators(node: ast.ClassDef, place: Place) -> Iterator[Hit]:
    """dataclass, without slots."""
    for decorator in node.decorator_list:
        call = decorator if isinstance(decorator, ast.Call) else None
        if last_name(call.func if call else decorator) != "dataclass":
            yield Hit(CLASS_DECORATOR, decorator, f"class decorator @{ast.unparse(decorator)}")
        for keyword in call.keywords if call else ():
            if keyword.arg == "slots" and getattr(keyword.value, "value", True):
                yield Hit(SLOTS, keyword.value, f"slots of {node.name}")
