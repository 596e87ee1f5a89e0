# SPDX-License-Identifier: Apache-2.0
"""Batch norm for PyTorch: modules, functions and the conversion of models. Needs the extra ``torch``.

Raises:
    ModuleNotFoundError: on import, where torch is not installed.
"""

from importlib.util import find_spec

if find_spec("torch") is None:
    raise ModuleNotFoundError(
        "torch is not installed; the extra torch has it: in a checkout, pip install '.[torch]'", name="torch"
    )

from nki_bn.torch.convert import convert_batch_norm, convert_sync_batch_norm, revert_batch_norm
from nki_bn.torch.functional import batch_norm, batch_norm_add_relu, batch_norm_relu
from nki_bn.torch.modules import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    BatchNormAddReLU2d,
    BatchNormAddReLU3d,
    BatchNormReLU1d,
    BatchNormReLU2d,
    BatchNormReLU3d,
)
from nki_bn.torch.synchronised_modules import SyncBatchNorm, SyncBatchNormAddReLU, SyncBatchNormReLU

__all__ = [
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "BatchNormAddReLU2d",
    "BatchNormAddReLU3d",
    "BatchNormReLU1d",
    "BatchNormReLU2d",
    "BatchNormReLU3d",
    "SyncBatchNorm",
    "SyncBatchNormAddReLU",
    "SyncBatchNormReLU",
    "batch_norm",
    "batch_norm_add_relu",
    "batch_norm_relu",
    "convert_batch_norm",
    "convert_sync_batch_norm",
    "revert_batch_norm",
]
