# SPDX-License-Identifier: Apache-2.0
"""Which path a batch norm takes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_judging import SHAPES, drawn

import nki_bn.torch as nbt
from nki_bn import execute, ops
from nki_bn.simulator import Installation
from nki_bn.torch.paths import path_of

SHAPE = SHAPES[4]


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of ``nki_bn.batch_norm_fwd`` by name of the dtype."""
    calls: list[str] = []
    forward = ops.batch_norm_fwd

    def noted(x: Any, *arguments: Any, **named: Any) -> Any:
        calls.append(x.dtype.name)
        return forward(x, *arguments, **named)

    monkeypatch.setattr(ops, "batch_norm_fwd", noted)
    return calls


@pytest.mark.parametrize(
    "device, backend, variable, path",
    [
        ("cpu", None, None, "torch"),
        ("cpu", None, "0", "torch"),
        ("cpu", None, "1", "simulator"),
        ("cpu", "torch", "1", "torch"),
        ("cpu", "simulator", None, "simulator"),
        ("cuda", None, "1", "torch"),
        ("meta", None, "1", "torch"),
        ("xla", None, None, "neuron"),
        ("neuron", None, "1", "neuron"),
        ("privateuseone", None, None, "neuron"),
        ("neuron", "torch", None, "torch"),
        ("xla", "neuron", None, "neuron"),
    ],
)
def test_the_path(
    device: str, backend: str | None, variable: str | None, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NKI_SIMULATOR", raising=False)
    if variable is not None:
        monkeypatch.setenv("NKI_SIMULATOR", variable)
    assert path_of(device, backend) == path


@pytest.mark.parametrize("value", ["yes", "true", "2", ""])
def test_a_wrong_value_of_the_variable_is_no_choice(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of the paths is taken in silence; where the variable does not count, it does not matter."""
    monkeypatch.setenv("NKI_SIMULATOR", value)
    module, said = nbt.BatchNorm2d(3), f"NKI_SIMULATOR is '{value}'; accepted: 0, 1, or not set"
    for call in (module, nbt.SyncBatchNorm(3), torch.compile(module, backend="eager")):
        with pytest.raises(Exception, match=said):
            call(drawn(SHAPE))
    assert f"path=none, as {said}" in repr(module)
    assert path_of("cpu", "torch") == path_of("cuda", None) == "torch"
    assert path_of("cpu", "simulator") == "simulator" and path_of("neuron", None) == "neuron"


@pytest.mark.parametrize(
    "backend, device", [("neuron", "cpu"), ("neuron", "cuda"), ("simulator", "xla"), ("simulator", "cuda")]
)
def test_a_request_that_does_not_fit_the_device_is_refused(backend: str, device: str) -> None:
    with pytest.raises(ValueError, match=f"backend is '{backend}' and the input is on {device}; accepted: an input on"):
        path_of(device, backend)


def test_modules_and_functions_refuse_as_well() -> None:
    for call in (nbt.BatchNorm2d(3, backend="neuron"), nbt.BatchNormReLU2d(3, backend="neuron").eval()):
        with pytest.raises(ValueError, match="accepted: an input on neuron or privateuseone or xla"):
            call(drawn(SHAPE))
    with pytest.raises(ValueError, match="backend is 'gpu'; accepted"):
        nbt.batch_norm(drawn(SHAPE), None, None, training=True, backend="gpu")
    with pytest.raises(ValueError, match="backend is 'gpu'; accepted"):
        nbt.BatchNorm2d(3, backend="gpu")


def test_the_simulator_is_not_a_device_in_disguise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a device the vendor's nki would run NumPy arrays there, unless told to simulate."""
    monkeypatch.setattr(execute, "which_nki", lambda: Installation("vendor", "for the test"))
    monkeypatch.setattr(execute, "has_device", lambda: True)
    monkeypatch.delenv("NKI_SIMULATOR", raising=False)
    with pytest.raises(RuntimeError, match="beside a Neuron device; accepted with NKI_SIMULATOR=1 set"):
        path_of("cpu", "simulator")
    monkeypatch.setenv("NKI_SIMULATOR", "1")
    assert path_of("cpu", "simulator") == "simulator"


def test_the_variable_turns_the_simulator_on(monkeypatch: pytest.MonkeyPatch, simulated: list[str]) -> None:
    module = nbt.BatchNorm2d(3)
    monkeypatch.delenv("NKI_SIMULATOR", raising=False)
    module(drawn(SHAPE))
    assert simulated == []
    monkeypatch.setenv("NKI_SIMULATOR", "1")
    module(drawn(SHAPE, torch.bfloat16))
    assert simulated == ["bfloat16"]


def test_what_is_launched_on_a_device() -> None:
    """In a process of its own, see ``device_cases``."""
    cases = Path(__file__).with_name("device_cases.py")
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(cases)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0 and re.search(r"^\d+ passed in", run.stdout, re.MULTILINE), run.stdout
