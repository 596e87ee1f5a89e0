# SPDX-License-Identifier: Apache-2.0
"""A short fuzzing of every surface, longer at night; the checks themselves; sweeps that are killed."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzz.__main__ import SURFACES
from fuzz.__main__ import main as fuzz_main
from fuzz.command import command_line, run
from fuzz.interpretation import Operand, Step
from fuzz.memory import Tile
from fuzz.programs import Program
from fuzz.simulator import check_program
from fuzz.surface import HangError, Surface, check_refusal, limited, run_examples
from fuzz.watching import Plan, fuzz
from hypothesis import strategies as st

from nki_bn.bench.rows import read_records

SMOKE = {"command": 40, "ops": 40, "readers": 150, "simulator": 60, "sites": 5, "torch": 10}


def fuzzed(name: str, number: int, seed: int) -> int:
    return run_examples(importlib.import_module(f"fuzz.{name}").SURFACE, number, seed)


@pytest.mark.parametrize("name", SURFACES)
def test_a_few_examples(name: str) -> None:
    assert fuzzed(name, SMOKE[name], 0) >= SMOKE[name] // 2


@pytest.mark.nightly
@pytest.mark.parametrize("name", SURFACES)
def test_many_examples(name: str) -> None:
    seed = int(time.time())
    assert fuzzed(name, 30 * SMOKE[name], seed) >= SMOKE[name], f"seed {seed}"


def test_a_fault_is_found_and_a_hang_ends() -> None:
    def check(value: int) -> None:
        assert value < 50

    with pytest.raises(AssertionError):
        run_examples(Surface(st.integers(0, 99), check), 200, 0)
    with pytest.raises(HangError), limited(0.05):
        time.sleep(5)


def quick(value: int) -> None:
    assert isinstance(value, int)


def idle(value: int) -> None:
    """A hang that Python code can be interrupted in, and that takes any Exception for its own."""
    while value >= 0:
        with contextlib.suppress(Exception):
            time.sleep(0.01)


def deaf(value: int) -> None:
    """A hang that heeds no signal."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    idle(value)


def killed(value: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def greedy(value: int) -> None:
    np.zeros(1 << 40, np.uint8)


@pytest.mark.parametrize(
    ("check", "code", "said"),
    [
        (quick, 0, "^some: nothing found in 200 examples, 0.0 minutes\n$"),
        (idle, 1, "^a fault with --seed 5: HangError from\n  number 7\nsome: a fault in 1 examples"),
        (deaf, 1, "^a hang: not done after 1 s, and not to be interrupted\n  number 7\nsome: a fault in 1 examples"),
        (killed, 1, "^the process has ended, with code -9, in\n  number 7\nsome: a fault in 1 examples"),
        (
            greedy,
            1,
            "^a fault with --seed 5: .*MemoryError from\n  number 7\nlooking .*\nsome: a fault in .*--seed 5 finds",
        ),
    ],
)
def test_hangs_and_deaths_are_told_with_their_example(
    check: Callable[[int], None], code: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    surface = Surface(st.just(7) if code else st.integers(), check, "number {}".format)
    assert fuzz(Plan("some", 0.01, 5, 0.2, 0.5), surface) == code
    assert re.search(said, capfd.readouterr().out)


@pytest.mark.parametrize(
    "error", [KeyError("eps"), ValueError("no"), ValueError("eps is odd"), TypeError("accepted: 1")]
)
def test_what_is_no_documented_refusal(error: Exception) -> None:
    with pytest.raises(type(error)):
        check_refusal(error, {"eps"})


def test_a_documented_refusal() -> None:
    check_refusal(ValueError("eps is 0; accepted: above 0"), {"eps"})
    assert Surface(st.none(), print).check is print


PLAIN = (Tile((2, 6), "float32", "sbuf", 1), Tile((2, 6), "float32", "sbuf", 2))


def program(name: str, path: Any = (), **arguments: Any) -> Program:
    return Program(PLAIN, (Step(name, {"dst": Operand(0, path), "src": Operand(1, path)}, arguments),), "ideal")


def test_the_interpretation_tells_a_wrong_value(monkeypatch: pytest.MonkeyPatch) -> None:
    check_program(program("tensor_copy"))
    monkeypatch.setattr("fuzz.interpretation.wide", lambda values: values.astype(np.float32) + 1)
    wrong = Tile((2, 6), "bfloat16", "sbuf", 1)
    with pytest.raises(AssertionError, match="tile 0"):
        check_program(Program((wrong, PLAIN[1]), program("tensor_copy").steps, "ideal"))


def test_of_several_values_for_one_element_the_last_one_stays() -> None:
    """Columns 0, 2, 1, 3, 2, 4 of the pattern: the fifth element written is column 2 again."""
    overlapping = (("ap", (((6, 2), (1, 3), (2, 2)), 0)),)
    whole = Operand(1)
    for dtype in ("float32", "float8_e5m2", "int16"):
        tiles = (Tile((2, 6), dtype, "sbuf", 1), PLAIN[1])
        check_program(Program(tiles, (Step("tensor_copy", {"dst": Operand(0, overlapping), "src": whole}),), "ideal"))
        masked = Step(
            "nc_stream_shuffle", {"dst": Operand(0, overlapping), "src": Operand(0)}, {"shuffle_mask": SHUFFLE}
        )
        check_program(Program(tiles, (masked,), "ideal"))


SHUFFLE = [1, 255, *range(2, 32)]


@pytest.mark.parametrize("words", [["plan", "a b", ""], ["lint", "9" * 5000], ["lint", "'" * 120, "\x1b"]])
def test_commands_are_told_as_a_shell_takes_them(words: list[str]) -> None:
    line = command_line(words)
    script = line.replace("nki-bn", "printf '%s\\0'", 1)
    out = subprocess.run(["bash", "-c", script], capture_output=True, check=True).stdout
    assert out.decode().split("\0")[:-1] == words and len(line) < 100


@pytest.mark.parametrize("name", ["a\nb", "\x1b[31m", "\udcff"])
def test_odd_arguments_stay_on_one_line(name: str) -> None:
    code, said, complained = run(["plan", name, "--shape", "2,3,4"])
    assert code == 2 and not said and complained.count("\n") == 1 and complained[:-1].isprintable()


def sweep(folder: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "nki_bn.cli", "bench", "shapes.toml", "--dry", "-o", "out.jsonl", *options]
    # A shell has its background jobs ignore interrupts, and the children of these would as well.
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=pipe, text=True, preexec_fn=heed)


def stopped(folder: Path, how: signal.Signals, *options: str) -> list[str]:
    """The rows of cases that are done, after a sweep was ended once it had done two more of them."""
    out = folder / "out.jsonl"
    before = out.read_bytes().count(b"\n") if options else 0
    running = sweep(folder, *options)
    start = time.monotonic()
    while not (out.exists() and out.read_bytes().count(b"\n") >= before + 2) and time.monotonic() - start < 60:
        time.sleep(0.002)
    running.send_signal(how)
    said, complained = running.communicate(timeout=60)
    assert running.returncode == (-how if how in (signal.SIGKILL, signal.SIGTERM) else 130), said
    assert complained == ("nki-bn: interrupted\n" if how == signal.SIGINT else "")
    assert [path.name for path in folder.glob("*.part")] == []
    return [line for line in out.read_text().split("\n")[:-1] if json.loads(line)["status"] == "ok"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_killed_sweep_goes_on(how: signal.Signals, tmp_path: Path) -> None:
    """Every row that was written stays, byte by byte, and only the others are run again; so after a second time."""
    layers = "".join(f"[[layer]]\nchannels = {channels}\nspatial = [9]\ncount = 1\n" for channels in range(1, 61))
    (tmp_path / "shapes.toml").write_text(f'model = "many"\n{layers}')
    done = stopped(tmp_path, how)
    more = stopped(tmp_path, how, "--resume")
    assert 2 <= len(done) < len(more) < 60 and more[: len(done)] == done
    again = sweep(tmp_path, "--resume")
    assert again.communicate(timeout=120)[1] == "" and again.returncode == 0
    out = tmp_path / "out.jsonl"
    assert out.read_text().split("\n")[: len(more)] == more
    assert sorted(record.shape[1] for record in read_records(out)) == list(range(1, 61))


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "inf", "ten"])
def test_a_time_that_is_none_is_refused(
    minutes: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fuzz", "--surface", "ops", f"--minutes={minutes}"])
    with pytest.raises(SystemExit, match="2"):
        fuzz_main()
    assert f"'{minutes}' is no time; accepted: finite numbers above 0" in capsys.readouterr().err
