# SPDX-License-Identifier: Apache-2.0
"""Loops, slices, program queries, ordered regions and printing of ``nki.language``."""

from __future__ import annotations

from types import TracebackType

from nki_bn.simulator.errors import NkiValidationError
from nki_bn.simulator.issue import settle
from nki_bn.simulator.machine import current_core
from nki_bn.simulator.tensor import NkiTensor, require


def static_range(start: int, stop: int | None = None, step: int = 1) -> range:
    """``range`` by another name: loops are unrolled when a kernel is compiled."""
    return range(start) if stop is None else range(start, stop, step)


def affine_range(start: int, stop: int | None = None, step: int = 1) -> range:
    """``range`` by another name; says nothing about dependences any more."""
    return static_range(start, stop, step)


def sequential_range(start: int, stop: int | None = None, step: int = 1) -> range:
    """``range`` by another name; says nothing about dependences any more."""
    return static_range(start, stop, step)


def ds(start: int, size: int) -> slice:
    """The slice of ``size`` elements from ``start``.

    Raises:
        TypeError: start or size is no integer (a run-time start goes through ``ap(scalar_offset=...)``).
        NkiValidationError: size is below 1.
    """
    for name, value in (("start", start), ("size", size)):
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"ds {name} must be an integer, got {value!r}")
    require(size >= 1, f"ds size must be at least 1, got {size}")
    # A stop of 0 would mean "the beginning" for a negative start that reaches the end.
    return slice(start, start + size if start >= 0 or start + size < 0 else None)


def program_id(axis: int = 0) -> int:
    """Index of this core in the launch; 0 without a grid."""
    _check_axis("program_id", axis)
    return current_core().index


def num_programs(axes: int = 0) -> int:
    """Number of cores of the launch; 1 without a grid."""
    _check_axis("num_programs", axes)
    return current_core().run.lnc


def program_ndim() -> int:
    """Dimensions of the grid: 1 on several cores, 0 on one."""
    return int(current_core().run.lnc > 1)


def _check_axis(name: str, axis: int) -> None:
    require(axis == 0, f"{name} axis must be 0, the only one of a grid; got {axis!r}")


class no_reorder:
    """``with nl.no_reorder():`` instructions inside, those of called functions included, keep their order."""

    def __enter__(self) -> None:
        core = current_core()
        self._outer = core.ordered
        if core.ordered is None:
            core.ordered = []

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        current_core().ordered = self._outer


def device_print(print_prefix: str, tensor: NkiTensor) -> None:
    """Print ``print_prefix`` and the values of a tensor in SBUF or HBM.

    Raises:
        TypeError: the prefix is no string or the tensor is none.
        NkiValidationError: the tensor is in PSUM.
    """
    if not isinstance(print_prefix, str):
        raise TypeError(f"device_print print_prefix must be a string, got {print_prefix!r}")
    if not isinstance(tensor, NkiTensor):
        raise TypeError(f"device_print tensor must be a tensor, got {type(tensor).__name__}")
    if tensor.buffer.value == "psum":
        raise NkiValidationError("device_print tensor is in psum; accepted: sbuf, hbm")
    core = current_core()
    if core.run.recorder is not None:
        core.run.recorder.refuse("device_print shows values")
    print(f"{print_prefix} [core {core.index}] shape {tensor.shape} {tensor.dtype}:\n{settle(tensor).array()}")
