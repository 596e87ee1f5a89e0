# SPDX-License-Identifier: Apache-2.0
"""The forward kernel through the public function: every path, on the smallest shape that takes it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from agreement import assert_forward_agrees, forward_of, outputs_of
from hypothesis import given, settings
from hypothesis import strategies as st

import nki_bn
from nki_bn import BackwardProblem, ForwardProblem
from nki_bn.cases import Draw
from nki_bn.kernels.batch_norm_fwd import batch_norm_fwd as kernel
from nki_bn.kernels.plan import Buffer, ResidentForwardPlan, ResidentPlan
from nki_bn.kernels.sizing import GROUP_PIECES
from nki_bn.pair import backward_case
from nki_bn.planner import plan_two_read
from nki_bn.problem import DTYPES, RELU_MODES, Array, ForwardCase, Problem
from nki_bn.requests import prepare_backward, prepare_forward
from nki_bn.simulator import RunOptions, run

# One channel; less than a quadrant of partitions; the replicated counts 32 and 64; around one partition tile; a ragged
# second tile; four whole tiles.
CHANNELS = (1, 3, 32, 64, 127, 128, 129, 200, 512)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("relu", RELU_MODES)
@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_channels_cores_and_what_follows(dtype: str, channels: int, lnc: int, relu: str, residual: bool) -> None:
    """No ReLU, a ReLU with its mask saved, and one without; with a residual and without."""
    case = Draw((4, channels, 3, 5), dtype, mean=0.5).forward(relu, residual=residual)
    got = assert_forward_agrees(case, lnc=lnc)
    assert (got.relu_mask is not None) == (relu == "mask") and got.y.dtype == case.x.dtype


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("numerics", ["trn2", "ideal"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numerics_modes(dtype: str, training: bool, numerics: str, lnc: int) -> None:
    for relu in RELU_MODES:
        for residual in (False, True):
            case = Draw((4, 5, 7), dtype, mean=2).forward(relu, training, residual=residual)
            assert_forward_agrees(case, numerics, lnc=lnc)


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("channels", [3, 32, 64])
@pytest.mark.parametrize("lnc", [1, 2])
def test_batches_that_bands_and_cores_do_not_divide(batch: int, channels: int, lnc: int) -> None:
    assert_forward_agrees(Draw((batch, channels, 3)).forward("mask", residual=True), lnc=lnc)


@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 5), (6, 3, 5, 2), (6, 3, 5, 2, 2)])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ranks(dtype: str, training: bool, shape: tuple[int, ...]) -> None:
    got = assert_forward_agrees(Draw(shape, dtype).forward("mask", training, residual=True))
    assert got.relu_mask is not None and got.y.shape == got.relu_mask.shape == shape
    assert all(column is not None and column.shape == (3,) for column in got[1:5])


@pytest.mark.parametrize("spatial", [2, 49, 3136, 12545])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_spatial_sizes(dtype: str, batch: int, spatial: int) -> None:
    """Whole batches in a tile, one batch in several chunks, one batch in pieces that are no multiple of anything."""
    assert_forward_agrees(Draw((batch, 2, spatial), dtype).forward("mask"))


@pytest.mark.parametrize("batch", [2, 3])
@pytest.mark.parametrize("lnc", [1, 2])
def test_batches_of_one_position(batch: int, lnc: int) -> None:
    assert_forward_agrees(Draw((batch, 5)).forward("mask"), lnc=lnc)
    assert_forward_agrees(Draw((1, 5)).forward("mask", training=False), lnc=lnc)


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_more_tiles_than_slots(dtype: str, training: bool, lnc: int) -> None:
    """Few channels make long rows cheap: some tiles leave SBUF between the phases and come back."""
    case = Draw((9, 2, 12545), dtype).forward("mask", training, residual=True)
    plan = plan_two_read(prepare_forward(case, lnc=lnc).problem)
    assert 9 * 12545 / lnc > plan.f_tile * plan.interleave
    assert_forward_agrees(case, lnc=lnc)


@pytest.mark.parametrize("lnc", [1, 2])
def test_more_pieces_than_one_group(lnc: int) -> None:
    """The moments of more than 64 pieces of 512 columns are merged in two steps."""
    case = Draw((4, 1, 70_000), mean=3).forward()
    assert 4 * 70_000 / lnc > 512 * GROUP_PIECES
    assert_forward_agrees(case, lnc=lnc)


@pytest.mark.parametrize("accumulate", ["pairwise", "sequential"])
@pytest.mark.parametrize("numerics", ["trn2", "ideal"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_order_of_summation(dtype: str, numerics: str, accumulate: str) -> None:
    """One running float32 accumulator, on values of one sign: still within its share of the spread."""
    case = Draw((3, 2, 4099), dtype, mean=5).forward("mask")
    assert_forward_agrees(case, numerics, accumulate)
    assert_forward_agrees(replace(case, x=np.abs(case.x)), numerics, accumulate)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_affine_off_is_gamma_one_and_beta_zero(dtype: str, training: bool) -> None:
    drawn = Draw((4, 5, 7), dtype).forward("mask", training)
    off = replace(drawn, gamma=None, beta=None)
    ones = replace(drawn, gamma=np.ones(5, np.float32), beta=np.zeros(5, np.float32))
    for got, want in zip(assert_forward_agrees(off), forward_of(ones), strict=True):
        assert got is not None and np.array_equal(got, want)
    half = assert_forward_agrees(replace(drawn, gamma=None))
    assert not np.array_equal(half.y, forward_of(drawn).y)


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("relu", RELU_MODES)
def test_without_running_statistics_nothing_else_changes(relu: str, lnc: int) -> None:
    tracked = Draw((4, 130, 7)).forward(relu, residual=True)
    got = assert_forward_agrees(replace(tracked, running_mean=None, running_var=None, momentum=None), lnc=lnc)
    want = forward_of(tracked, lnc=lnc)
    assert got.running_mean is None and got.running_var is None
    for name in ("y", "mean", "var", "relu_mask"):
        assert np.array_equal(getattr(got, name), getattr(want, name))


@pytest.mark.parametrize(
    ("momentum", "batches", "weight"),
    [
        (0.1, None, 0.1),
        (0, None, 0.0),
        (1, 5, 1.0),
        (-0.5, None, -0.5),
        (np.float32(2.5), None, 2.5),
        (None, 0, 1.0),
        (None, 1, 0.5),
        (None, np.int64(9), 0.1),
    ],
)
def test_momentum(momentum: Any, batches: Any, weight: float) -> None:
    case = Draw((4, 5, 7), mean=3).forward()
    got = assert_forward_agrees(replace(case, momentum=momentum, num_batches_tracked=batches))
    wide = case.x.astype(np.float64)
    for name, batch in (("running_mean", wide.mean((0, 2))), ("running_var", wide.var((0, 2), ddof=1))):
        want = (1 - weight) * getattr(case, name) + weight * batch
        np.testing.assert_allclose(getattr(got, name), want, rtol=1e-5, atol=1e-6)
    if weight == 0:
        assert np.array_equal(got.running_mean, case.running_mean) and np.array_equal(got.running_var, case.running_var)


@pytest.mark.parametrize("relu", RELU_MODES)
def test_in_eval_the_running_statistics_come_back_as_copies(relu: str) -> None:
    """So that a backward later on does not depend on what became of them."""
    case = Draw((4, 5, 7), mean=2).forward(relu, training=False)
    got = assert_forward_agrees(case)
    assert case.running_mean is not None and case.running_var is not None
    arrays = [case.running_mean, case.running_var, *got[1:5]]
    for i, array in enumerate(arrays):
        assert not any(np.shares_memory(array, other) for other in arrays[:i])
    case.running_mean[:], case.running_var[:] = 9, 9
    assert not (got.mean == 9).any() and not (got.running_var == 9).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 3, 6), (5, 64, 3), (1, 129, 7), (3, 2, 1)])
def test_two_cores_change_nothing_but_rounding(shape: tuple[int, ...], dtype: str) -> None:
    case = Draw(shape, dtype, mean=1).forward("recompute", residual=True)
    one, two = (assert_forward_agrees(case, lnc=lnc) for lnc in (1, 2))
    unit = {"float32": 2.0**-18, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    for first, second in zip(one[:5], two[:5], strict=True):
        wide = np.float64(first)
        assert np.abs(wide - np.float64(second)).max() <= unit * np.abs(wide).max()


def test_repeated_calls_give_the_same_bits() -> None:
    case = Draw((3, 4, 7)).forward("mask", residual=True)
    for first, second in zip(forward_of(case), forward_of(case), strict=True):
        assert first is not None and second is not None and first.tobytes() == second.tobytes()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("target", "lnc"), [("trn1", 1), ("trn2", 2), ("trn3", 2)])
def test_targets(target: str, lnc: int, training: bool) -> None:
    assert_forward_agrees(Draw((4, 5, 6)).forward("mask", training), lnc=lnc, target=target)


def test_plans_of_both_directions() -> None:
    forward = nki_bn.plan(ForwardProblem((4, 5, 6), "bfloat16", relu="mask", residual=True))
    backward = nki_bn.plan(BackwardProblem((32, 64, 784), "bfloat16", relu="recompute", residual=True, need=("dx",)))
    assert isinstance(forward, ResidentForwardPlan) and forward.need_mask and forward.residual
    assert isinstance(backward, ResidentPlan) and backward.need_dx and not backward.need_dgamma
    with pytest.raises(TypeError, match="problem must be a ForwardProblem or a BackwardProblem, got Problem"):
        nki_bn.plan(Problem((4, 5, 6), "bfloat16"))
    with pytest.raises(ValueError, match=r"x has shape \(0, 5, 6\), so no kernel would run; accepted: sizes from 1 up"):
        nki_bn.plan(ForwardProblem((0, 5, 6), "bfloat16"))
    with pytest.raises(ValueError, match="residual is True with relu 'mask'; accepted"):
        BackwardProblem((4, 5, 6), "bfloat16", relu="mask", residual=True)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"shape": None}, TypeError, "shape of x must be a tuple of integers, got NoneType"),
        ({"shape": (4, 5.0)}, TypeError, "shape of x has 5.0; accepted: integers"),
        ({"shape": (4, True)}, TypeError, "shape of x has True; accepted: integers"),
        ({"shape": (4,)}, ValueError, r"shape \(4,\) of x has rank 1"),
        ({"shape": (2**63, 3)}, ValueError, "shape .* of x is too large"),
        ({"training": 1}, TypeError, "training must be a bool, got 1"),
        ({"residual": "no"}, TypeError, "residual must be a bool, got 'no'"),
        ({"dtype": np.float32}, TypeError, "dtype <class 'numpy.float32'> is unknown; accepted: float32"),
        ({"dtype": ["float32"]}, TypeError, r"dtype \['float32'\] is unknown"),
    ],
)
@pytest.mark.parametrize("kind", [ForwardProblem, BackwardProblem])
def test_problems_that_are_refused(
    kind: type[Problem], changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        kind(**{"shape": (4, 5), "dtype": "float32"} | changes)


@pytest.mark.parametrize("sizes", [[100, 2, 3], tuple(np.array([100, 2, 3], np.int8))])
def test_sizes_of_a_problem_are_ints(sizes: Any) -> None:
    problem = ForwardProblem(sizes, "float32")
    assert problem.shape == (100, 2, 3) and all(type(size) is int for size in problem.shape)
    assert type(problem.shape) is tuple and problem.count == 300


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("relu", RELU_MODES)
def test_a_given_plan_is_the_planners_choice(relu: str, training: bool) -> None:
    case = Draw((4, 5, 6), "float16").forward(relu, training, residual=True)
    plan = nki_bn.plan(prepare_forward(case).problem)
    for first, second in zip(forward_of(case), forward_of(case, plan=plan), strict=True):
        assert np.array_equal(first, second) if first is not None else second is None


def test_the_budget_of_a_plan_is_what_the_kernel_holds() -> None:
    """To the byte, in both directions."""
    forward, backward = Draw((4, 5, 6)).forward("mask"), Draw((4, 5, 6)).case()
    plans = nki_bn.plan(prepare_forward(forward).problem), nki_bn.plan(prepare_backward(backward).problem)
    runs = partial(forward_of, forward), partial(outputs_of, backward)
    for run_with, plan in zip(runs, plans, strict=True):
        run_with(plan=plan)
        with pytest.raises(RuntimeError, match=f"the plan lists {plan.sbuf_bytes + 4} bytes of SBUF"):
            listed = (*plan.buffers, Buffer("spare", 1, 1, "float32"))
            run_with(plan=replace(plan, buffers=listed, sbuf_bytes=plan.sbuf_bytes + 4))


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("training", [True, False])
def test_the_bare_kernel_sizes_itself(training: bool, lnc: int) -> None:
    case = Draw((4, 5, 1, 2, 3)).forward("mask", training, residual=True)
    assert case.gamma is not None and case.beta is not None
    running, absent = (case.running_mean, case.running_var), (None, None)
    statistics = (*absent, *running) if training else (*running, *absent)
    arguments = (case.x, case.gamma[:, None], case.beta[:, None], *statistics, case.residual, 0.1, case.eps, True)
    outputs = run(kernel, arguments, {}, lnc, RunOptions()).outputs
    public = forward_of(case, lnc=lnc, plan=plan_two_read(prepare_forward(case, lnc=lnc).problem))
    for at in range(6) if training else (0, 5):
        assert np.array_equal(outputs[at], public[at])


COLUMN = np.ones(5, np.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gamma": COLUMN}, r"gamma must have shape \(5, 1\), got \(5,\)"),
        ({"beta": np.ones((5, 1), np.float16)}, "gamma and beta must be float32"),
        ({"means": COLUMN}, "means and variances must be given together"),
        ({"means": COLUMN[:, None], "variances": COLUMN}, r"means must have shape \(5,\), got \(5, 1\)"),
        ({"means": COLUMN, "variances": COLUMN.astype(np.float16)}, "variances must be float32, got float16"),
        ({"running_mean": COLUMN}, "running_mean and running_var must be given together"),
        ({"running_mean": COLUMN, "running_var": COLUMN[:4]}, r"running_var must have shape \(5,\), got \(4,\)"),
        (
            dict.fromkeys(("means", "variances", "running_mean", "running_var"), COLUMN),
            "not accepted with given means",
        ),
        ({"eps": -1e-5}, "eps must not be negative, got -1e-05"),
        ({"fuse_relu": 1}, "fuse_relu must be True or False, got 1"),
    ],
)
def test_the_bare_kernel_refuses_what_it_would_misread(changes: dict[str, Any], message: str) -> None:
    parameter = COLUMN[:, None]
    named = {"x_in": np.ones((4, 5, 1, 2, 3), np.float32), "gamma": parameter, "beta": parameter} | changes
    with pytest.raises(AssertionError, match=message):
        run(kernel, (), named, 1, RunOptions())


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_random_problems(data: st.DataObject) -> None:
    draw = data.draw
    spatial: list[int] = draw(st.lists(st.integers(1, 9), max_size=3))
    shape = (draw(st.integers(2, 6)), draw(st.sampled_from([1, 2, 31, 32, 33, 64, 96, 130])), *spatial)
    dtype = draw(st.sampled_from(list(DTYPES)))
    mean = draw(st.sampled_from([0.0, 3.0, -40.0]))
    case = Draw(shape, dtype, mean, draw(st.sampled_from([0.05, 1.0, 30.0])), draw(st.integers(0, 99))).forward(
        draw(st.sampled_from(RELU_MODES)), draw(st.booleans()), draw(st.sampled_from([1e-5, 1e-3])), draw(st.booleans())
    )
    modes = draw(st.sampled_from(["trn2", "ideal"])), draw(st.sampled_from(["pairwise", "sequential"]))
    assert_forward_agrees(case, *modes, lnc=draw(st.sampled_from([1, 2])))


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("shape", [(6, 5, 3, 3), (7, 40)])
def test_running_statistics_of_ten_steps_are_torchs(shape: tuple[int, ...], momentum: float | None) -> None:
    """Against a float64 module, to 1e-6 of what a channel holds."""
    channels = shape[1]
    layer = (torch.nn.BatchNorm1d if len(shape) == 2 else torch.nn.BatchNorm2d)(channels, momentum=momentum).double()
    running: tuple[Array | None, Array | None] = np.zeros(channels, np.float32), np.ones(channels, np.float32)
    size = np.zeros(channels)
    for step in range(10):
        x = Draw(shape, mean=step - 4, std=1 + step, seed=step).forward().x
        layer(torch.from_numpy(x.astype(np.float64)))
        got = nki_bn.batch_norm_fwd(x, None, None, *running, momentum, num_batches_tracked=step)
        running = got.running_mean, got.running_var
        size = np.maximum(size, np.abs(x).max((0, *range(2, x.ndim))))
    assert layer.running_mean is not None and layer.running_var is not None
    for values, want, scale in zip(running, (layer.running_mean, layer.running_var), (size, size**2), strict=True):
        assert values is not None and (np.abs(values - want.numpy()) <= 1e-6 * scale).all()


def gradients_of_a_stack(layers: list[ForwardCase], dy: Array, lnc: int) -> list[tuple[Array, list[Array]]]:
    """(dy, [dx, dgamma, dbeta]) of every layer, where the output of one layer is the input of the next."""
    saved = []
    x = layers[0].x
    for layer in layers:
        made = forward_of(replace(layer, x=x), lnc=lnc)
        saved.append(backward_case(replace(layer, x=x), dy, made.mean, made.var, made.relu_mask))
        x = made.y
    gradients: list[tuple[Array, list[Array]]] = []
    for case in reversed(saved):
        gradients.insert(0, (dy, outputs_of(replace(case, dy=dy), lnc=lnc)))
        dy = gradients[0][1][0]
    return gradients


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("relu", RELU_MODES)
def test_a_stack_of_two_layers_has_torchs_gradients(relu: str, lnc: int) -> None:
    """Odd counts, so that the halves of two cores differ; float64 autograd through both layers.

    Sums are judged at the scale of their terms: without a ReLU the second layer undoes what gamma of the first does.
    """
    layers = [Draw((3, 4, 7, 5), mean=mean, seed=seed).forward(relu) for mean, seed in ((1, 0), (0, 1))]
    dy = Draw((3, 4, 7, 5), seed=2).gradient()
    y = x = torch.from_numpy(layers[0].x.astype(np.float64)).requires_grad_()
    parameters = [
        [torch.tensor(values, dtype=torch.float64, requires_grad=True) for values in (layer.gamma, layer.beta)]
        for layer in layers
    ]
    for gamma, beta in parameters:
        y = torch.nn.functional.batch_norm(y, None, None, gamma, beta, training=True)
        y = y if relu == "none" else torch.relu(y)
    y.backward(torch.from_numpy(dy.astype(np.float64)))
    gradients = gradients_of_a_stack(layers, dy, lnc)
    assert x.grad is not None
    assert np.abs(gradients[0][1][0] - x.grad.numpy()).max() <= 1e-4 * x.grad.abs().max().item()
    for (incoming, sums), leaves in zip(gradients, parameters, strict=True):
        terms = np.abs(incoming).sum((0, 2, 3))
        for got, leaf in zip(sums[1:], leaves, strict=True):
            assert leaf.grad is not None
            assert (np.abs(got - leaf.grad.numpy()) <= 1e-5 * terms).all()


@pytest.mark.nightly
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "shape", [(32, 64, 112, 112), (32, 64, 56, 56), (32, 2048, 7, 7), (4096, 1024), (4, 64, 16, 56, 56)]
)
def test_layers_of_networks(shape: tuple[int, ...], dtype: str, residual: bool, training: bool) -> None:
    assert_forward_agrees(Draw(shape, dtype, mean=0.2).forward("mask", training, residual=residual))
