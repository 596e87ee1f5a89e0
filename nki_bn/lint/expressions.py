# SPDX-License-Identifier: Apache-2.0
"""Rules on expressions (table 9.2)."""

from __future__ import annotations

import ast
import struct
from collections.abc import Iterator

from nki_bn.lint.folding import constant_value
from nki_bn.lint.operands import arithmetic_operands, truth_operands
from nki_bn.lint.rule import ERROR, WARNING, Hit, Table
from nki_bn.lint.tree import last_name
from nki_bn.lint.values import Kind, is_none
from nki_bn.lint.walk import Place

EXPRESSIONS = Table("Expressions")
SET = EXPRESSIONS.rule("NKI201", "set literal", "the parser has no sets; use a tuple or a dict with string keys", ERROR)
COMPREHENSION = EXPRESSIONS.rule("NKI202", "comprehension", "the parser has none; append to a list in a loop", ERROR)
LAMBDA = EXPRESSIONS.rule(
    "NKI203", "lambda", "the parser evaluates named functions only; define one in the module", ERROR
)
WALRUS = EXPRESSIONS.rule("NKI204", ":=", "the parser assigns in statements only; write an assignment before", ERROR)
FORMAT_SPEC = EXPRESSIONS.rule(
    "NKI205", "format specification", "the parser formats values without one; only !r, !s and !a may follow", ERROR
)
IS_NONE = EXPRESSIONS.rule(
    "NKI206",
    "is None",
    "forbidden by the guide though the parser reads it as ==; write == None or != None",
    WARNING,
)
IDENTITY = EXPRESSIONS.rule("NKI207", "is", "objects have no identity in the parser; compare with ==", ERROR)
CHAINED_IN = EXPRESSIONS.rule(
    "NKI208", "in inside a chain", "the parser takes `in` as a single comparison only; join two with `and`", ERROR
)
STARRED = EXPRESSIONS.rule("NKI209", "starred expression", "the parser unpacks nothing; name every element", ERROR)
DICT_KEY = EXPRESSIONS.rule("NKI210", "dict key", "dicts have string keys only in the parser", ERROR)
MATRIX = EXPRESSIONS.rule("NKI211", "operator @", "tensors do not have it; use nisa.nc_matmul", ERROR, WARNING)
TENSOR_OPERATOR = EXPRESSIONS.rule(
    "NKI212",
    "operator on a tensor",
    "Python has no values to compute with; use nki.language or nki.isa",
    ERROR,
    WARNING,
)
TENSOR_TRUTH = EXPRESSIONS.rule(
    "NKI213",
    "truth of a tensor",
    "its values are unknown while compiling; compare with None or branch on the host",
    ERROR,
    WARNING,
)
MODULO = EXPRESSIONS.rule(
    "NKI214", "% on a float or a string", "the parser computes remainders of integers only", ERROR
)
BOOL_OPERAND = EXPRESSIONS.rule(
    "NKI215", "and/or as a choice", "short-circuit values other than bools are not documented; use if and else", WARNING
)
WIDE_NUMBER = EXPRESSIONS.rule(
    "NKI216", "number beyond 32 bits", "the parser computes with 32-bit integers and floats", ERROR
)
LITERAL = EXPRESSIONS.rule(
    "NKI217", "bytes, complex or ellipsis", "the parser has literals for None, bool, int, float and str only", ERROR
)
MEMBER_OPERATOR = EXPRESSIONS.rule(
    "NKI218", "operator on an Enum member", "members are compared with == and != only; use their value", ERROR, ERROR
)
VERSION_ORDER = EXPRESSIONS.rule(
    "NKI219", "order of nc_version", "documented for == and != only, though public kernels use it", WARNING
)
OBJECT_EQUALITY = EXPRESSIONS.rule(
    "NKI220",
    "== on an object without __eq__",
    "it compares fields in 0.6 and identity in 0.7; make the class a dataclass or compare fields",
    WARNING,
    WARNING,
)
CHAIN = EXPRESSIONS.rule(
    "NKI222",
    "chained comparison",
    "the parser does not stop at the first part that is false; join the comparisons with `and`",
    WARNING,
)

EXPRESSIONS.refuse(SET, "Set")
EXPRESSIONS.refuse(LAMBDA, "Lambda")
EXPRESSIONS.refuse(WALRUS, "NamedExpr")

_COMPREHENSIONS = {"ListComp": "list", "SetComp": "set", "DictComp": "dict", "GeneratorExp": "generator"}


@EXPRESSIONS.on(*_COMPREHENSIONS)
def comprehension(node: ast.expr, place: Place) -> Iterator[Hit]:
    """Comprehensions and generator expressions."""
    kind = _COMPREHENSIONS[type(node).__name__]
    yield Hit(COMPREHENSION, node, f"{kind} {'expression' if kind == 'generator' else 'comprehension'}")


@EXPRESSIONS.on("FormattedValue")
def format_spec(node: ast.FormattedValue, place: Place) -> Iterator[Hit]:
    """Format specifications in f-strings."""
    if node.format_spec:
        # In Python 3.11 a formatted value has the position of its whole string; its expression has its own.
        yield Hit(FORMAT_SPEC, node.value, f"format specification of `{ast.unparse(node.value)}`")


@EXPRESSIONS.on("Compare")
def identity(node: ast.Compare, place: Place) -> Iterator[Hit]:
    """Comparisons by identity."""
    left = node.left
    for operator, right in zip(node.ops, node.comparators, strict=True):
        if isinstance(operator, ast.Is | ast.IsNot):
            word = "is" if isinstance(operator, ast.Is) else "is not"
            if is_none(left) or is_none(right):
                yield Hit(IS_NONE, node, f"{word} None")
            else:
                yield Hit(IDENTITY, node, word)
        left = right


@EXPRESSIONS.on("Compare")
def chained_in(node: ast.Compare, place: Place) -> Iterator[Hit]:
    """Membership tests inside a chained comparison."""
    if len(node.ops) > 1 and any(isinstance(operator, ast.In | ast.NotIn) for operator in node.ops):
        yield Hit(CHAINED_IN, node)


@EXPRESSIONS.on("Compare")
def chain(node: ast.Compare, place: Place) -> Iterator[Hit]:
    """Chained comparisons with a later part that may fail where an earlier one is false."""
    parts = (item for operand in node.comparators[1:] for item in ast.walk(operand))
    if len(node.ops) > 1 and any(_may_fail(item) for item in parts):
        yield Hit(CHAIN, node)


def _may_fail(node: ast.AST) -> bool:
    divides = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.FloorDiv | ast.Mod)
    return divides or (isinstance(node, ast.Subscript) and last_name(node.value) != "shape")


@EXPRESSIONS.on("Starred", "Call", "Dict")
def starred(node: ast.AST, place: Place) -> Iterator[Hit]:
    """`*x` anywhere, `**x` in calls and dict literals."""
    if isinstance(node, ast.Starred):
        yield Hit(STARRED, node, f"`*{ast.unparse(node.value)}`")
    elif isinstance(node, ast.Call):
        for keyword in node.keywords:
            if keyword.arg is None:
                yield Hit(STARRED, keyword.value, f"`**{ast.unparse(keyword.value)}`")
    elif isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                yield Hit(STARRED, value, f"`**{ast.unparse(value)}`")


@EXPRESSIONS.on("Dict", "Subscript")
def dict_key(node: ast.Dict | ast.Subscript, place: Place) -> Iterator[Hit]:
    """Keys that are certainly no strings."""
    keys = node.keys if isinstance(node, ast.Dict) else [node.slice] if _of_dict(node, place) else []
    for key in keys:
        if key is not None and _is_other_key(key, place):
            yield Hit(DICT_KEY, key, f"dict key {ast.unparse(key)}")


def _of_dict(node: ast.Subscript, place: Place) -> bool:
    return place.values.kind(node.value) is Kind.DICT


def _is_other_key(key: ast.expr, place: Place) -> bool:
    if isinstance(key, ast.Constant):
        return not isinstance(key.value, str)
    return isinstance(key, ast.Tuple) or place.values.kind(key) not in (None, Kind.STRING)


@EXPRESSIONS.on("BinOp", "AugAssign")
def matrix(node: ast.BinOp | ast.AugAssign, place: Place) -> Iterator[Hit]:
    """The matrix operator."""
    if isinstance(node.op, ast.MatMult):
        yield Hit(MATRIX, node)


@EXPRESSIONS.on("BinOp", "AugAssign")
def modulo(node: ast.BinOp | ast.AugAssign, place: Place) -> Iterator[Hit]:
    """Remainders of floats and printf-like formatting."""
    if isinstance(node.op, ast.Mod):
        kinds = {place.values.kind(operand) for operand in arithmetic_operands(node)}
        if kinds & {Kind.FLOAT, Kind.STRING}:
            yield Hit(MODULO, node)


@EXPRESSIONS.on("BinOp", "AugAssign", "UnaryOp", "Compare")
def operator(node: ast.expr | ast.AugAssign, place: Place) -> Iterator[Hit]:
    """Operators on tensors and on Enum members."""
    kinds = {place.values.kind(operand) for operand in arithmetic_operands(node)}
    if Kind.TENSOR in kinds and not isinstance(getattr(node, "op", None), ast.MatMult):
        yield Hit(TENSOR_OPERATOR, node)
    if isinstance(node, ast.Compare) and all(isinstance(op, ast.Eq | ast.NotEq) for op in node.ops):
        if Kind.OBJECT in kinds:
            yield Hit(OBJECT_EQUALITY, node)
    elif Kind.MEMBER in kinds:
        yield Hit(MEMBER_OPERATOR, node)
    elif Kind.NC_VERSION in kinds:
        yield Hit(VERSION_ORDER, node)


@EXPRESSIONS.on("If", "IfExp", "While", "Assert", "UnaryOp", "BoolOp", "Call")
def tensor_truth(node: ast.AST, place: Place) -> Iterator[Hit]:
    """Tensors as conditions."""
    operands = [node.test] if isinstance(node, ast.While) else truth_operands(node)
    if isinstance(node, ast.Call) and place.builtin(node.func) == "bool":
        operands = node.args
    for operand in operands:
        if place.values.kind(operand) is Kind.TENSOR:
            yield Hit(TENSOR_TRUTH, operand, f"truth of the tensor {ast.unparse(operand)}")


@EXPRESSIONS.on("BoolOp")
def bool_operand(node: ast.BoolOp, place: Place) -> Iterator[Hit]:
    """`x or 2`: a choice by truth."""
    for value in node.values:
        if _is_no_bool(value):
            word = "and" if isinstance(node.op, ast.And) else "or"
            yield Hit(BOOL_OPERAND, value, f"{ast.unparse(value)} as an operand of `{word}`")


def _is_no_bool(value: ast.expr) -> bool:
    if isinstance(value, ast.Constant):
        return not isinstance(value.value, bool)
    return isinstance(value, ast.List | ast.Tuple | ast.Dict | ast.JoinedStr)


@EXPRESSIONS.on("Constant")
def literal(node: ast.Constant, place: Place) -> Iterator[Hit]:
    """Literals that the parser does not have."""
    if isinstance(node.value, bytes | complex) or (node.value is ... and not _is_index(node, place)):
        yield Hit(LITERAL, node, f"literal {ast.unparse(node)}")


def _is_index(node: ast.Constant, place: Place) -> bool:
    if isinstance(place.parent, ast.Tuple):
        return isinstance(place.module.parents[place.parent], ast.Subscript)
    return isinstance(place.parent, ast.Subscript | ast.Expr)  # `...` as a statement is an empty body


@EXPRESSIONS.on("Constant", "Name", "BinOp")
def wide_number(node: ast.Constant | ast.Name | ast.BinOp, place: Place) -> Iterator[Hit]:
    """Literals, constants of the module and arithmetic on them, where 32 bits do not hold the value."""
    value = constant_value(node, place.module, place.unit.names)
    inner = [node.left, node.right] if isinstance(node, ast.BinOp) else []
    parts = [constant_value(part, place.module, place.unit.names) for part in inner]
    if value is not None and not _fits(value, place.parent) and all(map(_fits_alone, parts)):
        yield Hit(WIDE_NUMBER, node, f"number {_short(node, value)}")


def _short(node: ast.expr, value: float | int) -> str:
    """The number as the source has it, unless it is longer than anybody reads."""
    digits = isinstance(value, int) and value.bit_length() > 200
    return "of more than 200 bits" if digits else ast.unparse(node)


def _fits(value: float | int, parent: ast.AST) -> bool:
    """Whether 32 bits hold a literal, signed or unsigned."""
    if isinstance(value, int) and isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.USub):
        return value <= 2**31
    return _fits_alone(value)


def _fits_alone(value: float | int | None) -> bool:
    if value is None:
        return True
    if isinstance(value, int):
        return -(2**31) <= value < 2**32
    try:
        struct.pack("<f", value)
    except OverflowError:
        return False
    return value != float("inf")  # a literal such as 1e400
