# SPDX-License-Identifier: Apache-2.0
"""Language functions applied to SBUF tiles in tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from launching import nl, outputs

from nki_bn.simulator import NkiValidationError


def on_tiles(function: Callable[..., Any], *arrays: Any, **options: Any) -> Any:
    """``function`` of SBUF tiles that hold ``arrays``, as an array; ``options`` are those of RunOptions."""

    def kernel(*tensors: Any) -> Any:
        result = function(*[nl.load(tensor) for tensor in tensors])
        result = nl.copy(result) if result.buffer == nl.psum else result
        out = nl.ndarray(result.shape, result.dtype, buffer=nl.shared_hbm)
        nl.store(out, result)
        return out

    return outputs(kernel, *arrays, **options)


def refuses(
    function: Callable[..., Any], match: str, *arrays: Any, error: type[Exception] = NkiValidationError, **options: Any
) -> None:
    """``function`` of tiles that hold ``arrays`` raises ``error`` with a message that matches."""
    with pytest.raises(error, match=match):
        on_tiles(function, *arrays, **options)
