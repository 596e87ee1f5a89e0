# SPDX-License-Identifier: Apache-2.0
"""Running a kernel: through the vendor's package where that is installed, else in the embedded simulator."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nki_bn import installation
from nki_bn.hardware import load_target
from nki_bn.problem import Array, BackwardProblem, ForwardProblem, Problem
from nki_bn.simulator import Installation, RunOptions, SimulationResult, run

if TYPE_CHECKING:
    from nki_bn.kernels.plan import (
        BackwardPlan,
        ForwardPlan,
        ResidentForwardPlan,
        ResidentPlan,
        TransposedForwardPlan,
        TransposedPlan,
    )
    from nki_bn.predict import Plan

# The package's kernels depend on their arguments alone, and training launches them with the same shapes time and again.
_DEFAULT_OPTIONS = RunOptions(replay=True)
SIMULATOR_VARIABLE = "NKI_SIMULATOR"
# Whether layers on the CPU are simulated.
_SWITCH = {None: False, "0": False, "1": True}
_options: ContextVar[RunOptions] = ContextVar("simulation options", default=_DEFAULT_OPTIONS)


@dataclass(frozen=True)
class ForwardInputs:
    """The arguments of the forward kernel, in its layout.

    ``x`` and ``residual`` (or None) [B, C, D, H, W]; ``gamma``, ``beta`` [C, 1] and the running statistics [C] (both or
    neither) float32. With frozen statistics the running ones are those.
    """

    x: Array
    gamma: Array
    beta: Array
    running_mean: Array | None
    running_var: Array | None
    residual: Array | None
    momentum: float
    eps: float


@dataclass(frozen=True)
class BackwardInputs:
    """The arguments of the backward kernel, in its layout.

    ``dy``, ``x`` and ``residual`` (or None) [B, C, D, H, W]; ``mean``, ``var`` [C] and ``gamma``, ``beta`` [C, 1]
    float32; ``relu_mask`` like x, uint8, or None.
    """

    dy: Array
    x: Array
    mean: Array
    var: Array
    gamma: Array
    beta: Array
    eps: float
    relu_mask: Array | None
    residual: Array | None


def run_forward(
    inputs: ForwardInputs, problem: ForwardProblem, plan: ForwardPlan | ResidentForwardPlan | TransposedForwardPlan
) -> tuple[Any, ...]:
    """(y [B, C, D, H, W], mean, var, running_mean, running_var [C], relu_mask like y); None for what is not made."""
    outputs: tuple[Any, ...] = _launch(*forward_call(inputs, problem, plan), problem, plan)
    return outputs


def forward_call(inputs: ForwardInputs, problem: ForwardProblem, plan: ForwardPlan) -> tuple[Any, tuple[Any, ...]]:
    """The forward kernel and its arguments, of whatever framework the tensors in ``inputs`` are."""
    # Imported here, so that the doctor can say which nki is in use even where a kernel does not import.
    from nki_bn.kernels.batch_norm_fwd import batch_norm_fwd

    running, absent = (inputs.running_mean, inputs.running_var), (None, None)
    statistics = (*absent, *running) if problem.training else (*running, *absent)
    numbers = (inputs.momentum, inputs.eps, problem.relu != "none")
    return batch_norm_fwd, (inputs.x, inputs.gamma, inputs.beta, *statistics, inputs.residual, *numbers, plan)


def run_backward(
    inputs: BackwardInputs, problem: BackwardProblem, plan: BackwardPlan | ResidentPlan | TransposedPlan
) -> tuple[Array | None, ...]:
    """(dx [B, C, D, H, W], dgamma [C, 1], dbeta [C, 1]), and dresidual like dx if the plan needs it.

    None for any other output that the plan does not need.
    """
    outputs: tuple[Array | None, ...] = _launch(*backward_call(inputs, problem, plan), problem, plan)
    return outputs


def backward_call(
    inputs: BackwardInputs, problem: BackwardProblem, plan: BackwardPlan | ResidentPlan
) -> tuple[Any, tuple[Any, ...]]:
    """The backward kernel and its arguments, of whatever framework the tensors in ``inputs`` are."""
    from nki_bn.kernels.batch_norm_bwd import batch_norm_bwd

    columns = (inputs.mean, inputs.var, inputs.gamma, inputs.beta)
    relu = (problem.relu != "none", inputs.relu_mask)
    return batch_norm_bwd, (inputs.dy, inputs.x, *columns, inputs.eps, *relu, plan, inputs.residual)


def run_moments(inputs: ForwardInputs, problem: ForwardProblem) -> tuple[Array, Array]:
    """Mean and biased variance [C] of a shard of a batch; of ``inputs`` only x is used."""
    plan = moments_plan(problem)
    _, mean, var, *_ = _launch(*forward_call(inputs, problem, plan), problem, plan)
    return mean, var


def moments_plan(problem: ForwardProblem) -> ForwardPlan:
    """The plan of a training forward that makes statistics only."""
    from nki_bn.kernels.sizing import two_read_plan

    budget = load_target(problem.target).sbuf_partition_bytes
    plan: ForwardPlan = two_read_plan(
        problem.extents,
        problem.dtype,
        problem.lnc,
        budget,
        need=(False, False),
        relu=problem.relu != "none",
        residual=problem.residual,
    )
    return plan


def run_input_gradient(
    inputs: BackwardInputs, dgamma: Array, dbeta: Array, count: int, problem: BackwardProblem
) -> Array:
    """dx [B, C, D, H, W] from sums [C] over ``count`` values per channel, of which x is a part."""
    plan = input_gradient_plan(problem)
    sums = dgamma.reshape(-1, 1), dbeta.reshape(-1, 1)
    dx: Array = _launch(*input_gradient_call(inputs, sums, count, problem, plan), problem, plan)
    return dx


def input_gradient_call(
    inputs: BackwardInputs, sums: tuple[Any, Any], count: int, problem: BackwardProblem, plan: BackwardPlan
) -> tuple[Any, tuple[Any, ...]]:
    """The kernel of :func:`run_input_gradient` and its arguments, of whatever framework; ``sums`` are [C, 1]."""
    from nki_bn.kernels.given_statistics import input_gradient

    columns = (inputs.mean, inputs.var, inputs.gamma, inputs.beta)
    relu = (problem.relu != "none", inputs.relu_mask)
    arguments = (inputs.dy, inputs.x, *columns, *sums, count, plan, inputs.eps, *relu, inputs.residual)
    return input_gradient, arguments


def input_gradient_plan(problem: BackwardProblem) -> BackwardPlan:
    """The plan of :func:`run_input_gradient`."""
    from nki_bn.kernels.sizing import staged_plan

    budget = load_target(problem.target).sbuf_partition_bytes
    sizes = problem.extents, problem.dtype, problem.relu, problem.lnc, budget
    plan: BackwardPlan = staged_plan(*sizes, residual=problem.residual, need=(True, False, False, False))
    return plan


@contextmanager
def simulation(options: RunOptions) -> Iterator[None]:
    """Run kernels inside the block with these options of the embedded simulator; the target stays that of each call."""
    token = _options.set(options)
    try:
        yield
    finally:
        _options.reset(token)


def simulation_options() -> RunOptions:
    """The options of the embedded simulator here: those of :func:`simulation`, or the default ones."""
    return _options.get()


def check_memory(result: SimulationResult, plan: Plan) -> None:
    """A run has held what its plan lists; a core without a share holds less.

    Buffers for a last block of channels may be held by the one core only that holds less of the others.

    Raises:
        RuntimeError: it has not.
    """
    from nki_bn.kernels.plan import total_bytes

    of_last_block = total_bytes([buffer for buffer in plan.buffers if buffer.name.startswith("last ")])
    if not plan.sbuf_bytes - of_last_block <= max(result.sbuf_high_water) <= plan.sbuf_bytes:
        raise RuntimeError(
            f"the plan lists {plan.sbuf_bytes} bytes of SBUF per partition, the kernel held {result.sbuf_high_water}"
        )


def which_nki() -> Installation:
    """The ``nki`` in use, "embedded" or "vendor" (or "refused", of which only the doctor hears), and why."""
    return installation


def has_device() -> bool:
    """Whether this machine has a Neuron device."""
    return Path("/dev/neuron0").exists()


def simulating() -> bool:
    """Whether NKI_SIMULATOR asks for the simulator.

    Raises:
        ValueError: it is set, and neither 0 nor 1.
    """
    value = os.environ.get(SIMULATOR_VARIABLE)
    if value not in _SWITCH:
        raise ValueError(f"{SIMULATOR_VARIABLE} is {value!r}; accepted: 0, 1, or not set")
    return _SWITCH[value]


def _launch(kernel: Any, arguments: tuple[Any, ...], problem: Problem, plan: Plan) -> Any:
    if which_nki().kind == "embedded":
        options = replace(_options.get(), target=problem.target)
        result = run(kernel, arguments, {}, problem.lnc, options)
        check_memory(result, plan)
        return result.outputs
    # Imported here, so that the doctor can say why there is none.
    import nki

    launch = kernel[problem.lnc]
    return launch(*arguments) if has_device() else nki.simulate(launch)(*arguments)
