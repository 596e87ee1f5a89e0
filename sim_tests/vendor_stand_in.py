# SPDX-License-Identifier: Apache-2.0
"""A package that looks like the vendor's nki to an installation, and is the embedded simulator inside."""

from __future__ import annotations

from pathlib import Path

_MODULES = ("isa", "language", "collectives", "typing")
VERSION = "0.6.0"


def write_vendor(folder: Path, version: str = VERSION) -> Path:
    """Write the package and its metadata into ``folder``, which then goes on PYTHONPATH; returns the folder."""
    package, metadata = folder / "nki", folder / f"nki-{version}.dist-info"
    package.mkdir(parents=True)
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nki\nVersion: {version}\n")
    (package / "__init__.py").write_text(
        f"from nki_bn.simulator.api import Kernel, dtype, jit, simulate\nfrom nki import {', '.join(_MODULES)}\n"
    )
    for name in _MODULES:
        (package / f"{name}.py").write_text(f"from nki_bn.simulator.api.{name} import *\n")
    return folder
