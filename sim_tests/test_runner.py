# SPDX-License-Identifier: Apache-2.0
"""The script runner, NKI_SIMULATOR and the other environment variables of a launch."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from launching import nisa, nki, nl

KERNEL = """
    import numpy as np
    import nki, nki.language as nl, nki.isa as nisa

    @nki.jit
    def double(x):
        tile = nl.load(x)
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.multiply(tile, 2.0))
        return out
"""


def script(folder: Path, body: str, name: str = "script.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(KERNEL) + textwrap.dedent(body), encoding="utf-8")
    return path


HERE = Path(__file__).parent


def run(*arguments: Any, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nki_bn.simulator", *map(str, arguments)]
    variables = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd or HERE, check=False, env=variables)


def test_a_script_runs_on_the_simulator(tmp_path: Path) -> None:
    done = run(
        script(
            tmp_path,
            """
        assert __name__ == "__main__" and nki.__nki_bn_simulator__
        print(double(np.ones((2, 3), np.float32)).sum())
    """,
        )
    )
    assert (done.returncode, done.stdout) == (0, "12.0\n"), done.stderr


def test_a_script_sees_its_arguments_its_folder_and_the_variable(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("VALUE = 5\n", encoding="utf-8")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    path = script(
        tmp_path,
        """
        import os, sys, neighbour
        print(sys.argv, neighbour.VALUE, os.environ["NKI_SIMULATOR"], __file__ == sys.argv[0])
    """,
    )
    done = run("../script.py", "--size", "3", cwd=elsewhere)
    assert done.stdout == f"{['../script.py', '--size', '3']} 5 1 True\n", done.stderr
    assert run(path, NKI_SIMULATOR="0").stdout.split("] ")[1].startswith("5 0 ")


def test_the_runner_replaces_another_package_of_that_name(tmp_path: Path) -> None:
    (tmp_path / "nki").mkdir()
    (tmp_path / "nki" / "__init__.py").write_text("raise ImportError('the other one')\n", encoding="utf-8")
    done = run(script(tmp_path, "print(double(np.ones((1, 1), np.float32)))\n"), PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "[[2.]]\n"), done.stderr


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("pass", 0),
        ("raise SystemExit(7)", 7),
        ("raise ValueError('broken')", 1),
        ("double(np.ones((200, 1), np.float32))", 1),
    ],
)
def test_exit_codes_are_the_scripts(tmp_path: Path, body: str, code: int) -> None:
    done = run(script(tmp_path, body))
    assert done.returncode == code
    assert ("broken" in done.stderr) == ("broken" in body)


@pytest.mark.parametrize("arguments", [(), ("--no-such",), ("missing.py",), (".",)])
def test_wrong_use_prints_the_usage(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 2 and "usage: python -m nki_bn.simulator SCRIPT [ARGS]" in done.stderr


@nki.jit
def sum_of_halves(x: Any) -> Any:
    tile = nl.load(x)
    halves = nl.ndarray(x.shape, nl.bfloat16)
    nisa.tensor_scalar(halves, tile, op0=nl.multiply, operand0=0.5)
    out = nl.ndarray(x.shape, nl.float32, buffer=nl.shared_hbm)
    nl.store(out, nl.add(halves, tile, dtype=nl.float32))
    return out


def test_every_launch_is_a_simulation_whatever_the_variable_says(monkeypatch: Any) -> None:
    x = np.array([[1.0, 2.0]], np.float32)
    for value in ("1", "0", None):
        monkeypatch.delenv("NKI_SIMULATOR", raising=False)
        if value is not None:
            monkeypatch.setenv("NKI_SIMULATOR", value)
        np.testing.assert_array_equal(sum_of_halves(x), x * 1.5)
        np.testing.assert_array_equal(nki.simulate(sum_of_halves)(x), x * 1.5)


def test_torch_tensors_come_back_as_torch_tensors() -> None:
    import torch

    result = sum_of_halves(torch.tensor([[1.0, 2.0]]))
    assert isinstance(result, torch.Tensor) and result.tolist() == [[1.5, 3.0]]


def test_roundings_can_be_switched_off(monkeypatch: Any) -> None:
    x = np.array([[1.001, 2.003]], np.float32)
    rounded = (x / 2).astype(ml_dtypes.bfloat16).astype(np.float32) + x
    np.testing.assert_array_equal(sum_of_halves(x), rounded)
    monkeypatch.setenv("NKI_PRECISE_FP", "0")
    np.testing.assert_array_equal(sum_of_halves(x), x / 2 + x)


def test_the_target_comes_from_the_environment(monkeypatch: Any) -> None:
    seen = []

    @nki.jit
    def kernel(x: Any) -> None:
        seen.append((nisa.get_nc_version(), nl.tile_size.sbuf_fmax_bytes))

    for target in (None, "trn2", "gen2"):
        monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE", raising=False)
        if target is not None:
            monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", target)
        kernel(np.ones((1, 1), np.float32))
    versions = nisa.nc_version
    assert seen == [(versions.gen4, 245752), (versions.gen3, 212984), (versions.gen2, 180224)]
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn9")
    with pytest.raises(ValueError, match="trn9"):
        kernel(np.ones((1, 1), np.float32))


def test_help_prints_the_usage() -> None:
    done = run("--help")
    assert done.returncode == 0 and done.stdout.startswith("usage: ")
