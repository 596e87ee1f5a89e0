# SPDX-License-Identifier: Apache-2.0
"""Making ``import nki`` resolve to the simulator."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
from dataclasses import dataclass

CHOICE_VARIABLE = "NKI_BN_NKI"
CHOICES = ("embedded", "vendor")

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
    """Which ``nki`` is in use (``"embedded"``, ``"vendor"``, or in a program ``"refused"``, which is none) and why."""

    kind: str
    reason: str


def install(force: bool = False) -> Installation:
    """Register the simulator's modules as ``nki`` unless the vendor's package is there (``force`` replaces it).

    The public registry holds an empty placeholder named nki (version 0.0.x): that one is replaced too. The variable
    NKI_BN_NKI decides where it is set: "embedded" is ``force``, "vendor" refuses to go on without the vendor's package.

    Raises:
        ValueError: NKI_BN_NKI has another value.
        ImportError: it is "vendor", and the vendor's package is not installed or was replaced before.
    """
    choice = _choice()
    if getattr(sys.modules.get("nki"), "__nki_bn_simulator__", False):
        if choice == "vendor":
            raise ImportError(f"{CHOICE_VARIABLE} is 'vendor', but the embedded simulator was installed as nki before")
        return Installation("embedded", "the simulator was installed before")
    version = vendor_version()
    real = version is not None and not version.startswith("0.0.")
    if choice == "vendor" and not real:
        found = "no nki" if version is None else f"the placeholder nki {version}"
        raise ImportError(f"{CHOICE_VARIABLE} is 'vendor', but {found} is installed; accepted: the vendor's package")
    if real and not force and choice != "embedded":
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


def _choice() -> str | None:
    choice = os.environ.get(CHOICE_VARIABLE)
    if choice is not None and choice not in CHOICES:
        raise ValueError(f"{CHOICE_VARIABLE} is {choice!r}; accepted: {', '.join(CHOICES)}, or not set")
    return choice


def vendor_version() -> str | None:
    """The version of the nki that is installed, the placeholder's too; None without one, or after it was replaced."""
    loaded = sys.modules.get("nki")
    if getattr(loaded, "__nki_bn_simulator__", False) or importlib.util.find_spec("nki") is None:
        return None
    try:
        return importlib.metadata.version("nki")
    except importlib.metadata.PackageNotFoundError:
        return "without version"
