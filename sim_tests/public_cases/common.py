# SPDX-License-Identifier: Apache-2.0
"""What the cases share: kernels loaded from files, launches, comparisons."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from launching import nki

from nki_bn.simulator import RunOptions

Array = npt.NDArray[Any]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16 = np.dtype(np.float16)
FLOAT32 = np.dtype(np.float32)

# Worst error a kernel may have, as a share of the largest reference value: it rounds inputs, products and results in
# its own order, so this is a few units in the last place of the dtype.
TOLERANCE = {FLOAT32: 5e-6, FLOAT16: 1e-3, BFLOAT16: 8e-3}

# By label: a run that returns the worst error over its tolerance; and a module that is imported when it is called.
Cases = dict[str, Callable[[], float]]
Module = Callable[[], Any]


@dataclass
class Kernel:
    """A public kernel; ``cases`` maps a label (shapes, dtype, cores) to a run that returns the worst error over its
    tolerance: right up to 1."""

    name: str
    cases: Cases = field(default_factory=dict)


@contextlib.contextmanager
def environment() -> Iterator[None]:
    """Undoes what happens to the variables of the environment inside."""
    kept = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


def load(path: Path) -> ModuleType:
    """The module in the file ``path``, which may not change the environment for others."""
    spec = importlib.util.spec_from_file_location(f"public_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with environment():
        spec.loader.exec_module(module)
    return module


def launch(kernel: Any, args: Sequence[Any], *, lnc: int = 1, target: str = "trn2", **keywords: Any) -> Any:
    """What ``kernel`` returns on ``lnc`` simulated cores; unwritten memory and roundings as the vendor's simulator."""
    options = RunOptions(target=target, strict=False, numerics="ideal")
    return nki.simulate(nki.jit(kernel)[lnc], options)(*args, **keywords)


def error(result: Any, reference: Array, dtype: np.dtype[Any] | None = None) -> float:
    """Worst error of ``result`` over the tolerance of ``dtype`` (else its own); infinite for a wrong shape or NaN."""
    values = np.asarray(result)
    if values.shape != reference.shape:
        return np.inf
    wide = values.astype(np.float64)
    worst = np.abs(wide - reference).max() / max(np.abs(reference).max(), np.finfo(np.float64).tiny)
    return float(worst) / TOLERANCE[dtype or values.dtype] if np.isfinite(wide).all() else np.inf


def exact(result: Any, reference: Array) -> float:
    """0 if ``result`` has the dtype, the shape and the values of ``reference``, else infinity."""
    values = np.asarray(result)
    return 0.0 if values.dtype == reference.dtype and np.array_equal(values, reference) else np.inf


def provide(name: str, **contents: Any) -> None:
    """A module ``name`` with ``contents`` for kernels that import it, where it is not installed."""
    if name in sys.modules or importlib.util.find_spec(name.partition(".")[0]) is not None:
        return
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    vars(sys.modules[name]).update(contents)


def normal(shape: tuple[int, ...], dtype: np.dtype[Any] = FLOAT32, seed: int = 0) -> Array:
    """Standard normal numbers, the same for the same shape and seed."""
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(dtype)


def wide(*arrays: Array) -> list[Array]:
    """The arrays in float64."""
    return [array.astype(np.float64) for array in arrays]


def softmax(x: Array) -> Array:
    """Softmax over the last axis."""
    powers = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True))
