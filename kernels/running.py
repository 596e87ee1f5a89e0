# SPDX-License-Identifier: Apache-2.0
"""What a forward in training writes once per channel: mean, variance and the new running statistics.

Channels lie on partitions, in ``groups`` equal groups along the free dimension of the columns.
"""

import nki.isa as nisa
import nki.language as nl

from nki_bn.kernels.columns import MEAN, SCRATCH, VAR, column
from nki_bn.kernels.forward_phases import ForwardTensors


def channel_view(tensor: nl.NkiTensor, channel: int, channels: int, groups: int) -> nl.NkiTensor:
    """The values of a [C] tensor from ``channel`` on, as (channels, groups)."""
    return tensor[nl.ds(channel, channels * groups)].reshape((groups, channels)).permute((1, 0))


def store_column(
    tensor: nl.NkiTensor, columns: nl.NkiTensor, at: int, channel: int, channels: int, groups: int = 1
) -> None:
    """One value per channel to a [C] tensor."""
    view = channel_view(tensor, channel, channels, groups)
    nisa.dma_copy(dst=view, src=column(columns, at)[0:channels, :])


def store_statistics(
    tensors: ForwardTensors, columns: nl.NkiTensor, momentum: float, channel: int, channels: int, groups: int = 1
) -> None:
    """Mean and variance to HBM, and the running statistics if there are any."""
    store_column(tensors.mean_out, columns, MEAN, channel, channels, groups)
    store_column(tensors.var_out, columns, VAR, channel, channels, groups)
    if tensors.running_mean != None:
        batch, all_channels, spatial = tensors.x.shape
        count = batch * spatial
        unbiased = momentum * (count / (count - 1))
        kept = 1.0 - momentum
        blend(columns, MEAN, momentum, channel_view(tensors.running_mean, channel, channels, groups), kept)
        store_column(tensors.running_mean_out, columns, SCRATCH, channel, channels, groups)
        blend(columns, VAR, unbiased, channel_view(tensors.running_var, channel, channels, groups), kept)
        store_column(tensors.running_var_out, columns, SCRATCH, channel, channels, groups)


def blend(columns: nl.NkiTensor, at: int, factor: float, old: nl.NkiTensor, old_factor: float) -> None:
    """The scratch column = factor*column + old_factor*old, in the first band; ``old`` is (channels, groups) in HBM."""
    channels = old.shape[0]
    batch = column(columns, SCRATCH)[0:channels, :]
    running = column(columns, SCRATCH + 1)[0:channels, :]
    nisa.dma_copy(dst=running, src=old)
    nisa.tensor_scalar(dst=running, data=running, op0=nl.multiply, operand0=old_factor)
    nisa.tensor_scalar(dst=batch, data=column(columns, at)[0:channels, :], op0=nl.multiply, operand0=factor)
    nisa.tensor_tensor(dst=batch, data1=batch, data2=running, op=nl.add)
