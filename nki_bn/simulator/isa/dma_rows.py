# SPDX-License-Identifier: Apache-2.0
"""Rows that a DMA gathers or scatters by a vector of indices: which of them are moved, and their elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nki_bn.simulator.dynamic import ScalarOffset, VectorOffset
from nki_bn.simulator.gathered import Gathered
from nki_bn.simulator.isa import checks, enums
from nki_bn.simulator.numerics import Array
from nki_bn.simulator.storing import Masked, Result
from nki_bn.simulator.tensor import NkiTensor, require


def has_vector(tensor: NkiTensor) -> bool:
    """Whether rows of ``tensor`` are chosen by a vector of indices."""
    return isinstance(tensor.dynamic, VectorOffset)


def check_skip(op: str, oob: enums.oob_mode, argument: str, tensor: NkiTensor) -> None:
    """``oob_mode.skip`` is for a run-time index of ``tensor``."""
    require(
        oob is enums.oob_mode.error or tensor.is_indirect(),
        f"{op} oob_mode.skip needs a {argument} with a run-time index",
    )


def check_descriptors(op: str, mode: enums.dge_mode, *tensors: NkiTensor) -> None:
    """At most one of ``tensors`` has a vector of indices, and then software builds the descriptors."""
    vectors = [tensor for tensor in tensors if has_vector(tensor)]
    require(len(vectors) < 2, f"{op} gathers or scatters: dst and src both have a vector_offset")
    require(
        not vectors or mode in (enums.dge_mode.unknown, enums.dge_mode.swdge),
        f"{op} with a vector_offset needs dge_mode.swdge or unknown, got dge_mode.{mode.name}",
    )


def check_vector(op: str, tensor: NkiTensor) -> None:
    """One index per row, as a column of SBUF."""
    if isinstance(tensor.dynamic, VectorOffset):
        index, rows = tensor.dynamic.index, tensor.shape[0]
        require(
            index.shape[0] == rows and checks.columns(index) == 1,
            f"{op} vector_offset must have shape ({rows}, 1) for {tensor!r}, got {index.shape}",
        )


def static(op: str, argument: str, tensor: NkiTensor) -> None:
    """``tensor`` has no address that a register or a single element decides."""
    require(
        not isinstance(tensor.dynamic, ScalarOffset),
        f"{op} {argument} has a scalar run-time index; accepted: fixed addresses, or a vector_offset",
    )


@dataclass(frozen=True)
class Rows:
    """``count`` rows, of which ``kept`` (None: all) are moved."""

    count: int
    kept: Array | None

    @classmethod
    def of(cls, *tensors: NkiTensor) -> Rows:
        """The rows of the gathered one among settled ``tensors``; one row if none is."""
        for tensor in tensors:
            if isinstance(tensor, Gathered):
                return cls(len(tensor.kept) if tensor.kept is not None else tensor.shape[0], tensor.kept)
        return cls(1, None)

    @property
    def moved(self) -> int:
        """How many rows are moved."""
        return self.count if self.kept is None else int(self.kept.sum())

    def read(self, tensor: NkiTensor) -> Array:
        """The elements of the rows that are moved."""
        values = tensor.array()
        if self.kept is None or isinstance(tensor, Gathered):
            return values
        return values.reshape(self.count, -1)[self.kept]

    def result(self, dst: NkiTensor, values: Array, order: tuple[int, ...] | None = None) -> Result:
        """What ``dst`` is written with: all of it, or the elements of the rows that are moved.

        ``order`` permutes the axes of the source, of which the rows are the first.
        """
        if self.kept is None or isinstance(dst, Gathered):
            return values if order is None else values.transpose(order)
        shape = (self.count, *values.shape[1:])
        full, mask = np.zeros(shape, values.dtype), np.zeros(shape, np.bool_)
        full[self.kept], mask[self.kept] = values, True
        return Masked(*((full, mask) if order is None else (full.transpose(order), mask.transpose(order))))


def indices_of(*tensors: Any) -> list[Array]:
    """The indices by which settled ``tensors`` were gathered."""
    return [tensor.at[0] for tensor in tensors if isinstance(tensor, Gathered)]
