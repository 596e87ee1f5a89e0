# SPDX-License-Identifier: Apache-2.0
"""Rules on builtins and libraries (table 9.3)."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator

from nki_bn.lint.rule import ERROR, WARNING, Hit, Table
from nki_bn.lint.values import Kind
from nki_bn.lint.walk import Place

BUILTINS = Table("Builtins and libraries")
BUILTIN = BUILTINS.rule("NKI301", "builtin", "the parser does not have it; write an index loop or an if", ERROR)
STRING_METHOD = BUILTINS.rule(
    "NKI302", "string method", "methods of strings are not documented for the parser; use f-strings and ==", WARNING
)
CONTAINER_METHOD = BUILTINS.rule(
    "NKI303", "list or dict method", "the parser does not have this method; write a loop", ERROR
)
MATH = BUILTINS.rule(
    "NKI304", "math function", "the parser has ceil, floor, gcd, log2, log10, pow and sqrt only", ERROR
)
NUMPY = BUILTINS.rule(
    "NKI305", "NumPy function", "the parser evaluates no NumPy; compute on the host or use nki.language", ERROR
)
NUMPY_CONSTANT = BUILTINS.rule(
    "NKI306", "NumPy constant", "not documented inside a kernel; define a float in the module", WARNING
)
NUMPY_DTYPE = BUILTINS.rule("NKI307", "NumPy dtype", "kernels know the dtypes of nki.language only", ERROR, WARNING)

_KNOWN_BUILTINS = frozenset(
    "range len min max abs int float bool str tuple list dict isinstance type slice divmod print staticmethod".split()
)
_METHODS = {
    Kind.LIST: frozenset("append extend pop index count reverse remove clear copy".split()),
    Kind.DICT: frozenset("get items keys values pop setdefault clear copy".split()),
}
_MATH = frozenset("ceil floor gcd log2 log10 pow sqrt".split())
_MATH_CONSTANTS = frozenset("pi e tau inf nan".split())
_NUMPY_CONSTANTS = frozenset("inf nan pi e euler_gamma newaxis".split())
_NUMPY_DTYPES = frozenset(
    "bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128 single double"
    " half dtype".split()
)


@BUILTINS.on("Name")
def builtin(node: ast.Name, place: Place) -> Iterator[Hit]:
    """Builtins beyond the list of the parser. Exceptions are left to the rules on raise and try."""
    name = place.builtin(node)
    if name and name not in _KNOWN_BUILTINS and not _is_exception(name):
        yield Hit(BUILTIN, node, f"builtin {name}")


def _is_exception(name: str) -> bool:
    value = getattr(builtins, name)
    return isinstance(value, type) and issubclass(value, BaseException)


@BUILTINS.on("Call")
def method(node: ast.Call, place: Place) -> Iterator[Hit]:
    """Methods of strings, lists and dicts."""
    if not isinstance(node.func, ast.Attribute):
        return
    kind = place.values.kind(node.func.value)
    if kind is Kind.STRING:
        yield Hit(STRING_METHOD, node, f"string method {node.func.attr}")
    elif kind in _METHODS and node.func.attr not in _METHODS[kind]:
        yield Hit(CONTAINER_METHOD, node, f"{kind.name.lower()} method {node.func.attr}")


@BUILTINS.on("Attribute", "Name")
def library(node: ast.Attribute | ast.Name, place: Place) -> Iterator[Hit]:
    """Names of math and numpy, each reported once at its full length."""
    dotted = place.module.dotted(node) or ""
    if isinstance(place.parent, ast.Attribute) or (isinstance(node, ast.Name) and node.id in place.unit.names):
        return
    name = dotted.rpartition(".")[2]
    if dotted.startswith("math.") and name not in _MATH | _MATH_CONSTANTS:
        yield Hit(MATH, node, f"math.{name}")
    elif dotted.startswith("numpy.") or dotted == "numpy":
        rule = NUMPY_DTYPE if name in _NUMPY_DTYPES else NUMPY_CONSTANT if name in _NUMPY_CONSTANTS else NUMPY
        yield Hit(rule, node, dotted)
