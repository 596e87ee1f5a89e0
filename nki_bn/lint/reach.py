# SPDX-License-Identifier: Apache-2.0
"""Which functions, methods and classes of a file are kernel code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from nki_bn.lint.module import Definition, Module
from nki_bn.lint.tree import (
    DefinitionNode,
    FunctionNode,
    argument,
    bound_names,
    is_kernel_class,
    last_name,
    own_nodes,
    parameters,
)

KERNEL_MODULES = ("nki.language", "nki.isa")
# Functions that use these run on the host, even beside kernel code.
HOST_MODULES = frozenset({"jax", "pytest", "tensorflow", "torch", "torch_neuronx", "torch_xla"})
# Python calls these on its own side: the parser compares field by field, and hashes nothing.
HOST_METHODS = frozenset({"__eq__", "__ne__", "__hash__"})


@dataclass(eq=False)
class Unit:
    """A function, method or class of kernel code. ``entry``: it is launched, and no other kernel code calls it."""

    module: Module
    node: DefinitionNode
    owner: ast.ClassDef | None = None
    entry: bool = False
    calls: list[tuple[ast.AST, Unit]] = field(default_factory=list)
    names: set[str] = field(default_factory=set)  # of its own and of the functions around it

    def reaches(self, goal: Unit) -> bool:
        """Whether calls lead from here to ``goal``."""
        seen, pending = {self}, [self]
        while pending:
            unit = pending.pop()
            if unit is goal:
                return True
            fresh = {callee for _, callee in unit.calls} - seen
            seen |= fresh
            pending.extend(fresh)
        return False


def kernel_code(module: Module) -> list[Unit]:
    """The kernels of a module and everything they use, in this file or in its package."""
    reach = _Reach()
    entries = list(_entries(module))
    for definition in entries:
        reach.add(definition.module, definition.node).entry = True
    if not entries and any(name.startswith(KERNEL_MODULES) for name in module.imports.values()):
        for node in _unlaunched(module):
            owner = module.parents[node]
            reach.add(module, node, owner if isinstance(owner, ast.ClassDef) else None)
    reach.run()
    units = list(reach.units.values())
    for callee in {callee for unit in units for _, callee in unit.calls if callee is not unit}:
        callee.entry = False
    return units


def is_jit(module: Module, decorator: ast.expr) -> bool:
    """Whether a decorator is ``nki.jit``, with or without arguments."""
    return module.dotted(decorator.func if isinstance(decorator, ast.Call) else decorator) == "nki.jit"


def _entries(module: Module) -> Iterator[Definition]:
    for node in ast.walk(module.tree):
        if isinstance(node, FunctionNode) and any(is_jit(module, decorator) for decorator in node.decorator_list):
            yield Definition(module, node)
        elif isinstance(node, ast.Call) and module.dotted(node.func) in ("nki.jit", "nki.simulate"):
            kernel = argument(node, 0, "fn")
            found = module.resolve(kernel) if kernel else None
            if found and isinstance(found.node, FunctionNode):
                yield found


def _unlaunched(module: Module) -> Iterator[DefinitionNode]:
    """Kernel code of a file without kernels: its functions, and its classes with their methods.

    Functions that the module itself runs while it is imported, or that use a host framework, are none.
    """
    called = {last_name(node.func) for node in own_nodes(module.tree) if isinstance(node, ast.Call)}
    called |= {last_name(item) for node in module.definitions.values() for item in node.decorator_list}
    for name, node in module.definitions.items():
        if isinstance(node, FunctionNode) and name not in called and not _uses_host(module, node):
            yield node
        elif isinstance(node, ast.ClassDef) and is_kernel_class(node):
            yield node
            yield from _methods(node)


def _uses_host(module: Module, function: FunctionNode) -> bool:
    """Whether a function uses a host framework, or NumPy in a file that has one at hand."""
    imported = {name.split(".")[0] for name in module.imports.values()}
    host = HOST_MODULES | {"numpy"} if imported & HOST_MODULES else HOST_MODULES
    names = (module.imports.get(node.id, "") for node in ast.walk(function) if isinstance(node, ast.Name))
    return any(name.split(".")[0] in host for name in names)


def _methods(node: ast.ClassDef) -> Iterator[FunctionNode]:
    return (item for item in node.body if isinstance(item, FunctionNode) and item.name not in HOST_METHODS)


class _Reach:
    """The walk along names from the kernels to all they use. Methods are matched by name alone."""

    def __init__(self) -> None:
        self.units: dict[DefinitionNode, Unit] = {}
        self._pending: list[Unit] = []
        self._attributes: set[str] = set()

    def add(self, module: Module, node: DefinitionNode, owner: ast.ClassDef | None = None) -> Unit:
        """The unit of a definition, new or known."""
        if node not in self.units:
            self.units[node] = Unit(module, node, owner)
            self._pending.append(self.units[node])
        return self.units[node]

    def run(self) -> None:
        """Follow names until nothing new is found."""
        while self._pending:
            unit = self._pending.pop()
            if isinstance(unit.node, ast.ClassDef):
                self._follow_class(unit.module, unit.node)
            else:
                around = unit.module.functions_around(unit.node)
                unit.names = bound_names(unit.node).union(*map(bound_names, around))
                self._follow_function(unit, unit.node)
            if not self._pending:
                self._add_methods()

    def _follow_class(self, module: Module, node: ast.ClassDef) -> None:
        for method in _methods(node):
            if method.name.startswith("__"):
                self.add(module, method, node)

    def _follow_function(self, unit: Unit, function: FunctionNode) -> None:
        for statement in function.body:
            for node in ast.walk(statement):
                self._follow_name(unit, node)
        for parameter in parameters(function):
            found = unit.module.resolve(parameter.annotation) if parameter.annotation else None
            if found and is_kernel_class(found.node):
                self.add(*found)

    def _follow_name(self, unit: Unit, node: ast.AST) -> None:
        if isinstance(node, ast.Attribute):
            self._attributes.add(node.attr)
        found = None if isinstance(node, ast.Name) and node.id in unit.names else unit.module.resolve(node)
        if found:
            unit.calls.append((node, self.add(*found)))
        elif unit.owner and isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            named = [method for method in _methods(unit.owner) if method.name == node.attr]
            if node.value.id in ("self", unit.owner.name):
                unit.calls.extend((node, self.add(unit.module, method, unit.owner)) for method in named)

    def _add_methods(self) -> None:
        """Methods of known classes, and of classes beside known code, that something calls by name."""
        known = {(unit.module, unit.node) for unit in self.units.values()}
        beside = {
            (module, node) for module, _ in known for node in module.definitions.values() if is_kernel_class(node)
        }
        for module, node in known | beside:
            if isinstance(node, ast.ClassDef):
                for method in _methods(node):
                    if method.name in self._attributes:
                        self.add(module, node)
                        self.add(module, method, node)
