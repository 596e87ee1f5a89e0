# SPDX-License-Identifier: Apache-2.0
"""Sums over all columns of a channel: partials per chunk, groups of partials, and their totals."""

import nki.isa as nisa
import nki.language as nl

from nki_bn.kernels.sizing import PARTIAL_COLUMNS, ceil_div


def partial_at(partials: nl.NkiTensor, chunk: int) -> nl.NkiTensor:
    """Where the partial of chunk number ``chunk`` goes."""
    at = chunk % PARTIAL_COLUMNS
    return partials[:, at : at + 1]


def close_group(partials: nl.NkiTensor, totals: nl.NkiTensor, chunks: int) -> None:
    """After ``chunks`` chunks: add up a group of partials if it is full."""
    if chunks % PARTIAL_COLUMNS == 0:
        at = chunks // PARTIAL_COLUMNS - 1
        add_columns(totals[:, at : at + 1], partials)


def total_of(dst: nl.NkiTensor, partials: nl.NkiTensor, totals: nl.NkiTensor, chunks: int) -> None:
    """dst = sum over ``chunks`` chunks: over all groups, of which the last may not be full."""
    full = chunks // PARTIAL_COLUMNS
    rest = chunks % PARTIAL_COLUMNS
    if full == 0:
        add_columns(dst, partials[:, 0:rest])
        return
    if rest > 0:
        add_columns(totals[:, full : full + 1], partials[:, 0:rest])
    add_columns(dst, totals[:, 0 : ceil_div(chunks, PARTIAL_COLUMNS)])


def add_columns(dst: nl.NkiTensor, data: nl.NkiTensor) -> None:
    """dst = sum of the columns of data."""
    nisa.tensor_reduce(dst=dst, op=nl.add, data=data, axis=1)
