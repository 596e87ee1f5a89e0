# SPDX-License-Identifier: Apache-2.0
"""What ``import nki`` gives: kernels and their launch."""

from typing import Any

from nki_bn.simulator.api import collectives, isa, language, typing
from nki_bn.simulator.dtypes import DType as dtype
from nki_bn.simulator.errors import UnsupportedError
from nki_bn.simulator.kernel import Kernel, jit, simulate

__all__ = ["Kernel", "collectives", "dtype", "isa", "jit", "language", "simulate", "typing"]
__nki_bn_simulator__ = True

_GONE = {"benchmark", "profile", "baremetal", "simulate_kernel"}


def __getattr__(name: str) -> Any:
    if name in _GONE:
        raise UnsupportedError(f"nki.{name} is not part of the current API; run kernels with nki.jit or nki.simulate")
    raise AttributeError(f"module 'nki' has no attribute {name!r}")
