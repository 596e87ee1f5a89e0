# SPDX-License-Identifier: Apache-2.0
"""Loops, queries, ordered regions, capacities, names and element types of nki.language."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launching import launch, nisa, nki, nl, outputs

from nki_bn.simulator import NkiValidationError, RunOptions, UnsupportedError, run
from nki_bn.simulator.dtypes import ALL_DTYPES

RNG = np.random.default_rng(9)
X = RNG.normal(size=(64, 40)).astype(np.float32)
Y = RNG.normal(size=(64, 40)).astype(np.float32)

# --- control ---------------------------------------------------------------------------------------------------------


def test_static_ranges_are_ranges() -> None:
    for function in (nl.affine_range, nl.sequential_range, nl.static_range):
        assert function(5) == range(5) and function(2, 9, 3) == range(2, 9, 3) and function(2, 4) == range(2, 4)


def test_slices() -> None:
    def kernel(x: Any) -> None:
        assert x[nl.ds(8, 16), nl.ds(0, 40)].shape == (16, 40) and x[nl.ds(8, 16)].offset == 8 * 40
        assert x[nl.ds(-2, 2)].offset == 62 * 40
        with pytest.raises(NkiValidationError, match="out of range"):
            x[nl.ds(60, 5)]

    launch(kernel, X)
    with pytest.raises(TypeError, match="ds size must be an integer"):
        nl.ds(0, 2.0)
    with pytest.raises(NkiValidationError, match="at least 1"):
        nl.ds(0, 0)


@pytest.mark.parametrize("lnc", [1, 2])
def test_program_queries(lnc: int) -> None:
    def kernel(x: Any) -> Any:
        out = nl.ndarray((lnc, 3), nl.int32, buffer=nl.shared_hbm)
        for column, value in enumerate((nl.program_id(0), nl.num_programs(), nl.program_ndim())):
            nl.store(out[nl.program_id(), column].reshape((1, 1)), nl.full((1, 1), value, nl.int32))
        with pytest.raises(NkiValidationError, match="axis"):
            nl.program_id(1)
        return out

    np.testing.assert_array_equal(outputs(kernel, X, lnc=lnc), [[core, lnc, int(lnc > 1)] for core in range(lnc)])


def test_no_reorder_chains_the_instructions_inside() -> None:
    def helper(tile: Any) -> None:
        nisa.memset(tile, 2.0)

    def kernel(x: Any) -> None:
        tile = nl.ndarray((4, 4), nl.float32)
        nisa.memset(tile, 0.0)
        with nl.no_reorder():
            nisa.memset(tile, 1.0)
            for _ in range(2):
                helper(tile)
            with nl.no_reorder():
                nisa.memset(tile, 3.0)
        nisa.memset(tile, 4.0)

    assert [record.after for record in launch(kernel, X).trace] == [[], [], [1], [2], [3], []]


def test_no_reorder_ends_with_an_exception() -> None:
    def kernel(x: Any) -> None:
        tile = nl.ndarray((4, 4), nl.float32)
        with pytest.raises(ValueError), nl.no_reorder():
            nisa.memset(tile, 1.0)
            raise ValueError
        nisa.memset(tile, 0.0)

    assert [record.after for record in launch(kernel, X).trace] == [[], []]


def test_counted_loops_index_tensors_at_run_time() -> None:
    def kernel(x: Any) -> Any:
        out = nl.zeros(x.shape, nl.float32, buffer=nl.shared_hbm)
        upper = nisa.register_alloc(50)

        def body(i: Any, name: str = "load") -> None:
            # One name for all iterations: a body is compiled once.
            row = nl.ndarray((1, 40), nl.float32, name=f"row_{name}")
            nisa.dma_copy(dst=row, src=x.ap([[40, 1], [1, 40]], scalar_offset=i), name=name)
            nisa.dma_copy(dst=out.ap([[40, 1], [1, 40]], scalar_offset=i), src=row)

        nl.fori_loop(10, upper, body, step=3)
        for i in nl.dynamic_range(2):
            body(i, "load_again")
        return out

    with pytest.warns(DeprecationWarning, match="fori_loop"):
        result = outputs(kernel, X)
    rows = [0, 1, *range(10, 50, 3)]
    np.testing.assert_array_equal(result[rows], X[rows])
    assert not np.delete(result, rows, axis=0).any()


def test_while_loop_runs_until_its_register_is_zero() -> None:
    def kernel(count: Any) -> Any:
        left, total = nl.load(count), nl.zeros((1, 1), nl.int32)
        one = nl.ones((1, 1), nl.int32)

        def body(register: Any) -> Any:
            nisa.tensor_tensor(dst=total, data1=total, data2=left, op=nl.add, name="sum")
            nisa.tensor_tensor(dst=left, data1=left, data2=one, op=nl.subtract)
            nisa.register_load(register, left)
            return register

        nl.while_loop(nisa.register_alloc(left), body)
        out = nl.ndarray((1, 1), nl.int32, buffer=nl.shared_hbm)
        nl.store(out, total)
        return out

    for count in (0, 4):
        assert outputs(kernel, np.array([[count]], np.int32))[0, 0] == count * (count + 1) // 2


def test_rules_of_device_loops() -> None:
    def kernel(x: Any) -> None:
        for step in (0, -1, 1.0, True):
            with pytest.raises(AssertionError, match="step must be a positive integer"):
                nl.fori_loop(0, 3, lambda i: None, step=step)
        with pytest.raises(NkiValidationError, match="must return nothing"):
            nl.fori_loop(0, 3, lambda i: i)
        with pytest.raises(NkiValidationError, match="no_reorder"), nl.no_reorder():
            nl.fori_loop(0, 3, lambda i: None)
        with pytest.raises(NkiValidationError, match="no_reorder"), nl.no_reorder():
            nl.while_loop(nisa.register_alloc(1), lambda r: r)
        with pytest.raises(AssertionError, match="frozen"):
            nl.fori_loop(0, 3, lambda i: nisa.register_move(i, 1))
        with pytest.raises(TypeError, match="bounds"):
            nl.fori_loop(0, 3.0, lambda i: None)
        with pytest.raises(TypeError, match="must be a register"):
            nl.while_loop(1, lambda r: r)
        for empty in (
            lambda: nl.while_loop(nisa.register_alloc(), lambda r: r),
            lambda: nl.fori_loop(0, nisa.register_alloc(), lambda i: None),
        ):
            with pytest.raises(NkiValidationError, match="without value"):
                empty()
        with pytest.raises(TypeError, match="unknown when a kernel is compiled"):
            nl.fori_loop(0, 3, lambda i: [None][i])

    launch(kernel, X)


def test_device_print(capsys: Any) -> None:
    def kernel(x: Any) -> None:
        nl.device_print("from hbm", x)
        nl.device_print("from sbuf", nl.load(x))
        with pytest.raises(NkiValidationError, match="psum"):
            nl.device_print("p", nl.ndarray((4, 4), nl.float32, buffer=nl.psum))
        with pytest.raises(TypeError, match="print_prefix"):
            nl.device_print(x, x)

    launch(kernel, np.array([[1.5, -2.5]], np.float32))
    printed = capsys.readouterr().out
    assert printed.count("1.5") == 2 and "from hbm" in printed and "from sbuf" in printed


# --- names, targets, element types -----------------------------------------------------------------------------------


def test_tile_sizes_follow_the_target() -> None:
    seen: dict[str, tuple[int, ...]] = {}

    def kernel(x: Any) -> None:
        size = nl.tile_size
        seen["now"] = (size.sbuf_size_bytes, size.sbuf_fmax_bytes, size.total_available_sbuf_size, size.sbuf_fmax)

    table = ("trn1", 25165824, 180224), ("trn2", 29360128, 212984), ("trn3", 33554432, 245752)
    for target, total, partition in table:
        launch(kernel, X, target=target)
        assert seen["now"] == (total, partition, partition, partition // 4)
    size = nl.tile_size
    assert (size.pmax, size.psum_bank_fmax, size.psum_fmax, size.psum_bank_fmax_bytes) == (128, 512, 512, 2048)
    assert (size.gemm_stationary_fmax, size.gemm_moving_fmax, size.bn_stats_fmax) == (128, 512, 512)
    assert (size.psum_min_align, size.sbuf_min_align) == (4, 1)


def test_tile_sizes_outside_a_kernel_follow_the_environment(monkeypatch: Any) -> None:
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "gen3")
    assert nl.tile_size.sbuf_fmax_bytes == 212984 and nl.tile_size.psum_num_banks == 8
    monkeypatch.setenv("NKI_DMA_TRANSPOSE_AS_PE_TRANSPOSE", "true")
    assert nl.tile_size.psum_num_banks == 7
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn1")
    assert nl.tile_size.psum_num_banks == 8


def test_element_types_are_strings_that_name_themselves() -> None:
    for name in ALL_DTYPES:
        dtype = getattr(nl, name)
        assert dtype == name and getattr(nl, str(dtype).split(".")[-1]) is dtype
    assert nl.DType is str and nki.dtype is str
    assert nl.float32 in {nl.float32: 1} and nl.bfloat16 not in (nl.float32, nl.float16)
    assert hash(nl.int8) == hash("int8")


DOCUMENTED = """
MemoryRegion NKIObject NkiTensor DType sbuf psum hbm private_hbm shared_hbm is_hbm is_on_chip is_psum is_sbuf tile_size
ndarray zeros ones full zeros_like empty_like rand random_seed shared_constant shared_identity_matrix
alloc_tiles alloc_blocks load store copy load_transpose2d gather_flattened transpose broadcast_to expand_dims ds
add subtract multiply divide maximum minimum abs_max abs_min power equal not_equal less less_equal greater greater_equal
bitwise_and bitwise_or bitwise_xor left_shift right_shift logical_and logical_or logical_xor fmod mod
abs square invert logical_not exp log sqrt rsqrt tanh sigmoid relu gelu gelu_apprx_sigmoid gelu_apprx_tanh gelu_dx
gelu_apprx_sigmoid_dx silu silu_dx softplus mish erf erf_dx reciprocal sin cos tan arctan ceil floor trunc negative sign
average prelu bypass sum max min mean prod var all softmax rms_norm where dropout matmul
affine_range sequential_range static_range dynamic_range fori_loop while_loop no_reorder program_id num_programs
program_ndim device_print
""".split()


def test_exactly_the_documented_names_are_there() -> None:
    assert sorted(nl.__all__) == sorted({*DOCUMENTED, *ALL_DTYPES})
    for name in nl.__all__:
        value = getattr(nl, name)
        if inspect.isfunction(value):
            assert value.__doc__ and value.__name__ == name


def test_documented_names_that_are_not_executed_refuse_by_name() -> None:
    for name in ("alloc_tiles", "alloc_blocks"):
        with pytest.raises(UnsupportedError, match=f"nki.language.{name}"):
            getattr(nl, name)(tile_shape=(1, 1))


def test_names_are_usable_while_modules_are_imported_outside_any_kernel() -> None:
    program = (
        "import nki_bn\n"
        "import nki, nki.language as nl, nki.isa as nisa, nki.typing as nt\n"
        "from nki.isa import reduce_cmd\n"
        "from nki.isa.constants import dge_mode, oob_mode\n"
        "from nki.language import NKIObject, affine_range\n"
        "from typing import Optional, Tuple\n"
        "TILE = nl.tile_size.pmax * 4\n"
        "LIMITS = {nl.float8_e4m3: 240.0, nl.float32: 1.0}\n"
        "ACTIVATIONS = {0: nl.silu, 1: nl.gelu}\n"
        "def kernel(x: nl.ndarray, y: nt.tensor[4, nl.tile_size.pmax], z: nt.mutable_tensor,\n"
        "           dtype: nki.dtype = nl.bfloat16, w: Optional[nl.ndarray] = None,\n"
        "           ) -> nl.ndarray | Tuple[nl.ndarray, nl.NkiTensor]: ...\n"
        "print(TILE, kernel.__annotations__['dtype'].__name__)\n"
    )
    # Not from the root, where Python would find the sources and not the installed package.
    where = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=where, check=False)
    assert (done.returncode, done.stdout) == (0, "512 str\n"), done.stderr


def test_tensors_and_instructions_need_a_running_kernel() -> None:
    functions = lambda: nl.ndarray((4, 4), nl.float32), lambda: nl.program_id(0), lambda: nl.no_reorder().__enter__()
    for function in functions:
        with pytest.raises(RuntimeError, match="only while a kernel runs"):
            function()


def test_variable_arguments_become_tensors() -> None:
    def kernel(*tensors: Any, **named: Any) -> Any:
        out = nl.ndarray((2, *tensors[0].shape), nl.float32, buffer=nl.shared_hbm)
        nl.store(out[0], nl.add(nl.load(tensors[0]), nl.load(tensors[1])))
        nl.store(out[1], nl.load(named["last"]))
        return out

    result = run(kernel, (X, Y), {"last": Y}, 1, RunOptions()).outputs
    np.testing.assert_array_equal(result, np.stack([X + Y, Y]))
