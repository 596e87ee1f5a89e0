# SPDX-License-Identifier: Apache-2.0
"""Shape files: the batch-norm inputs of models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nki_bn.bench.toml_file import Table, TomlFile, bundled, read_bundled, read_toml

# [B, C, D, H, W] at most.
_MOST_SPATIAL = 3


@dataclass(frozen=True)
class Layer:
    """An input of ``count`` batch norms of a model, for one sample: [channels, *spatial]."""

    channels: int
    spatial: tuple[int, ...]
    count: int

    @property
    def name(self) -> str:
        """Channels and spatial sizes, as 64x112x112."""
        return "x".join(map(str, (self.channels, *self.spatial)))

    def shape(self, batch: int) -> tuple[int, ...]:
        """[B, C, ...]."""
        return batch, self.channels, *self.spatial


@dataclass(frozen=True)
class Model:
    """The batch norms of a model; no two layers have the same shape."""

    name: str
    layers: tuple[Layer, ...]


def model_names() -> list[str]:
    """The models whose shape files come with the package."""
    return bundled("shapes")


def load_model(name: str) -> Model:
    """The model of that name, or of the shape file at that path (which ends in .toml).

    Raises:
        ValueError: the name is unknown, or the file is malformed; names file, line and key.
    """
    check_name(name)
    if name in model_names():
        return model_of(read_bundled("shapes", name))
    return model_of(read_toml(Path(name), name))


def check_name(name: str, beside: Sequence[str] = ()) -> None:
    """It is that of a bundled model or of a file; ``beside`` are other names that are accepted where it was given.

    Raises:
        ValueError: it is none.
    """
    if name not in model_names() and not name.endswith(".toml"):
        accepted = ", ".join((*model_names(), *beside))
        raise ValueError(f"model {name!r} is unknown; accepted: {accepted}, or a path that ends in .toml")


def model_of(file: TomlFile) -> Model:
    """The model in a shape file; raises as :func:`load_model`."""
    tables = file.tables("layer", ("model",), ("channels", "spatial", "count"))
    name = file.data["model"]
    if not isinstance(name, str) or not name:
        raise file.error(f"is {name!r}; accepted: a name", key="model")
    layers: dict[str, Layer] = {}
    for table in tables:
        layer = _layer(table)
        if layer.name in layers:
            raise table.error("channels", f"and spatial repeat layer {layer.name}; accepted: one table, with its count")
        layers[layer.name] = layer
    return Model(name, tuple(layers.values()))


def _layer(table: Table) -> Layer:
    spatial = table.integers("spatial")
    if len(spatial) > _MOST_SPATIAL:
        raise table.error("spatial", f"has {len(spatial)} sizes; accepted: 0 to {_MOST_SPATIAL}")
    return Layer(table.integer("channels"), spatial, table.integer("count"))
