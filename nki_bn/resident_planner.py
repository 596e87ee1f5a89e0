# SPDX-License-Identifier: Apache-2.0
"""Choosing the layout of a ``resident`` plan: candidates, a closed form to rank them, predictions of the best."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from nki_bn.hardware import Target, load_target
from nki_bn.kernels.plan import ResidentPlan, total_bytes
from nki_bn.kernels.resident_geometry import Extent, extent_of_core
from nki_bn.kernels.resident_layout import (
    BackwardTask,
    GroupSize,
    ResidentLayout,
    group_size,
    resident_buffers,
    resident_plan,
    slice_of,
)
from nki_bn.kernels.sizing import BANK_COLUMNS, CHUNK_COLUMNS, PARTITIONS, SBUF_SLACK_BYTES, ceil_div
from nki_bn.kernels.tensor_work import COMBINATION_BANKS
from nki_bn.predict import INSTRUCTIONS, MOST_STEPS, Candidate, predict
from nki_bn.problem import GRADIENTS, BackwardProblem, Problem
from nki_bn.resident_estimate import EIGHTHS, estimated_instructions, estimated_us, wanted_slots

# Narrower chunks than this are bound by what each instruction and each DMA costs beside its elements.
NARROWEST_CHUNK = 392
# Chunk widths that are tried, besides 12*sqrt(columns of the core), which is what the ends of the pipeline ask for, and
# half and double of it.
CHUNKS = (784, 1568)
CHUNK_FACTORS = (0.5, 1.0, 2.0)
# Shares in eighths of the chunks, from which the search starts: about what makes the engines even. Of sums of dy, and
# of x-terms, Vector takes over from Scalar; with ``fast`` it makes these in half the time, in float32 it makes none.
SHARED = (3, 4)
SHARED_FAST = (3, 8)
SHARED_FLOAT32 = (5, 0)
# Masks are Vector's work, a recomputed one more of it.
SHARED_RELU = {"mask": (1, 2), "recompute": (0, 0)}
# Combinations that Tensor takes over from Vector, and x-terms of the last groups that Vector does from Scalar.
TENSOR_SHARED = (4, 1)
TENSOR_SHARED_FAST = (3, 4)
TENSOR_SHARED_RELU = (8, 0)
# Sets of one channel that may have their turn together, and the columns from which a turn for them can pay.
GROUP_SETS = (1, 2, 3, 4, 6, 8)
TENSOR_COLUMNS = 392
# Columns of a set from which more than 100 products follow each other in a partial sum of Tensor: see docs/numerics.md.
TENSOR_MOST_COLUMNS = 25_600
# Families of layouts whose best, by the closed form, is predicted: those with the same sets and groups. Then those that
# are like the fastest of them, but have other rings, other chunks, other starts, or other shares of the engines.
PREDICTED = {"resident": 6, "reread": 3}
# By the closed form the fastest layout takes at most so many times what the likeliest one takes.
LIKELY = 1.35
# Shares of the slots that the closed form asks for: the second is as many as fit.
OTHER_RINGS = (0.7, math.inf)
OTHER_CHUNKS = 2
OTHER_SHARES = 5
# Slots of ``reread``: enough that loads run ahead while stores drain.
REREAD_SLOTS = 8
# Banks of PSUM.
BANKS = 8


@dataclass(frozen=True)
class Estimate:
    """A layout that fits, the size of its groups; by the closed form its time, and if it has too many instructions."""

    layout: ResidentLayout
    size: GroupSize
    us: float
    over: bool


def best_resident(
    problem: BackwardProblem, sbuf_bytes: int | None = None, strategy: str = "resident"
) -> Candidate | None:
    """The candidate with the least predicted time, or None if no layout fits into SBUF (or the target is trn1).

    ``sbuf_bytes`` may be used per partition; None stands for all that the target has. ``strategy`` is "resident" or
    "reread".
    """
    found = resident_candidates(problem, sbuf_bytes, strategy)
    return found[0] if found else None


def resident_candidates(
    problem: BackwardProblem, sbuf_bytes: int | None = None, strategy: str = "resident", spent: int = 0
) -> list[Candidate]:
    """The best layouts, that with the least predicted time first; arguments as for :func:`best_resident`.

    ``spent``: steps of the pipeline that went into other candidates of the problem.
    """
    target = load_target(problem.target)
    # On trn1 a transpose on the Tensor engine is a product with zeros and ones: a NaN would leave its channel.
    if target.generation < 3:
        return []
    search = Search(problem, _budget(target, sbuf_bytes), strategy)
    search.steps = spent
    families = search.best_of_families()[: PREDICTED[strategy]]
    for estimate in families:
        if estimate.us <= LIKELY * families[0].us and search.steps < MOST_STEPS:
            search.predict(estimate)
    search.improve()
    return sorted(search.found.values(), key=lambda candidate: candidate.prediction.ns)


def _budget(target: Target, sbuf_bytes: int | None) -> int:
    whole = target.sbuf_partition_bytes if sbuf_bytes is None else sbuf_bytes
    return whole - int(SBUF_SLACK_BYTES)


def task_of(problem: BackwardProblem) -> BackwardTask:
    """What is asked, as a kernel sees it."""
    need = tuple(name in problem.need for name in GRADIENTS)
    fast = problem.precision == "fast"
    return BackwardTask(
        problem.extents, problem.dtype, problem.lnc, problem.relu, problem.residual, problem.training, need, fast
    )


def split_of(problem: Problem) -> str:
    """What the cores divide: channels, which need no exchange; with a single one batches or space."""
    if problem.lnc == 1:
        return "none"
    if problem.channels > 1:
        return "channel"
    if problem.batch % 2 == 0 or problem.spatial == 1:
        return "batch" if problem.batch > 1 else "channel"
    return "spatial"


class Search:
    """The layouts that are tried for a problem within a budget of SBUF."""

    def __init__(self, problem: BackwardProblem, budget: int, strategy: str) -> None:
        self.task = task_of(problem)
        self.budget = budget
        self.strategy = strategy
        self.split = split_of(problem)
        self.itemsize = problem.itemsize
        self.extent = extent_of_core(self.task.shape, self.split, 0, self.task.cores)

        self.found: dict[ResidentLayout, Candidate] = {}
        self.steps = 0
        self.estimates = sorted(self._estimates(), key=lambda estimate: (estimate.over, estimate.us))

    def predict(self, estimate: Estimate | None) -> float:
        """ns of a layout, which becomes a candidate; infinite for one that does not fit."""
        if estimate is None:
            return math.inf
        if estimate.layout not in self.found:
            plan: ResidentPlan = resident_plan(self.task, estimate.layout, self.strategy)
            self.found[estimate.layout] = Candidate(plan, predict(plan))
            self.steps += self.found[estimate.layout].prediction.steps
        return self.found[estimate.layout].prediction.ns

    def best_of_families(self) -> list[Estimate]:
        """The best estimate of those with equal sets and groups, for all of these."""
        best: dict[tuple[int, int, bool], Estimate] = {}
        for estimate in self.estimates:
            best.setdefault(family_of(estimate.layout), estimate)
        return list(best.values())

    def improve(self) -> None:
        """Predict what is like the fastest candidate, one kind of change after the other."""
        shares = (self._next_share,) * OTHER_SHARES
        for others in (self.other_chunks, *shares, self.other_rings, self.other_starts, *shares):
            self._try(others)

    def _try(self, others: Callable[[ResidentLayout], list[tuple[ResidentLayout, float]]]) -> None:
        if not self.found:
            return
        fastest = self.fastest()
        for layout, share in others(fastest):
            # What is like the fastest takes about as many steps.
            if self.steps + self.found[fastest].prediction.steps <= MOST_STEPS:
                self.predict(self.fitted(layout, share))

    def _next_share(self, layout: ResidentLayout) -> list[tuple[ResidentLayout, float]]:
        return [(other, 1.0) for other in self.other_shares(layout) if other not in self.found][:1]

    def other_shares(self, layout: ResidentLayout) -> list[ResidentLayout]:
        """The same layout with more or less for an engine."""
        shares = [(layout.eighths + 1, layout.term_eighths), (layout.eighths - 1, layout.term_eighths)]
        if self.task.folded():
            terms = layout.term_eighths
            shares += [(layout.eighths, terms + 3), (layout.eighths, terms - 1)]
        return [
            replace(layout, eighths=first, term_eighths=second)
            for first, second in shares
            if 0 <= first <= EIGHTHS and 0 <= second <= EIGHTHS
        ]

    def fastest(self) -> ResidentLayout:
        """The layout that is predicted to be fastest so far."""
        return min(self.found, key=lambda layout: self.found[layout].prediction.ns)

    def other_chunks(self, layout: ResidentLayout) -> list[tuple[ResidentLayout, float]]:
        """The next best of its family, by the closed form, and of the family that comes second in predictions."""
        second = [other for other in self.found if family_of(other) != family_of(layout)]
        second = sorted(second, key=lambda other: self.found[other].prediction.ns)[:1]
        return [(other, 1.0) for one in (layout, *second) for other in self._untried(one)]

    def _untried(self, layout: ResidentLayout) -> list[ResidentLayout]:
        family = [other.layout for other in self.estimates if family_of(other.layout) == family_of(layout)]
        return [other for other in family if other not in self.found][:OTHER_CHUNKS]

    def other_rings(self, layout: ResidentLayout) -> list[tuple[ResidentLayout, float]]:
        """The same layout with more and with fewer slots."""
        return [(layout, share) for share in OTHER_RINGS]

    def other_starts(self, layout: ResidentLayout) -> list[tuple[ResidentLayout, float]]:
        """The same layout with a short first chunk, or without, and with a short last one, or without."""
        return [
            (replace(layout, short_start=not layout.short_start), math.inf),
            (replace(layout, short_end=not layout.short_end), math.inf),
        ]

    def _estimates(self) -> Iterator[Estimate]:
        """All layouts that are tried and fit."""
        for layout in (*self.layouts(), *self.tensor_layouts()):
            estimate = self.fitted(layout)
            if estimate is not None:
                yield estimate

    def fitted(self, layout: ResidentLayout, share: float = 1.0) -> Estimate | None:
        """The layout with ``share`` of the slots that it can use, or as many as fit; None if one group does not fit."""
        size = group_size(self.task.shape, self.task.cores, layout)
        if layout.tensor_sums and not self._banks_fit(layout, size):
            return None
        fitting = self._with_slots(layout, size, share)
        if fitting is None:
            # Chunks cut in two take slots of their own.
            whole = replace(layout, short_start=False, short_end=False)
            return None if whole == layout else self.fitted(whole, share)
        over = estimated_instructions(self.task, fitting, size) > INSTRUCTIONS
        return Estimate(fitting, size, estimated_us(self.task, fitting, size, self.strategy), over)

    def layouts(self) -> Iterator[ResidentLayout]:
        """Layouts whose sums are made by Scalar and Vector: channels per set, bands, chunk widths."""
        shares = SHARED_FAST if self.task.fast else SHARED
        if self.task.relu != "none":
            shares = SHARED_RELU[self.task.relu]
        if not self.task.folded() or not self.task.has_terms():
            shares = SHARED_FLOAT32
        for channels in group_sizes(self.extent.channels):
            bands = bands_of(self.extent, PARTITIONS // channels)
            last = self._last_bands(channels)
            group = group_columns(self.extent, *bands)
            if self.strategy == "reread" or 2 * group * self.itemsize <= self.budget:
                for chunk in self._chunks(bands[1], group):
                    yield ResidentLayout(self.split, channels, 1, *bands, *last, chunk, 0, False, *shares, True, True)

    def tensor_layouts(self) -> Iterator[ResidentLayout]:
        """Layouts whose sums are made by Tensor: one channel on all lanes, several of them in a group."""
        needed = self.task.has_terms() or self.task.need[1]
        if not self.task.folded() or not needed:
            return
        bands = bands_of(self.extent, PARTITIONS)
        columns = group_columns(self.extent, *bands)
        if not TENSOR_COLUMNS <= columns <= TENSOR_MOST_COLUMNS or (
            self.strategy == "resident" and 2 * columns * self.itemsize > self.budget
        ):
            return
        shares = TENSOR_SHARED_FAST if self.task.fast else TENSOR_SHARED
        if self.task.relu != "none":
            shares = TENSOR_SHARED_RELU
        for chunk in self._chunks(bands[1], columns):
            most = max(max(CHUNKS) // columns, 1) if chunk >= columns else 1
            for together in sorted({1, most}):
                for sets in GROUP_SETS:
                    if together <= sets <= self.extent.channels:
                        yield ResidentLayout(
                            self.split, 1, sets, *bands, *bands, together * chunk, 0, True, *shares, False, False
                        )

    def _last_bands(self, set_channels: int) -> tuple[int, int]:
        """Bands of a last set with fewer channels, on the core that has more of them."""
        rests = [
            extent_of_core(self.task.shape, self.split, core, self.task.cores).channels % set_channels
            for core in range(self.task.cores)
        ]
        return even_bands(self.extent, PARTITIONS // max(*rests, 1))

    def _chunks(self, space_bands: int, group: int) -> list[int]:
        columns = self.extent.channels * self.extent.batches * self.extent.length / PARTITIONS
        wanted = (*CHUNKS, *(factor * 12 * math.sqrt(columns) for factor in CHUNK_FACTORS))
        return sorted({chunk_of(self.extent, space_bands, group, width) for width in wanted})

    def _banks_fit(self, layout: ResidentLayout, size: GroupSize) -> bool:
        pairs = BANK_COLUMNS // (2 * slice_of(size.widest, size.set_columns))
        combines = self.task.has_terms() and layout.eighths > 0
        return bool(2 * ceil_div(layout.group_sets, pairs) + COMBINATION_BANKS * combines <= BANKS)

    def _with_slots(self, layout: ResidentLayout, size: GroupSize, share: float) -> ResidentLayout | None:
        total = size.chunks * ceil_div(self.extent.channels, layout.set_channels * layout.group_sets) + 1
        empty, one = (self._bytes(replace(layout, slots=slots), size) for slots in (0, 1))
        fitting = (self.budget - empty) // (one - empty)
        if self.strategy == "reread":
            return replace(layout, slots=min(fitting, REREAD_SLOTS)) if fitting >= 2 else None
        least = max(min(size.chunks + 1, total), 2)
        slots = int(min(share * wanted_slots(size.chunks), max(total, 2), fitting))
        return replace(layout, slots=slots) if slots >= least else None

    def _bytes(self, layout: ResidentLayout, size: GroupSize) -> int:
        owned, other = (
            extent_of_core(self.task.shape, layout.split, core, self.task.cores).channels
            for core in (0, self.task.cores - 1)
        )
        total: int = total_bytes(resident_buffers(self.task, layout, size, (layout.set_channels, owned, other)))
        return total


def family_of(layout: ResidentLayout) -> tuple[int, int, bool]:
    """What layouts have in common that differ in chunks, slots and shares alone."""
    return layout.set_channels, layout.group_sets, layout.tensor_sums


def group_sizes(channels: int) -> list[int]:
    """Channels per set: powers of two, and what divides the channels of the core evenly."""
    powers = {1 << power for power in range(8) if 1 << power <= channels}
    even = {ceil_div(channels, groups) for groups in range(1, 33)}
    return sorted(size for size in powers | even if size <= PARTITIONS)


def bands_of(extent: Extent, bands: int) -> tuple[int, int]:
    """(batch bands, space bands) with the fewest columns, leftovers included; whole batches where that is equal."""
    options = [
        (batch_bands, min(bands // batch_bands, extent.length))
        for batch_bands in range(min(bands, extent.batches), 0, -1)
    ]
    options += [
        (batch_bands, divisor) for batch_bands, space in options if (divisor := even_part(extent.length, space))
    ]
    return min(options, key=lambda option: group_columns(extent, *option))


def even_bands(extent: Extent, bands: int) -> tuple[int, int]:
    """(batch bands, space bands) that leave nothing over: the most of them, whole batches where that is equal."""
    options = [
        (batch_bands, even_part(extent.length, bands // batch_bands))
        for batch_bands in range(1, min(bands, extent.batches) + 1)
        if extent.batches % batch_bands == 0
    ]
    return max(options, key=lambda option: (option[0] * option[1], option[0]))


def even_part(length: int, most: int) -> int:
    """The largest divisor of ``length`` that is at most ``most``."""
    return max(divisor for divisor in range(1, most + 1) if length % divisor == 0)


def group_columns(extent: Extent, batch_bands: int, space_bands: int) -> int:
    """Columns of a set: those of its main unit and of the leftovers, which run one after the other."""
    batches: int = extent.batches // batch_bands + (extent.batches % batch_bands > 0)
    positions: int = extent.length // space_bands + extent.length % space_bands
    return batches * positions


def chunk_of(extent: Extent, space_bands: int, group: int, wanted: float) -> int:
    """A chunk width near ``wanted``: whole batches of a band, or equal pieces, within the limits."""
    positions: int = max(extent.length // space_bands, 1)
    width = min(max(wanted, NARROWEST_CHUNK), CHUNK_COLUMNS, group)
    if width >= positions:
        return int(width) // positions * positions
    pieces: int = ceil_div(positions, ceil_div(positions, int(width)))
    return pieces
