# SPDX-License-Identifier: Apache-2.0
"""Which instruction class a record belongs to, and what that costs: the fast modes of Vector, pointers, read-outs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from nki_bn.hardware import Cost, GpSimdTiming, ScalarTiming, Strided, TensorTiming, Timing, VectorTiming
from nki_bn.simulator import dtypes
from nki_bn.simulator.memory import MemoryRegion
from nki_bn.simulator.trace import Access, Record

_SHORT_FLOATS = ("bfloat16", "float16")
_WIDE = ("float32", "tfloat32")
# bn_aggr works on (count, mean, count * variance).
_TRIPLE = 3
_RANDOM = ("rng", "rand2", "set_rng_seed", "rand_set_state", "rand_get_state")
_REGISTERS = ("register_move", "register_load", "register_store")


@dataclass(frozen=True)
class Duration:
    """ns that an instruction streams, and after that until its engine is free and until its results can be seen.

    ``least`` is what the engine is busy at least; ``table`` names the activation table that has to be loaded;
    ``weights`` is the ns of loading weights into Tensor, unless that hides behind the instruction before.
    """

    streaming: float
    occupancy: float
    latency: float
    least: float = 0.0
    table: str | None = None
    weights: float = 0.0


def duration_of(record: Record, timing: Timing) -> Duration:
    """What ``record`` (no DMA, no barrier) costs on its engine.

    Raises:
        ValueError: it runs on no engine of the model.
    """
    if record.engine == "sync":
        return _register(record, timing)
    if record.engine not in _ENGINES:
        raise ValueError(
            f"{record.opcode} at {record.source} runs on engine {record.engine!r}; accepted: "
            f"{', '.join((*_ENGINES, 'sync', 'dma'))}"
        )
    cost = _ENGINES[record.engine](record, timing)
    clock: float = getattr(timing.clock, record.engine)
    slow = 1.0 if record.engine == "tensor" else _stride_factor(record, timing.strided)
    streaming = _elements(record) * cost.cycles / clock * slow
    duration = Duration(streaming, cost.occupancy, cost.latency, timing.floor_cycles / clock)
    if record.engine == "scalar":
        return replace(duration, table=_table(record, timing.scalar))
    if record.engine == "tensor":
        return replace(duration, weights=_passes(record) * timing.tensor.weight_load_cycles / clock)
    return duration


def _register(record: Record, timing: Timing) -> Duration:
    if record.opcode not in _REGISTERS:
        raise ValueError(f"{record.opcode} at {record.source} runs on engine sync; accepted: {', '.join(_REGISTERS)}")
    moves = record.opcode == "register_move"
    return Duration(timing.sync.register_move if moves else timing.sync.register_memory, 0.0, 0.0)


def _elements(record: Record) -> float:
    """Elements that stream through a lane: of the widest operand, or the columns of the result on Tensor.

    Gathers cost by what they pick; all lanes of a ``local_gather`` share its elements.
    """
    if record.engine == "tensor" or record.opcode == "nc_n_gather":
        return record.writes[0].columns
    if record.opcode == "local_gather":
        return record.writes[0].columns / record.writes[0].shape[0]
    widest = max((access.columns for access in (*record.writes, *record.reads)), default=0)
    return widest / _TRIPLE if record.opcode == "bn_aggr" else widest


def _stride_factor(record: Record, strided: Strided) -> float:
    wide = any(_inner_stride(access) >= strided.bytes for access in (*record.writes, *record.reads))
    return strided.factor if wide else 1.0


def _inner_stride(access: Access) -> int:
    """Bytes between neighbours in a lane; 0 where there is only one element."""
    free = zip(access.shape[1:], access.strides[1:], strict=True)
    return next((stride for size, stride in reversed(list(free)) if size > 1), 0)


def _packed(access: Access) -> bool:
    return _inner_stride(access) in (0, dtypes.size_of(access.dtype))


def _short(accesses: tuple[Access, ...]) -> bool:
    return all(access.dtype in _SHORT_FLOATS for access in accesses)


def _in_sbuf(accesses: tuple[Access, ...]) -> bool:
    return all(access.region is MemoryRegion.sbuf for access in accesses)


def _pointers(record: Record) -> int:
    count: int = record.attributes.get("pointers", 0)
    return count


def _add(cost: Cost, more: Cost) -> Cost:
    return Cost(cost.cycles + more.cycles, cost.occupancy + more.occupancy, cost.latency + more.latency)


def _reads_out(record: Record) -> bool:
    return bool(record.attributes.get("read_out", False))


# --- Vector ----------------------------------------------------------------------------------------------------------


def _vector(record: Record, timing: Timing) -> Cost:
    vector = timing.vector
    cost = _VECTOR.get(record.opcode, _tensor_tensor)(record, vector)
    if any(access.region is MemoryRegion.psum for access in record.reads):
        cost = Cost(max(cost.cycles, vector.psum.cycles), cost.occupancy, max(cost.latency, vector.psum.latency))
    return _add(cost, vector.read_out) if _reads_out(record) else cost


def _copy(record: Record, vector: VectorTiming) -> Cost:
    tiles = (record.writes[0], record.reads[0])
    widening = tiles[1].dtype in _SHORT_FLOATS and tiles[0].dtype in _WIDE
    if widening and _in_sbuf(tiles):
        return vector.copy_widening
    return _plain(tiles, vector, vector.copy_16bit)


def _tensor_scalar(record: Record, vector: VectorTiming) -> Cost:
    cost = _plain((record.writes[0], record.reads[0]), vector, vector.scalar_16bit)
    return _pointed(cost, record, vector)


def _plain(tiles: tuple[Access, ...], vector: VectorTiming, fastest: Cost) -> Cost:
    """One tile in, one out: four elements per cycle, two, or one."""
    if _short(tiles):
        return fastest if _in_sbuf(tiles) and all(map(_packed, tiles)) else vector.plain_16bit_half
    return vector.plain if _in_sbuf(tiles) else replace(vector.plain, cycles=vector.psum.cycles)


def _pointed(cost: Cost, record: Record, vector: VectorTiming) -> Cost:
    return replace(vector.pointer, cycles=cost.cycles) if _pointers(record) else cost


def _tensor_tensor(record: Record, vector: VectorTiming) -> Cost:
    operands = (*record.writes, *record.reads)
    return vector.tensor_tensor_16bit if _short(operands) and _in_sbuf(operands) else vector.tensor_tensor


def _scalar_tensor_tensor(record: Record, vector: VectorTiming) -> Cost:
    if not _pointers(record):
        return _tensor_tensor(record, vector)
    tiles = (record.writes[0], *record.reads[:2])
    fast = _short(tiles) and _in_sbuf(tiles)
    return vector.scalar_tensor_tensor_16bit if fast else vector.scalar_tensor_tensor


def _scalar_reduce(record: Record, vector: VectorTiming) -> Cost:
    return _pointed(vector.reduce, record, vector)


def _masked(record: Record, vector: VectorTiming) -> Cost:
    return _pointed(vector.masked, record, vector)


def _scan(record: Record, vector: VectorTiming) -> Cost:
    return _add(vector.scan, vector.scan_seed) if _pointers(record) else vector.scan


def _named(name: str) -> Callable[[Record, VectorTiming], Cost]:
    def look_up(record: Record, vector: VectorTiming) -> Cost:
        cost: Cost = getattr(vector, name)
        return cost

    return look_up


_VECTOR: dict[str, Callable[[Record, VectorTiming], Cost]] = {
    "tensor_copy": _copy,
    "tensor_scalar": _tensor_scalar,
    "scalar_tensor_tensor": _scalar_tensor_tensor,
    "tensor_scalar_reduce": _scalar_reduce,
    "tensor_scalar_cumulative": _scan,
    "tensor_tensor_scan": _scan,
    "tensor_reduce": _named("reduce"),
    "bn_stats": _named("bn_stats"),
    "bn_aggr": _named("bn_aggr"),
    "reciprocal": _named("reciprocal"),
    "memset": _named("memset"),
    "tensor_copy_predicated": _named("predicated"),
    "select_reduce": _named("predicated"),
    "nc_stream_shuffle": _named("shuffle"),
    "nc_transpose": _named("transpose"),
    **dict.fromkeys(("max8", "nc_find_index8", "nc_match_replace8"), _named("search")),
    "range_select": _masked,
    "dropout": _masked,
    **dict.fromkeys(_RANDOM, _named("random")),
}


# --- Scalar ----------------------------------------------------------------------------------------------------------


def _scalar(record: Record, timing: Timing) -> Cost:
    scalar = timing.scalar
    from_psum = record.reads[0].region is MemoryRegion.psum
    if record.opcode == "tensor_copy":
        return scalar.copy_psum if from_psum else scalar.copy
    cost = scalar.activation_psum if from_psum else scalar.activation
    for _ in range(_pointers(record) - 1):
        cost = _add(cost, scalar.extra_pointer)
    if _reads_out(record):
        # An instruction of its own, which starts when the engine has let go of the activation.
        out = scalar.read_out
        return Cost(cost.cycles, cost.occupancy + out.occupancy, cost.occupancy + out.latency)
    return cost


def _table(record: Record, scalar: ScalarTiming) -> str | None:
    """The activation table of the record's function, called after the first of those who share it."""
    function: str | None = record.attributes.get("function")
    return next((group[0] for group in scalar.shared_tables if function in group), function)


# --- GpSimd ----------------------------------------------------------------------------------------------------------


def _gpsimd(record: Record, timing: Timing) -> Cost:
    gpsimd: GpSimdTiming = timing.gpsimd
    if record.opcode in _GPSIMD:
        cost: Cost = getattr(gpsimd, _GPSIMD[record.opcode])
        return cost
    tiles = len(record.reads) - _pointers(record)
    return gpsimd.two_tiles if tiles > 1 else gpsimd.one_tile


_GPSIMD = {
    "iota": "index",
    "affine_select": "index",
    "tensor_partition_reduce": "partition_reduce",
    "local_gather": "gather",
    "nc_n_gather": "gather",
    "sequence_bounds": "positions",
    "nonzero_with_count": "positions",
    **dict.fromkeys(_RANDOM, "random"),
}


# --- Tensor ----------------------------------------------------------------------------------------------------------


def _tensor(record: Record, timing: Timing) -> Cost:
    tensor: TensorTiming = timing.tensor
    wide = record.reads[0].dtype in _WIDE
    if record.opcode == "nc_transpose" or record.attributes["is_transpose"]:
        return tensor.transpose_float32 if wide else tensor.transpose
    if not wide:
        return tensor.matmul
    onezero = record.attributes["stationary_onezero"] or record.attributes["moving_onezero"]
    return tensor.matmul_float32_onezero if onezero else tensor.matmul_float32


def _passes(record: Record) -> int:
    """Weight loads: float32 products take two."""
    product = record.opcode == "nc_matmul" and not record.attributes["is_transpose"]
    return 2 if product and record.reads[0].dtype in _WIDE else 1


_ENGINES: dict[str, Callable[[Record, Timing], Cost]] = {
    "vector": _vector,
    "scalar": _scalar,
    "gpsimd": _gpsimd,
    "tensor": _tensor,
}
