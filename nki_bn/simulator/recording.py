# SPDX-License-Identifier: Apache-2.0
"""What a run notes so that it can be repeated: the work of its instructions, or why they cannot stand alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from nki_bn.simulator.memory import WRITTEN, MemoryRegion, Storage
from nki_bn.simulator.numerics import Array, cast
from nki_bn.simulator.storing import Masked, Result, overlaps_itself, store

if TYPE_CHECKING:
    from nki_bn.simulator.machine import Core
    from nki_bn.simulator.tensor import NkiTensor

Compute = Callable[[], Sequence[Any]]


@dataclass
class Recorder:
    """The steps of a run, in the order in which its cores took them.

    They are the same for all values of the inputs as long as no value has decided anything: an address, a register,
    what counts as written. ``refusal`` says what did; without ``keeps_steps`` only that is found out. ``arguments`` are
    the tensors that the caller gave, ``made`` those that the kernel made in HBM.
    """

    keeps_steps: bool = True
    steps: list[tuple[Core, Callable[[], object]]] = field(default_factory=list)
    arguments: list[Storage] = field(default_factory=list)
    made: list[Storage] = field(default_factory=list)
    writes_arguments: bool = False
    refusal: str = ""
    _sums: list[Storage] = field(default_factory=list)

    def refuse(self, why: str) -> None:
        """The run cannot be repeated; the first reason is kept."""
        self.refusal = self.refusal or why
        self.steps.clear()

    def check_read(self, tensor: NkiTensor, shadow: Array) -> None:
        """What is read has been written: a repeated run does not set memory back."""
        if not (shadow & WRITTEN).all():
            self.refuse(f"{tensor!r} is read where nothing was written")

    def check_write(self, tensor: NkiTensor, shadow: Array, result: Result) -> None:
        """What counts as written, and as begun, afterwards does not depend on values, and no constant is written."""
        decides = isinstance(result, Masked) and not result.fixed
        if decides and not ((shadow & WRITTEN).all() and _begun(tensor)):
            self.refuse(f"what of {tensor!r} is written depends on values")
        if tensor.storage.is_input:
            self.writes_arguments = True
            if tensor.storage not in self.arguments:
                self.refuse(f"the constant {tensor!r} is written")

    def note(self, core: Core, compute: Compute, writes: Sequence[NkiTensor] = ()) -> None:
        """``core`` computes and writes the results to ``writes``."""
        if self.keeps_steps and not self.refusal:
            self.steps.append((core, _step(compute, writes)))
            self._sums.extend(tensor.storage for tensor in writes if tensor.buffer is MemoryRegion.psum)

    def close(self) -> None:
        """Let go of what only a simulation asks for: where sums have begun, which is as large as their tiles."""
        for storage in self._sums:
            storage.begun = np.zeros(0, np.bool_)


def _begun(tensor: NkiTensor) -> bool:
    """Whether products add to all that is in ``tensor``, so that it does not matter what is written next."""
    return tensor.buffer is not MemoryRegion.psum or bool(tensor.begun().all())


def _step(compute: Compute, writes: Sequence[NkiTensor]) -> Callable[[], object]:
    if not writes:
        return compute

    def several() -> None:
        for tensor, result in zip(writes, compute(), strict=True):
            store(tensor.array(), result)

    if len(writes) > 1 or overlaps_itself(writes[0].array()):
        return several
    (only,) = writes

    def one() -> None:
        (result,) = compute()
        array = only.array()
        if isinstance(result, Masked):
            store(array, result)
        elif result.dtype == array.dtype and result.shape == array.shape:
            array[...] = result
        else:
            array[...] = cast(result, array.dtype).reshape(array.shape)

    return one
