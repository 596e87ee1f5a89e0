# SPDX-License-Identifier: Apache-2.0
"""The backward of a ReLU as a kernel of its own: what a fused backward of batch norm competes with."""

from __future__ import annotations

from typing import Any

from launching import nisa, nki, nl

LANES = 128
# Chunks that are loaded ahead of the one that is worked on.
AHEAD = 4


@nki.jit
def relu_bwd(dy: Any, passed: Any, chunk: int = 4096) -> Any:
    """dy where the ReLU let its input through, else 0.

    ``dy`` and ``passed`` are flat tensors in HBM, as long as 256 divides; ``passed`` is the mask (uint8 0 or 1) or the
    output of the ReLU, in the dtype of dy. Each core takes a half, in chunks of ``chunk`` columns.
    """
    dx = nl.ndarray(dy.shape, dtype=dy.dtype, buffer=nl.shared_hbm)
    rows = LANES * nl.num_programs(0)
    columns = dy.shape[0] // rows
    lanes = nl.ds(nl.program_id(0) * LANES, LANES)
    sources = [tensor.reshape((rows, columns)) for tensor in (dy, passed)]
    target = dx.reshape((rows, columns))
    spans = [nl.ds(start, min(chunk, columns - start)) for start in range(0, columns, chunk)]
    slots: list[Any] = []
    for i in range(len(spans) + AHEAD):
        if i < len(spans):
            slots.append([_loaded(source, lanes, spans[i]) for source in sources])
        if i >= AHEAD:
            gradient, gate = slots[i - AHEAD]
            if gate.dtype != nl.uint8:
                mask = nl.ndarray(gate.shape, dtype=nl.uint8, buffer=nl.sbuf)
                nisa.tensor_scalar(dst=mask, data=gate, op0=nl.greater, operand0=0.0)
                gate = mask
            nisa.select_reduce(dst=gradient, predicate=gate, on_true=gradient, on_false=0.0)
            nisa.dma_copy(dst=target[lanes, spans[i - AHEAD]], src=gradient)
            slots[i - AHEAD] = []
    return dx


def _loaded(source: Any, lanes: Any, span: Any) -> Any:
    view = source[lanes, span]
    tile = nl.ndarray(view.shape, dtype=source.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=view)
    return tile
