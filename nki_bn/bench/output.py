# SPDX-License-Identifier: Apache-2.0
"""Files that commands write: whole or not at all, and only where a regular file is or can be."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def output_path(path: Path) -> Path:
    """The file that ``path`` leads to, links followed.

    Raises:
        ValueError: it is there and no regular file (a folder, device or pipe), or it cannot be written.
    """
    try:
        target = path.resolve()
        if target.exists() and not target.is_file():
            raise ValueError(f"{path} is no regular file; accepted: a new path, or that of a regular file")
        writable = os.access(target, os.W_OK) if target.exists() else True
    except (OSError, RuntimeError) as error:  # the latter is a circle of links
        raise ValueError(f"{path} cannot be written: {error}") from error
    if not target.parent.is_dir():
        raise ValueError(f"{path} cannot be written: {target.parent} is no folder")
    if not writable or not os.access(target.parent, os.W_OK):
        raise ValueError(f"{path} cannot be written: no permission to write it and to its folder")
    return target


def write_whole(path: Path, text: str) -> None:
    """Make the file hold ``text``; whatever happens, the old contents or the new ones are there, and nothing beside.

    Raises:
        ValueError: see :func:`output_path`.
        OSError: writing failed.
    """
    target = output_path(path)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=target.parent, suffix=".part", delete=False) as file:
        try:
            file.write(text)
            file.close()
            os.chmod(file.name, _mode(target))
            os.replace(file.name, target)
        except BaseException:
            os.unlink(file.name)
            raise


def _mode(target: Path) -> int:
    """The permissions of the file, or those of a new one: temporary files are closed to others."""
    if target.exists():
        return stat.S_IMODE(target.stat().st_mode)
    mask = os.umask(0o077)
    os.umask(mask)
    return 0o666 & ~mask
