# SPDX-License-Identifier: Apache-2.0
"""Modules in the simulator against torch.nn in float64, over the options of the constructor; errors as torch's."""

from __future__ import annotations

import copy
import itertools
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch_judging import (
    DTYPES,
    SHAPES,
    STATISTICS,
    Step,
    drawn,
    drawn_step,
    judge_step,
    module_class,
    with_drawn_state,
)

import nki_bn.torch as nbt

OPTIONS = [
    {"affine": affine, "track_running_stats": track, "momentum": momentum, "eps": eps}
    for affine, track, momentum, eps in itertools.product(
        (True, False), (True, False), (None, 0.0, 0.1, 1.0), (1e-5, 0.1)
    )
]
# Every pair of values of the first three options, for the other ranks and dtypes.
SOME_OPTIONS = [OPTIONS[i] for i in (0, 5, 11, 14, 17, 20, 26, 31)]


@pytest.fixture(autouse=True)
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules know nothing of cores; one of them is simulated faster than two."""
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")


def names(options: dict[str, Any]) -> str:
    return "-".join(map(str, options.values()))


def judge_options(rank: int, dtype: torch.dtype, options: dict[str, Any], training: bool) -> None:
    """The second of two batches shows what the average over all batches does."""
    module = with_drawn_state(module_class("BatchNorm", rank)(3, backend="simulator", **options)).train(training)
    for seed in range(2 if options["momentum"] is None and training else 1):
        judge_step(module, drawn_step(SHAPES[rank], dtype, seed=seed))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("options", OPTIONS, ids=names)
def test_every_option_in_two_dimensions(options: dict[str, Any], training: bool) -> None:
    judge_options(4, torch.float32, options, training)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rank", SHAPES)
def test_options_in_other_ranks_and_dtypes(rank: int, dtype: torch.dtype) -> None:
    for number, options in enumerate(SOME_OPTIONS):
        judge_options(rank, dtype, options, training=number % 4 != 3)


@pytest.mark.parametrize("relu_mask", ["save", "recompute"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "kind, rank", [("ReLU", 2), ("ReLU", 3), ("ReLU", 4), ("ReLU", 5), ("AddReLU", 4), ("AddReLU", 5)]
)
def test_fused_modules(kind: str, rank: int, dtype: torch.dtype, relu_mask: str) -> None:
    made = module_class(f"BatchNorm{kind}", rank)(3, relu_mask=relu_mask, backend="simulator")
    module = with_drawn_state(made)
    for training in (True, False):
        judge_step(module.train(training), drawn_step(SHAPES[rank], dtype, residual=kind == "AddReLU"), relu=True)


@pytest.mark.parametrize("relu_mask", ["save", "recompute"])
def test_a_scale_without_a_shift(relu_mask: str) -> None:
    module = with_drawn_state(nbt.BatchNormReLU2d(3, bias=False, relu_mask=relu_mask, backend="simulator"))
    assert list(module.state_dict()) == ["weight", "running_mean", "running_var", "num_batches_tracked"]
    judge_step(module, drawn_step(SHAPES[4], torch.float32), relu=True)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("options", OPTIONS[::2], ids=names)
def test_the_path_through_torch_is_torchs_to_the_bit(options: dict[str, Any], training: bool) -> None:
    ours = with_drawn_state(nbt.BatchNorm2d(3, **options)).train(training)
    theirs = with_drawn_state(torch.nn.BatchNorm2d(3, **options)).train(training)
    for seed in range(2):
        step = drawn_step(SHAPES[4], torch.float32, seed=seed)
        got, want = step.run(ours), step.run(theirs)
        assert {name: values.tobytes() for name, values in got.items()} == {n: v.tobytes() for n, v in want.items()}
    # With momentum None the average is formed on tensors, where torch reads the counter into Python: a rounding.
    for name, values in theirs.state_dict().items():
        torch.testing.assert_close(
            ours.state_dict()[name], values, rtol=0 if options["momentum"] is not None else 3e-7, atol=0
        )


WRONG_CALLS: dict[str, Any] = {
    "rank": lambda kind: kind(3)(drawn((3, 4, 5))),
    "one value": lambda kind: kind(3)(drawn((1, 3, 1, 1))),
    "channels": lambda kind: kind(4)(drawn((2, 3, 4, 4))),
    "channels without parameters": lambda kind: kind(4, affine=False)(drawn((2, 3, 4, 4))),
    "channels without statistics": lambda kind: kind(4, track_running_stats=False)(drawn((2, 3, 4, 4))),
    "eps": lambda kind: kind(3, eps=0)(drawn((2, 3, 4, 4))),
    "negative eps": lambda kind: kind(3, eps=-1)(drawn((2, 3, 4, 4))),
    "unknown argument": lambda kind: kind(3, beta=1),
}


def raised_by(call: Any, kind: Any) -> tuple[type[Exception], str]:
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        call(kind)
    return caught.type, str(caught.value)


@pytest.mark.parametrize("backend", ["simulator", "torch"])
@pytest.mark.parametrize("call", WRONG_CALLS)
def test_errors_are_torchs(call: str, backend: str) -> None:
    def ours(*arguments: Any, **named: Any) -> Any:
        return nbt.BatchNorm2d(*arguments, backend=backend, **named)

    kind, message = raised_by(WRONG_CALLS[call], ours)
    wanted, wanted_message = raised_by(WRONG_CALLS[call], torch.nn.BatchNorm2d)
    assert kind is wanted
    assert message.replace("KernelBatchNorm", "_BatchNorm") in (
        wanted_message,
        wanted_message.replace("BatchNorm2d", "_BatchNorm"),
    )


FUNCTIONS: dict[str, Any] = {
    "no statistics": lambda f: f(drawn((2, 3)), None, None),
    "no variance": lambda f: f(drawn((2, 3)), torch.zeros(3), None),
    "no variance in training": lambda f: f(drawn((2, 3)), torch.zeros(3), None, training=True),
    "length of the bias": lambda f: f(drawn((2, 3)), None, None, torch.ones(3), torch.zeros(2), training=True),
}


@pytest.mark.parametrize("call", FUNCTIONS)
def test_errors_of_the_function_are_torchs(call: str) -> None:
    def ours(*arguments: Any, **named: Any) -> Any:
        return nbt.batch_norm(*arguments, backend="simulator", **named)

    assert raised_by(FUNCTIONS[call], ours) == raised_by(FUNCTIONS[call], torch.nn.functional.batch_norm)


def test_what_the_kernel_does_not_take_is_refused() -> None:
    module = nbt.BatchNorm2d(3, backend="simulator")
    with pytest.raises(TypeError, match="input is torch.float64; accepted by the kernel: torch.float32"):
        module(drawn((2, 3, 4, 4), torch.float64))
    with pytest.raises(TypeError, match="running_mean is torch.float64"):
        copy.deepcopy(module).double()(drawn((2, 3, 4, 4)))
    with pytest.raises(ValueError, match=r"residual has shape \(2, 3, 4, 1\); accepted: \(2, 3, 4, 4\)"):
        nbt.BatchNormAddReLU2d(3)(drawn((2, 3, 4, 4)), drawn((2, 3, 4, 1)))
    with pytest.raises(ValueError, match="relu_mask is 'keep'; accepted: 'save', 'recompute'"):
        nbt.BatchNormReLU2d(3, relu_mask="keep")
    with pytest.raises(ValueError, match="num_batches_tracked is None; accepted with momentum=None"):
        nbt.batch_norm(drawn((2, 3)), torch.zeros(3), torch.ones(3), training=True, momentum=None)


def test_a_refused_batch_leaves_the_state_alone() -> None:
    for backend in ("simulator", "torch"):
        module = nbt.BatchNorm1d(3, backend=backend)
        before = copy.deepcopy(module.state_dict())
        with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
            module(drawn((1, 3)))
        assert all(torch.equal(values, before[name]) for name, values in module.state_dict().items())


@pytest.mark.parametrize("momentum", [None, 0.1])
@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (2, 3, 0, 4)])
@pytest.mark.parametrize("backend", ["simulator", "torch"])
def test_an_empty_batch_counts_and_moves_nothing(backend: str, shape: tuple[int, ...], momentum: float | None) -> None:
    module = with_drawn_state(nbt.BatchNorm2d(3, momentum=momentum, backend=backend))
    before = copy.deepcopy(module.state_dict())
    made = Step(drawn(shape), drawn(shape)).run(module)
    assert made["y"].shape == made["dx"].shape == shape
    assert not made["dgamma"].any() and not made["dbeta"].any()
    assert int(module.num_batches_tracked) == 1
    assert all(torch.equal(getattr(module, name), before[name]) for name in STATISTICS)


def test_without_statistics_eval_uses_those_of_the_batch() -> None:
    module = nbt.BatchNorm2d(3, track_running_stats=False, backend="simulator").eval()
    judge_step(module, drawn_step(SHAPES[4], torch.float32))
    assert list(module.state_dict()) == ["weight", "bias"]


@pytest.mark.parametrize("kind", ["BatchNorm", "BatchNormReLU", "BatchNormAddReLU"])
def test_state_loads_both_ways_and_modules_copy(kind: str) -> None:
    ours = with_drawn_state(module_class(kind, 4)(3, backend="simulator"))
    theirs = torch.nn.BatchNorm2d(3)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert ours.state_dict()._metadata == theirs.state_dict()._metadata
    theirs.load_state_dict(ours.state_dict(), strict=True)
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), module_class(kind, 4)(3)):
        copied.load_state_dict(theirs.state_dict(), strict=True)
        assert type(copied) is type(ours) and isinstance(copied, torch.nn.BatchNorm2d)
        assert all(torch.equal(values, ours.state_dict()[name]) for name, values in copied.state_dict().items())
    assert pickle.loads(pickle.dumps(ours)).backend == "simulator"


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("backend", ["simulator", "torch"])
def test_narrow_modules_keep_wide_statistics(backend: str, dtype: torch.dtype) -> None:
    module = with_drawn_state(nbt.BatchNorm2d(3, backend=backend))
    before = module.running_mean.clone()
    module.to(dtype)
    assert module.weight.dtype == module.bias.dtype == dtype
    assert module.running_mean.dtype == module.running_var.dtype == torch.float32
    assert torch.equal(module.running_mean, before)
    # A step of 2^-10 of the running mean is lost in eight significant bits.
    module.momentum = 2.0**-10
    module.running_mean.fill_(1.0)
    made = drawn_step(SHAPES[4], dtype).run(module)
    assert (module.running_mean != 1).all() and module.weight.grad.dtype == dtype
    assert made["dx"].dtype.name == str(dtype).removeprefix("torch.")
    assert nbt.BatchNorm2d(3, dtype=dtype).running_mean.dtype == torch.float32
    assert module.double().running_mean.dtype == torch.float64


@pytest.mark.parametrize("kind", ["BatchNorm", "BatchNormReLU"])
def test_narrow_parameters_are_judged_as_torch_in_float64(kind: str) -> None:
    module = with_drawn_state(module_class(kind, 4)(3, backend="simulator")).bfloat16()
    judge_step(module, drawn_step(SHAPES[4], torch.bfloat16), relu=kind == "BatchNormReLU")


def test_narrow_statistics_of_another_maker_are_taken_as_they_are() -> None:
    module = nbt.convert_batch_norm(torch.nn.BatchNorm2d(3).bfloat16(), backend="simulator")
    module(drawn(SHAPES[4], torch.bfloat16))
    assert module.running_mean.dtype == torch.bfloat16 and module.running_mean.any()


def test_the_representation_names_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    options = "3, eps=1e-05, momentum=0.1, affine=True, bias=True, track_running_stats=True"
    monkeypatch.delenv("NKI_SIMULATOR", raising=False)
    assert repr(nbt.BatchNorm2d(3)) == f"BatchNorm2d({options}, path=torch)"
    assert repr(nbt.BatchNormReLU2d(3)) == f"BatchNormReLU2d({options}, relu_mask=save, path=torch)"
    assert repr(nbt.BatchNorm2d(3, backend="neuron")) == f"BatchNorm2d({options}, path=neuron)"
    monkeypatch.setenv("NKI_SIMULATOR", "1")
    assert repr(nbt.BatchNorm2d(3)) == f"BatchNorm2d({options}, path=simulator)"
    assert "path=simulator" in repr(nbt.BatchNorm2d(3, affine=False, track_running_stats=False))


def test_weight_averaging_finds_the_layers() -> None:
    module = nbt.BatchNorm2d(3, backend="simulator")
    batches = [drawn(SHAPES[4], seed=seed) for seed in range(3)]
    torch.optim.swa_utils.update_bn(batches, module)
    wanted = torch.stack([batch.mean((0, 2, 3)) for batch in batches]).mean(0)
    torch.testing.assert_close(module.running_mean, wanted)
    assert int(module.num_batches_tracked) == 3 and module.momentum == 0.1


def test_without_a_counter_an_average_stays_where_it_is() -> None:
    """As in torch, where the counter of a module was taken away."""
    for kind in (torch.nn.BatchNorm1d, nbt.BatchNorm1d):
        module = kind(3, momentum=None)
        module.num_batches_tracked = None
        module(drawn((4, 3)))
        assert not module.running_mean.any() and np.array_equal(module.running_var, np.ones(3))


def test_importing_the_package_does_not_import_torch() -> None:
    program = "import nki_bn, sys; nki_bn.batch_norm_fwd; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", program], check=False).returncode == 0
