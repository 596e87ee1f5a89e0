# SPDX-License-Identifier: Apache-2.0
"""Linting of files and folders named on the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from nki_bn.lint.engine import RULES, TABLES, lint_with
from nki_bn.lint.files import files_of, may_have_kernels
from nki_bn.lint.module import Library
from nki_bn.lint.rule import ERROR, VERSIONS, Finding

CLEAN, ERRORS, WRONG_USE = 0, 1, 2


def run_lint(paths: Sequence[str | Path], versions: Sequence[str], as_json: bool = False) -> int:
    """Check files, print the findings, return an exit code.

    Args:
        paths: Python source files, and folders, which stand for all Python files in them that mention nki.
        versions: NKI versions to check for, of "0.6" and "0.7".
        as_json: print a JSON list of findings instead of lines.

    Returns:
        0 when there are no errors (warnings allowed), 1 when there are, syntax errors included, 2 when a path is not a
        readable Python file, or a folder without any, or a version is unknown (said on stderr, nothing is checked).
        Files that do not mention nki are said on stderr, and make no difference.
    """
    files, wrong = files_of(paths)
    complaints = [*([] if paths else ["PATH: none was given"]), *_wrong_versions(versions), *wrong]
    if complaints:
        print("\n".join(f"nki-bn lint: {_on_a_line(complaint)}" for complaint in complaints), file=sys.stderr)
        return WRONG_USE
    library = Library()
    found = {finding for file in files for finding in lint_with(library, file, versions)}
    findings = sorted(found)
    with_findings = {finding.path for finding in findings}
    for file in dict.fromkeys(files):
        if str(file) not in with_findings and not may_have_kernels(file):
            print(_on_a_line(f"nki-bn lint: {file}: nothing to check, the file does not mention nki"), file=sys.stderr)
    print(json.dumps([asdict(finding) for finding in findings], indent=2) if as_json else _text(findings), end="")
    return ERRORS if any(finding.severity is ERROR for finding in findings) else CLEAN


def explain(code: str) -> int:
    """Print what a rule refuses, how each version takes it, and why; returns 0, or 2 for an unknown code."""
    for table in TABLES:
        for rule in table.rules:
            if rule.code == code:
                taken = ", ".join(f"{version}: {rule.severity(version) or 'ok'}" for version in VERSIONS)
                print(f"{rule.code} {rule.construct} ({table.title})\n{taken}\n{rule.reason}")
                return CLEAN
    codes = ", ".join(sorted(rule.code for rule in RULES))
    print(f"nki-bn lint: error: --explain: got {code!r}; accepted: {codes}", file=sys.stderr)
    return WRONG_USE


def _on_a_line(text: str) -> str:
    """With what would break a line or steer a terminal escaped."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _text(findings: Sequence[Finding]) -> str:
    return "".join(f"{finding}\n" for finding in findings)


def _wrong_versions(versions: Sequence[str]) -> list[str]:
    wrong = [version for version in versions if version not in VERSIONS]
    return [f"version {version!r} is unknown, accepted are {', '.join(VERSIONS)}" for version in wrong]
