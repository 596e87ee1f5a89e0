# SPDX-License-Identifier: Apache-2.0
"""Correctness before timing: once per code path, at a small shape that takes the same path."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import fields, replace
from itertools import product
from math import ceil, prod

from nki_bn import execute, ops, requests, verify
from nki_bn.bench.strategies import sized
from nki_bn.cases import Draw
from nki_bn.hardware import load_target
from nki_bn.kernels.plan import (
    BackwardPlan,
    ForwardPlan,
    ResidentForwardPlan,
    ResidentPlan,
    TransposedForwardPlan,
    TransposedPlan,
)
from nki_bn.kernels.resident_fwd_plan import forward_layout, forward_size
from nki_bn.kernels.resident_geometry import extent_of_core
from nki_bn.kernels.resident_layout import group_size, layout_of, resident_plan
from nki_bn.kernels.sizing import CHUNK_COLUMNS, geometry_of, width_of
from nki_bn.kernels.transposed_layout import block_size, row_chunks
from nki_bn.predict import Plan
from nki_bn.problem import BackwardProblem, ForwardProblem, Problem
from nki_bn.resident_forward_planner import short_started
from nki_bn.resident_planner import task_of

# What a small shape is made of: batches, and about how many positions. Odd sizes leave ragged tiles.
_BATCHES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 150, 600, 2500)
_POSITIONS = (9, 49, 121, 361, 2209, 5000, 10000)
# Fewer values of a channel say little about its sums.
_LEAST_VALUES = 64
# Larger problems are no small twins of anything.
_MOST_ELEMENTS = 2**24
# SBUF budgets to try, each this share of the one before.
_SHRINK = 0.7
_LEAST_BUDGET = 512
# Columns of chunks where those of a layer are too wide for a small shape to have several.
_NARROW_CHUNK = 64
# So that nothing cancels by chance.
_MEAN = 1.0


class CheckFailed(Exception):
    """Outputs are not those of the reference."""


class Checker:
    """Remembers which code paths are right.

    ``own_shape`` checks every layer at its own shape instead.
    """

    def __init__(self, own_shape: bool = False) -> None:
        self._own_shape = own_shape
        self._found: dict[Hashable, tuple[int, ...] | Exception] = {}

    def shape(self, problem: Problem, plan: Plan) -> tuple[int, ...]:
        """The shape at which this code path agrees with the reference; run there unless that was done before.

        Raises:
            CheckFailed: it does not agree.
            Exception: whatever a kernel raises.
        """
        key = (problem, plan) if self._own_shape else code_path(problem, plan)
        if key not in self._found:
            self._found[key] = self._check(problem, plan)
        found = self._found[key]
        if isinstance(found, Exception):
            raise found
        return found

    def _check(self, problem: Problem, plan: Plan) -> tuple[int, ...] | Exception:
        try:
            if not self._own_shape:
                problem, plan = small_twin(problem, plan)
            check(problem, plan)
        except Exception as error:  # Of whatever kind, it is the verdict on all cases of this path.
            return error
        return problem.shape


def check(problem: Problem, plan: Plan) -> None:
    """Run the kernel on drawn inputs and compare it with the reference.

    Raises:
        CheckFailed: it does not agree.
    """
    arithmetic = verify.arithmetic_of(problem, plan, verify.DEFAULT_OPTIONS)
    draw, lnc, target = Draw(problem.shape, problem.dtype, _MEAN), problem.lnc, problem.target
    with execute.simulation(verify.DEFAULT_OPTIONS):
        if isinstance(plan, BackwardPlan | ResidentPlan | TransposedPlan):
            backward = draw.case(problem.relu, problem.training)
            precision = "fast" if verify.is_fast(plan) else "high"
            request = requests.prepare_backward(backward, precision=precision, lnc=lnc, target=target)
            gradients = ops.run_backward(request, plan)
            rows = verify.judge_backward(backward, gradients, arithmetic)
        else:
            forward = draw.forward(problem.relu, problem.training)
            outputs = ops.run_forward(requests.prepare_forward(forward, lnc, target), plan)
            rows = verify.judge_forward(forward, outputs, arithmetic)
    if not all(row.ok for row in rows):
        raise CheckFailed(f"outputs at shape {problem.shape} are not those of the reference:\n{verify.table(rows)}")


def code_path(problem: Problem, plan: Plan) -> Hashable:
    """What decides which code of the kernels runs; equal for layers that differ in sizes alone."""
    switches = tuple(value for field in fields(plan) if isinstance(value := getattr(plan, field.name), str | bool))
    buffers = tuple(buffer.name for buffer in plan.buffers)
    if isinstance(plan, ResidentPlan):
        sizes = _resident_sizes(problem, plan)
    elif isinstance(plan, ResidentForwardPlan):
        sizes = _forward_sizes(problem, plan)
    elif isinstance(plan, TransposedPlan | TransposedForwardPlan):
        sizes = _transposed_sizes(problem, plan)
    else:
        sizes = _tile_sizes(problem, plan)
    return problem.dtype, problem.lnc, switches, buffers, *sizes


def _resident_sizes(problem: Problem, plan: ResidentPlan) -> tuple[Hashable, ...]:
    size = group_size(plan.shape, plan.cores, layout_of(plan))
    return (
        plan.batch_bands > 1,
        plan.space_bands > 1,
        size.set_chunks > 2,  # a set is several chunks
        plan.group_sets > 1,
        plan.slots > size.chunks,  # the next group is loaded before this one is done
        ceil(problem.channels / problem.lnc) > plan.set_channels * plan.group_sets,
        plan.lane_bands * plan.set_channels == load_target(problem.target).partitions,
    )


def _forward_sizes(problem: Problem, plan: ResidentForwardPlan) -> tuple[Hashable, ...]:
    target, size = load_target(problem.target), forward_size(plan.shape, plan.cores, forward_layout(plan))
    return (
        plan.batch_bands > 1,
        plan.space_bands > 1,
        size.chunks > 1,  # a group is several chunks
        # The next group is loaded before this one is done; there are no groups where statistics are given.
        plan.slots > size.chunks or not plan.training,
        ceil(problem.channels / problem.lnc) > plan.group_channels,
        plan.lane_bands * plan.group_channels == target.partitions,
        plan.training and size.columns > target.bn_stats_columns,
    )


def _transposed_sizes(problem: Problem, plan: TransposedPlan | TransposedForwardPlan) -> tuple[Hashable, ...]:
    extent = extent_of_core(plan.shape, plan.split, 0, plan.cores)
    blocks = ceil(extent.channels / block_size(plan.shape, plan.split, plan.cores))
    return (
        min(problem.spatial, 2),
        plan.positions < problem.spatial,
        plan.tiles > 1,
        len(row_chunks(extent, plan.tiles, plan.positions, plan.dtype)) > 1,
        plan.group_blocks > 1,
        blocks > plan.group_blocks,
        extent.channels > load_target(problem.target).partitions,
    )


def _tile_sizes(problem: Problem, plan: BackwardPlan | ForwardPlan) -> tuple[Hashable, ...]:
    geometry = geometry_of(problem.extents, problem.lnc)
    width = width_of(geometry, plan.f_tile, CHUNK_COLUMNS)
    target = load_target(problem.target)
    lanes = target.partitions
    return (
        plan.bands,
        width.tiles > plan.interleave,  # tiles leave SBUF between the phases
        width.tiles < plan.interleave,  # tiles of two channel tiles are in SBUF at a time
        width.tiles * geometry.channel_tiles > plan.interleave,  # slots are filled again
        plan.f_tile > CHUNK_COLUMNS,  # a tile is several chunks
        plan.f_tile > target.bn_stats_columns,
        geometry.positions > plan.f_tile,  # a tile is a part of an image
        geometry.channel_tiles > 1,
        problem.channels % lanes > 0,
    )


def small_twin(problem: Problem, plan: Plan) -> tuple[Problem, Plan]:
    """The smallest problem found, with less SBUF if need be, whose plan takes the same path; else the problem itself.

    Raises:
        CheckFailed: there is none, and the problem itself is too large.
    """
    wanted = code_path(problem, plan)
    for shape in sorted(_smaller_shapes(problem, plan), key=prod):
        small = replace(problem, shape=shape)
        for candidate in _like(plan, small) if isinstance(plan, ResidentPlan) else _sized(plan, small):
            if code_path(small, candidate) == wanted:
                return small, candidate
    if prod(problem.shape) > _MOST_ELEMENTS:
        raise CheckFailed(f"no small shape was found that takes the code path of {problem.shape} in {plan.strategy}")
    return problem, plan


def _sized(plan: Plan, small: Problem) -> Iterator[Plan]:
    """Plans of the strategy of ``plan`` for a small problem, with less and less SBUF."""
    for budget in _budgets(load_target(small.target).sbuf_partition_bytes):
        try:
            found = sized(small, plan.strategy, budget)
        except ValueError:  # nothing fits
            return
        yield found
        if isinstance(small, ForwardProblem) and isinstance(found, ResidentForwardPlan):
            if isinstance(plan, ResidentForwardPlan) and plan.short_start and not found.short_start:
                yield short_started(small, found)


def _like(plan: ResidentPlan, small: Problem) -> Iterator[Plan]:
    """The layout of ``plan`` on a small problem, with its chunks and with narrow ones."""
    assert isinstance(small, BackwardProblem), f"{plan.strategy} is a strategy of the backward"
    layout, task = layout_of(plan), task_of(small)
    spare = plan.slots - group_size(plan.shape, plan.cores, layout).chunks
    for chunk in sorted({min(width, plan.chunk) for width in (_NARROW_CHUNK, plan.chunk)}):
        narrow = replace(layout, chunk=chunk)
        chunks = group_size(task.shape, task.cores, narrow).chunks
        slots = plan.slots if plan.strategy == "reread" else max(chunks + min(spare, 2 * chunks), 2)
        yield resident_plan(task, replace(narrow, slots=slots), plan.strategy)


def _budgets(most: int) -> Iterator[int]:
    budget = most
    while budget > _LEAST_BUDGET:
        yield budget
        budget = int(budget * _SHRINK)


def _smaller_shapes(problem: Problem, plan: Plan) -> Iterator[tuple[int, ...]]:
    """Shapes of the same rank, none larger in any size, with the same kind of channel tiles or a few groups."""
    lanes = load_target(problem.target).partitions
    tiles = ceil(problem.channels / lanes)
    few = {problem.channels - lanes * (tiles - most) for most in (_few(tiles), min(tiles, 4))}
    if isinstance(plan, ResidentPlan):
        group = plan.set_channels * plan.group_sets * (plan.cores if plan.split == "channel" else 1)
        few = {min(groups * group, problem.channels) for groups in (1, 2)} | {problem.channels}
    batches = [batch for batch in _BATCHES if batch < problem.batch] + [problem.batch]
    for batch, spatial, channels in product(batches, _spaces(problem), sorted(few)):
        if batch * prod(spatial) >= min(problem.count, _LEAST_VALUES):
            yield batch, channels, *spatial


def _spaces(problem: Problem) -> list[tuple[int, ...]]:
    """Spatial sizes: about as many positions as ``_POSITIONS``, or halves of halves, which divide as the whole does."""
    space = problem.shape[2:]
    sizes = [round(positions ** (1 / max(1, len(space)))) for positions in _POSITIONS]
    found = [tuple(min(size, whole) for whole in space) for size in sizes]
    while space and all(size % 2 == 0 for size in space):
        space = tuple(size // 2 for size in space)
        found.append(space)
    return list(dict.fromkeys(found))


def _few(tiles: int) -> int:
    """As many channel tiles, but at most three: an even number can be divided between two cores."""
    return tiles if tiles <= 3 else 2 + tiles % 2
