# SPDX-License-Identifier: Apache-2.0
"""The path every instruction takes: record, check what is read, compute from a snapshot, write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nki_bn.simulator import dtypes
from nki_bn.simulator.dynamic import FreeOffsets, ScalarOffset, VectorOffset
from nki_bn.simulator.errors import IndexRangeError, NkiValidationError, RaceError, UninitializedReadError
from nki_bn.simulator.gathered import Gathered, gather_columns, gather_rows
from nki_bn.simulator.machine import Core, check_start, current_core, element_flags, may_start
from nki_bn.simulator.memory import READ_BY, TOUCHED_BY, WRITTEN, WRITTEN_BY, Bank, MemoryRegion
from nki_bn.simulator.nki_object import NKIObject
from nki_bn.simulator.numerics import Array, Float32, cast, to_float32
from nki_bn.simulator.scheduling import add_edge
from nki_bn.simulator.storing import Masked, Result, store
from nki_bn.simulator.tensor import NkiTensor, require
from nki_bn.simulator.trace import Access, Record, caller


class NkiInstruction(NKIObject):
    """Handle of an issued instruction."""

    def __init__(self, handle: Record) -> None:
        self.handle = handle

    def depends_on(self, *producers: NkiInstruction) -> NkiInstruction:
        """Run after ``producers``; an edge for the timing model, no change of results.

        Raises:
            TypeError: a producer is not an instruction handle.
            NkiValidationError: it stands in a device loop that this instruction is not in.
        """
        for producer in producers:
            if not isinstance(producer, NkiInstruction):
                raise TypeError(f"depends_on takes instruction handles, got {type(producer).__name__}")
            add_edge(self.handle, producer.handle)
        return self


def issue(
    opcode: str,
    engine: str,
    writes: Sequence[NkiTensor],
    reads: Sequence[NkiTensor],
    compute: Callable[[], Sequence[Result]],
    *,
    name: str | None = None,
    rendezvous: Callable[[], object] | None = None,
    again: Callable[[], Sequence[Result]] | None = None,
    **attributes: Any,
) -> NkiInstruction:
    """Execute one instruction on the current core.

    ``compute`` returns one array per tensor of ``writes`` (any shape with as many elements, any dtype: it is rounded to
    the destination's); it reads its operands itself, before anything is written. A dry run does not call it, only
    ``rendezvous``, with which an instruction meets its counterpart on the other core. A run that is repeated calls
    ``again`` in its place, if that is given: there nobody is met.
    """
    core = current_core()
    _check_indices(opcode, engine, writes, reads)
    record = Record(
        len(core.run.trace.records),
        core.index,
        opcode,
        engine,
        tuple(Access.of(t) for t in writes),
        tuple(Access.of(t) for t in reads),
        caller(),
        name,
        attributes,
        loops=tuple(core.loops),
    )
    core.schedule.note(record)
    core._register(name, "instruction")
    if core.ordered is not None:
        record.after.extend(core.ordered[-1:])
        core.ordered.append(record.index)
    core.run.trace.records.append(record)
    if core.options.strict and engine != "dma":
        _check_starts(opcode, (*writes, *reads))
    if core.options.dry:
        if rendezvous is not None:
            rendezvous()
        return NkiInstruction(record)
    for tensor in reads:
        _check_read(core, record, tensor)
    try:
        with np.errstate(all="ignore"):
            results = compute()
    except NkiValidationError:
        decided_by_value(f"whether {opcode} is an error")
        raise
    for tensor, result in zip(writes, results, strict=True):
        _write(core, record, tensor, result)
    if core.run.recorder is not None:
        core.run.recorder.note(core, again or compute, writes)
    return NkiInstruction(record)


def _check_starts(opcode: str, tensors: Sequence[NkiTensor]) -> None:
    for tensor in tensors:
        if tensor.buffer.on_chip and not may_start(tensor.address[0], tensor.shape[0]):
            check_start(tensor.address[0], tensor.shape[0], f"{opcode} operand {tensor!r}")


def _check_indices(opcode: str, engine: str, writes: Sequence[NkiTensor], reads: Sequence[NkiTensor]) -> None:
    """No operand has an index that was not read, and Scalar does not scatter into PSUM."""
    for tensor in (*writes, *reads):
        if tensor.is_indirect():
            raise NkiValidationError(f"{opcode} takes no run-time index in its operand {tensor!r}")
    for tensor in writes:
        if engine == "scalar" and isinstance(tensor, Gathered) and tensor.buffer is MemoryRegion.psum:
            raise NkiValidationError(f"{opcode} on engine scalar cannot scatter into psum: {tensor!r}")


# Partitions of a group that holds the offsets of an indirect operand.
GROUP, TENSOR_GROUP = 16, 32


def settle(tensor: NkiTensor, *, skip: bool = False, group: int = GROUP) -> NkiTensor:
    """``tensor`` with its run-time indices read.

    ``skip`` leaves out rows of a vector of indices that are out of range; ``group`` is that of the engine for offsets
    along the free dimensions.

    Raises:
        IndexRangeError: an index is out of range, or what it selects reaches outside the tensor.
        NkiValidationError: offsets along the free dimensions before gen4; too few indices.
    """
    if tensor.dynamic is not None:
        decided_by_value(f"the run-time index of {tensor!r}")
    match tensor.dynamic:
        case None:
            return tensor
        case ScalarOffset() as scalar:
            return _moved(tensor, scalar)
        case VectorOffset() as rows:
            return gather_rows(tensor, rows, _read_indices(rows.index), skip=skip)
        case FreeOffsets() as offsets:
            generation = current_core().run.target.generation
            require(generation >= 4, f"indirect operands need gen4 or later, the target is gen{generation}: {tensor!r}")
            return gather_columns(tensor, offsets, _read_indices(offsets.index), group)


def decided_by_value(what: str) -> None:
    """Note that a value, as ``what`` says, decides what is executed: such a run is not repeated with other values."""
    recorder = current_core().run.recorder
    if recorder is not None:
        recorder.refuse(f"{what} decides what is executed")


def _moved(tensor: NkiTensor, dynamic: ScalarOffset) -> NkiTensor:
    index = read_index(dynamic.index)
    if not 0 <= index < dynamic.bound:
        raise IndexRangeError(
            f"run-time index {index} is out of range for a dimension of size {dynamic.bound} of {tensor!r}"
        )
    fixed = NkiTensor(
        tensor.shape,
        tensor.dtype,
        tensor.storage,
        strides=tensor.strides,
        offset=tensor.offset + index * dynamic.stride,
    )
    if not fixed.is_inside():
        raise IndexRangeError(f"run-time index {index} leads outside the storage of {tensor!r}")
    return fixed


def index_tiles(tensor: NkiTensor) -> list[NkiTensor]:
    """The tile that holds the run-time indices of ``tensor``, if a tile does: the instruction reads it too."""
    dynamic = tensor.dynamic
    return [dynamic.index] if dynamic is not None and isinstance(dynamic.index, NkiTensor) else []


def read_index(index: Any) -> int:
    """The value of a run-time index, a register or a one-element tile; what a tile holds is 0 in a dry run.

    Raises:
        NkiValidationError: it has more than one element, or none yet.
    """
    decided_by_value(f"the run-time index {index!r}")
    if not isinstance(index, NkiTensor):
        require(index.state is not None, "a register is used as an index before it was set")
        return int(index.state)
    require(index.size == 1, f"a run-time index is one element, got {index!r}")
    return int(_read_indices(index).reshape(-1)[0])


def _read_indices(index: NkiTensor) -> Array:
    """What a tile of run-time indices holds; zeros in a dry run."""
    core = current_core()
    if core.options.dry:
        return np.zeros(index.shape, np.int64)
    if core.options.strict and not (index.shadow() & WRITTEN).all():
        raise UninitializedReadError(f"{caller()} reads the run-time index {index!r}, which was never written")
    return index.array()


def float32(tensor: NkiTensor) -> Float32:
    """The elements of an on-chip tensor as float32, shape (partitions, elements per partition)."""
    return to_float32(tensor.array()).reshape(tensor.shape[0], -1)


def raw(tensor: NkiTensor) -> Array:
    """The elements of an on-chip tensor in their own dtype, shape (partitions, elements per partition)."""
    return tensor.array().reshape(tensor.shape[0], -1)


def _check_read(core: Core, record: Record, tensor: NkiTensor) -> None:
    strict, recorder = core.options.strict, core.run.recorder
    apart = core.run.lnc == 1 or tensor.buffer is not MemoryRegion.shared_hbm
    if apart and not strict and recorder is None:
        return
    shadow = tensor.shadow()
    if recorder is not None:
        recorder.check_read(tensor, shadow)
    if strict and not (shadow & WRITTEN).all():
        flags = element_flags(tensor, shadow) & WRITTEN
        first = tuple(int(i) for i in np.argwhere(flags == 0)[0])
        raise UninitializedReadError(
            f"{record.opcode} at {record.source} reads {tensor!r}, of which {int((flags == 0).sum())} elements were "
            f"never written (first: {first})"
        )
    _note_shared(core, record, tensor, shadow, READ_BY, WRITTEN_BY)


def _note_shared(
    core: Core, record: Record, tensor: NkiTensor, shadow: Array, mine: tuple[int, int], conflicting: tuple[int, int]
) -> None:
    """Mark the bytes as touched by this core; report a conflict with the other one."""
    if core.run.lnc == 1 or tensor.buffer is not MemoryRegion.shared_hbm:
        return
    accesses = core.run.hbm_accesses[tensor.storage.bank]
    clashes = (shadow & conflicting[1 - core.index]) != 0
    if mine is READ_BY:
        # What this core wrote too is the same from both (else the second write was refused), in whatever order.
        clashes &= (shadow & WRITTEN_BY[core.index]) == 0
    if clashes.any():
        raise RaceError(_describe_race(accesses, record, tensor, mine is WRITTEN_BY))
    shadow |= mine[core.index]
    tensor.put(shadow=shadow)
    accesses.append((record, Access.of(tensor), mine is WRITTEN_BY))


def _describe_race(accesses: list[Any], record: Record, tensor: NkiTensor, writing: bool) -> str:
    touched = _touched(tensor.storage.bank, Access.of(tensor))
    for other, access, wrote in accesses:
        if other.core != record.core and (wrote or writing) and (touched & _touched(tensor.storage.bank, access)).any():
            mine, its = ("writes" if write else "reads" for write in (writing, wrote))
            return (
                f"race on {tensor!r}: core {record.core} {mine} it by {record.opcode} at {record.source} and core "
                f"{other.core} {its} it by {other.opcode} at {other.source} with no core_barrier on it between"
            )
    raise AssertionError("a conflict without an access")  # pragma: no cover - marks and list are written together


def _touched(bank: Bank, access: Access) -> Array:
    """Which logical bytes of ``bank`` the pattern covers."""
    flags = np.zeros(bank.shadow.size, np.bool_)
    shape, strides = (*access.places, dtypes.size_of(access.dtype)), (*access.strides, 1)
    np.ndarray(shape, np.bool_, flags, access.offset, strides)[...] = True
    return flags


def clear_marks(core: Core, bank: Bank) -> None:
    """Forget who touched the memory of a shared tensor: a barrier has ordered it."""
    bank.shadow &= WRITTEN
    core.run.hbm_accesses[bank].clear()


def clear_all_marks(core: Core) -> None:
    """Forget who touched any shared tensor."""
    for bank in core.run.hbm_accesses:
        clear_marks(core, bank)


def _write(core: Core, record: Record, tensor: NkiTensor, result: Result) -> None:
    shadow = tensor.shadow()
    array = tensor.array()
    if core.run.recorder is not None:
        core.run.recorder.check_write(tensor, shadow, result)
    if core.run.lnc > 1 and tensor.buffer is MemoryRegion.shared_hbm:
        _note_write(core, record, tensor, shadow, result)
    mask = result.mask.reshape(array.shape) if isinstance(result, Masked) else None
    if tensor.buffer is MemoryRegion.psum:
        begun = tensor.begun()
        begun |= True if mask is None else mask
        tensor.put(begun=begun)
    store(array, result)
    if mask is not None:
        per_byte = np.broadcast_to(mask[..., None], (*mask.shape, dtypes.size_of(tensor.dtype))).reshape(shadow.shape)
        np.bitwise_or(shadow, WRITTEN, out=shadow, where=per_byte)
    elif core.run.lnc == 1 or tensor.buffer.on_chip:
        shadow[...] = WRITTEN
    else:
        shadow |= WRITTEN
    tensor.put(array, shadow)


def _note_write(core: Core, record: Record, tensor: NkiTensor, shadow: Array, result: Result) -> None:
    # Public kernels store the same result from both cores, which does no harm; strict runs want it said once.
    same = not core.options.strict and _is_there(tensor.array(), result)
    if same and core.run.recorder is not None and (shadow & TOUCHED_BY[1 - core.index]).any():
        core.run.recorder.refuse(f"both cores write {tensor!r}, which is right if they write the same values")
    _note_shared(core, record, tensor, shadow, WRITTEN_BY, (0, 0) if same else TOUCHED_BY)


def _is_there(array: Array, result: Result) -> bool:
    """Whether the memory holds the result already, bit by bit."""
    values = result.values if isinstance(result, Masked) else result
    return array.tobytes() == cast(np.asarray(values), array.dtype).tobytes()
