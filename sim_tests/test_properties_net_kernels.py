# SPDX-License-Identifier: Apache-2.0
"""The whole network with its batch norms done by the kernels in float32, every one judged as it comes.

What their errors add up to is judged too: against the float64 network with the same ReLU and pool decisions, by what
happens to that when each site's results are moved by all that the table of tolerances allows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from judging import joined
from kernel_sites import KernelSite, ShakenSite
from layers import max_pool
from net_runs import IMAGES, mean_gradients, network, run, to_bfloat16
from optimisers import Adam, Momentum
from property_cases import assert_within
from whole_net import BLOCKS, HEAD, IDLE, POOLED, Chain, Parameters, PlainSite, Tape, exact

from nki_bn import reference
from nki_bn.reference import Array, Float64
from nki_bn.simulator import RunOptions

# Moved networks, and how many times their largest deviation is allowed: each is one draw of signs.
DRAWS, MARGIN = 4, 2
Cast = Callable[[Float64], Float64]
# A bound says something when it is far below the values: by this, with the kernels' errors alone, and when these also
# turn roundings of bfloat16 convolutions (2^-8 of a value each) up or down.
TELLING: dict[Cast, float] = {exact: 2.0**-10, to_bfloat16: 2.0**-3}
Choices = dict[str, list[Array]]


@dataclass(frozen=True)
class Results:
    """Of a run: all tensors of the global batch by name, and the mean gradients of the parameters."""

    tensors: dict[str, Float64]
    gradients: Parameters


def results_of(tape: Tape, cotangents: dict[str, list[Float64]], gradients: list[Parameters]) -> Results:
    """Cotangents are those of the global loss."""
    tensors = {f"output of {step}": joined(parts) for step, parts in tape.outputs.items()}
    tensors |= {f"cotangent of {step}": joined(parts) / len(parts) for step, parts in cotangents.items()}
    mean = mean_gradients(gradients)
    return Results(tensors | mean, mean)


def judged(cast: Cast, choices: Choices) -> tuple[Results, dict[str, float]]:
    """The float64 network with these decisions, and how far each tensor may be from it."""
    want = results_of(*run(Chain(PlainSite(), cast), (IMAGES,), choices))
    bounds = dict.fromkeys(want.tensors, 0.0)
    for seed in range(DRAWS):
        moved = results_of(*run(Chain(ShakenSite(np.random.default_rng(seed)), cast), (IMAGES,), choices))
        for name, values in moved.tensors.items():
            bounds[name] = max(bounds[name], MARGIN * float(np.abs(values - want.tensors[name]).max()))
    return want, bounds


@pytest.mark.statement("net")
@pytest.mark.parametrize(
    ("parts", "cast", "numerics"),
    [
        ((IMAGES,), exact, "trn2"),
        ((IMAGES,), to_bfloat16, "trn2"),
        ((4, 4), exact, "trn2"),
        ((4, 4), to_bfloat16, "trn2"),
        ((5, 3), exact, "ideal"),
        ((2, 2, 2, 2), exact, "trn2"),
    ],
)
def test_the_network_with_kernels(parts: tuple[int, ...], cast: Cast, numerics: str) -> None:
    """Outputs, every cotangent, all gradients, decisions, and a step of momentum and of Adam."""
    tape, cotangents, gradients = run(Chain(KernelSite(RunOptions(numerics=numerics)), cast), parts)
    choices = {name: [joined(chosen)] for name, chosen in tape.choices.items()}
    (want, bounds), got = judged(cast, choices), results_of(tape, cotangents, gradients)
    for name, values in want.tensors.items():
        assert_within(got.tensors[name], values, bounds[name])
        assert name in IDLE or bounds[name] < TELLING[cast] * np.abs(values).max(), name
    judge_decisions(cast, choices, bounds)
    judge_steps(got.gradients, want.gradients, bounds)


def judge_decisions(cast: Cast, choices: Choices, bounds: dict[str, float]) -> None:
    """ReLUs and pools decide as in the float64 network, but where that is within its bound of deciding otherwise."""
    parameters, images, _ = network()
    own = Chain(PlainSite(), cast).forward(parameters, [images])
    z = {f"relu{name}": own.outputs[f"dense{name}"][0] for name in HEAD[:-1]}
    for name in BLOCKS:
        (x,), columns = own.outputs[f"conv{name}"], (parameters[f"{name}.gamma"], parameters[f"{name}.beta"])
        z[f"relu{name}"] = reference.pre_activation(x, *reference.statistics(x), *columns).value
    for name, values in z.items():
        other = choices[name][0] != own.choices[name][0]
        assert np.all(np.abs(values[other]) <= bounds[f"output of {name}"]), name
    for name in POOLED:
        taken, _ = max_pool(own.outputs[f"relu{name}"][0], choices[f"pool{name}"][0])
        assert np.all(taken >= own.outputs[f"pool{name}"][0] - 2 * bounds[f"output of relu{name}"]), name


def judge_steps(got: Parameters, want: Parameters, bounds: dict[str, float]) -> None:
    """Momentum's and Adam's next parameters, from optimisers that have been running."""
    rng = np.random.default_rng(4)
    for name, parameter in network()[0].items():
        first, second = rng.standard_normal(parameter.shape), rng.random(parameter.shape) + 0.01
        judge_step(partial(Momentum().step, parameter, velocity=first), got[name], want[name], bounds[name])
        adam = partial(Adam().step, parameter, first=first, second=second, steps=3)
        judge_step(adam, got[name], want[name], bounds[name])


def judge_step(step: Callable[..., Float64], got: Float64, want: Float64, bound: float) -> None:
    """By how far the step moves as its gradient goes to the ends of its range."""
    ends = [np.abs(step(gradient=want + distance) - step(gradient=want)) for distance in (-bound, bound)]
    assert_within(step(gradient=got), step(gradient=want), np.maximum(*ends))
