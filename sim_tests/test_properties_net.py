# SPDX-License-Identifier: Apache-2.0
"""The whole network: its backward written out against float64 autograd, alone and on replicas."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from net_runs import IMAGES, mean_gradients, network, run, to_bfloat16
from optimisers import Adam, Momentum
from property_cases import Batch, Bounds, assert_within, rounding, shard
from torch_net import Results, Variant, autograd, optimiser_step
from whole_net import BLOCKS, HEAD, IDLE, POOLED, Chain, Parameters, PlainSite, SynchronisedSite, loss_cotangent

from nki_bn.reference import Array, Float64

STEPS = {f"{kind}{name}" for name in BLOCKS for kind in ("conv", "bn", "relu")} | {f"pool{name}" for name in POOLED}
STEPS |= {f"dense{name}" for name in HEAD} | {"relu9", "relua", "images"}
# Two orders of summation: from one number after the other to pairs, float32's errors differ by less than this.
ORDERS = 64


@cache
def reference_results(variant: Variant) -> Results:
    return autograd(*network(), variant)


@cache
def lost_in_float32(variant: Variant) -> Results:
    """What torch loses in float32: what is left of that in float64 is smaller by 2^29."""
    single, double = reference_results(replace(variant, dtype=torch.float32)), reference_results(variant)
    fields = ("outputs", "cotangents", "gradients")
    return Results(*({n: np.abs(getattr(single, f)[n] - v) for n, v in getattr(double, f).items()} for f in fields))


def bound(lost: Array) -> float:
    """How far two float64 evaluations may be apart, for all elements of a tensor alike."""
    return float(ORDERS * 2.0**-29 * lost.max())


VARIANTS = {
    "batch": (Variant(), Chain(PlainSite())),
    "per image": (Variant(per_image=True), Chain(PlainSite(per_image=True))),
    "bfloat16 convolutions": (Variant(bfloat16=True), Chain(PlainSite(), to_bfloat16)),
}


@pytest.mark.statement("net")
@pytest.mark.parametrize("name", VARIANTS)
def test_every_cotangent_and_all_gradients_agree_with_autograd(name: str) -> None:
    variant, chain = VARIANTS[name]
    tape, cotangents, (gradients,) = run(chain, (IMAGES,))
    want, lost = reference_results(variant), lost_in_float32(variant)
    assert set(cotangents) == STEPS == set(want.cotangents)
    assert set(gradients) == set(want.gradients) and len(gradients) == 38
    for step, (output,) in tape.outputs.items():
        assert_within(output, want.outputs[step], bound(lost.outputs[step]))
    for step, (cotangent,) in cotangents.items():
        assert_within(cotangent, want.cotangents[step], bound(lost.cotangents[step]))
    for parameter, gradient in gradients.items():
        assert_within(gradient, want.gradients[parameter], bound(lost.gradients[parameter]))


@pytest.mark.statement("net")
def test_the_bounds_are_far_below_the_values() -> None:
    """So that agreement says something: by more than 2^20 everywhere but where the true gradient is 0."""
    for variant, _ in VARIANTS.values():
        want, lost = reference_results(variant), lost_in_float32(variant)
        for name in set(want.gradients) - set(IDLE):
            assert bound(lost.gradients[name]) < 2.0**-20 * np.abs(want.gradients[name]).max(), name
        for step in STEPS:
            assert bound(lost.cotangents[step]) < 2.0**-20 * np.abs(want.cotangents[step]).max(), step


@pytest.mark.statement("net")
@pytest.mark.parametrize("per_image", [False, True])
def test_biases_before_batch_norm_have_gradient_zero(per_image: bool) -> None:
    """Up to the rounding of the terms that cancel: the bound of each dx, and of their sum."""
    parameters, *_ = network()
    tape, cotangents, (gradients,) = run(Chain(PlainSite(per_image)), (IMAGES,))
    for name in BLOCKS:
        (z,), (dy,), (dz,) = tape.outputs[f"conv{name}"], cotangents[f"bn{name}"], cotangents[f"conv{name}"]
        gamma, beta = parameters[f"{name}.gamma"], parameters[f"{name}.beta"]
        if per_image:
            z, dy, repeat = z.reshape(1, -1, *z.shape[2:]), dy.reshape(1, -1, *dy.shape[2:]), len(z)
            gamma, beta = np.tile(gamma, repeat), np.tile(beta, repeat)
        terms = Bounds(Batch(z, dy, dy, gamma, beta, (len(z),))).dx(dy).reshape(dz.shape).sum((0, 2, 3))
        of_sum = rounding(dz[:, 0].size) * np.abs(dz).sum((0, 2, 3))
        assert_within(gradients[f"{name}.bias"], np.zeros(dz.shape[1]), terms + of_sum)
        assert (np.abs(dz).sum((0, 2, 3)) > 1e6 * (terms + of_sum)).all()


PARTS = [(4, 4), (2, 2, 2, 2), (5, 3), (3, 0, 5), (1,) * 8]


@pytest.mark.statement("net", "P1", "P2", "P4")
@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_replicas_compute_their_shards_of_the_global_network(parts: tuple[int, ...]) -> None:
    """Outputs are shards, cotangents R times shards, and the mean of the replicas' gradients is the global one."""
    tape, cotangents, gradients = run(Chain(SynchronisedSite()), parts)
    want, lost = reference_results(Variant()), lost_in_float32(Variant())
    replicas = len(parts)
    for step, output in tape.outputs.items():
        assert_within(np.concatenate(output), want.outputs[step], bound(lost.outputs[step]))
    for step, cotangent in cotangents.items():
        got = np.concatenate(cotangent) / replicas
        assert_within(got, want.cotangents[step], bound(lost.cotangents[step]))
    for name, gradient in mean_gradients(gradients).items():
        assert_within(gradient, want.gradients[name], bound(lost.gradients[name]))


@pytest.mark.statement("net", "R1")
def test_one_replica_has_the_plain_forward_bit_for_bit() -> None:
    """The sites' backward takes means in place of sums, and agrees as all replicas do."""
    plain, synchronised = (run(Chain(site), (IMAGES,)) for site in (PlainSite(), SynchronisedSite()))
    for step, (output,) in plain[0].outputs.items():
        assert np.array_equal(synchronised[0].outputs[step][0], output)
    lost = lost_in_float32(Variant())
    for name, gradient in plain[2][0].items():
        assert_within(synchronised[2][0][name], gradient, bound(lost.gradients[name]))


@pytest.mark.statement("net")
def test_batch_norm_on_each_replica_alone_is_another_network() -> None:
    """Without synchronisation outputs and gradients are others, by far more than rounding."""
    parameters, images, target = network()
    want, lost = reference_results(Variant()), lost_in_float32(Variant())
    chain, local = Chain(PlainSite()), []
    for part, t in zip(shard(images, (4, 4)), shard(target, (4, 4)), strict=True):
        tape = chain.forward(parameters, [part])
        local += chain.backward(parameters, tape, [loss_cotangent(tape.outputs["denseb"][0], t)])[1]
    for name, gradient in mean_gradients(local).items():
        error = np.abs(gradient - want.gradients[name]).max()
        assert (error > 1e6 * bound(lost.gradients[name])) == (name not in IDLE)


@pytest.mark.statement("net")
@pytest.mark.parametrize("parts", [(IMAGES,), (4, 4), (5, 3)], ids=str)
@pytest.mark.parametrize("name", ["batch", "bfloat16 convolutions"])
def test_a_step_of_momentum_and_of_adam(parts: tuple[int, ...], name: str) -> None:
    """From optimisers that have been running, against torch's: as far apart as the gradients' bounds allow."""
    variant, chain = VARIANTS[name]
    local = run(replace(chain, site=SynchronisedSite()), parts)[2]
    want, lost = reference_results(variant), lost_in_float32(variant)
    rng, momentum, adam = np.random.default_rng(3), Momentum(), Adam()
    for parameter, value in network()[0].items():
        first, second = rng.standard_normal(value.shape), rng.random(value.shape) + 0.01
        got, true = mean_gradients(local)[parameter], want.gradients[parameter]
        error = bound(lost.gradients[parameter]) + rounded_apart(name, local, parameter)
        assert_within(
            momentum.step(value, got, first),
            optimiser_step(torch.optim.SGD, value, true, {"momentum_buffer": first}, lr=0.1, momentum=0.9),
            momentum.rate * error + rounding(4) * (np.abs(value) + np.abs(first) + np.abs(true)),
        )
        # The mean of squares is at least 0.999*0.01, and its correction only raises it: per unit of rate the step's
        # slope in the gradient is below (0.1 + |first mean|)/(0.09*(1 - 0.9^4)).
        slope = adam.rate * (0.1 + np.abs(first) + 0.1 * np.abs(true)) / (0.09 * (1 - adam.decay**4))
        state = {"step": 3.0, "exp_avg": first, "exp_avg_sq": second}
        assert_within(
            adam.step(value, got, first, second, 3),
            optimiser_step(torch.optim.Adam, value, true, state, lr=0.01),
            slope * error + rounding(16) * (np.abs(value) + slope),
        )


def rounded_apart(name: str, local: list[Parameters], parameter: str) -> Float64 | float:
    """What replicas add by rounding their own gradient of a bfloat16 convolution, where one alone rounds the sum."""
    rounded = parameter.startswith(BLOCKS) and parameter.endswith(("weight", "bias"))
    if name == "batch" or len(local) == 1 or not rounded:
        return 0.0
    sizes = mean_gradients([{parameter: np.abs(part[parameter])} for part in local])[parameter]
    return 2 * 2.0**-8 * sizes
