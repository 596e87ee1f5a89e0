# SPDX-License-Identifier: Apache-2.0
"""``nki-bn doctor``: what is installed, which ``nki`` is in use and why, and whether a tiny run comes out right.

Exit code 0: all is well. 1: the tiny forward or the tiny backward failed, or no ``nki`` could be chosen to run them,
or a variable has a value that is an error where it counts.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import TYPE_CHECKING

from nki_bn import __version__, execute
from nki_bn.cases import Draw
from nki_bn.problem import LNC_VARIABLE, resolve_lnc
from nki_bn.simulator.install import CHOICE_VARIABLE
from nki_bn.simulator.launch import (
    PRECISE_VARIABLE,
    REPLAY_VARIABLE,
    TARGET_VARIABLE,
    replay_from_environment,
    target_from_environment,
)

if TYPE_CHECKING:
    from nki_bn.verify import Verification

TINY = Draw(shape=(2, 3, 4))
PACKAGES = ("numpy", "ml_dtypes", "torch", "nki", "neuronx-cc", "torch-neuronx")
VARIABLES = (
    LNC_VARIABLE,
    CHOICE_VARIABLE,
    TARGET_VARIABLE,
    execute.SIMULATOR_VARIABLE,
    REPLAY_VARIABLE,
    PRECISE_VARIABLE,
    "NKI_COMPILER_FRONTEND",
    "NKI_DMA_TRANSPOSE_AS_PE_TRANSPOSE",
    "NEURON_RT_DEBUG_OUTPUT_DIR",
)
# What raises a ValueError where the variable has a wrong value.
_READERS: dict[str, Callable[[], object]] = {
    LNC_VARIABLE: lambda: resolve_lnc(None, "trn2"),
    TARGET_VARIABLE: target_from_environment,
    execute.SIMULATOR_VARIABLE: execute.simulating,
    REPLAY_VARIABLE: replay_from_environment,
}


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
    wrong = {variable: complaint for variable in _READERS if (complaint := _complaint(variable)) is not None}
    rows += [(variable, _value(variable, wrong)) for variable in VARIABLES]
    checks = [(f"{name} of {list(TINY.shape)}", _check(tiny)) for name, tiny in TINY_CHECKS.items()]
    rows += checks
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name:<{width}}  {value}" for name, value in rows))
    return 0 if not wrong and all(verdict == "ok" for _, verdict in checks) else 1


def _complaint(variable: str) -> str | None:
    """What the function that reads the variable says about its value; None: nothing."""
    try:
        _READERS[variable]()
    except ValueError as error:
        return str(error)
    return None


def _value(variable: str, wrong: Mapping[str, str]) -> str:
    """The value to show, and what is wrong with it."""
    value = os.environ.get(variable, "not set")
    if variable in wrong:
        return f"{value}: not accepted: {wrong[variable]}"
    if variable == PRECISE_VARIABLE and value not in ("not set", "0", "1"):
        return f"{value}: counts as not set; accepted: 0, 1"
    return value


# Imported inside, so that a kernel that does not import is one more thing to report.
def _tiny_forward() -> Verification:
    from nki_bn import requests, verify

    case = TINY.forward()
    return verify.verify_forward(case, requests.prepare_forward(case))


def _tiny_backward() -> Verification:
    from nki_bn import requests, verify

    case = TINY.case()
    return verify.verify_backward(case, requests.prepare_backward(case))


TINY_CHECKS = {"forward": _tiny_forward, "backward": _tiny_backward}


def _check(tiny: Callable[[], Verification]) -> str:
    """The verdict: "ok", or why not."""
    if execute.which_nki().kind == "refused":
        return "not ok: no nki is in use"
    try:
        from nki_bn import verify

        verification = tiny()
    except Exception as error:  # Whatever is wrong is what the report is for.
        return f"not ok: {type(error).__name__}: {error}"
    return "ok" if verification.ok else f"not ok:\n{verify.table(verification.comparisons)}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
