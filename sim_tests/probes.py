# SPDX-License-Identifier: Apache-2.0
"""What single instructions are asked, on whatever runs them, and what is read from their answers."""

from __future__ import annotations

from typing import Any

import nki
import numpy as np
import probe_kernels

from nki_bn import execute
from nki_bn.problem import Array
from nki_bn.simulator import RunOptions, run

P = 128
PLACES = (
    "tensor_scalar multiply",
    "tensor_scalar add",
    "tensor_scalar subtract",
    "tensor_scalar second operand",
    "scalar_tensor_tensor",
    "activation scale",
    "activation bias",
)
INSTRUCTIONS = (
    "tensor_copy",
    "tensor_copy through bfloat16",
    "tensor_copy through int32",
    "tensor_tensor",
    "tensor_scalar",
    "scalar_tensor_tensor",
    "tensor_reduce",
    "activation",
    "activation with a sum",
    "tensor_copy_predicated",
    "nc_transpose",
    "nc_matmul",
    "iota",
    "affine_select",
    "nc_stream_shuffle",
)
COLUMNS = 64


def launched(kernel: Any, *arguments: Any, numerics: str = "trn2") -> Any:
    """The results of a probe kernel on one core: on the device, in the vendor's simulator, or embedded."""
    if execute.which_nki().kind == "embedded":
        return run(kernel, arguments, {}, 1, RunOptions(numerics=numerics)).outputs
    return kernel(*arguments) if execute.has_device() else nki.simulate(kernel)(*arguments)


def operand_error(place: str, numerics: str = "trn2") -> float:
    """The largest relative error with which an operand arrives at ``place``.

    The operands have 24 significant bits, and what is computed with them is exact: times one, plus zero.
    """
    operands = np.random.default_rng(3).uniform(1, 2, (P, 1)).astype(np.float32)
    neutral = np.float32(1 if "multiply" in place or "scale" in place else 0)
    data = np.full((P, 8), neutral, np.float32)
    got = np.asarray(launched(probe_kernels.operand_probe, data, operands, place, numerics=numerics), np.float64)
    return float(np.max(np.abs(got / operands.astype(np.float64) - 1)))


def statistics_answers(columns: int) -> tuple[Array, Array, Array]:
    """Rows [128, columns], their bn_stats and the bn_aggr of these."""
    data = (np.random.default_rng(4).standard_normal((P, columns)) + 5).astype(np.float32)
    triples, moments = launched(probe_kernels.statistics_probe, data)
    return data, np.asarray(triples), np.asarray(moments)


def by_parity(data: Array) -> Array:
    """[count, mean, M2] of the even and of the odd elements of rows, float64."""
    parts = []
    for parity in (0, 1):
        lane = data[:, parity::2].astype(np.float64)
        count = np.full(len(data), lane.shape[1])
        mean = lane.mean(1) if lane.size else np.zeros(len(data))
        parts += [count, mean, np.square(lane - mean[:, None]).sum(1)]
    return np.stack(parts, axis=1)


def root_errors() -> dict[str, float]:
    """The largest relative error of 1/sqrt from 2^-40 to 2^40: by GpSimd, that and a Newton step, and by Scalar."""
    exponents = np.random.default_rng(5).uniform(-40, 40, (P, COLUMNS))
    data = np.exp2(exponents).astype(np.float32)
    want = 1 / np.sqrt(data.astype(np.float64))
    got = launched(probe_kernels.root_probe, data)
    names = ("gpsimd", "gpsimd and Newton", "scalar")
    return {name: float(np.max(np.abs(np.asarray(values) / want - 1))) for name, values in zip(names, got, strict=True)}


def instruction_inputs() -> tuple[Array, Array, Array]:
    """Multiples of 1/8 below 16, and a column of such.

    Every sum of 128 of their products has at most 21 bits, so float32 holds all results exactly, in any order.
    """
    rng = np.random.default_rng(6)
    data, other, column = (rng.integers(-127, 128, (P, width)) / 8 for width in (COLUMNS, COLUMNS, 1))
    return data.astype(np.float32), other.astype(np.float32), column.astype(np.float32)


def instruction_results() -> dict[str, Array]:
    """What every instruction of ``INSTRUCTIONS`` gives, by its position in that list."""
    inputs = instruction_inputs()
    return {
        str(position): np.asarray(launched(probe_kernels.instruction_probe, *inputs, which))
        for position, which in enumerate(INSTRUCTIONS)
    }


def expected_results() -> dict[str, Array]:
    """The same by NumPy."""
    data, other, column = (values.astype(np.float64) for values in instruction_inputs())
    numbers = np.arange(COLUMNS)
    quarters = data.reshape(4, 32, -1)[:, ::-1]
    want = {
        "tensor_copy": data,
        "tensor_copy through bfloat16": data,
        "tensor_copy through int32": np.rint(data),
        "tensor_tensor": data * other,
        "tensor_scalar": np.maximum(data - column, 0),
        "scalar_tensor_tensor": (data - column) * other,
        "tensor_reduce": data.sum(1, keepdims=True),
        "activation": np.maximum(data * column, 0),
        "activation with a sum": data.sum(1, keepdims=True),
        "tensor_copy_predicated": np.where(other > 0, data, 2),
        "nc_transpose": data.T,
        "nc_matmul": data.T @ other,
        "iota": 5 + 2 * np.arange(P)[:, None] + 3 * numbers,
        "affine_select": np.where(numbers >= np.arange(P)[:, None], data, 0),
        "nc_stream_shuffle": quarters.reshape(data.shape),
    }
    assert tuple(want) == INSTRUCTIONS
    return {str(position): values for position, values in enumerate(want.values())}


def unequal(got: dict[str, Array], want: dict[str, Array]) -> list[str]:
    """The instructions whose results are not the same to the bit."""
    return [which for i, which in enumerate(INSTRUCTIONS) if not np.array_equal(got[str(i)], want[str(i)])]
