# SPDX-License-Identifier: Apache-2.0
"""What a plan would take, by its strategy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

from nki_bn.hardware import Timing, load_timing
from nki_bn.kernels.plan import (
    BackwardPlan,
    ForwardPlan,
    ResidentForwardPlan,
    ResidentPlan,
    TransposedForwardPlan,
    TransposedPlan,
)
from nki_bn.pipeline import Paces, Prediction
from nki_bn.predict_resident import predict_resident
from nki_bn.predict_resident_fwd import predict_resident_forward
from nki_bn.predict_staged import predict_staged
from nki_bn.predict_transposed import predict_transposed
from nki_bn.predict_two_read import predict_two_read

Plan: TypeAlias = (
    BackwardPlan | ResidentPlan | TransposedPlan | ForwardPlan | ResidentForwardPlan | TransposedForwardPlan
)

# Instructions of a core that a plan may take: loops unroll, and compilers take long over long programs.
INSTRUCTIONS = 20_000
# Steps of the pipeline after which a search for a plan tries nothing further: one takes up to 5 microseconds of Python.
MOST_STEPS = 10_000
# The one target with timing parameters; plans for the others are compared by them too.
TIMED = "trn2"

_ORDERS: dict[str, Callable[[Any, Timing], Prediction]] = {
    "staged": predict_staged,
    "resident": predict_resident,
    "reread": predict_resident,
    "transposed": predict_transposed,
    "two_read": predict_two_read,
}


@dataclass(frozen=True)
class Candidate:
    """A plan that fits, and its prediction."""

    plan: Plan
    prediction: Prediction


@cache
def timed_paces(others: int) -> Paces:
    """The paces of the timing model beside ``others`` cores: one object, which remembers what it was asked."""
    return Paces(load_timing(TIMED), others)


def predict(plan: Plan) -> Prediction:
    """The prediction of the timing model for the core with the larger share, with the parameters of trn2."""
    order = predict_resident_forward if isinstance(plan, ResidentForwardPlan) else _ORDERS[plan.strategy]
    return order(plan, load_timing(TIMED))
