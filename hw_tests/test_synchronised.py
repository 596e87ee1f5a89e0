# SPDX-License-Identifier: Apache-2.0
"""A synchronised step over several cores: a process per core, judged as one step of the global batch."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import ranks_in
from synchronised_cores import SIZES, judged, step

from nki_bn import verify
from nki_bn.synchronised import MODES

# The first launches compile.
PATIENCE = 600


@pytest.mark.parametrize("mode", MODES)
def test_step(mode: str, tmp_path: Path) -> None:
    with ranks_in(tmp_path, len(SIZES), timeout=PATIENCE) as ranks:
        rows = judged(ranks.run(step, mode))
    assert rows and all(row.ok for row in rows), f"\n{verify.table(rows)}"
