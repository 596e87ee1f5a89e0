# SPDX-License-Identifier: Apache-2.0
"""What a forward in training writes once per channel: mean, variance and the new running statistics.

Channels lie on partitions, in ``groups`` equal groups along the free dimension of the columns.
"""

import nki.isa as nisa
import nki.language as nl

from nki_bn.kernels.columns import MEAN, OLD_MEAN, OLD_VAR, VAR, channel_view, column, copy_small, store_column
from nki_bn.kernels.forward_phases import ForwardTensors, values_per_channel


def load_running(
    tensors: ForwardTensors, columns: nl.NkiTensor, channel: int, channels: int, groups: int, aside: bool
) -> None:
    """The old running statistics, if there are any, into their columns, in the first band."""
    if tensors.running_mean != None:
        mean = channel_view(tensors.running_mean, channel, channels, groups)
        copy_small(column(columns, OLD_MEAN)[0:channels, :], mean, aside)
        var = channel_view(tensors.running_var, channel, channels, groups)
        copy_small(column(columns, OLD_VAR)[0:channels, :], var, aside)


def store_statistics(
    tensors: ForwardTensors,
    columns: nl.NkiTensor,
    momentum: float,
    channel: int,
    channels: int,
    groups: int = 1,
    aside: bool = False,
) -> None:
    """Mean and variance to HBM, and the running statistics, made from the old ones, if there are any."""
    store_column(tensors.mean_out, columns, MEAN, channel, channels, groups, aside)
    store_column(tensors.var_out, columns, VAR, channel, channels, groups, aside)
    if tensors.running_mean != None:
        count = values_per_channel(tensors)
        owned = columns[0:channels, :, :]
        blend(column(owned, OLD_MEAN), 1.0 - momentum, column(owned, MEAN), momentum)
        store_column(tensors.running_mean_out, columns, OLD_MEAN, channel, channels, groups, aside)
        blend(column(owned, OLD_VAR), 1.0 - momentum, column(owned, VAR), momentum * (count / (count - 1)))
        store_column(tensors.running_var_out, columns, OLD_VAR, channel, channels, groups, aside)


def blend(old: nl.NkiTensor, old_factor: float, new: nl.NkiTensor, factor: float) -> None:
    """old = old_factor*old + factor*new."""
    nisa.tensor_scalar(dst=old, data=old, op0=nl.multiply, operand0=old_factor)
    nisa.scalar_tensor_tensor(dst=old, data=new, op0=nl.multiply, operand0=factor, op1=nl.add, operand1=old)
