# SPDX-License-Identifier: Apache-2.0
"""Judging an output: the worst element against its bound, and the mean error against what unbiased rounding leaves."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from nki_bn.problem import Array
from nki_bn.reference import Float64
from nki_bn.tolerances import Allowance, half_unit

# Standard deviations that the mean of unbiased errors may be off; passed by chance once in 5e8.
DEVIATIONS = 6.0


@dataclass(frozen=True)
class Comparison:
    """The verdict on one output.

    ``max_error`` is the largest error; ``worst_ratio`` the largest error over its own bound, and ``tolerance`` that
    bound; ``bias`` the largest mean error of a channel over its bound, None where no bias is judged; ``excluded`` the
    number of elements that were not judged.
    """

    output: str
    max_error: float
    tolerance: float
    worst_ratio: float
    bias: float | None
    excluded: int

    @property
    def worst_error(self) -> float:
        """Error of the element whose error is the largest share of its bound."""
        return self.worst_ratio * self.tolerance

    @property
    def ok(self) -> bool:
        """Whether every element, and the bias, is within its bound."""
        return self.worst_ratio <= 1 and (self.bias is None or self.bias <= 1)


def compare(output: str, got: Array, want: Float64, allowance: Allowance) -> Comparison:
    """Compare ``got`` with ``want``, element by element, and channel by channel for outputs of [B, C, ...].

    Where the reference is NaN or infinite the output has to be one of these too; where it is within its bound of the
    end of the dtype's range, infinity of its sign is right as well.
    """
    with np.errstate(all="ignore"):
        bound = allowance.error + half_unit(np.abs(want) + allowance.error, got.dtype)
        error = _errors(got, want, bound)
        ratio = np.where(allowance.excluded, 0.0, np.where(error == 0, 0.0, error / bound))
        ratio = np.where(np.isnan(ratio), np.inf, ratio)
        judged = np.where(allowance.excluded, 0.0, error)
        bias = _bias(got, want, allowance) if got.ndim > 1 and got.size else None
    if not got.size:
        return Comparison(output, 0.0, 0.0, 0.0, None, 0)
    worst = np.unravel_index(np.argmax(ratio), ratio.shape)
    return Comparison(
        output, float(judged.max()), float(bound[worst]), float(ratio[worst]), bias, int(allowance.excluded.sum())
    )


def compare_mask(output: str, got: Array, want: Array, undecided: Array) -> Comparison:
    """Compare a mask of 0 and 1 with that of the reference, where that is decided; one wrong element is too many."""
    wrong = float(np.any((got != want) & ~undecided))
    return Comparison(output, wrong, 0.5, 2 * wrong, None, int(undecided.sum()))


def _errors(got: Array, want: Float64, bound: Float64) -> Float64:
    wide = got.astype(np.float64)
    largest = float(ml_dtypes.finfo(got.dtype).max)  # type: ignore[no-untyped-call]
    overflow = np.isinf(wide) & (np.sign(wide) == np.sign(want)) & (np.abs(want) + bound > largest)
    right = np.where(np.isfinite(want), overflow, ~np.isfinite(wide))
    error = np.abs(wide - want)
    return np.where(right, 0.0, np.where(np.isnan(error), np.inf, error))


def _bias(got: Array, want: Float64, allowance: Allowance) -> float:
    """The worst channel's mean error over its bound, signed as it is and signed towards larger magnitudes.

    The reference is rounded to the output's dtype first: its own rounding error is known, and would be the same in
    elements that are alike.
    """
    rounded = want.astype(got.dtype).astype(np.float64)
    error = got.astype(np.float64) - rounded
    used = np.isfinite(error) & ~allowance.excluded
    error = np.where(used, error, 0.0)
    worst = 0.0
    for channel in range(want.shape[1]):
        mask = used[:, channel]
        count = int(mask.sum())
        if count:
            outward = error[:, channel] * np.sign(want[:, channel])
            mean = max(abs(float(error[:, channel].sum())), abs(float(outward.sum()))) / count
            allowed = float(allowance.error[:, channel][mask].mean())
            noise = _noise(want[:, channel][mask], got.dtype)
            worst = max(worst, mean / (allowed + DEVIATIONS * noise / count))
    return worst


def _noise(want: Float64, dtype: np.dtype[np.generic]) -> float:
    """Deviation of the sum of the rounding errors; equal values err alike, so each counts once, times its number."""
    values, counts = np.unique(want, return_counts=True)
    return float(np.sqrt(np.sum((counts * half_unit(np.abs(values), dtype)) ** 2)))
