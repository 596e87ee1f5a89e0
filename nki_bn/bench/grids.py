# SPDX-License-Identifier: Apache-2.0
"""Sweeps: which cases to run, from options or from a sweep file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from nki_bn.bench.record import OPERATIONS, Case
from nki_bn.bench.strategies import strategies_of
from nki_bn.bench.toml_file import Table, TomlFile, bundled, read_bundled, read_toml
from nki_bn.bench.workloads import Model, load_model, model_names
from nki_bn.hardware import load_target
from nki_bn.problem import DTYPES, PRECISIONS, RELU_MODES

_RUN_KEYS = ("models", "ops", "dtypes", "batch", "lnc", "strategies")
_RUN_OPTIONS = ("relu", "precision")


@dataclass(frozen=True)
class Grid:
    """Everything with everything: each layer of each model, for each of the other lists.

    ``models`` are names or paths of shape files; ``batches`` are those of a logical core. Strategies of a layer follow
    each other.
    """

    models: tuple[str, ...]
    ops: tuple[str, ...] = ("bwd",)
    dtypes: tuple[str, ...] = ("bfloat16",)
    batches: tuple[int, ...] = (32,)
    lnc: tuple[int, ...] = (2,)
    strategies: tuple[str, ...] = ("planned",)
    relu: tuple[str, ...] = ("none",)
    precision: tuple[str, ...] = ("high",)
    target: str = "trn2"

    def cases(self, models: Sequence[Model]) -> Iterator[Case]:
        """The cases for the loaded ``models``."""
        outer = product(models, self.ops, self.dtypes, self.relu, self.precision, self.batches, self.lnc)
        for model, op, dtype, relu, precision, batch, lnc in outer:
            for layer, strategy in product(model.layers, self.strategies):
                place = (model.name, layer.name, layer.count, op, layer.shape(batch))
                yield Case(*place, dtype, relu, precision, lnc, self.target, strategy)


def sweep_names() -> list[str]:
    """The sweeps that come with the package."""
    return bundled("sweeps")


def all_cases(grids: Sequence[Grid]) -> list[Case]:
    """The cases of these grids, each once.

    Raises:
        ValueError: a model is unknown or malformed, or two shape files give one model different layers.
    """
    loaded: dict[str, Model] = {}
    for name in dict.fromkeys(name for grid in grids for name in grid.models):
        model = load_model(name)
        other = next((known for known in loaded.values() if known.name == model.name), model)
        if other != model:
            raise ValueError(f"{name} has other layers than a model of the same name, {model.name!r}")
        loaded[name] = model
    cases = (case for grid in grids for case in grid.cases([loaded[name] for name in grid.models]))
    return list(dict.fromkeys(cases))


def is_sweep(name: str) -> bool:
    """Whether ``name`` is a bundled sweep, or the path of a file with runs.

    Raises:
        ValueError: the file cannot be read, or is not TOML.
    """
    if name in sweep_names():
        return True
    return name not in model_names() and name.endswith(".toml") and "run" in read_toml(Path(name), name).data


def load_sweep(name: str) -> list[Grid]:
    """The grids of a bundled sweep, or of the sweep file at that path.

    Raises:
        ValueError: the file is malformed; names file, line and key.
    """
    file = read_bundled("sweeps", name) if name in sweep_names() else read_toml(Path(name), name)
    return grids_of(file)


def grids_of(file: TomlFile) -> list[Grid]:
    """The grids in a sweep file; raises as :func:`load_sweep`."""
    return [_grid(table) for table in file.tables("run", (), _RUN_KEYS, _RUN_OPTIONS)]


def _grid(table: Table) -> Grid:
    ops = table.names("ops", OPERATIONS)
    shared = [name for name in strategies_of(ops[0]) if all(name in strategies_of(op) for op in ops)]
    cores = range(1, load_target(Grid.target).logical_cores + 1)
    return Grid(
        models=table.names("models", model_names(), paths=True),
        ops=ops,
        dtypes=table.names("dtypes", DTYPES),
        batches=table.integers("batch", least=1),
        lnc=table.integers("lnc", cores, least=1),
        strategies=table.names("strategies", shared),
        relu=table.names("relu", RELU_MODES) if "relu" in table.values else Grid.relu,
        precision=table.names("precision", PRECISIONS) if "precision" in table.values else Grid.precision,
    )
