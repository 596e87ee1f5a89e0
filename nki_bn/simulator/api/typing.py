# SPDX-License-Identifier: Apache-2.0
"""What ``import nki.typing`` gives: annotations of kernel arguments.

``tensor[shape]`` states an expected shape; nothing is checked, as what a mismatch does is undocumented.
"""

from __future__ import annotations

from typing import Any

from nki_bn.simulator.tensor import NkiTensor

__all__ = ["mutable_tensor", "tensor"]


class tensor(NkiTensor):
    """Annotation of a tensor argument, ``tensor`` or ``tensor[shape]``."""

    def __class_getitem__(cls, shape: Any) -> Any:
        return cls


class mutable_tensor(tensor):
    """Annotation of a tensor argument that the kernel writes."""
