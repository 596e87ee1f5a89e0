# SPDX-License-Identifier: Apache-2.0
"""Rules on the arguments of calls: of functions and classes of the package and of nki itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from nki_bn.lint.reach import is_jit
from nki_bn.lint.rule import ERROR, WARNING, Hit, Table
from nki_bn.lint.signatures import Signature, signature, signatures
from nki_bn.lint.tree import FunctionNode, base_names, last_name
from nki_bn.lint.walk import Place

CALLS = Table("Calls")
KEYWORD = CALLS.rule("NKI221", "unknown keyword", "the called function has no such parameter", ERROR, ERROR)
MISSING = CALLS.rule(
    "NKI223",
    "missing argument",
    "the called function needs it; instructions write to a dst that they are given and return no tile",
    ERROR,
    ERROR,
)
SURPLUS = CALLS.rule(
    "NKI224", "too many arguments", "the called function has fewer positional parameters", ERROR, ERROR
)
LEFT_OUT = CALLS.rule(
    "NKI225",
    "field left out",
    "a field without default that a call leaves out is silently None; give it, or a default",
    WARNING,
    WARNING,
)
SWALLOWED = CALLS.rule(
    "NKI226", "keyword for `**kwargs`", "the parser accepts `**kwargs` only when it stays empty", ERROR
)


class _Callee(NamedTuple):
    """Who is called: ``silent`` when what is left out becomes None."""

    name: str
    signature: Signature
    silent: bool = False


@CALLS.on("Call")
def arguments(node: ast.Call, place: Place) -> Iterator[Hit]:
    """Arguments that do not fit the called function, as far as it is known."""
    callee = _callee(node.func, place)
    if callee is not None:
        yield from _unknown(node, callee)
        if not any(isinstance(value, ast.Starred) for value in node.args):
            yield from _wrong_number(node, callee)


def _unknown(node: ast.Call, callee: _Callee) -> Iterator[Hit]:
    for given in node.keywords:
        # mask= of the old API has a rule of its own
        if given.arg is None or given.arg in callee.signature.parameters or _is_old(given, callee):
            continue
        if callee.signature.open:
            yield Hit(SWALLOWED, given.value, f"keyword {given.arg} of {callee.name}")
        else:
            yield Hit(KEYWORD, given.value, f"keyword {given.arg} of {callee.name}")


def _is_old(given: ast.keyword, callee: _Callee) -> bool:
    return given.arg == "mask" and callee.name.startswith(("nl.", "nisa."))


def _wrong_number(node: ast.Call, callee: _Callee) -> Iterator[Hit]:
    names = callee.signature.parameters
    if len(node.args) > len(names) and not callee.signature.starred:
        yield Hit(SURPLUS, node.args[len(names)], f"{len(node.args)} arguments of {callee.name}")
    if any(keyword.arg is None for keyword in node.keywords):
        return
    given = {*names[: len(node.args)], *(keyword.arg for keyword in node.keywords)}
    for name in names:
        if name in callee.signature.required - given:
            word = "field" if callee.silent else "argument"
            yield Hit(LEFT_OUT if callee.silent else MISSING, node, f"{word} {name} of {callee.name}")


def _callee(function: ast.expr, place: Place) -> _Callee | None:
    found = place.resolve(function)
    if found and isinstance(found.node, ast.ClassDef):
        return _class(found.node)
    if found and isinstance(found.node, FunctionNode):
        known = all(is_jit(found.module, decorator) for decorator in found.node.decorator_list)
        return _Callee(found.node.name, signature(found.node)) if known else None
    if isinstance(function, ast.Name) and function.id in place.unit.names:
        return None
    dotted = place.module.dotted(function) or ""
    if dotted in signatures():
        return _Callee(_short(dotted), signatures()[dotted])
    return _method(function, place)


def _short(dotted: str) -> str:
    return dotted.replace("nki.language.", "nl.").replace("nki.isa.", "nisa.")


def _method(function: ast.expr, place: Place) -> _Callee | None:
    """A method of the same class, called on self."""
    owner = place.unit.owner
    if owner is None or not isinstance(function, ast.Attribute) or last_name(function.value) != "self":
        return None
    named = [item for item in owner.body if isinstance(item, FunctionNode) and item.name == function.attr]
    if not isinstance(function.value, ast.Name) or len(named) != 1:
        return None
    decorators = [last_name(decorator) for decorator in named[0].decorator_list]
    if decorators not in ([], ["staticmethod"]):
        return None
    return _Callee(named[0].name, signature(named[0], bound=not decorators))


def _class(node: ast.ClassDef) -> _Callee | None:
    """The initialiser of a class: written, or supplied from its fields."""
    bases = base_names(node)
    written = [item for item in node.body if isinstance(item, FunctionNode) and item.name == "__init__"]
    if bases not in (["NKIObject"], ["NamedTuple"]):
        return None
    if written:
        return _Callee(node.name, signature(written[0], bound=True)) if len(written) == 1 else None
    fields = dict(_fields(node))
    plain = [name for item in node.body if isinstance(item, ast.Assign) for name in map(last_name, item.targets)]
    required = frozenset(name for name, has_default in fields.items() if not has_default)
    names = (*fields, *(name for name in plain if name not in fields))
    return _Callee(node.name, Signature(names, required), silent=bases == ["NKIObject"])


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, bool]]:
    """The annotated fields of a class and whether they have a default."""
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            if "ClassVar" not in ast.unparse(item.annotation):
                yield item.target.id, item.value is not None
