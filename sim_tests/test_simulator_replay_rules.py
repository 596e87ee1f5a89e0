# SPDX-License-Identifier: Apache-2.0
"""Which launches repeat earlier ones: like ones, in which no value decides anything; and what such launches refuse."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from launching import VENDOR, load, nisa, nl, outputs, store
from repeating import LAUNCHES, Counted, arrays, doubled, same, tile

from nki_bn.simulator import NkiValidationError, RaceError, replay

pytestmark = pytest.mark.skipif(VENDOR, reason="only the embedded simulator repeats launches")


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    replay.forget()
    yield
    replay.forget()


# --- what counts as the same launch -----------------------------------------------------------------


def scaled(x: Any, factor: Any) -> Any:
    result = tile(x.shape)
    nisa.tensor_scalar(dst=result, data=load(x), op0=nl.multiply, operand0=factor if factor is not True else 7)
    return store(result)


def test_other_constants_are_other_launches() -> None:
    x = arrays()[0]
    for factor in [1, 1.0, True, 2.0, -0.0, 0.0, np.float32(3), np.float32(4)] * LAUNCHES:
        expected = x * np.float32(7 if factor is True else factor)
        assert outputs(scaled, x, factor, replay=True).tobytes() == expected.tobytes()


def test_other_arrays_cores_and_options_are_other_launches() -> None:
    counted = Counted(doubled)
    for _ in range(LAUNCHES):
        outputs(counted.kernel, arrays()[0], replay=True)
        outputs(counted.kernel, arrays((4, 5))[0], replay=True)
        outputs(counted.kernel, arrays(dtype=np.float16)[0], replay=True)
        outputs(counted.kernel, arrays()[0], replay=True, strict=False)
        outputs(counted.kernel, torch.from_numpy(arrays()[0]), replay=True)
    assert counted.runs == 5 * 2


@dataclass(frozen=True)
class Plan(nl.NKIObject):
    """Not an array, though it has a shape and a dtype."""

    shape: tuple[int, ...]
    dtype: str
    factor: float


class Bits(enum.IntFlag):
    """Values without names, as flags of integers have them."""

    ONE = 1


class Named(tuple[int, ...]):
    factor: float


@dataclass
class Measured(float):
    """A number that has a field beside."""

    unit: str

    def __new__(cls, value: float, unit: str) -> Measured:
        return float.__new__(cls, value)

    def __init__(self, value: float, unit: str) -> None:
        self.unit = unit


class Slot:
    __slots__ = ("factor",)


@dataclass
class Slotted(Slot):
    __slots__ = ("unit",)
    unit: str


READERS: dict[str, Callable[[Any], float]] = {
    "object": lambda value: value.factor,
    "dataclass": lambda value: value.more,
    "named": lambda value: value.factor,
    "measured": float,
    "slotted": lambda value: value.factor,
    "tuple": lambda value: value[0][0],
}


def test_other_plans_are_other_launches() -> None:
    def kernel(x: Any, plan: Any) -> Any:
        return scaled(x, plan.factor)

    counted, x = Counted(kernel), arrays()[0]
    for factor in [1.0, 2.0] * LAUNCHES:
        plan = Plan((4, 6), "float32", factor)
        np.testing.assert_array_equal(outputs(counted.kernel, x, plan, replay=True), np.float32(factor) * x)
    assert counted.runs == 2 * 2


def test_arguments_that_cannot_be_compared_are_never_repeated() -> None:
    """Objects of other classes, dataclasses and tuples with more than their fields, arrays inside of tuples."""

    class Factors:
        def __init__(self, value: float) -> None:
            self.factor = value

    def extended(value: float) -> Plan:
        plan = Plan((4, 6), "float32", 0.0)
        object.__setattr__(plan, "more", value)
        return plan

    def marked(value: float, made: Any) -> Any:
        made.factor = value
        return made

    def kernel(x: Any, value: Any, read: Any) -> Any:
        return scaled(x, float(READERS[read](value)))

    x = arrays()[0]
    makers = {
        "object": Factors,
        "dataclass": extended,
        "named": lambda value: marked(value, Named((1,))),
        "measured": lambda value: Measured(value, "m"),
        "slotted": lambda value: marked(value, Slotted("m")),
        "tuple": lambda value: (np.full(3, value),),
    }
    for read, make in makers.items():
        for value in (8.0, 8.0, 8.0, 16.0):
            np.testing.assert_array_equal(outputs(kernel, x, make(value), read, replay=True), np.float32(value) * x)


def test_flags_without_names_are_told_apart() -> None:
    def kernel(x: Any, value: Any) -> Any:
        return scaled(x, int(value))

    counted, x = Counted(kernel), arrays()[0]
    for bits in [8, 16] * LAUNCHES:
        np.testing.assert_array_equal(outputs(counted.kernel, x, Bits(bits), replay=True), np.float32(bits) * x)
    assert counted.runs == 2 * 2


# --- what is not repeated ---------------------------------------------------------------------------


def by_register(x: Any, index: Any) -> Any:
    register = nisa.register_alloc()
    nisa.register_load(dst=register, src=index)
    row = tile((1, 6))
    nisa.dma_copy(dst=row, src=x.ap([[6, 1], [1, 6]], scalar_offset=register, indirect_dim=0))
    return store(row)


def test_a_register_decides() -> None:
    same(by_register, [(x, np.int32([[at]])) for at, x in enumerate(arrays())], runs=LAUNCHES)


def test_partials_keep_their_arguments() -> None:
    x = arrays()[0]
    for factor in (2.0, 3.0):
        for _ in range(LAUNCHES):
            result = outputs(functools.partial(scaled, factor=factor), x, replay=True)
            np.testing.assert_array_equal(result, np.float32(factor) * x)


def test_why_launches_are_not_repeated() -> None:
    for x in arrays():
        outputs(doubled, x, replay=True)
        outputs(by_register, x, np.int32([[0]]), replay=True)
    assert list(replay.refusals()) == ["by_register"]
    assert "the register that holds NkiTensor(index" in replay.refusals()["by_register"]


def test_rows_that_indices_choose() -> None:
    def kernel(x: Any, rows: Any) -> Any:
        result, chosen = tile(), load(rows)
        nisa.dma_copy(dst=result, src=x.ap([[6, 4], [1, 6]], vector_offset=chosen, indirect_dim=0))
        return store(result)

    same(kernel, [(x, np.int32([[at], [0], [3], [1]])) for at, x in enumerate(arrays())], runs=LAUNCHES)


def test_masked_writes_to_new_memory() -> None:
    def kernel(x: Any, predicate: Any) -> Any:
        result = tile()
        nisa.tensor_copy_predicated(dst=result, src=load(x), predicate=load(predicate))
        return store(result)

    everywhere = np.ones((4, 6), np.uint8)
    nowhere = np.zeros((4, 6), np.uint8)
    inputs = [(x, mask) for x, mask in zip(arrays(), (everywhere, everywhere, nowhere, everywhere), strict=True)]
    same(kernel, inputs, runs=LAUNCHES, strict=False)


def test_masked_writes_decide_to_what_a_product_adds() -> None:
    """All bytes are written, through another tile at the same address."""

    def kernel(x: Any, predicate: Any) -> Any:
        data, chosen = load(x), load(predicate)
        nisa.memset(dst=nl.ndarray((6, 6), "float32", buffer=nl.psum, address=(0, 0)), value=5.0)
        sums = nl.ndarray((6, 6), "float32", buffer=nl.psum, address=(0, 0))
        nisa.tensor_copy_predicated(dst=sums, src=1.0, predicate=chosen)
        nisa.nc_matmul(dst=sums, stationary=data, moving=data)
        return store(sums)

    rng = np.random.default_rng(0)
    same(kernel, [(x, rng.integers(0, 2, (6, 6)).astype(np.uint8)) for x in arrays()], runs=LAUNCHES)


@dataclass
class Found:
    """What a kernel may leave in an argument."""

    factor: float = 2.0


def test_arguments_that_a_kernel_changes() -> None:
    def kernel(x: Any, found: Any) -> Any:
        if isinstance(found, dict):
            found["factor"] = 3.0
        else:
            found.factor = 3.0
        return doubled(x)

    for x in arrays():
        found, names = Found(), {"factor": 2.0}
        for given in (found, names):
            np.testing.assert_array_equal(outputs(kernel, x, given, replay=True), 2 * x)
        assert found.factor == names["factor"] == 3.0


def test_results_that_are_objects_of_python() -> None:
    def kernel(x: Any, found: Any) -> Any:
        return doubled(x), found, {"factor": 2.0}

    for x in arrays():
        given = Found()
        result, found, made = outputs(kernel, x, given, replay=True)
        np.testing.assert_array_equal(result, 2 * x)
        assert found is given
        assert made == {"factor": 2.0}
        made.clear()


def test_numbers_and_strings_among_the_results() -> None:
    def kernel(x: Any) -> Any:
        return doubled(x), (None, 1, [2.5, "text"], True)

    counted = Counted(kernel)
    for x in arrays():
        result, others = outputs(counted.kernel, x, replay=True)
        np.testing.assert_array_equal(result, 2 * x)
        assert others == (None, 1, (2.5, "text"), True)
    assert counted.runs == 2


def test_unwritten_memory_that_a_lenient_run_reads() -> None:
    def kernel(x: Any) -> Any:
        data = tile()
        nisa.dma_copy(dst=data[:, 0:3], src=x[:, 0:3])
        return store(data)

    same(kernel, [(x,) for x in arrays()], runs=LAUNCHES, strict=False)


def test_incomplete_outputs_of_a_lenient_run() -> None:
    def kernel(x: Any) -> Any:
        out = nl.ndarray((4, 6), "float32", buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out[0:2], src=x[0:2])
        return out

    same(kernel, [(x,) for x in arrays()], runs=LAUNCHES, strict=False)


def test_tiles_without_room_in_a_lenient_run() -> None:
    def kernel(x: Any) -> Any:
        large = tile((4, 40_000))
        other = tile((4, 40_000))
        nisa.memset(dst=large, value=1.0)
        nisa.memset(dst=other, value=2.0)
        result = tile()
        nisa.tensor_tensor(dst=result, data1=large[:, 0:6], data2=load(x), op=nl.add)
        nisa.tensor_tensor(dst=result, data1=result, data2=other[:, 0:6], op=nl.add)
        return store(result)

    with pytest.warns(UserWarning, match="spill"):
        same(kernel, [(x,) for x in arrays()], runs=LAUNCHES, strict=False)


def test_both_cores_write_the_same_values_or_not() -> None:
    """Whether that is a race depends on the values."""

    def kernel(x: Any) -> Any:
        out = nl.ndarray(x.shape[1:], "float32", buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=load(x[nl.program_id(0)]))
        return out

    for x in arrays():
        twice = np.stack([x, x])
        np.testing.assert_array_equal(outputs(kernel, twice, lnc=2, strict=False, replay=True), x)
    twice[1] += 1
    with pytest.raises(RaceError):
        outputs(kernel, twice, lnc=2, strict=False, replay=True)


def test_a_constant_that_is_written() -> None:
    def kernel(x: Any) -> Any:
        constant = nl.shared_constant(np.ones((4, 6), np.float32))
        result = tile()
        nisa.tensor_tensor(dst=result, data1=load(constant), data2=load(x), op=nl.add)
        nisa.dma_copy(dst=constant, src=result)
        return store(result)

    same(kernel, [(x,) for x in arrays()], runs=LAUNCHES)


def test_device_print_prints_every_time(capsys: pytest.CaptureFixture[str]) -> None:
    def kernel(x: Any) -> Any:
        data = load(x)
        nl.device_print("data", data)
        return store(data)

    for x in arrays():
        outputs(kernel, x, replay=True)
    assert capsys.readouterr().out.count("data [core 0]") == LAUNCHES


def test_a_kernel_that_goes_on_after_a_tile_found_no_place() -> None:
    def kernel(x: Any) -> Any:
        with pytest.raises(NkiValidationError):
            tile((4, 100_000), address=(0, 0))
        return doubled(x)

    same(kernel, [(x,) for x in arrays()], runs=LAUNCHES)


# --- errors -----------------------------------------------------------------------------------------


def test_values_that_an_instruction_refuses() -> None:
    """The error is that of a simulation, and the next launch is not harmed."""

    def kernel(x: Any, identity: Any) -> Any:
        turned, result = nl.ndarray((4, 4), "float32", buffer=nl.psum), tile((4, 4))
        nisa.nc_matmul(dst=turned, stationary=load(x), moving=load(identity), is_transpose=True)
        nisa.tensor_copy(dst=result, src=turned)
        return store(result)

    for x in arrays((4, 4)):
        with pytest.raises(NkiValidationError, match="needs an identity as moving"):
            outputs(kernel, x, x, replay=True)
        np.testing.assert_array_equal(outputs(kernel, x, np.eye(4, dtype=np.float32), replay=True), x.T)


@pytest.mark.parametrize("scales", [(1, 1, 1, 2), (2, 2, 1, 2), (1, 2, 1, 2), (2, 1, 1, 2)])
def test_a_kernel_that_goes_on_after_a_value_is_refused(scales: tuple[int, ...]) -> None:
    def kernel(x: Any, identity: Any) -> Any:
        turned, result = nl.ndarray((4, 4), "float32", buffer=nl.psum), tile((4, 4))
        nisa.memset(dst=result, value=0.0)
        try:
            nisa.nc_matmul(dst=turned, stationary=load(x), moving=load(identity), is_transpose=True)
        except NkiValidationError:
            return store(result)
        nisa.tensor_copy(dst=result, src=turned)
        return store(result)

    for x, scale in zip(arrays((4, 4)), scales, strict=True):
        identity = scale * np.eye(4, dtype=np.float32)
        np.testing.assert_array_equal(outputs(kernel, x, identity, replay=True), x.T if scale == 1 else 0 * x)


def test_a_refused_value_after_an_argument_was_written() -> None:
    """It cannot be simulated anew: the error says what was refused."""

    def kernel(x: Any, identity: Any, out: Any) -> Any:
        turned = nl.ndarray((4, 4), "float32", buffer=nl.psum)
        nisa.dma_copy(dst=out, src=load(x))
        nisa.nc_matmul(dst=turned, stationary=load(x), moving=load(identity), is_transpose=True)
        return out

    for x in arrays((4, 4)):
        out = np.zeros_like(x)
        outputs(kernel, x, np.eye(4, dtype=np.float32), out, replay=True)
        np.testing.assert_array_equal(out, x)
    with pytest.raises(NkiValidationError, match="needs an identity as moving"):
        outputs(kernel, x, x, out, replay=True)
    np.testing.assert_array_equal(outputs(kernel, x, np.eye(4, dtype=np.float32), out, replay=True), x)


def test_a_failed_first_launch_is_forgotten() -> None:
    broken = [True]

    def kernel(x: Any) -> Any:
        if broken:
            raise ValueError("not yet")
        return doubled(x)

    counted = Counted(kernel)
    with pytest.raises(ValueError, match="not yet"):
        outputs(counted.kernel, arrays()[0], replay=True)
    broken.clear()
    for x in arrays():
        np.testing.assert_array_equal(outputs(counted.kernel, x, replay=True), 2 * x)
    assert counted.runs == 1 + 2


SIZES = {"columns": 6}


def by_global(x: Any) -> Any:
    data = load(x[:, 0 : SIZES["columns"]])
    return store(data)


def test_a_kernel_that_depends_on_a_global_is_found_out_if_its_tiles_change(monkeypatch: pytest.MonkeyPatch) -> None:
    x = arrays()[0]
    outputs(by_global, x, replay=True)
    monkeypatch.setitem(SIZES, "columns", 5)
    with pytest.raises(NkiValidationError, match="depends on its arguments alone"):
        outputs(by_global, x, replay=True)


def test_forgetting(monkeypatch: pytest.MonkeyPatch) -> None:
    x = arrays()[0]
    for _ in range(LAUNCHES):
        assert outputs(by_global, x, replay=True).shape == (4, 6)
    monkeypatch.setitem(SIZES, "columns", 5)
    assert outputs(by_global, x, replay=True).shape == (4, 6), "the condition is that of a compiler"
    replay.forget()
    assert outputs(by_global, x, replay=True).shape == (4, 5)
