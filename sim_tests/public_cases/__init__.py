# SPDX-License-Identifier: Apache-2.0
"""Public NKI kernels as cases: which kernel, which inputs, what it should return. The kernels come from checkouts."""
