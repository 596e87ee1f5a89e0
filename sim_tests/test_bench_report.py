# SPDX-License-Identifier: Apache-2.0
"""Series, summaries, tables, figures and the comparison of two files, on rows with numbers chosen by hand."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from bench_rows import measured, record

from nki_bn import cli
from nki_bn.bench import report
from nki_bn.bench.compare import compare, threshold_of
from nki_bn.bench.figures import series_svg
from nki_bn.bench.html import page
from nki_bn.bench.record import Record
from nki_bn.bench.series import series_of, summarise
from nki_bn.bench.table import Table

# Two layers, the first of which occurs three times. The roofline is 5 us everywhere.
STAGED = [record(10.0, count=3), record(40.0, layer="5", hbm_bytes=2000)]
PLANNED = [record(5.0, count=3, strategy="planned"), record(10.0, layer="5", strategy="planned", hbm_bytes=2000)]
ROWS = [*STAGED, *PLANNED]
BROKEN = [STAGED[0], record(None, layer="5"), *PLANNED]


def write(path: Path, records: list[Record]) -> str:
    path.write_text("".join(r.to_json() + "\n" for r in records), encoding="utf-8")
    return str(path)


def run(*arguments: str) -> int:
    """The exit code of the command line."""
    try:
        return cli.main(arguments)
    except SystemExit as left:
        assert isinstance(left.code, int)
        return left.code


def test_rows_under_equal_conditions_are_a_series() -> None:
    other = [
        record(dtype="bfloat16"),
        record(lnc=2),
        record(op="fwd", strategy="two_read"),
        record(shape=(9, 3, 4)),
        record(relu="mask"),
        record(model="other"),
    ]
    assert len(series_of([*ROWS, *other])) == 1 + len(other)
    (series,) = series_of([*ROWS, record(3.0, precision="fast")])
    assert list(series.contenders) == ["staged", "planned", "staged fast"] and series.layers == ["3x4", "5"]
    assert str(series.conditions) == "net bwd float32, batch 2, trn2 lnc 1, modelled"


def test_a_summary_adds_up() -> None:
    (series,) = series_of(ROWS)
    staged, planned = (summarise(series, name, "staged") for name in ("staged", "planned"))
    assert (staged.ok, staged.failed, staged.total_us, planned.total_us) == (2, 0, 70.0, 25.0)
    # 4 batch norms at 5 us each.
    assert (staged.share, planned.share) == (pytest.approx(20 / 70), pytest.approx(20 / 25))
    assert staged.mean_share == pytest.approx((0.5 * 0.125) ** 0.5)
    assert staged.mean_traffic == pytest.approx((2.0 * 1.0) ** 0.5)
    assert planned.total_speed_up == pytest.approx(70 / 25)
    assert planned.mean_speed_up == pytest.approx((2 * 4) ** 0.5)
    assert staged.total_speed_up == staged.mean_speed_up == pytest.approx(1.0)


def test_speed_ups_are_those_of_layers_that_both_have_a_time_for() -> None:
    (series,) = series_of(BROKEN)
    assert series.speed_ups("planned", "staged") == {"3x4": 2.0}
    planned, staged = (summarise(series, name, "staged") for name in ("planned", "staged"))
    assert (planned.total_speed_up, planned.total_us) == (2.0, 25.0)
    assert (staged.ok, staged.failed, staged.total_us) == (1, 1, 30.0)


def test_a_series_without_any_time_has_no_means() -> None:
    (series,) = series_of([record(None)])
    summary = summarise(series, "staged", "staged")
    assert (summary.ok, summary.failed, summary.mean_share, summary.share, summary.mean_speed_up) == (
        0,
        1,
        None,
        None,
        None,
    )
    assert "failed" in report.markdown([record(None)])


def test_the_baseline_is_the_published_strategy_unless_asked() -> None:
    (series,) = series_of(reversed(ROWS))
    assert list(series.contenders) == ["planned", "staged"]
    assert series.baseline() == "staged" and series.baseline("planned") == "planned"
    (alone,) = series_of(PLANNED)
    assert alone.baseline() == "planned"
    with pytest.raises(ValueError, match="baseline 'reread' is not in net bwd .*; accepted: planned, staged"):
        series.baseline("reread")


def test_markdown_says_where_times_come_from_and_has_every_layer() -> None:
    text = report.markdown(BROKEN)
    assert "All times are modelled, none was measured on a device. Method: by hand." in text
    assert "| 3x4 | planned | 3 | 5.0 | 5.0 | 100 % | 1 | 2.00 | vector |" in text
    assert "| 5 | staged | 1 | failed | 5.0 | - | - | - | ValueError: no |" in text
    assert "| planned | 2 | 0 | 25.0 | 80 % | 71 % | 1.41 | 2.00 | 2.00 | staged |" in text
    assert "All times were measured on a device." in report.markdown([measured(3.0)])


def test_csv_has_every_field_of_every_row() -> None:
    rows = list(csv.DictReader(io.StringIO(report.as_csv(BROKEN))))
    assert len(rows) == len(BROKEN) and list(rows[0]) == list(json.loads(BROKEN[0].to_json()))
    assert (rows[0]["modelled_us"], rows[0]["shape"], rows[1]["error"], rows[1]["hbm_bytes"]) == (
        "10.0",
        "[2, 3, 4]",
        "ValueError: no",
        "",
    )


def test_a_table_is_aligned() -> None:
    table = Table(("name", "us", "why"), [("a", "1000.0", "x"), ("longer", "2.0", "yy")])
    assert table.text() == "name        us  why\na       1000.0  x\nlonger     2.0  yy"
    assert table.markdown().splitlines()[1] == "| --- | ---: | --- |"


def images(text: str) -> list[ET.Element]:
    found = re.findall(r'src="data:image/svg\+xml;base64,([^"]*)"', text)
    return [ET.fromstring(base64.b64decode(image)) for image in found]


def test_the_page_has_a_figure_per_series_and_needs_nothing_else() -> None:
    text = page([*BROKEN, record(dtype="bfloat16", error=None, layer="a<b")])
    assert len(images(text)) == 2 and all(image.tag.endswith("svg") for image in images(text))
    assert "All times are modelled" in text and "a&lt;b" in text and "a<b" not in text
    assert not re.search(r'(src|href)="(?!data:|#)', text) and "<script" not in text


def test_figures_do_not_change_from_run_to_run() -> None:
    (series,) = series_of(BROKEN)
    assert series_svg(series, "staged") == series_svg(series, "staged")


@pytest.mark.parametrize("rows", [STAGED, [measured(3.0)], [record(None)]], ids=["one contender", "device", "failed"])
def test_a_figure_of_what_little_there_is(rows: list[Record]) -> None:
    (series,) = series_of(rows)
    assert "</svg>" in series_svg(series, series.baseline())


def test_report_writes_by_suffix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write(tmp_path / "a.jsonl", ROWS)
    paths = [str(tmp_path / f"a.{kind}") for kind in ("md", "csv", "html")]
    assert run("report", rows, "-o", paths[0], "-o", paths[1], "-o", paths[2]) == 0
    assert Path(paths[0]).read_text() == report.markdown(ROWS) and Path(paths[2]).read_text() == page(ROWS)
    assert run("report", rows) == 0 and capsys.readouterr().out == report.markdown(ROWS)
    assert run("report", rows, "-o", paths[0], "--baseline", "planned") == 2
    assert "a.md exists; accepted: another path, or --force to overwrite it" in capsys.readouterr().err
    assert run("report", rows, "-o", paths[0], "--baseline", "planned", "--force") == 0
    assert Path(paths[0]).read_text() == report.markdown(ROWS, "planned")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "a.pdf"], "a.pdf is of no kind that can be written; accepted: .md, .csv, .html"),
        (["--baseline", "reread"], "baseline 'reread' is not in net"),
    ],
)
def test_report_refuses(tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("report", write(tmp_path / "a.jsonl", ROWS), *arguments) == 2
    assert message in capsys.readouterr().err


def test_every_report_is_checked_before_the_first_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "folder.csv").mkdir()
    for wrong, message in (("absent/x.csv", "absent is no folder"), ("folder.csv", "folder.csv is no regular file")):
        outputs = ["-o", str(tmp_path / "r.md"), "-o", str(tmp_path / wrong)]
        assert run("report", rows, *outputs, "--force") == 2
        assert message in capsys.readouterr().err and not (tmp_path / "r.md").exists()


def test_without_matplotlib_the_page_says_which_extra_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    rows = write(tmp_path / "a.jsonl", ROWS)
    assert run("report", rows, "-o", str(tmp_path / "a.html")) == 2
    assert (
        "matplotlib is not installed; the extra bench has it: in a checkout, pip install '.[bench]'"
        in capsys.readouterr().err
    )
    assert run("report", rows) == 0


def test_a_time_may_grow_by_the_threshold() -> None:
    old = [record(100.0), record(100.0, layer="5"), record(100.0, layer="6"), record(100.0, layer="7")]
    new = [record(103.0), record(103.1, layer="5"), record(97.0, layer="6"), record(99.0, layer="7")]
    found = compare(old, new, 0.03)
    assert [change.verdict for change in found.changes] == ["same", "slower", "faster", "same"] and found.regressed
    assert not compare(old, new, 0.04).regressed
    assert "+3.1 %" in found.text() and "6" in found.text() and "97.0" in found.text() and "99.0" not in found.text()
    assert "99.0" in found.text(everything=True)
    assert "1 faster, 2 same, 1 slower" in found.text() and "geometric mean: 1.005" in found.text()


def test_failures_are_compared_too() -> None:
    old = [record(10.0), record(None, layer="5"), record(None, layer="6")]
    new = [record(None), record(10.0, layer="5"), record(None, layer="6")]
    found = compare(old, new, 0.03)
    assert [change.verdict for change in found.changes] == ["broken", "mended", "still broken"] and found.regressed
    assert not compare(old[1:], new[1:], 0.03).regressed


def test_cases_in_one_file_only_are_counted() -> None:
    found = compare([record(), record(layer="5")], [record(count=4), record(layer="6"), record(layer="7")], 0.03)
    assert "not compared: 1 only in the old file, 2 only in the new file" in found.text()
    assert [change.verdict for change in found.changes] == ["same"]
    with pytest.raises(ValueError, match="no case is in both files"):
        compare([record()], [record(layer="5")], 0.03)


def test_what_else_differs_is_noted() -> None:
    text = compare([record()], [record(version="9", environment={"hardware": "def"})], 0.03).text()
    assert "note: hardware parameters differs: abc -> def" in text and "note: version differs" in text
    assert "note: method" not in text


def test_modelled_and_measured_are_never_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = write(tmp_path / "a.jsonl", [record()]), write(tmp_path / "b.jsonl", [measured(10.0)])
    assert run("compare", *files) == 2
    assert "the comparison of the two files mixes measured and modelled rows" in capsys.readouterr().err


def test_compare_says_so_by_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = write(tmp_path / "a.jsonl", [record(100.0)]), write(tmp_path / "b.jsonl", [record(104.0)])
    assert run("compare", *files) == 1 and "slower" in capsys.readouterr().out
    assert run("compare", *files, "--threshold", "5%") == 0
    assert run("compare", *files, "--threshold", "0.05") == 2
    assert "'0.05' is no threshold; accepted: a percentage from 0% up, as 3%" in capsys.readouterr().err
    assert threshold_of("2.5 %") == 0.025
