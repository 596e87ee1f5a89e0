# SPDX-License-Identifier: Apache-2.0
"""The linter: every rule, its near misses, what counts as kernel code, and the command."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import json
import re
import sys
from pathlib import Path

import lint_cases
import pytest

from nki_bn import lint
from nki_bn.lint import command
from nki_bn.lint.engine import TABLES
from nki_bn.lint.signatures import signatures

ROOT = Path(__file__).resolve().parents[1]
SEVERITIES = {"E": "error", "W": "warning"}
GROUPS = ("FUNCTIONS", "STATEMENTS", "DYNAMIC_LOOPS", "EXPRESSIONS", "CALLS", "BUILTINS", "CLASSES", "API")
GROUPS += ("TENSORS", "NAMES")
VIOLATIONS = {f"{group}: {name}": text for group in GROUPS for name, text in getattr(lint_cases, group).items()}
# Syntax of Python 3.12, and a file that is no Python: no snippet of the corpus can hold them.
ELSEWHERE = {"NKI001", "NKI130", "NKI404"}

CLEAN = '''\
from dataclasses import dataclass
from enum import Enum

import nki
import nki.isa as nisa
import nki.language as nl

WIDTHS = (128, 256, 512)


class Mode(Enum):
    PLAIN = 0
    RELU = 1


@dataclass(frozen=True)
class Plan(nl.NKIObject):
    """Static sizes."""

    width: int
    tiles: int = 4
    mode: Mode = Mode.PLAIN

    def __post_init__(self):
        assert self.width > 0, f"width is {self.width}"

    @staticmethod
    def default():
        return Plan(width=WIDTHS[-1])

    def columns(self, tile):
        return tile * self.width, min((tile + 1) * self.width, self.tiles * self.width)


def load_tile(x, rows, start, stop, name):
    """A tile of x in SBUF."""
    tile = nl.ndarray((rows, stop - start), dtype=x.dtype, buffer=nl.sbuf, name=name)
    nisa.dma_copy(dst=tile, src=x[:, start:stop])
    return tile


def activate(dst, src, mode):
    op = nl.relu if mode == Mode.RELU else nl.copy
    nisa.activation(dst=dst, op=op, data=src)


@nki.jit
def kernel(x: nl.ndarray, scale=1.0, plan: Plan = None, counts: tuple = (1, 2)):
    """[P, N] HBM -> [P, N] HBM."""
    rows, columns = x.shape
    plan = Plan.default() if plan == None else plan
    assert rows <= nl.tile_size.pmax and columns % plan.width == 0, f"shape {x.shape} of {x.dtype!r}"
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    total = nl.zeros((rows, 1), dtype=nl.float32)
    names = {"out": out, "total": total}
    spans = []
    for tile in range(plan.tiles):
        spans.append(plan.columns(tile))
    for tile in range(len(spans)):
        start, stop = spans[tile]
        if not (0 <= start < stop):
            continue
        y = load_tile(x, rows, start, stop, name=f"x_{tile}")
        with nl.no_reorder():
            nisa.tensor_scalar(dst=y, data=y, op0=nl.multiply, operand0=scale)
            activate(dst=y, src=y, mode=plan.mode)
        nisa.dma_copy(dst=names["out"][:, start:stop], src=y)

    def body(i):
        row = nl.ndarray((1, columns), dtype=x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=row, src=out.ap([[columns, 1], [1, columns]], scalar_offset=i, indirect_dim=0))
        nisa.dma_copy(dst=out.ap([[columns, 1], [1, columns]], scalar_offset=i, indirect_dim=0), src=row)

    nl.fori_loop(0, rows, body)
    more = nisa.register_alloc(1)

    def step(more):
        following = nisa.register_alloc()
        nisa.register_load(following, total[0:1, 0:1])
        return following

    nl.while_loop(more, step)
    return out
'''


def found(text: str, filename: str = "kernel.py") -> set[tuple[int, str, str, str]]:
    """Line, code, severity and version of all findings."""
    findings = [finding for version in lint.VERSIONS for finding in lint.lint_source(text, filename, version)]
    return {(item.line, item.code, item.severity, version) for item in findings for version in item.versions}


def expected(text: str) -> set[tuple[int, str, str, str]]:
    """The same from the marks in the text."""
    marks = set()
    for number, line in enumerate(text.split("\n"), 1):
        for code, letters in re.findall(r"(NKI\d{3}) ([EW-]{2})", line):
            judged = zip(lint.VERSIONS, letters, strict=True)
            marks |= {(number, code, SEVERITIES[letter], version) for version, letter in judged if letter != "-"}
    return marks


@pytest.mark.parametrize("text", VIOLATIONS.values(), ids=VIOLATIONS)
def test_violation(text: str) -> None:
    assert expected(text)
    assert found(text) == expected(text)


@pytest.mark.parametrize("text", lint_cases.NEAR_MISSES.values(), ids=lint_cases.NEAR_MISSES)
def test_near_miss(text: str) -> None:
    assert found(text) == set()


def test_realistic_kernel_is_clean() -> None:
    assert found(CLEAN) == set()


def test_realistic_kernel_is_checked() -> None:
    """The clean kernel is clean because it is looked at: a fault in any of its parts is found."""
    parts = ["op = nl.relu", "return tile * self", "assert self.width", "row = nl.ndarray", "tile = nl.ndarray"]
    for part in parts:
        line = CLEAN[: CLEAN.index(part)].count("\n") + 1
        faulty = CLEAN.replace(part, f"fault = sorted(WIDTHS); {part}")
        assert found(faulty) == {(line, "NKI301", "error", "0.6")}, part


@pytest.mark.parametrize("path", sorted((ROOT / "kernels").glob("*.py")), ids=lambda path: path.name)
def test_kernels_of_the_project_are_clean(path: Path) -> None:
    assert [str(finding) for version in lint.VERSIONS for finding in lint.lint_file(path, version)] == []


def test_every_rule_has_a_violation() -> None:
    marked = {code for text in VIOLATIONS.values() for _, code, _, _ in expected(text)}
    assert marked | ELSEWHERE == {rule.code for rule in lint.RULES}
    assert not marked & ELSEWHERE


@pytest.mark.skipif(sys.version_info < (3, 12), reason="syntax of Python 3.12")
def test_syntax_of_later_python() -> None:
    text = lint_cases.kernel("type T = int  # NKI130 E-\nreturn f(x)", "def f[T](x):  # NKI404 E-\n    return x")
    assert found(text) == expected(text)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="syntax error before Python 3.12 only")
def test_syntax_beyond_this_python_is_a_finding() -> None:
    text = lint_cases.kernel("type T = int\nreturn x")
    assert {code for _, code, _, _ in found(text)} == {"NKI001"}


def test_codes_are_unique_and_reasons_one_line() -> None:
    assert len({rule.code for rule in lint.RULES}) == len(lint.RULES)
    assert all(rule.reason and "\n" not in rule.reason for rule in lint.RULES)
    assert all(rule.parser or rule.tracer for rule in lint.RULES)


FAULT = "def kernel(x):\n    return sorted(x)\n"


@pytest.mark.parametrize(
    ("imports", "decorator", "after"),
    [
        ("import nki", "@nki.jit", ""),
        ("import nki", "@nki.jit()", ""),
        ("import nki as n", "@n.jit", ""),
        ("from nki import jit", "@jit", ""),
        ("from nki import jit as compiled", "@compiled()", ""),
        ("import nki", "", "launch = nki.jit(kernel)"),
        ("import nki", "", "nki.jit(fn=kernel)(1)"),
        ("import nki", "", "def f(x):\n    return nki.simulate(kernel)(x)"),
        ("import nki.language as nl", "", ""),
        ("from nki import isa", "", ""),
    ],
)
def test_kernels_are_recognised(imports: str, decorator: str, after: str) -> None:
    text = f"{imports}\n{decorator}\n{FAULT}{after}\n"
    assert found(text) == {(4, "NKI301", "error", "0.6")}


@pytest.mark.parametrize(
    "text",
    [
        f"import numpy\n{FAULT}",
        f"from numba import jit\n@jit\n{FAULT}",
        f"import nki\n{FAULT}@nki.jit\ndef other(x):\n    return x\n",
        f"import nki.language as nl\n{FAULT}TABLE = kernel((2, 1))\n",
        "import nki.language as nl\nimport torch\ndef reference(x):\n    return torch.sum(sorted(x))\n",
    ],
    ids=["no nki", "another jit", "beside a kernel", "run at import", "host framework"],
)
def test_host_code_is_not_checked(text: str) -> None:
    assert found(text) == set()


def test_calls_and_values_are_followed() -> None:
    text = lint_cases.kernel(
        "table = (first, A)\nreturn table[0](x)",
        """
        def first(x):
            return second(x)
        def second(x):
            raise x  # NKI122 E-
        class A(nl.NKIObject):
            def __init__(self):
                self.helper()
            def helper(self):
                raise self  # NKI122 E-
            def unused(self):
                raise self
        """,
    )
    assert found(text) == expected(text)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package of two folders: kernel.py calls one function of three other files."""
    files = {
        "__init__.py": "",
        "kernel.py": "import nki\nfrom .sums import total\nfrom . import means\nfrom pack.deep import centred\n"
        "@nki.jit\ndef kernel(x):\n    return total(means.mean(x), centred(x), width=1)\n",
        "sums.py": "def total(a, b):\n    raise a\n\ndef host(a):\n    raise a\n",
        "means.py": "def mean(a):\n    return sum(a)\n",
        "deep/__init__.py": "from .centre import centred\n",
        "deep/centre.py": "from ..means import mean\n\ndef centred(a):\n    with mean(a):\n        pass\n",
        "broken.py": "import nki\nfrom .wrong import f\n@nki.jit\ndef kernel(x):\n    return f(x)\n",
        "wrong.py": "def f(:\n",
        "circle.py": "import nki\nfrom .round import f\n@nki.jit\ndef kernel(x):\n    return f(*x)\n",
        "round.py": "from .circle import f\n",
    }
    for name, text in files.items():
        path = tmp_path / "pack" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path / "pack"


def test_imports_inside_the_package_are_followed(package: Path) -> None:
    findings = lint.lint_file(package / "kernel.py", "0.6")
    assert {(str(Path(item.path).relative_to(package)), item.line, item.code) for item in findings} == {
        ("kernel.py", 7, "NKI221"),
        ("sums.py", 2, "NKI122"),
        ("means.py", 2, "NKI301"),
        ("deep/centre.py", 4, "NKI124"),
    }


def test_broken_imports_are_left_to_their_own_file(package: Path) -> None:
    assert lint.lint_file(package / "broken.py", "0.6") == []
    assert [item.code for item in lint.lint_file(package / "wrong.py", "0.6")] == ["NKI001"]


def test_circular_imports_end(package: Path) -> None:
    assert [item.code for item in lint.lint_file(package / "circle.py", "0.6")] == ["NKI209"]


def test_position_counts_characters_from_one() -> None:
    text = lint_cases.IMPORTS + "@nki.jit\ndef kernel(x):\n    'µµ'; return sorted(x)\n"
    finding = lint.lint_source(text, "k.py", "0.6")[0]
    assert (finding.line, finding.column) == (8, "    'µµ'; return sorted(x)".index("sorted") + 1)


def test_finding_is_frozen_and_prints_as_one_line() -> None:
    finding = lint.lint_source(lint_cases.kernel("return {x}"), "k.py", "0.6")[0]
    assert str(finding) == f"k.py:9:12: NKI201 error [0.6] {finding.message}"
    with pytest.raises(dataclasses.FrozenInstanceError):
        finding.line = 3  # type: ignore[misc]


def test_unknown_version_is_refused() -> None:
    with pytest.raises(ValueError, match="version: got '0.5', accepted are 0.6, 0.7"):
        lint.lint_source("", "k.py", "0.5")


def run(*argv: str | Path) -> int:
    """The command with these arguments."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args([str(arg) for arg in argv]))


def written(folder: Path, text: str, name: str = "k.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_exit_code_without_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(written(tmp_path, CLEAN)) == 0
    assert capsys.readouterr().out == ""


def test_exit_code_with_warnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, lint_cases.EXPRESSIONS["is None"])
    assert run(path) == 0
    assert capsys.readouterr().out.startswith(f"{path}:9:17: NKI206 warning [0.6] is None: ")


def test_exit_code_with_errors_depends_on_the_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, lint_cases.EXPRESSIONS["set"])
    assert run(path, "--nki", "0.7") == 0
    assert run(path, "--nki", "0.6") == 1
    assert run(path) == 1
    assert capsys.readouterr().out.count("NKI201 error [0.6]") == 2


def test_versions_are_joined_where_they_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = lint_cases.kernel("for i in nl.dynamic_range(n):\n    x[0] = i\nreturn x")
    run(written(tmp_path, text))
    tags = re.findall(r"(NKI\d+) (\w+) (\[.*?\])", capsys.readouterr().out)
    assert tags == [
        ("NKI142", "error", "[0.7]"),
        ("NKI142", "warning", "[0.6]"),
        ("NKI133", "error", "[0.6,0.7]"),
    ]


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, lint_cases.EXPRESSIONS["set"])
    assert run(path, "--json") == 1
    (item,) = json.loads(capsys.readouterr().out)
    assert set(item) == {"path", "line", "column", "code", "severity", "message", "versions"}
    assert (item["path"], item["line"], item["code"]) == (str(path), 9, "NKI201")
    assert (item["severity"], item["versions"]) == ("error", ["0.6"])


def test_json_without_findings_is_an_empty_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(written(tmp_path, CLEAN), "--json") == 0
    assert json.loads(capsys.readouterr().out) == []


def test_syntax_error_is_a_finding_with_its_position(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "x = 1\ny = (\n")
    assert run(path) == 1
    assert capsys.readouterr().out.startswith(f"{path}:2:5: NKI001 error [0.6,0.7] syntax error: ")


@pytest.mark.parametrize(
    "expression", ["-" * 100_000 + "x", "x" + ".a" * 100_000, "x" + "+x" * 100_000], ids=["signs", "names", "terms"]
)
def test_a_file_too_deeply_nested_is_a_finding(
    expression: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, f"import nki\n\n\n@nki.jit\ndef kernel(x):\n    return {expression}\n")
    assert run(path) == 1
    assert capsys.readouterr().out.startswith(f"{path}:1:1: NKI001 error [0.6,0.7] syntax error: the file, or one it")


def test_wrong_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    faulty = written(tmp_path, lint_cases.EXPRESSIONS["set"])
    binary = tmp_path / "binary.py"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, reason in [
        (tmp_path / "missing.py", "no such file"),
        (tmp_path / ("n" * 300), "no such file"),
        (Path("/dev/null"), "not a regular file"),
        (written(tmp_path, "", "notes.txt"), "not a Python file"),
        (binary, "cannot be read"),
    ]:
        assert run(faulty, path) == 2
        output = capsys.readouterr()
        assert output.out == ""
        assert output.err.startswith(f"nki-bn lint: {path}: {reason}")


def test_unusual_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing in a file makes the linter fail: empty, null bytes, bad escapes, other encodings, Windows and BOM."""
    kernel = b"import nki\r\n@nki.jit\r\ndef k(x):\r\n    return {x}\r\n"
    for content, code, start in [
        (b"", 0, ""),
        (b'x = "\\d"\n', 0, ""),
        (b'# coding: latin-1\nx = "\xe9"\n', 0, ""),
        (b"x = 1\x00\n", 1, "1:1: NKI001"),
        (b"x = " + b"9" * 6000, 1, "1:1: NKI001"),
        (b"\xef\xbb\xbf" + kernel, 1, "4:12: NKI201"),
        (kernel.replace(b"\r\n", b"\r"), 1, "4:12: NKI201"),
    ]:
        path = tmp_path / "k.py"
        path.write_bytes(content)
        assert run(path) == code, content
        assert capsys.readouterr().out.startswith(f"{path}:{start}" if start else ""), content


def test_no_file_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 2
    assert capsys.readouterr().err == "nki-bn lint: PATH: none was given\n"


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--explain", "NKI142") == 0
    lines = capsys.readouterr().out.split("\n")
    assert lines[:2] == ["NKI142 nl.dynamic_range (Dynamic loops)", "0.6: warning, 0.7: error"]
    assert run("--explain", "NKI999") == 2
    assert "'NKI999'" in capsys.readouterr().err


def test_signatures_are_those_of_the_simulator() -> None:
    """Two tables of the documented parameters, written apart: they agree wherever both know a function."""
    compared = 0
    for name, known in signatures().items():
        module, _, function = name.rpartition(".")
        found = getattr(importlib.import_module(module.replace("nki", "nki_bn.simulator.api", 1)), function)
        parameters = inspect.signature(found).parameters.values()
        if any(item.kind in (item.VAR_POSITIONAL, item.VAR_KEYWORD) for item in parameters):
            continue
        compared += 1
        assert [item.name for item in parameters] == list(known.parameters), name
        assert {item.name for item in parameters if item.default is item.empty} == known.required, name
    assert compared > 80


def test_wrong_version_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lint.run_lint([written(tmp_path, CLEAN)], ["0.5"]) == 2
    assert "'0.5'" in capsys.readouterr().err


def test_one_file_given_twice_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, lint_cases.EXPRESSIONS["set"])
    run(path, path)
    assert capsys.readouterr().out.count("NKI201") == 1


def test_documentation_lists_every_rule() -> None:
    page = (ROOT / "docs" / "lint.md").read_text()
    rows = [
        f"| {rule.code} | {rule.construct} | {rule.parser or 'ok'} | {rule.tracer or 'ok'} | {rule.reason} |"
        for rule in lint.RULES
    ]
    assert [line for line in page.split("\n") if line.startswith("| NKI")] == rows
    assert all(f"### {table.title}\n" in page for table in TABLES)
