# SPDX-License-Identifier: Apache-2.0
"""Which nki is used when both are there, and both simulators compared, instruction by instruction."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import elsewhere
import numpy as np
import probes
import pytest
import strategy_cases
from vendor_stand_in import write_vendor

from nki_bn import execute, lint
from nki_bn.simulator.install import CHOICE_VARIABLE, vendor_version

ROOT = Path(__file__).resolve().parents[1]
HERE = Path(__file__).parent


@pytest.mark.skipif(vendor_version() is None, reason="the vendor's nki is not installed: nothing to compare with")
def test_both_simulators_agree_instruction_by_instruction() -> None:
    """Every result is exact in float32, so they agree to the bit."""
    vendor = elsewhere.call("vendor", "probes", "instruction_results")
    assert_same(vendor, elsewhere.call("embedded", "probes", "instruction_results"))


def assert_same(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert probes.unequal(got, want) == []


def test_instructions_are_what_numpy_says() -> None:
    """The exact results that both simulators, and a device, are compared with."""
    assert_same(probes.instruction_results(), probes.expected_results())


@pytest.mark.parametrize("version", lint.VERSIONS)
def test_probe_kernels_are_in_the_subset(version: str) -> None:
    assert [str(finding) for finding in lint.lint_file(HERE / "probe_kernels.py", version)] == []


@pytest.mark.parametrize("place", probes.PLACES)
def test_the_operand_probe_finds_what_the_mode_does(place: str) -> None:
    """18 significant bits are a relative error of at most 2^-18; of 128 drawn operands one comes near."""
    if execute.which_nki().kind == "embedded":
        assert 2.0**-19 < probes.operand_error(place, "trn2") <= 2.0**-18
    assert probes.operand_error(place, "ideal") == 0


def python(code: str, *paths: Path, choice: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run code where ``paths`` come first, and the choice of nki is this."""
    return started("-c", code, paths=paths, choice=choice)


def started(
    *arguments: str | Path, paths: tuple[Path, ...] = (), choice: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments, likewise."""
    kept = {name: value for name, value in os.environ.items() if name != CHOICE_VARIABLE}
    environment = (
        kept | {"PYTHONPATH": os.pathsep.join(map(str, paths))} | ({CHOICE_VARIABLE: choice} if choice else {})
    )
    command = [sys.executable, "-P", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=HERE)


WHICH = "import nki_bn; print(nki_bn.installation.kind, '-', nki_bn.installation.reason)"


@pytest.mark.parametrize(
    ("version", "choice", "said"),
    [
        ("0.6.0", None, "vendor - the vendor's nki 0.6.0 is installed"),
        ("0.6.0", "vendor", "vendor - the vendor's nki 0.6.0 is installed"),
        ("0.6.0", "embedded", "embedded - nki 0.6.0 is installed and is replaced on request"),
        ("0.0.1", None, "embedded - nki 0.0.1 is installed and is a placeholder"),
        (
            "0.0.1",
            "vendor",
            "ImportError: NKI_BN_NKI is 'vendor', but the placeholder nki 0.0.1 is installed",
        ),
        ("0.6.0", "other", "ValueError: NKI_BN_NKI is 'other'; accepted: embedded, vendor, or not set"),
    ],
)
def test_which_nki(version: str, choice: str | None, said: str, tmp_path: Path) -> None:
    done = python(WHICH, write_vendor(tmp_path, version), choice=choice)
    assert said in (done.stderr if done.returncode else done.stdout)
    assert (done.returncode != 0) == ("Error" in said)


# What the installed command consists of.
SCRIPT = "import sys\nfrom nki_bn.cli import main\nsys.exit(main())\n"


@pytest.fixture(params=["command", "module"])
def command(request: pytest.FixtureRequest, tmp_path: Path) -> list[str | Path]:
    """``nki-bn`` in both ways in which it is started."""
    if request.param == "module":
        return ["-m", "nki_bn.cli"]
    path = tmp_path / "nki-bn"
    path.write_text(SCRIPT)
    return [path]


REFUSED = "NKI_BN_NKI is 'other'; accepted: embedded, vendor, or not set"


def test_the_command_refuses_a_wrong_choice_in_one_line(command: list[str | Path]) -> None:
    done = started(*command, "plan", "--shape", "2,3", choice="other")
    assert (done.returncode, done.stdout) == (2, "") and done.stderr == f"nki-bn plan: error: {REFUSED}\n"
    assert started(*command, "--version", choice="other").returncode == 0


def test_the_doctor_says_that_the_choice_is_wrong(command: list[str | Path]) -> None:
    done = started(*command, "doctor", choice="other")
    report = dict(line.split("  ", 1) for line in done.stdout.splitlines())
    assert (done.returncode, done.stderr) == (1, "")
    assert report["nki in use"].strip() == f"refused: {REFUSED}" and report["NKI_BN_NKI"].strip() == "other"
    assert report["forward of [2, 3, 4]"].strip() == "not ok: no nki is in use"


def test_a_refused_import_leaves_nothing_behind() -> None:
    twice = "\n".join(["try: import nki_bn", "except ValueError: pass", "import nki_bn"])
    done = python(twice, choice="other")
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == f"ValueError: {REFUSED}"


@pytest.mark.parametrize("choice", ["vendor", "other"])
@pytest.mark.parametrize("installed", [True, False])
def test_the_runner_is_the_embedded_simulator(choice: str, installed: bool, tmp_path: Path) -> None:
    """It refuses to take another nki's place."""
    paths = (write_vendor(tmp_path / "vendor"),) if installed else ()
    script = tmp_path / "script.py"
    script.write_text("print('run')\n")
    done = started("-m", "nki_bn.simulator", script, paths=paths, choice=choice)
    said = f"NKI_BN_NKI is '{choice}', and this runs the embedded simulator; accepted: embedded, or not set"
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.splitlines()[0] == said
    assert started("-m", "nki_bn.simulator", script, paths=paths, choice="embedded").stdout == "run\n"


def pytest_run(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments]
    kept = {name: value for name, value in os.environ.items() if name != CHOICE_VARIABLE}
    environment = kept | ({"PYTHONPATH": str(path)} if path else {})
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.skipif(vendor_version() is not None, reason="the vendor's nki is installed: nothing to refuse")
def test_the_vendors_simulator_is_refused_without_its_package() -> None:
    done = pytest_run("sim_tests/test_reference.py", "--simulator", "vendor")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "NKI_BN_NKI is 'vendor', but no nki is installed" in done.stderr


def test_tests_run_on_the_vendors_package(tmp_path: Path) -> None:
    """Single instructions; what only the embedded simulator has is skipped."""
    files = ("test_isa_statistics.py", "test_simulator_dry.py")
    path = write_vendor(tmp_path)
    done = pytest_run(*(f"sim_tests/{name}" for name in files), "--simulator", "vendor", "-rs", path=path)
    assert done.returncode == 0, done.stdout
    assert "needs the embedded simulator: pytest --simulator embedded" in done.stdout
    assert int(done.stdout.split(" passed")[0].split()[-1]) > 20, done.stdout


def test_two_packages_are_compared_through_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(write_vendor(tmp_path)))
    vendor = elsewhere.call("vendor", "probes", "instruction_results")
    assert_same(vendor, probes.instruction_results())
    name = next(iter(strategy_cases.CASES))
    rows = strategy_cases.judged(name, elsewhere.call("vendor", "strategy_cases", "results", name))
    assert rows and all(row.ok for row in rows)
    with pytest.raises(RuntimeError, match="probes.launched with the embedded nki failed"):
        elsewhere.call("embedded", "probes", "launched")
