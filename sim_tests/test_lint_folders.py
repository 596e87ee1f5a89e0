# SPDX-License-Identifier: Apache-2.0
"""``nki-bn lint`` on folders."""

from __future__ import annotations

from pathlib import Path

import lint_cases
import pytest

from nki_bn.lint import run_lint
from nki_bn.lint.files import files_of

ROOT = Path(__file__).resolve().parents[1]
FAULTY = lint_cases.EXPRESSIONS["set"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Kernels at two depths; beside them what has none, and what is no source of the folder."""
    for name, text in {
        "b.py": FAULTY,
        "a/kernel.py": FAULTY,
        "a/host.py": "print({1, 2})\n",
        "a/text.md": FAULTY,
        "broken.py": "print(\n",
        ".venv/kernel.py": FAULTY,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "a" / "again").symlink_to(tmp_path)
    return tmp_path


def test_files_with_kernels_are_found_at_any_depth_in_order(folder: Path) -> None:
    assert files_of([folder]) == ([folder / "a/kernel.py", folder / "b.py"], [])


def test_a_folder_is_checked_like_its_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_lint([folder], ("0.6",)) == 1
    said = capsys.readouterr().out
    assert [line.split(":")[0] for line in said.splitlines()] == [f"{folder}/a/kernel.py", f"{folder}/b.py"]
    assert run_lint([folder / "b.py", folder / "a/kernel.py", folder], ("0.6",)) == 1
    assert capsys.readouterr().out == said


@pytest.mark.parametrize(
    ("name", "contents", "reason"),
    [
        ("host.py", b"x = 1\n", "a folder without kernels, accepted are folders with Python files that mention nki"),
        ("kernel.py", b"import nki\n\xff\n", "cannot be read"),
    ],
)
def test_nothing_is_checked_where_a_folder_cannot_be(
    name: str, contents: bytes, reason: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = folder / "other"
    other.mkdir()
    (other / name).write_bytes(contents)
    assert run_lint([folder / "b.py", other], ("0.6",)) == 2
    said = capsys.readouterr()
    path = other / name if name == "kernel.py" else other
    assert not said.out and said.err.startswith(f"nki-bn lint: {path}: {reason}") and said.err.count("\n") == 1


def test_a_file_without_kernels_is_named_and_makes_no_difference(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host = folder / "plain.py"
    host.write_text("x = 1\n")
    assert run_lint([host, host], ("0.6",), as_json=True) == 0
    said = capsys.readouterr()
    assert said.err == f"nki-bn lint: {host}: nothing to check, the file does not mention nki\n"
    assert said.out.strip() == "[]"


def test_the_kernels_of_this_project_are_clean(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_lint([ROOT / "kernels"], ("0.6", "0.7")) == 0
    assert len(files_of([ROOT / "kernels"])[0]) > 20
