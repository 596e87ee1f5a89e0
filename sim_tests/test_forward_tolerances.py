# SPDX-License-Identifier: Apache-2.0
"""The judge of forwards and of pairs: it passes what rounds correctly, and sees each kind of fault it exists for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nki_bn import BatchNormForward, reference
from nki_bn.cases import Draw
from nki_bn.pair import autograd, judge_pair
from nki_bn.problem import DTYPES, GRADIENTS, RELU_MODES, Array, ForwardCase, averaging_factor
from nki_bn.tolerances import Arithmetic
from nki_bn.verify import judge_forward

F32 = np.float32
SHAPE = (16, 3, 40)


def exact(case: ForwardCase, **changes: Any) -> BatchNormForward:
    """The reference, rounded to the output dtypes; y and mask at the rounded statistics. Then the ``changes``."""
    running = (case.running_mean, case.running_var)
    batch = reference.statistics(case.x) if case.training else running
    mean, var = (values.astype(F32) for values in batch)
    made = reference.batch_norm_fwd(case.x, case.gamma, case.beta, case.eps, case.fuse_relu, case.residual, (mean, var))
    count = case.x.size // case.x.shape[1]
    if case.training:
        momentum = averaging_factor(case.momentum, case.num_batches_tracked, used=True)
        updates = zip(running, (mean, var.astype(np.float64) * count / (count - 1)), strict=True)
        running = tuple(reference.running(old, new, momentum).value.astype(F32) for old, new in updates)
    mask = (made.z.value > 0).astype(np.uint8) if case.relu == "mask" else None
    return BatchNormForward(made.y.astype(case.x.dtype), mean, var, *running, mask)._replace(**changes)


def wrong(
    case: ForwardCase, outputs: BatchNormForward, numerics: str = "ideal", accumulate: str = "pairwise"
) -> set[str]:
    """The outputs that do not agree."""
    dtype = {dtype: name for name, dtype in DTYPES.items()}[case.x.dtype]
    return {row.output for row in judge_forward(case, outputs, Arithmetic(dtype, numerics, accumulate)) if not row.ok}


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("relu", RELU_MODES)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_agrees_with_itself(dtype: str, training: bool, relu: str, residual: bool) -> None:
    case = Draw(SHAPE, dtype, mean=3).forward(relu, training, residual=residual)
    assert wrong(case, exact(case)) == set()


@pytest.mark.parametrize("ratio", [30, 1e3, 1e6])
def test_a_one_pass_variance_is_found(ratio: float) -> None:
    """E[x^2] - mean^2 in float32, whose error grows with the square of mean/std where the bound grows with mean/std."""
    case = Draw(SHAPE, mean=ratio).forward()
    mean = case.x.mean((0, 2), dtype=np.float64).astype(F32)
    one_pass = np.square(case.x).mean((0, 2), dtype=np.float64).astype(F32) - mean * mean
    assert "var" in wrong(case, exact(case, var=one_pass), "trn2", "sequential")


@pytest.mark.parametrize("numerics", ["ideal", "trn2"])
def test_a_mean_or_variance_in_16_bits_is_found(numerics: str) -> None:
    case = Draw(SHAPE, mean=3).forward()
    right = exact(case)
    for name in ("mean", "var"):
        rounded = getattr(right, name).astype(DTYPES["bfloat16"]).astype(F32)
        assert name in wrong(case, right._replace(**{name: rounded}), numerics)


def test_a_mean_four_units_off_is_found() -> None:
    case = Draw(SHAPE, mean=1e4, std=0.1).forward()
    right = exact(case)
    for units, outputs in ((1, set()), (4, {"mean"})):
        moved = right.mean + F32(units) * np.spacing(right.mean)
        assert wrong(case, exact(case, mean=moved)) & {"mean"} == outputs


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"eps": 1e-3}, {"y"}),
        ({"residual": None}, {"y"}),
        ({"fuse_relu": False}, {"y"}),
        ({"gamma": None}, {"y", "relu_mask"}),
        ({"momentum": 0.1001}, {"running_mean", "running_var"}),
        ({"momentum": None, "num_batches_tracked": 8}, {"running_mean", "running_var"}),
    ],
)
def test_another_argument_is_found(change: dict[str, Any], found: set[str]) -> None:
    case = Draw(SHAPE, mean=3).forward("mask", residual=True)
    made = exact(replace(case, **change))
    made = made._replace(relu_mask=exact(case).relu_mask) if "relu_mask" not in found else made
    assert wrong(case, made) == found


def test_tracking_the_biased_variance_is_found() -> None:
    case = Draw(SHAPE).forward()
    assert case.running_var is not None
    biased = F32(0.9) * case.running_var + F32(0.1) * exact(case).var
    assert wrong(case, exact(case, running_var=biased)) == {"running_var"}


def test_frozen_statistics_have_to_come_back_bit_for_bit() -> None:
    case = Draw(SHAPE).forward(training=False)
    right = exact(case)
    for name in ("running_mean", "running_var"):
        assert wrong(case, right._replace(**{name: np.nextafter(getattr(right, name), F32(9))})) == {name}


def test_a_hidden_nan_is_found() -> None:
    """A ReLU by a maximum with 0 that gives 0 for NaN."""
    case = Draw(SHAPE).forward("mask")
    case.x[0, 1, 0] = np.nan
    right = exact(case)
    assert wrong(case, right) == set()
    assert wrong(case, right._replace(y=np.nan_to_num(right.y))) == {"y"}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_cutting_off_y_is_a_bias(dtype: str) -> None:
    case = Draw((200, 3, 40), dtype).forward()
    right = exact(case)
    wide = reference.batch_norm_fwd(case.x, case.gamma, case.beta, case.eps, given=(right.mean, right.var)).y
    away = np.abs(right.y.astype(np.float64)) > np.abs(wide)
    cut = np.where(away, np.nextafter(right.y, np.zeros((), right.y.dtype)), right.y)
    assert wrong(case, right._replace(y=cut)) == {"y"}


def test_one_wrong_element_of_a_mask_is_found_but_not_at_the_kink() -> None:
    case = Draw(SHAPE).forward("mask")
    right = exact(case)
    z = reference.pre_activation(case.x, right.mean, right.var, case.gamma, case.beta, case.eps)
    assert right.relu_mask is not None and np.abs(z.value).min() > 1e-5
    flipped = right.relu_mask.copy()
    flipped[3, 1, 7] = 1 - flipped[3, 1, 7]
    assert wrong(case, right._replace(relu_mask=flipped)) == {"relu_mask"}
    at_the_kink = replace(case, beta=(case.beta - z.value[3, :, 7]).astype(F32))
    right = exact(at_the_kink)
    assert right.relu_mask is not None
    for mask in (right.relu_mask, np.where(np.arange(40) == 7, 1 - right.relu_mask, right.relu_mask)):
        only_there = np.where(np.arange(16)[:, None, None] == 3, mask, right.relu_mask)
        rows = judge_forward(at_the_kink, right._replace(relu_mask=only_there), Arithmetic("float32"))
        assert rows[-1].output == "relu_mask" and rows[-1].ok and rows[-1].excluded >= 3


def rounded_pair(case: ForwardCase, dy: Array) -> dict[str, Array]:
    """Autograd's results in the output dtypes."""
    wide = {"dx", "dresidual", "y"}
    return {name: value.astype(dy.dtype if name in wide else F32) for name, value in autograd(case, dy).items()}


def wrong_in_pair(case: ForwardCase, dy: Array, outputs: dict[str, Array]) -> set[str]:
    ordered = tuple(outputs.get(name) for name in ("y", *GRADIENTS))
    return {row.output for row in judge_pair(case, dy, ordered, Arithmetic("float32")) if not row.ok}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("relu", RELU_MODES)
def test_a_pair_that_is_a_thousandth_off_is_found(relu: str, training: bool) -> None:
    draw = Draw(SHAPE, mean=2)
    case, dy = draw.forward(relu, training, residual=True), draw.gradient()
    right = rounded_pair(case, dy)
    assert wrong_in_pair(case, dy, right) == set()
    for name, value in right.items():
        assert wrong_in_pair(case, dy, right | {name: value * F32(1.001)}) == {name}


def test_a_pair_with_the_statistics_held_constant_is_found() -> None:
    """dx = gamma*rstd*dy, as if the statistics did not depend on x."""
    draw = Draw(SHAPE, mean=2)
    case, dy = draw.forward(), draw.gradient()
    mean, var = (values.astype(F32) for values in reference.statistics(case.x))
    frozen = rounded_pair(replace(case, training=False, running_mean=mean, running_var=var), dy)
    assert wrong_in_pair(case, dy, frozen) == {"dx"}
