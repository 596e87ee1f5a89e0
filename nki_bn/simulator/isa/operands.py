# SPDX-License-Identifier: Apache-2.0
"""The operands of one instruction: checked, with run-time indices read, and all tiles that this took remembered."""

from __future__ import annotations

from typing import Any

from nki_bn.simulator.isa import checks
from nki_bn.simulator.issue import index_tiles, settle
from nki_bn.simulator.memory import MemoryRegion
from nki_bn.simulator.tensor import NkiTensor, require


class Operands:
    """Operands of ``instruction``; ``indices`` are the tiles that hold run-time indices of them."""

    def __init__(self, instruction: str) -> None:
        self.instruction = instruction
        self.indices: list[NkiTensor] = []

    def tile(self, argument: str, value: Any, regions: tuple[MemoryRegion, ...] = checks.ON_CHIP) -> NkiTensor:
        """A tensor in one of ``regions``; errors as :func:`checks.tile`."""
        return self._settled(checks.tile(self.instruction, argument, value, regions))

    def pair(self, dst: Any, data: Any) -> tuple[NkiTensor, NkiTensor]:
        """On-chip ``dst`` and ``data`` with equally many partitions and elements per partition."""
        dst, data = self.tile("dst", dst), self.tile("data", data)
        checks.same_layout(self.instruction, data=data, dst=dst)
        return dst, data

    def column(self, argument: str, value: Any, data: NkiTensor, *, float32_only: bool = True) -> Any:
        """A number or a column for ``data``; errors as :func:`checks.column_operand`."""
        checked = checks.column_operand(self.instruction, argument, value, data, float32_only=float32_only)
        return self._settled(checked) if isinstance(checked, NkiTensor) else checked

    def result(self, argument: str, value: Any, data: NkiTensor) -> NkiTensor | None:
        """The tile that an accumulator is read out into, one element per partition of ``data``; None stays None.

        Raises:
            TypeError: it is neither a tensor nor None.
            NkiValidationError: it is not on chip or has another shape.
        """
        if value is None:
            return None
        tensor = self.tile(argument, value)
        require(
            tensor.shape[0] == data.shape[0] and checks.columns(tensor) == 1,
            f"{self.instruction} {argument} must have shape ({data.shape[0]}, 1), got {tensor.shape}",
        )
        return tensor

    def _settled(self, tensor: NkiTensor) -> NkiTensor:
        self.indices += index_tiles(tensor)
        return settle(tensor)
