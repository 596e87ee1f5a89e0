# SPDX-License-Identifier: Apache-2.0
"""Property tests draw the same examples in every default run, and new ones every night."""

from __future__ import annotations

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True)


def pytest_configure(config: pytest.Config) -> None:
    """Choose the profile before tests are collected."""
    if config.getoption("markexpr") == "not nightly":
        settings.load_profile("repeatable")
