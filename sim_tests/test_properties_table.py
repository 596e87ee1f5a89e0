# SPDX-License-Identifier: Apache-2.0
"""The rows of docs/properties.md and the tests that hold them belong together."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = (HERE.parent / "docs" / "properties.md").read_text(encoding="utf-8")
ROWS = (
    *("P1a", "P2a", "P1b", "Chan", "P1", "P2", "P2b", "P2g", "P4"),
    *("frozen", "lin", "block", "run", "layout", "shapes", "R1", "erase", "net"),
)


def subject_of(path: Path) -> str:
    return path.stem.removeprefix("test_properties_")


def functions_in(path: Path) -> list[ast.FunctionDef]:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return [node for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


def marked() -> Iterator[tuple[str, str, str]]:
    """Row, subject of the file, and test, for every mark ``statement``."""
    for path in sorted(HERE.glob("test_properties_*.py")):
        for test in functions_in(path):
            for decorator in test.decorator_list:
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.statement":
                    for row in ast.literal_eval(ast.Tuple(decorator.args, ast.Load())):
                        yield row, subject_of(path), test.name


def table() -> str:
    """The table of tests: a line per row."""
    tests: dict[str, dict[str, list[str]]] = {row: {} for row in ROWS}
    for row, subject, name in marked():
        tests[row].setdefault(subject, []).append(name.removeprefix("test_"))
    lines = ["| id | file: tests |", "|---|---|"]
    for row, by_subject in tests.items():
        cells = (f"**{subject}**: {', '.join(names)}" for subject, names in by_subject.items())
        lines.append(f"| {row} | {'<br>'.join(cells)} |")
    return "\n".join(lines)


def test_every_row_has_a_statement_and_a_test() -> None:
    first_table = PAGE.partition("| id | statement |")[2].partition("\n\n")[0]
    assert tuple(re.findall(r"^\| (\w+) \|", first_table, re.MULTILINE)) == ROWS
    assert {row for row, *_ in marked()} == set(ROWS)


def test_every_property_test_belongs_to_a_row() -> None:
    held = {(subject, name) for _, subject, name in marked()}
    paths = [path for path in HERE.glob("test_properties_*.py") if subject_of(path) not in ("table", "nightly")]
    assert {(subject_of(path), test.name) for path in paths for test in functions_in(path)} - held == set()


def test_the_page_lists_the_tests_of_every_row() -> None:
    assert table() in PAGE, f"docs/properties.md should have this table:\n{table()}"
