# SPDX-License-Identifier: Apache-2.0
"""The backward kernel through the public function: every path, on the smallest shape that takes it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from agreement import assert_agrees, outputs_of
from hypothesis import given, settings
from hypothesis import strategies as st

from nki_bn import reference
from nki_bn.cases import Draw
from nki_bn.execute import simulation
from nki_bn.kernels.batch_norm_bwd import batch_norm_bwd as kernel
from nki_bn.planner import plan_backward, plan_staged
from nki_bn.problem import DTYPES, OUTPUTS, RELU_MODES
from nki_bn.requests import prepare_backward
from nki_bn.simulator import RunOptions, run

# One channel; less than a quadrant of partitions; the replicated counts 32 and 64; around one partition tile; a ragged
# second tile; four whole tiles.
CHANNELS = (1, 3, 32, 64, 127, 128, 129, 200, 512)


@pytest.mark.parametrize("relu", RELU_MODES)
@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_channels_cores_and_relu(dtype: str, channels: int, lnc: int, relu: str) -> None:
    assert_agrees(Draw((4, channels, 3, 5), dtype, mean=0.5).case(relu), lnc=lnc)


# All ways through a residual, on counts that take bands, two channel tiles, and one position.
@pytest.mark.parametrize("shape", [(4, 5, 3, 5), (4, 32, 7), (3, 129, 2), (5, 3)])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("relu", RELU_MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_residual(dtype: str, relu: str, training: bool, shape: tuple[int, ...]) -> None:
    """Its gradient is dy where the ReLU let the value pass, exactly."""
    case = Draw(shape, dtype, mean=0.5).case(relu, training, residual=True)
    for lnc in (1, 2):
        outputs = assert_agrees(case, lnc=lnc, residual_grad=True)
        assert len(outputs) == 4 and outputs[3].dtype == case.dy.dtype and outputs[3].shape == shape
        passed = np.ones(shape) if relu == "none" else outputs[3] != 0
        assert np.array_equal(outputs[3], np.where(passed, case.dy, 0)) and (passed.mean() < 1) == (relu != "none")


@pytest.mark.parametrize("training", [True, False])
def test_a_residual_is_read_only_to_recompute_a_mask(training: bool) -> None:
    """It is checked all the same; and asking for its gradient changes nothing in the others."""
    for relu in ("none", "mask"):
        case = Draw((4, 5, 6)).case(relu, training, residual=True)
        spoilt = replace(case, residual=np.full_like(case.x, np.nan))
        for got, want in zip(outputs_of(spoilt), outputs_of(case), strict=True):
            assert np.array_equal(got, want)
    case = Draw((4, 5, 6)).case("recompute", training, residual=True)
    assert len(outputs_of(case)) == 3
    for got, want in zip(outputs_of(case), outputs_of(case, residual_grad=True)[:3], strict=True):
        assert np.array_equal(got, want)
    assert not np.array_equal(outputs_of(case)[2], outputs_of(replace(case, residual=None))[2])


@pytest.mark.parametrize("relu", RELU_MODES)
def test_only_the_gradient_of_the_residual(relu: str) -> None:
    case = Draw((4, 5, 6)).case(relu, residual=True)
    dx, dgamma, dbeta, dresidual = outputs_of(case, need=(), residual_grad=True)
    assert dx is None and dgamma is None and dbeta is None
    assert np.array_equal(dresidual, outputs_of(case, residual_grad=True)[3])


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("numerics", ["trn2", "ideal"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numerics_modes(dtype: str, training: bool, numerics: str, lnc: int) -> None:
    for relu in RELU_MODES:
        assert_agrees(Draw((4, 5, 7), dtype, mean=2).case(relu, training), numerics, lnc=lnc)


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("channels", [3, 32, 64])
@pytest.mark.parametrize("lnc", [1, 2])
def test_batches_that_bands_and_cores_do_not_divide(batch: int, channels: int, lnc: int) -> None:
    assert_agrees(Draw((batch, channels, 3)).case("mask"), lnc=lnc)


@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 5), (6, 3, 5, 2), (6, 3, 5, 2, 2)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ranks(dtype: str, shape: tuple[int, ...]) -> None:
    dx, dgamma, dbeta = assert_agrees(Draw(shape, dtype).case())
    assert dx.shape == shape and dgamma.shape == dbeta.shape == (3,)


@pytest.mark.parametrize("spatial", [1, 49, 3136, 12545])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_spatial_sizes(dtype: str, batch: int, spatial: int) -> None:
    """Whole batches in a tile, one batch in several chunks, one batch in pieces that are no multiple of anything."""
    assert_agrees(Draw((batch, 2, spatial), dtype).case("recompute"))


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("relu", RELU_MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_more_tiles_than_slots(dtype: str, relu: str, lnc: int) -> None:
    """Few channels make long rows cheap: some tiles leave SBUF between the phases and come back."""
    case = Draw((9, 2, 12545), dtype).case(relu)
    plan = plan_staged(prepare_backward(case, lnc=lnc).problem)
    assert 9 * 12545 / lnc > plan.f_tile * plan.interleave
    assert_agrees(case, lnc=lnc)


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_more_tiles_than_slots_with_a_residual(dtype: str, lnc: int) -> None:
    """The residual takes room in every slot; its gradient leaves in the first phase."""
    case = Draw((9, 2, 12545), dtype).case("recompute", residual=True)
    plan = plan_staged(prepare_backward(case, residual_grad=True, lnc=lnc).problem)
    assert plan.residual and 9 * 12545 / lnc > plan.f_tile * plan.interleave
    assert_agrees(case, lnc=lnc, residual_grad=True)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_more_partials_than_one_group(dtype: str) -> None:
    """More than 512 chunks of one channel: the partial sums are added in two steps."""
    assert_agrees(Draw((140, 1, 9000), dtype).case(), lnc=1)


@pytest.mark.parametrize("accumulate", ["pairwise", "sequential"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_order_of_summation(dtype: str, accumulate: str) -> None:
    """One running float32 accumulator per chunk, on terms of one sign: still within its share of sum |terms|."""
    case = Draw((3, 2, 4099), dtype, mean=5).case()
    assert_agrees(case, accumulate=accumulate)
    assert_agrees(replace(case, dy=np.abs(case.dy)), accumulate=accumulate)


@pytest.mark.parametrize("need", [c for n in (1, 2, 3) for c in itertools.combinations(OUTPUTS, n)], ids="+".join)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("relu", RELU_MODES)
def test_needed_outputs_are_those_of_a_full_run(relu: str, training: bool, need: tuple[str, ...]) -> None:
    case = Draw((4, 5, 6)).case(relu, training)
    everything = dict(zip(OUTPUTS, outputs_of(case), strict=True))
    for name, output in zip(OUTPUTS, outputs_of(case, need=need), strict=True):
        assert (output is None) == (name not in need)
        assert output is None or np.array_equal(output, everything[name])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 3, 6), (5, 64, 3), (1, 129, 7), (3, 2, 1)])
def test_two_cores_change_nothing_but_rounding(shape: tuple[int, ...], dtype: str) -> None:
    case = Draw(shape, dtype, mean=1).case("mask")
    one, two = (assert_agrees(case, lnc=lnc) for lnc in (1, 2))
    unit = {"float32": 2.0**-18, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    want = reference.batch_norm_bwd(case.dy, case.x, case.mean, case.var, case.gamma, case.eps, case.relu_mask)
    for name, first, second in zip(OUTPUTS, one, two, strict=True):
        assert np.abs(np.float64(first) - np.float64(second)).max() <= unit * getattr(want, name).scale.max()


@pytest.mark.parametrize("shape", [(3, 1), (5, 1), (1, 1, 5), (3, 1, 7), (5, 1, 1, 3), (7, 3, 1), (2, 5, 13)])
def test_two_cores_of_which_one_has_less(shape: tuple[int, ...]) -> None:
    """The smaller share fills fewer bands, or takes more chunks."""
    for relu in RELU_MODES:
        assert_agrees(Draw(shape).case(relu), lnc=2)


def test_repeated_calls_give_the_same_bits() -> None:
    case = Draw((3, 4, 7)).case("recompute")
    for first, second in zip(outputs_of(case), outputs_of(case), strict=True):
        assert first.tobytes() == second.tobytes()


@pytest.mark.parametrize(("target", "lnc"), [("trn1", 1), ("trn2", 2), ("trn3", 2)])
def test_targets(target: str, lnc: int) -> None:
    assert_agrees(Draw((4, 5, 6)).case("mask"), lnc=lnc, target=target)


@pytest.mark.parametrize("relu", RELU_MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_given_plan_is_the_planners_choice(dtype: str, relu: str) -> None:
    case = Draw((4, 5, 6), dtype).case(relu)
    plan = plan_backward(prepare_backward(case).problem)
    for first, second in zip(outputs_of(case), outputs_of(case, plan=plan), strict=True):
        assert np.array_equal(first, second)


@pytest.mark.parametrize("lnc", [1, 2])
def test_the_bare_kernel_sizes_itself(lnc: int) -> None:
    case = Draw((4, 5, 1, 2, 3)).case("mask")
    assert case.gamma is not None and case.beta is not None
    columns = (case.mean, case.var, case.gamma[:, None], case.beta[:, None])
    result = run(kernel, (case.dy, case.x, *columns, case.eps, True, case.relu_mask), {}, lnc, RunOptions())
    staged = plan_staged(prepare_backward(case, lnc=lnc).problem)
    for bare, public in zip(result.outputs, outputs_of(case, lnc=lnc, plan=staged), strict=True):
        assert np.array_equal(bare.reshape(public.shape), public)


def test_simulation_options_end_with_their_block() -> None:
    """The same case in the two numerics modes differs in the last bits, and not after the block."""
    case = Draw((4, 5, 6)).case(training=False)
    default = outputs_of(case)
    with simulation(RunOptions(numerics="ideal")):
        pass
    ideal, after = outputs_of(case, "ideal"), outputs_of(case)
    assert np.array_equal(default[0], after[0]) and not np.array_equal(default[0], ideal[0])


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_random_problems(data: st.DataObject) -> None:
    draw = data.draw
    spatial: list[int] = draw(st.lists(st.integers(1, 9), max_size=3))
    shape = (draw(st.integers(1, 6)), draw(st.sampled_from([1, 2, 31, 32, 33, 64, 96, 130])), *spatial)
    dtype = draw(st.sampled_from(list(DTYPES)))
    mean = draw(st.sampled_from([0.0, 3.0, -40.0]))
    case = Draw(shape, dtype, mean, draw(st.sampled_from([0.05, 1.0, 30.0])), draw(st.integers(0, 99))).case(
        draw(st.sampled_from(RELU_MODES)), draw(st.booleans()), draw(st.sampled_from([1e-5, 1e-3]))
    )
    modes = draw(st.sampled_from(["trn2", "ideal"])), draw(st.sampled_from(["pairwise", "sequential"]))
    assert_agrees(case, *modes, lnc=draw(st.sampled_from([1, 2])))


@pytest.mark.nightly
@pytest.mark.parametrize("relu", RELU_MODES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "shape", [(32, 64, 112, 112), (32, 64, 56, 56), (32, 2048, 7, 7), (4096, 1024), (4, 64, 16, 56, 56)]
)
def test_layers_of_networks(shape: tuple[int, ...], dtype: str, relu: str) -> None:
    assert_agrees(Draw(shape, dtype, mean=0.2).case(relu))


def test_the_bare_kernel_refuses_a_negative_eps() -> None:
    x, column = np.ones((4, 5, 1, 2, 3), np.float32), np.ones(5, np.float32)
    with pytest.raises(AssertionError, match="eps must not be negative, got -1e-05"):
        run(kernel, (x, x, column, column, column[:, None], column[:, None], -1e-5), {}, 1, RunOptions())
