# SPDX-License-Identifier: Apache-2.0
"""The synchronised sites: shards of every size on several replicas, odd arguments on one of them or on all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import site_steps
from hypothesis import strategies as st
from site_steps import Batch

import nki_bn
from fuzz.ops import odd_values
from fuzz.surface import Surface, check_refusal
from nki_bn.problem import DTYPES
from nki_bn.synchronised import SiteOptions, bn_fwd_site, replicas

_OPTIONS = ("mode", "eps", "fuse_relu", "save_relu_mask", "lnc", "target", "beta")
_NAMES = {*_OPTIONS, "x", "dy", "residual", "gamma", "beta", "shape", "dtype", "collective", "momentum"}


@st.composite
def steps(draw: st.DrawFn) -> tuple[Batch, dict[str, Any], bool, str]:
    """A batch, options, whether a residual is added, and the name of what is odd ("" if nothing is)."""
    sizes = tuple(draw(st.lists(st.integers(0, 4), min_size=1, max_size=4)))
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    mean, std = draw(st.sampled_from([0.0, 1.0, -50.0])), draw(st.sampled_from([1.0, 0.01, 20.0]))
    batch = site_steps.drawn(sizes, mean, std, dtype, draw(st.integers(1, 5)))
    options: dict[str, Any] = {
        "beta": "b",
        "mode": draw(st.sampled_from(["two_round", "one_round"])),
        "fuse_relu": draw(st.booleans()),
        "save_relu_mask": draw(st.booleans()),
        "lnc": draw(st.sampled_from([1, 2])),
    }
    odd = draw(st.sampled_from(["", "", "", *_OPTIONS[:-1], "x", "gamma", "residual"]))
    value = draw(odd_values((max(1, sizes[0]), batch.x.shape[1], 3, 4)))
    if odd in _OPTIONS:
        options[odd] = value
    elif odd == "gamma":
        batch = replace(batch, parameters=batch.parameters | {"g": value})
    elif odd:
        return batch, options | {"value": value}, draw(st.booleans()), odd
    return batch, options, draw(st.booleans()), odd


def check_step(example: tuple[Batch, dict[str, Any], bool, str]) -> None:
    """A step that is the one of the global batch, or a documented refusal."""
    batch, given, add, odd = example
    options = {name: value for name, value in given.items() if name != "value"}
    try:
        with np.errstate(all="ignore"):
            made = SiteOptions(**options)
            if odd in ("x", "residual"):
                _alone(batch, made, {odd: given["value"]})
                return
            done, _ = site_steps.steps(batch, made, add)
    except RuntimeError as error:
        assert "replica" in str(error) and batch.sizes[0] != sum(batch.sizes), error
    except Exception as error:
        check_refusal(error, _NAMES | set(batch.parameters))
    else:
        if len(batch.sizes) == 1:
            _as_plain(batch, made, done[0], add)
        elif batch.x.size and not odd:
            site_steps.judge(batch, made, done, add)
            site_steps.judge_statistics(batch, done)


def _as_plain(batch: Batch, options: SiteOptions, done: site_steps.Step, add: bool) -> None:
    """One replica is the plain kernel, bit for bit."""
    beta = None if options.beta is None else batch.parameters[options.beta]
    want = nki_bn.batch_norm_fwd(
        batch.x,
        batch.parameters["g"],
        beta,
        eps=options.eps,
        fuse_relu=options.fuse_relu,
        residual=batch.residual if add else None,
        save_relu_mask=options.save_relu_mask,
        lnc=options.lnc,
        target=options.target,
    )
    assert (
        want.y.tobytes() == done.forward.y.tobytes() and want.mean.tobytes() == done.forward.statistics.mean.tobytes()
    )


def _alone(batch: Batch, options: SiteOptions, odd: dict[str, Any]) -> None:
    """The forward site of one replica, with an odd shard or residual."""
    arguments = {"x": batch.x, "residual": None} | odd
    (group,) = replicas(1)
    done = bn_fwd_site(arguments["x"], batch.parameters, group, "g", options, arguments["residual"])
    assert done.y.shape == arguments["x"].shape and done.y.dtype == arguments["x"].dtype


SURFACE = Surface(steps(), check_step)
