# SPDX-License-Identifier: Apache-2.0
"""What a plan of the strategy ``staged`` would take: the order of kernels/staged_bwd.py, run through a pipeline.

The methods have the names and the order of the kernel's functions: what changes there changes here.
"""

from __future__ import annotations

from dataclasses import dataclass

from nki_bn.hardware import Timing
from nki_bn.kernels.backward_tensors import needs_input_sums, needs_products, needs_sums
from nki_bn.kernels.plan import BackwardPlan, size_of
from nki_bn.kernels.sizing import PARTIAL_COLUMNS, ceil_div
from nki_bn.pipeline import SCALAR, VECTOR, Prediction
from nki_bn.predict_columns import Columns, mask_passes
from nki_bn.predict_tiles import TileRun, Walk, predict_walk

STAGED_BYTES = 2


def predict_staged(plan: BackwardPlan, timing: Timing) -> Prediction:
    """The prediction for the core with the larger share."""
    return predict_walk(plan, lambda walk: _Run(plan, walk, timing).run())


@dataclass(frozen=True, slots=True)
class _Load:
    """Tile ``tile`` of channel tile ``group`` comes into a slot; it ``returns`` for phase 2."""

    group: int
    tile: int
    returns: bool


class _Run(TileRun):
    """One core at work; lists have one time per slot, or per temporary, of its last use by the engine they name."""

    def __init__(self, plan: BackwardPlan, walk: Walk, timing: Timing) -> None:
        super().__init__(plan, walk, timing)
        self.plan = plan
        self.itemsize = size_of(plan.dtype)
        self.staging = any(buffer.name == "staged" for buffer in plan.buffers)
        tiles = len(walk.tiles)
        self.left = max(tiles - self.depth, 0) if needs_input_sums(plan) else tiles
        self.loads = self.all_loads()
        self.blocks = _blocks(walk)
        self.loaded = self.freed = 0
        self.dy_there = [0.0] * self.depth
        self.x_there = [0.0] * self.depth
        self.gradient = [0.0] * self.depth
        self.given = [0.0] * self.depth
        self.dy_free = [0.0] * self.depth
        self.x_free = [0.0] * self.depth
        self.staged_free = [0.0] * self.depth
        self.by_vector = [0.0, 0.0]
        self.by_scalar = [0.0, 0.0]
        self.kept: dict[tuple[int, int], float] = {}
        self.centered: dict[int, float] = {}
        self.started: dict[int, float] = {}
        self.scalar_sums = self.vector_sums = 0.0

    def all_loads(self) -> list[_Load]:
        """The order of ``loads_of``."""
        returning = self.left if needs_input_sums(self.plan) else 0
        loads = []
        for group in range(len(self.walk.channels)):
            loads += [_Load(group, tile, False) for tile in range(len(self.walk.tiles))]
            loads += [_Load(group, tile, True) for tile in range(returning)]
        return loads

    def run(self) -> Prediction:
        """The order of ``staged_gradients``."""
        at, tiles = 0, len(self.walk.tiles)
        sums = dgamma = 0.0
        for group in range(len(self.walk.channels)):
            self.take(group)
            chunks = self.sum_tiles(group, at)
            self.start_columns(group + 1)
            at += tiles
            columns, offset = self.columns(), 0.0
            if needs_sums(self.plan):
                sums, dgamma = self.finish_sums(columns, chunks)
            if needs_input_sums(self.plan):
                offset = columns.input_coefficients(dgamma, sums)
            if needs_sums(self.plan):
                self.store_block(group, sums, dgamma)
            if needs_input_sums(self.plan):
                for visited in range(at - tiles + self.left, at + self.left):
                    self.load_ahead(visited)
                    self.take(group)
                    self.second_phase(visited, offset)
                    self.freed = visited + 1
                at += self.left
        return self.pipeline.prediction()

    def start_columns(self, group: int) -> None:
        """The columns of the block that starts with channel tile ``group``, if one does."""
        if group not in self.blocks:
            return
        sets = self.blocks[group]
        self.take(group)
        columns = self.columns(sets)
        mean, variance, gamma = columns.load(), columns.load(), columns.load()
        beta = columns.load() if self.plan.relu == "recompute" else None
        centered = columns.split(mean)
        started = columns.derive(variance, gamma, centered, beta)
        for number in range(group, group + sets):
            self.centered[number], self.started[number] = centered, started

    def store_block(self, group: int, sums: float, dgamma: float) -> None:
        """dbeta and dgamma of a block whose last channel tile this is."""
        sets = next((sets for first, sets in self.blocks.items() if first + sets - 1 == group), 0)
        rows = Columns(self.pipeline, self.paces, self.channels, sets)
        for needed, ready in ((self.plan.need_dbeta, sums), (self.plan.need_dgamma, dgamma)):
            if needed and sets:
                rows.store(ready)

    def load_ahead(self, at: int) -> None:
        slots = self.depth
        while self.loaded < len(self.loads) and self.loaded - slots < self.freed:
            if self.loaded > at + 1 and self.loaded >= slots and self.loaded - slots == self.freed - 1:
                return
            self.fill_slot(self.loads[self.loaded], self.loaded)
            self.loaded += 1

    def fill_slot(self, load: _Load, at: int) -> None:
        plan, slot = self.plan, at % self.depth
        self.take(load.group)
        elements = self.transfer(load.tile, self.itemsize)
        if load.returns:
            self.x_there[slot] = self.pipeline.load(elements, self.x_free[slot])
            kept = max(self.kept[load.group, load.tile], self.staged_free[slot])
            self.dy_there[slot] = self.pipeline.load(self.row(load.tile, STAGED_BYTES), kept)
            return
        self.dy_there[slot] = self.x_there[slot] = self.pipeline.load(elements, self.dy_free[slot])
        if at == 0:
            self.start_columns(0)
        if needs_products(plan) or plan.relu == "recompute":
            self.x_there[slot] = self.pipeline.load(elements, self.x_free[slot])
        if plan.relu == "mask":
            self.dy_there[slot] = self.pipeline.load(self.transfer(load.tile, 1), self.x_free[slot])
        if plan.residual:
            self.x_there[slot] = self.pipeline.load(elements, self.x_free[slot])

    def sum_tiles(self, group: int, first: int) -> int:
        """Phase 1 of a channel tile; how many chunks it has."""
        chunks = 0
        for tile in range(len(self.walk.tiles)):
            at = first + tile
            self.load_ahead(at)
            self.take(group)
            chunks, staged = self.first_phase(group, tile, at, chunks)
            if tile < self.left:
                if needs_input_sums(self.plan):
                    slot = at % self.depth
                    stored = self.pipeline.store(self.row(tile, STAGED_BYTES), staged)
                    self.staged_free[slot] = self.kept[group, tile] = stored
                self.freed = at + 1
        return chunks

    def first_phase(self, group: int, tile: int, at: int, chunk: int) -> tuple[int, float]:
        """The sums of one tile; the number of chunks so far, and when its staged copy is there."""
        plan, slot, widths = self.plan, at % self.depth, self.walk.chunks(tile)
        self.mask_gradient(group, tile, slot, widths)
        ready, staged, done = self.gradient[slot], 0.0, 0.0
        centered = 0.0
        for width in widths:
            if needs_sums(plan):
                staged = self.sum_chunk(group, slot, width, chunk)
                if tile >= self.left and not plan.folded:
                    read = max(self.vector_sums, self.centered[group])
                    centered = self.pipeline.run(SCALAR, self.paces.scalar(width, 1), read)
                chunk += 1
            if plan.need_dx and not plan.training:
                free = max(ready, self.given[slot], self.started[group])
                done = self.pipeline.run(SCALAR, self.paces.scalar(width, 1), free)
        self.x_there[slot] = max(self.x_there[slot], centered)
        self.x_free[slot] = max(self.scalar_sums, self.vector_sums, ready)
        self.dy_free[slot] = max(self.x_free[slot], self.given[slot])
        if plan.need_dx and not plan.training:
            self.dy_free[slot] = self.pipeline.store(self.transfer(tile, self.itemsize), done)
        return chunk, staged

    def mask_gradient(self, group: int, tile: int, slot: int, widths: list[int]) -> None:
        plan = self.plan
        ready = self.dy_there[slot]
        if plan.relu != "none":
            for number, width in enumerate(widths):
                done = self.mask_chunk(group, width, slot, number % 2)
            ready = done
        self.gradient[slot] = ready
        if plan.need_dresidual:
            self.given[slot] = self.pipeline.store(self.transfer(tile, self.itemsize), ready)

    def mask_chunk(self, group: int, width: int, slot: int, turn: int) -> float:
        run, ready = self.pipeline.run, self.dy_there[slot]
        if self.plan.relu == "recompute":
            there = max(self.started[group], self.x_there[slot], self.by_scalar[turn])
            value = run(VECTOR, self.paces.vector("pointed", width), there)
            for kind in mask_passes(self.plan.residual):
                value = run(VECTOR, self.paces.vector(kind, width), value)
            self.by_vector[turn] = value
            ready = max(ready, self.by_vector[turn])
        return run(VECTOR, self.paces.vector("predicated", width), ready)

    def sum_chunk(self, group: int, slot: int, width: int, chunk: int) -> float:
        ready, mine = self.gradient[slot], chunk % 2
        free = max(ready, self.staged_free[slot]) if self.staging else ready
        staged = self.scalar_sums = self.pipeline.run(SCALAR, self.paces.accumulated(width), free)
        self.scalar_sums = self.close_group(chunk, self.scalar_sums)
        if needs_products(self.plan):
            product = self.paces.vector("scalar_tensor_tensor", width)
            there = max(ready, self.centered[group], self.x_there[slot], self.by_scalar[mine])
            done = self.pipeline.run(VECTOR, product, there)
            done = self.pipeline.run(VECTOR, self.paces.vector("reduce", width), done)
            self.by_vector[mine] = done
            self.vector_sums = self.close_group(chunk, done)
        return staged

    def close_group(self, chunk: int, ready: float) -> float:
        """The sum of a group of partials that is full."""
        full = (chunk + 1) % PARTIAL_COLUMNS == 0
        return self.columns().reduced(PARTIAL_COLUMNS, ready) if full else ready

    def total_of(self, columns: Columns, chunks: int, ready: float) -> float:
        full, rest = divmod(chunks, PARTIAL_COLUMNS)
        if full == 0:
            return columns.reduced(rest, ready)
        if rest > 0:
            ready = columns.reduced(rest, ready)
        return columns.reduced(ceil_div(chunks, PARTIAL_COLUMNS), ready)

    def finish_sums(self, columns: Columns, chunks: int) -> tuple[float, float]:
        """The turn; when the sum of dy', and dgamma, are there."""
        plan = self.plan
        sums = self.total_of(columns, chunks, self.scalar_sums)
        products = self.total_of(columns, chunks, self.vector_sums) if needs_products(plan) else columns.vector(0.0)
        for _ in range(1, self.walk.bands):
            sums = products = columns.vector(columns.vector(max(sums, products)), 2)
        for _ in range(1, self.walk.bands):
            sums = products = columns.vector(sums)
        if self.shared:
            sums = products = columns.vector(self.pipeline.exchange(max(sums, products)), 2)
        return sums, columns.gamma_gradient(sums, products) if needs_products(plan) else 0.0

    def second_phase(self, at: int, offset: float) -> None:
        plan, slot, run = self.plan, at % self.depth, self.pipeline.run
        load = self.loads[at]
        gradient = max(self.dy_there[slot], self.dy_free[slot]) if load.returns else self.given[slot]
        read = done = 0.0
        for number, width in enumerate(self.walk.chunks(load.tile)):
            turn = number % 2
            free = max(self.x_there[slot], self.by_vector[turn])
            if load.returns and not plan.folded:
                read = run(SCALAR, self.paces.scalar(width, 1), free)
                term = run(SCALAR, self.paces.scalar(width, 2), max(read, offset))
            else:
                term = read = run(SCALAR, self.paces.scalar(width, 2), max(free, offset))
            self.by_scalar[turn] = term
            combine = self.paces.vector("scalar_tensor_tensor", width)
            done = self.by_vector[turn] = run(VECTOR, combine, max(term, gradient))
        self.x_free[slot] = read
        if load.returns:
            self.staged_free[slot] = done
        self.dy_free[slot] = self.pipeline.store(self.transfer(load.tile, self.itemsize), done)


def _blocks(walk: Walk) -> dict[int, int]:
    """How many channel tiles each block has, by its first: alike, and only so many."""
    blocks: dict[int, int] = {}
    first = 0
    for at, (channels, _) in enumerate(walk.channels):
        if at == first or at - first == walk.block or channels != walk.channels[first][0]:
            first = at
            blocks[first] = 0
        blocks[first] += 1
    return blocks
