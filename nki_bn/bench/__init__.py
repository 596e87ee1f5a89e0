# SPDX-License-Identifier: Apache-2.0
"""Benchmark sweeps: shape files -> cases -> rows of a JSONL file -> tables, figures, comparisons.

workloads  shape files          -> models and their layers
grids      options, sweep files -> cases
sweep      cases                -> records (``paths`` checks each code path, ``modelled`` or ``measured`` times it)
rows       records             <-> JSONL
series     records              -> what is compared with what, totals and means
report, html, figures, compare  -> Markdown, CSV, HTML, and a verdict on two files
"""
