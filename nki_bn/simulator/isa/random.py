# SPDX-License-Identifier: Apache-2.0
"""Random numbers: bits, uniform numbers, dropout, and the states of the generators.

A lane's numbers depend on its partition, the engine, the core and the seed only; see :mod:`..random_bits` for the
generator, whose bits differ from hardware.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nki_bn.simulator import dtypes
from nki_bn.simulator.isa import alu, checks
from nki_bn.simulator.isa.enums import engine as engines
from nki_bn.simulator.isa.enums import nc_version
from nki_bn.simulator.isa.operands import Operands
from nki_bn.simulator.issue import NkiInstruction, issue, raw
from nki_bn.simulator.machine import current_core
from nki_bn.simulator.numerics import Array, Float32
from nki_bn.simulator.random_bits import STREAM_WORDS, STREAMS, Xorwow
from nki_bn.simulator.tensor import NkiTensor, require

_INTEGERS = ("int8", "int16", "int32", "uint8", "uint16", "uint32")
_FLOATS = (*dtypes.FLOATS, "tfloat32")


def rng(dst: NkiTensor, engine: engines = engines.vector, name: str | None = None) -> NkiInstruction:
    """Fill ``dst`` with random bits: 32 per element, of which the dtype's width is kept, the low ones.

    Args:
        dst: (P, F) tile of an integer dtype, in SBUF or, on Vector, PSUM.
        engine: Vector, or from gen3 GpSimd.

    Raises:
        TypeError: wrong Python types.
        NkiValidationError: another dtype, place or engine.
    """
    operands = Operands("rng")
    accepted = (engines.vector, engines.gpsimd) if checks.version() >= nc_version.gen3 else (engines.vector,)
    chosen = checks.pick_engine("rng", engine, engines.vector, accepted)
    dst = operands.tile("dst", dst, checks.SBUF if chosen is engines.gpsimd else checks.ON_CHIP)
    checks.check_dtypes("rng", _INTEGERS, dst=dst)

    def compute() -> list[Array]:
        bits = _generator(chosen).bits(*_lanes(dst), checks.columns(dst))
        return [alu.from_bits(bits.astype(f"u{dtypes.size_of(dst.dtype)}"), dst)]

    return issue("rng", chosen.name, [dst], operands.indices, compute, name=name)


def rand2(dst: NkiTensor, min: Any, max: Any, name: str | None = None) -> NkiInstruction:
    """Fill ``dst`` with uniform float32 numbers from ``min`` to ``max``, cast to its dtype; on Vector, from gen4.

    Args:
        dst: (P, F) tile in SBUF or PSUM; a float of 8 to 32 bits, or an integer.
        min, max: numbers, or (P, 1) float32 tiles; ``min`` is less than ``max``.

    Raises:
        TypeError: wrong Python types.
        NkiValidationError: an earlier generation, or a broken rule above.
    """
    checks.at_least("rand2", nc_version.gen4)
    operands = Operands("rand2")
    dst = operands.tile("dst", dst)
    checks.check_dtypes("rand2", (*_FLOATS, *_INTEGERS), dst=dst)
    bounds = [operands.column("min", min, dst), operands.column("max", max, dst)]
    columns = [bound for bound in bounds if isinstance(bound, NkiTensor)]
    if not columns:
        _check_range(*bounds)

    def compute() -> list[Array]:
        low, high = (checks.operand_values(bound) for bound in bounds)
        _check_range(low, high)
        return [low + _uniform(dst) * (high - low)]

    return issue("rand2", "vector", [dst], [*columns, *operands.indices], compute, name=name, pointers=len(columns))


def _check_range(low: Any, high: Any) -> None:
    require(bool(np.all(np.less(low, high))), f"rand2 min must be less than max, got {low} and {high}")


def dropout(dst: NkiTensor, data: NkiTensor, prob: Any, name: str | None = None) -> NkiInstruction:
    """``data`` with every element set to zero with probability ``prob``, on Vector; what stays is not scaled.

    Args:
        dst, data: (P, F) tiles of one dtype in SBUF or PSUM; elements that stay keep their bits.
        prob: number, or (P, 1) tile: float32 for integer ``data``, else of any float dtype.

    Raises:
        TypeError: wrong Python types.
        NkiValidationError: a rule above is broken.
    """
    operands = Operands("dropout")
    dst, data = operands.pair(dst, data)
    checks.same_dtype("dropout", data=data, dst=dst)
    rate = operands.column("prob", prob, data, float32_only=dtypes.is_integer(data.dtype))
    columns = [rate] if isinstance(rate, NkiTensor) else []
    for column in columns:
        checks.check_dtypes("dropout", _FLOATS, prob=column)

    def compute() -> list[Array]:
        values = raw(data)
        dropped = _uniform(dst) < checks.operand_values(rate)
        return [np.where(dropped, np.zeros((), values.dtype), values)]

    return issue(
        "dropout", "vector", [dst], [data, *columns, *operands.indices], compute, name=name, pointers=len(columns)
    )


def set_rng_seed(src_seeds: NkiTensor, name: str | None = None) -> NkiInstruction:
    """Start Vector's generators from a seed: equal seeds give equal sequences.

    Args:
        src_seeds: (1, 1) tile of a 32-bit dtype in SBUF or PSUM.

    Raises:
        TypeError: it is no tensor.
        NkiValidationError: it has another shape, place or width.
    """
    operands = Operands("set_rng_seed")
    seed = operands.tile("src_seeds", src_seeds)
    require(
        seed.shape == (1, 1) and dtypes.size_of(seed.dtype) == 4,
        f"set_rng_seed src_seeds must be a (1, 1) tile of a 32-bit dtype, got {seed!r}",
    )

    def compute() -> list[Array]:
        _generator(engines.vector).seed(int(raw(seed).view(np.uint32)[0, 0]))
        return []

    return issue("set_rng_seed", "vector", [], [seed, *operands.indices], compute, name=name)


def rand_set_state(src_seeds: NkiTensor, engine: engines = engines.gpsimd, name: str | None = None) -> NkiInstruction:
    """Set the states of the generators of the lanes of ``src_seeds``.

    Args:
        src_seeds: (P, 6) tile for GpSimd, (P, 24) for Vector; uint32, in SBUF.
        engine: GpSimd, or from gen4 Vector.

    Raises:
        TypeError: wrong Python types.
        NkiValidationError: a generation before gen3, or another engine, dtype, shape or place.
    """
    operands = Operands("rand_set_state")
    chosen = _state_engine("rand_set_state", engine)
    seeds = operands.tile("src_seeds", src_seeds, checks.SBUF)
    require(seeds.ndim == 2, f"rand_set_state src_seeds must have two dimensions, got shape {seeds.shape}")
    _check_state("rand_set_state", "src_seeds", seeds, chosen)

    def compute() -> list[Array]:
        _generator(chosen).rows(*_lanes(seeds))[...] = raw(seeds)
        return []

    return issue("rand_set_state", chosen.name, [], [seeds, *operands.indices], compute, name=name)


def rand_get_state(dst: NkiTensor, engine: engines = engines.gpsimd, name: str | None = None) -> NkiInstruction:
    """Store the states of the generators of the lanes of ``dst``.

    Args:
        dst: tile of P partitions of 6 (GpSimd) or 24 (Vector) uint32 in SBUF, or for Vector PSUM.
        engine: GpSimd, or from gen4 Vector.

    Raises:
        TypeError: wrong Python types.
        NkiValidationError: a generation before gen3, or another engine, dtype, shape or place.
    """
    operands = Operands("rand_get_state")
    chosen = _state_engine("rand_get_state", engine)
    dst = operands.tile("dst", dst, checks.SBUF if chosen is engines.gpsimd else checks.ON_CHIP)
    _check_state("rand_get_state", "dst", dst, chosen)
    return issue(
        "rand_get_state",
        chosen.name,
        [dst],
        operands.indices,
        lambda: [_generator(chosen).rows(*_lanes(dst)).copy()],
        name=name,
    )


def _state_engine(opcode: str, engine: engines) -> engines:
    checks.at_least(opcode, nc_version.gen3)
    accepted = (engines.gpsimd, engines.vector) if checks.version() >= nc_version.gen4 else (engines.gpsimd,)
    return checks.pick_engine(opcode, engine, engines.gpsimd, accepted)


def _check_state(opcode: str, argument: str, tensor: NkiTensor, engine: engines) -> None:
    checks.check_dtypes(opcode, ("uint32",), **{argument: tensor})
    words = STREAM_WORDS * STREAMS[engine.name]
    require(
        checks.columns(tensor) == words,
        f"{opcode} {argument} must have {words} elements per partition on {engine.name}, got shape {tensor.shape}",
    )


def _generator(engine: engines) -> Xorwow:
    return current_core().generator(engine.name)


def _lanes(tensor: NkiTensor) -> tuple[int, int]:
    """First partition and number of partitions."""
    return tensor.address[0], tensor.shape[0]


def _uniform(dst: NkiTensor) -> Float32:
    """The next numbers in [0, 1) of Vector for ``dst``."""
    return _generator(engines.vector).uniform(*_lanes(dst), checks.columns(dst))
