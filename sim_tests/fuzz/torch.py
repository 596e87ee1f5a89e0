# SPDX-License-Identifier: Apache-2.0
"""torch: modules and functions in the simulator, with odd shapes, layouts, options and arguments."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch_judging import RANKS, drawn_step, judge_step, with_drawn_state

import nki_bn.torch as nbt
from fuzz.surface import Surface, check_refusal

SHAPES = ((6, 3), (4, 3, 5), (3, 3, 4, 5), (2, 3, 2, 3, 4), (1, 3, 2, 2), (1, 3), (2, 3, 1, 1), (7, 3, 1))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FUNCTIONS = {"BatchNorm": nbt.batch_norm, "ReLU": nbt.batch_norm_relu, "AddReLU": nbt.batch_norm_add_relu}
NAMES = (
    *("input", "residual", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    *("num_batches_tracked", "relu_mask", "backend", "dtype", "shape", "dimension", "channels", "elements", "x"),
)


@st.composite
def modules(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A step of a module: its kind, options, the shape, dtype and memory of its input."""
    kind = draw(st.sampled_from(sorted(FUNCTIONS)))
    made: dict[str, Any] = {
        "eps": draw(st.sampled_from([1e-5, 1e-3])),
        "momentum": draw(st.sampled_from([0.1, 1.0, None])),
        "affine": draw(st.booleans()),
        "track_running_stats": draw(st.booleans()),
    }
    if kind != "BatchNorm":
        made["relu_mask"] = draw(st.sampled_from(["save", "recompute"]))
    shapes = [shape for shape in SHAPES[:4] if hasattr(nbt, _class(kind, shape))]
    return "module", {
        "kind": kind,
        "options": made,
        "shape": draw(st.sampled_from(shapes)),
        "dtype": draw(st.sampled_from(DTYPES)),
        "training": draw(st.booleans()),
        "channels_last": draw(st.booleans()),
        "seed": draw(st.integers(0, 99)),
    }


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A call of a function, of which up to two arguments are odd."""
    kind, shape = draw(st.sampled_from(sorted(FUNCTIONS))), draw(st.sampled_from(SHAPES))
    column = torch.ones(shape[1])
    made: dict[str, Any] = {"input": drawn_step(shape, draw(st.sampled_from(DTYPES))).x, "backend": "simulator"}
    made |= {name: column.clone() for name in ("running_mean", "running_var", "weight", "bias")}
    made |= {"training": draw(st.booleans()), "momentum": 0.1, "eps": 1e-5}
    if kind == "AddReLU":
        made["residual"] = made["input"].clone()
    if kind != "BatchNorm":
        made["relu_mask"] = draw(st.sampled_from(["save", "recompute"]))
    names = draw(st.lists(st.sampled_from([*made, "num_batches_tracked"]), max_size=2, unique=True))
    return "call", {"kind": kind, "arguments": made | {name: draw(_odd(shape)) for name in names}}


def _odd(shape: tuple[int, ...]) -> st.SearchStrategy[Any]:
    channels = shape[1]
    tensors = [torch.ones(some, dtype=dtype) for some in (shape, (channels,)) for dtype in (*DTYPES, torch.float64)]
    tensors += [torch.ones(some) for some in ((), (channels + 1,), (1, channels), (1,) * 6, (2, 0), (0, 3), (0, 3, 4))]
    tensors += [torch.ones(channels, dtype=torch.int64), torch.tensor(0), torch.ones(channels, device="meta")]
    tensors += [torch.full((channels,), value) for value in (float("nan"), float("inf"), -1.0, 0.0)]
    values = [
        None,
        "x",
        "torch",
        "neuron",
        "save",
        0,
        1,
        -1,
        0.0,
        0.5,
        1e-50,
        1e39,
        float("nan"),
        True,
        [],
        {},
        object(),
    ]
    return st.sampled_from([*tensors, *values])


def _class(kind: str, shape: tuple[int, ...]) -> str:
    return f"BatchNorm{kind.removeprefix('BatchNorm')}{RANKS[len(shape)]}"


def check_example(example: tuple[str, dict[str, Any]]) -> None:
    """A module's step is torch's own in float64; a function gives a result like its input, or refuses."""
    what, given = example
    if what == "module":
        _check_module(**given)
    else:
        _check_call(**given)


def _check_module(
    kind: str,
    options: dict[str, Any],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    training: bool,
    channels_last: bool,
    seed: int,
) -> None:
    module = getattr(nbt, _class(kind, shape))(3, backend="simulator", **options)
    step = drawn_step(shape, dtype, kind == "AddReLU", seed)
    if channels_last and len(shape) == 4:
        step = type(step)(step.x.contiguous(memory_format=torch.channels_last), step.dy, step.residual)
    judge_step(with_drawn_state(module).train(training), step, kind != "BatchNorm")


def _check_call(kind: str, arguments: dict[str, Any]) -> None:
    x = arguments["input"]
    before = _copies(arguments, ("input", "residual", "weight", "bias"))
    statistics = _copies(arguments, ("running_mean", "running_var"))
    try:
        y = FUNCTIONS[kind](**arguments)
    except RuntimeError as error:
        assert any(name in str(error) for name in NAMES), error
        _same(statistics, _copies(arguments, ("running_mean", "running_var")))
    except Exception as error:
        if "batch_norm eps must be positive" in str(error) or "more than 1 value per channel" in str(error):
            return
        if "running_mean and running_var must" not in str(error):
            check_refusal(error, NAMES)
        _same(statistics, _copies(arguments, ("running_mean", "running_var")))
    else:
        assert y.shape == x.shape
    _same(before, _copies(arguments, ("input", "residual", "weight", "bias")))


def _copies(arguments: dict[str, Any], names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    found = {name: arguments.get(name) for name in names}
    return {
        name: value.clone() for name, value in found.items() if isinstance(value, torch.Tensor) and not value.is_meta
    }


def _same(old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> None:
    for name, value in old.items():
        assert torch.equal(value.nan_to_num(7.0), new[name].nan_to_num(7.0)), f"{name} was written to"


SURFACE = Surface(st.one_of(modules(), calls()), check_example)
