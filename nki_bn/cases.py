# SPDX-License-Identifier: Apache-2.0
"""Inputs of a backward pass: drawn from a seed, or read from a file."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nki_bn import reference
from nki_bn.problem import DTYPES, Array, BackwardCase, require_array

ARRAYS = ("dy", "x", "mean", "var", "gamma", "beta", "relu_mask")


@dataclass(frozen=True)
class Draw:
    """How to draw a case: shape and dtype of x, mean and deviation of its values, and the seed."""

    shape: Sequence[int]
    dtype: str = "float32"
    mean: float = 0.0
    std: float = 1.0
    seed: int = 0

    def case(self, relu: str = "none", training: bool = True, eps: float = 1e-5) -> BackwardCase:
        """A case with normal x, dy, gamma (about 1) and beta.

        Training takes the statistics of x, eval statistics a tenth of a deviation away. ``relu`` is "none", "mask"
        (that of the float64 forward) or "recompute".
        """
        rng = np.random.default_rng(self.seed)
        x = self._normal(rng, self.mean, self.std)
        dy = self._normal(rng, 0.0, 1.0)
        channels = self.shape[1]
        gamma, beta = ((centre + 0.5 * rng.standard_normal(channels)).astype(np.float32) for centre in (1.0, 0.0))
        if training:
            mean, var = _statistics(x)
        else:
            mean = (self.mean + 0.1 * self.std * rng.standard_normal(channels)).astype(np.float32)
            var = (self.std**2 * (0.5 + rng.random(channels))).astype(np.float32)
        mask = stored_mask(x, mean, var, gamma, beta, eps) if relu == "mask" else None
        return BackwardCase(dy, x, mean, var, gamma, beta, eps, relu != "none", mask, training)

    def _normal(self, rng: np.random.Generator, mean: float, std: float) -> Array:
        with np.errstate(over="ignore"):
            return (mean + std * rng.standard_normal(tuple(self.shape))).astype(DTYPES[self.dtype])


def stored_mask(x: Array, mean: Array, var: Array, gamma: Array | None, beta: Array | None, eps: float) -> Array:
    """The mask that a forward with these statistics would store: uint8, 1 where the value under the ReLU is above 0."""
    mask: Array = (reference.pre_activation(x, mean, var, gamma, beta, eps).value > 0).astype(np.uint8)
    return mask


def load(path: Path, relu: str = "none", training: bool = True, eps: float = 1e-5) -> BackwardCase:
    """The case in a .npz file with the arrays ``ARRAYS``, shaped as for ``batch_norm_bwd``.

    dy and x are required. mean and var may be missing in training (those of x are taken), gamma and beta anywhere
    (affine off); relu_mask is read when ``relu`` is "mask", and made as by a forward when it is missing. NumPy stores
    bfloat16 as bare two-byte values, which are taken as bfloat16.

    Raises:
        ValueError: the file is not of that kind, or an array is missing or unknown.
    """
    arrays = _read(path)
    x = arrays["x"]
    mean, var = arrays.get("mean"), arrays.get("var")
    if mean is None or var is None:
        if not training:
            raise ValueError(f"{path} has no mean or no var; accepted in eval: a file with both")
        mean, var = _statistics(x)
    gamma, beta, mask = (arrays.get(name) for name in ("gamma", "beta", "relu_mask"))
    if relu == "mask" and mask is None:
        mask = stored_mask(x, mean, var, gamma, beta, eps)
    return BackwardCase(
        arrays["dy"], x, mean, var, gamma, beta, eps, relu != "none", mask if relu == "mask" else None, training
    )


def _read(path: Path) -> dict[str, Array]:
    try:
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, TypeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be read as a .npz file: {error}") from error
    unknown = sorted(set(arrays) - set(ARRAYS))
    missing = sorted({"dy", "x"} - set(arrays))
    if unknown or missing:
        raise ValueError(f"{path} lacks {missing} and has the unknown {unknown}; accepted: {', '.join(ARRAYS)}")
    bare = np.dtype("V2")
    return {name: array.view(DTYPES["bfloat16"]) if array.dtype == bare else array for name, array in arrays.items()}


def _statistics(x: Array) -> tuple[Array, Array]:
    require_array("x", x)
    mean, var = reference.statistics(x)
    return mean.astype(np.float32), var.astype(np.float32)
