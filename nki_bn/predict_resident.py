# SPDX-License-Identifier: Apache-2.0
"""What a plan of the strategies ``resident`` and ``reread`` would take: a part of its groups, prolonged to all."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from nki_bn.hardware import Timing
from nki_bn.kernels.plan import ResidentPlan
from nki_bn.kernels.resident_geometry import Extent, extent_of_core, units_of
from nki_bn.kernels.resident_layout import group_size, layout_of
from nki_bn.kernels.sizing import ceil_div
from nki_bn.pipeline import Paces, Prediction
from nki_bn.predict_resident_core import CoreRun

# Groups and chunks that are run at least when there are more. Whole groups of a multiple of so many chunks, on top of
# those, tell what further groups add.
GROUPS = 3
CHUNKS = 16
MORE_CHUNKS = 8
# Chunks of a set of ``reread`` that are run when there are more; again so many more tell what further ones add.
SET_CHUNKS = 8


def predict_resident(plan: ResidentPlan, timing: Timing) -> Prediction:
    """The prediction for the slower core: the one with the larger share, unless the other's leaves more leftovers."""
    first, last = (extent_of_core(plan.shape, plan.split, core, plan.cores) for core in (0, plan.cores - 1))
    found = _predicted(plan, first, timing)
    if (first.batches, first.length) == (last.batches, last.length):
        return found
    return max(found, _predicted(plan, last, timing), key=lambda prediction: prediction.ns)


def _predicted(plan: ResidentPlan, extent: Extent, timing: Timing) -> Prediction:
    """The prediction for a core that owns ``extent``."""
    bands = plan.batch_bands, plan.space_bands
    most = bands
    if extent.channels % plan.set_channels:
        # A last set has bands of its own: these have equally much of the parts that are run.
        most = math.lcm(bands[0], plan.last_batch_bands), math.lcm(bands[1], plan.last_space_bands)
    parts = None if plan.strategy == "resident" else fewer_chunks(extent, bands, most, plan.chunk)
    if parts is None:
        return _over_groups(plan, extent, timing)
    short, long = (_over_groups(plan, part, timing) for part in parts.extents)
    return long.prolonged(short, long, parts.times)


@dataclass(frozen=True)
class Parts:
    """Two parts of an extent, and how many times the rest has what the second one has more than the first."""

    extents: tuple[Extent, Extent]
    times: float


def fewer_chunks(extent: Extent, bands: tuple[int, int], most: tuple[int, int], chunk: int) -> Parts | None:
    """As much of every channel as a few chunks hold, and some more; None where there are no more.

    ``bands`` are those of batches and of positions; ``most`` what both have to divide evenly.
    """
    few, more = (
        _with_fewer_chunks(extent, bands, most, chunk, count) for count in (SET_CHUNKS, SET_CHUNKS + MORE_CHUNKS)
    )
    columns = [_columns(part, bands) for part in (few, more, extent)]
    if columns[0] == columns[1] or columns[1] == columns[2]:
        return None
    return Parts((few, more), (columns[2] - columns[1]) / (columns[1] - columns[0]))


def _with_fewer_chunks(extent: Extent, bands: tuple[int, int], most: tuple[int, int], chunk: int, count: int) -> Extent:
    positions = max(extent.length // bands[1], 1)
    batches, length = extent.batches, extent.length
    if positions <= chunk:
        batches = min(batches, most[0] * (chunk // positions) * count)
    else:
        pieces = ceil_div(positions, chunk)
        batches = min(batches, most[0] * max(count // pieces, 1))
        length = min(length, most[1] * ceil_div(positions, pieces) * count)
    return Extent(extent.channel, extent.channels, extent.batch, batches, extent.start, length)


def _columns(extent: Extent, bands: tuple[int, int]) -> int:
    """Columns of a set."""
    return sum(unit.batches() * unit.positions() for unit in units_of(extent, *bands))


def _over_groups(plan: ResidentPlan, extent: Extent, timing: Timing) -> Prediction:
    """The prediction for all groups of a core that owns ``extent``."""
    channels = plan.set_channels * plan.group_sets
    groups = ceil_div(extent.channels, channels)
    paces = Paces(timing, plan.cores - 1)
    shape = (extent.batches, plan.shape[1], extent.length)
    chunks = group_size(shape, 1, layout_of(replace(plan, split="none"))).chunks
    # Loads run ahead until the ring is full, and only then does every group take as long as the one before.
    few = max(GROUPS, ceil_div(CHUNKS, chunks), ceil_div(plan.slots, chunks) + 1)
    # Engines share chunks in turns of eight, which matters where those are few.
    more = min(MORE_CHUNKS // math.gcd(MORE_CHUNKS, chunks), ceil_div(2 * MORE_CHUNKS, chunks))
    if groups <= few + more:
        return CoreRun(plan, extent, extent, paces).run()
    short = CoreRun(plan, shortened(extent, few, channels), extent, paces).run()
    long = CoreRun(plan, shortened(extent, few + more, channels), extent, paces).run()
    return long.prolonged(short, long, (groups - few - more) / more)


def shortened(extent: Extent, groups: int, group_channels: int) -> Extent:
    """As many channels as ``groups`` groups have, the last of them like the last of all."""
    last = (extent.channels - 1) % group_channels + 1
    channels = (groups - 1) * group_channels + last
    return Extent(extent.channel, channels, extent.batch, extent.batches, extent.start, extent.length)
