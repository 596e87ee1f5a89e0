# SPDX-License-Identifier: Apache-2.0
"""Launches that repeat earlier ones: the results are those of a simulation, bit by bit, and the callers' own."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from launching import VENDOR, launch, load, nisa, nki, nl, outputs, store
from repeating import LAUNCHES, Counted, arrays, doubled, same, tile

import nki_bn
from nki_bn.execute import simulation
from nki_bn.simulator import RunOptions, replay
from nki_bn.simulator.memory import Storage

pytestmark = pytest.mark.skipif(VENDOR, reason="only the embedded simulator repeats launches")

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    replay.forget()
    yield
    replay.forget()


# --- what is repeated -------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int32])
def test_values_are_those_of_a_simulation(dtype: Any, strict: bool) -> None:
    same(doubled, [(x,) for x in arrays(dtype=dtype)], runs=2, strict=strict)


def exchanged(x: Any) -> Any:
    """Both cores send each other what they have made, and use what they got."""
    core = nl.program_id(0)
    mine, theirs = tile(), tile()
    nisa.tensor_scalar(dst=mine, data=load(x), op0=nl.add, operand0=float(core))
    nisa.sendrecv(src=mine, dst=theirs, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=0)
    nisa.tensor_tensor(dst=mine, data1=mine, data2=theirs, op=nl.multiply)
    nisa.sendrecv(src=mine, dst=theirs, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=0)
    out = nl.ndarray((2, *x.shape), "float32", buffer=nl.shared_hbm)
    nisa.tensor_tensor(dst=mine, data1=mine, data2=theirs, op=nl.subtract)
    nisa.dma_copy(dst=out[core], src=mine)
    nisa.core_barrier(out, cores=(0, 1))
    return out


def test_two_cores() -> None:
    same(exchanged, [(x,) for x in arrays()], runs=4, lnc=2)


def test_two_cores_through_shared_memory() -> None:
    """Each core reads what the other one wrote before a barrier."""

    def kernel(x: Any) -> Any:
        out = nl.ndarray(x.shape, "float32", buffer=nl.shared_hbm)
        middle = nl.ndarray(x.shape, "float32", buffer=nl.shared_hbm)
        core = nl.program_id(0)
        nisa.dma_copy(dst=middle[core], src=load(x[core]))
        nisa.core_barrier(middle, cores=(0, 1))
        nisa.dma_copy(dst=out[core], src=load(middle[1 - core]))
        return out

    same(kernel, [(x,) for x in arrays((2, 4, 6))], runs=4, lnc=2)


def accumulated(x: Any) -> Any:
    """Sums in PSUM, with and without ``accumulate``, and tiles that take turns in one place."""
    data = load(x)
    result = tile((6, 6))
    for turn in range(2):
        sums = nl.ndarray((6, 6), "float32", buffer=nl.psum)
        for _ in range(3):
            nisa.nc_matmul(dst=sums, stationary=data, moving=data)
        nisa.nc_matmul(dst=sums, stationary=data, moving=data, accumulate=True)
        if turn:
            nisa.tensor_tensor(dst=result, data1=result, data2=sums, op=nl.add)
        else:
            nisa.tensor_copy(dst=result, src=sums)
        del sums
    return store(result)


def test_sums_in_psum_begin_anew() -> None:
    same(accumulated, [(x,) for x in arrays()], runs=2)


def test_partly_begun_sums() -> None:
    def kernel(x: Any) -> Any:
        data, result = load(x), tile((6, 6))
        sums = nl.ndarray((6, 6), "float32", buffer=nl.psum)
        nisa.nc_matmul(dst=sums[:, 0:3], stationary=data, moving=data[:, 0:3])
        nisa.nc_matmul(dst=sums, stationary=data, moving=data)
        nisa.tensor_copy(dst=result, src=sums)
        return store(result)

    same(kernel, [(x,) for x in arrays()], runs=2)


def test_a_pattern_that_the_kernel_changes_afterwards() -> None:
    def kernel(x: Any) -> Any:
        pattern, counted, selected = [[1, 6]], tile(), tile()
        nisa.iota(dst=counted, pattern=pattern)
        nisa.affine_select(
            dst=selected,
            pattern=pattern,
            channel_multiplier=0,
            on_true_tile=load(x),
            on_false_value=0.0,
            cmp_op=nl.greater,
            offset=-2,
        )
        pattern[0][0] = -1
        nisa.tensor_tensor(dst=selected, data1=selected, data2=counted, op=nl.add)
        return store(selected)

    same(kernel, [(x,) for x in arrays()], runs=2)


def test_registers_of_engines_begin_anew() -> None:
    """Accumulators that no command resets, and generators that no seed sets."""

    def kernel(x: Any) -> Any:
        data, result, total, random = load(x), tile(), tile((4, 1)), tile(dtype="int16")
        nisa.activation(
            dst=result, op=nl.copy, data=data, reduce_op=nl.add, reduce_res=total, reduce_cmd=nisa.reduce_cmd.reduce
        )
        nisa.rng(dst=random)
        nisa.tensor_tensor(dst=result, data1=random, data2=result, op=nl.add)
        nisa.tensor_scalar(dst=result, data=result, op0=nl.add, operand0=total)
        return store(result)

    same(kernel, [(x,) for x in arrays()], runs=2)


def test_masked_writes_over_written_memory() -> None:
    def kernel(x: Any, predicate: Any) -> Any:
        data, chosen, result = load(x), load(predicate), tile()
        nisa.memset(dst=result, value=-1.0)
        nisa.tensor_copy_predicated(dst=result, src=data, predicate=chosen)
        return store(result)

    same(kernel, [(x, (x > 0).astype(np.uint8)) for x in arrays()], runs=2)


def test_a_row_that_is_repeated_over_partitions() -> None:
    """The mask of a shuffle is no value: a kernel with a bias is repeated."""

    def kernel(x: Any, bias: Any) -> Any:
        data = load(x)
        result = tile()
        nisa.tensor_tensor(dst=result, data1=data, data2=nl.broadcast_to(load(bias), data.shape), op=nl.add)
        return store(result)

    same(kernel, [(x, x[0:1]) for x in arrays()], runs=2)


def test_chosen_addresses_that_overlap() -> None:
    def kernel(x: Any) -> Any:
        first = tile(address=(0, 64))
        nisa.dma_copy(dst=first, src=x)
        second = tile((4, 3), address=(0, 64))
        nisa.tensor_scalar(dst=second, data=first[:, 3:6], op0=nl.multiply, operand0=3.0)
        return store(first)

    same(kernel, [(x,) for x in arrays()], runs=2)


def test_a_kernel_writes_its_arguments() -> None:
    def kernel(x: Any, out: Any) -> Any:
        nisa.dma_copy(dst=out, src=load(x))
        return out

    for x in arrays():
        out = np.zeros_like(x)
        result = outputs(kernel, x, out, replay=True)
        np.testing.assert_array_equal(out, x)
        np.testing.assert_array_equal(result, x)
        assert not np.shares_memory(result, out)


def test_outputs_are_the_callers() -> None:
    """A later launch changes no earlier output; two that are one tensor are two arrays."""

    def kernel(x: Any) -> Any:
        out = doubled(x)
        return out, out, out[0:2]

    inputs = arrays()
    results = [outputs(kernel, x, replay=True) for x in inputs]
    for x, (one, other, part) in zip(inputs, results, strict=True):
        for result, expected in ((one, 2 * x), (other, 2 * x), (part, 2 * x[:2])):
            np.testing.assert_array_equal(result, expected)
        assert not np.shares_memory(one, other) and not np.shares_memory(one, part)


def test_arguments_of_other_layouts() -> None:
    """Which arrays can be used in place may change from launch to launch."""
    x = arrays()[0]
    frozen = x.copy()
    frozen.flags.writeable = False
    for given in (x, x, x.T.copy().T, frozen, x[::-1][::-1], x.byteswap().view(x.dtype.newbyteorder()), x):
        np.testing.assert_array_equal(outputs(doubled, given, replay=True), 2 * x)


def test_an_argument_that_is_not_in_place_is_written_back() -> None:
    def kernel(x: Any, out: Any) -> Any:
        nisa.dma_copy(dst=out, src=load(x))
        return out

    for x in arrays():
        wide = np.zeros((4, 12), np.float32)
        outputs(kernel, x, wide[:, ::2], replay=True)
        np.testing.assert_array_equal(wide[:, ::2], x)
        assert not wide[:, 1::2].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_tensors(dtype: torch.dtype) -> None:
    counted = Counted(doubled)
    for x in arrays():
        given = torch.from_numpy(x).to(dtype)
        result = outputs(counted.kernel, given, replay=True)
        assert torch.equal(result, 2 * given)
    assert counted.runs == 2


def test_trace_and_memory_are_those_of_a_simulation() -> None:
    plain = launch(doubled, arrays()[0])
    for x in arrays():
        result = launch(doubled, x, replay=True)
        assert (result.sbuf_high_water, result.psum_high_water) == (plain.sbuf_high_water, plain.psum_high_water)
        assert [(record.opcode, record.source) for record in result.trace] == [
            (record.opcode, record.source) for record in plain.trace
        ]


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(
    ("shape", "dtype", "lnc"),
    [
        ((3, 5, 4, 7), "float32", 1),
        ((3, 5, 4, 7), "bfloat16", 2),
        ((2, 130, 3, 3), "float32", 2),
        ((64, 40), "float16", 2),
        ((2, 3, 5000), "bfloat16", 2),
    ],
)
def test_batch_norm(shape: tuple[int, ...], dtype: str, lnc: int, masked: bool) -> None:
    """The public functions, with a fused ReLU after a residual, whose mask is given or recomputed."""
    rng = np.random.default_rng(1)
    gamma, beta = rng.standard_normal((2, shape[1])).astype(np.float32)
    for _ in range(LAUNCHES):
        x, residual, dy = (rng.standard_normal(shape).astype(DTYPES[dtype]) for _ in range(3))
        results = {}
        for repeats in (True, False):
            with simulation(RunOptions(replay=repeats)):
                forward = nki_bn.batch_norm_fwd(x, gamma, beta, fuse_relu=True, residual=residual, lnc=lnc)
                columns = forward.mean, forward.var, gamma, beta
                mask = forward.relu_mask if masked else None
                backward = nki_bn.batch_norm_bwd(dy, x, *columns, 1e-5, True, mask, residual=residual, lnc=lnc)
            results[repeats] = [*forward, *backward]
        for one, other in zip(results[True], results[False], strict=True):
            assert (one is None and other is None) or one.tobytes() == other.tobytes()


# --- several at a time, and memory ------------------------------------------------------------------


def test_launches_inside_a_kernel_and_from_threads() -> None:
    def outer(x: Any) -> Any:
        np.testing.assert_array_equal(outputs(doubled, np.ones((4, 6), np.float32), replay=True), 2)
        return doubled(x)

    for x in arrays():
        np.testing.assert_array_equal(outputs(outer, x, replay=True), 2 * x)
    inputs = arrays((64, 300)) * 5
    with ThreadPoolExecutor(4) as pool:
        for x, result in zip(inputs, pool.map(lambda x: outputs(doubled, x, replay=True), inputs), strict=True):
            np.testing.assert_array_equal(result, 2 * x)


def test_a_kernel_that_forgets() -> None:
    def kernel(x: Any) -> Any:
        replay.forget()
        return doubled(x)

    same(kernel, [(x,) for x in arrays()], runs=LAUNCHES)


def test_arrays_are_not_kept() -> None:
    kept = []
    for x in arrays():
        given = x.copy()
        result = outputs(doubled, given, replay=True)
        kept += [weakref.ref(given), weakref.ref(result)]
    del given, result
    gc.collect()
    assert [ref() is None for ref in kept] == [True] * len(kept)


def test_functions_are_not_kept() -> None:
    """What a kernel has closed over may be large."""

    def scaled_by(factors: Any) -> Any:
        def kernel(x: Any) -> Any:
            result = tile()
            nisa.tensor_scalar(dst=result, data=load(x), op0=nl.multiply, operand0=float(factors[0]))
            return store(result)

        return kernel

    kept = []
    for turn in range(3):
        factors = np.full(1000, float(turn))
        kernel = scaled_by(factors)
        kept.append(weakref.ref(factors))
        for x in arrays():
            np.testing.assert_array_equal(outputs(kernel, x, replay=True), np.float32(turn) * x)
    del factors, kernel
    outputs(doubled, arrays()[0], replay=True)
    gc.collect()
    assert [ref() is None for ref in kept] == [True] * len(kept)


def test_where_sums_have_begun_is_not_kept() -> None:
    """It is as large as the tiles are."""

    def tiles() -> list[Any]:
        return [one for one in gc.get_objects() if type(one) is Storage and one.region is nl.psum]

    gc.collect()
    before = tiles()
    for x in arrays()[:2]:
        outputs(accumulated, x, replay=True)
    gc.collect()
    made = [storage for storage in tiles() if storage not in before]
    assert made
    assert not any(storage.begun.size for storage in made)


def test_old_launches_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_MOST_STEPS", 4)
    counted = Counted(doubled)
    sizes = [(4, width) for width in (3, 4, 5)]
    for shape in sizes:
        for x in arrays(shape):
            np.testing.assert_array_equal(outputs(counted.kernel, x, replay=True), 2 * x)
    assert counted.runs == 2 * len(sizes), "the newest one stays"
    np.testing.assert_array_equal(outputs(counted.kernel, arrays(sizes[0])[0], replay=True), 2 * arrays(sizes[0])[0])
    assert counted.runs == 2 * len(sizes) + 1


def test_the_environment_turns_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    for value, runs in (("1", 2), ("0", LAUNCHES), ("", LAUNCHES)):
        monkeypatch.setenv("NKI_BN_REPLAY", value)
        counted = Counted(doubled)
        for x in arrays():
            np.testing.assert_array_equal(nki.simulate(counted.kernel)(x), 2 * x)
        assert counted.runs == runs
    monkeypatch.setenv("NKI_BN_REPLAY", "yes")
    with pytest.raises(ValueError, match="NKI_BN_REPLAY is 'yes'; accepted: 0, 1"):
        nki.simulate(doubled)(arrays()[0])
