# SPDX-License-Identifier: Apache-2.0
"""One core as a pipeline: engines that work in order, triggers on Sync, and a DMA queue that shares HBM.

A prediction runs a strategy's instructions through it in program order. Each is given when its operands can be seen and
returns when its own results can, so that dependencies are the times that a strategy hands on. Because every engine and
the queue are first in, first out, one pass over the program is enough; nothing is ever placed twice.

It is the timing model of docs/timing.md without the parts that plans do not exercise: the cores of a pair run the same
schedule, so each has half of HBM whenever both move data; the busiest DMA engine stands for all; every semaphore costs
what it costs between compute engines; Sync issues all DMAs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nki_bn.hardware import Cost, Timing

VECTOR, SCALAR, TENSOR, GPSIMD, SYNC, DMA = "vector", "scalar", "tensor", "gpsimd", "sync", "dma"


@dataclass(frozen=True, slots=True)
class Duration:
    """ns that an instruction keeps its engine, and from its start until others can use its results."""

    busy: float
    visible: float


@dataclass(frozen=True)
class Prediction:
    """What a plan would take on one core, the one with the larger share.

    Attributes:
        ns: from the first instruction to the last completion, without the launch.
        instructions: what the core executes; a DMA counts as one.
        busy: ns at work by engine; "dma" is the busiest DMA engine when nothing slows it down.
        loaded, stored: bytes that the core moves from and to HBM.
        moving: ns that this takes with the core's share of HBM.
        steps: calls of the pipeline that it took to find out.
    """

    ns: float
    instructions: int
    busy: dict[str, float]
    loaded: int
    stored: int
    moving: float
    steps: int

    @property
    def us(self) -> float:
        """Microseconds from the first instruction to the last completion."""
        return self.ns / 1e3

    @property
    def bound(self) -> str:
        """The resource that is busy longest; "latency" if none is for half of the time."""
        longest = max(self.busy, key=lambda name: self.busy[name])
        return longest if self.busy[longest] >= 0.5 * self.ns else "latency"

    def prolonged(self, earlier: Prediction, later: Prediction, times: float) -> Prediction:
        """This and ``times`` what lies between two others: a steady state that goes on for longer.

        Its busiest engine, or HBM, has no time to spare, although a short run may make up for what its start has lost.
        """
        busy = {name: later.busy[name] - earlier.busy[name] for name in self.busy}
        moving = later.moving - earlier.moving
        return Prediction(
            self.ns + times * max(later.ns - earlier.ns, moving, *busy.values()),
            round(self.instructions + times * (later.instructions - earlier.instructions)),
            {name: time + times * busy[name] for name, time in self.busy.items()},
            round(self.loaded + times * (later.loaded - earlier.loaded)),
            round(self.stored + times * (later.stored - earlier.stored)),
            self.moving + times * moving,
            earlier.steps + later.steps,
        )


@dataclass(frozen=True, slots=True)
class Products:
    """``count`` instructions of Tensor: ns that they keep it when warm, and from their end until results can be used.

    ``weights``: ns that come first if Tensor stood idle, ``least``: what they keep it at least.
    """

    count: int
    busy: float
    latency: float
    weights: float = 0.0
    least: float = 0.0


@dataclass(frozen=True, slots=True)
class Transfer:
    """A DMA: ns on the busiest DMA engine alone, ns with the core's share of HBM, bytes moved from or to HBM."""

    work: float
    shared: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Beside:
    """What the queue of Sync loads meanwhile: ns of one of its descriptors, the share of the time that the engines work
    for it, and when it would be through alone."""

    descriptor: float
    share: float
    end: float


class Paces:
    """How long instructions and DMAs take, from the timing parameters of a target; what was asked for is remembered.

    Args:
        timing: the parameters.
        others: what the other core moves while this one moves a byte, if it can: 0 for a core alone.
    """

    def __init__(self, timing: Timing, others: float) -> None:
        self.timing = timing
        self._share = timing.hbm.pair / (1 + others)
        self._durations: dict[tuple[str, float], Duration] = {}
        self._transfers: dict[tuple[int, int, int], Transfer] = {}

    def vector(self, name: str, columns: float) -> Duration:
        """An instruction of the class ``name`` on Vector, over ``columns`` elements of a lane.

        The class ``pointed`` is tensor_scalar to or from float32 with an operand of one value per partition,
        ``pointed_16bit`` the same between tiles of 16 bits.
        """
        found = self._durations.get((name, columns))
        if found is not None:
            return found
        return self._remember(name, self._vector_cost(name), columns, self.timing.clock.vector)

    def vector_psum(self, name: str, columns: float) -> Duration:
        """The same with an operand in PSUM."""
        found = self._durations.get((f"{name} psum", columns))
        if found is not None:
            return found
        cost, least = self._vector_cost(name), self.timing.vector.psum
        cost = Cost(max(cost.cycles, least.cycles), cost.occupancy, max(cost.latency, least.latency))
        return self._remember(f"{name} psum", cost, columns, self.timing.clock.vector)

    def _vector_cost(self, name: str) -> Cost:
        vector = self.timing.vector
        pointed = {"pointed": vector.plain, "pointed_16bit": vector.scalar_16bit}
        cost: Cost = replace(vector.pointer, cycles=pointed[name].cycles) if name in pointed else getattr(vector, name)
        return cost

    def scalar(self, columns: float, pointers: int = 0) -> Duration:
        """An activation from SBUF with ``pointers`` operands of one value per partition."""
        name = f"activation {pointers}"
        found = self._durations.get((name, columns))
        if found is not None:
            return found
        cost, extra, count = self.timing.scalar.activation, self.timing.scalar.extra_pointer, max(pointers - 1, 0)
        cost = Cost(cost.cycles, cost.occupancy + count * extra.occupancy, cost.latency + count * extra.latency)
        return self._remember(name, cost, columns, self.timing.clock.scalar)

    def accumulated(self, columns: float, psum: bool = False) -> Duration:
        """An activation (from PSUM) whose sum is read out, which starts when the engine lets go of the activation."""
        name = "accumulated psum" if psum else "accumulated"
        found = self._durations.get((name, columns))
        if found is not None:
            return found
        scalar = self.timing.scalar
        cost, out = scalar.activation_psum if psum else scalar.activation, scalar.read_out
        cost = Cost(cost.cycles, cost.occupancy + out.occupancy, cost.occupancy + out.latency)
        return self._remember(name, cost, columns, self.timing.clock.scalar)

    def emptied(self, columns: float, pointers: int = 2) -> Duration:
        """An activation from PSUM with one or two operands of one value per partition."""
        name = f"emptied {pointers}"
        found = self._durations.get((name, columns))
        if found is not None:
            return found
        cost, extra = self.timing.scalar.activation_psum, self.timing.scalar.extra_pointer
        more = pointers - 1
        cost = Cost(cost.cycles, cost.occupancy + more * extra.occupancy, cost.latency + more * extra.latency)
        return self._remember(name, cost, columns, self.timing.clock.scalar)

    def copied(self, columns: float) -> Duration:
        """A copy from PSUM by Scalar."""
        return self._remember("copied", self.timing.scalar.copy_psum, columns, self.timing.clock.scalar)

    def products(self, columns: int, slice_columns: int, times: int, wide: bool) -> Products:
        """``times`` products over ``columns`` moving columns, in slices; ``wide``: float32 with zeros and ones."""
        tensor, clock = self.timing.tensor, self.timing.clock.tensor
        cost = tensor.matmul_float32_onezero if wide else tensor.matmul
        whole, rest = divmod(columns, slice_columns)
        busy = 0.0
        for count, width in ((whole, slice_columns), (min(rest, 1), rest)):
            busy += count * max(width * cost.cycles / clock + cost.occupancy, self.timing.floor_cycles / clock)
        count = whole + min(rest, 1)
        latency = cost.latency - cost.occupancy + self.timing.semaphore.engine
        return Products(times * count, times * busy, latency)

    def transposes(self, columns: int, times: int, wide: bool) -> Products:
        """``times`` transposes into ``columns`` columns each; ``wide``: of float32."""
        tensor, clock = self.timing.tensor, self.timing.clock.tensor
        cost = tensor.transpose_float32 if wide else tensor.transpose
        busy = times * (columns * cost.cycles / clock + cost.occupancy)
        latency = cost.latency - cost.occupancy + self.timing.semaphore.engine
        least = times * self.timing.floor_cycles / clock
        return Products(times, busy, latency, tensor.weight_load_cycles / clock, least)

    def gpsimd(self, columns: float, tiles: int = 1) -> Duration:
        """Work of GpSimd on one tile, or on two."""
        cost = self.timing.gpsimd.one_tile if tiles == 1 else self.timing.gpsimd.two_tiles
        return self._remember(f"gpsimd {tiles}", cost, columns, self.timing.clock.gpsimd)

    def transposed(self, columns: float) -> Duration:
        """A float32 transpose into ``columns`` columns on a Tensor engine that stood idle: cold, its weights seen."""
        tensor = self.timing.tensor
        cost = tensor.transpose_float32
        cold = replace(cost, cycles=cost.cycles * tensor.cold_factor)
        weights = tensor.weight_load_cycles / cost.cycles
        return self._remember("transposed", cold, columns + weights, self.timing.clock.tensor)

    def _remember(self, name: str, cost: Cost, columns: float, clock: float) -> Duration:
        streaming = columns * cost.cycles / clock
        busy = max(streaming + cost.occupancy, self.timing.floor_cycles / clock)
        duration = Duration(busy, streaming + cost.latency + self.timing.semaphore.engine)
        self._durations[name, columns] = duration
        return duration

    def transfer(self, lanes: int, descriptors: int, nbytes: int) -> Transfer:
        """A DMA of ``nbytes`` bytes and ``descriptors`` contiguous runs in each of ``lanes`` partitions."""
        key = lanes, descriptors, nbytes
        found = self._transfers.get(key)
        if found is None:
            dma = self.timing.dma
            # Neighbours go to one engine, and beyond the last engine they start again with the first.
            rows = min(lanes, dma.partitions_per_engine)
            work = rows * (descriptors * dma.descriptor + nbytes / dma.rate)
            found = Transfer(work, max(work, lanes * nbytes / self._share), lanes * nbytes)
            self._transfers[key] = found
        return found


class Pipeline:
    """The state of a core between two instructions: when each engine and the DMA queue can go on."""

    def __init__(self, timing: Timing) -> None:
        self.instructions = 0
        self.end = 0.0
        # Instructions that another one's step stands for.
        self._beside = 0
        self._dma = timing.dma
        self._cores = timing.cores
        self._tensor = timing.tensor
        self._warmth = 0.0
        self._free = dict.fromkeys((VECTOR, SCALAR, TENSOR, GPSIMD, SYNC), 0.0)
        self._busy = dict.fromkeys((*self._free, DMA), 0.0)
        self._next_trigger = 0.0
        self._next_aside = 0.0
        self._aside_served = 0.0
        self._aside_work = 0.0
        self._arrived = 0.0
        self._paused = 0.0
        self._aside = 0.0
        self._served = 0.0
        self._moving = 0.0
        self._loaded = 0
        self._stored = 0

    def run(self, engine: str, duration: Duration, ready: float = 0.0) -> float:
        """An instruction whose operands are there at ``ready``; when its results can be seen."""
        free = self._free[engine]
        start = free if free > ready else ready
        busy = duration.busy
        self._free[engine] = start + busy
        self._busy[engine] += busy
        return self._finish(start + duration.visible)

    def multiply(self, products: Products, ready: float = 0.0) -> float:
        """Products on Tensor, one after the other; it is slow until it has worked for a while."""
        start = max(self._free[TENSOR], ready)
        if start - self._free[TENSOR] >= self._tensor.cold_ns:
            self._warmth = 0.0
        slow = self._tensor.cold_factor
        warm = products.busy + (products.weights if start > self._free[TENSOR] else 0.0)
        cold = min(warm * slow, max(self._tensor.cold_ns - self._warmth, 0.0))
        busy = max(cold + warm - cold / slow, products.least)
        self._warmth += busy
        self._free[TENSOR] = start + busy
        self._busy[TENSOR] += busy
        self.instructions += products.count - 1
        self._beside += products.count - 1
        return self._finish(start + busy + products.latency)

    def load(self, transfer: Transfer, ready: float = 0.0) -> float:
        """A DMA from HBM into what is free at ``ready``; when its data can be seen."""
        self._loaded += transfer.nbytes
        return self._move(transfer, ready, self._dma.first_load)

    def load_aside(self, transfer: Transfer, turns: float) -> float:
        """A DMA from HBM that Scalar triggers at the start, past the queue of Sync.

        The two queues take turns by runs: ``turns`` is what those of the other take, unless it runs empty before.
        """
        begun = max(self._trigger_aside(transfer, 0.0) + self._dma.first_load, self._aside)
        self._loaded += transfer.nbytes
        self._aside = begun + transfer.work + min(turns, max((self._paused or self._served) - begun, 0.0))
        self._served += transfer.work
        return self._finish(self._aside + self._dma.completion)

    def load_beside(self, transfer: Transfer, descriptors: int, beside: Beside) -> float:
        """The same, where the queue of Sync is full of long descriptors: queues take turns by descriptor.

        ``descriptors``: on the busiest DMA engine.
        """
        self._loaded += transfer.nbytes
        self._aside_work += transfer.work
        began = max(self._trigger_aside(transfer, 0.0) + self._dma.first_load, self._aside_served)
        alone = max(began + transfer.work, beside.end + self._aside_work)
        own = transfer.work / descriptors
        pace = 1 - beside.share + beside.share * own / (own + beside.descriptor)
        self._aside_served = min(began + transfer.work / pace, alone)
        return self._finish(self._aside_served + self._dma.completion)

    def store_aside(self, transfer: Transfer, ready: float) -> float:
        """A DMA to HBM that Scalar triggers, past the queue of Sync; beside it, it takes about twice its time."""
        self._stored += transfer.nbytes
        start = self._trigger_aside(transfer, ready)
        return self._finish(start + self._dma.first_store + 2 * transfer.work + self._dma.completion)

    def _trigger_aside(self, transfer: Transfer, ready: float) -> float:
        start = max(self._free[SCALAR], self._next_aside, ready)
        self._next_aside = start + self._dma.spacing
        self._free[SCALAR] = start + self._dma.hardware_trigger
        self._busy[SCALAR] += self._dma.hardware_trigger
        self._busy[DMA] += transfer.work
        return start

    def store(self, transfer: Transfer, ready: float = 0.0) -> float:
        """A DMA to HBM of what is there at ``ready``; when it has ended."""
        self._stored += transfer.nbytes
        return self._move(transfer, ready, self._dma.first_store)

    def exchange(self, ready: float) -> float:
        """Columns sent to the other core, which runs the same schedule, and received from it."""
        start = max(self._free[SYNC], ready)
        self._free[SYNC] = start + self._dma.hardware_trigger
        self._busy[SYNC] += self._dma.hardware_trigger
        return self._finish(start + self._cores.sendrecv)

    def prediction(self) -> Prediction:
        """The figures of what has run."""
        return Prediction(
            self.end,
            self.instructions,
            dict(self._busy),
            self._loaded,
            self._stored,
            self._moving,
            self.instructions - self._beside,
        )

    def _move(self, transfer: Transfer, ready: float, first: float) -> float:
        start = max(self._free[SYNC], self._next_trigger, ready)
        self._next_trigger = start + self._dma.spacing
        self._free[SYNC] = start + self._dma.hardware_trigger
        self._busy[SYNC] += self._dma.hardware_trigger
        self._busy[DMA] += transfer.work
        self._arrived = max(start + first, self._arrived)
        if self._arrived > self._served and self._paused == 0:
            self._paused = self._served
        self._served = max(self._served, self._arrived) + transfer.shared
        self._moving += transfer.shared
        return self._finish(self._served + self._dma.completion)

    def _finish(self, done: float) -> float:
        self.instructions += 1
        if done > self.end:
            self.end = done
        return done
