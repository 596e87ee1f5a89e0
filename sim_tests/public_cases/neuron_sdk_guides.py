# SPDX-License-Identifier: Apache-2.0
"""Kernels of the Neuron SDK's guides and first steps, and docstrings of ``nki.language`` that state their results."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from launching import nisa, nki, nl

from public_cases.common import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    Array,
    Cases,
    Kernel,
    error,
    exact,
    launch,
    load,
    normal,
    provide,
    wide,
)
from public_cases.neuron_sdk_docs import code_blocks, example

Source = Callable[[], Any]


def kernels(checkout: Path) -> list[Kernel]:
    """The kernels of the checkout at ``checkout``."""
    root = checkout / "nki"
    starts, guides = root / "get-started", root / "guides"
    isa, language = (root / "api" / "nki" / part / "__init__.py" for part in ("isa", "language"))
    first = starts / "quickstart-implement-run-kernel.rst"
    return [
        *(Kernel(f"neuron-sdk {name}", _addition(root / "examples" / f"{name}.py")) for name in _FIRST_STEPS),
        Kernel("neuron-sdk layout-pass", {"128x512": partial(_exp, partial(_layout, root), (128, 512), FLOAT32)}),
        Kernel("neuron-sdk quickstart", _quickstart(first)),
        *_transfers(starts / "about" / "nki-dma-overview.rst"),
        *_tilings(starts / "about" / "tiling-overview.rst"),
        *_matmuls(guides, isa),
        *_schedules(guides / "how-to-scheduling-apis.rst"),
        Kernel("neuron-sdk docs activate2_scale_bias_kernel", _activate2(isa)),
        Kernel("neuron-sdk docs nonzero_with_count_kernel", _nonzero(isa)),
        Kernel("neuron-sdk docstrings of nki.language", _docstrings(language)),
    ]


_FIRST_STEPS = ("getting_started_baremetal", "getting_started_torch", "getting_started_jax")


def _sum(kernel: Source, dtype: Any) -> float:
    a, b = normal((4, 3), dtype), normal((4, 3), dtype, 1)
    return error(launch(kernel(), (a, b)), np.add(*wide(a, b)))


def _addition(path: Path) -> Cases:
    return {"4x3 float16": lambda: _sum(lambda: load(path).nki_tensor_add_kernel, FLOAT16)}


def _quickstart(path: Path) -> Cases:
    words = "return c_output"
    return {"4x3": lambda: _sum(lambda: example(path, words, 1)["nki_tensor_add_kernel"], FLOAT32)}


def _layout(root: Path) -> Any:
    return load(root / "examples" / "layout-pass.py").tensor_exp_kernel_


def _exp(kernel: Source, shape: tuple[int, int], dtype: Any) -> float:
    x = normal(shape, dtype)
    return error(launch(kernel(), (x,)), np.exp(*wide(x)))


def _transfers(path: Path) -> list[Kernel]:
    return [
        Kernel(
            f"neuron-sdk dma-overview {number + 1}",
            {
                f"{shape[0]}x{shape[1]}": partial(
                    _exp, lambda number=number: example(path, _ISA, number)[_ISA], shape, BFLOAT16
                )
            },
        )
        for number, shape in enumerate(((4, 4096), (128, 128)))
    ]


_ISA = "tensor_exp_kernel_isa"


def _tilings(path: Path) -> list[Kernel]:
    # The docstrings of these kernels speak of exponentials, what they compute are reciprocals.
    def run(number: int, rows: int) -> float:
        x = normal((rows, 512)) + np.float32(4)
        name = "tensor_exp_kernel_"
        return error(launch(example(path, f"def {name}", number, math=math)[name], (x,)), 1 / x.astype(np.float64))

    return [
        Kernel("neuron-sdk tiling-overview, 256 rows", {"256x512": partial(run, 0, 256)}),
        Kernel("neuron-sdk tiling-overview, any rows", {"384x512": partial(run, 1, 384)}),
    ]


def _matmuls(guides: Path, isa: Path) -> list[Kernel]:
    def run(path: Path, name: str, number: int, sizes: tuple[int, int, int]) -> float:
        k, m, n = sizes
        left, right = normal((k, m)), normal((k, n), seed=1)
        return error(launch(example(path, f"def {name}", number)[name], (left, right)), np.matmul(*wide(left.T, right)))

    optimization = guides / "tutorials" / "kernel-optimization.rst"
    sizes = ((128, 128, 512), (256, 256, 1024), (256, 256, 1024), (256, 256, 1024), (1024, 2048, 1024))
    found = [("kernel-optimization", optimization, "matrix_multiply_kernel", at, size) for at, size in enumerate(sizes)]
    found.append(("docs", isa, "nc_matmul_accumulate_kernel", 0, (512, 64, 256)))
    return [
        Kernel(
            f"neuron-sdk {where} {name} {number + 1}",
            {"x".join(map(str, size)): partial(run, path, name, number, size)},
        )
        for where, path, name, number, size in found
    ]


def _schedules(path: Path) -> list[Kernel]:
    def sums() -> float:
        x = normal((64, 40)) + np.float32(5)
        return error(launch(example(path, "plus1")["kernel"], (x,)), 1 / x.astype(np.float64) + x + 1)

    def exponentials(words: str, name: str, number: int) -> float:
        inputs = [normal((64, 40), seed=seed) for seed in range(3)]
        results = launch(example(path, words, number)[name], inputs)
        return max(error(result, np.exp(*wide(x))) for result, x in zip(results, inputs, strict=True))

    return [
        Kernel("neuron-sdk scheduling, edges", {"64x40": sums}),
        Kernel("neuron-sdk scheduling, generated", {"64x40": partial(exponentials, "act{i-1}", "kernel", 0)}),
        Kernel("neuron-sdk scheduling, no_reorder", {"64x40": partial(exponentials, "nl.no_reorder", "loop", 0)}),
        Kernel("neuron-sdk scheduling, functions", {"64x40": partial(exponentials, "nl.no_reorder", "loop", 1)}),
    ]


def _activate2(path: Path) -> Cases:
    def run() -> float:
        provide("pytest")
        x = normal((128, 96))
        kernel = example(path, "def activate2_scale_bias_kernel")["activate2_scale_bias_kernel"]
        inner = x.astype(np.float64) * 2 + 0.5
        expected = inner * (1 + np.vectorize(math.erf)(inner / np.sqrt(2))) / 2
        return error(launch(kernel, (x,), target="trn3"), expected)

    return {"128x96 trn3": run}


def _nonzero(path: Path) -> Cases:
    def run() -> float:
        rng = np.random.default_rng(4)
        x = (rng.random((128, 50)) * (rng.random((128, 50)) < 0.3)).astype(np.float32)
        kernel = example(path, "def nonzero_with_count_kernel")["nonzero_with_count_kernel"]
        return exact(launch(kernel, (x,))[::16], np.stack([_found(row) for row in x[::16]]))

    return {"128x50": run}


def _found(row: Array) -> Array:
    """Positions of what is not zero, -1 for the rest, and how many there are."""
    places = np.flatnonzero(row)
    return np.concatenate([places, np.full(len(row) - len(places), -1), [len(places)]]).astype(np.int32)


class _Checks(ast.NodeTransformer):
    """Turns ``assert nl.equal(result, expected)`` into a call that compares all elements."""

    def __init__(self) -> None:
        self.count = 0

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        """An assertion about equal tiles becomes a comparison, any other one stays."""
        match node.test:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="nl"), attr="equal"), args=args):
                self.count += 1
                return ast.copy_location(ast.Expr(ast.Call(ast.Name("compare", ast.Load()), args, [])), node)
        return node


def _docstrings(path: Path) -> Cases:
    found: Cases = {}
    for line, text in code_blocks(path):
        checks = _Checks()
        try:
            tree = ast.fix_missing_locations(checks.visit(ast.parse(text)))
        except SyntaxError:
            continue
        # One of them compares with a name that it does not define.
        if checks.count and "expected_tensor" not in text:
            found[f"line {line}"] = partial(_run_docstring, compile(tree, f"{path}:{line}", "exec"), text)
    return found


def _run_docstring(code: Any, text: str) -> float:
    errors: list[float] = []

    def compare(result: Any, expected: Any) -> None:
        errors.append(error(result.array(), expected.array().astype(np.float64)))

    def kernel(_: Any) -> None:
        exec(code, {"nki": nki, "nl": nl, "nisa": nisa, "compare": compare})

    launch(kernel, (normal((1, 1)),), target="trn3" if "abs_m" in text else "trn2")
    return max(errors)
