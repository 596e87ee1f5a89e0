# SPDX-License-Identifier: Apache-2.0
"""Batch-norm kernels for AWS Trainium and a CPU simulator of NKI that runs them."""

import importlib
import importlib.util
import sys
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from nki_bn.simulator import Installation, install

if TYPE_CHECKING:
    from nki_bn.explanation import Explanation, explain
    from nki_bn.ops import BatchNormForward, batch_norm_bwd, batch_norm_fwd
    from nki_bn.planner import plan
    from nki_bn.problem import BackwardProblem, ForwardProblem

__version__ = "0.1.0"
__all__ = [
    "BackwardProblem",
    "BatchNormForward",
    "Explanation",
    "ForwardProblem",
    "batch_norm_bwd",
    "batch_norm_fwd",
    "explain",
    "plan",
]
_ELSEWHERE = {
    "BackwardProblem": "nki_bn.problem",
    "Explanation": "nki_bn.explanation",
    "ForwardProblem": "nki_bn.problem",
    "explain": "nki_bn.explanation",
    "plan": "nki_bn.planner",
}

if importlib.util.find_spec("nki_bn.configs") is None:
    raise ImportError(
        "nki_bn was imported from the folder of its sources, where two of its packages have another place; start "
        "Python in another folder, or install the project with pip install -e ."
    )

# What `python -m` runs.
_PROGRAMS = ("nki_bn.cli", "nki_bn.simulator")


def _is_program() -> bool:
    """Whether this process runs ``nki-bn`` or a module of ``_PROGRAMS``, before which Python imports the package."""
    if sys.argv[:1] == ["-m"]:
        return any(argument.endswith(_PROGRAMS) for argument in sys.orig_argv)
    return PurePath("".join(sys.argv[:1])).stem == "nki-bn"


# Kernels import `nki`, so this comes before any of them. A program says itself what is refused, in one line.
try:
    installation = install()
except (ImportError, ValueError) as error:
    if not _is_program():
        raise
    installation = Installation("refused", str(error))


def __getattr__(name: str) -> Any:
    # Found at first use: the linter and the doctor have to work while a kernel does not even import.
    if name in __all__:
        return getattr(importlib.import_module(_ELSEWHERE.get(name, "nki_bn.ops")), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
