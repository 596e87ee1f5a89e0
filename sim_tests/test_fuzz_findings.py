# SPDX-License-Identifier: Apache-2.0
"""What fuzzing has found: each is refused by name now."""

from __future__ import annotations

import json
import re
import tomllib
import warnings
from importlib import resources
from pathlib import Path
from typing import Any

import bench_rows
import numpy as np
import pytest
import torch
from fuzz.command import run
from fuzz.ops import check_call

import nki_bn.torch as nbt
from nki_bn import hardware
from nki_bn.bench.record import record_from
from nki_bn.synchronised import Alone, SiteOptions, bn_fwd_site


@pytest.mark.parametrize(
    ("key", "value", "accepted"),
    [
        ("shape", [], "2 to 5 numbers above 0"),
        ("shape", [2, 0, 4], "2 to 5 numbers above 0"),
        ("checked_shape", [2], "2 to 5 numbers above 0"),
        ("hbm_bytes", 0, "numbers above 0"),
        ("roofline_share", -0.5, "numbers above 0"),
        ("instructions", 10**400, "an integer"),
        ("relu", "x", "none, mask, recompute"),
        ("dtype", "float64", "float32, float16, bfloat16"),
        ("target", "trn9", "trn1, trn2, trn3"),
    ],
)
def test_rows(key: str, value: Any, accepted: str) -> None:
    row = json.loads(bench_rows.record().to_json())
    with pytest.raises(ValueError, match=f"^{key} is .*; accepted: .*{accepted}"):
        record_from(row | {key: value})


@pytest.mark.parametrize(("key", "value"), [("target", 0), ("generation", True), ("aliases", [1]), ("aliases", "gen3")])
def test_heads_of_hardware_files(key: str, value: Any) -> None:
    text = resources.files("nki_bn.configs").joinpath("hardware", "trn2.toml").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match=f"^file: {key} is .*; accepted: "):
        hardware.capacities_of("file", tomllib.loads(text) | {key: value})


def test_replicas_with_one_value_per_channel(tmp_path: Path) -> None:
    path = tmp_path / "shapes.toml"
    path.write_text('model = "net"\n[[layer]]\nchannels = 3\nspatial = []\ncount = 1\n')
    code, said, complained = run(["bench", str(path), "--batch", "1", "--replicas", "2"])
    assert code == 2 and not said
    assert "net 3 has 1 value per channel in a batch of 1; accepted: more than 1" in complained


@pytest.mark.parametrize("batch", [2**31, 10**21])
def test_batches_of_sweep_files(batch: int, tmp_path: Path) -> None:
    path = tmp_path / "sweep.toml"
    path.write_text(
        f'[[run]]\nmodels = ["mlp"]\nops = ["bwd"]\ndtypes = ["float32"]\nlnc = [1]\nstrategies = ["planned"]\n'
        f"batch = [{batch}]\n"
    )
    code, said, complained = run(["bench", str(path)])
    assert code == 2 and not said
    assert f"sweep.toml:7: run[0].batch has {batch}; accepted: integers from 1 to 2147483647" in complained


@pytest.mark.parametrize("op", [("eval",), ("bwd", "--eval"), ("pair", "--eval")])
@pytest.mark.parametrize("mean", ["0", "1e3"])
def test_variances_and_eps_of_zero_warn_of_nothing(mean: str, op: tuple[str, ...]) -> None:
    with warnings.catch_warnings(action="error"):
        code, said, complained = run(
            ["verify", "--shape", "3,2", "--eps", "0", "--std", "0", "--mean", mean, "--op", *op]
        )
    assert code == 0 and not complained and "nan" in said


LONG = "9" * 5000


@pytest.mark.parametrize(("name", "said"), [(LONG, f"{LONG}: no such file"), ("a\nb\x1b", r"a\nb\x1b: no such")])
def test_odd_names_of_linted_files(name: str, said: str) -> None:
    code, _, complained = run(["lint", name])
    assert code == 2 and complained.startswith(f"nki-bn lint: {said}") and complained.count("\n") == 1


def test_sums_of_terms_that_overflow_are_not_judged() -> None:
    """Terms of opposite sign: the sum may be infinite of either sign, or NaN."""
    x = np.float32([[[1, -2]]])
    column = np.ones(1, np.float32)
    call = {"x": x, "mean": 0 * column, "var": column, "gamma": column, "beta": column, "training": False}
    for size in (1e38, 3e38):
        check_call(("bwd", call | {"dy": np.full_like(x, size)}, ()))


def test_imports_of_names_beyond_those_of_files(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").touch()
    path = tmp_path / "kernel.py"
    path.write_text(f"import nki\nfrom .{'a' * 300} import c\n\n\n@nki.jit\ndef k(x):\n    return c(x)\n")
    assert run(["lint", str(path)]) == (0, "", "")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["verify", "--op", "bwd", "--shape", f"2,{LONG}"], "--shape: .* accepted: B,C,.* of at most 18 digits"),
        (["verify", "--op", "bwd", "--shape", "2,3", "--seed", LONG], "--seed: .* accepted: integers .* 1000 digits"),
        (["verify", "--op", "bwd", "--shape", "2,3", "--eps", "x"], "--eps: 'x' .* accepted: finite numbers"),
        (["verify", "--op", "bwd"], "neither --shape nor --input is given; accepted: one of them"),
        (["trace", "--op", "bwd", "--shape", "2,3", "--lnc", "1,2"], "--lnc: '1,2' is no .*; accepted: 1, 2"),
        (["bench", "mlp", "--batch", LONG], "--batch: .* accepted: numbers from 1 up, of at most 18 digits"),
    ],
)
def test_wrong_numbers(command: list[str], said: str) -> None:
    code, _, complained = run(command)
    assert code == 2 and re.search(said, complained)


@pytest.mark.parametrize("name", ["mode", "beta"])
def test_options_of_sites(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} must be a string.*, got ndarray"):
        SiteOptions(**{name: np.ones(3)})


@pytest.mark.parametrize("name", ["g", "b"])
def test_parameters_of_sites(name: str) -> None:
    x = np.ones((2, 3), np.float32)
    parameters: Any = {"g": x[0], "b": x[0]} | {name: None}
    with pytest.raises(TypeError, match=f"{name} must be a NumPy array, got NoneType"):
        bn_fwd_site(x, parameters, Alone(), "g", SiteOptions("b"))


@pytest.mark.parametrize(
    ("name", "value", "error", "said"),
    [
        ("input", None, TypeError, "input must be a tensor, got NoneType"),
        ("input", torch.ones(3), ValueError, r"input has shape \(3,\); accepted: ranks 2 to 5"),
        ("weight", [1.0], TypeError, "weight must be a tensor or None, got list"),
        ("running_var", "x", TypeError, "running_var must be a tensor or None, got str"),
        ("training", 1, TypeError, "training must be a bool, got int"),
        ("momentum", torch.ones(3), TypeError, "momentum must be a number, got Tensor"),
        ("eps", "x", TypeError, "eps must be a number, got str"),
    ],
)
def test_arguments_of_functions_of_torch(name: str, value: Any, error: type[Exception], said: str) -> None:
    given = {"input": torch.ones(4, 3), "running_mean": torch.zeros(3), "running_var": torch.ones(3)}
    with pytest.raises(error, match=said):
        nbt.batch_norm(**(given | {name: value}), backend="simulator")
