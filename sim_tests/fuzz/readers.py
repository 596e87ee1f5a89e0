# SPDX-License-Identifier: Apache-2.0
"""Files that are read: shapes, sweeps, rows, hardware parameters, arrays and sources, tampered with."""

from __future__ import annotations

import io
import json
import os
import tempfile
import tomllib
import warnings
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import bench_rows
import numpy as np
from hypothesis import strategies as st

from fuzz.odd import NUMBERS, WORDS, spliced
from fuzz.surface import Surface
from nki_bn import cases, hardware, lint
from nki_bn.bench import grids, report, rows, workloads
from nki_bn.bench.compare import compare
from nki_bn.bench.roofline import roofline_us
from nki_bn.bench.strategies import problem_of

# More cases than this are no longer small.
MOST_CASES = 2000


def check_file(example: tuple[str, bytes]) -> None:
    """Read a file of a kind: it is right, or refused by a ValueError that begins with its name."""
    kind, contents = example
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"file.{SUFFIXES[kind]}"
        path.write_bytes(contents)
        try:
            READERS[kind](path)
        except ValueError as error:
            if not str(error).startswith(str(path)):
                raise
        assert os.listdir(folder) == [path.name]


def _read_shapes(path: Path) -> None:
    model = workloads.load_model(str(path))
    assert model.name and model.layers
    for layer in model.layers:
        assert layer.channels > 0 and layer.count > 0 and all(size > 0 for size in layer.spatial)
    assert len({layer.name for layer in model.layers}) == len(model.layers)


def _read_sweep(path: Path) -> None:
    if not grids.is_sweep(str(path)):
        return
    found = grids.load_sweep(str(path))
    paths = [name for grid in found for name in grid.models if name.endswith(".toml")]
    if paths:
        return
    for case in grids.all_cases(found)[:MOST_CASES]:
        assert roofline_us(problem_of(case)) > 0


def _read_rows(path: Path) -> None:
    before = path.read_bytes()
    try:
        _resume(path)
    except ValueError:
        assert path.read_bytes() == before
        raise
    finally:
        path.write_bytes(before)
    records = rows.read_records(path)
    comparison = compare(records, records, 0.0)
    assert not comparison.regressed and comparison.text(everything=True)
    for record in records:
        assert json.loads(record.to_json()) and rows.record_from(json.loads(record.to_json())) == record
    strategy = records[0].strategy
    for make in (lambda: report.markdown(records, None), lambda: report.markdown(records, strategy)):
        _or_refused(make, path)
    assert len(report.as_csv(records)) > len(records)


def _or_refused(make: Callable[[], str], path: Path) -> None:
    """A text, or a ValueError about the choice of a baseline."""
    try:
        assert make()
    except ValueError as error:
        assert "accepted" in str(error)


def _resume(path: Path) -> None:
    """Go on with a file: what is good stays, as it was."""
    kept = {json.loads(line)["layer"] for line in _whole_lines(path)}
    with rows.RowFile(path, "modelled", resume=True) as file:
        good = file.kept
    assert {record.layer for record in good} <= kept
    assert not good or [record for record in rows.read_records(path)] == good


def _whole_lines(path: Path) -> list[str]:
    lines = []
    for line in path.read_bytes().decode("utf-8", "replace").split("\n"):
        try:
            if isinstance(json.loads(line).get("layer"), str):
                lines.append(line)
        except (ValueError, AttributeError, RecursionError):
            continue
    return lines


def _read_hardware(path: Path) -> None:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return
    name = str(path)
    target, timing = hardware.capacities_of(name, table), hardware.timing_of(name, table)
    assert target.partitions > 0 and timing.hbm.pair > 0 and isinstance(target.name, str)
    assert all(isinstance(alias, str) for alias in target.aliases) and isinstance(target.generation, int)


def _read_arrays(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for load in (cases.load, cases.load_forward):
            try:
                case = load(path)
            except TypeError as error:
                assert "accepted" in str(error) or "must be" in str(error)
            else:
                assert isinstance(case.x, np.ndarray)


def _read_source(path: Path) -> None:
    for version in lint.VERSIONS:
        try:
            findings = lint.lint_file(path, version)
        except UnicodeDecodeError:
            return
        for finding in findings:
            assert finding.line >= 1 and finding.column >= 1 and "\n" not in str(finding)


SUFFIXES = {"shapes": "toml", "sweep": "toml", "rows": "jsonl", "hardware": "toml", "arrays": "npz", "source": "py"}
READERS: dict[str, Callable[[Path], None]] = {
    "shapes": _read_shapes,
    "sweep": _read_sweep,
    "rows": _read_rows,
    "hardware": _read_hardware,
    "arrays": _read_arrays,
    "source": _read_source,
}

SHAPES = (
    'model = "net"\n\n[[layer]]\nchannels = 3\nspatial = [4, 5]\ncount = 2\n\n'
    "[[layer]]\nchannels = 4\nspatial = []\ncount = 1\n"
)
SWEEP = (
    '[[run]]\nmodels = ["mlp"]\nops = ["bwd", "fwd"]\ndtypes = ["float32"]\nbatch = [2]\nlnc = [1, 2]\n'
    'strategies = ["planned"]\nrelu = ["none", "mask"]\nprecision = ["high"]\n'
)
TOML_VALUES = (
    *NUMBERS,
    *(f'"{word}"' for word in ("", "x", "mlp", "a.toml", "\\u0000.toml", "\\U0001F600", "|", "bwd", "none")),
    *("true", "[]", "[[]]", "[1, [2]]", "{}", '{a = "b"}', "1979-05-27", "07:32:00", '"""\na\n"""', "[0]", "[-1]"),
    *("[1.0]", "[true]", '["x"]', "[1, 1]", "[99999999999999999999]", "[1, 2, 3, 4]", '["bwd", "bwd"]', "[nan]"),
)


def kernel_source() -> bytes:
    """The source of a kernel, shortened."""
    return resources.files("nki_bn.kernels").joinpath("column_blocks.py").read_bytes()


def array_file() -> bytes:
    """A .npz file with a backward case."""
    made = io.BytesIO()
    case = cases.Draw(shape=(2, 3, 4)).case()
    np.savez(made, **{name: getattr(case, name) for name in ("dy", "x", "mean", "var", "gamma", "beta")})
    return made.getvalue()


@st.composite
def toml_texts(draw: st.DrawFn, text: str) -> bytes:
    """``text`` with odd values, with lines taken out, repeated, renamed, or odd headers put in."""
    lines = text.split("\n")
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(lines) - 1))
        key, _, value = lines[at].partition(" = ")
        extra = ["[layer]", "[[layer]]", "[[run]]", "[run.x]", "layer = 1", "run = [1]", "[[layer.x]]", "é = 1", ""]
        lines[at : at + 1] = draw(
            st.sampled_from(
                [
                    [f"{key} = {draw(st.sampled_from(TOML_VALUES))}"],
                    [],
                    [lines[at]] * 2,
                    [f'"{key}x" = {value}'],
                    [lines[at], draw(st.sampled_from(extra))],
                ]
            )
        )
    return "\n".join(lines).encode()


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([2**63, -(10**30), 10**400, 0.5, -0.0, 1e308])
    | st.sampled_from(["modelled", "measured", "ok", "failed", "bwd", "fast", "mask", *WORDS])
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@st.composite
def row_texts(draw: st.DrawFn) -> bytes:
    """Rows of a sweep with odd values, keys that are missing, unknown or twice, bare numbers, and cut off lines."""
    lines = []
    for number in range(draw(st.integers(1, 3))):
        made = bench_rows.record(draw(st.sampled_from([10.0, 12.5, None])), layer=f"{number}x4")
        row = json.loads(made.to_json())
        for _ in range(draw(st.integers(0, 2))):
            key = draw(st.sampled_from([*row, "extra"]))
            if draw(st.booleans()):
                row[key] = draw(JSON_VALUES)
            else:
                row.pop(key, None)
        line = json.dumps(row)
        if draw(st.booleans()):
            key = draw(st.sampled_from(["modelled_us", "count", "hbm_bytes", "roofline_us", "plan", "shape"]))
            line = line[:-1] + f', "{key}": {draw(st.sampled_from(NUMBERS))}}}'
        lines.append(line)
    text = "\n".join(lines) + draw(st.sampled_from(["\n", "", "\n\n", "\r\n"]))
    return text.encode("utf-8", "surrogatepass")[: -draw(st.integers(1, 30)) if draw(st.booleans()) else None]


def _hardware() -> bytes:
    return resources.files("nki_bn.configs").joinpath("hardware", "trn2.toml").read_bytes()


def examples() -> st.SearchStrategy[tuple[str, bytes]]:
    """A kind of file, and what is in it."""
    texts: dict[str, list[st.SearchStrategy[Any]]] = {
        "shapes": [toml_texts(SHAPES), spliced(SHAPES.encode())],
        "sweep": [toml_texts(SWEEP), spliced(SWEEP.encode())],
        "rows": [row_texts(), spliced((bench_rows.record().to_json() + "\n").encode())],
        "hardware": [toml_texts(_hardware().decode()), spliced(_hardware())],
        "arrays": [spliced(array_file())],
        "source": [spliced(kernel_source())],
    }
    return st.one_of(st.tuples(st.just(kind), made) for kind, several in texts.items() for made in several)


SURFACE = Surface(examples(), check_file)
