# SPDX-License-Identifier: Apache-2.0
"""Shape files and sweep files."""

from __future__ import annotations

from pathlib import Path

import pytest

from nki_bn.bench import grids
from nki_bn.bench.strategies import problem_of
from nki_bn.bench.toml_file import read_toml
from nki_bn.bench.workloads import Layer, load_model, model_names

# Batch norms of the published networks, counted in their papers' tables (torchvision has the same).
BATCH_NORMS = {
    "resnet18": 20,
    "resnet34": 36,
    "resnet50": 53,
    "densenet121": 121,
    "mobilenet_v2": 52,
    "efficientnet_b0": 49,
}

LAYER = 'model = "net"\n\n[[layer]]\nchannels = 3\nspatial = [4, 5]\ncount = 2\n'
SWEEP = """[[run]]
models = ["cifar8"]
ops = ["bwd"]
dtypes = ["float32"]
batch = [4]
lnc = [1]
strategies = ["staged", "planned"]
"""


def written(folder: Path, text: str) -> str:
    path = folder / "file.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", BATCH_NORMS)
def test_networks_have_all_their_batch_norms(name: str) -> None:
    assert sum(layer.count for layer in load_model(name).layers) == BATCH_NORMS[name]


def test_bundled_models_are_named_after_their_files() -> None:
    assert [load_model(name).name for name in model_names()] == model_names()
    assert load_model("resnet50").layers[0] == Layer(64, (112, 112), 1)
    assert load_model("mlp").layers[0].shape(8) == (8, 4096)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    model = load_model(written(tmp_path, LAYER))
    assert model.name == "net" and model.layers == (Layer(3, (4, 5), 2),)
    assert model.layers[0].name == "3x4x5" and model.layers[0].shape(7) == (7, 3, 4, 5)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "channels = 3",
            "channels = 0",
            r"file.toml:4: layer\[0\].channels has 0; accepted: integers from 1 to 2147483647",
        ),
        ("channels = 3", "channels = true", r"file.toml:4: layer\[0\].channels has True"),
        ("[4, 5]", '[4, "5"]', r"file.toml:5: layer\[0\].spatial has '5'"),
        ("[4, 5]", "4", r"file.toml:5: layer\[0\].spatial is 4; accepted: a list"),
        ("[4, 5]", "[1, 2, 3, 4]", r"file.toml:5: layer\[0\].spatial has 4 sizes; accepted: 0 to 3"),
        ("count = 2", "", r"file.toml:3: layer\[0\].count is missing"),
        ("count = 2", "counts = 2", r"file.toml:6: layer\[0\].counts is unknown; accepted: channels, spatial, count"),
        ('"net"', "3", r"file.toml:1: model is 3; accepted: a name"),
        ('model = "net"', "", r"file.toml:1: model is missing"),
        ('model = "net"', 'model = "net"\nbatch = 3', r"file.toml:2: batch is unknown"),
        ("[[layer]]", "[layer]", r"file.toml:1: layer is {.*}; accepted: one or more tables \[\[layer\]\]"),
        ("count = 2", "count = ", r"file.toml:6: "),
        (
            "count = 2",
            "count = 2\n\n[[layer]]\nchannels = 3\nspatial = [4, 5]\ncount = 1",
            r"file.toml:9: layer\[1\].channels and spatial repeat layer 3x4x5",
        ),
    ],
)
def test_a_malformed_shape_file_is_refused_with_file_line_and_key(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_model(written(tmp_path, LAYER.replace(old, new)))


def test_a_file_that_is_not_there_and_a_name_that_is_unknown() -> None:
    with pytest.raises(ValueError, match="absent.toml cannot be read"):
        load_model("absent.toml")
    with pytest.raises(ValueError, match="model 'resnet51' is unknown; accepted: .*resnet50.* ends in .toml"):
        load_model("resnet51")


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "file.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="file.toml cannot be read"):
        load_model(str(path))


@pytest.mark.parametrize("name", grids.sweep_names())
def test_every_case_of_a_bundled_sweep_has_a_problem(name: str) -> None:
    cases = grids.all_cases(grids.load_sweep(name))
    assert {problem_of(case).shape for case in cases} == {case.shape for case in cases}
    assert {case.op for case in cases} == {"bwd", "fwd", "eval"}


def test_the_full_sweep_has_every_model() -> None:
    assert {case.model for case in grids.all_cases(grids.load_sweep("full"))} == set(model_names())


def test_a_grid_runs_everything_with_everything() -> None:
    grid = grids.Grid(
        ("cifar8",),
        ops=("bwd",),
        dtypes=("float32", "bfloat16"),
        batches=(2, 4),
        lnc=(1, 2),
        strategies=("staged", "planned"),
    )
    cases = grids.all_cases([grid, grid])
    assert len(cases) == 4 * 2 * 2 * 2 * 2
    assert [case.strategy for case in cases[:2]] == ["staged", "planned"] and cases[0].layer == cases[1].layer
    assert cases[0].shape == (2, 32, 32, 32)


def test_a_sweep_file_of_ones_own(tmp_path: Path) -> None:
    name = written(tmp_path, SWEEP)
    assert grids.is_sweep(name) and not grids.is_sweep("resnet50") and grids.is_sweep("smoke")
    (grid,) = grids.load_sweep(name)
    assert grid == grids.Grid(("cifar8",), ("bwd",), ("float32",), (4,), (1,), ("staged", "planned"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"cifar8"', '"cifar9"', r"file.toml:2: run\[0\].models has 'cifar9'; accepted: cifar8, .* end in .toml"),
        ('["cifar8"]', '"cifar8"', r"file.toml:2: run\[0\].models is 'cifar8'; accepted: a list"),
        ('["cifar8"]', "[]", r"file.toml:2: run\[0\].models is empty"),
        ('"bwd"', '"back"', r"file.toml:3: run\[0\].ops has 'back'; accepted: bwd, fwd, eval"),
        ('"float32"', '"float64"', r"file.toml:4: run\[0\].dtypes has 'float64'"),
        ("[4]", "[]", r"file.toml:5: run\[0\].batch has 0 numbers; accepted: 1 or more"),
        ("lnc = [1]", "lnc = []", r"file.toml:6: run\[0\].lnc has 0 numbers; accepted: 1 or more"),
        ("[4]", "[" * 100_000, r"file.toml cannot be read: "),
        ("[4]", "[" + "9" * 5000 + "]", r"file.toml cannot be read: .*digits"),
        ("[4]", "[-4]", r"file.toml:5: run\[0\].batch has -4"),
        ("lnc = [1]", "lnc = [3]", r"file.toml:6: run\[0\].lnc has 3; accepted: 1, 2"),
        (
            '"staged"',
            '"two_read"',
            r"run\[0\].strategies has 'two_read'; accepted: staged, resident, reread, transposed, planned",
        ),
        (
            '["bwd"]',
            '["bwd", "fwd"]',
            r"file.toml:7: run\[0\].strategies has 'staged'; accepted: resident, reread, transposed, planned",
        ),
        ("lnc = [1]", "", r"file.toml:1: run\[0\].lnc is missing"),
        ("lnc = [1]", 'lnc = [1]\nrelu = ["yes"]', r"file.toml:7: run\[0\].relu has 'yes'; accepted: none, mask"),
    ],
)
def test_a_malformed_sweep_file_is_refused_with_file_line_and_key(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        grids.load_sweep(written(tmp_path, SWEEP.replace(old, new)))


def test_two_files_that_say_different_things_about_one_model_are_refused(tmp_path: Path) -> None:
    name = written(tmp_path, LAYER.replace("net", "cifar8"))
    with pytest.raises(ValueError, match="has other layers than a model of the same name, 'cifar8'"):
        grids.all_cases([grids.Grid(("cifar8", name))])


def test_an_error_about_a_table_that_is_written_inline(tmp_path: Path) -> None:
    name = written(tmp_path, 'model = "net"\nlayer = [{channels = 0, spatial = [], count = 1}]\n')
    with pytest.raises(ValueError, match=r"file.toml:1: layer\[0\].channels has 0"):
        load_model(name)
    assert read_toml(Path(name), name).data["model"] == "net"
