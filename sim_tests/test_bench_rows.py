# SPDX-License-Identifier: Apache-2.0
"""Files of records: what is written is read, faults are named, a crash costs one line at most."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from bench_rows import case, measured, record

from nki_bn.bench.record import Record, record_from
from nki_bn.bench.rows import RowFile, read_records

ISSUED = (
    "model",
    "layer",
    "count",
    "op",
    "shape",
    "dtype",
    "lnc",
    "target",
    "strategy",
    "plan",
    "instructions",
    "modelled_us",
    "roofline_us",
    "roofline_share",
    "hbm_bytes",
    "hbm_bytes_min",
    "bound_by",
    "engine_busy_us",
    "sbuf_high_water",
    "version",
    "environment",
)


def write(path: Path, *records: Record, rest: str = "") -> Path:
    path.write_text("".join(r.to_json() + "\n" for r in records) + rest, encoding="utf-8")
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    rows = [record(), record(None, layer="5"), record(2.0, layer="6", shape=(2, 6))]
    assert read_records(write(tmp_path / "a.jsonl", *rows)) == rows
    assert set(ISSUED) <= set(json.loads(rows[0].to_json()))
    assert rows[0].case == case() and rows[0].time_us == 10.0 and measured(3.0).time_us == 3.0
    with pytest.raises(ValueError, match="net 5 staged has no time: ValueError: no"):
        _ = rows[1].time_us


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("count", "2", "count is '2'; accepted: an integer"),
        ("count", 0, "count is 0; accepted: numbers above 0"),
        ("count", True, "count is True; accepted: an integer"),
        ("shape", [2, "3"], "shape is .*; accepted: a list of integers"),
        ("shape", 3, "shape is 3; accepted: a list of integers"),
        ("op", "back", "op is 'back'; accepted: bwd, fwd, eval"),
        ("timing", "guessed", "timing is 'guessed'; accepted: modelled, measured"),
        ("modelled_us", "fast", "modelled_us is 'fast'; accepted: a number or null"),
        ("modelled_us", 0, "modelled_us is 0; accepted: numbers above 0"),
        ("modelled_us", None, "modelled_us is None; accepted with status 'ok': a value"),
        ("modelled_us", 10**400, "modelled_us is 1000"),
        ("status", "failed", "error is None; accepted with status 'failed'"),
        ("engine_busy_us", {"vector.0": "x"}, "engine_busy_us is .*; accepted: an object, each value a number or null"),
        ("environment", ["linux"], "environment is .*; accepted: an object, each value a string"),
        ("plan", 3, "plan is 3; accepted: an object or null"),
        ("extra", 1, "extra is unknown"),
    ],
)
def test_a_wrong_key_is_named(tmp_path: Path, key: str, value: Any, message: str) -> None:
    path = write(tmp_path / "a.jsonl", record())
    wrong = json.loads(record(layer="5").to_json()) | {key: value}
    path.write_text(path.read_text() + json.dumps(wrong) + "\n")
    with pytest.raises(ValueError, match=f"a.jsonl:2: {message}"):
        read_records(path)


def test_a_missing_key_is_named() -> None:
    row = json.loads(record().to_json())
    del row["roofline_us"]
    with pytest.raises(ValueError, match="roofline_us is missing"):
        record_from(row)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"model": \n', "a.jsonl:2: is no JSON: .* at column"),
        ("\n", "a.jsonl:2: is no JSON"),
        ("[1, 2]\n", "a.jsonl:2: is list; accepted: an object"),
        ('{"model": NaN}\n', "a.jsonl:2: has NaN; accepted: finite numbers"),
        ("[" * 100_000 + "\n", "a.jsonl:2: "),
        ('{"model": "n', "a.jsonl:2: the line is cut off; .* --resume"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_records(write(tmp_path / "a.jsonl", record(), rest=line))


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="absent.jsonl cannot be read"):
        read_records(tmp_path / "absent.jsonl")
    with pytest.raises(ValueError, match="a.jsonl is empty"):
        read_records(write(tmp_path / "a.jsonl"))
    with pytest.raises(ValueError, match="a.jsonl:2: the case is that of line 1"):
        read_records(write(tmp_path / "a.jsonl", record(), record(20.0)))
    with pytest.raises(ValueError, match="a.jsonl mixes measured and modelled rows"):
        read_records(write(tmp_path / "a.jsonl", record(), measured(3.0, layer="5")))


def test_an_existing_file_is_kept_unless_asked(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", record())
    with pytest.raises(ValueError, match="a.jsonl exists; accepted: another path, or --force .*, --resume"):
        RowFile(path, "modelled")
    assert read_records(path) == [record()]
    with RowFile(path, "modelled", force=True) as file:
        assert file.kept == []
        file.write(record(2.0))
    assert read_records(path) == [record(2.0)]


def test_rows_are_in_the_file_as_soon_as_they_are_written(tmp_path: Path) -> None:
    with RowFile(tmp_path / "a.jsonl", "modelled") as file:
        file.write(record())
        assert read_records(tmp_path / "a.jsonl") == [record()]


def test_resuming_keeps_the_good_lines(tmp_path: Path) -> None:
    """A failed case and a line that was cut off are dropped: both are to be run again."""
    good, failed = record(), record(None, layer="5")
    path = write(tmp_path / "a.jsonl", good, failed, rest=record(layer="6").to_json()[:-20])
    with RowFile(path, "modelled", resume=True) as file:
        assert file.kept == [good]
        file.write(record(layer="6"))
    assert read_records(path) == [good, record(layer="6")]


def test_a_last_line_that_only_lacks_its_end_is_good(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", rest=record().to_json())
    assert read_records(path) == [record()]
    with RowFile(path, "modelled", resume=True) as file:
        file.write(record(layer="5"))
    assert read_records(path) == [record(), record(layer="5")]


def test_resuming_what_does_not_exist_starts_it(tmp_path: Path) -> None:
    with RowFile(tmp_path / "a.jsonl", "modelled", resume=True) as file:
        assert file.kept == []


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (record(version="0.0.1"), "a.jsonl:1: version is '0.0.1'; accepted when resumed now"),
        (measured(3.0), "a.jsonl:1: timing is 'measured'; accepted when resumed now: 'modelled'"),
    ],
)
def test_resuming_does_not_mix(tmp_path: Path, row: Record, message: str) -> None:
    path = write(tmp_path / "a.jsonl", row)
    with pytest.raises(ValueError, match=message):
        RowFile(path, "modelled", resume=True)
    assert read_records(path) == [row]


def test_resuming_refuses_a_fault_that_no_crash_makes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", rest="{}\n")
    with pytest.raises(ValueError, match="a.jsonl:1: model is missing"):
        RowFile(path, "modelled", resume=True)
    assert path.read_text() == "{}\n"


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a.jsonl cannot be written"):
        RowFile(tmp_path / "absent" / "a.jsonl", "modelled")


@pytest.mark.parametrize("options", [{}, {"force": True}, {"resume": True}], ids=str)
def test_only_regular_files_are_replaced(tmp_path: Path, options: dict[str, bool]) -> None:
    folder, pipe, link = tmp_path / "folder", tmp_path / "pipe", tmp_path / "link"
    folder.mkdir()
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (folder, pipe, link):
        with pytest.raises(ValueError, match=f"{path.name} is no regular file; accepted: a new path, or that of a"):
            RowFile(path, "modelled", **options)
    assert folder.is_dir() and pipe.is_fifo() and link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "link", "pipe"]


def test_a_circle_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(ValueError, match="a cannot be written: "):
        RowFile(tmp_path / "a", "modelled", force=True)


def test_links_are_followed_and_neighbours_kept(tmp_path: Path) -> None:
    target, link, part = tmp_path / "a.jsonl", tmp_path / "link.jsonl", tmp_path / "link.jsonl.part"
    link.symlink_to(target)
    part.write_text("mine")
    for number in range(2):  # a link to nothing, then to a file, whose permissions stay
        with RowFile(link, "modelled", force=True) as file:
            file.write(record(1.0 + number))
        assert link.is_symlink() and read_records(target) == [record(1.0 + number)]
        assert part.read_text() == "mine" and len(list(tmp_path.iterdir())) == 3
        assert target.stat().st_mode & 0o777 == (0o640 if number else 0o666 & ~_umask())
        target.chmod(0o640)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def test_a_failed_replacement_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError("no space")

    path = write(tmp_path / "a.jsonl", record())
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(ValueError, match="a.jsonl cannot be written: no space"):
        RowFile(path, "modelled", force=True)
    assert read_records(path) == [record()] and list(tmp_path.iterdir()) == [path]
