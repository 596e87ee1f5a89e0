# SPDX-License-Identifier: Apache-2.0
"""The operands of one instruction: checked, with run-time indices read, and all tiles that this took remembered."""

from __future__ import annotations

from typing import Any

from nki_bn.simulator.dynamic import FreeOffsets
from nki_bn.simulator.errors import NkiValidationError
from nki_bn.simulator.isa import checks
from nki_bn.simulator.issue import GROUP, TENSOR_GROUP, index_tiles, settle
from nki_bn.simulator.memory import MemoryRegion
from nki_bn.simulator.tensor import NkiTensor, require

_QUADRANT = 32


class Operands:
    """Operands of ``instruction``; ``indices`` are the tiles that hold run-time indices of them."""

    def __init__(self, instruction: str) -> None:
        self.instruction = instruction
        self.indices: list[NkiTensor] = []

    def tile(self, argument: str, value: Any, regions: tuple[MemoryRegion, ...] = checks.ON_CHIP) -> NkiTensor:
        """A tensor in one of ``regions``; errors as :func:`checks.tile`."""
        tensor = checks.tile(self.instruction, argument, value, regions)
        return self._fixed(argument, tensor)

    def pair(
        self, dst: Any, data: Any, argument: str = "data", *, indirect: bool = False
    ) -> tuple[NkiTensor, NkiTensor]:
        """On-chip ``dst`` and ``argument`` with equally many partitions and elements per partition."""
        dst, data = (
            self.indirect(dst, data, argument) if indirect else (self.tile("dst", dst), self.tile(argument, data))
        )
        checks.same_layout(self.instruction, **{argument: data, "dst": dst})
        return dst, data

    def indirect(self, dst: Any, source: Any, argument: str = "data") -> tuple[NkiTensor, NkiTensor]:
        """On-chip ``dst`` and ``argument``, which may be indirect (from gen4).

        Raises:
            NkiValidationError: the first partitions of tiles and indices do not fit together.
        """
        to = checks.tile(self.instruction, "dst", dst)
        given = checks.tile(self.instruction, argument, source)
        self._check_bases(to, argument, given)
        return self._settled(to), self._settled(given)

    def column(self, argument: str, value: Any, data: NkiTensor, *, float32_only: bool = True) -> Any:
        """A number or a column for ``data``; errors as :func:`checks.column_operand`."""
        checked = checks.column_operand(self.instruction, argument, value, data, float32_only=float32_only)
        return self._fixed(argument, checked) if isinstance(checked, NkiTensor) else checked

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

    def indirect_matrix(
        self, argument: str, value: Any, regions: tuple[MemoryRegion, ...], base: NkiTensor | None = None
    ) -> NkiTensor:
        """An operand of the Tensor engine, which may be indirect; ``base`` is the tile that decides the first partition
        of its index, by default the operand itself."""
        tensor = checks.tile(self.instruction, argument, value, regions)
        self._check_base(argument, tensor, tensor if base is None else base)
        return self._settled(tensor, TENSOR_GROUP)

    def _fixed(self, argument: str, tensor: NkiTensor) -> NkiTensor:
        if isinstance(tensor.dynamic, FreeOffsets):
            raise NkiValidationError(f"{self.instruction} {argument} cannot be indirect: {tensor!r}")
        return self._settled(tensor)

    def _settled(self, tensor: NkiTensor, group: int = GROUP) -> NkiTensor:
        self.indices += index_tiles(tensor)
        return settle(tensor, group=group)

    def _check_bases(self, dst: NkiTensor, argument: str, source: NkiTensor) -> None:
        """A source starts where its index does; the index of ``dst`` where a source in SBUF or its index does."""
        self._check_base(argument, source, source)
        chosen = source.dynamic
        in_psum = chosen.index if isinstance(chosen, FreeOffsets) else None
        self._check_base("dst", dst, source if source.buffer is MemoryRegion.sbuf else in_psum)

    def _check_base(self, argument: str, tensor: NkiTensor, base: NkiTensor | None) -> None:
        if not isinstance(tensor.dynamic, FreeOffsets):
            return
        first = tensor.dynamic.index.address[0]
        what = f"{self.instruction} {argument}: its index starts on partition {first}"
        require(first % _QUADRANT == 0, f"{what}; accepted: multiples of {_QUADRANT}")
        if base is not None:
            require(base.address[0] == first, f"{what}, {base!r} on partition {base.address[0]}")
