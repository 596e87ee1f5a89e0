# SPDX-License-Identifier: Apache-2.0
"""What a replica without values does in a synchronised step: it takes part in every exchange and adds nothing.

The groups of channels are those of the plans of the other replicas; with statistics it ends like all of them.
"""

from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl

from nki_bn.kernels.columns import COLUMN_COUNT, MEAN, VAR, column_tile
from nki_bn.kernels.forward_phases import ForwardTensors
from nki_bn.kernels.replicas import Replicas, add_over_replicas, exchange_at_once
from nki_bn.kernels.running import load_running, store_statistics
from nki_bn.kernels.tiling import output


@nki.jit
def empty_forward(
    running_mean: nl.NkiTensor | None,
    running_var: nl.NkiTensor | None,
    momentum: float,
    channels: int,
    groups: tuple[tuple[tuple[int, int], ...], ...],
    divided: bool,
    replicas: Replicas,
) -> Any:
    """The statistics of the batch, for a replica that has none of it.

    Args:
        running_mean: [C] float32, updated into a new tensor; None if there is none.
        running_var: as running_mean.
        momentum: weight of the batch in the running statistics.
        channels: C.
        groups: for each core (channels, groups of so many) of every exchange, in their order.
        divided: each core has channels of its own; else core 0 writes the results.
        replicas: those that share the batch; this one counts 0.

    Returns:
        Mean, variance and the new running statistics [C] float32 in shared HBM; None for running ones not given.
    """
    tracked = running_mean != None
    mean_out = output(True, (channels,), nl.float32, "mean")
    var_out = output(True, (channels,), nl.float32, "var")
    running_mean_out = output(tracked, (channels,), nl.float32, "running_mean_out")
    running_var_out = output(tracked, (channels,), nl.float32, "running_var_out")
    absent = None
    tensors = ForwardTensors(
        absent,
        absent,
        absent,
        absent,
        absent,
        absent,
        running_mean,
        running_var,
        absent,
        absent,
        mean_out,
        var_out,
        running_mean_out,
        running_var_out,
        replicas,
    )
    core = nl.program_id(0)
    channel = 0
    if divided and core == 1:
        channel = channels_of(groups[0])
    for i in range(len(groups[core])):
        in_group, count = groups[core][i]
        columns = zero_moments(replicas, in_group, count)
        if divided or core == 0:
            load_running(tensors, columns, channel, in_group, count, False)
            store_statistics(tensors, columns, momentum, channel, in_group, count)
        channel += in_group * count
    return mean_out, var_out, running_mean_out, running_var_out


def zero_moments(replicas: Replicas, channels: int, groups: int) -> nl.NkiTensor:
    """Columns with the moments of all replicas, of which this one adds nothing."""
    tile = nl.ndarray((channels, COLUMN_COUNT * groups), dtype=nl.float32, buffer=nl.sbuf)
    columns = column_tile(tile, channels, groups)
    scratch = nl.ndarray((channels, 4 * groups), dtype=nl.float32, buffer=nl.sbuf)
    gathered = nl.ndarray((channels, 3 * groups * replicas.size), dtype=nl.float32, buffer=nl.sbuf)
    moments = columns[:, MEAN : VAR + 1, :]
    nisa.memset(dst=moments, value=0.0)
    exchange_at_once(replicas, moments, scratch, gathered)
    return columns


def channels_of(groups: tuple[tuple[int, int], ...]) -> int:
    """How many channels all groups have."""
    total = 0
    for i in range(len(groups)):
        total += groups[i][0] * groups[i][1]
    return total


@nki.jit
def empty_backward(
    dgamma_like: nl.NkiTensor, shapes: tuple[tuple[tuple[int, int], ...], ...], replicas: Replicas
) -> nl.NkiTensor:
    """The sums of a replica that has none.

    Args:
        dgamma_like: [C, 1] float32.
        shapes: for each core the shapes of the tiles of sums that are exchanged, in their order.
        replicas: those that share the batch.

    Returns:
        Zeros [C, 1] float32 in shared HBM: dgamma, and dbeta.
    """
    zeros = nl.ndarray(dgamma_like.shape, dtype=nl.float32, buffer=nl.shared_hbm, name="zeros")
    core = nl.program_id(0)
    for i in range(len(shapes[core])):
        own = nl.ndarray(shapes[core][i], dtype=nl.float32, buffer=nl.sbuf)
        total = nl.ndarray(shapes[core][i], dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=own, value=0.0)
        add_over_replicas(replicas, own, total)
    if core == 0:
        row = nl.ndarray((1, dgamma_like.shape[0]), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=row, value=0.0)
        nisa.dma_copy(dst=zeros.reshape((1, dgamma_like.shape[0])), src=row)
    return zeros
