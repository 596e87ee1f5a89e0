# SPDX-License-Identifier: Apache-2.0
"""Records for tests of benchmarks."""

from __future__ import annotations

from typing import Any

from nki_bn import __version__
from nki_bn.bench.record import Case, Record

SHAPE = (2, 3, 4)


def case(**changes: Any) -> Case:
    """A case, but for ``changes``."""
    usual = {
        "model": "net",
        "layer": "3x4",
        "count": 1,
        "op": "bwd",
        "shape": SHAPE,
        "dtype": "float32",
        "relu": "none",
        "precision": "high",
        "lnc": 1,
        "target": "trn2",
        "strategy": "staged",
    }
    return Case(**(usual | changes))


def record(time_us: float | None = 10.0, **changes: Any) -> Record:
    """The record of a case that took ``time_us`` (None: it failed), modelled, but for ``changes``."""
    of_case = {key: changes.pop(key) for key in list(changes) if key in Case.__dataclass_fields__}
    usual = {
        "timing": "modelled",
        "method": "by hand",
        "status": "ok",
        "error": None,
        "checked_shape": SHAPE,
        "plan": {"strategy": "staged"},
        "instructions": 7,
        "modelled_us": time_us,
        "measured_us": None,
        "roofline_us": 5.0,
        "roofline_share": 0.5,
        "hbm_bytes": 4000,
        "hbm_bytes_min": 2000,
        "bound_by": "vector",
        "engine_busy_us": {"vector.0": 8.0},
        "sbuf_high_water": (100,),
        "version": __version__,
        "environment": {"hardware": "abc"},
    }
    if time_us is None:
        missing = ("roofline_share", "hbm_bytes", "bound_by", "instructions", "engine_busy_us", "sbuf_high_water")
        usual |= {"status": "failed", "error": "ValueError: no", **dict.fromkeys(missing)}
    return Record(**vars(case(**of_case)), **(usual | changes))


def measured(time_us: float, **changes: Any) -> Record:
    """A record from a device."""
    return record(time_us, timing="measured", measured_us=time_us, modelled_us=None, hbm_bytes=None, **changes)
