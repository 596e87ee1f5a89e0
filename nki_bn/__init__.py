# SPDX-License-Identifier: Apache-2.0
"""Batch-norm kernels for AWS Trainium and a CPU simulator of NKI that runs them."""

import importlib
from typing import TYPE_CHECKING, Any

from nki_bn.simulator import install

if TYPE_CHECKING:
    from nki_bn.ops import batch_norm_bwd

__version__ = "0.1.0"
__all__ = ["batch_norm_bwd"]

# Kernels import `nki`, so this comes before any of them.
installation = install()


def __getattr__(name: str) -> Any:
    # Found at first use: the linter and the doctor have to work while a kernel does not even import.
    if name in __all__:
        return getattr(importlib.import_module("nki_bn.ops"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
