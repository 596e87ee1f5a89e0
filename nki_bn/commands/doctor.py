# SPDX-License-Identifier: Apache-2.0
"""``nki-bn doctor``: what is installed, which ``nki`` is in use and why, and whether a tiny backward comes out right.

Exit code 0: all is well. 1: the tiny backward failed.
"""

from __future__ import annotations

import argparse
import os
import platform
from importlib import metadata

from nki_bn import __version__, execute
from nki_bn.cases import Draw
from nki_bn.problem import LNC_VARIABLE

TINY = Draw(shape=(2, 3, 4))
PACKAGES = ("numpy", "ml_dtypes", "torch", "nki", "neuronx-cc", "torch-neuronx")
VARIABLES = (
    LNC_VARIABLE,
    "NEURON_PLATFORM_TARGET_OVERRIDE",
    "NKI_SIMULATOR",
    "NKI_PRECISE_FP",
    "NKI_COMPILER_FRONTEND",
    "NKI_DMA_TRANSPOSE_AS_PE_TRANSPOSE",
    "NEURON_RT_DEBUG_OUTPUT_DIR",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no options."""


def run(args: argparse.Namespace) -> int:
    """Print the report; the exit code."""
    nki = execute.which_nki()
    rows = [("nki_bn", __version__), ("python", platform.python_version())]
    rows += [(package, _version(package)) for package in PACKAGES]
    rows += [
        ("nki in use", f"{nki.kind}: {nki.reason}"),
        ("neuron device", "yes" if execute.has_device() else "no"),
    ]
    rows += [(variable, os.environ.get(variable, "not set")) for variable in VARIABLES]
    failure = _tiny_check()
    rows.append((f"backward of {list(TINY.shape)}", failure or "ok"))
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name:<{width}}  {value}" for name, value in rows))
    return 1 if failure else 0


def _tiny_check() -> str:
    """Why the tiny backward failed; empty if it did not."""
    try:
        from nki_bn import ops, verify

        case = TINY.case()
        verification = verify.verify_backward(case, ops.prepare(case))
    except Exception as error:  # Whatever is wrong is what the report is for.
        return f"not ok: {type(error).__name__}: {error}"
    return "" if verification.ok else f"not ok:\n{verify.table(verification.comparisons)}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
