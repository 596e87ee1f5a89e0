# SPDX-License-Identifier: Apache-2.0
"""Mean and variance of channels: pieces by ``bn_stats``, merged by ``bn_aggr`` at every level.

Everything is counted moments (n, mean, M2) with M2 = n*var, which merge by Chan's rule: pieces of a row, groups of
pieces, bands of partitions, cores.
"""

import nki.isa as nisa
import nki.language as nl

from nki_bn.kernels.columns import MEAN, VAR, repeat_in_bands
from nki_bn.kernels.sizing import GROUP_PIECES, ceil_div


def add_piece(pieces: nl.NkiTensor, x: nl.NkiTensor, piece: int) -> None:
    """The moments of at most 512 columns, as piece number ``piece``."""
    at = piece % GROUP_PIECES
    nisa.bn_stats(dst=pieces[:, 6 * at : 6 * at + 6], data=x)


def close_group(pieces: nl.NkiTensor, groups: nl.NkiTensor, piece: int, last: bool, count: int) -> int:
    """After piece number ``piece``: merge a group of pieces that is full, or the ``last`` one.

    ``count`` columns have been added to the group; returns the number in the group that is open now.
    """
    filled = piece % GROUP_PIECES + 1
    if filled < GROUP_PIECES and not last:
        return count
    at = piece // GROUP_PIECES
    merge(groups[:, 3 * at : 3 * at + 3], pieces[:, 0 : 6 * filled], count)
    return 0


def merge(dst: nl.NkiTensor, moments: nl.NkiTensor, count: int) -> None:
    """dst = (n, mean, M2) of the union of several moments, ``count`` = n values together."""
    nisa.bn_aggr(dst=dst[:, 1:3], data=moments)
    count_moments(dst, count)


def count_moments(dst: nl.NkiTensor, count: int) -> None:
    """(anything, mean, var) becomes (n, mean, M2)."""
    nisa.memset(dst=dst[:, 0:1], value=float(count))
    nisa.tensor_scalar(dst=dst[:, 2:3], data=dst[:, 2:3], op0=nl.multiply, operand0=float(count))


def finish_moments(
    columns: nl.NkiTensor, groups: nl.NkiTensor, parts: nl.NkiTensor, pieces: int, channels: int, bands: int, count: int
) -> None:
    """Mean and variance columns of one core: over all groups, then over bands, every band with ``count`` values."""
    merge(parts[:, 0:3], groups[:, 0 : 3 * ceil_div(pieces, GROUP_PIECES)], count)
    for band in range(1, bands):
        # Bands start at multiples of 32 partitions, between which engines can copy: nothing mixes channels.
        nisa.tensor_copy(
            dst=parts[0:channels, 3 * band : 3 * band + 3], src=parts[nl.ds(band * channels, channels), 0:3]
        )
    result = columns[:, MEAN : VAR + 1, 0]
    nisa.bn_aggr(dst=result[0:channels, :], data=parts[0:channels, 0 : 3 * bands])
    repeat_in_bands(result, channels, bands)


def exchange_moments(moments: nl.NkiTensor, parts: nl.NkiTensor, counts: tuple[int, int]) -> None:
    """Merge (mean, var) of both cores, core 0 first on each, so that both get the same bits."""
    core = nl.program_id(0)
    other = 1 - core
    mine = parts[:, 3 * core : 3 * core + 3]
    theirs = parts[:, 3 * other : 3 * other + 3]
    nisa.tensor_copy(dst=mine[:, 1:3], src=moments)
    count_moments(mine, counts[core])
    nisa.sendrecv(src=mine, dst=theirs, send_to_rank=other, recv_from_rank=other, pipe_id=0)
    nisa.bn_aggr(dst=moments, data=parts[:, 0:6])
