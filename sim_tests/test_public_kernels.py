# SPDX-License-Identifier: Apache-2.0
"""Public kernels run unchanged, where checkouts of their repositories are at hand."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import public_kernels
import pytest
from public_cases.common import Kernel
from public_kernels import REPOSITORIES, collect, judge

VARIABLE = "NKI_BN_PUBLIC_CHECKOUTS"
FOLDER = os.environ.get(VARIABLE)
MISSING = pytest.mark.skip(reason=f"{VARIABLE} does not name a folder with checkouts of {', '.join(REPOSITORIES)}")
KERNELS = collect(Path(FOLDER)) if FOLDER else [pytest.param(None, marks=MISSING)]


def test_words_that_select_no_kernel_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(public_kernels, "collect", lambda checkouts: [Kernel("softmax", {})])
    monkeypatch.setattr(sys, "argv", ["public_kernels.py", "--checkouts", ".", "nosuchname", "rope"])
    with pytest.raises(SystemExit, match="2"):
        public_kernels.main()
    assert "no kernel has 'nosuchname' or 'rope' in its name; accepted: parts of names" in capsys.readouterr().err


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: getattr(kernel, "name", "none"))
def test_public_kernel(kernel: Kernel) -> None:
    verdict, reason = judge(kernel)
    assert verdict == "ok", reason
