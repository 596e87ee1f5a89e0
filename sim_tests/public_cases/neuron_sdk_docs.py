# SPDX-License-Identifier: Apache-2.0
"""Examples in docstrings and guides of the Neuron SDK's documentation: gathers, scatters, device loops."""

from __future__ import annotations

import textwrap
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from launching import nisa, nki, nl, store

from public_cases.common import BFLOAT16, FLOAT32, Array, Cases, Kernel, environment, error, launch, normal, wide


def kernels(checkout: Path) -> list[Kernel]:
    """The examples of the checkout at ``checkout``."""
    isa = checkout / "nki" / "api" / "nki" / "isa" / "__init__.py"
    language = checkout / "nki" / "api" / "nki" / "language" / "__init__.py"
    loops = checkout / "nki" / "deep-dives" / "nki-dynamic-loops.rst"
    migration = checkout / "nki" / "migration" / "index.rst"
    return [
        Kernel("neuron-sdk docs indirect_gather_kernel", _gather(isa)),
        Kernel("neuron-sdk docs indirect_scatter_kernel", _scatter(isa)),
        Kernel("neuron-sdk docs gather_transpose", _gather_transpose(isa)),
        Kernel("neuron-sdk docs fori_loop, while_loop", _loops(language)),
        Kernel("neuron-sdk docs dynamic_range", _dynamic_range(loops)),
        Kernel("neuron-sdk docs indirect_scalar_dynamic_dma", _scalar_dma(migration)),
    ]


def code_blocks(path: Path) -> list[tuple[int, str]]:
    """First line and text of the blocks of code in a guide, or in the docstrings of a module."""
    lines = path.read_text(encoding="utf-8").splitlines()
    heads = [number for number, line in enumerate(lines) if ".. code-block::" in line]
    return [(head + 2, textwrap.dedent("\n".join(_body(lines, head, path.suffix == ".py")))) for head in heads]


def _body(lines: list[str], head: int, in_docstring: bool) -> list[str]:
    depth = len(lines[head]) - len(lines[head].lstrip())
    body = []
    for line in lines[head + 1 :]:
        if line.strip() and len(line) - len(line.lstrip()) <= depth:
            break
        if in_docstring and line.rstrip().endswith('"""'):
            return [*body, line.rstrip().removesuffix('"""')]
        body.append(line)
    return body


def example(path: Path, words: str, number: int = 0, **names: Any) -> dict[str, Any]:
    """The names that a block of code of ``path`` defines, run with ``names``: of those with ``words`` the one with this
    ``number``."""
    text = [text for _, text in code_blocks(path) if words in text][number]
    scope: dict[str, Any] = {"nki": nki, "nl": nl, "nisa": nisa, **names}
    with environment():
        exec(compile(text, str(path), "exec"), scope)
    return scope


def _rows(count: int, of: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).permutation(of)[:count].astype(np.uint32)[:, None]


def _gather(path: Path) -> Cases:
    def run(dtype: Any) -> float:
        table, rows = normal((500, 96), dtype), _rows(128, 500)
        result = launch(example(path, "def indirect_gather_kernel")["indirect_gather_kernel"], (table, rows))
        return error(result, wide(table)[0][rows[:, 0]])

    return {"500x96 float32": lambda: run(FLOAT32), "500x96 bfloat16": lambda: run(BFLOAT16)}


def _scatter(path: Path) -> Cases:
    def run() -> float:
        values, rows, table = normal((64, 40), seed=1), _rows(64, 300), normal((300, 40))
        expected = wide(table)[0]
        expected[rows[:, 0]] = values
        kernel = example(path, "def indirect_scatter_kernel")["indirect_scatter_kernel"]
        return error(launch(kernel, (values, rows, table)), expected)

    return {"64 of 300x40 float32": run}


def _gather_transpose(path: Path) -> Cases:
    def run(name: str, shape: tuple[int, ...], columns: int) -> float:
        table = normal(shape, BFLOAT16)
        index = np.random.default_rng(0).integers(0, shape[0], (128, columns)).astype(np.uint32)
        result = launch(example(path, f"def {name}")[name], (table, index))
        picked = wide(table)[0][index.T.reshape(-1)]
        return error(result, picked.transpose(1, 0) if len(shape) == 2 else picked.transpose(3, 1, 2, 0))

    return {
        "one column of indices": lambda: run("gather_transpose_kernel", (200, 128), 1),
        "two columns of indices": lambda: run("gather_transpose_2d_kernel", (200, 128), 2),
        "four dimensions": lambda: run("gather_transpose_4d_kernel", (150, 1, 3, 64), 2),
    }


def _loops(path: Path) -> Cases:
    def counted() -> float:
        data, count = normal((1, 24)), np.array([[10]], np.int32)

        def kernel(data: Any, count: Any) -> Any:
            output = nl.ndarray(data.shape, data.dtype, buffer=nl.shared_hbm)
            example(path, "# nki.language.fori_loop", ub_input=count, data=data, output=output, N=24)
            return output

        return error(launch(kernel, (data, count)), np.where(np.arange(24) < 10, wide(data)[0], 0))

    def conditional() -> float:
        data, count = np.array([[1.5]], np.float32), np.array([[7]], np.int32)

        def kernel(data: Any, count: Any) -> Any:
            return store(example(path, "# nki.language.while_loop", data=data, count_input=count)["acc"])

        return error(launch(kernel, (data, count)), np.array([[10.5]]))

    return {"fori_loop": counted, "while_loop": conditional}


def _dynamic_range(path: Path) -> Cases:
    def run() -> float:
        x = normal((512, 512))

        def kernel(x: Any) -> Any:
            out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
            with warnings.catch_warnings(action="ignore"):
                example(path, "stop = nisa.register_alloc(512)", input_tensor=x, out_tensor=out)
            return out

        return error(launch(kernel, (x,)), wide(x)[0] + 2)

    return {"512x512, bounds in registers": run}


def _scalar_dma(path: Path) -> Cases:
    def run() -> float:
        x, body = normal((512, 512)), example(path, "def indirect_scalar_dynamic_dma")["indirect_scalar_dynamic_dma"]

        def kernel(x: Any) -> Any:
            # The example compares the shape, a tuple, with a list.
            x.shape = list(x.shape)
            return body(x)

        return error(launch(kernel, (x,)), wide(x)[0][384:, :256])

    return {"512x512": run}
