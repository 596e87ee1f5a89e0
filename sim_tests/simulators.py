# SPDX-License-Identifier: Apache-2.0
"""Which tests are about the embedded simulator: those whose module uses more of it than the vendor's has."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).resolve().parent
# What is about the embedded simulator. The command line and the benchmarks model times with it.
_EMBEDDED = ("nki_bn.simulator", "nki_bn.bench", "nki_bn.commands", "nki_bn.cli")
# Names of these that say nothing about where a kernel runs.
_EITHER = frozenset("RunOptions SimulationResult Installation NkiValidationError to_torch torch_memory".split())
# Helpers that run on either simulator.
_PORTABLE = frozenset({"launching", "instructions"})


@cache
def needs_embedded(module: ModuleType) -> bool:
    """Whether a module of these tests, or a helper that it takes something from, uses the embedded simulator itself."""
    return any(_is_embedded(value, module.__name__) for value in vars(module).values())


def _is_embedded(value: Any, owner: str) -> bool:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    if not isinstance(name, str) or name == owner:
        return False
    if name.startswith(_EMBEDDED):
        return getattr(value, "__name__", "") not in _EITHER
    helper = _helper(name)
    return helper is not None and needs_embedded(helper)


def _helper(name: str) -> ModuleType | None:
    module = sys.modules.get(name)
    path = getattr(module, "__file__", None)
    is_here = path is not None and Path(path).parent == FOLDER and name not in _PORTABLE
    return module if is_here and not name.startswith(("test_", "conftest")) else None
