# SPDX-License-Identifier: Apache-2.0
"""The per-channel work that strategies share, run through a pipeline: columns and their coefficients."""

from __future__ import annotations

from dataclasses import dataclass

from nki_bn.pipeline import GPSIMD, VECTOR, Beside, Paces, Pipeline

COLUMN_BYTES = 4


@dataclass(frozen=True)
class Columns:
    """Columns of ``groups`` channel groups on ``lanes`` partitions, worked on by one core."""

    pipeline: Pipeline
    paces: Paces
    lanes: int
    groups: int = 1
    single: bool = False

    def load(self, ready: float = 0.0) -> float:
        """One column from HBM."""
        transfer = self.paces.transfer(self.lanes, self.groups, COLUMN_BYTES * self.groups)
        return self.pipeline.load(transfer, ready)

    def store(self, ready: float) -> float:
        """One column to HBM."""
        transfer = self.paces.transfer(self.lanes, self.groups, COLUMN_BYTES * self.groups)
        return self.pipeline.store(transfer, ready)

    def vector(self, ready: float, tiles: int = 1) -> float:
        """An instruction of Vector on one column, or on two."""
        name = "plain" if tiles == 1 else "tensor_tensor"
        return self.pipeline.run(VECTOR, self.paces.vector(name, self.groups), ready)

    def reduced(self, columns: int, ready: float) -> float:
        """The sum of ``columns`` partials of each lane."""
        return self.pipeline.run(VECTOR, self.paces.vector("reduce", columns), ready)

    def load_aside(self, beside: Beside | None = None) -> float:
        """One column from HBM, triggered by Scalar; values of groups of one channel are neighbours there."""
        runs = 1 if self.single else self.groups
        transfer = self.paces.transfer(self.lanes, runs, COLUMN_BYTES * self.groups)
        if beside is None:
            return self.pipeline.load_aside(transfer)
        lanes = min(self.lanes, self.paces.timing.dma.partitions_per_engine)
        return self.pipeline.load_beside(transfer, lanes * runs, beside)

    def store_aside(self, ready: float) -> float:
        """One column to HBM, triggered by Scalar."""
        return self.pipeline.store_aside(
            self.paces.transfer(self.lanes, self.groups, COLUMN_BYTES * self.groups), ready
        )

    def split(self, mean: float) -> float:
        """hi, lo and -hi of a mean that is there; when hi can be used."""
        hi = self.vector(mean)
        self.vector(hi, 2)
        self.vector(hi)
        return hi

    def derive(self, variance: float, gamma: float, split: float, beta: float | None = None) -> float:
        """rstd, scale and, with ``beta``, shift, from columns that are there at these times; when all can be used."""
        return self.scale_and_shift(self.reciprocal_root(variance), gamma, split, beta)

    def scale_and_shift(self, root: float, gamma: float, split: float, beta: float | None = None) -> float:
        """scale and, with ``beta``, shift."""
        scale = self.vector(max(gamma, root), 2)
        if beta is None:
            return scale
        shift = self.vector(max(split, scale), 2)
        return self.vector(max(beta, shift), 2)

    def reciprocal_root(self, variance: float) -> float:
        """rstd of a variance that is there."""
        value = self.vector(variance)
        root = self.pipeline.run(GPSIMD, self.paces.gpsimd(self.groups), value)
        near_one = self.vector(root, 2)
        near_one = self.vector(near_one, 2)
        step = self.vector(near_one)
        flag = self.vector(near_one)
        step = self.vector(step, 2)
        predicated = self.paces.vector("predicated", self.groups)
        return self.pipeline.run(VECTOR, predicated, max(flag, step))

    def coefficients(self, mean: float, variance: float, gamma: float, beta: float) -> float:
        """hi, lo, rstd, scale and shift of a forward; when all can be used."""
        root = self.reciprocal_root(variance)
        return self.scale_and_shift(root, gamma, self.split(mean), beta)

    def aggregate(self, triples: int, ready: float) -> float:
        """Mean and variance of ``triples`` counted moments."""
        return self.pipeline.run(VECTOR, self.paces.vector("bn_aggr", triples), ready)

    def count_moments(self, ready: float) -> float:
        """Counted moments of a mean and a variance."""
        self.pipeline.run(VECTOR, self.paces.vector("memset", 1))
        return self.vector(ready)

    def merge(self, triples: int, ready: float) -> float:
        """Counted moments of the union of ``triples`` of them."""
        return self.count_moments(self.aggregate(triples, ready))

    def exchange_moments(self, ready: float) -> float:
        """Mean and variance over both cores."""
        counted = self.count_moments(self.vector(ready))
        return self.aggregate(2, self.pipeline.exchange(counted))

    def store_statistics(self, ready: float) -> None:
        """Mean and variance to HBM, and the running ones blended with them."""
        self.store(ready)
        self.store(ready)
        stored = blended = 0.0
        for _ in range(2):
            running = self.vector(self.load(blended))
            blended = self.vector(max(running, self.vector(max(ready, stored))), 2)
            stored = self.store(blended)

    def gamma_gradient(self, sums: float, products: float) -> float:
        """dgamma from the sum of dy' and that of the products."""
        product = self.vector(sums, 2)
        difference = self.vector(max(product, products), 2)
        return self.vector(difference, 2)

    def input_coefficients(self, dgamma: float, sums: float) -> float:
        """slope and offset of the x-term of dx."""
        slope = self.vector(dgamma, 2)
        slope = self.vector(slope)
        slope = self.vector(slope, 2)
        offset = self.vector(sums)
        offset = self.vector(offset, 2)
        moved = self.vector(slope, 2)
        return self.vector(max(offset, moved), 2)

    def negated_coefficients(self, dgamma: float, offset: float) -> float:
        """ratio, -scale and -offset."""
        ratio = self.vector(dgamma, 2)
        ratio = self.vector(ratio)
        scale = self.vector(0.0)
        return max(ratio, scale, self.vector(offset))
