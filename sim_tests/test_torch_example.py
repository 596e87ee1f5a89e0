# SPDX-License-Identifier: Apache-2.0
"""The example on scikit-learn's digits: it runs, and the distance it allows is the derived one."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from perturbed import allowed_drift

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "digits.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("digits", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_few_steps_and_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    load().main(["--steps", "3", "--picture", str(tmp_path / "digits.png")])
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")
    assert "the curves are at most" in capsys.readouterr().out


def test_curves_that_are_apart_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    digits = load()
    curves = iter(([1.0, 0.5], [1.0, 0.49]))
    monkeypatch.setattr(digits, "train", lambda *arguments: next(curves))
    with pytest.raises(RuntimeError, match="further apart than rounding explains"):
        digits.compare(2)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--steps", "0"], "'0' is no number of steps; accepted: whole numbers from 1 up"),
        (["--steps", "-1"], "'-1' is no number of steps"),
        (["--picture", "no/digits.png"], "'no/digits.png' cannot be written: no is no folder"),
        (["--picture", "digits.xyz"], "'digits.xyz' is of no kind that can be written; accepted: .png"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_trained(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    digits = load()
    monkeypatch.setattr(digits, "compare", lambda steps: pytest.fail("trained"))
    with pytest.raises(SystemExit, match="2"):
        digits.main(arguments)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "missing, program, said",
    [
        ("torch", "import nki_bn.torch", "torch is not installed; the extra torch has it: .* '.[torch]'"),
        (
            "torch",
            f"import runpy; runpy.run_path({str(EXAMPLE)!r})",
            ".*torch.*; the extra examples has .* '.[examples]'",
        ),
        (
            "sklearn",
            f"import runpy; runpy.run_path({str(EXAMPLE)!r})",
            ".*sklearn.*; the extra examples has .* '.[examples]'",
        ),
    ],
)
def test_what_is_not_installed_is_named_with_its_extra(missing: str, program: str, said: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; {program}"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and re.match("ModuleNotFoundError: " + said.replace("[", "\\["), last), done.stderr


@pytest.mark.nightly
def test_the_whole_example_and_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    digits = load()
    plain, _ = digits.compare(60)
    images, labels = digits.load_images()
    drift = allowed_drift(digits.make_network(), images[:-256], labels[:-256], 60, digits.train)
    assert plain[-1] < plain[0] / 5
    assert drift[-1] <= digits.BOUND * plain[0] < 2 * drift[-1]
