# SPDX-License-Identifier: Apache-2.0
"""Rules on statements (most of table 9.1)."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from nki_bn.lint.rule import ERROR, WARNING, Hit, Table
from nki_bn.lint.tree import parameters
from nki_bn.lint.values import Kind
from nki_bn.lint.walk import Place, is_no_reorder

STATEMENTS = Table("Statements")
INNER_CLASS = STATEMENTS.rule(
    "NKI120",
    "class inside a function",
    "the parser evaluates no class statement; define the class in the module",
    ERROR,
)
INNER_IMPORT = STATEMENTS.rule(
    "NKI121", "import inside a function", "the parser evaluates no import; import at the top of the module", ERROR
)
RAISE = STATEMENTS.rule("NKI122", "raise", "the parser has no exceptions; use assert with a message", ERROR)
TRY = STATEMENTS.rule("NKI123", "try", "the parser has no exceptions; test the condition beforehand", ERROR)
WITH = STATEMENTS.rule("NKI124", "with", "the parser knows `with nl.no_reorder():` only, alone and without `as`", ERROR)
DEL = STATEMENTS.rule("NKI125", "del", "the parser has no del; tiles are released by the compiler", ERROR)
GLOBAL = STATEMENTS.rule("NKI126", "global or nonlocal", "the parser gives a function only its own names", ERROR)
MATCH = STATEMENTS.rule("NKI127", "match", "the parser has no pattern matching; use if and elif", ERROR)
ASYNC = STATEMENTS.rule(
    "NKI128", "async or await", "the parser has no coroutines; the compiler orders instructions", ERROR
)
YIELD = STATEMENTS.rule("NKI129", "yield", "the parser has no generators; return a tuple or append to a list", ERROR)
TYPE_ALIAS = STATEMENTS.rule("NKI130", "type alias", "the parser has no type statement; define it in the module", ERROR)
LOOP_TARGET = STATEMENTS.rule(
    "NKI131", "loop target", "the parser takes a plain name as loop variable; unpack it in the body", ERROR
)
LOOP_ELSE = STATEMENTS.rule("NKI132", "else of a loop", "the parser has no for-else and while-else; set a flag", ERROR)
ITEM_ASSIGNMENT = STATEMENTS.rule(
    "NKI133",
    "assignment to elements of a tensor",
    "tensors change through instructions only; use nisa.tensor_copy, nisa.memset, nisa.dma_copy or nl.store",
    ERROR,
    ERROR,
)
MUTATING_TARGETS = STATEMENTS.rule(
    "NKI134",
    "several mutating targets",
    "the parser takes one attribute or element as target per statement; write one assignment each",
    ERROR,
)

LOOP_ITERABLE = STATEMENTS.rule(
    "NKI135",
    "loop over a string or a tensor",
    "documented are ranges, lists, tuples and the keys of dicts; write an index loop",
    WARNING,
)

STATEMENTS.refuse(INNER_IMPORT, "Import", "ImportFrom")
STATEMENTS.refuse(RAISE, "Raise")
STATEMENTS.refuse(TRY, "Try", "TryStar")
STATEMENTS.refuse(DEL, "Delete")
STATEMENTS.refuse(GLOBAL, "Global", "Nonlocal")
STATEMENTS.refuse(MATCH, "Match")
STATEMENTS.refuse(ASYNC, "AsyncFunctionDef", "AsyncFor", "AsyncWith", "Await")
STATEMENTS.refuse(YIELD, "Yield", "YieldFrom")
STATEMENTS.refuse(TYPE_ALIAS, "TypeAlias")


@STATEMENTS.on("ClassDef")
def inner_class(node: ast.ClassDef, place: Place) -> Iterator[Hit]:
    """Classes are defined in the module."""
    if node is not place.unit.node:
        yield Hit(INNER_CLASS, node, f"class {node.name} inside a function")


@STATEMENTS.on("With")
def with_statement(node: ast.With, place: Place) -> Iterator[Hit]:
    """The only context manager of kernels is nl.no_reorder()."""
    for item in node.items:
        call = item.context_expr
        plain = is_no_reorder(place.module, item) and isinstance(call, ast.Call) and not (call.args or call.keywords)
        if not plain or item.optional_vars or len(node.items) > 1:
            yield Hit(WITH, item.context_expr, f"with {ast.unparse(item)}")


@STATEMENTS.on("For", "AsyncFor")
def loop_target(node: ast.For, place: Place) -> Iterator[Hit]:
    """Loop variables are plain names."""
    if not isinstance(node.target, ast.Name):
        yield Hit(LOOP_TARGET, node.target, f"loop target `{ast.unparse(node.target)}`")


@STATEMENTS.on("For", "AsyncFor")
def loop_iterable(node: ast.For, place: Place) -> Iterator[Hit]:
    """What loops run over."""
    kind = place.values.kind(node.iter)
    if kind in (Kind.STRING, Kind.TENSOR):
        yield Hit(LOOP_ITERABLE, node.iter, f"loop over the {kind.name.lower()} {ast.unparse(node.iter)}")


@STATEMENTS.on("For", "AsyncFor", "While")
def loop_else(node: ast.For | ast.While, place: Place) -> Iterator[Hit]:
    """Loops have no else."""
    if node.orelse:
        yield Hit(LOOP_ELSE, node.orelse[0])


@STATEMENTS.on("Subscript")
def item_assignment(node: ast.Subscript, place: Place) -> Iterator[Hit]:
    """Elements of lists and dicts are assigned, those of tensors are not."""
    if isinstance(node.ctx, ast.Store) and _is_tensor(node, place):
        yield Hit(ITEM_ASSIGNMENT, node, f"assignment to `{ast.unparse(node)}`")


@STATEMENTS.on("Assign")
def mutating_targets(node: ast.Assign, place: Place) -> Iterator[Hit]:
    """A statement changes at most one object."""
    stored = [item for target in node.targets for item in ast.walk(target) if _mutates(item)]
    if len(stored) > 1:
        yield Hit(MUTATING_TARGETS, stored[1])


def _mutates(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store)


def _is_tensor(target: ast.Subscript, place: Place) -> bool:
    """A known tensor, a key that only tensors take, or an argument of a launch (of which only tensors are mutable)."""
    if place.values.kind(target.value) is Kind.TENSOR:
        return True
    keys = target.slice.elts if isinstance(target.slice, ast.Tuple) else [target.slice]
    if isinstance(target.slice, ast.Tuple) and any(isinstance(key, ast.Slice) for key in keys):
        return True
    if any(isinstance(key, ast.Constant) and key.value is ... for key in keys):
        return True
    return _is_launch_argument(target.value, place) and place.values.kind(target.slice) is not Kind.STRING


def _is_launch_argument(node: ast.expr, place: Place) -> bool:
    function = place.unit.node
    if not place.unit.entry or isinstance(function, ast.ClassDef) or not isinstance(node, ast.Name):
        return False
    names = [item for item in ast.walk(function) if isinstance(item, ast.Name) and item.id == node.id]
    assigned = any(isinstance(item.ctx, ast.Store) for item in names)
    return not assigned and node.id in {arg.arg for arg in parameters(function) if arg.annotation is None}
