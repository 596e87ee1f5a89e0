# SPDX-License-Identifier: Apache-2.0
"""What is read off a timeline: figures, report, Perfetto JSON, picture, and the command that prints them."""

from __future__ import annotations

import json
import os
import re
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from launching import nisa, nl
from timelines import DMA, TIMING, close, hbm, load_time, store_time, tile, timeline, transfer_time

from nki_bn.cli import main
from nki_bn.simulator.timing import Timeline, model, perfetto_json, picture, report
from nki_bn.simulator.timing.timeline import FINISHED, Traffic
from nki_bn.simulator.timing.tracks import tracks_of
from nki_bn.simulator.trace import Trace

ROW = 1024
SIZE = 128 * ROW * 4
X = hbm(128, ROW)


def kernel(x: Any) -> Any:
    """Load, copy on Vector, a function on Scalar with a change of table, store; the second core waits for nothing."""
    out = nl.ndarray((256, ROW), x.dtype, buffer=nl.shared_hbm, name="out")
    a, b, c = tile(ROW), tile(ROW), tile(ROW)
    nisa.dma_copy(a, x)
    nisa.tensor_copy(b, a, engine=nisa.engine.vector, name=f"copy {nl.program_id(0)}")
    nisa.activation(c, nl.square, b)
    nisa.activation(c, nl.exp, b)
    nisa.dma_copy(out[nl.ds(128 * nl.program_id(0), 128), :], c)
    return out


@pytest.fixture(scope="module")
def one() -> Timeline:
    return timeline(kernel, X)


@pytest.fixture(scope="module")
def two() -> Timeline:
    return timeline(kernel, X, lnc=2)


def test_totals(one: Timeline, two: Timeline) -> None:
    load, copy, square, exp, store = one.spans
    assert one.total == store.done and one.launch == TIMING.launch_ns and (one.cores, two.cores) == (1, 2)
    assert one.nbytes == 2 * SIZE and close(one.bandwidth, 2 * SIZE / one.total)
    assert close(one.roofline_share(2 * SIZE), 2 * SIZE / 400 / one.total)
    assert close(two.roofline_share(4 * SIZE), 4 * SIZE / 716 / two.total)


def test_engines_at_work_and_waiting(one: Timeline) -> None:
    load, copy, square, exp, store = one.spans
    uses = {use.engine: use for use in one.engines}
    assert list(uses) == ["scalar", "sync", "vector"]
    assert close(uses["sync"].busy, 2 * DMA.hardware_trigger) and uses["sync"].instructions == 2
    assert close(uses["sync"].stalls["scalar"], store.start - load.free)
    assert close(uses["vector"].stalls["load"], copy.start) and close(uses["vector"].stalled, copy.start)
    assert close(uses["scalar"].busy, square.free - square.start + exp.free - exp.start + 1283)
    for use in one.engines:
        assert close(use.busy + sum(use.stalls.values()), one.total)
        assert close(use.stalls[FINISHED], one.total - [s for s in one.spans if s.engine == use.engine][-1].free)


def test_what_is_waited_for_has_a_name() -> None:
    def rounds(x: Any, y: Any) -> None:
        a, b = tile(ROW), tile(ROW)
        for _ in range(2):
            nisa.dma_copy(a, x)
            nisa.tensor_copy(b, a, engine=nisa.engine.vector)
        nisa.dma_copy(y, b)
        nisa.dma_copy(b, x)
        nisa.sendrecv(a, b, 1 - nl.program_id(0), 1 - nl.program_id(0), pipe_id=0)
        nisa.tensor_copy(a, b, engine=nisa.engine.vector)

    result = timeline(lambda x: rounds(x[nl.program_id(0), 0], x[nl.program_id(0), 1]), hbm(2, 2, 128, ROW), lnc=2)
    uses = {(use.core, use.engine): use.stalls for use in result.engines}
    assert set(uses[0, "vector"]) == {"load", "sendrecv", FINISHED}
    assert set(uses[0, "sync"]) == {"vector to let go", "vector", "store to let go", "load to let go", FINISHED}


def test_traffic_by_direction_and_tensor(two: Timeline) -> None:
    assert two.traffic == (Traffic("load", "x", 2 * SIZE), Traffic("store", "out", 2 * SIZE))


def test_the_critical_path_is_one_chain(one: Timeline) -> None:
    path = one.critical_path
    assert [step.record for step in path] == [0, 1, 2, 3, 4]
    assert [step.why for step in path] == ["order", "RAW", "RAW", "order", "RAW"]
    assert path[0].begin == 0 and path[-1].end == one.total
    assert all(first.end == second.begin for first, second in pairwise(path))
    assert close(path[0].end, load_time(4096)) and close(path[-1].end - path[-1].begin, store_time(4096))


def test_the_critical_path_follows_queues_and_the_other_core() -> None:
    def loads(x: Any) -> None:
        a, b = tile(ROW), tile(ROW)
        if nl.program_id(0) == 1:
            nisa.dma_copy(a, x)
            nisa.dma_copy(b, x)
            nisa.tensor_copy(a, b, engine=nisa.engine.vector)
        nisa.sendrecv(a, b, 1 - nl.program_id(0), 1 - nl.program_id(0), pipe_id=0)
        if nl.program_id(0) == 0:
            nisa.tensor_copy(a, b, engine=nisa.engine.vector)

    result = timeline(loads, X, lnc=2)
    names = [
        (result.spans[step.record].record.core, result.spans[step.record].record.opcode, step.why)
        for step in result.critical_path
    ]
    assert names == [
        (1, "dma_copy", "order"),
        (1, "dma_copy", "queue"),
        (1, "tensor_copy", "RAW"),
        (1, "sendrecv", "RAW"),
        (0, "sendrecv", "peer"),
        (0, "tensor_copy", "RAW"),
    ]


def test_an_empty_trace() -> None:
    empty = model(Trace())
    assert (empty.total, empty.bandwidth, empty.engines, empty.critical_path) == (0, 0, (), ())
    assert "0 instructions" in report(empty) and ET.fromstring(picture(empty)) is not None
    with pytest.raises(ValueError, match="an empty timeline has no roofline share"):
        empty.roofline_share(1)


def test_the_report(one: Timeline, two: Timeline) -> None:
    lines = report(one, 2 * SIZE).splitlines()
    assert lines[0] == f"modelled on trn2, 1 core: {one.total / 1e3:.1f} us, launch 9.4 us not included, 5 instructions"
    busy = 2 * 8 * transfer_time(4096)
    assert close(one.dma_busy, (busy,)) and close(two.dma_busy, (busy, busy))
    assert lines[1].startswith(f"DMA: {2 * SIZE} bytes, {one.bandwidth:.0f} GB/s, ")
    assert lines[1].endswith(f" {busy / 1e3:.1f} us")
    share = f"{one.roofline_share(2 * SIZE):.0%} of the modelled time"
    assert lines[2] == f"roofline: {2 * SIZE} bytes at 400 GB/s take 2.6 us, {share}"
    text = report(two)
    assert "roofline" not in text and "2 cores" in text and f"store     out     {2 * SIZE}" in text
    assert "activation (scalar) at test_timing_views.py:" in text and "core 1 vector" in text


def test_rows_do_not_overlap() -> None:
    """DMAs of one queue that use other engines run side by side, in rows of their own."""

    def halves(x: Any) -> None:
        a = tile(ROW)
        nisa.dma_copy(a[0:64, :], x[0:64, :])
        nisa.dma_copy(a[64:128, :], x[64:128, :])

    tracks = tracks_of(timeline(halves, X))
    assert [track.name for track in tracks] == ["sync", "dma sync", "dma sync (2)"]
    assert all(first.end <= second.begin for track in tracks for first, second in pairwise(track.bars))


def test_perfetto(two: Timeline) -> None:
    file = json.loads(perfetto_json(two))
    events = file["traceEvents"]
    assert file["otherData"]["modelled"] and close(file["otherData"]["total_us"] * 1e3, two.total)
    named = {(e["pid"], e["args"]["name"]) for e in events if e["ph"] == "M" and "name" in e["args"]}
    assert named == {
        (core, name) for core in (0, 1) for name in (f"core {core}", "scalar", "sync", "vector", "dma sync")
    }
    bars = [e for e in events if e["ph"] == "X"]
    # Per core: five instructions, two transfers, a table.
    assert len(bars) == 2 * (5 + 2 + 1) and {e["name"] for e in bars} >= {"load", "store", "table load", "activation"}
    (copy,) = [e for e in bars if e["args"].get("name") == "copy 0"]
    span = two.spans[copy["args"]["index"]]
    assert close((copy["ts"] * 1e3, copy["dur"] * 1e3), (span.start, span.free - span.start))
    assert copy["args"]["source"].endswith("in kernel") and copy["args"]["waited for"] == "load"
    flying = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["pid"] == 0]
    assert flying == [SIZE, 0, SIZE, 0]
    arrows = [e for e in events if e["ph"] in "sf"]
    assert len(arrows) == 2 * (len(two.critical_path) - 1)
    assert {e["id"] for e in arrows if e["ph"] == "s"} == {e["id"] for e in arrows if e["ph"] == "f"}


def test_the_picture(two: Timeline) -> None:
    root = ET.fromstring(picture(two, "a & b"))
    space = "{http://www.w3.org/2000/svg}"
    texts = [text.text for text in root.iter(f"{space}text")]
    assert texts[0] == f"a & b: {two.total / 1e3:.1f} us (modelled)"
    rows = [f"core {core} {name}" for core in (0, 1) for name in ("scalar", "sync", "vector", "dma sync")]
    assert [text for text in texts if text in rows] == rows
    assert {"load", "store", "tensor_copy", "table load"} <= set(texts)
    width = float(root.attrib["width"])
    for rect in root.iter(f"{space}rect"):
        left, wide = float(rect.attrib.get("x", 0)), float(rect.attrib["width"])
        assert left >= 0 and wide > 0 and left + wide <= width


@pytest.mark.parametrize("options", [["--op", "bwd", "--fuse-relu", "mask"], ["--op", "fwd", "--dtype", "bfloat16"]])
def test_the_command(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "trace.json", tmp_path / "timeline.svg"
    files = ["-o", str(written[0]), "--picture", str(written[1])]
    assert main(["trace", *options, "--shape", "4,64,8,8", "--lnc", "2", *files]) == 0
    printed = capsys.readouterr().out
    assert f"{options[1]} [4, 64, 8, 8]" in printed and "modelled on trn2, 2 cores" in printed
    assert "roofline" in printed and "most bytes per partition in use: SBUF" in printed
    assert json.loads(written[0].read_text(encoding="utf-8"))["traceEvents"]
    assert ET.fromstring(written[1].read_text(encoding="utf-8")).tag.endswith("svg")


def test_files_are_overwritten_by_force_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option, path in (("-o", tmp_path / "trace.json"), ("--picture", tmp_path / "timeline.svg")):
        path.write_text("old")
        command = ["trace", "--op", "bwd", "--shape", "4,64", option, str(path)]
        with pytest.raises(SystemExit, match="2"):
            main(command)
        said = capsys.readouterr()
        assert f"{path} exists; accepted: another path, or --force to overwrite it" in said.err and not said.out
        assert path.read_text() == "old"
        assert main([*command, "--force"]) == 0 and capsys.readouterr().out
        assert path.read_text(encoding="utf-8") != "old"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shape", "0,64"], "x has shape (0, 64), so no kernel would run; accepted: sizes from 1 up"),
        (
            ["--op", "fwd", "--shape", "1,64"],
            "x has 1 value per channel, shape (1, 64); accepted in training: more than 1",
        ),
        (
            ["--shape", "4"],
            "argument --shape: '4' is not a shape; accepted: B,C,... of rank 2 to 5, C at least 1, "
            "sizes of at most 18 digits",
        ),
        ([], "the following arguments are required: --shape"),
    ],
)
def test_wrong_use(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["trace", "--op", "bwd", *options])
    assert stop.value.code == 2 and capsys.readouterr().err == f"nki-bn trace: error: {message}\n"


def test_files_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError("no space")

    (tmp_path / "folder.json").mkdir()
    written = tmp_path / "trace.json"
    written.write_text("old")
    for path, message in (
        (tmp_path / "folder.json", "--output .*folder.json is no regular file"),
        (tmp_path / "absent" / "a.json", "--output .*a.json cannot be written: .*absent is no folder"),
        (written, "no space"),
    ):
        monkeypatch.setattr(os, "replace", refuse)
        with pytest.raises(SystemExit) as stop:
            main(["trace", "--op", "bwd", "--shape", "4,64", "--force", "-o", str(path)])
        error = capsys.readouterr().err
        assert stop.value.code == 2 and re.fullmatch(f"nki-bn trace: error: {message}.*\n", error)
    assert written.read_text() == "old" and len(list(tmp_path.iterdir())) == 2
