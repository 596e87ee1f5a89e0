# SPDX-License-Identifier: Apache-2.0
"""Inputs of a forward and a backward pass: drawn from a seed, or read from a file."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nki_bn import reference
from nki_bn.problem import (
    DTYPES,
    Array,
    BackwardCase,
    ForwardCase,
    Problem,
    dtype_name,
    require_column,
    require_like,
    require_variance,
)

ARRAYS = ("dy", "x", "mean", "var", "gamma", "beta", "relu_mask", "residual")
# Of a forward, and with dy of a pair of forward and backward.
PAIR_ARRAYS = ("dy", "x", "gamma", "beta", "running_mean", "running_var", "residual")


@dataclass(frozen=True)
class Draw:
    """How to draw a case: shape and dtype of x, mean and deviation of its values, and the seed."""

    shape: Sequence[int]
    dtype: str = "float32"
    mean: float = 0.0
    std: float = 1.0
    seed: int = 0

    def forward(
        self, relu: str = "none", training: bool = True, eps: float = 1e-5, residual: bool = False
    ) -> ForwardCase:
        """A case with normal x, gamma (about 1), beta and, if asked for, residual.

        The running statistics are a tenth of a deviation away from those x is drawn with. ``relu`` is "none", "mask"
        (saved) or "recompute" (not saved).
        """
        rng = np.random.default_rng(self.seed)
        x = self._normal(rng, self.mean, self.std)
        parameters, running = self._parameters(rng), self._frozen(rng)
        added = self._normal(rng, 0.0, 1.0) if residual else None
        return ForwardCase(
            x, *parameters, *running, 0.1, eps, training, relu != "none", added, save_relu_mask=relu == "mask"
        )

    def gradient(self) -> Array:
        """A normal dy for the forward case."""
        return self._normal(np.random.default_rng((self.seed, 1)), 0.0, 1.0)

    def case(
        self, relu: str = "none", training: bool = True, eps: float = 1e-5, residual: bool = False
    ) -> BackwardCase:
        """A backward case with normal x, dy, gamma (about 1), beta and, if asked for, residual.

        Training takes the statistics of x, eval statistics a tenth of a deviation away. ``relu`` is "none", "mask"
        (that of the float64 forward) or "recompute".
        """
        rng = np.random.default_rng(self.seed)
        x = self._normal(rng, self.mean, self.std)
        dy = self._normal(rng, 0.0, 1.0)
        gamma, beta = self._parameters(rng)
        mean, var = _statistics(x) if training else self._frozen(rng)
        added = self._normal(rng, 0.0, 1.0) if residual else None
        mask = stored_mask(x, mean, var, gamma, beta, eps, added) if relu == "mask" else None
        return BackwardCase(dy, x, mean, var, gamma, beta, eps, relu != "none", mask, training, added)

    def _normal(self, rng: np.random.Generator, mean: float, std: float) -> Array:
        with np.errstate(over="ignore"):
            return (mean + std * rng.standard_normal(tuple(self.shape))).astype(DTYPES[self.dtype])

    def _parameters(self, rng: np.random.Generator) -> tuple[Array, Array]:
        """gamma and beta."""
        gamma, beta = ((centre + 0.5 * rng.standard_normal(self.shape[1])).astype(np.float32) for centre in (1.0, 0.0))
        return gamma, beta

    def _frozen(self, rng: np.random.Generator) -> tuple[Array, Array]:
        """Mean and variance that are not those of x."""
        mean = (self.mean + 0.1 * self.std * rng.standard_normal(self.shape[1])).astype(np.float32)
        return mean, (self.std**2 * (0.5 + rng.random(self.shape[1]))).astype(np.float32)


def stored_mask(
    x: Array,
    mean: Array,
    var: Array,
    gamma: Array | None,
    beta: Array | None,
    eps: float,
    residual: Array | None = None,
) -> Array:
    """The mask that a forward with these statistics would store: uint8, 1 where the value under the ReLU is above 0."""
    z = reference.pre_activation(x, mean, var, gamma, beta, eps, residual)
    mask: Array = (z.value > 0).astype(np.uint8)
    return mask


def load_forward(
    path: Path, relu: str = "none", training: bool = True, eps: float = 1e-5, residual: bool = False
) -> ForwardCase:
    """The forward case in a .npz file with the arrays ``PAIR_ARRAYS``, shaped as for ``batch_norm_fwd``.

    x is required, the running statistics in eval, and the residual if it is asked for; the others may be missing, and
    dy is not read. NumPy stores bfloat16 as bare two-byte values, which are taken as bfloat16.

    Raises:
        ValueError: the file is not of that kind, or an array is missing or unknown.
    """
    frozen = () if training else ("running_mean", "running_var")
    arrays = _read(path, PAIR_ARRAYS, ("x", *frozen, *(["residual"] if residual else [])))
    parameters = arrays.get("gamma"), arrays.get("beta")
    running = arrays.get("running_mean"), arrays.get("running_var")
    added = arrays["residual"] if residual else None
    return ForwardCase(
        arrays["x"], *parameters, *running, 0.1, eps, training, relu != "none", added, save_relu_mask=relu == "mask"
    )


def load_gradient(path: Path) -> Array:
    """dy in a .npz file with the arrays ``PAIR_ARRAYS``; raises as :func:`load_forward`."""
    return _read(path, PAIR_ARRAYS, ("dy",))["dy"]


def load(
    path: Path, relu: str = "none", training: bool = True, eps: float = 1e-5, residual: bool = False
) -> BackwardCase:
    """The backward case in a .npz file with the arrays ``ARRAYS``, shaped as for ``batch_norm_bwd``.

    dy and x are required, mean and var in eval (in training those of x are taken if both are missing), and the residual
    if it is asked for. gamma and beta may be missing (affine off); relu_mask is read when ``relu`` is "mask", and made
    as by a forward when it is missing. NumPy stores bfloat16 as bare two-byte values, which are taken as bfloat16.

    Raises:
        ValueError: the file is not of that kind, or an array is missing or unknown.
        TypeError, ValueError: a mask is to be made, or statistics taken, from arrays ``batch_norm_bwd`` would refuse.
    """
    frozen = () if training else ("mean", "var")
    arrays = _read(path, ARRAYS, ("dy", "x", *frozen, *(["residual"] if residual else [])))
    x, added = arrays["x"], arrays["residual"] if residual else None
    given = [name for name in ("mean", "var") if name in arrays]
    if len(given) == 1:
        raise ValueError(f"{path} has only {given[0]} of mean and var; accepted: both or neither")
    mean, var = (arrays[name] for name in given) if given else _statistics(x)
    gamma, beta, mask = (arrays.get(name) for name in ("gamma", "beta", "relu_mask"))
    if relu == "mask" and mask is None:
        _check_forward(x, {"mean": mean, "var": var, "gamma": gamma, "beta": beta}, added)
        mask = stored_mask(x, mean, var, gamma, beta, eps, added)
    mask = mask if relu == "mask" else None
    return BackwardCase(arrays["dy"], x, mean, var, gamma, beta, eps, relu != "none", mask, training, added)


def _read(path: Path, accepted: Sequence[str], required: Sequence[str]) -> dict[str, Array]:
    try:
        if path.is_file() and not zipfile.is_zipfile(path):
            raise ValueError("it is no zip archive, or one that is cut off; accepted: files of numpy.savez")
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, EOFError, ValueError, TypeError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} cannot be read as a .npz file: {error}") from error
    unknown = sorted(set(arrays) - set(accepted))
    missing = sorted(set(required) - set(arrays))
    faults = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has the unknown {', '.join(unknown)}"] * bool(unknown)
    if faults:
        raise ValueError(f"{path} {' and '.join(faults)}; accepted: {', '.join(accepted)}")
    bare = np.dtype("V2")
    return {name: array.view(DTYPES["bfloat16"]) if array.dtype == bare else array for name, array in arrays.items()}


def _statistics(x: Array) -> tuple[Array, Array]:
    _problem_of(x)
    mean, var = reference.statistics(x)
    return mean.astype(np.float32), var.astype(np.float32)


def _check_forward(x: Array, columns: dict[str, Array | None], residual: Array | None) -> None:
    """Refuse, as the kernels do, what a mask cannot be made of."""
    problem = _problem_of(x)
    for name, values in columns.items():
        if values is not None:
            require_column(name, values, problem.channels)
            if name == "var":
                require_variance(name, values)
    if residual is not None:
        require_like("residual", residual, x.dtype, x.shape)


def _problem_of(x: Array) -> Problem:
    """What x says of the problem, which refuses a dtype or a shape that no kernel takes."""
    return Problem(x.shape, dtype_name("x", x), lnc=1)
