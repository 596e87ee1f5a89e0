# SPDX-License-Identifier: Apache-2.0
"""Packages that only benchmarks need."""

from __future__ import annotations

from importlib.util import find_spec


def require_extra(package: str) -> None:
    """Refuse to go on without ``package``.

    Raises:
        ValueError: it is not installed; says which extra has it.
    """
    if find_spec(package) is None:
        raise ValueError(f"{package} is not installed; the extra bench has it: in a checkout, pip install '.[bench]'")
