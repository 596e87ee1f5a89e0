# SPDX-License-Identifier: Apache-2.0
"""The command line where what it prints cannot be written, or nobody reads it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import bench_rows
import pytest

FULL = Path("/dev/full")
COMMANDS = [
    ["plan", "--shape", "2,3"],
    ["plan", "--shape", "2,3", "--json"],
    ["trace", "--op", "bwd", "--shape", "2,3"],
    ["report", "rows.jsonl"],
    ["compare", "rows.jsonl", "rows.jsonl"],
    ["bench", "shapes.toml", "--batch", "2", "--dry", "--strategy", "staged"],
    ["lint", "--explain", "NKI201"],
    ["--help"],
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text(bench_rows.record().to_json() + "\n")
    (tmp_path / "shapes.toml").write_text('model = "net"\n[[layer]]\nchannels = 3\nspatial = [2]\ncount = 1\n')
    return tmp_path


def run(argv: list[str], output: int | None, folder: Path, buffered: bool = True) -> tuple[int, str]:
    """Exit code and standard error, with standard output there."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    options = [] if buffered else ["-u"]
    command = [sys.executable, "-P", *options, "-m", "nki_bn.cli", *argv]
    if output is None:
        command = ["sh", "-c", '"$@" >&-', "sh", *command]
    done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, cwd=folder, env=environment)
    return done.returncode, done.stderr


@pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize(("argv", "buffered"), [*((argv, True) for argv in COMMANDS), (COMMANDS[0], False)])
def test_a_full_device_is_one_line(argv: list[str], buffered: bool, folder: Path) -> None:
    with FULL.open("w") as full:
        code, said = run(argv, full.fileno(), folder, buffered)
    assert code == 2 and said == "nki-bn: error: output cannot be written: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("argv", COMMANDS, ids=" ".join)
def test_a_reader_that_has_gone_is_no_error(argv: list[str], folder: Path) -> None:
    """The code is that of a process which the signal has ended, so that it stands for no verdict."""
    reading, writing = os.pipe()
    os.close(reading)
    code, said = run(argv, writing, folder)
    os.close(writing)
    assert (code, said) == (141, "")


def test_a_closed_output_is_one_line(folder: Path) -> None:
    assert run(COMMANDS[0], None, folder) == (2, "nki-bn: error: standard output is closed\n")
