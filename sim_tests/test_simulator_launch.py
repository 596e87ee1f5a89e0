# SPDX-License-Identifier: Apache-2.0
"""Launching kernels: forms of jit, arguments and results of every kind, the environment, and the trace a run leaves."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from launching import launch, load, nisa, nki, nl, outputs, store

from nki_bn.simulator import NkiValidationError, RunOptions, UnsupportedError
from nki_bn.simulator.memory import MemoryRegion

X = np.arange(12, dtype=np.float32).reshape(3, 4)
BF16 = np.dtype(ml_dtypes.bfloat16)


def copied(x: Any) -> Any:
    """Both cores may run it: core 0 writes."""
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    if nl.program_id(0) == 0:
        nisa.dma_copy(dst=out, src=load(x))
    return out


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NEURON_PLATFORM_TARGET_OVERRIDE", "NKI_PRECISE_FP"):
        monkeypatch.delenv(name, raising=False)


# --- forms of a launch ----------------------------------------------------------------------------


@nki.jit
def bare(x: Any) -> Any:
    """A documented kernel."""
    return copied(x)


@nki.jit()
def called(x: Any) -> Any:
    return copied(x)


@nki.jit(mode="auto")
def with_mode(x: Any) -> Any:
    return copied(x)


@pytest.mark.parametrize(
    "kernel",
    [
        bare,
        called,
        with_mode,
        nki.jit(copied),
        nki.jit(bare),
        bare[1],
        bare[2],
        bare[(2,)],
        nki.simulate(copied),
        nki.simulate(bare),
        nki.simulate(bare[2]),
        nki.simulate(copied)[2],
    ],
)
def test_every_form_of_a_kernel_runs(kernel: Any) -> None:
    np.testing.assert_array_equal(kernel(X), X)
    np.testing.assert_array_equal(kernel(x=X), X)


def test_a_kernel_keeps_the_face_of_its_function() -> None:
    assert bare.__name__ == "bare" and bare.__doc__ == "A documented kernel."
    assert list(inspect.signature(bare).parameters) == ["x"]


def test_the_grid_is_the_number_of_cores() -> None:
    def kernel(x: Any) -> int:
        return 10 * nl.num_programs(0) + nl.program_ndim()

    made = nki.jit(kernel)
    assert (made(X), made[1](X), made[2](X)) == (10, 10, 21)


@pytest.mark.parametrize("grid", [0, 3, -1])
def test_impossible_grids(grid: int) -> None:
    with pytest.raises(ValueError, match=f"lnc {grid} is not possible on trn3; accepted: 1 or 2"):
        bare[grid](X)


@pytest.mark.parametrize("grid", [(1, 2), 1.0, "2", True])
def test_a_grid_is_one_integer(grid: Any) -> None:
    with pytest.raises(TypeError, match="a kernel grid is one integer"):
        bare[grid]


def test_trn1_has_one_core() -> None:
    with pytest.raises(ValueError, match="lnc 2 is not possible on trn1; accepted: 1"):
        launch(copied, X, lnc=2, target="trn1")


def test_refused_calls() -> None:
    with pytest.raises(TypeError, match="bare was called without arguments"):
        bare()
    with pytest.raises(TypeError, match="NEURON_PLATFORM_TARGET_OVERRIDE"):
        nki.jit(copied, platform_target="trn2")
    with pytest.raises(TypeError, match="unexpected keyword arguments .*'debug'"):
        nki.jit(debug=True)
    with pytest.raises(TypeError, match="too many positional"):
        bare(X, X)
    for name in ("benchmark", "profile", "baremetal", "simulate_kernel"):
        with pytest.raises(UnsupportedError, match=f"nki.{name} is not part"):
            getattr(nki, name)


def test_instructions_need_a_running_kernel() -> None:
    with pytest.raises(RuntimeError, match="only while a kernel runs"):
        nl.ndarray((3, 4), nl.float32)


# --- arguments ------------------------------------------------------------------------------------


class Color(enum.Enum):
    red = 1


@dataclass(frozen=True)
class Config(nl.NKIObject):  # type: ignore[misc]
    size: int
    sizes: tuple[int, ...] = ()


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        2.5,
        "text",
        (1, (2, 3)),
        {"a": 1},
        Color.red,
        Config(3, (1, 2)),
        copied,
        nl.bfloat16,
        nl.add,
        nisa.engine.vector,
    ],
    ids=lambda value: getattr(value, "__name__", repr(value)),
)
def test_what_is_no_array_arrives_untouched(value: Any) -> None:
    found: list[Any] = []

    def kernel(x: Any, argument: Any, option: Any = None) -> None:
        found.extend([argument, option])

    launch(kernel, X, value)
    nki.jit(kernel)(X, 0, option=value)
    assert found[0] is value and found[3] is value


@pytest.mark.parametrize(
    "dtype",
    [
        np.float32,
        np.float16,
        BF16,
        np.int8,
        np.int16,
        np.int32,
        np.uint8,
        np.uint16,
        np.uint32,
        np.bool_,
        ml_dtypes.float8_e4m3,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e5m2,
    ],
)
def test_arrays_of_every_dtype(dtype: Any) -> None:
    x = (X - 3 if np.dtype(dtype).kind != "u" else X).astype(dtype)
    result = outputs(copied, x)
    assert result.dtype == x.dtype
    np.testing.assert_array_equal(result, x)


@pytest.mark.parametrize(("lnc", "region"), [(1, MemoryRegion.private_hbm), (2, MemoryRegion.shared_hbm)])
def test_arrays_arrive_as_hbm_tensors(lnc: int, region: MemoryRegion) -> None:
    def kernel(x: Any) -> None:
        assert (x.shape, x.dtype, x.buffer, x.name) == ((3, 4), nl.float32, region, "x")

    launch(kernel, X, lnc=lnc)


def test_arrays_among_variable_arguments() -> None:
    def kernel(*tensors: Any, **named: Any) -> Any:
        return tuple(copied(tensor) for tensor in (*tensors, named["last"]))

    first, second, third = nki.jit(kernel)(X, X + 1, last=X + 2)
    np.testing.assert_array_equal([first, second, third], [X, X + 1, X + 2])


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.uint64, np.complex64, object])
def test_arrays_without_an_nki_dtype_are_refused(dtype: Any) -> None:
    with pytest.raises(TypeError, match="no NKI counterpart; accepted: .*bfloat16"):
        launch(copied, X.astype(dtype))


def test_lists_scalars_and_empty_arrays_are_refused() -> None:
    with pytest.raises(TypeError, match="argument x is a list; kernels take tuples"):
        launch(copied, [1, 2])
    for shape in ((), (0,), (3, 0)):
        with pytest.raises(NkiValidationError, match="argument x has shape"):
            launch(copied, np.zeros(shape, np.float32))


LAYOUTS: dict[str, Callable[[], Any]] = {
    "contiguous": lambda: X.copy(),
    "transposed": lambda: np.ascontiguousarray(X.T).T,
    "strided": lambda: np.repeat(X, 2, 1)[:, ::2],
    "reversed": lambda: X[::-1].copy()[::-1],
    "fortran": lambda: np.asfortranarray(X),
    "big-endian": lambda: X.astype(">f4"),
    "unaligned": lambda: np.frombuffer(bytearray(b"0" + X.tobytes()), np.float32, offset=1).reshape(3, 4),
}


@pytest.mark.parametrize("precise_fp", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_of_any_layout_are_read_and_updated_in_place(layout: str, precise_fp: bool) -> None:
    def kernel(x: Any) -> Any:
        before = copied(x)
        tile = nl.ndarray((1, 4), nl.float32)
        nisa.memset(tile, -1.0)
        nisa.dma_copy(dst=x[1], src=tile)
        return before

    x = LAYOUTS[layout]()
    np.testing.assert_array_equal(outputs(kernel, x, precise_fp=precise_fp), X)
    np.testing.assert_array_equal(x, [X[0], [-1] * 4, X[2]])


def test_boolean_inputs_are_updated_in_place() -> None:
    def kernel(x: Any) -> None:
        tile = nl.ndarray((1, 4), nl.uint8)
        nisa.memset(tile, 1)
        nisa.dma_copy(dst=x[1], src=tile)

    for x in (np.zeros((3, 4), np.bool_), np.zeros((4, 3), np.bool_).T):
        launch(kernel, x)
        np.testing.assert_array_equal(x, [[False] * 4, [True] * 4, [False] * 4])


def test_read_only_inputs_are_read_and_never_changed() -> None:
    def kernel(x: Any) -> Any:
        tile = load(x)
        nisa.memset(tile[:, 0:1], -1.0)
        nisa.dma_copy(dst=x, src=tile)
        return x

    x = X.copy()
    x.flags.writeable = False
    np.testing.assert_array_equal(outputs(copied, x), X)
    np.testing.assert_array_equal(outputs(kernel, x)[:, 0], [-1, -1, -1])
    np.testing.assert_array_equal(x, X)


# --- results --------------------------------------------------------------------------------------


def test_results_keep_the_structure_that_was_returned() -> None:
    def kernel(x: Any) -> Any:
        out = copied(x)
        return out, None, 3, (out.reshape((4, 3)), x)

    first, nothing, three, (reshaped, given) = outputs(kernel, X)
    assert nothing is None and three == 3
    np.testing.assert_array_equal(first, X)
    np.testing.assert_array_equal(reshaped, X.reshape(4, 3))
    np.testing.assert_array_equal(given, X)


def test_a_result_is_not_the_memory_of_an_input() -> None:
    x = X.copy()
    result = outputs(lambda x: x, x)
    result[:] = 0
    np.testing.assert_array_equal(x, X)


@pytest.mark.parametrize("buffer", [nl.sbuf, nl.psum, nl.private_hbm])
def test_results_live_in_shared_hbm(buffer: Any) -> None:
    with pytest.raises(NkiValidationError, match="is returned but not in shared_hbm"):
        launch(lambda x: nl.ndarray(x.shape, x.dtype, buffer=buffer), X)


def test_core_0_returns_the_result() -> None:
    assert launch(lambda x: nl.program_id(0) + 5, X, lnc=2).outputs == 5


# --- torch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", ["float32", "float16", "bfloat16", "int32", "uint8", "bool", "float8_e5m2", "float8_e4m3fn"]
)
def test_torch_in_torch_out(dtype: str) -> None:
    x = torch.arange(12).reshape(3, 4).to(getattr(torch, dtype))
    result = outputs(copied, x)
    assert isinstance(result, torch.Tensor) and result.dtype == x.dtype
    assert torch.equal(result.to(torch.float32), x.to(torch.float32))


def test_torch_parameters_are_read_and_updated_in_place() -> None:
    def kernel(x: Any) -> Any:
        tile = load(x)
        nisa.memset(tile[:, 0:1], -1.0)
        nisa.dma_copy(dst=x, src=tile)
        return x

    for x in (torch.nn.Parameter(torch.ones(3, 4)), torch.ones(4, 3, dtype=torch.bfloat16).T):
        result = outputs(kernel, x)
        assert torch.equal(x[:, 0].detach().float(), torch.full((3,), -1.0)) and torch.equal(result, x.detach())
        assert not result.requires_grad


def test_64_bit_torch_tensors_are_refused() -> None:
    with pytest.raises(TypeError, match="no NKI counterpart"):
        launch(copied, torch.ones(3, dtype=torch.float64))


# --- environment ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "version"),
    [(None, "gen4"), ("trn1", "gen2"), ("inf2", "gen2"), ("gen3", "gen3"), ("trn2", "gen3"), ("trn3", "gen4")],
)
def test_the_environment_chooses_the_target(monkeypatch: pytest.MonkeyPatch, value: str | None, version: str) -> None:
    if value is not None:
        monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", value)
    seen: list[Any] = []
    nki.jit(lambda x: seen.append(nisa.get_nc_version()))(X)
    assert seen == [nisa.nc_version[version]] and nisa.get_nc_version() is nisa.nc_version[version]
    assert nisa.get_nc_sub_version() == 0


def test_an_unknown_target_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn9")
    with pytest.raises(ValueError, match="NEURON_PLATFORM_TARGET_OVERRIDE: target 'trn9' is unknown; accepted: trn1"):
        bare(X)
    with pytest.raises(ValueError, match="NEURON_PLATFORM_TARGET_OVERRIDE: target 'trn9'"):
        _ = nl.tile_size.pmax, nl.tile_size.sbuf_fmax


@pytest.mark.parametrize(("value", "rounds"), [(None, True), ("1", True), ("0", False)])
def test_the_environment_switches_rounding(monkeypatch: pytest.MonkeyPatch, value: str | None, rounds: bool) -> None:
    if value is not None:
        monkeypatch.setenv("NKI_PRECISE_FP", value)

    def kernel(x: Any) -> Any:
        narrow, wide = nl.ndarray(x.shape, nl.bfloat16), nl.ndarray(x.shape, nl.float32)
        nisa.tensor_copy(dst=narrow, src=load(x))
        nisa.tensor_copy(dst=wide, src=narrow)
        return store(wide)

    x = X + np.float32(1 / 3)
    np.testing.assert_array_equal(nki.jit(kernel)(x), x.astype(BF16).astype(np.float32) if rounds else x)


def test_options_of_a_simulation_go_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn1")
    simulated = nki.simulate(lambda x: nisa.get_nc_version().name, RunOptions(target="trn2"))
    assert simulated(X) == "gen3"


@pytest.mark.parametrize("options", [{"target": "trn4"}, {"numerics": "exact"}, {"accumulate": "random"}])
def test_unknown_options_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="is unknown; accepted"):
        RunOptions(**options)  # type: ignore[arg-type]


def test_generations_are_ordered() -> None:
    gen2, gen3, gen4 = nisa.nc_version
    assert gen2 < gen3 < gen4 and gen4 >= gen3 and gen3 == nisa.nc_version.gen3 and max(nisa.nc_version) is gen4


# --- names ----------------------------------------------------------------------------------------

EXECUTED = """
dma_copy dma_transpose tensor_copy tensor_copy_predicated memset iota affine_select nc_transpose
nc_stream_shuffle sendrecv core_barrier nc_matmul tensor_tensor tensor_scalar scalar_tensor_tensor
tensor_scalar_reduce tensor_scalar_cumulative tensor_tensor_scan select_reduce reciprocal activation
activation_reduce tensor_reduce tensor_partition_reduce bn_stats bn_aggr register_alloc register_move
register_load register_store get_nc_version get_nc_sub_version NkiInstruction NkiValidationError
VirtualRegister engine reduce_cmd dge_mode oob_mode dma_engine nc_version matmul_perf_mode
dma_compute exponential activate2
range_select max8 nc_find_index8 nc_match_replace8 rng set_rng_seed rand_set_state rand_get_state rand2 dropout
local_gather nc_n_gather sequence_bounds nonzero_with_count
""".split()
REFUSED = """
nc_matmul_mx quantize_mx topk
""".split()
COLLECTIVES = ("all_gather_v", "all_to_all_v")


def test_every_documented_name_of_nki_isa_exists() -> None:
    names = {*EXECUTED, *REFUSED, "tensor_engine", "vector_engine", "scalar_engine", "gpsimd_engine", "unknown_engine"}
    assert names == set(nisa.__all__) and all(hasattr(nisa, name) for name in names)
    assert nisa.scalar_engine is nisa.engine.scalar and nisa.unknown_engine is nisa.engine.unknown


@pytest.mark.parametrize("name", REFUSED)
def test_instructions_that_are_not_executed_say_their_name(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"nki.isa.{name} is documented, but"):
        launch(lambda x: getattr(nisa, name)(dst=x), X)


@pytest.mark.parametrize("name", ["nc_matmul_mx", "quantize_mx"])
def test_the_mx_formats_are_said_to_be_the_reason(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"nki.isa.{name} is documented, but .* no arithmetic on MX formats"):
        launch(lambda x: getattr(nisa, name)(dst=x), X)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_say_their_name(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"nki.collectives.{name} is documented, but"):
        getattr(nki.collectives, name)(srcs=[], dsts=[])


def test_replica_groups_do_not_overlap() -> None:
    assert nki.collectives.ReplicaGroup([[0, 1], [2, 3]]).groups == ((0, 1), (2, 3))
    with pytest.raises(ValueError, match="must not overlap"):
        nki.collectives.ReplicaGroup([[0, 1], [1, 2]])


def test_an_argument_without_a_counterpart_is_named() -> None:
    with pytest.raises(TypeError, match="argument x: dtype .*float64.* has no NKI counterpart"):
        launch(copied, X.astype(np.float64))
