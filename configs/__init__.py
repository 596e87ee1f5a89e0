# SPDX-License-Identifier: Apache-2.0
"""Data files of the project: hardware parameters (more folders: shapes, sweeps)."""
