# SPDX-License-Identifier: Apache-2.0
"""Synchronised batch norm as StableHLO text, for graph compilers: a builder, the plain nodes, and the three sites."""

from nki_bn.stablehlo.graph import Graph
from nki_bn.stablehlo.sites import (
    Options,
    SiteForward,
    SiteSums,
    batch_norm_grad,
    batch_norm_training,
    bn_back_site,
    bn_fwd_site,
    bn_gamma_site,
    running_statistics,
)
from nki_bn.stablehlo.value import Value

__all__ = [
    "Graph",
    "Options",
    "SiteForward",
    "SiteSums",
    "Value",
    "batch_norm_grad",
    "batch_norm_training",
    "bn_back_site",
    "bn_fwd_site",
    "bn_gamma_site",
    "running_statistics",
]
