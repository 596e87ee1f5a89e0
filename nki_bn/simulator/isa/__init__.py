# SPDX-License-Identifier: Apache-2.0
"""The instructions of ``nki.isa``, a file per engine or subject."""
