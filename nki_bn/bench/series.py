# SPDX-License-Identifier: Apache-2.0
"""What is compared with what: the layers of a model under equal conditions, by contender, and what that sums up to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from nki_bn.bench.record import Case, Record
from nki_bn.bench.strategies import BASELINES


@dataclass(frozen=True)
class Conditions:
    """What the rows of a series share."""

    model: str
    op: str
    dtype: str
    relu: str
    batch: int
    lnc: int
    target: str
    timing: str

    def __str__(self) -> str:
        relu = "" if self.relu == "none" else f" relu {self.relu},"
        what = f"{self.model} {self.op} {self.dtype},{relu} batch {self.batch}"
        return f"{what}, {self.target} lnc {self.lnc}, {self.timing}"


def conditions_of(record: Record) -> Conditions:
    """The series that a record belongs to."""
    shared = (record.model, record.op, record.dtype, record.relu, record.shape[0], record.lnc, record.target)
    return Conditions(*shared, record.timing)


def contender_of(case: Case) -> str:
    """What runs against what in a series: the strategy, and the precision if it is not the usual one."""
    return case.strategy if case.precision == "high" else f"{case.strategy} {case.precision}"


@dataclass(frozen=True)
class Series:
    """Rows under equal conditions: contender -> layer -> record."""

    conditions: Conditions
    contenders: dict[str, dict[str, Record]]

    @property
    def layers(self) -> list[str]:
        """The layers, in the order of their first rows."""
        return list(dict.fromkeys(layer for rows in self.contenders.values() for layer in rows))

    @property
    def records(self) -> list[Record]:
        """All rows, layer by layer."""
        return [rows[layer] for layer in self.layers for rows in self.contenders.values() if layer in rows]

    def baseline(self, asked: str | None = None) -> str:
        """What speed-ups refer to: ``asked``, else the published strategy, else the first contender.

        Raises:
            ValueError: the series does not have what was asked for.
        """
        if asked is not None and asked not in self.contenders:
            raise ValueError(f"baseline {asked!r} is not in {self.conditions}; accepted: {', '.join(self.contenders)}")
        return asked or next((name for name in BASELINES if name in self.contenders), next(iter(self.contenders)))

    def speed_ups(self, contender: str, baseline: str) -> dict[str, float]:
        """Time of the baseline over that of the contender, on the layers that both have a time for."""
        ours, theirs = self.contenders[contender], self.contenders[baseline]
        return {
            layer: theirs[layer].time_us / record.time_us
            for layer, record in ours.items()
            if record.ok and layer in theirs and theirs[layer].ok
        }


def series_of(records: Iterable[Record]) -> list[Series]:
    """The series among these records, in the order of their first rows."""
    found: dict[Conditions, Series] = {}
    for record in records:
        conditions = conditions_of(record)
        series = found.setdefault(conditions, Series(conditions, {}))
        series.contenders.setdefault(contender_of(record), {})[record.layer] = record
    return list(found.values())


@dataclass(frozen=True)
class Summary:
    """A contender over the layers of a series; figures are None where no layer has them.

    Attributes:
        ok, failed: layers with a time, and without.
        total_us: time of all batch norms of the model with a time, each layer as often as it occurs.
        share: the same sum of roofline times over ``total_us``.
        mean_share: geometric mean over layers.
        mean_traffic: geometric mean of bytes moved over the minimum.
        total_speed_up, mean_speed_up: against the baseline, on the layers both have a time for: ratio of totals, and
            geometric mean.
    """

    contender: str
    ok: int
    failed: int
    total_us: float | None
    share: float | None
    mean_share: float | None
    mean_traffic: float | None
    total_speed_up: float | None
    mean_speed_up: float | None


def summarise(series: Series, contender: str, baseline: str) -> Summary:
    """The summary of one contender."""
    rows = series.contenders[contender]
    timed = [record for record in rows.values() if record.ok]
    total = _total(timed, lambda record: record.time_us)
    both = [layer for layer in series.speed_ups(contender, baseline)]
    ours = _total([rows[layer] for layer in both], lambda record: record.time_us)
    theirs = _total([series.contenders[baseline][layer] for layer in both], lambda record: record.time_us)
    return Summary(
        contender=contender,
        ok=len(timed),
        failed=len(rows) - len(timed),
        total_us=total,
        share=_total(timed, lambda record: record.roofline_us) / total if total else None,
        mean_share=mean([record.roofline_us / record.time_us for record in timed]),
        mean_traffic=mean([traffic for record in timed if (traffic := traffic_of(record)) is not None]),
        total_speed_up=theirs / ours if ours else None,
        mean_speed_up=mean(list(series.speed_ups(contender, baseline).values())),
    )


def mean(values: Sequence[float]) -> float | None:
    """The geometric mean; None of nothing."""
    return geometric_mean(values) if values else None


def traffic_of(record: Record) -> float | None:
    """Bytes moved over the minimum; None if they are not known."""
    return None if record.hbm_bytes is None else record.hbm_bytes / record.hbm_bytes_min


def bandwidth_of(record: Record) -> float | None:
    """GB/s of the bytes moved; None if they are not known."""
    return None if record.hbm_bytes is None else record.hbm_bytes / record.time_us / 1e3


def bandwidth_share_of(record: Record) -> float | None:
    """The bytes moved at the DMA limit of the cores, over the time; None if they are not known."""
    traffic = traffic_of(record)
    return None if traffic is None else traffic * record.roofline_us / record.time_us


def _total(records: Sequence[Record], figure: Callable[[Record], float]) -> float:
    return sum(record.count * figure(record) for record in records)
