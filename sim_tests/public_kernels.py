# SPDX-License-Identifier: Apache-2.0
"""Run public NKI kernels, unchanged, from checkouts of their repositories, and compare with float64 NumPy.

    python sim_tests/public_kernels.py --checkouts DIR [WORD ...]

DIR holds checkouts of the repositories below, under their names; words select kernels whose names contain one of
them. One line per kernel: ``ok``, ``differs`` (a result is wrong) or ``fails`` (an error), and the reason. The exit
code is 0 if all are ok, 1 if not, 2 if no kernel was selected.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import traceback
import warnings
from pathlib import Path

from public_cases import (
    neuron_sdk,
    neuron_sdk_docs,
    neuron_sdk_guides,
    nki_autotune,
    nki_library,
    triton_viz,
    trnrand,
    trnsci,
)
from public_cases.common import Kernel

REPOSITORIES = {
    "triton-viz": triton_viz.kernels,
    "nki-library": nki_library.kernels,
    "aws-neuron-sdk": lambda checkout: [
        kernel for part in (neuron_sdk, neuron_sdk_docs, neuron_sdk_guides) for kernel in part.kernels(checkout)
    ],
    "nki-autotune": nki_autotune.kernels,
    "trnfft": trnsci.fft_kernels,
    "trnrand": trnrand.kernels,
    "trnsolver": trnsci.solver_kernels,
    "trnsparse": trnsci.sparse_kernels,
    "trntensor": trnsci.tensor_kernels,
}


def collect(checkouts: Path) -> list[Kernel]:
    """All kernels of the checkouts below ``checkouts``.

    Raises:
        FileNotFoundError: a checkout is missing.
    """
    found = []
    for name, kernels in REPOSITORIES.items():
        if not (checkouts / name).is_dir():
            raise FileNotFoundError(f"{checkouts / name} is not there; needed: {', '.join(REPOSITORIES)}")
        found += kernels(checkouts / name)
    return found


def judge(kernel: Kernel, verbose: bool = False) -> tuple[str, str]:
    """Verdict (ok, differs, fails) and reason."""
    worst = 0.0
    for label, case in kernel.cases.items():
        try:
            # Some libraries log on the standard output, and views of views give warnings: neither is a verdict.
            with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(io.StringIO()):
                error = case()
        except Exception as reason:
            if verbose:
                traceback.print_exc()
            return "fails", f"{label}: {type(reason).__name__}: {str(reason).splitlines()[0] if str(reason) else ''}"
        if not error <= 1:
            return "differs", f"{label}: error is {error:.3g} times the tolerance"
        worst = max(worst, error)
    return "ok", f"{len(kernel.cases)} cases, worst error {worst:.2g} of the tolerance: {'; '.join(kernel.cases)}"


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Run public NKI kernels on the simulator.")
    parser.add_argument("--checkouts", type=Path, required=True, help="folder with the repositories")
    parser.add_argument("--verbose", action="store_true", help="print tracebacks")
    parser.add_argument("words", nargs="*", help="only kernels whose name contains one of these")
    options = parser.parse_args()
    try:
        kernels = collect(options.checkouts)
    except FileNotFoundError as error:
        parser.error(str(error))
    chosen = [kernel for kernel in kernels if not options.words or any(word in kernel.name for word in options.words)]
    if not chosen:
        parser.error(f"no kernel has {' or '.join(map(repr, options.words))} in its name; accepted: parts of names")
    width = max(len(kernel.name) for kernel in chosen)
    verdicts = []
    for kernel in chosen:
        verdict, reason = judge(kernel, options.verbose)
        print(f"{kernel.name:{width}}  {verdict:7}  {reason}", flush=True)
        verdicts.append(verdict)
    print(f"{verdicts.count('ok')} of {len(verdicts)} kernels ok")
    return int(set(verdicts) != {"ok"})


if __name__ == "__main__":
    sys.exit(main())
