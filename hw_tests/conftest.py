# SPDX-License-Identifier: Apache-2.0
"""Where the tests of this folder run: on a Neuron device; or, to try them, on the embedded simulator."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from nki_bn.bench.record import Record
    from nki_bn.bench.timers import Timer

HERE = Path(__file__).resolve().parent
BASELINES = HERE / "baselines" / "trn2.jsonl"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where to run, and what to do with baselines."""
    parser.addoption(
        "--on",
        choices=("device", "simulator"),
        default="device",
        help="run the tests of hw_tests on a Neuron device (default; skipped without one) or on the embedded simulator",
    )
    parser.addoption("--baselines", type=Path, default=BASELINES, help=f"file of times (default: {BASELINES.name})")
    parser.addoption("--record-baselines", action="store_true", help="write that file instead of comparing with it")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the nki before it is imported.

    Raises:
        pytest.UsageError: NKI_BN_NKI is wrong, or asks for what is not installed.
    """
    if config.getoption("on") == "simulator":
        os.environ["NKI_BN_NKI"] = "embedded"
    try:
        import nki_bn  # noqa: F401
    except (ImportError, ValueError) as error:
        raise pytest.UsageError(str(error)) from error


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a device all of them are skipped, for one reason."""
    reason = _reason_to_skip(config)
    for item in items:
        if reason is not None and item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say that reason, which pytest itself names with -rs alone."""
    reason = _reason_to_skip(config)
    if reason is not None:
        terminalreporter.write_line(f"hw_tests are skipped: {reason}")


def _reason_to_skip(config: pytest.Config) -> str | None:
    return None if config.getoption("on") == "simulator" else _what_is_missing()


def _what_is_missing() -> str | None:
    from nki_bn import execute

    if not execute.has_device():
        return "no Neuron device here (pytest hw_tests --on simulator tries the tests without one)"
    if execute.which_nki().kind == "embedded":
        return "a Neuron device is here, but the vendor's nki is not installed"
    return None


@pytest.fixture(scope="session")
def timer() -> Timer:
    """Measures on the device, models on the simulator."""
    from nki_bn.bench.timers import timer_here

    return timer_here()


@pytest.fixture(scope="session")
def recorded(request: pytest.FixtureRequest) -> Iterator[list[Record] | None]:
    """With --record-baselines a list of records, written when all tests are done; else None."""
    from nki_bn.bench.output import write_whole

    records: list[Record] = []
    recording = request.config.getoption("record_baselines")
    yield records if recording else None
    if recording:
        path = request.config.getoption("baselines")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, "".join(f"{record.to_json()}\n" for record in records))
