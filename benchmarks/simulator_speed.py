# SPDX-License-Identifier: Apache-2.0
"""How much slower than NumPy the simulator is, and how much faster a launch that repeats an earlier one.

Staged backward at [8, 256, 56, 56] bfloat16 on two cores, strict, against the float64 formula on the same data, by
turns in one run. Exit 1 if the ratio of the medians of simulation and formula is above the limit.

    python benchmarks/simulator_speed.py [--runs 5] [--limit 10]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

import nki_bn
from nki_bn.execute import simulation
from nki_bn.planner import plan_staged
from nki_bn.simulator import RunOptions

SHAPE = (8, 256, 56, 56)
EPS = 1e-5


def formula(dy: Any, x: Any, mean: Any, var: Any, gamma: Any) -> tuple[Any, Any, Any]:
    """Batch-norm backward in float64, as one writes it with NumPy."""
    dy, x = dy.astype(np.float64), x.astype(np.float64)
    axes, shape = (0, 2, 3), (1, -1, 1, 1)
    rstd = 1 / np.sqrt(var.astype(np.float64) + EPS)
    xhat = (x - mean.reshape(shape)) * rstd.reshape(shape)
    dbeta = dy.sum(axes)
    dgamma = (dy * xhat).sum(axes)
    count = dy.size / dy.shape[1]
    dx = (gamma * rstd).reshape(shape) * (dy - dbeta.reshape(shape) / count - xhat * dgamma.reshape(shape) / count)
    return dx, dgamma, dbeta


def seconds(work: Callable[[], Any]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> int:
    """Time both by turns and print medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--limit", type=float, default=10.0)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    dy, x = (rng.standard_normal(SHAPE, np.float32).astype(ml_dtypes.bfloat16) for _ in range(2))
    mean, var = (f(np.float32(x), axis=(0, 2, 3), dtype=np.float64).astype(np.float32) for f in (np.mean, np.var))
    gamma = rng.standard_normal(SHAPE[1]).astype(np.float32)
    beta = np.zeros_like(gamma)
    plan = plan_staged(nki_bn.BackwardProblem(SHAPE, "bfloat16", lnc=2))
    times: dict[str, list[float]] = {"simulator": [], "repeated": [], "formula": []}
    # Of the launches that may repeat, the first two are simulated.
    for _ in range(options.runs + 2):
        for name, replay in (("simulator", False), ("repeated", True)):
            with simulation(RunOptions(replay=replay)):
                times[name].append(
                    seconds(lambda: nki_bn.batch_norm_bwd(dy, x, mean, var, gamma, beta, EPS, lnc=2, plan=plan))
                )
        times["formula"].append(seconds(lambda: formula(dy, x, mean, var, gamma)))
    medians = {name: statistics.median(values[2:]) for name, values in times.items()}
    ratio = medians["simulator"] / medians["formula"]
    for name, value in medians.items():
        print(f"{name:10} {value * 1e3:8.1f} ms")
    print(f"{'ratio':10} {ratio:8.2f}    limit {options.limit:.2f}")
    return int(ratio > options.limit)


if __name__ == "__main__":
    raise SystemExit(main())
