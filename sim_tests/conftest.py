# SPDX-License-Identifier: Apache-2.0
"""Property tests draw the same examples in every default run, and new ones every night; one process runs XLA."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings
from xla_runs import Xla

settings.register_profile("repeatable", derandomize=True)


def pytest_configure(config: pytest.Config) -> None:
    """Choose the profile before tests are collected."""
    if config.getoption("markexpr") == "not nightly":
        settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def xla() -> Iterator[Xla]:
    """The process that runs StableHLO, started at its first use."""
    with Xla() as process:
        yield process
