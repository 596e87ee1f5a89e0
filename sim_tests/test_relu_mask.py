# SPDX-License-Identifier: Apache-2.0
"""The mask that the backward recomputes is the one the forward saved, bit for bit.

How to see a recomputed mask, with a gradient of ones: the gradient of the residual is the mask itself; without a
residual and with frozen statistics dx is gamma*rstd where the mask is 1; in training dbeta counts it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from agreement import forward_of, outputs_of

from nki_bn import reference
from nki_bn.cases import Draw
from nki_bn.pair import backward_case
from nki_bn.planner import plan_forward
from nki_bn.problem import DTYPES, Array, ForwardCase, ForwardProblem
from nki_bn.requests import prepare_forward

# Long rows, bands of partitions, two channel tiles, one position.
SMALL = [(4, 16, 19, 19), (6, 64, 15), (3, 200, 10), (99, 33)]
LARGE = [(64, 16, 99, 99)]


def at_the_kink(draw: Draw, numerics: str, residual: bool, training: bool) -> ForwardCase:
    """A forward half of whose values before the ReLU are 0 up to a few roundings, so that the last bits decide.

    Half of x, and of the residual, lies around one value per channel; with the statistics that x has, or that are
    given, beta brings these elements to 0.
    """
    case = draw.forward("mask", training, residual=residual)
    rng = np.random.default_rng((draw.seed, 2))
    close = rng.random(draw.shape) < 0.5

    def around(centre: Array, array: Array) -> Array:
        drawn = reference.column(centre, array) + 1e-6 * rng.standard_normal(array.shape)
        return np.where(close, drawn, array.astype(np.float64)).astype(array.dtype)

    at = [rng.standard_normal(draw.shape[1]).astype(case.x.dtype) for _ in range(2)]
    case = replace(case, x=around(at[0], case.x))
    if case.residual is not None:
        case = replace(case, residual=around(at[1], case.residual))
    made = forward_of(case, numerics)
    rows = (at[0][None], made.mean, made.var, case.gamma, None, case.eps, at[1][None] if residual else None)
    return replace(case, beta=-reference.pre_activation(*rows).value[0].astype(np.float32))


def mask_in_plain_float32(case: ForwardCase, mean: Array, var: Array) -> Array:
    """What NumPy's float32 makes of the formula, in another order than the kernels."""
    gamma, beta, mean, var = (
        reference.column(np.asarray(v), case.x).astype(np.float32) for v in (case.gamma, case.beta, mean, var)
    )
    z = (case.x.astype(np.float32) - mean) / np.sqrt(var + np.float32(case.eps)) * gamma + beta
    mask: Array = (z if case.residual is None else z + case.residual.astype(np.float32)) > 0
    return mask


def check(draw: Draw, numerics: str, residual: bool, training: bool) -> None:
    """Forward on two cores, backward on one: the mask depends on neither."""
    case = at_the_kink(draw, numerics, residual, training)
    made = forward_of(case, numerics, lnc=2)
    ones = np.ones_like(case.x)
    again = backward_case(case, ones, made.mean, made.var, None)
    frozen = outputs_of(replace(again, training=False), numerics, lnc=1, residual_grad=residual)
    recomputed = frozen[3] if residual else frozen[0] != 0
    assert made.relu_mask is not None and np.array_equal(recomputed, made.relu_mask)
    counted = outputs_of(replace(again, training=True), numerics, lnc=1, need=("dbeta",))[2]
    assert np.array_equal(counted, made.relu_mask.sum(reference.sum_axes(case.x)))
    assert 0.2 < made.relu_mask.mean() < 0.8
    assert (mask_in_plain_float32(case, made.mean, made.var) != made.relu_mask).any()


@pytest.mark.parametrize("shape", SMALL)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("numerics", ["trn2", "ideal"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_recomputed_mask_is_the_saved_one(
    dtype: str, numerics: str, residual: bool, training: bool, shape: tuple[int, ...]
) -> None:
    check(Draw(shape, dtype, 0.7, 1.3), numerics, residual, training)


def test_where_the_plan_depends_on_the_mask() -> None:
    """In eval y has the same bits all the same; in training the statistics add up in another order."""
    training = (ForwardProblem((32, 512, 7, 7), "bfloat16", relu=relu) for relu in ("mask", "recompute"))
    saved, recomputed = map(plan_forward, training)
    assert saved.chunk != recomputed.chunk
    draw = Draw((16, 130, 14, 14), "bfloat16", 0.7, 1.3)
    cases = [draw.forward(relu, False) for relu in ("mask", "recompute")]
    strategies = {plan_forward(prepare_forward(case).problem).strategy for case in cases}
    one, other = (forward_of(case, "trn2", lnc=2) for case in cases)
    assert len(strategies) == 2 and np.array_equal(one.y, other.y)
    assert one.relu_mask is not None and np.array_equal(one.relu_mask, other.y > 0) and other.relu_mask is None


@pytest.mark.nightly
@pytest.mark.parametrize("shape", LARGE)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("numerics", ["trn2", "ideal"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ten_million_recomputed_masks(
    dtype: str, numerics: str, residual: bool, training: bool, shape: tuple[int, ...]
) -> None:
    check(Draw(shape, dtype, 0.7, 1.3), numerics, residual, training)
