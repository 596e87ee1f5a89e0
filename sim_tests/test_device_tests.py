# SPDX-License-Identifier: Apache-2.0
"""The tests of a device are alive: skipped without one, and right where the embedded simulator stands for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nki_bn.simulator.install import CHOICE_VARIABLE

ROOT = Path(__file__).resolve().parents[1]


def run(*arguments: str | Path) -> tuple[int, str]:
    """Exit code and output of pytest on hw_tests, from a fresh process."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-q", "-rs", "hw_tests"]
    environment = {name: value for name, value in os.environ.items() if name != CHOICE_VARIABLE}
    done = subprocess.run([*command, *map(str, arguments)], env=environment, capture_output=True, text=True, cwd=ROOT)
    return done.returncode, done.stdout + done.stderr


def test_all_are_skipped_without_a_device() -> None:
    code, said = run()
    reasons = {line.split(": ", 1)[1] for line in said.splitlines() if line.startswith("SKIPPED")}
    assert code == 0 and reasons == {
        "no Neuron device here (pytest hw_tests --on simulator tries the tests without one)"
    }
    assert "passed" not in said.splitlines()[-1] and "skipped" in said.splitlines()[-1]


SOME = "planned-bfloat16 or operands or rsqrt or bn_stats or fwd-large or fwd-mlp or two_round or nc_matmul"


def test_some_pass_on_the_simulator(tmp_path: Path) -> None:
    """Of every file some; baselines are recorded, compared with, and missed once their time is made better."""
    baselines = tmp_path / "baselines" / "modelled.jsonl"
    code, said = run("--on", "simulator", "--baselines", baselines, "--record-baselines", "-k", SOME)
    assert code == 0 and "skipped" not in said.splitlines()[-1], said
    (row,) = (json.loads(line) for line in baselines.read_text().splitlines())
    assert row["timing"] == "modelled" and row["op"] == "fwd" and row["modelled_us"] > 0
    only = ("--on", "simulator", "--baselines", baselines, "-k", "baseline and fwd-large")
    assert run(*only)[0] == 0
    baselines.write_text(json.dumps(row | {"modelled_us": row["modelled_us"] / 1.06}) + "\n")
    code, said = run(*only)
    assert code == 1 and "slower" in said
    code, said = run("--on", "simulator", "--baselines", tmp_path / "none.jsonl", "-k", "baseline and fwd-large")
    assert code == 0 and "record one with --record-baselines" in said


@pytest.mark.nightly
def test_all_pass_on_the_simulator() -> None:
    code, said = run("--on", "simulator")
    assert code == 0, said
