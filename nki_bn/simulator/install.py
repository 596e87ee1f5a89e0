# SPDX-License-Identifier: Apache-2.0
"""Making ``import nki`` resolve to the simulator."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from dataclasses import dataclass

_HOME = "nki_bn.simulator.api"
_MODULES = {
    "nki": _HOME,
    "nki.language": f"{_HOME}.language",
    "nki.isa": f"{_HOME}.isa",
    # Undocumented, but public kernels import their enumerations from here.
    "nki.isa.constants": "nki_bn.simulator.isa.enums",
    "nki.collectives": f"{_HOME}.collectives",
    "nki.typing": f"{_HOME}.typing",
}


@dataclass(frozen=True)
class Installation:
    """Which ``nki`` is in use (``"embedded"`` or ``"vendor"``) and why."""

    kind: str
    reason: str


def install(force: bool = False) -> Installation:
    """Register the simulator's modules as ``nki`` unless the vendor's package is there (``force`` replaces it).

    The public registry holds an empty placeholder named nki (version 0.0.x): that one is replaced too.
    """
    if getattr(sys.modules.get("nki"), "__nki_bn_simulator__", False):
        return Installation("embedded", "the simulator was installed before")
    version = _vendor_version()
    if version is not None and not version.startswith("0.0.") and not force:
        return Installation("vendor", f"the vendor's nki {version} is installed")
    for name, home in _MODULES.items():
        sys.modules[name] = module = importlib.import_module(home)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    if version is None:
        return Installation("embedded", "no nki package is installed")
    why = "is a placeholder" if version.startswith("0.0.") else "is replaced on request"
    return Installation("embedded", f"nki {version} is installed and {why}")


def _vendor_version() -> str | None:
    if importlib.util.find_spec("nki") is None:
        return None
    try:
        return importlib.metadata.version("nki")
    except importlib.metadata.PackageNotFoundError:
        return "without version"
