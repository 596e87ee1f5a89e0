# SPDX-License-Identifier: Apache-2.0
"""From the paths on a command line to the files to lint, and what is wrong with them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from nki_bn.lint.module import read_source

# What a file says that has a kernel, or parts of one.
_NKI = re.compile(rb"\bnki\b")


def files_of(paths: Sequence[str | Path]) -> tuple[list[Path], list[str]]:
    """The files to lint, and a line for each path that cannot be.

    A folder stands for the Python files in it that mention nki, in sorted order. Folders in it whose names start with a
    dot are left out, and links to folders are not followed.
    """
    files: list[Path] = []
    complaints: list[str] = []
    for path in map(Path, paths):
        found, wrong = _in_folder(path) if os.path.isdir(path) else ([path], [])
        files += found
        complaints += wrong
    return files, complaints + [f"{file}: {reason}" for file in files if (reason := _complaint(file))]


def _in_folder(folder: Path) -> tuple[list[Path], list[str]]:
    found: list[Path] = []
    unread: list[OSError] = []
    for parent, folders, names in os.walk(folder, onerror=unread.append):
        folders[:] = [name for name in folders if not name.startswith(".")]
        python = (Path(parent, name) for name in names if name.endswith(".py"))
        found += [path for path in python if may_have_kernels(path)]
    complaints = [f"{error.filename}: cannot be read: {error.strerror}" for error in unread]
    if not found and not complaints:
        complaints = [f"{folder}: a folder without kernels, accepted are folders with Python files that mention nki"]
    return sorted(found), complaints


def may_have_kernels(path: Path) -> bool:
    """Whether a file mentions nki; one that cannot be read is not passed over."""
    try:
        return os.path.isfile(path) and _NKI.search(path.read_bytes()) is not None
    except OSError:
        return True


def _complaint(path: Path) -> str:
    """Why a file cannot be linted, '' when it can."""
    if not os.path.isfile(path):
        return "not a regular file, accepted are files and folders" if os.path.exists(path) else "no such file"
    if path.suffix != ".py":
        return f"not a Python file, accepted is the suffix .py and not {path.suffix!r}"
    try:
        read_source(path)
    except (OSError, UnicodeDecodeError, SyntaxError) as error:  # the last is an unknown encoding
        return f"cannot be read: {error}"
    return ""
