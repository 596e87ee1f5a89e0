# SPDX-License-Identifier: Apache-2.0
"""The per-channel work that strategies share, run through a pipeline: columns and their coefficients."""

from __future__ import annotations

from dataclasses import dataclass

from nki_bn.pipeline import GPSIMD, VECTOR, Beside, Paces, Pipeline, Transfer

COLUMN_BYTES = 4


def mask_passes(residual: bool) -> tuple[str, ...]:
    """Classes of the instructions that make the mask of a ReLU from (x - hi)*scale."""
    return ("scalar_tensor_tensor", "plain") if residual else ("pointed",)


@dataclass(frozen=True)
class Columns:
    """Columns of ``groups`` channel groups on ``lanes`` partitions, worked on by one core.

    ``contiguous``: a group is one channel, so that the values of a partition follow each other in memory.
    """

    pipeline: Pipeline
    paces: Paces
    lanes: int
    groups: int = 1
    contiguous: bool = False

    def load(self, ready: float = 0.0) -> float:
        """One column from HBM."""
        return self.pipeline.load(self._transfer(), ready)

    def store(self, ready: float) -> float:
        """One column to HBM."""
        return self.pipeline.store(self._transfer(), ready)

    def vector(self, ready: float, tiles: int = 1) -> float:
        """An instruction of Vector on one column, or on two."""
        name = "plain" if tiles == 1 else "tensor_tensor"
        return self.pipeline.run(VECTOR, self.paces.vector(name, self.groups), ready)

    def reduced(self, columns: int, ready: float) -> float:
        """The sum of ``columns`` partials of each lane."""
        return self.pipeline.run(VECTOR, self.paces.vector("reduce", columns), ready)

    def load_aside(self, beside: float = 0.0) -> float:
        """One column from HBM, triggered by Scalar; ``beside``: ns of a run of the transfers in the queue of Sync."""
        rows = min(self.lanes, self.paces.timing.dma.partitions_per_engine)
        return self.pipeline.load_aside(self._transfer(), rows * self._runs() * beside)

    def _runs(self) -> int:
        return 1 if self.contiguous else self.groups

    def _transfer(self) -> Transfer:
        return self.paces.transfer(self.lanes, self._runs(), COLUMN_BYTES * self.groups)

    def load_beside(self, beside: Beside | None) -> float:
        """One column from HBM, triggered by Scalar, where the queue of Sync is full of long descriptors or empty."""
        if beside is None:
            return self.pipeline.load_aside(self._transfer(), 0.0)
        lanes = min(self.lanes, self.paces.timing.dma.partitions_per_engine)
        return self.pipeline.load_beside(self._transfer(), lanes * self._runs(), beside)

    def store_aside(self, ready: float) -> float:
        """One column to HBM, triggered by Scalar."""
        return self.pipeline.store_aside(self._transfer(), ready)

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
        product = self.vector(self.vector(root, 2), 2)
        self.vector(product, 2)
        flag = self.vector(product)
        predicated = self.paces.vector("predicated", self.groups)
        return self.pipeline.run(VECTOR, predicated, flag)

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

    def store_statistics(self, ready: float, running: float, aside: bool = False) -> None:
        """Mean and variance to HBM, and the ``running`` ones, loaded by then, blended with them."""
        store = self.store_aside if aside else self.store
        for _ in range(2):
            store(ready)
        for _ in range(2):
            store(self.vector(self.vector(max(running, ready)), 2))

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
