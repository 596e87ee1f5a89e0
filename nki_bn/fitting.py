# SPDX-License-Identifier: Apache-2.0
"""Whether the strategies that size themselves fit into SBUF, and what to say when they do not."""

from __future__ import annotations

from collections.abc import Sequence

from nki_bn.kernels.plan import Buffer, total_bytes
from nki_bn.kernels.sizing import (
    NARROWEST_TILE,
    SBUF_SLACK_BYTES,
    ForwardBuffers,
    StagedBuffers,
    geometry_of,
    widest_that_fits,
    width_of,
)
from nki_bn.problem import BackwardProblem, Problem

# Buffers that a refusal names.
_NAMED = 3


def fits(problem: Problem, sbuf_bytes: int) -> bool:
    """Whether ``staged`` (or ``two_read`` for a forward) has a size for ``sbuf_bytes`` per partition."""
    return _fits(problem, problem.extents, sbuf_bytes)


def require_fit(problem: Problem, sbuf_bytes: int) -> None:
    """Refuse what does not fit.

    Raises:
        ValueError: it does not; names the largest buffers, and a smaller shape that fits.
    """
    if fits(problem, sbuf_bytes):
        return
    buffers = narrowest_buffers(problem)
    raise ValueError(
        f"problem has shape {problem.shape} in {problem.dtype} on {problem.lnc} core(s), which does not fit into "
        f"{sbuf_bytes} bytes of SBUF per partition: with the narrowest tile, of {NARROWEST_TILE} columns, it takes "
        f"{total_bytes(buffers) + SBUF_SLACK_BYTES}; largest: {largest(buffers)}; accepted: "
        f"{_smaller(problem, sbuf_bytes)}"
    )


def largest(buffers: Sequence[Buffer]) -> str:
    """The largest of a list of buffers, in words."""
    by_size = sorted(buffers, key=lambda buffer: -total_bytes([buffer]))
    return ", ".join(
        f"{buffer.name} ({buffer.count} x {buffer.columns} {buffer.dtype}, {total_bytes([buffer])} bytes)"
        for buffer in by_size[:_NAMED]
    )


def narrowest_buffers(problem: Problem) -> list[Buffer]:
    """What the strategy allocates at least."""
    geometry = geometry_of(problem.extents, problem.lnc)
    recipe = _recipe(problem, geometry.channel_tiles)
    width = width_of(geometry, NARROWEST_TILE, recipe.chunk())
    buffers: list[Buffer] = recipe.buffers(width, min(2, width.tiles))
    return buffers


def _recipe(problem: Problem, channel_tiles: int) -> StagedBuffers | ForwardBuffers:
    """The buffers of the largest set of outputs, by which these strategies are sized."""
    if isinstance(problem, BackwardProblem):
        return StagedBuffers(problem.dtype, problem.relu, problem.residual, True, channel_tiles)
    return ForwardBuffers(problem.dtype, True, True, True, True)


def _fits(problem: Problem, extents: tuple[int, int, int], sbuf_bytes: int) -> bool:
    geometry = geometry_of(extents, problem.lnc)
    recipe = _recipe(problem, geometry.channel_tiles)
    return widest_that_fits(recipe, geometry, sbuf_bytes, _rounds(problem, geometry.channel_tiles)) is not None


def _rounds(problem: Problem, channel_tiles: int) -> int:
    """Channel tiles whose data goes through the same slots without a pause."""
    return channel_tiles if isinstance(problem, BackwardProblem) else 1


def _smaller(problem: Problem, sbuf_bytes: int) -> str:
    """The first of a half, a quarter, ... of the values per channel that fits."""
    batch, channels, spatial = problem.extents
    while batch * spatial > 1:
        batch, spatial = (batch // 2, spatial) if batch > 1 else (1, spatial // 2)
        if _fits(problem, (batch, channels, spatial), sbuf_bytes):
            return f"launches over parts of it, as of {[batch, channels, spatial]}"
    return "more SBUF; no part of this shape fits"
