# SPDX-License-Identifier: Apache-2.0
"""With rounding switched off, a 16-bit kernel computes what the float32 kernel computes under the same plan.

The float32 kernel gets the same values, and a plan with the same tiles, float32 slots and the same way to take the mean
from x: all results are equal bit for bit. (Left to itself, a plan folds the mean of 16-bit x into a constant and
subtracts that of float32 x first; the fold has a tolerance of its own.)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from replicas import ROOMY, TIGHT, Layer, Part, draw

from nki_bn import reference, tolerances
from nki_bn.comparison import compare
from nki_bn.kernels import given_statistics
from nki_bn.kernels.batch_norm_bwd import batch_norm_bwd
from nki_bn.kernels.batch_norm_fwd import batch_norm_fwd
from nki_bn.kernels.plan import BackwardPlan, ForwardPlan
from nki_bn.problem import BackwardCase
from nki_bn.reference import Array
from nki_bn.simulator import RunOptions, run
from nki_bn.tolerances import Arithmetic

NARROW = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
# Slots whose dtype is that of x; the staged copy of dy' has one of its own.
ELEMENTS = ("x", "dy", "residual")
SHAPE = (4, 3, 2, 8, 10)
EXACT = RunOptions()
ERASED = RunOptions(precise_fp=False)


def drawn(dtype: str, relu: str, memory: int, training: bool = True) -> tuple[Layer, Part, tuple[Array, Array], Array]:
    """A layer, a batch of 16-bit values, float32 statistics (in training its own) and a mask."""
    layer, part, _ = draw(SHAPE, (4,), NARROW[dtype], residual=relu == "recompute")
    layer = replace(layer, relu=relu, sbuf_bytes=memory)
    own = reference.statistics(part.x)
    mean, var = own if training else (own[0] - 0.3, own[1] + 0.2)
    mask = (np.random.default_rng(2).random(SHAPE) < 0.6).astype(np.uint8)
    return layer, part._replace(mask=mask), (mean.astype(np.float32), var.astype(np.float32)), mask


def widened(part: Part) -> Part:
    residual = None if part.residual is None else part.residual.astype(np.float32)
    return Part(part.x.astype(np.float32), part.dy.astype(np.float32), residual, part.mask)


def of_float32(plan: Any) -> Any:
    """The same tiles for float32 elements."""
    wide = (replace(b, dtype="float32") if b.name in ELEMENTS else b for b in plan.buffers)
    return replace(plan, dtype="float32", buffers=tuple(wide))


def forward(layer: Layer, part: Part, plan: ForwardPlan, options: RunOptions, **given: Any) -> tuple[Array, ...]:
    """All results of the forward that there are."""
    columns = layer.gamma.reshape(-1, 1), layer.beta.reshape(-1, 1)
    named = {"residual": part.residual, "fuse_relu": layer.relu != "none", "plan": plan, **given}
    outputs = run(batch_norm_fwd, (part.x, *columns), named, 1, options).outputs
    return tuple(array for array in outputs if array is not None)


def backward(
    layer: Layer, part: Part, statistics: tuple[Array, Array], plan: BackwardPlan, options: RunOptions
) -> tuple[Array, Array, Array]:
    """dx, dgamma, dbeta."""
    columns = *statistics, layer.gamma.reshape(-1, 1), layer.beta.reshape(-1, 1)
    mask = part.mask if layer.relu == "mask" else None
    named = {"fuse_relu": layer.relu != "none", "relu_mask": mask, "residual": part.residual, "plan": plan}
    dx, dgamma, dbeta = run(batch_norm_bwd, (part.dy, part.x, *columns), named, 1, options).outputs
    return dx, dgamma, dbeta


def assert_equal(got: tuple[Array, ...], want: tuple[Array, ...]) -> None:
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == theirs.dtype and mine.tobytes() == theirs.tobytes()


@pytest.mark.statement("erase")
@pytest.mark.parametrize("memory", [ROOMY, TIGHT], ids=["one tile", "many tiles"])
@pytest.mark.parametrize("relu", ["none", "recompute"])
@pytest.mark.parametrize("dtype", NARROW)
def test_forward_is_that_of_float32(dtype: str, relu: str, memory: int) -> None:
    """y, mean, variance and mask, in training and with given statistics; with rounding on, y is another."""
    layer, part, statistics, _ = drawn(dtype, relu, memory)
    for given in ({}, dict(zip(("means", "variances"), statistics, strict=True))):
        plan = layer.forward_plan(part, training=not given)
        erased = forward(layer, part, plan, ERASED, **given)
        wide = forward(layer, widened(part), of_float32(plan), EXACT, **given)
        assert_equal(erased, wide)
        assert not np.array_equal(forward(layer, part, plan, EXACT, **given)[0], wide[0])


@pytest.mark.statement("erase")
@pytest.mark.parametrize("memory", [ROOMY, TIGHT], ids=["one tile", "many tiles"])
@pytest.mark.parametrize("relu", ["none", "mask", "recompute"])
@pytest.mark.parametrize("dtype", NARROW)
def test_sums_and_frozen_dx_are_those_of_float32(dtype: str, relu: str, memory: int) -> None:
    for training in (True, False):
        layer, part, statistics, _ = drawn(dtype, relu, memory, training)
        plan = layer.backward_plan(part, training)
        erased = backward(layer, part, statistics, plan, ERASED)
        wide = backward(layer, widened(part), statistics, of_float32(plan), EXACT)
        assert_equal(erased[training:], wide[training:])


@pytest.mark.statement("erase")
@pytest.mark.parametrize("memory", [ROOMY, TIGHT], ids=["one tile", "many tiles"])
@pytest.mark.parametrize("relu", ["none", "mask", "recompute"])
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("folded", [True, False], ids=["folded", "subtracted"])
def test_dx_with_batch_statistics_is_that_of_float32(dtype: str, relu: str, memory: int, folded: bool) -> None:
    """Rounding is off on both sides: a float16 dy' would not fit into the staged copy otherwise."""
    layer, part, statistics, _ = drawn(dtype, relu, memory)
    plan = replace(layer.backward_plan(part), folded=folded)
    erased = backward(layer, part, statistics, plan, ERASED)
    assert_equal(erased, backward(layer, widened(part), statistics, of_float32(plan), ERASED))


@pytest.mark.statement("erase")
@pytest.mark.parametrize("memory", [ROOMY, TIGHT], ids=["one tile", "many tiles"])
@pytest.mark.parametrize("dtype", NARROW)
def test_dx_with_batch_statistics_is_within_the_folds_tolerance(dtype: str, memory: int) -> None:
    """Its float32 result is judged without the 16-bit rounding that would hide the fold."""
    layer, part, statistics, _ = drawn(dtype, "mask", memory)
    got = backward(layer, part, statistics, layer.backward_plan(part), ERASED)[0]
    assert got.dtype == np.float32
    columns = *statistics, layer.gamma, layer.beta, layer.eps
    case = BackwardCase(part.dy, part.x, *columns, True, part.mask)
    want = reference.batch_norm_bwd(part.dy, part.x, *statistics, layer.gamma, layer.eps, part.mask)
    allowances = tolerances.backward(case, want, Arithmetic(dtype), np.zeros(SHAPE, np.bool_))
    row = compare("dx", got, want.dx.value, allowances["dx"])
    assert row.ok, row


@pytest.mark.statement("erase")
@pytest.mark.parametrize("relu", ["none", "mask", "recompute"])
def test_a_staged_dx_is_the_unstaged_one(relu: str) -> None:
    """float32, from given sums: the bfloat16 copies of dy' are the only rounding that depends on the plan."""
    layer, part, _ = draw(SHAPE, (4,), residual=relu == "recompute")
    tight, roomy = (replace(layer, relu=relu, sbuf_bytes=memory) for memory in (TIGHT, ROOMY))
    mean, var = (values.astype(np.float32) for values in reference.statistics(part.x))
    mask = (part.x > mean.reshape(-1, 1, 1, 1)).astype(np.uint8) if relu == "mask" else None
    columns = [column.reshape(-1, 1) for column in (layer.gamma, layer.beta, layer.beta, layer.gamma)]
    named = {"fuse_relu": relu != "none", "relu_mask": mask, "residual": part.residual}

    def dx(source: Layer, options: RunOptions) -> Array:
        arguments = (part.dy, part.x, mean, var, *columns, 640, source.backward_plan(part))
        result: Array = run(given_statistics.input_gradient, arguments, named, 1, options).outputs
        return result

    assert_equal((dx(tight, ERASED),), (dx(roomy, EXACT),))
    assert not np.array_equal(dx(tight, EXACT), dx(roomy, EXACT))
