# SPDX-License-Identifier: Apache-2.0
"""The example on scikit-learn's digits: it runs, and the distance it allows is the derived one."""

from __future__ import annotations

import importlib.util
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


@pytest.mark.nightly
def test_the_whole_example_and_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    digits = load()
    plain, _ = digits.compare(60)
    images, labels = digits.load_images()
    drift = allowed_drift(digits.make_network(), images[:-256], labels[:-256], 60, digits.train)
    assert plain[-1] < plain[0] / 5
    assert drift[-1] <= digits.BOUND * plain[0] < 2 * drift[-1]
