# SPDX-License-Identifier: Apache-2.0
"""Judging a step on replicas as one step on the global batch, by the table of tolerances."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from replicas import (
    Backward,
    Forward,
    Layer,
    Part,
    all_reduce,
    synchronised_backward,
    synchronised_forward,
    with_masks,
)

from nki_bn import reference, tolerances, verify
from nki_bn.comparison import compare
from nki_bn.problem import BackwardCase, ForwardCase
from nki_bn.reference import Array
from nki_bn.tolerances import FLOAT32, Arithmetic, everywhere


def same_bits(got: Array, want: Array) -> None:
    """Assert equality of dtype, shape and every bit."""
    assert got.dtype == want.dtype and got.shape == want.shape and got.tobytes() == want.tobytes()


def joined(parts: Sequence[Array]) -> Array:
    """The global batch from its shards."""
    return np.concatenate(parts)


def stages(layer: Layer, part: Part) -> bool:
    """Whether the backward keeps a bfloat16 copy of dy' of some tiles."""
    return any(buffer.name == "staged" for buffer in layer.backward_plan(part).buffers)


def arithmetic_of(part: Part, layer: Layer, staged: bool = False) -> Arithmetic:
    """What decides the tolerances of the layer's launches on ``part``."""
    return Arithmetic(part.x.dtype.name, layer.options.numerics, layer.options.accumulate, staged)


def reduction(parts: Sequence[Part]) -> float:
    """Share of the terms by which a float32 reduction may be off: weight, product, and a sum in pairs."""
    return (2 + math.ceil(math.log2(len(parts)))) * FLOAT32


def judge_statistics(whole: Part, parts: Sequence[Part], forward: Forward, layer: Layer) -> None:
    """Mean and variance, by the table of tolerances and what the reductions add to it."""
    mean, var = reference.statistics(whole.x)
    table = tolerances.statistics(whole.x, mean, var, arithmetic_of(whole, layer))
    moved = reduction(parts) * (np.abs(mean) + reference.spread(whole.x))
    of_var = reduction(parts) * var + 2 * (table["mean"].error + moved) * np.sqrt(var) + moved**2
    for name, got, want, more in (("mean", forward.mean, mean, moved), ("var", forward.var, var, of_var)):
        row = compare(name, got, want, everywhere(table[name].error + more))
        assert row.ok, row


def judge_output(whole: Part, forward: Forward, layer: Layer) -> None:
    """y of all replicas against the reference of the global batch at the same float32 statistics."""
    case = ForwardCase(whole.x, layer.gamma, layer.beta, fuse_relu=layer.relu != "none", residual=whole.residual)
    given = case.fuse_relu, case.residual, (forward.mean, forward.var)
    want = reference.batch_norm_fwd(whole.x, layer.gamma, layer.beta, layer.eps, *given)
    error = tolerances.forward(case, want, arithmetic_of(whole, layer))
    row = compare("y", joined(forward.y), want.y, everywhere(error))
    assert row.ok, row


def judge_gradients(whole: Part, parts: Sequence[Part], backward: Backward, forward: Forward, layer: Layer) -> None:
    """dx of all replicas, and the sums of their dgamma and dbeta, as those of one backward of the global batch.

    A replica's sum is one more partial among those whose addition the table allows for.
    """
    relu = layer.relu != "none", whole.mask if layer.relu == "mask" else None
    columns = forward.mean, forward.var, layer.gamma, layer.beta, layer.eps
    case = BackwardCase(whole.dy, whole.x, *columns, *relu, residual=whole.residual)
    ones = [1.0] * len(parts)
    outputs = joined(backward.dx), all_reduce(backward.dgamma, ones), all_reduce(backward.dbeta, ones)
    staged = any(stages(layer, part) for part in parts if part.total)
    rows = verify.judge_backward(case, outputs, arithmetic_of(whole, layer, staged))
    assert all(row.ok for row in rows), f"\n{verify.table(rows)}"


def judge_replicas(layer: Layer, whole: Part, parts: Sequence[Part]) -> None:
    """A synchronised step on the shards of ``whole``: statistics, y and mask, dx, and the sums of dgamma and dbeta.

    y and mask are also those of one launch of the global batch with the same statistics, bit for bit.
    """
    forward = synchronised_forward(layer, parts)
    judge_statistics(whole, parts, forward, layer)
    judge_output(whole, forward, layer)
    y, mask = layer.given_forward(whole, forward.mean, forward.var)
    same_bits(joined(forward.y), y)
    if layer.relu != "none":
        same_bits(joined(forward.masks), mask)
        (whole,), parts = with_masks([whole], [mask]), with_masks(parts, forward.masks)
    backward = synchronised_backward(layer, parts, forward.mean, forward.var)
    judge_gradients(whole, parts, backward, forward, layer)
