# SPDX-License-Identifier: Apache-2.0
"""The kernels, written in NKI alone: they run on the embedded simulator and compile with the vendor's package."""
