# SPDX-License-Identifier: Apache-2.0
"""TOML files that are lists of tables, with errors that name file, line and key."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

# Of sizes and counts: refused here, where the line is known, and not when a shape is made of them.
_LARGEST = 2**31 - 1


@dataclass(frozen=True)
class TomlFile:
    """A file that has been read: the name to show, the text, and the contents."""

    name: str
    text: str
    data: dict[str, Any]

    def error(self, message: str, table: str = "", index: int = 0, key: str = "") -> ValueError:
        """An error about ``key`` (or all) of table number ``index`` of the list ``table``, or of the file's head."""
        where = f"{table}[{index}]" if table else ""
        path = ".".join(part for part in (where, key) if part)
        return ValueError(f"{self.name}:{self._line(table, index, key)}: {path} {message}")

    def _line(self, table: str, index: int, key: str) -> int:
        """The line on which the key stands, else that of its table, else the first."""
        lines = self.text.splitlines()
        headers = [number for number, line in enumerate(lines, 1) if line.strip().startswith("[")]
        own = [number for number in headers if re.match(rf"\s*\[\[\s*{table}\s*\]\]", lines[number - 1])]
        if table and index >= len(own):
            return 1  # not written as [[table]]
        start = own[index] if table else 0
        end = min((number for number in headers if number > start), default=len(lines) + 1)
        assigned = re.compile(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=")
        return next((n for n in range(start + 1, end) if key and assigned.match(lines[n - 1])), max(start, 1))

    def tables(
        self, name: str, head: Collection[str], required: Collection[str], optional: Collection[str] = ()
    ) -> list[Table]:
        """The list of tables ``name``, at least one; the head of the file must have the keys ``head`` and no other."""
        _check_keys(self, self.data, {*head, name}, (), lambda key, message: self.error(message, key=key))
        found = self.data[name]
        if not isinstance(found, list) or not found or not all(isinstance(entry, dict) for entry in found):
            raise self.error(f"is {found!r}; accepted: one or more tables [[{name}]]", key=name)
        made = [Table(self, name, index, entry) for index, entry in enumerate(found)]
        for table in made:
            _check_keys(self, table.values, required, optional, table.error)
        return made


@dataclass(frozen=True)
class Table:
    """One table of a list in a file."""

    file: TomlFile
    name: str
    index: int
    values: dict[str, Any]

    def error(self, key: str, message: str) -> ValueError:
        """An error about a key."""
        return self.file.error(message, self.name, self.index, key)

    def integer(self, key: str) -> int:
        """A number from 1 up, that fits into 32 bits."""
        return self._whole(key, self.values[key])

    def integers(self, key: str, accepted: Collection[int] | None = None, least: int = 0) -> tuple[int, ...]:
        """A list of such numbers, of those ``accepted``, ``least`` of them or more."""
        found = tuple(self._whole(key, value) for value in self._list(key))
        if len(found) < least:
            raise self.error(key, f"has {len(found)} numbers; accepted: {least} or more")
        for value in found:
            if accepted is not None and value not in accepted:
                raise self.error(key, f"has {value}; accepted: {', '.join(map(str, accepted))}")
        return found

    def names(self, key: str, accepted: Collection[str], paths: bool = False) -> tuple[str, ...]:
        """A list of strings, at least one, of those ``accepted``; with ``paths`` also any that ends in .toml."""
        found = self._list(key)
        if not found:
            raise self.error(key, "is empty; accepted: one or more names")
        for value in found:
            is_path = paths and isinstance(value, str) and value.endswith(".toml")
            if value not in list(accepted) and not is_path:
                more = " and paths that end in .toml" if paths else ""
                raise self.error(key, f"has {value!r}; accepted: {', '.join(accepted)}{more}")
        return tuple(found)

    def _list(self, key: str) -> list[Any]:
        found = self.values[key]
        if not isinstance(found, list):
            raise self.error(key, f"is {found!r}; accepted: a list")
        return found

    def _whole(self, key: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST:
            raise self.error(key, f"has {value!r}; accepted: integers from 1 to {_LARGEST}")
        return value


def read_toml(source: Any, name: str) -> TomlFile:
    """The TOML file ``source`` (anything with ``read_text``), called ``name`` in errors.

    Raises:
        ValueError: it cannot be read, or is not TOML; names the file and, where that is known, the line.
    """
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name} cannot be read: {error}") from error
    try:
        return TomlFile(name, text, tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        number = line[1] if line else str(len(text.splitlines()))
        raise ValueError(f"{name}:{number}: {error}") from error
    except (ValueError, RecursionError) as error:  # a number of too many digits, values nested too deeply
        raise ValueError(f"{name} cannot be read: {error}") from error


def bundled(folder: str) -> list[str]:
    """The names of the TOML files of this kind that come with the package, without their suffix."""
    found = resources.files("nki_bn.configs").joinpath(folder).iterdir()
    return sorted(Path(entry.name).stem for entry in found if entry.name.endswith(".toml"))


def read_bundled(folder: str, name: str) -> TomlFile:
    """One of the files that come with the package."""
    source = resources.files("nki_bn.configs").joinpath(folder, f"{name}.toml")
    return read_toml(source, f"{folder}/{name}.toml")


def _check_keys(
    file: TomlFile,
    table: dict[str, Any],
    required: Collection[str],
    optional: Collection[str],
    error: Callable[[str, str], ValueError],
) -> None:
    for key in table:
        if key not in {*required, *optional}:
            raise error(key, f"is unknown; accepted: {', '.join([*required, *optional])}")
    for key in required:
        if key not in table:
            raise error(key, "is missing")
