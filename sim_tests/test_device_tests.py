# SPDX-License-Identifier: Apache-2.0
"""The tests of a device are alive: skipped without one, and right where the embedded simulator stands for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from vendor_stand_in import write_vendor

from nki_bn.simulator.install import CHOICE_VARIABLE

ROOT = Path(__file__).resolve().parents[1]


PYTEST = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist"]


def run(*arguments: str | Path, **variables: str) -> tuple[int, str]:
    """Exit code and output of pytest on hw_tests, from a fresh process."""
    command = [*PYTEST, "-q", "-rs", "hw_tests"]
    environment = {name: value for name, value in os.environ.items() if name != CHOICE_VARIABLE} | variables
    done = subprocess.run([*command, *map(str, arguments)], env=environment, capture_output=True, text=True, cwd=ROOT)
    return done.returncode, done.stdout + done.stderr


def test_no_baseline_comes_with_the_project() -> None:
    assert not list((ROOT / "hw_tests").rglob("*.jsonl"))


def test_all_are_skipped_without_a_device() -> None:
    code, said = run()
    reasons = {line.split(": ", 1)[1] for line in said.splitlines() if line.startswith("SKIPPED")}
    assert code == 0 and reasons == {
        "no Neuron device here (pytest hw_tests --on simulator tries the tests without one)"
    }
    assert "passed" not in said.splitlines()[-1] and "skipped" in said.splitlines()[-1]


def test_the_reason_is_said_without_an_option() -> None:
    done = subprocess.run([*PYTEST, "hw_tests/test_compile.py"], capture_output=True, text=True, cwd=ROOT)
    said = "hw_tests are skipped: no Neuron device here (pytest hw_tests --on simulator tries the tests without one)"
    assert done.stdout.splitlines().count(said) == 1 and done.returncode == 0


SOME = "planned-bfloat16 or operands or rsqrt or bn_stats or fwd-mlp or two_round or nc_matmul"
ON_DEVICE = "(correctness and planned-bfloat16) or operands or two_round"
TIMES = "baseline and (fwd-large or eval-large)"


def test_some_pass_on_the_simulator() -> None:
    """Of every file but that of performance some."""
    code, said = run("--on", "simulator", "-v", "-k", SOME)
    assert code == 0 and "skipped" not in said.splitlines()[-1], said
    for path in (ROOT / "hw_tests").glob("test_*.py"):
        assert path.stem == "test_performance" or f"{path.stem}.py" in said, path.name


def test_some_pass_where_a_vendors_package_launches(tmp_path: Path) -> None:
    """As on a device: an nki is installed, and kernels are launched rather than simulated."""
    path = os.pathsep.join(map(str, (write_vendor(tmp_path), Path(__file__).parent)))
    variables = {"PYTHONPATH": path, "NEURON_PLATFORM_TARGET_OVERRIDE": "trn2"}
    code, said = run("-v", "-p", "device_stand_in", "-k", ON_DEVICE, **variables)
    assert code == 0 and "skipped" not in said.splitlines()[-1] and "passed" in said.splitlines()[-1], said


def test_baselines(tmp_path: Path) -> None:
    """They are recorded, compared with, and missed by the one whose time is made better."""
    baselines = tmp_path / "baselines" / "modelled.jsonl"
    only = ("--on", "simulator", "-v", "-k", TIMES, "--baselines", baselines)
    code, said = run(*only, "--record-baselines")
    assert code == 0, said
    rows = [json.loads(line) for line in baselines.read_text().splitlines()]
    assert [(row["timing"], row["op"]) for row in rows] == [("modelled", "fwd"), ("modelled", "eval")]
    rows[0]["modelled_us"] /= 1.06
    baselines.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    code, said = run(*only)
    assert code == 1 and "1 failed, 1 passed" in said and "slower" in said, said


@pytest.mark.nightly
def test_all_pass_on_the_simulator() -> None:
    code, said = run("--on", "simulator")
    assert code == 0, said
