# SPDX-License-Identifier: Apache-2.0
"""What both backward strategies start from: the tensors of a launch, and which sums its outputs need."""

from dataclasses import dataclass

import nki.language as nl

from nki_bn.kernels.plan import BackwardPlan, ResidentPlan, TransposedPlan
from nki_bn.kernels.replicas import Replicas


@dataclass(frozen=True)
class BackwardTensors(nl.NKIObject):
    """Tensors of a launch in HBM: elements as [B, C, S], columns as they came; None where there is none.

    ``replicas`` are those that share the batch; None alone.
    """

    dy: nl.NkiTensor
    x: nl.NkiTensor
    means: nl.NkiTensor
    variances: nl.NkiTensor
    gamma: nl.NkiTensor
    beta: nl.NkiTensor
    mask: nl.NkiTensor
    residual: nl.NkiTensor
    dx: nl.NkiTensor
    dgamma: nl.NkiTensor
    dbeta: nl.NkiTensor
    dresidual: nl.NkiTensor
    replicas: Replicas | None = None


def needs_input_sums(plan: BackwardPlan | ResidentPlan | TransposedPlan) -> bool:
    """Whether dx needs the sums over the data."""
    return plan.training and plan.need_dx


def needs_products(plan: BackwardPlan | ResidentPlan | TransposedPlan) -> bool:
    """Whether the sum of dy'*(x - hi) is used."""
    return plan.need_dgamma or needs_input_sums(plan)


def needs_sums(plan: BackwardPlan | ResidentPlan | TransposedPlan) -> bool:
    """Whether any of the two sums is used."""
    return plan.need_dbeta or needs_products(plan)
