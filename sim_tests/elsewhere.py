# SPDX-License-Identifier: Apache-2.0
"""Calling a function of these tests in a process whose ``nki`` is another one: only one can be imported at a time.

python elsewhere.py MODULE FUNCTION OUT.npz [ARGUMENT ...]
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from nki_bn.problem import DTYPES, Array
from nki_bn.simulator.install import CHOICE_VARIABLE

PATIENCE = 900


def call(kind: str, module: str, function: str, *arguments: str) -> dict[str, Array]:
    """The arrays that ``module.function(*arguments)`` returns where ``nki`` is ``kind``, "embedded" or "vendor".

    Raises:
        RuntimeError: it failed; with what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.npz"
        command = [sys.executable, __file__, module, function, str(out), *arguments]
        path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {CHOICE_VARIABLE: kind, "PYTHONPATH": path}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
        if done.returncode:
            raise RuntimeError(f"{module}.{function} with the {kind} nki failed:\n{done.stderr}")
        with np.load(out) as file:
            return {name: _narrow(file[name]) for name in file.files}


def _narrow(array: Array) -> Array:
    """NumPy stores bfloat16 as bare two-byte values."""
    return array.view(DTYPES["bfloat16"]) if array.dtype == np.dtype("V2") else array


def main(module: str, function: str, out: str, *arguments: str) -> None:
    """Call and save."""
    np.savez(out, **getattr(importlib.import_module(module), function)(*arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
