# SPDX-License-Identifier: Apache-2.0
"""Random numbers: what the generator is, distributions, seeds and states, and what the instructions refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from instructions import BF16, F32, Array, computed, execute, record_of, refused, same, values, written
from launching import launch, nisa, nl, store

GPSIMD, VECTOR = nisa.engine.gpsimd, nisa.engine.vector
ONE = np.zeros((128, 1), F32)
SEED = np.array([[7]], np.int32)
STATES = np.random.default_rng(4).integers(1, 2**32, (128, 24)).astype(np.uint32)


def xorwow(state: list[int], count: int) -> tuple[list[int], list[int]]:
    """``count`` numbers of Marsaglia's generator in Python integers, and the state after them."""
    x, y, z, w, v, d = state
    numbers = []
    for _ in range(count):
        t = x ^ (x >> 2)
        x, y, z, w = y, z, w, v
        v = (v ^ (v << 4) ^ t ^ (t << 1)) % 2**32
        d = (d + 362437) % 2**32
        numbers.append((d + v) % 2**32)
    return numbers, [x, y, z, w, v, d]


def rng(**keywords: Any) -> Callable[..., Any]:
    return lambda dst, *_: nisa.rng(dst, **keywords)


def bits(call: Callable[..., Any], *arrays: Array, columns: int = 1000, **options: Any) -> Any:
    return computed(call, *(arrays or (ONE,)), dtype="uint32", shape=(128, columns), **options)


# --- rng -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [VECTOR, GPSIMD])
def test_every_bit_is_fair_and_lanes_differ(engine: Any) -> None:
    """128000 draws: five standard deviations of a fair bit's mean are 5 * 0.5 / sqrt(128000)."""
    numbers = bits(rng(engine=engine))
    means = [float(((numbers >> np.uint32(bit)) & 1).mean()) for bit in range(32)]
    assert max(abs(mean - 0.5) for mean in means) < 2.5 / np.sqrt(numbers.size)
    # Of 128000 draws from 2^32, two are expected to meet; 30 would be beyond belief.
    assert len(np.unique(numbers)) > numbers.size - 30


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32], ids=str)
def test_narrow_integers_keep_the_low_bits(dtype: Any) -> None:
    wide = bits(rng(), columns=50)
    narrow = computed(rng(), ONE, dtype=np.dtype(dtype).name, shape=(128, 50))
    same(narrow, wide.astype(np.dtype(f"u{np.dtype(dtype).itemsize}")).view(dtype))


def test_runs_repeat_and_engines_cores_and_partitions_differ() -> None:
    first = bits(rng(engine=VECTOR))
    same(bits(rng(engine=nisa.engine.unknown)), first)
    assert (bits(rng(engine=GPSIMD)) != first).mean() > 0.99

    def kernel(x: Any) -> Any:
        out = nl.ndarray((2, 128, 9), nl.uint32, buffer=nl.shared_hbm)
        tile = nl.ndarray((128, 9), nl.uint32)
        nisa.rng(tile)
        nisa.dma_copy(out[nl.program_id(0)], tile)
        return out

    cores = launch(kernel, ONE, lnc=2).outputs
    same(cores[0], bits(rng(), columns=9))
    assert (cores[0] != cores[1]).mean() > 0.99


def test_a_part_of_the_partitions_draws_its_own_numbers() -> None:
    def call(dst: Any, *_: Any) -> None:
        nisa.rng(dst[64:])
        nisa.rng(dst[:64])

    same(bits(call), bits(rng()))


def test_rng_records_and_memories() -> None:
    result = execute(rng(), ONE, dtype="uint32", shape=(128, 8), buffer=nl.psum)
    record = record_of(result, "rng")
    assert record.engine == "vector" and record.reads == ()
    same(result.outputs, bits(rng(), columns=8))


@pytest.mark.parametrize(
    "match, keywords, options",
    [
        ("dst is float32; accepted: int8, int16", {}, {"dtype": "float32"}),
        ("dst is bfloat16; accepted", {}, {"dtype": "bfloat16"}),
        ("dst is in psum; accepted: sbuf", {"engine": GPSIMD}, {"buffer": nl.psum}),
        ("rng cannot run on engine scalar; accepted: vector, gpsimd", {"engine": nisa.engine.scalar}, {}),
        ("rng cannot run on engine gpsimd; accepted: vector", {"engine": GPSIMD}, {"target": "trn1"}),
    ],
)
def test_rng_refuses(match: str, keywords: Any, options: Any) -> None:
    refused(match, rng(**keywords), ONE, **{"dtype": "uint32", **options})


def test_rng_refuses_types() -> None:
    refused("engine must be a member of engine, got 3", rng(engine=3), ONE, dtype="uint32", error=TypeError)
    refused("dst must be a tensor", lambda dst, a: nisa.rng(None), ONE, error=TypeError)


# --- seeds and states ------------------------------------------------------------------------------------------------


def seeded(dst: Any, seed: Any, *_: Any) -> None:
    nisa.set_rng_seed(seed)
    nisa.rng(dst)


def test_equal_seeds_give_equal_sequences() -> None:
    def twice(dst: Any, seed: Any) -> list[Any]:
        again = nl.ndarray((128, 9), nl.uint32)
        nisa.rng(again)
        seeded(dst, seed)
        nisa.rng(again)
        seeded(again, seed)
        return [again]

    first, again = bits(twice, SEED, columns=9)
    same(first, again)
    same(bits(seeded, SEED.view(F32), columns=9), first)
    assert (bits(seeded, SEED + 1, columns=9) != first).mean() > 0.99
    for seed in (first, bits(seeded, 0 * SEED, columns=9), bits(seeded, SEED // 7, columns=9)):
        assert (bits(rng(), columns=9) != seed).mean() > 0.99


def test_a_seed_is_for_vector_only() -> None:
    def call(dst: Any, seed: Any) -> None:
        nisa.set_rng_seed(seed)
        nisa.rng(dst, engine=GPSIMD)

    same(bits(call, SEED), bits(rng(engine=GPSIMD)))


@pytest.mark.parametrize(
    "seed", [np.zeros((1, 2), np.int32), np.zeros((2, 1), np.int32), np.zeros((1, 1), np.int16), np.zeros((1, 1), BF16)]
)
def test_seeds_refused(seed: Array) -> None:
    refused(r"src_seeds must be a \(1, 1\) tile of a 32-bit dtype", seeded, seed, dtype="uint32")


def test_a_state_decides_what_follows_bit_for_bit() -> None:
    states = STATES[:, :6]

    def call(dst: Any, state: Any) -> list[Any]:
        after = nl.ndarray((128, 6), nl.uint32)
        nisa.rand_set_state(state)
        nisa.rng(dst, engine=GPSIMD)
        nisa.rand_get_state(after)
        return [after]

    numbers, after = bits(call, states, columns=20)
    expected = [xorwow(row.tolist(), 20) for row in states]
    same(numbers, np.array([row for row, _ in expected], np.uint32))
    same(after, np.array([row for _, row in expected], np.uint32))


def test_vector_has_four_streams_a_lane() -> None:
    def call(dst: Any, state: Any) -> list[Any]:
        after = nl.ndarray((128, 24), nl.uint32, buffer=nl.psum)
        nisa.rand_set_state(state, VECTOR)
        nisa.rng(dst)
        nisa.rand_get_state(after, VECTOR)
        return [after]

    numbers, after = bits(call, STATES, columns=20, target="trn3")
    for stream in range(4):
        part = slice(6 * stream, 6 * stream + 6)
        expected = [xorwow(row.tolist(), 5) for row in STATES[:, part]]
        same(numbers[:, stream::4], np.array([row for row, _ in expected], np.uint32))
        same(after[:, part], np.array([row for _, row in expected], np.uint32))


def test_states_of_some_lanes() -> None:
    def call(dst: Any, state: Any) -> None:
        nisa.rand_get_state(dst)
        nisa.rand_set_state(state[32:64])
        nisa.rand_get_state(dst[32:64])

    result = computed(call, STATES[:, :6], dtype="uint32")
    same(result[32:64], STATES[32:64, :6])
    assert (result[:32] != STATES[:32, :6]).any()


@pytest.mark.parametrize(
    "match, columns, keywords, options",
    [
        ("must have 6 elements per partition on gpsimd", 24, {}, {}),
        ("must have 24 elements per partition on vector", 6, {"engine": VECTOR}, {"target": "trn3"}),
        ("cannot run on engine vector; accepted: gpsimd", 24, {"engine": VECTOR}, {}),
        ("needs gen3 or later, the target is gen2", 6, {}, {"target": "trn1"}),
    ],
)
def test_states_refused(match: str, columns: int, keywords: Any, options: Any) -> None:
    state = STATES[:, :columns]
    get, put = (
        lambda dst, s: nisa.rand_get_state(dst, **keywords),
        lambda dst, s: nisa.rand_set_state(s, **keywords),
    )
    for call, name in ((get, "get"), (put, "set")):
        where = "" if match.startswith(("cannot", "needs")) else ".*"
        refused(f"rand_{name}_state {where}{match}", call, state, dtype="uint32", **options)


def test_states_refuse_dtypes_ranks_and_places() -> None:
    refused("src_seeds is int32; accepted: uint32", lambda dst, s: nisa.rand_set_state(s), STATES[:, :6].view(np.int32))
    refused("dst is int32; accepted: uint32", lambda dst, s: nisa.rand_get_state(dst), STATES[:, :6], dtype="int32")
    refused(
        "src_seeds must have two dimensions",
        lambda dst, s: nisa.rand_set_state(s),
        STATES[:, :6].reshape(128, 2, 3),
    )
    refused("src_seeds is in psum; accepted: sbuf", lambda d, s: nisa.rand_set_state(s), STATES[:, :6], source=nl.psum)
    refused(
        "dst is in psum; accepted: sbuf",
        lambda dst, s: nisa.rand_get_state(dst),
        STATES[:, :6],
        dtype="uint32",
        buffer=nl.psum,
    )


# --- rand2 -----------------------------------------------------------------------------------------------------------


def uniform(low: Any, high: Any) -> Callable[..., Any]:
    return lambda dst, *_: nisa.rand2(dst, low, high)


def test_uniform_numbers() -> None:
    """128000 draws; the mean of uniform numbers has standard deviation range / sqrt(12 n)."""
    result = execute(uniform(-2.0, 6.0), ONE, shape=(128, 1000), target="trn3")
    numbers = result.outputs
    assert numbers.min() >= -2 and numbers.max() <= 6
    assert abs(numbers.mean() - 2) < 5 * 8 / np.sqrt(12 * numbers.size)
    assert abs(numbers.var() / (64 / 12) - 1) < 0.02
    counts = np.histogram(numbers, 16, (-2, 6))[0]
    assert abs(counts / (numbers.size / 16) - 1).max() < 5 * np.sqrt(16 / numbers.size)
    assert record_of(result, "rand2").engine == "vector"


def test_bounds_by_lane() -> None:
    low = np.arange(128, dtype=F32)[:, None]

    def call(dst: Any, a: Any) -> None:
        nisa.rand2(dst, a, 1000.0)

    result = execute(call, low, shape=(128, 200), target="trn3")
    assert (result.outputs >= low).all() and (result.outputs <= 1000).all()
    assert record_of(result, "rand2").attributes == {"pointers": 1}


@pytest.mark.parametrize(
    "dtype", ["float8_e4m3", "float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "int8", "uint16", "uint32"]
)
def test_uniform_numbers_are_cast(dtype: str) -> None:
    exact = computed(uniform(0.0, 100.0), ONE, shape=(128, 20), target="trn3")
    narrow = computed(uniform(0.0, 100.0), ONE, shape=(128, 20), dtype=dtype, target="trn3")
    same(narrow, written(exact, narrow.dtype))


def test_rand2_refuses() -> None:
    refused("rand2 needs gen4 or later, the target is gen3", uniform(0.0, 1.0), ONE)
    refused("min must be less than max, got 1.0 and 1.0", uniform(1.0, 1.0), ONE, target="trn3")
    refused("min must be less than max", lambda dst, a: nisa.rand2(dst, a, 0.0), ONE, target="trn3")
    refused("min must be a number or a column", uniform(None, 1.0), ONE, error=TypeError, target="trn3")
    refused("max must be float32", lambda dst, a: nisa.rand2(dst, 0.0, a), ONE.astype(BF16), target="trn3")
    refused(r"max must have shape \(128, 1\)", lambda dst, a: nisa.rand2(dst, 0.0, a), np.tile(ONE, 2), target="trn3")
    refused("dst is float8_e8m0fnu; accepted", uniform(0.0, 1.0), ONE, dtype="float8_e8m0fnu", target="trn3")


# --- dropout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, BF16, np.int32, np.uint8], ids=str)
def test_dropout_zeroes_with_the_probability_and_does_not_scale(dtype: Any) -> None:
    """64000 elements; a share p has standard deviation sqrt(p (1 - p) / n)."""
    data = (100 * np.abs(values(128, 500)) + 1).astype(dtype)
    result = execute(lambda dst, a: nisa.dropout(dst, a, 0.3), data, dtype=np.dtype(dtype).name)
    kept = result.outputs != 0
    same(result.outputs, np.where(kept, data, np.zeros((), dtype)))
    assert abs((1 - kept.mean()) - 0.3) < 5 * np.sqrt(0.21 / data.size)
    record = record_of(result, "dropout")
    assert record.engine == "vector" and record.attributes == {"pointers": 0}


@pytest.mark.parametrize("dtype", [F32, BF16, np.float16], ids=str)
def test_dropout_by_lane(dtype: Any) -> None:
    rates = np.repeat(np.array([0, 1, 0.5, 0.25], dtype), 32)[:, None]
    call = lambda dst, a, rate: nisa.dropout(dst, a, rate)  # noqa: E731
    data = np.full((128, 1000), 3, F32)
    kept = computed(call, data, rates) == 3
    assert kept[:32].all() and not kept[32:64].any()
    assert abs(kept[64:96].mean() - 0.5) < 5 * np.sqrt(0.25 / 32000)
    assert abs(kept[96:].mean() - 0.75) < 5 * np.sqrt(0.1875 / 32000)


def test_dropout_in_place_and_seeded() -> None:
    data = values(128, 50)

    def call(dst: Any, a: Any, seed: Any) -> list[Any]:
        nisa.set_rng_seed(seed)
        nisa.dropout(dst, a, 0.5)
        nisa.set_rng_seed(seed)
        nisa.dropout(a, a, 0.5)
        return [a]

    apart, in_place = computed(call, data, SEED)
    same(in_place, apart)
    assert 0.4 < (apart == 0).mean() < 0.6


def test_dropout_keeps_nan_and_infinities_out_of_what_it_drops() -> None:
    data = np.full((128, 20), np.nan, F32)
    result = computed(lambda dst, a: nisa.dropout(dst, a, 0.5), data)
    assert set(np.unique(np.nan_to_num(result, nan=1))) == {0, 1}
    same(computed(lambda dst, a: nisa.dropout(dst, a, 1.0), data), np.zeros_like(data))


@pytest.mark.parametrize(
    "match, data, rate, options",
    [
        ("dst must have the dtype of data, float32, got bfloat16", ONE, 0.5, {"dtype": "bfloat16"}),
        ("prob must be float32, got bfloat16", ONE.astype(np.int32), ONE.astype(BF16), {"dtype": "int32"}),
        ("prob is int32; accepted: float8_e4m3", ONE, ONE.astype(np.int32), {}),
        (r"prob must have shape \(128, 1\), got \(128, 2\)", ONE, np.tile(ONE, 2), {}),
        ("dst has 2 elements per partition, data has 1", ONE, 0.5, {"shape": (128, 2)}),
    ],
)
def test_dropout_refuses(match: str, data: Array, rate: Any, options: Any) -> None:
    if isinstance(rate, float):
        refused(match, lambda dst, a: nisa.dropout(dst, a, rate), data, **options)
    else:
        refused(match, lambda dst, a, p: nisa.dropout(dst, a, p), data, rate, **options)


def test_dropout_refuses_types() -> None:
    refused("prob must be a number or a column", lambda dst, a: nisa.dropout(dst, a, None), ONE, error=TypeError)


# --- nki.language ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target, opcodes",
    [
        ("trn2", ["rng", "tensor_scalar", "tensor_scalar"]),
        ("trn3", ["rand2"]),
        ("trn1", ["rng", *["tensor_scalar"] * 2]),
    ],
)
def test_the_language_functions_are_these_instructions(target: str, opcodes: list[str]) -> None:
    def kernel(x: Any) -> Any:
        return store(nl.dropout(nl.rand((128, 200), nl.float32), 0.25))

    result = launch(kernel, ONE, target=target)
    assert [record.opcode for record in result.trace if record.engine == "vector"] == [*opcodes, "dropout"]
    share = (result.outputs == 0).mean()
    assert result.outputs.max() < 1 and abs(share - 0.25) < 5 * np.sqrt(0.1875 / result.outputs.size)
