# SPDX-License-Identifier: Apache-2.0
"""Random use of every surface, which has to end in the right result or in a documented error (docs/fuzzing.md)."""
