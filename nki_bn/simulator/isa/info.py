# SPDX-License-Identifier: Apache-2.0
"""Queries of the target."""

from __future__ import annotations

from nki_bn.hardware import load_target
from nki_bn.simulator.isa.enums import nc_version
from nki_bn.simulator.launch import options_from_environment
from nki_bn.simulator.machine import running


def get_nc_version() -> nc_version:
    """Generation of the target: of the run inside a kernel, else the one that the environment chooses."""
    core = running()
    target = core.run.target if core is not None else load_target(options_from_environment().target)
    return nc_version(target.generation)


def get_nc_sub_version() -> int:
    """Revision of the silicon within the generation: always the first, 0."""
    return 0
