# SPDX-License-Identifier: Apache-2.0
"""Names that ``nki.language`` documents (from NKI 0.7 on) and this simulator does not execute."""

from __future__ import annotations

from nki_bn.simulator.isa.unsupported import refusing

alloc_tiles = refusing("nki.language.alloc_tiles")
alloc_blocks = refusing("nki.language.alloc_blocks")
