# SPDX-License-Identifier: Apache-2.0
"""The judge itself: it passes what rounds correctly, and sees each kind of fault it exists for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nki_bn import reference, tolerances
from nki_bn.cases import Draw
from nki_bn.comparison import Comparison, compare
from nki_bn.problem import DTYPES, Array, BackwardCase
from nki_bn.reference import Float64
from nki_bn.tolerances import Allowance, Arithmetic, half_unit
from nki_bn.verify import judge_backward

BFLOAT16 = DTYPES["bfloat16"]
IDEAL = Arithmetic("bfloat16", "ideal")


def allowance(want: Float64, error: float = 1e-12, excluded: Array | None = None) -> Allowance:
    return Allowance(np.full(want.shape, error), np.zeros(want.shape, bool) if excluded is None else excluded)


def values(shape: tuple[int, ...] = (50, 2, 40)) -> Float64:
    return np.random.default_rng(1).standard_normal(shape)


def judge(got: Array, want: Float64, **options: Any) -> Comparison:
    return compare("dx", got, want, allowance(want, **options))


def toward_zero(want: Float64) -> Array:
    """``want`` cut off to bfloat16."""
    bits = want.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(BFLOAT16)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_half_unit_is_half_the_distance_to_the_next_number(dtype: np.dtype[Any]) -> None:
    numbers = np.array([1.0, 1.5, 2.0, 3.99, 1024.0, 6e-5, 0.3, 0.0]).astype(dtype)
    following = np.nextafter(numbers, np.array(np.inf, dtype)).astype(np.float64)
    half = half_unit(numbers.astype(np.float64), dtype)
    assert np.array_equal(half, (following - numbers.astype(np.float64)) / 2)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_rounding_to_nearest_passes_with_no_arithmetic_error(dtype: np.dtype[Any]) -> None:
    want = values()
    row = judge(want.astype(dtype), want)
    assert row.ok and 0.9 < row.worst_ratio <= 1 and row.bias == 0


def test_one_wrong_element_is_found() -> None:
    want = values()
    got = want.astype(BFLOAT16)
    got[3, 1, 7] *= BFLOAT16.type(1.02)
    row = judge(got, want)
    assert not row.ok and row.worst_ratio > 1 and row.max_error == pytest.approx(0.02 * abs(want[3, 1, 7]), rel=0.4)


def test_a_zero_in_place_of_a_value_is_found_and_a_right_zero_passes() -> None:
    want = values()
    want[0] = 0
    got = want.astype(BFLOAT16)
    assert judge(got, want).ok
    got[1, 0, 0] = 0
    assert not judge(got, want).ok


def test_cutting_off_is_a_bias_even_within_the_worst_bound() -> None:
    """Truncation is symmetric about 0, so only the error towards larger magnitudes shows it."""
    want = values()
    row = judge(toward_zero(want), want, error=2.0**-7)
    assert row.worst_ratio <= 1
    clean = compare("dx", want.astype(BFLOAT16), want, allowance(want, 1e-9))
    biased = compare("dx", toward_zero(want), want, allowance(want, 1e-9))
    assert clean.bias is not None and biased.bias is not None and clean.bias <= 1 < biased.bias


def test_rounding_up_everywhere_is_a_bias() -> None:
    want = np.abs(values())
    got = toward_zero(want)
    up = (got.view(np.uint16) + 1).astype(np.uint16).view(BFLOAT16)
    row = judge(up, want)
    assert row.bias is not None and row.bias > 1


def test_equal_values_that_round_alike_are_no_bias() -> None:
    """A thousand times the same value a quarter unit above a number: the error is the same in each, and known."""
    want = np.full((1000, 1, 1), 1 + 2.0**-9)
    row = judge(want.astype(BFLOAT16), want)
    assert row.ok and row.bias == 0


@pytest.mark.parametrize("wrong", [0.0, np.inf, np.nan])
def test_a_finite_reference_wants_a_finite_output(wrong: float) -> None:
    want = values()
    got = want.astype(BFLOAT16)
    got[0, 0, 0] = wrong
    assert not judge(got, want).ok


@pytest.mark.parametrize("expected", [np.nan, np.inf, -np.inf])
def test_a_reference_that_is_not_finite_wants_no_finite_output(expected: float) -> None:
    want = values()
    want[:, 1] = expected
    got = want.astype(BFLOAT16)
    assert judge(got, want).ok
    got[0, 1, 0] = 1.0
    assert not judge(got, want).ok


def test_overflow_is_right_only_at_the_end_of_the_range() -> None:
    want = np.array([[7e4, -7e4, 65519.9, 6e4]]).reshape(1, 4, 1)
    with np.errstate(over="ignore"):
        got = want.astype(np.float16)
    assert np.isinf(got[0, :2]).all() and judge(got, want).ok
    got[0, 3, 0] = np.inf
    assert not judge(got, want).ok
    got[0, 3, 0], got[0, 0, 0] = 6e4, -np.inf
    assert not judge(got, want).ok


def test_excluded_elements_are_counted_and_not_judged() -> None:
    want = values()
    got = want.astype(BFLOAT16)
    got[0, 0, 0] = 1e3
    excluded = np.zeros(want.shape, bool)
    excluded[0, 0, 0] = True
    row = judge(got, want, excluded=excluded)
    assert row.ok and row.excluded == 1 and row.max_error < 0.1


def exact_outputs(case: BackwardCase, mask: Array | None = None) -> list[Array]:
    """The reference, rounded to the output dtypes."""
    want = reference.batch_norm_bwd(case.dy, case.x, case.mean, case.var, case.gamma, case.eps, mask, case.training)
    with np.errstate(all="ignore"):
        return [want.dx.value.astype(case.dy.dtype), *(w.value.astype(np.float32) for w in (want.dgamma, want.dbeta))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("training", [True, False])
def test_the_reference_agrees_with_itself(dtype: str, training: bool) -> None:
    case = Draw((4, 3, 25), dtype, mean=3).case(training=training)
    rows = judge_backward(case, exact_outputs(case), Arithmetic(dtype, "ideal"))
    assert [row.output for row in rows] == ["dx", "dgamma", "dbeta"] and all(row.ok for row in rows)


def test_an_output_of_none_is_not_judged() -> None:
    case = Draw((4, 3, 25), "bfloat16").case()
    dx, _, dbeta = exact_outputs(case)
    assert [row.output for row in judge_backward(case, (dx, None, dbeta), IDEAL)] == ["dx", "dbeta"]


@pytest.mark.parametrize("numerics", ["ideal", "trn2"])
def test_a_product_in_bfloat16_shows_in_dgamma(numerics: str) -> None:
    case = Draw((16, 3, 100), "bfloat16").case()
    outputs = exact_outputs(case)
    x_hat = (case.x.astype(np.float32) - case.mean[:, None]) / np.sqrt(case.var + 1e-5)[:, None]
    product = (x_hat * case.dy.astype(np.float32)).astype(BFLOAT16)
    outputs[1] = product.astype(np.float64).sum((0, 2)).astype(np.float32)
    rows = judge_backward(case, outputs, Arithmetic("bfloat16", numerics))
    assert [row.ok for row in rows] == [True, False, True]


def test_a_whole_mean_of_18_bits_shows_in_dgamma() -> None:
    """The fault that splitting the mean prevents: at mean/std = 1e3 a mean rounded to 18 bits is off by 2^-9."""
    case = Draw((16, 3, 100), mean=1000).case()
    rounded = replace(case, mean=case.mean + np.float32(2.0**-9))
    rows = judge_backward(case, exact_outputs(rounded), Arithmetic("float32", "trn2"))
    assert not rows[1].ok and rows[2].ok


def test_a_cancelled_dgamma_is_judged_at_the_scale_of_its_terms() -> None:
    drawn = Draw((16, 3, 100), "float32", mean=5).case()
    case = replace(drawn, dy=np.ones_like(drawn.dy))
    outputs = exact_outputs(case)
    assert np.abs(outputs[1]).max() < 1e-2
    for error, ok in ((1e-3, True), (1.0, False)):
        wrong = [outputs[0], outputs[1] + np.float32(error), outputs[2]]
        assert judge_backward(case, wrong, Arithmetic("float32", "ideal"))[1].ok == ok


def kink_case() -> BackwardCase:
    """Channel 0 has one element exactly at the kink of the ReLU, up to the rounding of its statistics."""
    case = Draw((4, 2, 9)).case("recompute")
    x = case.x.copy()
    gamma, beta = np.array([1, 1], np.float32), np.array([0, 1e3], np.float32)
    x[0, 0, 0] = case.mean[0]
    return replace(case, x=x, gamma=gamma, beta=beta)


@pytest.mark.parametrize("passes", [True, False])
def test_either_subgradient_is_right_at_the_kink(passes: bool) -> None:
    case = kink_case()
    z = reference.pre_activation(case.x, case.mean, case.var, case.gamma, case.beta).value
    mask = z > 0
    mask[0, 0, 0] = passes
    rows = judge_backward(case, exact_outputs(case, mask), Arithmetic("float32"))
    assert all(row.ok for row in rows) and rows[0].excluded == 1


def test_a_wrong_mask_away_from_the_kink_is_found() -> None:
    case = Draw((4, 2, 9)).case("recompute")
    mask = reference.pre_activation(case.x, case.mean, case.var, case.gamma, case.beta).value > 0
    mask[1, 0, 3] = not mask[1, 0, 3]
    rows = judge_backward(case, exact_outputs(case, mask), Arithmetic("float32"))
    assert rows[0].excluded == 0 and not any(row.ok for row in rows)


def test_undecided_elements_are_few() -> None:
    case = Draw((8, 4, 200)).case("recompute")
    z = reference.pre_activation(case.x, case.mean, case.var, case.gamma, case.beta)
    assert tolerances.near_kink(case, z, Arithmetic("float32")).mean() < 1e-3


def test_staging_is_allowed_for_only_where_it_is_done_and_rounds() -> None:
    case = Draw((4, 3, 25)).case()
    staged = replace(case, dy=case.dy.astype(ml_dtypes.bfloat16).astype(np.float32))
    factor = np.asarray(case.gamma)[:, None] / np.sqrt(case.var + case.eps)[:, None]
    dx = exact_outputs(case)[0] + factor * (staged.dy - case.dy)
    outputs = [dx.astype(np.float32), None, None]
    assert not judge_backward(case, outputs, Arithmetic("float32"))[0].ok
    assert judge_backward(case, outputs, Arithmetic("float32", staged=True))[0].ok
    assert Arithmetic("bfloat16", staged=True).staging == 0
