# SPDX-License-Identifier: Apache-2.0
"""``nki-bn plan``, and the explanation that it prints."""

from __future__ import annotations

import json
import re

import pytest

import nki_bn
from nki_bn.cli import main
from nki_bn.explanation import Explanation, explain
from nki_bn.kernels.plan import total_bytes
from nki_bn.planner import candidates
from nki_bn.predict import INSTRUCTIONS, predict
from nki_bn.problem import BackwardProblem, ForwardProblem, Problem

SHAPE = "16,48,14,14"
PROBLEMS: tuple[tuple[list[str], Problem], ...] = (
    ([], BackwardProblem((16, 48, 14, 14), "bfloat16")),
    (["--dtype", "float32", "--lnc", "1"], BackwardProblem((16, 48, 14, 14), "float32", lnc=1)),
    (
        ["--fuse-relu", "recompute", "--residual"],
        BackwardProblem((16, 48, 14, 14), "bfloat16", relu="recompute", residual=True),
    ),
    (["--eval"], BackwardProblem((16, 48, 14, 14), "bfloat16", training=False)),
    (["--target", "trn1"], BackwardProblem((16, 48, 14, 14), "bfloat16", target="trn1", lnc=1)),
    (["--op", "fwd", "--fuse-relu", "mask"], ForwardProblem((16, 48, 14, 14), "bfloat16", relu="mask")),
    (["--op", "eval"], ForwardProblem((16, 48, 14, 14), "bfloat16", training=False)),
)


def printed(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["plan", "--shape", SHAPE, *options]) == 0
    return capsys.readouterr().out


def row(text: str, name: str) -> str:
    """The value of the row of this name."""
    return next(line[len(name) :].strip() for line in text.splitlines() if re.match(rf"\s*{name}\s\s", f"{line}  "))


@pytest.mark.parametrize(("options", "problem"), PROBLEMS)
def test_numbers_are_those_of_the_plan(
    options: list[str], problem: Problem, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, *options, "--explain")
    plan = nki_bn.plan(problem)
    prediction = predict(plan)
    assert row(text, "strategy").startswith(f"{plan.strategy}: ")
    assert row(text, "predicted").startswith(f"{prediction.us:.1f} us (modelled")
    assert row(text, "bound by") == prediction.bound
    assert row(text, "instructions") == f"{prediction.instructions} on a core, ceiling {INSTRUCTIONS}"
    assert row(text, "SBUF").startswith(f"{plan.sbuf_bytes} of ")
    for buffer in plan.buffers:
        size = f"{buffer.count} x {buffer.columns} {buffer.dtype}, {total_bytes([buffer])} bytes"
        assert f"  {buffer.name}" in text and size in text
    for engine, time in prediction.busy.items():
        assert time == 0 or f"{engine} {time / prediction.ns:.0%}" in row(text, "busy")
    others = [f"{other.prediction.us:.1f} us (" for other in candidates(problem)[1:]]
    ends = text.splitlines()[-len(others) :] if others else []
    assert all(line.startswith(f"  {other}") for line, other in zip(ends, others, strict=True))
    assert "runners-up" in text if others else "no other candidate" in text


def test_runners_up_are_shown_on_request_only(capsys: pytest.CaptureFixture[str]) -> None:
    short, long = printed(capsys), printed(capsys, "--explain")
    assert long.startswith(short.rstrip("\n")) and "runners-up" in long and "runners-up" not in short


@pytest.mark.parametrize(("options", "problem"), PROBLEMS)
def test_json_holds_the_same(options: list[str], problem: Problem, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, *options, "--json"))
    explanation = explain(problem)
    assert found == json.loads(json.dumps(explanation.as_dict()))
    assert found["problem"]["shape"] == list(problem.shape) and found["plan"]["strategy"] == explanation.plan.strategy
    assert found["operation"] == ("bwd" if isinstance(problem, BackwardProblem) else options[1])
    assert found["roofline_share"] == explanation.roofline_us / explanation.predicted_us
    assert len(found["runners_up"]) == len(candidates(problem)) - 1


def test_figures_hang_together() -> None:
    problem = BackwardProblem((32, 64, 56, 56), "bfloat16", lnc=2)
    explanation: Explanation = nki_bn.explain(problem)
    assert 0 < explanation.roofline_share < 1 and explanation.busy[explanation.bound] >= 0.5
    assert all(0 < share < 1 for share in explanation.busy.values())
    assert sum(buffer.nbytes for buffer in explanation.buffers) == explanation.sbuf_bytes <= explanation.sbuf_limit
    # resident moves the minimum, and staged does where all of the data stays in its slots.
    assert explanation.moved_bytes == pytest.approx(explanation.minimum_bytes, rel=0.01)
    staged = next(other for other in explanation.runners_up if other.strategy == "staged")
    assert staged.predicted_us > explanation.predicted_us


def test_more_bytes_are_a_reason() -> None:
    """Three quarters of the tiles of staged leave SBUF: their x is read twice, their gradient goes out and back."""
    explanation = explain(BackwardProblem((32, 64, 112, 112), "bfloat16", lnc=2))
    staged = next(other for other in explanation.runners_up if other.strategy == "staged")
    assert staged.reason == f"moves {1 + 0.75 * 6 / 6:.2f} times the bytes"


def test_reasons_compare_with_the_plan() -> None:
    explanation = explain(BackwardProblem((32, 256, 56, 56), "float32", lnc=2))
    for other in explanation.runners_up:
        assert other.predicted_us >= explanation.predicted_us
        assert re.search(r"times the bytes|works for .* us|waits for .* us|takes as long", other.reason)


def test_a_gain_in_doubt_is_named() -> None:
    """What is predicted a little faster than staged is passed over, and for no other reason."""
    explanation = explain(BackwardProblem((1, 64, 14, 14), "bfloat16", lnc=1))
    faster = [other for other in explanation.runners_up if other.predicted_us < explanation.predicted_us]
    assert explanation.plan.strategy == "staged" and faster
    assert {other.reason for other in faster} == {"less than 1% faster, and predictions are not better than that"}


def test_what_is_out_of_the_ordinary_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--shape", "64,64,1024,1024", "--dtype", "float32", "--target", "trn3"]) == 0
    text = capsys.readouterr().out
    assert "times are those of trn2: trn3 has no timing parameters" in text
    assert f"above the ceiling of {INSTRUCTIONS} instructions" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shape", "32"], r"--shape: '32' is not a shape; accepted: B,C,... of rank 2 to 5"),
        (["--shape", "2,3", "--op", "sideways"], r"--op: invalid choice: 'sideways' \(choose from .*bwd"),
        (["--shape", "2,3", "--dtype", "float64"], r"--dtype: invalid choice: 'float64' \(choose from .*float32"),
        (["--shape", "2,3", "--fuse-relu", "maybe"], r"--fuse-relu: invalid choice: 'maybe' \(choose from .*mask"),
        (["--shape", "2,3", "--lnc", "3"], r"--lnc: '3' is no number of cores; accepted: 1, 2"),
        (["--shape", "2,3", "--target", "trn9"], r"--target: invalid choice: 'trn9' \(choose from .*trn1"),
        (["--shape", "2,3", "--target", "trn1", "--lnc", "2"], r"lnc is 2; accepted on trn1: 1"),
        (["--shape", "2,3", "--op", "fwd", "--eval"], r"--eval cannot go with --op fwd; accepted: --op eval"),
        (["--shape", "2,3", "--residual"], r"residual is True with relu 'none'; accepted: True with relu 'recompute'"),
        (["--shape", "0,3"], r"x has shape \(0, 3\), so no kernel would run; accepted: sizes from 1 up"),
        (
            ["--shape", f"1,1,{2**40}", "--dtype", "float32"],
            r"does not fit into 212984 bytes of SBUF.*largest: totals .*accepted: launches",
        ),
        ([], r"--shape"),
    ],
)
def test_wrong_use_ends_in_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["plan", *options])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and re.search(message, error) and len(error.splitlines()) == 1
