# SPDX-License-Identifier: Apache-2.0
"""The command line: what it prints, its exit codes, and its one-line errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nki_bn
from nki_bn import cases, execute, pair
from nki_bn.cases import Draw
from nki_bn.cli import COMMANDS, main
from nki_bn.execute import BackwardInputs
from nki_bn.problem import LNC_VARIABLE, Array, BackwardCase, BackwardProblem

SMALL = ["verify", "--op", "bwd", "--shape", "2,3,4"]


def exit_code(argv: list[str]) -> int:
    """Of ``main``, whether it returns or exits."""
    try:
        return main(argv)
    except SystemExit as stop:
        return int(stop.code or 0)


def spoil_outputs(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let ``change`` at dx, dgamma and dbeta before they are judged."""
    honest = execute.run_backward

    def run(inputs: BackwardInputs, problem: BackwardProblem, plan: Any) -> tuple[Array | None, ...]:
        return tuple(change(output) for output in honest(inputs, problem, plan))

    monkeypatch.setattr(execute, "run_backward", run)


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--dtype", "bfloat16", "--lnc", "1", "--fuse-relu", "mask"],
        ["--dtype", "float16", "--fuse-relu", "recompute", "--seed", "3"],
        ["--numerics", "ideal", "--eval", "--eps", "0"],
        ["--mean", "-1e3", "--std", "0.5", "--training", "--eps", "1e-3"],
        ["--target", "trn1"],
    ],
)
def test_a_right_kernel_agrees(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *options]) == 0
    title, header, *rows = capsys.readouterr().out.splitlines()
    assert title.startswith("bwd [2, 3, 4]") and header.split()[0] == "output"
    assert [row.split()[0] for row in rows] == ["dx", "dgamma", "dbeta"]
    assert all(row.split()[-1] == "ok" for row in rows) and len({len(row) for row in (header, *rows)}) == 1


def outputs_in(report: str) -> list[str]:
    """The names in a table, all of them right."""
    title, header, *rows = report.splitlines()
    assert header.split()[0] == "output" and all(row.split()[-1] == "ok" for row in rows)
    return [row.split()[0] for row in rows]


STATISTICS = ["mean", "var", "running_mean", "running_var"]


@pytest.mark.parametrize(
    ("options", "outputs"),
    [
        (["fwd"], ["y", *STATISTICS]),
        (["fwd", "--fuse-relu", "mask", "--residual"], ["y", *STATISTICS, "relu_mask"]),
        (["fwd", "--fuse-relu", "recompute", "--dtype", "bfloat16", "--training"], ["y", *STATISTICS]),
        (["fwd", "--mean", "1e3", "--numerics", "ideal", "--lnc", "1"], ["y", *STATISTICS]),
        (["eval", "--fuse-relu", "mask", "--eps", "0", "--eval"], ["y", *STATISTICS, "relu_mask"]),
        (["eval", "--residual", "--dtype", "float16", "--target", "trn1"], ["y", *STATISTICS]),
        (["pair"], ["y", "dx", "dgamma", "dbeta"]),
        (["pair", "--fuse-relu", "mask", "--residual"], ["y", "dx", "dgamma", "dbeta", "dresidual"]),
        (
            ["pair", "--fuse-relu", "recompute", "--residual", "--dtype", "bfloat16"],
            ["y", "dx", "dgamma", "dbeta", "dresidual"],
        ),
        (["pair", "--fuse-relu", "recompute", "--eval", "--mean", "30"], ["y", "dx", "dgamma", "dbeta"]),
        (["bwd", "--fuse-relu", "recompute", "--residual"], ["dx", "dgamma", "dbeta", "dresidual"]),
        (["bwd", "--residual", "--eval"], ["dx", "dgamma", "dbeta", "dresidual"]),
    ],
    ids=" ".join,
)
def test_operations(options: list[str], outputs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--shape", "4,3,5", "--op", *options]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{options[0]} [4, 3, 5]") and outputs_in(printed) == outputs
    assert (", residual, " in printed) == ("--residual" in options)
    assert (", eval, " in printed) == (options[0] == "eval" or "--eval" in options)


def test_a_wrong_forward_disagrees(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    honest = execute.run_forward

    def run(*arguments: Any) -> tuple[Any, ...]:
        *floats, mask = honest(*arguments)
        return *(output * np.float32(1.001) for output in floats), 1 - mask

    monkeypatch.setattr(execute, "run_forward", run)
    argv = ["verify", "--op", "fwd", "--shape", "4,3,50", "--fuse-relu", "mask", "--mean", "1"]
    assert main([*argv, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [row["output"] for row in report["outputs"] if row["ok"]] == [] and report["op"] == "fwd"


@pytest.mark.parametrize(("half", "output"), [("run_forward", 0), ("run_forward", 2), ("run_backward", 0)])
def test_a_wrong_half_of_a_pair_disagrees(half: str, output: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """y, the variance or dx a thousandth off."""
    honest = getattr(execute, half)

    def run(*arguments: Any) -> tuple[Any, ...]:
        outputs = list(honest(*arguments))
        outputs[output] = outputs[output] * np.float32(1.001)
        return tuple(outputs)

    monkeypatch.setattr(execute, half, run)
    assert main(["verify", "--op", "pair", "--shape", "8,3,50", "--mean", "1"]) == 1


def test_a_pair_needs_torch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(pair, "find_spec", lambda name: None)
    assert exit_code(["verify", "--op", "pair", "--shape", "2,3,4"]) == 2
    printed = capsys.readouterr().err
    assert (
        "torch, which is not installed (in a checkout, pip install '.[torch]'); accepted without it: bwd, fwd, eval"
        in printed
    )
    assert len(printed.splitlines()) == 1


def test_a_wrong_kernel_disagrees(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    spoil_outputs(monkeypatch, lambda output: output * np.float32(1.001))
    assert main(SMALL) == 1
    assert capsys.readouterr().out.count("NOT OK") == 3


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--json", "--dtype", "bfloat16", "--lnc", "1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True and report["op"] == "bwd"
    assert report["problem"]["shape"] == [2, 3, 4] and report["problem"]["lnc"] == 1
    assert report["arithmetic"]["numerics"] == "trn2" and report["nki"] == nki_bn.installation.kind
    assert [row["output"] for row in report["outputs"]] == ["dx", "dgamma", "dbeta"]
    assert all(0 <= row["worst_ratio"] <= 1 and row["tolerance"] > 0 for row in report["outputs"])


def test_json_has_null_for_what_is_not_finite(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil_outputs(monkeypatch, lambda output: output * np.float32(np.nan))
    assert main([*SMALL, "--json"]) == 1
    report = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert [row["max_error"] for row in report["outputs"]] == [None] * 3 and report["ok"] is False


def test_the_seed_decides_the_input(capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for seed in ("1", "1", "2"):
        main([*SMALL, "--dtype", "bfloat16", "--seed", seed])
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != printed[2]


WRONG_USE = [
    (["verify", "--op", "bwd"], "--shape"),
    (["verify", "--shape", "2,3"], "--op"),
    (["verify", "--op", "forward", "--shape", "2,3"], "--op"),
    (["verify", "--op", "fwd", "--shape", "1,3"], "x has 1 value per channel"),
    (["verify", "--op", "fwd", "--shape", "2,3", "--eval"], "--eval cannot go with --op fwd; accepted: --op eval"),
    (["verify", "--op", "eval", "--shape", "2,3", "--training"], "--training cannot go with --op eval"),
    (["verify", "--op", "pair", "--shape", "2,3", "--eps", "0"], "eps"),
    (["verify", "--op", "bwd", "--shape", "2"], "--shape"),
    (["verify", "--op", "bwd", "--shape", "2,x"], "--shape"),
    (["verify", "--op", "bwd", "--shape", "2,0,3"], "--shape"),
    (["plan", "--shape", "-1,8,4,4"], "--shape: '-1,8,4,4' is not a shape; accepted: B,C,... of rank 2 to 5"),
    (["trace", "--op", "fwd", "--shape", "-1,8"], "--shape: '-1,8' is not a shape"),
    (["verify", "--op", "fwd", "--shape", "0,3"], "x has shape (0, 3)"),
    (["verify", "--op", "bwd", "--shape", "1,2,3,4,5,6"], "--shape"),
    ([*SMALL, "--dtype", "float64"], "--dtype"),
    ([*SMALL, "--lnc", "3"], "--lnc"),
    ([*SMALL, "--lnc", "2", "--target", "trn1"], "lnc"),
    ([*SMALL, "--target", "trn9"], "--target"),
    ([*SMALL, "--eps", "0"], "eps"),
    ([*SMALL, "--eps", "much"], "--eps"),
    ([*SMALL, "--seed", "-1"], "--seed"),
    ([*SMALL, "--mean", "nan"], "--mean: 'nan' is no finite number; accepted: finite numbers"),
    ([*SMALL, "--mean", "much"], "--mean: 'much' is no finite number"),
    ([*SMALL, "--std", "inf"], "--std: 'inf' is no finite number"),
    ([*SMALL, "--std", "-1"], "--std: '-1' is no deviation; accepted: finite numbers from 0 up"),
    (["verify", "--op", "bwd", "--shape", "1000000000,1000,1000"], "more memory than there is"),
    (["verify", "--op", "bwd", "--shape", f"{10**30},3"], "error: "),
    ([*SMALL, "--fuse-relu", "yes"], "--fuse-relu"),
    ([*SMALL, "--numerics", "exact"], "--numerics"),
    ([*SMALL, "--training", "--eval"], "--eval"),
    ([*SMALL, "--input", "case.npz"], "--shape"),
    (["verify", "--op", "bwd", "--input", "missing.npz"], "missing.npz"),
    (["verify", "--op", "bwd", "--input", "missing.npz", "--std", "2"], "--std"),
    (["trace", "--op", "bwd", "--shape", f"1,1,{2**40}"], "does not fit into 212984 bytes of SBUF"),
    (["lint"], "PATH"),
    (["polish"], "polish"),
    ([], "COMMAND"),
]


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ("1,8", "x has 1 value per channel, shape (1, 8); accepted in training: more than 1"),
        ("0,8", "x has shape (0, 8), so no kernel would run; accepted: sizes from 1 up"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "verify", "trace"])
def test_commands_refuse_the_same_problems(
    command: str, shape: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code([command, "--op", "fwd", "--shape", shape]) == 2
    assert capsys.readouterr().err == f"nki-bn {command}: error: {said}\n"


@pytest.mark.parametrize(("argv", "named"), WRONG_USE)
def test_wrong_use_is_one_line_that_names_the_argument(
    argv: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(argv) == 2
    printed = capsys.readouterr()
    assert not printed.out and len(printed.err.splitlines()) == 1
    assert printed.err.startswith("nki-bn") and named in printed.err


def test_a_bad_variable_is_wrong_use(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(LNC_VARIABLE, "4")
    assert exit_code(SMALL) == 2
    assert LNC_VARIABLE in capsys.readouterr().err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in COMMANDS)
    assert exit_code(["--version"]) == 0
    assert nki_bn.__version__ in capsys.readouterr().out


def save(path: Path, case: BackwardCase, *left_out: str) -> list[str]:
    """The arguments that verify ``case`` from a file without the arrays ``left_out``."""
    arrays = {name: getattr(case, name) for name in cases.ARRAYS if name not in left_out}
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return ["verify", "--op", "bwd", "--input", str(path)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_input_from_a_file(dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = Draw((2, 3, 4), dtype).case("mask")
    assert main([*save(tmp_path / "case.npz", case), "--fuse-relu", "mask"]) == 0
    assert f"bwd [2, 3, 4] {dtype}" in capsys.readouterr().out
    assert_same(cases.load(tmp_path / "case.npz", "mask"), case)


def assert_same(got: object, want: object) -> None:
    """Two cases with the same arrays."""
    for name, array in vars(want).items():
        assert np.array_equal(getattr(got, name), array)
        assert not isinstance(array, np.ndarray) or getattr(got, name).dtype == array.dtype


@pytest.mark.parametrize("relu", ["mask", "recompute"])
def test_a_residual_from_a_file(relu: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = Draw((2, 3, 4)).case(relu, residual=True)
    argv = [*save(tmp_path / "case.npz", case), "--fuse-relu", relu]
    assert main([*argv, "--residual"]) == 0
    assert outputs_in(capsys.readouterr().out) == ["dx", "dgamma", "dbeta", "dresidual"]
    assert main(argv) == 0
    assert outputs_in(capsys.readouterr().out) == ["dx", "dgamma", "dbeta"]
    assert_same(cases.load(tmp_path / "case.npz", relu, residual=True), case)
    assert cases.load(tmp_path / "case.npz", relu).residual is None


@pytest.mark.parametrize("op", ["fwd", "eval", "pair"])
def test_a_forward_from_a_file(op: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw = Draw((4, 3, 5), "bfloat16")
    case = draw.forward("mask", op != "eval", residual=True)
    arrays = {name: getattr(case, name) for name in cases.PAIR_ARRAYS if name != "dy"}
    np.savez(tmp_path / "case.npz", dy=draw.gradient(), **arrays)
    argv = ["verify", "--op", op, "--input", str(tmp_path / "case.npz"), "--fuse-relu", "mask", "--residual"]
    assert main(argv) == 0
    assert capsys.readouterr().out.startswith(f"{op} [4, 3, 5] bfloat16")
    assert_same(cases.load_forward(tmp_path / "case.npz", "mask", op != "eval", residual=True), case)


def test_what_a_forward_file_may_leave_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "x.npz", x=np.random.default_rng(0).standard_normal((4, 3, 5)).astype(np.float32))
    argv = ["--input", str(tmp_path / "x.npz")]
    assert main(["verify", "--op", "fwd", *argv]) == 0
    assert outputs_in(capsys.readouterr().out) == ["y", "mean", "var"]
    for op, lacking in (("eval", "running_mean, running_var"), ("pair", "dy")):
        assert exit_code(["verify", "--op", op, *argv]) == 2
        assert f"lacks {lacking}" in capsys.readouterr().err
    assert exit_code(["verify", "--op", "fwd", "--residual", *argv]) == 2
    assert "lacks residual" in capsys.readouterr().err


@pytest.mark.parametrize("op", ["bwd", "fwd", "pair"])
def test_an_empty_batch_in_a_file(op: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = np.zeros((0, 3, 5), np.float32)
    np.savez(tmp_path / "case.npz", x=empty, dy=empty)
    assert exit_code(["verify", "--op", op, "--input", str(tmp_path / "case.npz")]) == 2
    assert "x has shape (0, 3, 5), so no kernel would run" in capsys.readouterr().err


def test_the_gradient_of_a_pair_is_checked_like_an_argument(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "case.npz", x=np.ones((2, 3), np.float32), dy=np.ones((2, 3)))
    assert exit_code(["verify", "--op", "pair", "--input", str(tmp_path / "case.npz")]) == 2
    assert "dy is float64; accepted: float32" in capsys.readouterr().err


def test_what_a_file_may_leave_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = Draw((2, 3, 4), mean=3).case("mask")
    argv = save(tmp_path / "case.npz", case, "mean", "var", "gamma", "beta", "relu_mask")
    assert main(argv) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["bwd", "output", "dx"]
    loaded = cases.load(tmp_path / "case.npz", "mask")
    assert np.array_equal(loaded.mean, case.mean) and np.array_equal(loaded.var, case.var)
    assert loaded.relu_mask is not None and loaded.relu_mask.any() and not loaded.relu_mask.all()


@pytest.mark.parametrize(
    ("left_out", "options", "message"),
    [
        (("x",), [], "lacks x"),
        (("mean",), ["--eval"], "lacks mean"),
        ((), ["--residual"], "lacks residual"),
        ((), ["--eps", "-1"], "eps is -1.0"),
    ],
)
def test_a_file_that_does_not_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], left_out: tuple[str, ...], options: list[str], message: str
) -> None:
    assert exit_code([*save(tmp_path / "case.npz", Draw((2, 3, 4)).case(), *left_out), *options]) == 2
    assert message in capsys.readouterr().err


def test_files_of_another_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "more.npz", x=np.ones((2, 3)), dy=np.ones((2, 3)), weight=np.ones(3))
    np.save(tmp_path / "array.npy", np.ones(3))
    (tmp_path / "text.npz").write_text("no archive")
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04 broken")
    (tmp_path / "empty.npz").write_bytes(b"")
    np.savez_compressed(tmp_path / "deflated.npz", x=np.arange(5000.0))
    whole = (tmp_path / "deflated.npz").read_bytes()
    (tmp_path / "deflated.npz").write_bytes(whole[:100] + b"\xff" * 40 + whole[140:])
    for name, message in (
        ("more.npz", "unknown weight"),
        ("array.npy", "cannot be read as a .npz file"),
        ("text.npz", "text.npz cannot be read as a .npz file: it is no zip archive"),
        ("broken.npz", "broken.npz cannot be read as a .npz file: it is no zip archive"),
        ("empty.npz", "empty.npz cannot be read as a .npz file: it is no zip archive"),
        ("deflated.npz", "cannot be read as a .npz file"),
    ):
        assert exit_code(["verify", "--op", "bwd", "--input", str(tmp_path / name)]) == 2
        assert message in capsys.readouterr().err


def test_arrays_in_a_file_are_checked_like_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "case.npz", x=np.ones((2, 3)), dy=np.ones((2, 3)))
    assert exit_code(["verify", "--op", "bwd", "--input", str(tmp_path / "case.npz")]) == 2
    assert "x is float64; accepted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.ones(3, np.float32)}, "has rank 1; accepted: ranks 2 to 5"),
        ({"x": np.full((2, 3), "a")}, "x is <U1; accepted: float32"),
        ({"mean": np.zeros(3, np.float32)}, "case.npz has only mean of mean and var; accepted: both or neither"),
        ({"var": np.zeros(3, np.float32)}, "case.npz has only var of mean and var; accepted: both or neither"),
        ({"mean": np.zeros(4, np.float32), "var": np.ones(3, np.float32)}, "mean has shape (4,); accepted: (3,)"),
        ({"mean": np.zeros(3, np.float32), "var": np.full(3, "a")}, "var is <U1; accepted: float32"),
        ({"gamma": np.ones(4, np.float32)}, "gamma has shape (4,); accepted: (3,)"),
    ],
)
def test_arrays_are_checked_before_a_mask_is_made(
    arrays: dict[str, Array], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ones = np.ones((2, 3), np.float32)
    np.savez(tmp_path / "case.npz", **({"x": ones, "dy": ones} | arrays))
    argv = ["verify", "--op", "bwd", "--fuse-relu", "mask", "--input", str(tmp_path / "case.npz")]
    assert exit_code(argv) == 2
    assert message in capsys.readouterr().err


def test_bfloat16_survives_numpys_file_format(tmp_path: Path) -> None:
    case = Draw((2, 3, 4), "bfloat16").case()
    save(tmp_path / "case.npz", case)
    assert cases.load(tmp_path / "case.npz").x.dtype == ml_dtypes.bfloat16


def test_drawn_inputs_are_what_was_asked_for() -> None:
    case = Draw((50, 3, 40), "float32", mean=7, std=2, seed=5).case("mask", eps=1e-3)
    wide = case.x.astype(np.float64)
    assert wide.mean() == pytest.approx(7, abs=0.2) and wide.std() == pytest.approx(2, abs=0.1)
    assert np.allclose(case.mean, wide.mean((0, 2)), rtol=1e-6) and np.allclose(case.var, wide.var((0, 2)), rtol=1e-6)
    assert case.relu == "mask" and case.eps == 1e-3
    assert not np.array_equal(Draw((50, 3, 40), seed=6).case().x, Draw((50, 3, 40), seed=7).case().x)


def test_the_doctor_says_all_is_well(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(LNC_VARIABLE, "1")
    assert main(["doctor"]) == 0
    report = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert report["nki_bn"].strip() == nki_bn.__version__ and report["numpy"].strip() == np.__version__
    assert report["nki in use"].strip().startswith(nki_bn.installation.kind)
    assert report[LNC_VARIABLE].strip() == "1"
    assert report["forward of [2, 3, 4]"].strip() == report["backward of [2, 3, 4]"].strip() == "ok"


def test_the_doctor_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    spoil_outputs(monkeypatch, lambda output: output + 1)
    assert main(["doctor"]) == 1
    assert "not ok" in capsys.readouterr().out

    def fail(*arguments: object) -> None:
        raise RuntimeError("no such engine")

    monkeypatch.setattr(execute, "run_backward", fail)
    assert main(["doctor"]) == 1
    assert "not ok: RuntimeError: no such engine" in capsys.readouterr().out


@pytest.mark.parametrize(
    "variable, value, said",
    [
        (LNC_VARIABLE, "4", f"4: not accepted: {LNC_VARIABLE} is '4'; accepted on trn2: 1 or 2"),
        ("NKI_BN_REPLAY", "yes", "yes: not accepted: NKI_BN_REPLAY is 'yes'; accepted: 0, 1"),
        ("NKI_SIMULATOR", "x", "x: not accepted: NKI_SIMULATOR is 'x'; accepted: 0, 1, or not set"),
        ("NEURON_PLATFORM_TARGET_OVERRIDE", "trn9", "trn9: not accepted: NEURON_PLATFORM_TARGET_OVERRIDE: target "),
        ("NKI_PRECISE_FP", "yes", "yes: counts as not set; accepted: 0, 1"),
    ],
)
def test_the_doctor_says_which_variable_is_wrong(
    variable: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, value)
    assert main(["doctor"]) == int("not accepted" in said)
    report = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert report[variable].strip().startswith(said)


def test_lint_is_wired_to_the_linter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernel = tmp_path / "kernel.py"
    kernel.write_text("import nki\n\n\n@nki.jit\ndef kernel(x, **kwargs):\n    return lambda: x\n")
    assert main(["lint", str(kernel)]) == 1
    assert "kernel.py" in capsys.readouterr().out


def test_as_a_program(tmp_path: Path) -> None:
    """From another folder, as installed."""
    program = [sys.executable, "-m", "nki_bn.cli", *SMALL]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "dbeta" in done.stdout and not done.stderr
