# SPDX-License-Identifier: Apache-2.0
"""Scalar registers of the sequencers: run-time indices and loop bounds."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from nki_bn.simulator import dtypes
from nki_bn.simulator.isa import checks
from nki_bn.simulator.isa.dma import DMA_REGIONS
from nki_bn.simulator.issue import NkiInstruction, decided_by_value, index_tiles, issue, settle
from nki_bn.simulator.machine import current_core
from nki_bn.simulator.nki_object import NKIObject
from nki_bn.simulator.tensor import NkiTensor, require


class VirtualRegister(NKIObject):
    """A register; ``state`` is its value at run time, None while it has none. A frozen one is never written.

    Python cannot look at it, as a compiler does not know the value: ``if reg``, ``int(reg)`` and ``range(reg)`` raise
    TypeError.
    """

    def __init__(self, state: float | None = None, frozen: bool = False) -> None:
        self.state = state
        self.frozen = frozen

    def _unknown(self) -> NoReturn:
        raise TypeError(
            "the value of a register is unknown when a kernel is compiled: use nl.fori_loop or nl.while_loop"
        )

    def __bool__(self) -> bool:
        self._unknown()

    def __int__(self) -> int:
        self._unknown()

    def __index__(self) -> int:
        self._unknown()


def register_alloc(x: Any = None) -> VirtualRegister:
    """A new register: without value, with the integer ``x``, or loaded from the one-element tensor ``x``.

    Raises:
        TypeError: ``x`` is something else.
    """
    if isinstance(x, NkiTensor):
        register = VirtualRegister()
        register_load(register, x)
        return register
    if x is not None and (isinstance(x, bool) or not isinstance(x, (int, np.integer))):
        raise TypeError(f"register_alloc x must be None, an integer or a one-element tensor, got {x!r}")
    return VirtualRegister(None if x is None else int(x))


def register_move(dst: VirtualRegister, src: VirtualRegister | int) -> NkiInstruction:
    """Set ``dst`` to an integer or to the value of another register.

    Raises:
        TypeError: ``dst`` is no register, ``src`` neither register nor integer.
        NkiValidationError: ``dst`` is frozen, ``src`` has no value.
    """
    _writable("register_move", dst)
    if isinstance(src, VirtualRegister):
        value = _value("register_move", src)
    elif isinstance(src, bool) or not isinstance(src, (int, np.integer)):
        raise TypeError(f"register_move src must be an integer or a register, got {src!r}")
    else:
        value = int(src)
    dst.state = value
    return issue("register_move", "sync", [], [], lambda: [])


def register_load(dst: VirtualRegister, src: NkiTensor) -> NkiInstruction:
    """Set ``dst`` to the one element of ``src`` (HBM or SBUF, up to 32 bits); to 0 in a dry run.

    Raises:
        TypeError: ``dst`` is no register, ``src`` no tensor.
        NkiValidationError: ``dst`` is frozen, ``src`` is in PSUM, packed, or has more than one element.
    """
    _writable("register_load", dst)
    source = _one_element("register_load", "src", src)

    require(not dtypes.is_packed(source.dtype), f"register_load src is {source.dtype}; accepted: unpacked dtypes")
    decided_by_value(f"the register that holds {source!r}")
    if current_core().options.dry:
        dst.state = 0

    def compute() -> list[Any]:
        dst.state = source.array().reshape(-1)[0].item()
        return []

    return issue("register_load", "sync", [], [source, *index_tiles(src)], compute)


def register_store(dst: NkiTensor, src: VirtualRegister) -> NkiInstruction:
    """Write the value of ``src`` to the one element of ``dst`` (HBM or SBUF).

    Raises:
        TypeError: ``src`` is no register, ``dst`` no tensor.
        NkiValidationError: ``src`` has no value, ``dst`` is in PSUM or has more than one element.
    """
    to = _one_element("register_store", "dst", dst)
    value = _value("register_store", src)
    return issue("register_store", "sync", [to], index_tiles(dst), lambda: [np.asarray(value, to.array().dtype)])


def _writable(op: str, register: Any) -> None:
    if not isinstance(register, VirtualRegister):
        raise TypeError(f"{op} dst must be a register, got {register!r}")
    require(not register.frozen, f"{op} dst is frozen: a loop counter cannot be written")


def _value(op: str, register: Any) -> float:
    if not isinstance(register, VirtualRegister):
        raise TypeError(f"{op} src must be a register, got {register!r}")
    require(register.state is not None, f"{op} src has no value yet")
    return register.state  # type: ignore[return-value]


def _one_element(op: str, label: str, tensor: Any) -> NkiTensor:
    checks.tile(op, label, tensor, DMA_REGIONS)
    require(tensor.size == 1, f"{op} {label} must have one element, got shape {tensor.shape}")
    return settle(tensor)
