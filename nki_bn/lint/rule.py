# SPDX-License-Identifier: Apache-2.0
"""Rules, the tables that hold them, and what a check reports."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from nki_bn.lint.walk import Place

VERSIONS = ("0.6", "0.7")


class Severity(StrEnum):
    """How a front end takes a construct: an ERROR is refused, a WARNING works but is deprecated or undocumented."""

    ERROR = "error"
    WARNING = "warning"


ERROR, WARNING = Severity.ERROR, Severity.WARNING


@dataclass(frozen=True)
class Rule:
    """One construct and how each front end takes it (None: accepted).

    ``parser`` is NKI 0.6, where the compiler parses the kernel's source; ``tracer`` is NKI 0.7, where Python runs it.
    """

    code: str
    construct: str
    reason: str
    parser: Severity | None = None
    tracer: Severity | None = None

    def severity(self, version: str) -> Severity | None:
        """How the front end of ``version`` takes the construct."""
        return {"0.6": self.parser, "0.7": self.tracer}[version]


class Hit(NamedTuple):
    """A place where a rule is violated; ``subject`` names the construct as the source spells it."""

    rule: Rule
    node: ast.AST
    subject: str = ""

    @property
    def message(self) -> str:
        """The subject and the reason of the rule, on one line."""
        return f"{self.subject or self.rule.construct}: {self.rule.reason}"


@dataclass(frozen=True, order=True)
class Finding:
    """A hit in a file. ``line`` and ``column`` count from 1; ``versions`` are those with this severity."""

    path: str
    line: int
    column: int
    code: str
    severity: Severity
    message: str
    versions: tuple[str, ...]

    def __str__(self) -> str:
        versions = ",".join(self.versions)
        return f"{self.path}:{self.line}:{self.column}: {self.code} {self.severity} [{versions}] {self.message}"


Check = Callable[[Any, "Place"], Iterator[Hit]]


class Table:
    """A group of rules and the checks that apply them, by the name of the syntax node they look at.

    Names rather than classes, because some nodes exist only in later Python versions.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self.rules: list[Rule] = []
        self._checks: dict[str, list[Check]] = {}

    def rule(
        self,
        code: str,
        construct: str,
        reason: str,
        parser: Severity | None = None,
        tracer: Severity | None = None,
    ) -> Rule:
        """Define a rule of this table."""
        self.rules.append(Rule(code, construct, reason, parser, tracer))
        return self.rules[-1]

    def on(self, *node_names: str) -> Callable[[Check], Check]:
        """Decorate a check that looks at nodes of these classes."""

        def register(check: Check) -> Check:
            for name in node_names:
                self._checks.setdefault(name, []).append(check)
            return check

        return register

    def refuse(self, rule: Rule, *node_names: str) -> None:
        """Nodes of these classes violate ``rule`` wherever they stand."""

        def check(node: ast.AST, place: Place) -> Iterator[Hit]:
            yield Hit(rule, node)

        self.on(*node_names)(check)

    def hits(self, node: ast.AST, place: Place) -> Iterator[Hit]:
        """What the checks of this table report for one node."""
        for check in self._checks.get(type(node).__name__, ()):
            yield from check(node, place)
