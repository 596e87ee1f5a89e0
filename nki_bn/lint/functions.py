# SPDX-License-Identifier: Apache-2.0
"""Rules on function definitions: signatures, decorators, nesting, recursion, global state (part of table 9.1)."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from nki_bn.lint.reach import is_jit
from nki_bn.lint.rule import ERROR, WARNING, Hit, Table
from nki_bn.lint.state import changing_names
from nki_bn.lint.tree import ACCESSORS, FunctionNode, bound_names, last_name
from nki_bn.lint.walk import Place

FUNCTIONS = Table("Functions")
KEYWORD_ONLY = FUNCTIONS.rule(
    "NKI101",
    "`*` in a signature",
    "signatures have had no keyword-only parameters since 0.3.0; drop the separator",
    ERROR,
)
VARARGS = FUNCTIONS.rule(
    "NKI102", "`*args` in a signature", "the parser takes a fixed list of parameters; pass a tuple", ERROR
)
KWARGS = FUNCTIONS.rule(
    "NKI103",
    "`**kwargs` in a signature",
    "the parser accepts it only when it stays empty; name the parameters",
    WARNING,
)
POSITIONAL_ONLY = FUNCTIONS.rule(
    "NKI104",
    "`/` in a signature",
    "positional-only parameters are not documented for the parser; drop the separator",
    ERROR,
)
NESTED = FUNCTIONS.rule(
    "NKI105",
    "nested function",
    "the parser knows inner functions only as bodies of nl.fori_loop and nl.while_loop; define it in the module",
    ERROR,
)
DECORATOR = FUNCTIONS.rule(
    "NKI106",
    "decorator on a function",
    "the parser reads the source below the decorator and knows nki.jit and staticmethod only",
    ERROR,
)
NESTED_JIT = FUNCTIONS.rule(
    "NKI107",
    "call of an @nki.jit function",
    "the guide forbids it before 0.7 though public kernels do it; leave shared functions undecorated",
    WARNING,
)
RECURSION = FUNCTIONS.rule(
    "NKI108", "recursive call", "calls are inlined while compiling; the recursion has to end at compile time", WARNING
)
GLOBAL_STATE = FUNCTIONS.rule(
    "NKI109",
    "read of mutable state",
    "compiled kernels are cached by their arguments alone, so a later change goes unseen; pass it as an argument",
    ERROR,
    ERROR,
)


@FUNCTIONS.on("FunctionDef", "AsyncFunctionDef")
def signature(node: FunctionNode, place: Place) -> Iterator[Hit]:
    """Only plain parameters, with or without defaults."""
    args = node.args
    if args.kwonlyargs and not args.vararg:
        yield Hit(KEYWORD_ONLY, args.kwonlyargs[0])
    if args.vararg:
        yield Hit(VARARGS, args.vararg, f"`*{args.vararg.arg}` in a signature")
    if args.kwarg:
        yield Hit(KWARGS, args.kwarg, f"`**{args.kwarg.arg}` in a signature")
    if args.posonlyargs:
        yield Hit(POSITIONAL_ONLY, args.posonlyargs[0])


@FUNCTIONS.on("FunctionDef", "AsyncFunctionDef")
def nesting(node: FunctionNode, place: Place) -> Iterator[Hit]:
    """Inner functions serve as loop bodies only."""
    if node is not place.unit.node and node not in place.module.loop_bodies:
        yield Hit(NESTED, node, f"nested function {node.name}")


@FUNCTIONS.on("FunctionDef", "AsyncFunctionDef")
def decorators(node: FunctionNode, place: Place) -> Iterator[Hit]:
    """Decorators below nki.jit, or on a function without it. What stands above nki.jit is unwrapped."""
    # classes.py has its own word on accessors
    accepted = {"staticmethod"} | ACCESSORS if place.unit.owner else set()
    jits = [position for position, item in enumerate(node.decorator_list) if is_jit(place.module, item)]
    for decorator in node.decorator_list[jits[0] + 1 if jits else 0 :]:
        if last_name(decorator) not in accepted:
            yield Hit(DECORATOR, decorator, f"decorator @{ast.unparse(decorator)}")


@FUNCTIONS.on("Call")
def call_of_kernel(node: ast.Call, place: Place) -> Iterator[Hit]:
    """A kernel called from kernel code."""
    found = place.resolve(node.func)
    if found and isinstance(found.node, FunctionNode):
        if any(is_jit(found.module, decorator) for decorator in found.node.decorator_list):
            yield Hit(NESTED_JIT, node, f"call of the @nki.jit function {found.node.name}")


@FUNCTIONS.on("FunctionDef", "AsyncFunctionDef")
def recursion(node: FunctionNode, place: Place) -> Iterator[Hit]:
    """Calls that lead back to the function they stand in."""
    if node is place.unit.node:
        for site, callee in place.unit.calls:
            if callee.reaches(place.unit):
                yield Hit(RECURSION, site, f"recursive call of {callee.node.name}")


@FUNCTIONS.on("Name")
def global_state(node: ast.Name, place: Place) -> Iterator[Hit]:
    """Reads of containers outside the kernel that something changes, and of names rebound through ``global``."""
    if not isinstance(node.ctx, ast.Load):
        return
    if node.id not in place.unit.names:
        if node.id in place.module.names and node.id in place.module.mutable_globals:
            yield Hit(GLOBAL_STATE, node, f"read of the mutable global {node.id}")
        return
    around = list(place.module.functions_around(place.unit.node))
    if around and node.id not in bound_names(place.unit.node):
        if any(node.id in changing_names(outer) for outer in around):
            yield Hit(GLOBAL_STATE, node, f"read of {node.id}, which the function around the kernel changes")
