# SPDX-License-Identifier: Apache-2.0
"""The per-channel work that strategies share, run through a pipeline: columns and their coefficients."""

from __future__ import annotations

from dataclasses import dataclass

from nki_bn.pipeline import GPSIMD, VECTOR, Paces, Pipeline, Transfer

COLUMN_BYTES = 4


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

    def load_aside(self, beside: float) -> float:
        """One column from HBM, triggered by Scalar; ``beside``: ns of a run of the transfers in the queue of Sync."""
        rows = min(self.lanes, self.paces.timing.dma.partitions_per_engine)
        return self.pipeline.load_aside(self._transfer(), rows * self._runs() * beside)

    def _runs(self) -> int:
        return 1 if self.contiguous else self.groups

    def _transfer(self) -> Transfer:
        return self.paces.transfer(self.lanes, self._runs(), COLUMN_BYTES * self.groups)

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
        root = self._reciprocal_root(variance)
        scale = self.vector(max(gamma, root), 2)
        if beta is None:
            return scale
        shift = self.vector(max(split, scale), 2)
        return self.vector(max(beta, shift), 2)

    def _reciprocal_root(self, variance: float) -> float:
        value = self.vector(variance)
        root = self.pipeline.run(GPSIMD, self.paces.gpsimd(self.groups), value)
        product = self.vector(self.vector(root, 2), 2)
        self.vector(product, 2)
        flag = self.vector(product)
        predicated = self.paces.vector("predicated", self.groups)
        return self.pipeline.run(VECTOR, predicated, flag)

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
