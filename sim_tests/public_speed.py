# SPDX-License-Identifier: Apache-2.0
"""Time the simulator beside triton-viz's interpreter of NKI on examples of triton-viz, with the same inputs in one run.

    python sim_tests/public_speed.py --checkouts DIR [--seconds S]

DIR holds a checkout named triton-viz; its interpreter needs NumPy and ml_dtypes only. It is timed bare, and where the
package triton is installed also with the tracer that its examples attach. The simulator is timed as it launches a
kernel the first time, and as it repeats a launch. The fastest of many runs counts, and all results are compared with
float64 NumPy first. The figures in parentheses are multiples of a repeated launch.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from launching import nki
from public_cases.common import Array, error, launch, load, normal, softmax, wide

from nki_bn.simulator import RunOptions


@dataclass
class Example:
    """A kernel of triton-viz: its file, function and arguments, which of these it writes, and what belongs there."""

    file: str
    function: str
    label: str
    arguments: tuple[Any, ...]
    output: int
    expected: Array


def examples() -> list[Example]:
    """The five examples, at the size of their own demonstrations and at a larger one."""
    return [
        *(_add(shape) for shape in ((128, 512), (128, 8192))),
        *(_softmax(shape) for shape in ((256, 64), (2048, 2048))),
        *(_rmsnorm(shape) for shape in ((256, 128), (2048, 2048))),
        *(_matmul(shape) for shape in ((128, 128, 512), (1024, 512, 1024))),
        *(_attention(shape) for shape in ((2, 2, 128, 128, 64), (1, 4, 512, 512, 128))),
    ]


def _add(shape: tuple[int, int]) -> Example:
    a, b = normal(shape), normal(shape, seed=1)
    return Example("add", "nki_tensor_add_kernel", _words(shape), (a, b, np.empty_like(a)), 2, np.add(*wide(a, b)))


def _softmax(shape: tuple[int, int]) -> Example:
    x = normal(shape)
    return Example("softmax", "softmax_kernel", _words(shape), (x, np.empty_like(x)), 1, softmax(*wide(x)))


def _rmsnorm(shape: tuple[int, int]) -> Example:
    x, gamma = normal(shape), normal(shape, seed=1)
    values, scale = wide(x, gamma)
    expected = values / np.sqrt((values**2).mean(1, keepdims=True) + 1e-6) * scale
    return Example("rmsnorm", "rmsnorm_kernel", _words(shape), (x, gamma, np.empty_like(x)), 2, expected)


def _matmul(sizes: tuple[int, int, int]) -> Example:
    k, m, n = sizes
    left, right = normal((k, m)), normal((k, n), seed=1)
    output = np.empty((m, n), np.float32)
    return Example("matmul", "matmul_kernel", _words(sizes), (left, right, output), 2, np.matmul(*wide(left.T, right)))


def _attention(sizes: tuple[int, int, int, int, int]) -> Example:
    batch, heads, m, n, width = sizes
    q, k = normal((batch, heads, m, 128)), normal((batch, heads, n, 128), seed=1)
    v, output = normal((batch, heads, n, width), seed=2), np.empty((batch, heads, m, width), np.float32)
    wide_q, wide_k, wide_v = wide(q, k, v)
    expected = softmax(wide_q @ wide_k.swapaxes(2, 3) / np.sqrt(128)) @ wide_v
    arguments = (q, k, v, output, batch, heads, heads, heads, m, n, 128, width)
    return Example("tiled_attention", "tiled_attention_kernel", _words(sizes), arguments, 3, expected)


def _words(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes))


def interpreter(checkout: Path) -> Any:
    """triton-viz's module that interprets NKI; its package needs no installation for it."""
    sys.path.insert(0, str(checkout))
    # The installation of triton-viz writes this module.
    version = type(sys)("triton_viz.version")
    vars(version).update(__version__="checkout", git_version="")
    sys.modules.setdefault(version.__name__, version)
    return importlib.import_module("triton_viz.core.simulation.nki_beta2")


class Patches:
    """What the interpreter puts over ``nki``, and what was there before."""

    def __init__(self) -> None:
        self.before: list[tuple[Any, str, Any]] = []

    def set_attr(self, holder: Any, name: str, value: Any) -> None:
        """Replace an attribute, remembering the old one."""
        self.before.append((holder, name, getattr(holder, name)))
        setattr(holder, name, value)

    def undo(self) -> None:
        """Put everything back."""
        for holder, name, value in reversed(self.before):
            setattr(holder, name, value)


@contextlib.contextmanager
def patched(module: Any) -> Iterator[None]:
    """The interpreter's functions in place of the simulator's."""
    patches = Patches()
    module.nki_patch_lang(patches)
    try:
        yield
    finally:
        patches.undo()


def best(run: Callable[[], Any], seconds: float) -> float:
    """The least time of a run, in seconds, among at least five and for as long as ``seconds``."""
    times: list[float] = []
    while len(times) < 5 or sum(times) < seconds:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def compare(example: Example, folder: Path, theirs: Any, seconds: float) -> dict[str, float]:
    """Times in seconds of a first and a repeated launch, the interpreter, and the traced interpreter if it is there.

    Raises:
        ArithmeticError: one of them computes something else.
    """
    function = getattr(load(folder / f"{example.file}.py"), example.function)

    def traced() -> None:
        import triton_viz

        triton_viz.trace("tracer", frontend="nki_beta2")(function)[(1,)](*example.arguments, pre_trace=False)
        triton_viz.clear()

    options = RunOptions(strict=False, numerics="ideal", replay=True)
    again = nki.simulate(function, options)
    for _ in range(2):
        again(*example.arguments)
    times = {
        "first": _checked(example, "simulator", lambda: launch(function, example.arguments), seconds),
        "again": _checked(example, "repetition", lambda: again(*example.arguments), seconds),
    }
    with patched(theirs):
        bare = theirs.NKIBeta2InterpretedFunction(function)
        times["bare"] = _checked(example, "interpreter", lambda: bare.run(*example.arguments), seconds)
    if importlib.util.find_spec("triton") is not None:
        times["traced"] = _checked(example, "tracer", traced, seconds)
    return times


def _checked(example: Example, side: str, run: Callable[[], Any], seconds: float) -> float:
    output = example.arguments[example.output]
    output[...] = np.nan
    run()
    worst = error(output, example.expected)
    if not worst <= 1:
        raise ArithmeticError(f"{example.file} {example.label}: {side} is off by {worst:.3g} times the tolerance")
    return best(run, seconds)


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Time the simulator beside triton-viz's interpreter of NKI.")
    parser.add_argument("--checkouts", type=Path, required=True, help="folder with the checkout of triton-viz")
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each side of an example is timed")
    options = parser.parse_args()
    checkout = options.checkouts / "triton-viz"
    if not checkout.is_dir():
        parser.error(f"{checkout} is not there")
    theirs = interpreter(checkout)
    for example in examples():
        times = compare(example, checkout / "examples" / "nki_beta2", theirs, options.seconds)
        figures = "   ".join(
            f"{side} {time * 1e3:7.2f} ms ({time / times['again']:5.2f})" for side, time in times.items()
        )
        print(f"{example.file:16} {example.label:16} {figures}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
