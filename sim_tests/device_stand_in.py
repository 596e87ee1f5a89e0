# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest that says there is a Neuron device; what is launched on it is the nki that is installed."""

from __future__ import annotations

from nki_bn import execute


def pytest_configure() -> None:
    """From here on."""
    execute.has_device = lambda: True
