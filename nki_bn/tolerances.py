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
from nki_bn.problem import Array, BackwardCase
from nki_bn.reference import BackwardReference, Float64, Result

# Half a unit in the last place of float32, the format of all arithmetic.
FLOAT32 = 2.0**-24
# Error of one per-partition operand.
POINTER = {"ideal": 0.0, "trn2": 2.0**-18}
# Error of a sum of float32 products, by the order in which the columns of a chunk are added.
SUMS = {"pairwise": 16 * FLOAT32, "sequential": 128 * FLOAT32}
# The largest lo of mean = hi + lo as a share of the mean: hi has 16 significant bits, and 8 at least for 16-bit inputs.
LOW = {"float32": 2.0**-15, "float16": 2.0**-8, "bfloat16": 2.0**-8}
# rstd, the columns made from it, and the last combination of dx: at most 16 roundings, none of more than half a unit.
COLUMNS = 16 * FLOAT32
# Half a unit of bfloat16, in which the staged strategy keeps dy' between its phases (exact where dy is bfloat16).
STAGING = {"float32": 2.0**-8, "float16": 2.0**-8, "bfloat16": 0.0}
# What may be flushed to zero: the smallest normal number of float32.
UNDERFLOW = 2.0**-126


@dataclass(frozen=True)
class Arithmetic:
    """What decides the rounding of a run: dtype of the input, modes of the simulator, whether the plan stages dy'."""

    dtype: str
    numerics: str = "trn2"
    accumulate: str = "pairwise"
    staged: bool = False

    @property
    def sums(self) -> float:
        """Share of sum |terms| by which dgamma and dbeta may be off: the sum, and two pointer operands of dgamma."""
        return SUMS[self.accumulate] + 2 * POINTER[self.numerics]

    @property
    def frozen(self) -> float:
        """Share of its terms by which y, or a dx with frozen statistics, may be off: one pointer operand per term."""
        return POINTER[self.numerics] + COLUMNS

    @property
    def elements(self) -> float:
        """Share of its terms by which a dx with batch statistics may be off: that, a second pointer, and the sums."""
        return self.frozen + POINTER[self.numerics] + self.sums

    @property
    def folded(self) -> float:
        """Share of the mean's term in dx by which folding it into a constant may be off; 16-bit inputs only."""
        return 0.0 if self.dtype == "float32" else 2 * POINTER[self.numerics] + 4 * FLOAT32

    @property
    def staging(self) -> float:
        """Share of gamma*rstd*dy' by which a staged dy' may be off."""
        return STAGING[self.dtype] if self.staged else 0.0


@dataclass(frozen=True)
class Allowance:
    """``error``: bound on each element's error before its last rounding; ``excluded``: elements that are not judged."""

    error: Float64
    excluded: npt.NDArray[np.bool_]


def backward(
    case: BackwardCase, want: BackwardReference, arithmetic: Arithmetic, undecided: Array
) -> dict[str, Allowance]:
    """The allowances of dx, dgamma and dbeta.

    ``undecided`` (like x) marks the elements whose recomputed mask may be 0 or 1: they are not judged in dx, and what
    they could add to the sums is allowed there.
    """
    with np.errstate(all="ignore"):
        open_terms = np.where(undecided, np.abs(case.dy.astype(np.float64)), 0.0)
        open_dbeta = reference.channel_sum(open_terms)
        open_dgamma = reference.channel_sum(open_terms * np.abs(want.normalised))
        if case.training:
            dx = _training_dx(case, want, arithmetic, (open_dbeta, open_dgamma))
        else:
            dx = arithmetic.frozen * want.dx.scale
        dgamma_scale = want.dgamma.scale + _low_part(case, arithmetic) * want.dbeta.scale
    all_judged = np.zeros(case.x.shape[1], np.bool_)
    return {
        "dx": Allowance(dx + UNDERFLOW, undecided),
        "dgamma": Allowance(arithmetic.sums * dgamma_scale + open_dgamma + UNDERFLOW, all_judged),
        "dbeta": Allowance(SUMS[arithmetic.accumulate] * want.dbeta.scale + open_dbeta + UNDERFLOW, all_judged),
    }


def near_kink(case: BackwardCase, z: Result, arithmetic: Arithmetic) -> Array:
    """Where the sign of the recomputed pre-activation ``z`` is within its rounding bound, so that either is right."""
    gamma = np.ones(1) if case.gamma is None else np.abs(case.gamma)
    scale = z.scale + reference.column(gamma * _low_part(case, arithmetic), case.x)
    bound: Array = np.abs(z.value) < arithmetic.frozen * scale
    return bound


def _training_dx(
    case: BackwardCase, want: BackwardReference, arithmetic: Arithmetic, opened: tuple[Float64, Float64]
) -> Float64:
    """Error of dx with batch statistics; ``opened`` is what undecided elements may add to dbeta and dgamma."""
    low = arithmetic.elements * _low_part(case, arithmetic)
    folded = arithmetic.folded * _mean_part(case)
    constant = opened[0] + low * want.dgamma.scale + folded * np.abs(want.dgamma.value)
    slope = opened[1] + low * want.dbeta.scale
    through_sums = reference.column(constant, case.x) + np.abs(want.normalised) * reference.column(slope, case.x)
    staged = arithmetic.staging * np.abs(want.factor * case.dy.astype(np.float64))
    count = max(1, case.x.size // case.x.shape[1])
    error: Float64 = arithmetic.elements * want.dx.scale + np.abs(want.factor) * through_sums / count + staged
    return error


def _mean_part(case: BackwardCase) -> Float64:
    """|mean|*rstd [C]."""
    part: Float64 = np.abs(case.mean.astype(np.float64)) / np.sqrt(case.var.astype(np.float64) + case.eps)
    return part


def _low_part(case: BackwardCase, arithmetic: Arithmetic) -> Float64:
    """Bound on |lo|*rstd [C]: lo is not subtracted from the elements, but comes in through per-channel columns."""
    return LOW[arithmetic.dtype] * _mean_part(case)


def half_unit(values: Float64, dtype: np.dtype[Any]) -> Float64:
    """Half a unit in the last place of ``dtype`` at ``values``: the error of rounding to nearest."""
    limits = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    exponent = np.where(values == 0, limits.minexp, np.maximum(np.frexp(values)[1] - 1, limits.minexp))
    half: Float64 = np.ldexp(0.5, exponent - limits.nmant)
    return half

