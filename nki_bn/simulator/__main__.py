# SPDX-License-Identifier: Apache-2.0
"""``python -m nki_bn.simulator SCRIPT [ARGS]``: run a script whose ``import nki`` is to be this simulator.

The script runs as ``__main__`` with its own arguments and its folder first on the path. The exit code is the script's;
1 after an exception, 2 without a script to run, or where NKI_BN_NKI asks for another nki.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from nki_bn.simulator.install import CHOICE_VARIABLE, install

USAGE = "usage: python -m nki_bn.simulator SCRIPT [ARGS]"


def main(arguments: list[str]) -> int:
    """Run the script ``arguments[0]`` with the arguments that follow; returns 2 if it cannot be run here."""
    if arguments in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    if not arguments or arguments[0].startswith("-"):
        return _refuse(f"unknown option {arguments[0]}" if arguments else "no script given")
    script = Path(arguments[0])
    if not os.path.isfile(script):  # the method would raise for a name that is too long
        return _refuse(f"{script} is not a file")
    choice = os.environ.get(CHOICE_VARIABLE, "embedded")
    if choice != "embedded":
        return _refuse(
            f"{CHOICE_VARIABLE} is {choice!r}, and this runs the embedded simulator; accepted: embedded, or not set"
        )
    install(force=True)
    # Scripts ask this variable whether a device is needed.
    os.environ.setdefault("NKI_SIMULATOR", "1")
    sys.argv = arguments
    sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")
    return 0


def _refuse(reason: str) -> int:
    print(f"{reason}\n{USAGE}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
