# SPDX-License-Identifier: Apache-2.0
"""Synchronised batch norm on replicas: the three sites on NumPy arrays, and what replicas exchange."""

from nki_bn.synchronised.exchange import MODES, Group
from nki_bn.synchronised.groups import Alone, ArrayGroup, Replica, replicas
from nki_bn.synchronised.single import backward_in_one_launch, forward_in_one_launch
from nki_bn.synchronised.sites import (
    SiteBackward,
    SiteForward,
    SiteOptions,
    SiteSums,
    Statistics,
    bn_back_site,
    bn_fwd_site,
    bn_gamma_site,
    running_statistics,
)

__all__ = [
    "MODES",
    "Alone",
    "ArrayGroup",
    "Group",
    "Replica",
    "SiteBackward",
    "SiteForward",
    "SiteOptions",
    "SiteSums",
    "Statistics",
    "backward_in_one_launch",
    "bn_back_site",
    "bn_fwd_site",
    "bn_gamma_site",
    "forward_in_one_launch",
    "replicas",
    "running_statistics",
]
