# SPDX-License-Identifier: Apache-2.0
"""Clean-room NKI simulator: the ``nki`` API on the CPU, with physical memory, strict checks and a trace."""

from nki_bn.simulator.errors import (
    DeadlockError,
    IncompleteOutputError,
    NkiValidationError,
    OutOfMemoryError,
    RaceError,
    UninitializedReadError,
    UnsupportedError,
)
from nki_bn.simulator.install import Installation, install
from nki_bn.simulator.kernel import simulate
from nki_bn.simulator.launch import Launch, SimulationResult, run_replicas
from nki_bn.simulator.machine import RunOptions, Shaped
from nki_bn.simulator.replay import run

__all__ = [
    "DeadlockError",
    "IncompleteOutputError",
    "Installation",
    "Launch",
    "NkiValidationError",
    "OutOfMemoryError",
    "RaceError",
    "RunOptions",
    "Shaped",
    "SimulationResult",
    "UninitializedReadError",
    "UnsupportedError",
    "install",
    "run",
    "run_replicas",
    "simulate",
]
