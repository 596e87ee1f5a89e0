# SPDX-License-Identifier: Apache-2.0
"""JSONL files of records: reading them with their faults named, writing them so that a crash costs one line at most."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, NoReturn

from nki_bn import __version__
from nki_bn.bench.output import output_path, write_whole
from nki_bn.bench.record import Case, Record, record_from


def read_records(path: Path) -> list[Record]:
    """All records of a file, at least one, each case once, all modelled or all measured.

    Raises:
        ValueError: it cannot be read or is malformed, its last line is cut off, it is empty, two rows are of the same
            case, or it has rows of both kinds; names file, line and key.
    """
    records, cut = _parse(path)
    if cut:
        raise ValueError(f"{path}:{len(records) + 1}: the line is cut off; `bench --resume` drops it and goes on")
    if not records:
        raise ValueError(f"{path} is empty; accepted: one or more rows of `nki-bn bench -o`")
    timing_of(records, str(path))
    return records


def timing_of(records: Sequence[Record], name: str) -> str:
    """Where the times of these records come from: all modelled, or all measured.

    Raises:
        ValueError: there are both.
    """
    kinds = sorted({record.timing for record in records})
    if len(kinds) > 1:
        raise ValueError(f"{name} mixes {' and '.join(kinds)} rows; accepted: one kind")
    return kinds[0]


def _parse(path: Path) -> tuple[list[Record], bool]:
    """The records, and whether the last line is cut off (it does not end, and is no record)."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    lines = text.split("\n")
    ended = lines[-1] == ""
    if ended:
        lines.pop()
    records: list[Record] = []
    seen: dict[Case, int] = {}
    for number, line in enumerate(lines, 1):
        try:
            record = record_from(json.loads(line, parse_constant=_refuse_constant))
        except json.JSONDecodeError as error:
            if number == len(lines) and not ended:
                return records, True
            raise ValueError(f"{path}:{number}: is no JSON: {error.msg} at column {error.colno}") from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}:{number}: {error}") from error
        if record.case in seen:
            raise ValueError(f"{path}:{number}: the case is that of line {seen[record.case]}; accepted: one row a case")
        seen[record.case] = number
        records.append(record)
    return records, False


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"has {name}; accepted: finite numbers")


def refuse_existing(path: Path, options: str) -> None:
    """Refuse to overwrite a file.

    Raises:
        ValueError: it exists; ``options`` are those that would allow it.
    """
    if path.exists():
        raise ValueError(f"{path} exists; accepted: another path, or {options}")


class RowFile:
    """A JSONL file that a sweep writes, one flushed line per record; a context manager.

    ``kept`` has the records that are in it already, when it is resumed.
    """

    def __init__(self, path: Path, timing: str, force: bool = False, resume: bool = False) -> None:
        """Open ``path``, which must not exist, unless ``force`` (overwrite it) or ``resume`` (keep what is good).

        Resuming drops a last line that was cut off and the rows of failed cases, which are run again. What is kept must
        be of this version and of ``timing``: "modelled" or "measured".

        Raises:
            ValueError: the file exists, is no regular file, cannot be written or, to be resumed, is malformed elsewhere
                or of another kind.
        """
        target = output_path(path)
        if not (force or resume):
            refuse_existing(path, "--force to overwrite it, --resume to go on with it")
        records = _parse(path)[0] if resume and path.exists() else []
        for number, record in enumerate(records, 1):
            _check_same(record, {"timing": timing, "version": __version__}, f"{path}:{number}")
        self.kept = [record for record in records if record.ok]
        try:
            write_whole(target, "".join(record.to_json() + "\n" for record in self.kept))
            self._file: IO[str] = target.open("a", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {error}") from error

    def write(self, record: Record) -> None:
        """Add a record."""
        self._file.write(record.to_json() + "\n")
        self._file.flush()

    def __enter__(self) -> RowFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _check_same(record: Record, wanted: dict[str, str], place: str) -> None:
    for key, value in wanted.items():
        if getattr(record, key) != value:
            raise ValueError(f"{place}: {key} is {getattr(record, key)!r}; accepted when resumed now: {value!r}")
