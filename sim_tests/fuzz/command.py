# SPDX-License-Identifier: Apache-2.0
"""The command line: good and odd arguments, files that are there, missing, broken or no files."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import shlex
import shutil
import tempfile
import warnings
import xml.etree.ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bench_rows
from hypothesis import strategies as st

from fuzz.odd import NUMBERS, WORDS
from fuzz.readers import SHAPES, SWEEP, array_file, kernel_source
from fuzz.surface import Surface
from nki_bn.bench.rows import read_records
from nki_bn.cli import COMMANDS, main

ODD = (*NUMBERS, *WORDS, "\udcff", "@x", "--x=1", "-x", "n" * 300, "1,2,", ",", "2,3,4,5,6,7", "0,0", "3,0", "1,-1")
# What lies in the current folder of every run, beside what it writes itself.
FILES: dict[str, bytes] = {
    "shapes.toml": SHAPES.encode(),
    "sweep.toml": SWEEP.replace('"mlp"', '"shapes.toml"').encode(),
    "bad.toml": b"layer = 1\n",
    "rows.jsonl": (bench_rows.record().to_json() + "\n" + bench_rows.record(None, layer="5").to_json() + "\n").encode(),
    "more.jsonl": (bench_rows.record(20.0).to_json() + "\n").encode(),
    "cut.jsonl": bench_rows.record().to_json()[:-40].encode(),
    "bytes.jsonl": b"\xff\x00",
    "empty.jsonl": b"",
    "kernel.py": kernel_source(),
    "bad.py": b"import nki\n@nki.jit\ndef k(*x):\n    raise x\n",
    "bytes.py": b"\xff\x00",
    "in.npz": array_file(),
    "cut.npz": array_file()[:-100],
}
PATHS = (*FILES, "missing.jsonl", "missing.py", "missing.toml", "folder", "no/where.json", "/dev", ".", "link.jsonl")
OUTPUTS = ("out.json", "out.svg", "out.jsonl", "out.md", "out.csv", "out.html", "rows.jsonl", "cut.jsonl", "no/out.md")
SHAPES_OF_X = ("2,3,4", "1,1", "2,1", "4,130,3,3", "3,5,2,2,2", "1,200", "0,3,4", "2,3,0")
LARGE = (
    "64,64,1000,1000",
    "1,1000000,64",
    "100000,100000",
    "2147483648,3,4",
    "3,4,1000000000",
    "9,9,9,9999999999999",
)


def _values(name: str) -> tuple[str, ...]:
    dtypes, numbers = ("float32", "float16", "bfloat16"), ("1", "2", "1,2")
    known: dict[str, tuple[str, ...]] = {
        "--shape": SHAPES_OF_X,
        "--large": LARGE,
        "--dtype": (*dtypes, "float32,bfloat16"),
        "--op": ("bwd", "fwd", "eval", "pair", "bwd,eval"),
        "--fuse-relu": ("mask", "recompute", "none"),
        "--precision": ("high", "fast"),
        "--target": ("trn1", "trn2", "trn3", "gen3"),
        "--numerics": ("trn2", "ideal"),
        "--lnc": numbers,
        "--batch": numbers,
        "--replicas": ("2", "8", "1"),
        "--sync-mode": ("one_round", "two_round"),
        "--strategy": ("planned", "staged", "two_read", "resident", "staged,planned"),
        "--baseline": ("staged", "two_read", "planned"),
        "--threshold": ("3%", "0%", "1.5 %"),
        "--mean": ("0", "1e3", "-2.5"),
        "--std": ("1", "0", "1e-3", "50"),
        "--seed": ("0", "7", "4294967296"),
        "--eps": ("1e-5", "0", "1e-3"),
        "--nki": ("0.6", "0.7", "both"),
        "--explain": ("NKI201", "NKI999"),
        "-o": OUTPUTS,
        "--picture": OUTPUTS,
        "--input": PATHS,
    }
    return known[name]


# What a complaint says beside the argument: what is accepted, or what is wrong with a file or with the options as such.
SAYS = re.compile(
    r"accepted|choose from|are required|expected|unrecognized arguments|not allowed with|ambiguous option|is unknown"
    r"|cannot be (read|written)( as a .npz file)?: |no such file|:\d+: |has no timing|: PATH: none was given"
)
# Per command: options with a value, flags, and how many files or names come without an option.
OPTIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[int, int]]] = {
    "doctor": ((), (), (0, 0)),
    "verify": (
        ("--op", "--shape", "--dtype", "--mean", "--std", "--seed", "--input", "--eps", "--fuse-relu", "--precision")
        + ("--lnc", "--target", "--numerics"),
        ("--residual", "--training", "--eval", "--json"),
        (0, 0),
    ),
    "plan": (
        ("--op", "--shape", "--dtype", "--fuse-relu", "--precision", "--lnc", "--target", "--large"),
        ("--residual", "--training", "--eval", "--explain", "--json"),
        (0, 0),
    ),
    "trace": (("--op", "--shape", "--dtype", "--lnc", "--fuse-relu", "-o", "--picture"), ("--force",), (0, 0)),
    "bench": (
        ("--op", "--dtype", "--batch", "--lnc", "--strategy", "--fuse-relu", "--precision", "--target", "--replicas")
        + ("--sync-mode", "-o"),
        ("--dry", "--force", "--resume"),
        (1, 1),
    ),
    "report": (("-o", "--baseline"), ("--force",), (1, 1)),
    "compare": (("--threshold",), ("--all",), (2, 2)),
    "lint": (("--nki", "--explain"), ("--json",), (1, 2)),
}
_NEEDED = {"verify": ("--op", "--shape"), "plan": ("--shape",), "trace": ("--op", "--shape"), "bench": ("--batch",)}
_NAMES = {"bench": ("shapes.toml", "shapes.toml", "sweep.toml", "bad.toml", "missing.toml", "mlp2", "folder")}
# What a careful user passes, where that is less than _values, _NAMES and the flags have.
_CAREFUL: dict[tuple[str, str], tuple[str, ...]] = {
    ("bench", ""): ("shapes.toml", "sweep.toml"),
    ("bench", "-o"): ("out.jsonl",),
    ("bench", "--op"): ("bwd", "fwd", "eval", "bwd,eval"),
    ("bench", "--target"): ("trn2", "trn3"),
    ("compare", ""): ("rows.jsonl", "more.jsonl"),
    ("lint", ""): ("kernel.py", "bad.py"),
    ("lint", "--explain"): ("NKI201",),
    ("plan", "--op"): ("bwd", "fwd", "eval"),
    ("report", ""): ("rows.jsonl", "more.jsonl"),
    ("report", "-o"): ("out.md", "out.csv", "out.html"),
    ("trace", "-o"): ("out.json",),
    ("trace", "--op"): ("bwd", "fwd"),
    ("trace", "--picture"): ("out.svg",),
    ("verify", "--input"): ("in.npz",),
    ("verify", "--op"): ("bwd", "fwd", "eval", "pair"),
}
_ONE_NUMBER, _ONE_DTYPE, _RELU = ("1", "2"), ("float32", "float16", "bfloat16"), ("mask", "recompute")
for _command in ("plan", "trace", "verify"):
    _CAREFUL |= {(_command, "--dtype"): _ONE_DTYPE, (_command, "--lnc"): _ONE_NUMBER, (_command, "--fuse-relu"): _RELU}
    _CAREFUL |= {(_command, "--target"): ("trn1", "trn2", "trn3")}


@st.composite
def arguments(draw: st.DrawFn) -> list[str]:
    """A command with options; half of the commands by a careful user.

    The others have odd values, options twice, missing, or of another command.
    """
    command = draw(st.sampled_from([name for name in OPTIONS if name != "doctor"] * 8 + ["doctor"]))
    careful = draw(st.booleans())
    valued, flags, (least, most) = OPTIONS[command]
    chosen = draw(st.lists(st.sampled_from(valued), max_size=3 if careful else 5, unique=True)) if valued else []
    needed = [name for name in _NEEDED.get(command, ()) if name not in chosen]
    made: list[str] = []
    for name in (*(needed if careful or draw(st.integers(0, 9)) else []), *chosen):
        value = _value(draw, command, name, careful)
        made += ["--shape" if name == "--large" else name, value]
    made += draw(st.lists(st.sampled_from(flags), max_size=1 if careful else 2)) if flags else []
    pool = _CAREFUL.get((command, ""), ()) if careful else _NAMES.get(command, PATHS)
    names = draw(st.lists(st.sampled_from(pool), min_size=least, max_size=most)) if pool else []
    if not careful and not draw(st.integers(0, 14)):
        names = draw(st.lists(st.sampled_from([*PATHS, *ODD]), max_size=3))
    return [command, *names, *made]


def _value(draw: st.DrawFn, command: str, name: str, careful: bool) -> str:
    if not careful:
        return draw(st.sampled_from(ODD if not draw(st.integers(0, 9)) else _values(name)))
    if name in ("--shape", "--large") and draw(st.booleans()):
        sizes = draw(_sizes(name == "--large" or command == "plan"))
        return ",".join(map(str, sizes))
    return draw(st.sampled_from(_CAREFUL.get((command, name), _values(name))))


@st.composite
def _sizes(draw: st.DrawFn, large: bool) -> list[int]:
    """A shape, of few values or, if it is large, of any number up to some 2^36, each power of two as often."""
    rank, left = draw(st.integers(2, 5)), draw(st.integers(0, 36)) if large else 12
    sizes = []
    for _ in range(rank):
        power = draw(st.integers(0, min(left, 20 if large else 8)))
        left -= power
        sizes.append(draw(st.integers(1 << power, (2 << power) - 1)))
    return draw(st.permutations(sizes))


class _Stream(io.TextIOWrapper):
    """Standard output or error that keeps what is written, in UTF-8 as strictly as the real ones."""

    def __init__(self, errors: str) -> None:
        super().__init__(io.BytesIO(), "utf-8", errors)

    def text(self) -> str:
        self.flush()
        self.seek(0)
        return self.read()


def check_arguments(example: list[str]) -> None:
    """Run a command in a folder with ``FILES``: its exit code, what it says, and the files that it leaves."""
    with _folder() as folder:
        code, said, complained = run(example)
        written = {path: (folder / path).read_bytes() for path in os.listdir(folder) if (folder / path).is_file()}
    assert code in (0, 1, 2), code
    if code == 2:
        assert not said and complained.endswith("\n") and SAYS.search(complained), (said, complained)
        assert example[:1] == ["lint"] or complained.count("\n") == 1, complained
    else:
        assert not complained, complained
        _check_output(example, said)
    if example[0] == "verify" and "in.npz" not in example:
        assert code != 1, said
    _check_files(written, example, code)


def run(example: list[str]) -> tuple[Any, str, str]:
    """The exit code of a command, and what it wrote to standard output and standard error."""
    said, complained = _Stream("strict"), _Stream("backslashreplace")
    # Warnings that were given before are given again: an example does not depend on those before it.
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained), warnings.catch_warnings():
        try:
            code: Any = main(example)
        except SystemExit as left:
            code = left.code
    return code, said.text(), complained.text()


@functools.cache
def _template() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="fuzz"))
    for name, contents in FILES.items():
        (folder / name).write_bytes(contents)
    (folder / "folder").mkdir()
    (folder / "link.jsonl").symlink_to("link.jsonl")
    return folder


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A fresh current folder."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(shutil.copytree(_template(), Path(parent) / "here", symlinks=True))
        os.chdir(folder)
        try:
            yield folder
        finally:
            os.chdir(before)


def _check_output(example: list[str], said: str) -> None:
    assert said.strip() or example[0] in ("lint", "report"), "nothing is said"
    if "--json" in example and not any(item in example for item in ("--explain", "-h", "--help")):
        json.loads(said, parse_constant=_refuse)


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def _check_files(written: dict[str, bytes], example: list[str], code: Any) -> None:
    """What was there is there; what is new is whole; a refused command has written nothing."""
    for name, contents in written.items():
        if FILES.get(name) == contents:
            continue
        assert code != 2, f"{name} was written"
        assert name in example, name
        text = contents.decode()
        if example[0] == "bench":
            assert read_records(_saved(text))
        elif name.endswith(".json"):
            json.loads(text, parse_constant=_refuse)
        elif name.endswith(".svg"):
            xml.etree.ElementTree.fromstring(text)
        else:
            assert text.endswith("\n")
    assert FILES.keys() <= written.keys()


def _saved(text: str) -> Path:
    path = _template().with_suffix(".jsonl")
    path.write_text(text, encoding="utf-8")
    return path


def command_line(example: list[str]) -> str:
    """A command as a shell takes it; what has one character very often is shortened, for bash."""
    return " ".join(["nki-bn", *map(_word, example)])


def _word(text: str) -> str:
    if len(text) < 100 or len(set(text)) > 1:
        return shlex.quote(text)
    return f'"$(printf {shlex.quote(text[0])}%.0s {{1..{len(text)}}})"'


assert OPTIONS.keys() == COMMANDS.keys()
SURFACE = Surface(arguments(), check_arguments, command_line)
