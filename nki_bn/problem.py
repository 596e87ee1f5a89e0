# SPDX-License-Identifier: Apache-2.0
"""What is asked: the checked arguments of a batch norm, as a frozen problem.

Everything here raises ``TypeError`` for a wrong type or dtype and ``ValueError`` for a wrong value or shape, with the
name of the argument, what was received and what is accepted.
"""

from __future__ import annotations

import math
import numbers
import operator
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nki_bn.hardware import load_target

Array = npt.NDArray[Any]

DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
OUTPUTS = ("dx", "dgamma", "dbeta")
GRADIENTS = (*OUTPUTS, "dresidual")
RELU_MODES = ("none", "mask", "recompute")
SYNC_MODES = ("two_round", "one_round")
PRECISIONS = ("high", "fast")
LNC_VARIABLE = "NEURON_LOGICAL_NC_CONFIG"

# What a signed 64-bit integer holds: sizes in bytes, and counts of batches.
_LARGEST = 2**63 - 1


@dataclass(frozen=True)
class Problem:
    """What a forward and a backward to plan and run have in common.

    Args:
        shape: [B, C, ...] of x, rank 2 to 5, C at least 1; a tuple of ints afterwards.
        dtype: of x and what is shaped like it: float32, float16 or bfloat16.
        training: batch statistics (True) or frozen ones (False).
        relu: "none", "mask" (the forward stores a mask, the backward reads it) or "recompute" (the forward stores none,
            the backward makes it from x again).
        residual: the kernel reads a residual.
        lnc: physical cores that share the work.
        target: trn1, trn2, trn3 or an alias; canonical afterwards.

    Raises:
        TypeError, ValueError: see the head of the module.
    """

    shape: tuple[int, ...]
    dtype: str
    training: bool = True
    relu: str = "none"
    residual: bool = False
    lnc: int = 2
    target: str = "trn2"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", _shape_of_x(self.shape))
        if not isinstance(self.dtype, str) or self.dtype not in DTYPES:
            raise TypeError(f"dtype {self.dtype!r} is unknown; accepted: {', '.join(DTYPES)}")
        if math.prod(self.shape) * self.itemsize > _LARGEST:
            raise ValueError(f"shape {self.shape} of x is too large; accepted: less than 2**63 bytes")
        _check_choice("relu", self.relu, RELU_MODES)
        for flag in ("training", "residual"):
            object.__setattr__(self, flag, require_flag(flag, getattr(self, flag)))
        object.__setattr__(self, "target", load_target(self.target).name)
        object.__setattr__(self, "lnc", resolve_lnc(self.lnc, self.target))

    @property
    def batch(self) -> int:
        """B, the first dimension."""
        return self.shape[0]

    @property
    def channels(self) -> int:
        """C, the second dimension."""
        return self.shape[1]

    @property
    def spatial(self) -> int:
        """S = D*H*W, the values of one channel in one example."""
        return math.prod(self.shape[2:])

    @property
    def count(self) -> int:
        """N = B*S, the values of one channel."""
        return self.batch * self.spatial

    @property
    def extents(self) -> tuple[int, int, int]:
        """(B, C, S), as kernels and plans take the shape."""
        return self.batch, self.channels, self.spatial

    @property
    def itemsize(self) -> int:
        """Bytes of one element of x."""
        return DTYPES[self.dtype].itemsize

    @property
    def layout(self) -> tuple[int, int, int, int, int]:
        """The shape as [B, C, D, H, W], with sizes of 1 put after C."""
        batch, channels, *rest = self.shape
        depth, height, width = [1] * (3 - len(rest)) + rest
        return batch, channels, depth, height, width


@dataclass(frozen=True)
class ForwardProblem(Problem):
    """A forward pass to plan and run; a residual is read wherever there is one."""


@dataclass(frozen=True)
class BackwardProblem(Problem):
    """A backward pass to plan and run; a residual is read only where a mask is recomputed.

    Args:
        need: the outputs to compute, a part of ``GRADIENTS`` in that order.
        precision: "high", or for 16-bit dtypes "fast": dx may round its x-term to the dtype of x.
    """

    need: tuple[str, ...] = OUTPUTS
    precision: str = "high"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_precision(self.precision, self.dtype)
        if self.residual and self.relu != "recompute":
            raise ValueError(f"residual is True with relu {self.relu!r}; accepted: True with relu 'recompute', False")
        object.__setattr__(self, "need", needed_outputs(self.need, GRADIENTS))


@dataclass(frozen=True)
class ForwardCase:
    """The arguments of ``batch_norm_fwd`` that say what is to be computed, under their names there; not checked."""

    x: Array
    gamma: Array | None
    beta: Array | None
    running_mean: Array | None = None
    running_var: Array | None = None
    momentum: float | None = 0.1
    eps: float = 1e-5
    training: bool = True
    fuse_relu: bool = False
    residual: Array | None = None
    num_batches_tracked: int | None = None
    save_relu_mask: bool = True

    @property
    def relu(self) -> str:
        """One of ``RELU_MODES``."""
        return "none" if not self.fuse_relu else "mask" if self.save_relu_mask else "recompute"


@dataclass(frozen=True)
class BackwardCase:
    """The arguments of ``batch_norm_bwd`` that say what is to be computed, under their names there; not checked."""

    dy: Array
    x: Array
    mean: Array
    var: Array
    gamma: Array | None
    beta: Array | None
    eps: float = 1e-5
    fuse_relu: bool = False
    relu_mask: Array | None = None
    training: bool = True
    residual: Array | None = None

    @property
    def relu(self) -> str:
        """One of ``RELU_MODES``."""
        return "none" if not self.fuse_relu else "recompute" if self.relu_mask is None else "mask"


def require_values(problem: Problem) -> None:
    """Refuse an empty batch, for which no kernel runs."""
    if not problem.count:
        raise ValueError(f"x has shape {problem.shape}, so no kernel would run; accepted: sizes from 1 up")


def require_statistics(problem: Problem) -> None:
    """Refuse a forward in training of one value per channel: its batch has no variance."""
    if isinstance(problem, ForwardProblem) and problem.training and problem.count == 1:
        raise ValueError(f"x has 1 value per channel, shape {problem.shape}; accepted in training: more than 1")


def needed_outputs(need: Iterable[str], accepted: Sequence[str] = OUTPUTS) -> tuple[str, ...]:
    """``need`` as a tuple in the order of ``accepted``, each name once."""
    names = ", ".join(accepted)
    # A NumPy array without dimensions has __iter__, and raises in it.
    iterable = isinstance(need, Iterable) and not isinstance(need, str) and getattr(need, "ndim", 1) > 0
    asked = tuple(need) if iterable else ()
    if not iterable or not all(isinstance(name, str) for name in asked):
        raise TypeError(f"need must be an iterable of output names, got {need!r}; accepted names: {names}")
    for name in asked:
        if name not in accepted:
            raise ValueError(f"need has {name!r}; accepted names: {names}")
    return tuple(name for name in accepted if name in asked)


def resolve_lnc(lnc: int | None, target: str) -> int:
    """Cores to use: ``lnc``, else NEURON_LOGICAL_NC_CONFIG, else as many as a logical core of ``target`` has."""
    most = load_target(target).logical_cores
    accepted = [str(cores) for cores in range(1, most + 1)]
    if lnc is None:
        setting = os.environ.get(LNC_VARIABLE, str(most))
        if setting not in accepted:
            raise ValueError(f"{LNC_VARIABLE} is {setting!r}; accepted on {target}: {' or '.join(accepted)}")
        return int(setting)
    if isinstance(lnc, bool) or not isinstance(lnc, numbers.Integral):
        raise TypeError(f"lnc must be an int, got {type(lnc).__name__}")
    if str(lnc) not in accepted:
        raise ValueError(f"lnc is {lnc}; accepted on {target}: {' or '.join(accepted)}")
    return int(lnc)


def dtype_name(name: str, array: Array) -> str:
    """The name of the dtype of ``array``, which must be one of ``DTYPES``."""
    require_array(name, array)
    for known, dtype in DTYPES.items():
        if array.dtype == dtype:
            return known
    hint = f"; convert it with {name}.astype(np.float32)" if array.dtype == np.float64 else ""
    raise TypeError(f"{name} is {array.dtype}; accepted: float32, float16 and ml_dtypes.bfloat16{hint}")


def require_array(name: str, value: object) -> None:
    """Refuse anything but a NumPy array; a masked one too, whose mask would be lost."""
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array; masked arrays are not accepted, only plain NumPy arrays")
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{name} must be a NumPy array, got {type(value).__name__}")


def require_like(name: str, array: Array, dtype: np.dtype[Any], shape: Sequence[int]) -> None:
    """Refuse anything but a NumPy array of this dtype and shape."""
    require_array(name, array)
    if array.dtype != dtype:
        raise TypeError(f"{name} is {array.dtype}; accepted: {dtype}")
    if array.shape != tuple(shape):
        raise ValueError(f"{name} has shape {array.shape}; accepted: {tuple(shape)}")


def require_column(name: str, values: Array, channels: int) -> None:
    """Refuse anything but [C] float32."""
    require_like(name, values, DTYPES["float32"], (channels,))


def require_variance(name: str, values: Array) -> None:
    """Refuse a variance below 0 (NaN passes)."""
    if np.any(values < 0):
        raise ValueError(f"{name} has {float(np.nanmin(values))}; accepted: values from 0 up")


def require_mask(relu_mask: Array, shape: Sequence[int], used: bool) -> None:
    """Refuse a mask that is not uint8 of the shape of x or, where it is ``used``, has values other than 0 and 1."""
    require_like("relu_mask", relu_mask, np.dtype(np.uint8), shape)
    if used and relu_mask.size and relu_mask.max() > 1:
        raise ValueError(f"relu_mask has {relu_mask.max()}; accepted: 0 and 1")


def require_flag(name: str, value: object) -> bool:
    """``value`` as a bool; anything but a bool is refused."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be a bool, got {value!r}")
    return bool(value)


def require_eps(eps: float, training: bool) -> float:
    """``eps`` as a float: in float32 finite, above 0 in training, from 0 up with frozen statistics."""
    value = _require_real("eps", eps)
    if not _finite(value) or value < 0 or (training and np.float32(value) == 0):
        accepted = "finite values above 0" if training else "finite values from 0 up"
        raise ValueError(f"eps is {value}; accepted {'in training' if training else 'in eval'}: {accepted} in float32")
    return value


def averaging_factor(momentum: float | None, num_batches_tracked: int | None, used: bool) -> float:
    """The weight of this batch in the running statistics: ``momentum``, or for None that of a plain average.

    None has to come with the number of batches before this one, where the weight is ``used``.
    """
    batches = num_batches_tracked
    if batches is not None:
        if isinstance(batches, bool) or not isinstance(batches, numbers.Integral):
            raise TypeError(f"num_batches_tracked must be an int or None, got {type(batches).__name__}")
        if batches > _LARGEST:
            raise ValueError("num_batches_tracked is 2**63 or more; accepted: integers from 0 up, below that")
        if batches < 0:
            raise ValueError(f"num_batches_tracked is {batches}; accepted: integers from 0 up")
    if momentum is None:
        if batches is None and used:
            raise ValueError("num_batches_tracked is None; accepted with momentum=None: the number of batches before")
        return 1.0 / (int(batches or 0) + 1)
    value = _require_real("momentum", momentum)
    if not _finite(value):
        raise ValueError(f"momentum is {value}; accepted: finite values and None, in float32")
    return value


def _require_real(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a real number, got {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is beyond the range of a float; accepted: finite values in float32") from None


def _finite(value: float) -> bool:
    """Whether ``value`` is finite in float32, in which the kernels use it."""
    with np.errstate(over="ignore"):
        return bool(np.isfinite(np.float32(value)))


def check_precision(precision: str, dtype: str) -> None:
    """Refuse an unknown precision, and "fast" where nothing would be faster."""
    _check_choice("precision", precision, PRECISIONS)
    if precision == "fast" and dtype == "float32":
        raise ValueError("precision is 'fast' with float32; accepted: 'fast' with 16-bit dtypes, 'high' with all")


def _check_choice(name: str, value: object, accepted: Sequence[str]) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {type(value).__name__}")
    if value not in accepted:
        raise ValueError(f"{name} is {value!r}; accepted: {', '.join(accepted)}")


def _shape_of_x(shape: Sequence[int]) -> tuple[int, ...]:
    """``shape`` as a tuple of ints, if x may have it."""
    if not isinstance(shape, tuple | list):
        raise TypeError(f"shape of x must be a tuple of integers, got {type(shape).__name__}")
    sizes = tuple(_size(size) for size in shape)
    if not 2 <= len(sizes) <= 5:
        raise ValueError(f"shape {sizes} of x has rank {len(sizes)}; accepted: ranks 2 to 5, [B, C, ...]")
    if min(sizes) < 0 or sizes[1] == 0:
        raise ValueError(f"shape {sizes} of x has a size too small; accepted: [B, C, ...] with C at least 1")
    return sizes


def _size(size: int) -> int:
    if isinstance(size, bool | np.bool_) or not hasattr(size, "__index__"):
        raise TypeError(f"shape of x has {size!r}; accepted: integers")
    return operator.index(size)
