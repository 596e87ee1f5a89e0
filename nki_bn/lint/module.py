# SPDX-License-Identifier: Apache-2.0
"""Parsed source files: what their names stand for, in the file itself and in its neighbours of the same package."""

from __future__ import annotations

import ast
import os
import re
import tokenize
import warnings
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from nki_bn.lint.state import changing_names
from nki_bn.lint.tree import DefinitionNode, FunctionNode, argument, bound_name, own_nodes

LOOPS = {"nki.language.fori_loop": 2, "nki.language.while_loop": 1}  # position of the body argument
_MAX_REEXPORTS = 10


class Definition(NamedTuple):
    """A function or class and the module whose names it uses."""

    module: Module
    node: DefinitionNode


class Module:
    """One source file. Raises SyntaxError when the text is not Python."""

    def __init__(self, text: str, filename: str, library: Library) -> None:
        self.filename = filename
        self._lines = re.split(r"\r\n|\r|\n", text)
        self.tree = _parse(text, filename)
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self.imports = dict(_imports(self.tree))
        self.definitions = {node.name: node for node in own_nodes(self.tree) if isinstance(node, DefinitionNode)}
        self.names = {name for node in own_nodes(self.tree) if (name := bound_name(node))} | set(self.imports)
        self._library = library
        self.loop_bodies = dict(self._loop_bodies())

    @cached_property
    def mutable_globals(self) -> frozenset[str]:
        """Module-level names whose objects change after their definition."""
        return changing_names(self.tree)

    @cached_property
    def constants(self) -> dict[str, ast.expr]:
        """The names that the module assigns once, with what it assigns."""
        stored = [node.id for node in own_nodes(self.tree) if isinstance(node, ast.Name) and bound_name(node)]
        return {
            target.id: statement.value
            for statement in self.tree.body
            if isinstance(statement, ast.Assign)
            for target in statement.targets
            if isinstance(target, ast.Name) and stored.count(target.id) == 1
        }

    def dotted(self, node: ast.AST) -> str | None:
        """The full name of an imported object, ``nki.language.ndarray`` for ``nl.ndarray``; None for other nodes."""
        if isinstance(node, ast.Name):
            return self.imports.get(node.id)
        if isinstance(node, ast.Attribute):
            base = self.dotted(node.value)
            return _current(f"{base}.{node.attr}") if base else None
        return None

    def resolve(self, node: ast.AST) -> Definition | None:
        """The function or class a name or attribute stands for, also one imported from the same package."""
        if isinstance(node, ast.Name) and node.id in self.definitions:
            return Definition(self, self.definitions[node.id])
        dotted = self.dotted(node)
        return self._library.find(self, dotted) if dotted else None

    def functions_around(self, node: ast.AST) -> Iterator[FunctionNode]:
        """The functions that enclose a node, innermost first."""
        parent = self.parents.get(node)
        while parent is not None:
            if isinstance(parent, FunctionNode):
                yield parent
            parent = self.parents.get(parent)

    def column(self, node: ast.AST) -> int:
        """The column of a node in characters, counted from 1 (the syntax tree counts bytes)."""
        line = self._lines[getattr(node, "lineno", 1) - 1].encode()
        return len(line[: getattr(node, "col_offset", 0)].decode()) + 1

    def _loop_bodies(self) -> Iterator[tuple[FunctionNode, str]]:
        """Functions passed as bodies to dynamic loops, with the full name of the loop."""
        for call in ast.walk(self.tree):
            if not isinstance(call, ast.Call) or (loop := self.dotted(call.func) or "") not in LOOPS:
                continue
            body = argument(call, LOOPS[loop], "body_fun")
            function = self._function(body) if isinstance(body, ast.Name) else None
            if function is not None:
                yield function, loop

    def _function(self, name: ast.Name) -> FunctionNode | None:
        for outer in self.functions_around(name):
            for node in own_nodes(outer):
                if isinstance(node, FunctionNode) and node.name == name.id:
                    return node
        found = self.definitions.get(name.id)
        return found if isinstance(found, FunctionNode) else None


class Library:
    """The modules of one run, each parsed once. ``filenames`` keeps the spelling in which paths were asked for."""

    def __init__(self) -> None:
        self._modules: dict[Path, Module | None] = {}

    def load(self, path: Path, filename: str | None = None) -> Module:
        """Parse a file. Raises OSError, UnicodeDecodeError or SyntaxError when it cannot be."""
        known = self._modules.get(path.resolve())
        if known is not None:
            return known
        return self.add(read_source(path), filename or _display(path))

    def add(self, text: str, filename: str) -> Module:
        """Parse a text under the name of a file, which need not exist. Raises SyntaxError."""
        module = Module(text, filename, self)
        self._modules[Path(filename).resolve()] = module
        return module

    def find(self, importer: Module, dotted: str) -> Definition | None:
        """The definition an imported name leads to, through re-exports, inside the importer's own package."""
        for _ in range(_MAX_REEXPORTS):
            path, name = _source_of(Path(importer.filename).resolve(), dotted)
            module = self._neighbour(path) if path else None
            if module is None:
                return None
            if name in module.definitions:
                return Definition(module, module.definitions[name])
            if name not in module.imports:
                return None
            importer, dotted = module, module.imports[name]
        return None

    def _neighbour(self, path: Path) -> Module | None:
        if path not in self._modules:
            try:
                self._modules[path] = self.load(path)
            except (OSError, SyntaxError, UnicodeDecodeError):  # reported when that file itself is linted
                self._modules[path] = None
        return self._modules[path]


def _parse(text: str, filename: str) -> ast.Module:
    with warnings.catch_warnings(action="ignore"):  # on escapes in strings, which are nobody's concern here
        try:
            return ast.parse(text, filename)
        except ValueError as error:  # a null byte, before Python 3.12
            raise SyntaxError(str(error)) from error


def read_source(path: Path) -> str:
    """The text of a source file, in the encoding it declares. Raises OSError, UnicodeDecodeError or SyntaxError."""
    with tokenize.open(path) as file:
        return file.read()


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.split(".")[0]
                yield alias.asname or name, _current(name)
        elif isinstance(node, ast.ImportFrom):
            source = "." * node.level + (node.module + "." if node.module else "")
            for alias in node.names:
                yield alias.asname or alias.name, _current(source + alias.name)


def _current(name: str) -> str:
    """Kernels that import the old package are checked as if they imported the new one."""
    return name.removeprefix("neuronxcc.") if name.startswith("neuronxcc.nki") else name


def _display(path: Path) -> str:
    return os.path.relpath(path) if path.resolve().is_relative_to(Path.cwd()) else str(path)


def _source_of(importer: Path, dotted: str) -> tuple[Path | None, str]:
    """The file an imported name comes from when it lies in the importer's package, and the name in that file."""
    level = len(dotted) - len(dotted.lstrip("."))
    *names, name = dotted[level:].split(".")
    folder = _package_folder(importer, level, names)
    if folder is None:
        return None, name
    for path in (folder.with_suffix(".py"), folder / "__init__.py"):
        # The method of the path would raise for a name that is too long.
        if os.path.isfile(path):
            return path, name
    return None, name


def _package_folder(importer: Path, level: int, names: list[str]) -> Path | None:
    """Where a module would be, without its suffix.

    An absolute import is inside the package when it names the package's top folder at any place, because a folder can
    be installed below another name.
    """
    if level:
        return importer.parents[level - 1].joinpath(*names) if level <= len(importer.parents) else None
    top = importer.parent
    while (top.parent / "__init__.py").is_file():
        top = top.parent
    if not (top / "__init__.py").is_file() or top.name not in names:
        return None
    return top.joinpath(*names[names.index(top.name) + 1 :])
