# SPDX-License-Identifier: Apache-2.0
"""From source text to findings."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from nki_bn.lint.api import API, file_hits
from nki_bn.lint.builtins import BUILTINS
from nki_bn.lint.calls import CALLS
from nki_bn.lint.classes import CLASSES
from nki_bn.lint.expressions import EXPRESSIONS
from nki_bn.lint.functions import FUNCTIONS
from nki_bn.lint.loops import DYNAMIC_LOOPS
from nki_bn.lint.module import Library, Module
from nki_bn.lint.names import NAMES
from nki_bn.lint.reach import kernel_code
from nki_bn.lint.rule import ERROR, VERSIONS, Finding, Hit, Rule, Severity, Table
from nki_bn.lint.statements import STATEMENTS
from nki_bn.lint.tensors import TENSORS
from nki_bn.lint.walk import walk

FILES = Table("Files")
SYNTAX = FILES.rule("NKI001", "syntax error", "the file is not Python", ERROR, ERROR)
TABLES = (FILES, FUNCTIONS, STATEMENTS, DYNAMIC_LOOPS, EXPRESSIONS, CALLS, BUILTINS, CLASSES, API, TENSORS, NAMES)
RULES: tuple[Rule, ...] = tuple(rule for table in TABLES for rule in table.rules)


def lint_source(text: str, filename: str, version: str) -> list[Finding]:
    """Check a source text for one NKI version.

    When ``filename`` names an existing file, imports from its own package are followed, and findings there are
    reported under their own paths.

    Raises ValueError for a version other than those of VERSIONS.
    """
    _check_version(version)
    return _lint(lambda: Library().add(text, filename), filename, (version,))


def lint_file(path: str | Path, version: str) -> list[Finding]:
    """Check a file for one NKI version.

    Raises ValueError for an unknown version, OSError for a file that cannot be read, UnicodeDecodeError for one that
    is no text.
    """
    _check_version(version)
    return lint_with(Library(), Path(path), (version,))


def lint_with(library: Library, path: Path, versions: Sequence[str]) -> list[Finding]:
    """Check a file for several versions, sharing parsed modules through ``library``."""
    return _lint(lambda: library.load(path, str(path)), str(path), tuple(versions))


def _lint(load: Callable[[], Module], filename: str, versions: tuple[str, ...]) -> list[Finding]:
    try:
        return _findings(load(), versions)
    except SyntaxError as error:
        return [_syntax_finding(error, filename, versions)]
    except (RecursionError, MemoryError):  # both are how the parser gives up on depth
        deep = SyntaxError("the file, or one it imports from, is too deeply nested to be read")
        return [_syntax_finding(deep, filename, versions)]


def _check_version(version: str) -> None:
    if version not in VERSIONS:
        raise ValueError(f"version: got {version!r}, accepted are {', '.join(VERSIONS)}")


def _findings(module: Module, versions: Sequence[str]) -> list[Finding]:
    hits = [(module, hit) for hit in file_hits(module)]
    for unit in kernel_code(module):
        for node, place in walk(unit):
            hits.extend((unit.module, hit) for table in TABLES for hit in table.hits(node, place))
    return sorted({finding for owner, hit in hits for finding in _judge(owner, hit, versions)})


def _judge(module: Module, hit: Hit, versions: Sequence[str]) -> Iterator[Finding]:
    """One finding for each severity, with the versions that share it."""
    for severity in Severity:
        judged = tuple(version for version in versions if hit.rule.severity(version) is severity)
        if judged:
            yield _finding(module, hit.node, hit, severity, judged)


def _finding(module: Module, node: ast.AST, hit: Hit, severity: Severity, versions: tuple[str, ...]) -> Finding:
    line = getattr(node, "lineno", 1)
    return Finding(module.filename, line, module.column(node), hit.rule.code, severity, hit.message, versions)


def _syntax_finding(error: SyntaxError, filename: str, versions: tuple[str, ...]) -> Finding:
    message = f"{SYNTAX.construct}: {error.msg}"
    return Finding(filename, error.lineno or 1, error.offset or 1, SYNTAX.code, ERROR, message, versions)
