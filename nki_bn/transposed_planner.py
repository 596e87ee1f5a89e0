# SPDX-License-Identifier: Apache-2.0
"""Choosing the layout of the ``transposed`` strategy: a closed form ranks what fits, the best few are predicted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from nki_bn.hardware import Cost, load_target, load_timing
from nki_bn.kernels.plan import TransposedForwardPlan, TransposedPlan
from nki_bn.kernels.resident_geometry import extent_of_core
from nki_bn.kernels.sizing import SBUF_SLACK_BYTES, ceil_div
from nki_bn.kernels.transposed_layout import (
    RowChunk,
    TransposedLayout,
    bank_columns,
    block_size,
    row_chunks,
    tile_rows,
    transposed_forward_plan,
    transposed_plan,
    transposed_size,
)
from nki_bn.predict import TIMED, Candidate, predict
from nki_bn.problem import GRADIENTS, BackwardProblem, ForwardProblem

# The planner considers this strategy where an example has fewer positions than this.
SHORT_ROW = 8
PARTITIONS = 128
# Layouts whose time is predicted.
PREDICTED = 4
# Blocks of channels per group that are tried.
GROUP_BLOCKS = (1, 2, 4, 8, 16)
# Slots besides those of one group: with fewer, loads wait for stores all the time.
SPARE_SLOTS = (16, 8, 4)
# Slots of a ring whose data is read again.
RELOAD_SLOTS = (8, 6, 4, 2)
# Up to so many positions a slot holds all of them: long runs in memory are worth tiles of fewer batches.
WHOLE_ROW = 64
# A sum adds up one partial per chunk by one instruction: at most as many as the columns of a chunk may be.
MOST_CHUNKS = 2048

Problem: TypeAlias = BackwardProblem | ForwardProblem
Plan: TypeAlias = TransposedPlan | TransposedForwardPlan


@dataclass(frozen=True)
class Estimate:
    """A plan that fits, and its time by the closed form in microseconds."""

    plan: Plan
    us: float


def best_transposed(problem: Problem, sbuf_bytes: int | None = None) -> Candidate | None:
    """The candidate with the least predicted time, or None if no layout fits into SBUF (or the target is trn1).

    ``sbuf_bytes`` may be used per partition; None stands for all that the target has.
    """
    found = transposed_candidates(problem, sbuf_bytes)
    return found[0] if found else None


def transposed_candidates(problem: Problem, sbuf_bytes: int | None = None) -> list[Candidate]:
    """The best layouts, that with the least predicted time first; arguments as for :func:`best_transposed`.

    A layout whose data stays in SBUF is preferred to all that read it twice.
    """
    target = load_target(problem.target)
    # On trn1 a transpose on the Tensor engine is a product with zeros and ones: a NaN would leave its channel.
    if target.generation < 3:
        return []
    budget = (target.sbuf_partition_bytes if sbuf_bytes is None else sbuf_bytes) - SBUF_SLACK_BYTES
    for reload in (False, True):
        fitting = (
            plan for layout in layouts(problem, reload) if (plan := plan_of(problem, layout)).sbuf_bytes <= budget
        )
        ranked = sorted((Estimate(plan, estimated_us(problem, plan)) for plan in fitting), key=_by_time)
        if ranked:
            found = [Candidate(plan, predict(plan)) for plan in _best_rings(ranked)[:PREDICTED]]
            return sorted(found, key=lambda candidate: candidate.prediction.ns)
    return []


def _by_time(estimate: Estimate) -> tuple[float, int]:
    """More slots first where the closed form sees no difference: they make room for what it leaves out."""
    return estimate.us, -estimate.plan.slots


def _best_rings(ranked: list[Estimate]) -> list[Plan]:
    """The first of the ranked plans that are alike but for their number of slots."""
    first: dict[Plan, Plan] = {}
    for estimate in ranked:
        first.setdefault(replace(estimate.plan, slots=0, buffers=(), sbuf_bytes=0), estimate.plan)
    return list(first.values())


def plan_of(problem: Problem, layout: TransposedLayout) -> Plan:
    """The plan of a layout."""
    shape = problem.batch, problem.channels, problem.spatial
    plan: Plan
    if isinstance(problem, BackwardProblem):
        need = tuple(name in problem.need for name in GRADIENTS)
        plan = transposed_plan(
            shape, problem.dtype, problem.relu, problem.lnc, layout, problem.residual, problem.training, need
        )
    else:
        relu, outputs = problem.relu != "none", (True, problem.relu == "mask")
        plan = transposed_forward_plan(
            shape, problem.dtype, problem.lnc, layout, problem.training, outputs, relu, problem.residual
        )
    return plan


def splits(problem: Problem) -> list[str]:
    """What the cores may divide: with one block of channels or more to share channels, else batches."""
    if problem.lnc == 1:
        return ["none"]
    useful = [name for name, size in (("channel", problem.channels), ("batch", problem.batch)) if size > 1]
    return useful or ["channel"]


def layouts(problem: Problem, reload: bool) -> Iterator[TransposedLayout]:
    """The layouts that are tried: splits, blocks per group, tiles per slot, slots."""
    shape = problem.batch, problem.channels, problem.spatial
    bank = bank_columns(problem.dtype)
    positions = problem.spatial if problem.spatial <= WHOLE_ROW else bank // PARTITIONS
    most = bank // (tile_rows(positions, problem.dtype) * positions)
    for split in splits(problem):
        extent = extent_of_core(shape, split, 0, problem.lnc)
        blocks = ceil_div(extent.channels, PARTITIONS)
        widest = min(most, max(extent.batches // tile_rows(positions, problem.dtype), 1))
        for group_blocks in sorted({min(count, blocks) for count in GROUP_BLOCKS}):
            for tiles in sorted({widest, max(widest // 2, 1)}):
                layout = TransposedLayout(split, group_blocks, tiles, positions, 1, reload)
                chunks = transposed_size(shape, problem.dtype, problem.lnc, layout).chunks
                if chunks <= MOST_CHUNKS:
                    for slots in ring_sizes(chunks, ceil_div(blocks, group_blocks), reload):
                        yield replace(layout, slots=slots)


def ring_sizes(chunks: int, groups: int, reload: bool) -> list[int]:
    """Numbers of slots that are tried for so many chunks per group."""
    if reload:
        return [slots for slots in RELOAD_SLOTS if slots < chunks]
    spares = (*SPARE_SLOTS, chunks + 1)
    return sorted({min(chunks + spare, groups * chunks) for spare in spares})


def estimated_us(problem: Problem, plan: Plan) -> float:
    """Modelled time of a plan in microseconds: the busiest engine, phase by phase, and the ends of the pipeline.

    The first group is loaded and added up alone, the last one stored alone; between them both phases share the engines.
    A turn holds Vector for its chain of dependent steps.
    """
    extent = extent_of_core(plan.shape, plan.split, 0, plan.cores)
    chunks = row_chunks(extent, plan.tiles, plan.positions, plan.dtype)
    alike = {(chunk.tiles, chunk.rows, chunk.length): chunk for chunk in chunks}
    cost_of = {key: ChunkCost.of(problem, plan, chunk) for key, chunk in alike.items()}
    costs = [cost_of[chunk.tiles, chunk.rows, chunk.length] for chunk in chunks]
    blocks = ceil_div(extent.channels, block_size(plan.shape, plan.split, plan.cores))
    groups = ceil_div(blocks, plan.group_blocks)
    share = blocks / groups  # blocks of an average group
    waits = [slot_wait(plan, cost, groups * len(costs), len(costs)) for cost in costs]
    first, second, both = (sum(phase) for phase in zip(*map(partial(_phases, plan, share), costs, waits), strict=True))
    ends = START_NS + END_NS + costs[0].load + costs[0].first.chain + costs[-1].second.chain
    if not plan.training:
        return float(groups * both + ends) / 1000
    if plan.reload:
        return float(groups * (first + second + turn_ns(plan, share)) + ends) / 1000
    return float(first + (groups - 1) * both + second + groups * turn_ns(plan, share) + ends) / 1000


def _phases(plan: Plan, blocks: float, cost: ChunkCost, wait: float) -> tuple[float, float, float]:
    """ns of a chunk of so many blocks in the first phase alone, in the second alone, and in both together."""
    alone = wait if plan.reload else 0.0
    again = cost.load if plan.reload else 0.0
    return (
        max(blocks * cost.first.alone, cost.load, alone),
        max(blocks * cost.second.alone, cost.store + again, alone),
        max(blocks * (cost.first + cost.second).busiest, cost.load + cost.store, wait),
    )


def slot_wait(plan: Plan, cost: ChunkCost, visits: int, chunks: int) -> float:
    """ns between two loads, at least, for slots that have to be emptied first."""
    spare: int = plan.slots if plan.reload else plan.slots - chunks
    if plan.slots >= visits:
        return 0.0
    round_trip: float = ROUND_NS + cost.first.chain + cost.second.chain
    return round_trip / max(spare, 1)


# From the model's own latencies: parameters and the first load's way; the last store, and the sums after it.
START_NS = 3000.0
END_NS = 2600.0
# Between the last use of a slot and the next, besides the stages of both jobs: a store, a load, waiting for triggers.
ROUND_NS = 5500.0
# A short instruction of Vector that waits for the one before.
STEP_NS = 230.0
# Such steps in a turn: for all blocks of a group together, and for each block on its own.
BACKWARD_STEPS = (11, 0)
FORWARD_STEPS = (24, 2)


def turn_ns(plan: Plan, blocks: float) -> float:
    """How long Vector is held between the phases of a group, the exchange with the other core included."""
    together, each = BACKWARD_STEPS if isinstance(plan, TransposedPlan) else FORWARD_STEPS
    exchange = load_timing(TIMED).cores.sendrecv if plan.split == "batch" else 0.0
    return together * STEP_NS + blocks * (each * STEP_NS + exchange)


@dataclass(frozen=True)
class Load:
    """ns of one job on Vector, Scalar and Tensor; ``shared`` of it may go to Vector or Scalar when the phase is alone.

    ``shared`` is counted in the one that has it, and counts negative if that is Vector.
    """

    vector: float
    scalar: float
    tensor: float
    shared: float = 0.0

    def __add__(self, other: Load) -> Load:
        shared = self.shared + other.shared
        return Load(self.vector + other.vector, self.scalar + other.scalar, self.tensor + other.tensor, shared)

    @property
    def busiest(self) -> float:
        """ns of the busiest engine."""
        return max(self.vector, self.scalar, self.tensor)

    @property
    def alone(self) -> float:
        """The same when half of the shared work has moved to the other engine."""
        return max(self.vector + self.shared / 2, self.scalar - self.shared / 2, self.tensor)

    @property
    def chain(self) -> float:
        """ns of the stages one after the other."""
        return self.vector + self.scalar + self.tensor


@dataclass(frozen=True)
class ChunkCost:
    """What a chunk takes: DMA ns of its loads and of its store for all blocks, and the jobs of one block."""

    load: float
    store: float
    first: Load
    second: Load

    @classmethod
    def of(cls, problem: Problem, plan: Plan, chunk: RowChunk) -> ChunkCost:
        """The cost of a chunk of a plan."""
        one = dma_ns(problem, plan, chunk)
        masks = (problem.relu == "mask") / problem.itemsize
        spacing = load_timing(TIMED).dma.spacing
        if isinstance(plan, TransposedPlan):
            first, second = backward_jobs(problem, plan, chunk)
            loads = 2 + masks + plan.residual
            return cls(max(loads * one, 2 * spacing), max(one, spacing), first, second)
        first, second = forward_jobs(problem, plan, chunk)
        return cls(max((1 + plan.residual) * one, spacing), max((1 + masks) * one, spacing), first, second)


def backward_jobs(problem: Problem, plan: TransposedPlan, chunk: RowChunk) -> tuple[Load, Load]:
    """The jobs "first" (with the mask) and "second" of a block of a chunk."""
    columns, timing = chunk.columns(), load_timing(TIMED)
    vector, scalar, turn = timing.vector, timing.scalar, tensor_ns(problem, columns)
    two_tiles = vector_ns(vector.scalar_tensor_tensor, columns)
    from_psum = scalar_ns(scalar.activation_psum, columns)
    added = scalar_ns(scalar.activation, columns) + scalar.read_out.occupancy
    mask = mask_job(problem, plan, chunk)
    first = Load(two_tiles, from_psum + scalar.read_out.occupancy + added, 2 * turn, added)
    copied = vector_ns(vector.psum, copied_columns(problem, plan, chunk)) + vector.plain.occupancy
    term = from_psum + scalar.extra_pointer.occupancy
    if plan.folded:
        return first + mask, Load(two_tiles + copied, term, 3 * turn, -copied)
    first = Load(first.vector + added / 2, first.scalar - added / 2, first.tensor)
    term += scalar_ns(scalar.activation, columns)
    return first + mask, Load(two_tiles + copied, term, 3 * turn)


def mask_job(problem: Problem, plan: TransposedPlan, chunk: RowChunk) -> Load:
    """The job that puts the ReLU's mask on dy."""
    vector, scalar, columns = load_timing(TIMED).vector, load_timing(TIMED).scalar, chunk.columns()
    selected = vector_ns(vector.predicated, columns)
    if problem.relu == "none":
        return Load(0.0, 0.0, 0.0)
    if problem.relu == "mask":
        return Load(selected, 0.0, 0.0)
    turn = tensor_ns(problem, columns)
    made = pointed_ns(vector.psum, columns) + pointed_ns(vector.plain, columns) + vector_ns(vector.plain, columns)
    back = scalar_ns(scalar.copy_psum, copied_columns(problem, plan, chunk))
    return Load(selected + made, back, (2 + problem.residual) * turn)


def forward_jobs(problem: Problem, plan: TransposedForwardPlan, chunk: RowChunk) -> tuple[Load, Load]:
    """The jobs "first" and "second" of a block of a chunk."""
    columns = chunk.columns()
    vector, scalar, turn = load_timing(TIMED).vector, load_timing(TIMED).scalar, tensor_ns(problem, columns)
    pieces = ceil_div(columns, load_target(TIMED).bn_stats_columns)
    first = Load(0.0, 0.0, 0.0)
    if plan.training:
        first = Load(vector_ns(vector.bn_stats, columns) + (pieces - 1) * vector.bn_stats.occupancy, 0.0, turn)
    value, shift = pointed_ns(vector.psum, columns), pointed_ns(vector.plain, columns)
    back = scalar_ns(scalar.copy_psum, copied_columns(problem, plan, chunk))
    second = Load(value, back, (2 + plan.residual) * turn)
    if not plan.relu and not plan.residual:
        return first, second + Load(0.0, scalar_ns(scalar.activation, columns), 0.0)
    second += Load(shift, 0.0, 0.0)
    if not plan.relu:
        return first, second + Load(0.0, scalar_ns(scalar.activation, columns), 0.0)
    second += Load(vector_ns(vector.plain, columns) + vector_ns(vector.predicated, columns), 0.0, 0.0)
    if plan.need_mask:
        second += Load(vector_ns(vector.plain, columns), back, turn)
    return first, second


def copied_columns(problem: Problem, plan: Plan, chunk: RowChunk) -> int:
    """Columns, of rows, that are copied out of PSUM; those of a wide stride count twice."""
    strided = load_timing(TIMED).strided
    slow = strided.factor if chunk.length > 1 and chunk.length * problem.itemsize >= strided.bytes else 1
    return int(slow * chunk.tiles * chunk.length * block_size(plan.shape, plan.split, plan.cores))


def vector_ns(cost: Cost, columns: int) -> float:
    """ns that Vector is busy with an instruction."""
    return columns * cost.cycles / load_timing(TIMED).clock.vector + cost.occupancy


def pointed_ns(cost: Cost, columns: int) -> float:
    """The same with operands of one value per partition."""
    return vector_ns(replace(cost, occupancy=load_timing(TIMED).vector.pointer.occupancy), columns)


def scalar_ns(cost: Cost, columns: int) -> float:
    """ns that Scalar is busy with an instruction."""
    return columns * cost.cycles / load_timing(TIMED).clock.scalar + cost.occupancy


def tensor_ns(problem: Problem, columns: int) -> float:
    """ns that Tensor takes to turn so many columns."""
    tensor = load_timing(TIMED).tensor
    cost = tensor.transpose_float32 if problem.dtype == "float32" else tensor.transpose
    tiles: int = ceil_div(columns, PARTITIONS)
    return columns * cost.cycles / load_timing(TIMED).clock.tensor + tiles * cost.occupancy


def dma_ns(problem: Problem, plan: Plan, chunk: RowChunk) -> float:
    """ns of moving one tensor of one chunk: by the DMA engines' descriptors, or by the core's share of HBM."""
    timing = load_timing(TIMED)
    owned = extent_of_core(plan.shape, plan.split, 0, plan.cores).channels
    channels = min(plan.group_blocks * PARTITIONS, owned)
    nbytes = chunk.tiles * channels * chunk.length * problem.itemsize
    runs = chunk.tiles * (1 if chunk.length == problem.spatial else channels)
    # Partitions are served in packets of neighbours, so few rows use few engines.
    lanes = min(chunk.rows, timing.dma.partitions_per_engine)
    engine: float = lanes * (runs * timing.dma.descriptor + nbytes / timing.dma.rate)
    rate = timing.hbm.pair / 2 if problem.lnc == 2 else timing.roofline.peak
    shared: float = chunk.rows * nbytes / rate
    return max(engine, shared)
