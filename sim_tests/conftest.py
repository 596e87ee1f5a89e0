# SPDX-License-Identifier: Apache-2.0
"""Which simulator the tests run on; property tests draw the same examples in every default run, new ones at night;
one process runs XLA.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from xla_runs import Xla

settings.register_profile("repeatable", derandomize=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--simulator``."""
    parser.addoption(
        "--simulator",
        choices=("embedded", "vendor"),
        help="simulator to run on; default: the vendor's if its nki is installed, else the embedded one",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose simulator and profile before tests are collected.

    Raises:
        pytest.UsageError: the vendor's simulator is asked for, and its package is not installed; NKI_BN_NKI is wrong.
    """
    if config.getoption("markexpr") == "not nightly":
        settings.load_profile("repeatable")
    if config.getoption("simulator") is not None:
        # Read when nki_bn is imported, which is what decides.
        os.environ["NKI_BN_NKI"] = config.getoption("simulator")
    try:
        import nki_bn  # noqa: F401
    except (ImportError, ValueError) as error:
        raise pytest.UsageError(str(error)) from error


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On the vendor's simulator, skip what is about the embedded one."""
    from launching import NEEDS_EMBEDDED, VENDOR
    from simulators import needs_embedded

    for item in items if VENDOR else ():
        if isinstance(item, pytest.Function) and needs_embedded(item.module):
            item.add_marker(pytest.mark.skip(reason=NEEDS_EMBEDDED))


@pytest.fixture(scope="session")
def xla() -> Iterator[Xla]:
    """The process that runs StableHLO, started at its first use."""
    from xla_runs import Xla  # not above: it imports nki_bn before the simulator is chosen

    with Xla() as process:
        yield process
