# SPDX-License-Identifier: Apache-2.0
"""The one table of tolerances: how far a kernel may be from the float64 reference. Derivations: docs/numerics.md.

All figures are shares of the scale of the terms (see ``nki_bn.reference``), never of a result that may have cancelled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nki_bn import reference
from nki_bn.problem import Array, BackwardCase, ForwardCase
from nki_bn.reference import BackwardReference, Float64, ForwardReference, Result

# Half a unit in the last place of float32, the format of all arithmetic.
FLOAT32 = 2.0**-24
# Error of one per-partition operand.
POINTER = {"ideal": 0.0, "trn2": 2.0**-18}
# Error of a coefficient that Tensor multiplies with: two bfloat16 numbers, the first cut to 8 bits, the second rounded.
PIECES = 2.0**-16
# Error of a sum of float32 products, by the order in which the columns of a chunk are added.
SUMS = {"pairwise": 16 * FLOAT32, "sequential": 128 * FLOAT32}
# The largest lo of mean = hi + lo as a share of the mean: hi has 16 significant bits, and 8 at least for 16-bit inputs.
LOW = {"float32": 2.0**-15, "float16": 2.0**-8, "bfloat16": 2.0**-8}
# rstd, the columns made from it, and the last combination of dx: at most 16 roundings, none of more than half a unit.
COLUMNS = 16 * FLOAT32
# Half a unit of bfloat16, in which the staged strategy keeps dy' between its phases (exact where dy is bfloat16).
STAGING = {"float32": 2.0**-8, "float16": 2.0**-8, "bfloat16": 0.0}
# A mean of merged means: of pieces, of groups of pieces, of bands of partitions, of cores; each is rounded.
MERGES = 4 * FLOAT32
# (1 - momentum)*old + momentum*batch: two factors, two products, a sum.
RUNNING = 4 * FLOAT32
# What may be flushed to zero: the smallest normal number of float32.
UNDERFLOW = 2.0**-126


@dataclass(frozen=True)
class Arithmetic:
    """What decides the rounding of a run: dtype of the input, modes of the simulator, and what plans do.

    ``staged``: dy' is kept between the phases of the backward in bfloat16; ``tensor``: Tensor combines dx; ``fast``:
    the x-term of dx is rounded to the dtype of the input; ``narrow``: x - hi is kept in that dtype in the forward;
    ``replicas``: as many reduce statistics and sums.
    """

    dtype: str
    numerics: str = "trn2"
    accumulate: str = "pairwise"
    staged: bool = False
    tensor: bool = False
    fast: bool = False
    narrow: bool = False
    replicas: int = 1

    @property
    def reduction(self) -> float:
        """Share of its terms by which a reduction over replicas may be off: R - 1 additions in any order, and at most
        four roundings of weights, products and quotients."""
        return (self.replicas + 3) * FLOAT32 if self.replicas > 1 else 0.0

    @property
    def slope(self) -> float:
        """Relative error of the coefficient of x in dx."""
        return max(POINTER[self.numerics], PIECES if self.tensor else 0.0)

    @property
    def sums(self) -> float:
        """Share of sum |terms| by which dgamma and dbeta may be off: the sum, and two pointer operands of dgamma."""
        return SUMS[self.accumulate] + 2 * POINTER[self.numerics] + self.reduction

    @property
    def frozen(self) -> float:
        """Share of its terms by which y, or a dx with frozen statistics, may be off: one pointer operand per term."""
        return POINTER[self.numerics] + COLUMNS

    @property
    def elements(self) -> float:
        """Share of its terms by which a dx with batch statistics may be off: that, a second pointer, and the sums."""
        return self.frozen + self.slope + self.sums

    @property
    def folded(self) -> float:
        """Share of the mean's term in dx by which folding it into a constant may be off; 16-bit inputs only."""
        return 0.0 if self.dtype == "float32" else POINTER[self.numerics] + self.slope + 4 * FLOAT32

    @property
    def staging(self) -> float:
        """Share of gamma*rstd*dy' by which a staged dy' may be off."""
        return STAGING[self.dtype] if self.staged else 0.0


@dataclass(frozen=True)
class Allowance:
    """``error``: bound on each element's error before its last rounding; ``excluded``: elements that are not judged."""

    error: Float64
    excluded: npt.NDArray[np.bool_]


def everywhere(error: Float64) -> Allowance:
    """This error for all elements, none of them left out."""
    return Allowance(error + UNDERFLOW, np.zeros(error.shape, np.bool_))


def statistics(x: Array, mean: Float64, var: Float64, arithmetic: Arithmetic) -> dict[str, Allowance]:
    """The allowances of the statistics ``mean`` and ``var`` [C] of ``x``."""
    with np.errstate(all="ignore"):
        spread = reference.spread(x)
        sums = SUMS[arithmetic.accumulate] + arithmetic.reduction
        merges = MERGES + arithmetic.reduction
        moved = merges * (np.abs(mean) + spread)
        of_mean = merges * np.abs(mean) + sums * spread
        of_var = (sums + COLUMNS) * var + 2 * moved * np.sqrt(var) + moved**2
    return {"mean": everywhere(of_mean), "var": everywhere(of_var)}


def running(want: Result) -> Allowance:
    """The allowance of a running statistic, given that of the batch."""
    return everywhere(RUNNING * want.scale)


def forward(case: ForwardCase, want: ForwardReference, arithmetic: Arithmetic) -> Float64:
    """Bound on the error of the value before the ReLU, like x: that of y before its last rounding."""
    low = low_part(want.mean, want.var, case.eps, arithmetic)
    error = pre_activation_error(want.z, case.gamma, low, arithmetic)
    if arithmetic.narrow:
        error += narrow_error(case.x, want.mean, want.var, case.gamma, case.eps)
    return error


def narrow_error(x: Array, mean: Array, var: Array, gamma: Array | None, eps: float) -> Float64:
    """What rounding x - hi to the dtype of ``x`` may add to the error of y, like x.

    Nothing where x is within a factor of two of hi, which is the mean up to a share LOW: the difference is exact there.
    """
    low = LOW["bfloat16"]
    wide = x.astype(np.float64)
    with np.errstate(all="ignore"):
        factor = 1 / np.sqrt(var.astype(np.float64) + eps) * (1 if gamma is None else np.abs(gamma))
        center = reference.column(mean.astype(np.float64), wide)
        ratio = wide / center
        exact = (ratio >= (1 + low) / 2) & (ratio <= 2 * (1 - low))
        rounded = half_unit(np.abs(wide - center) + low * np.abs(center), x.dtype)
        error: Float64 = np.where(exact, 0.0, rounded) * reference.column(factor, wide)
    return error


def backward(
    case: BackwardCase, want: BackwardReference, arithmetic: Arithmetic, undecided: Array
) -> dict[str, Allowance]:
    """The allowances of dx, dgamma, dbeta and dresidual.

    ``undecided`` (like x) marks the elements whose recomputed mask may be 0 or 1: they are not judged in dx and
    dresidual, and what they could add to the sums is allowed there.
    """
    with np.errstate(all="ignore"):
        open_terms = np.where(undecided, np.abs(case.dy.astype(np.float64)), 0.0)
        open_dbeta = reference.channel_sum(open_terms)
        open_dgamma = reference.channel_sum(open_terms * np.abs(want.normalised))
        if case.training:
            dx = _training_dx(case, want, arithmetic, (open_dbeta, open_dgamma))
        else:
            dx = arithmetic.frozen * want.dx.scale
        low = low_part(case.mean, case.var, case.eps, arithmetic)
        dgamma_scale = want.dgamma.scale + low * want.dbeta.scale
    return {
        "dx": Allowance(dx + UNDERFLOW, undecided),
        "dgamma": everywhere(arithmetic.sums * dgamma_scale + open_dgamma),
        "dbeta": everywhere(SUMS[arithmetic.accumulate] * want.dbeta.scale + open_dbeta),
        "dresidual": Allowance(np.broadcast_to(UNDERFLOW, case.x.shape), undecided),
    }


def near_kink(case: BackwardCase, z: Result, arithmetic: Arithmetic) -> Array:
    """Where the sign of the recomputed pre-activation ``z`` is within its rounding bound, so that either is right."""
    low = low_part(case.mean, case.var, case.eps, arithmetic)
    near: Array = np.abs(z.value) < pre_activation_error(z, case.gamma, low, arithmetic)
    return near


def pre_activation_error(z: Result, gamma: Array | None, low: Float64, arithmetic: Arithmetic) -> Float64:
    """Bound on the error of ``z`` as a kernel computes it; ``low`` [C] is what the low part of the mean adds."""
    with np.errstate(all="ignore"):
        low = low if gamma is None else np.abs(gamma) * low
        error: Float64 = arithmetic.frozen * (z.scale + reference.column(low, z.value))
    return error


def _training_dx(
    case: BackwardCase, want: BackwardReference, arithmetic: Arithmetic, opened: tuple[Float64, Float64]
) -> Float64:
    """Error of dx with batch statistics; ``opened`` is what undecided elements may add to dbeta and dgamma."""
    low = arithmetic.elements * low_part(case.mean, case.var, case.eps, arithmetic)
    folded = arithmetic.folded * _mean_part(case.mean, case.var, case.eps)
    constant = opened[0] + low * want.dgamma.scale + folded * np.abs(want.dgamma.value)
    slope = opened[1] + low * want.dbeta.scale
    through_sums = reference.column(constant, case.x) + np.abs(want.normalised) * reference.column(slope, case.x)
    staged = arithmetic.staging * np.abs(want.factor * case.dy.astype(np.float64))
    count = max(1, case.x.size // case.x.shape[1])
    error: Float64 = arithmetic.elements * want.dx.scale + np.abs(want.factor) * through_sums / count + staged
    return error + half_unit(_input_term(want, count) + error, case.x.dtype) if arithmetic.fast else error


def _input_term(want: BackwardReference, count: int) -> Float64:
    """What is subtracted from gamma*rstd*dy' in dx, without its sign: like x."""
    constant, slope = (reference.column(sums.value, want.normalised) for sums in (want.dbeta, want.dgamma))
    term: Float64 = np.abs(want.factor * (constant + want.normalised * slope)) / count
    return term


def _mean_part(mean: Array, var: Array, eps: float) -> Float64:
    """|mean|*rstd [C]; of no meaning, as the results are, where given statistics and eps are all 0."""
    with np.errstate(all="ignore"):
        part: Float64 = np.abs(mean.astype(np.float64)) / np.sqrt(var.astype(np.float64) + eps)
    return part


def low_part(mean: Array, var: Array, eps: float, arithmetic: Arithmetic) -> Float64:
    """Bound [C] on what lo adds to the terms, in deviations: it stands in x - hi and, against that, in a column."""
    return 2 * LOW[arithmetic.dtype] * _mean_part(mean, var, eps)


def half_unit(values: Float64, dtype: np.dtype[Any]) -> Float64:
    """Half a unit in the last place of ``dtype`` at ``values``: the error of rounding to nearest."""
    limits = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    exponent = np.where(values == 0, limits.minexp, np.maximum(np.frexp(values)[1] - 1, limits.minexp))
    half: Float64 = np.ldexp(0.5, exponent - limits.nmant)
    return half
