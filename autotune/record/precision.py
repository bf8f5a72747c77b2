"""Precision of the matrix products of an op on CUDA, from its arguments and torch's TF32 settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memtune.device import accelerator
from memtune.program import CHANNELS_FIRST, COMPLEX, UNALIGNED, Precision

_PRECISIONS = {
    torch.float16: Precision.FLOAT16,
    torch.bfloat16: Precision.BFLOAT16,
    torch.float64: Precision.FLOAT64,
}
_CONVOLUTION, _RECURRENT = ("conv",), ("rnn", "lstm", "gru")
_PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.", "aten.addbmm.")
_CONVOLUTIONS = ("aten.convolution.", "aten.convolution_backward.")
_ALIGNED_BYTES = 16
"""Width of the loads of tensor cores: cuBLAS needs rows of a multiple of it for its fastest kernels (NVIDIA,
Matrix Multiplication Background User's Guide, "Tensor Core Requirements").
"""


def precision_of(name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    """Return the `Precision` of op `name`, plus UNALIGNED or CHANNELS_FIRST, or COMPLEX alone."""
    if any(each.is_complex() for each in (*inputs, *outputs)):
        return COMPLEX
    floating = next((each.dtype for each in inputs if each.is_floating_point()), None)
    if floating is None:
        return Precision.UNKNOWN
    if floating == torch.float32:
        found = Precision.TF32 if _uses_tf32(name) else Precision.FLOAT32
    else:
        found = _PRECISIONS.get(floating, Precision.UNKNOWN)
    if name.startswith(_CONVOLUTIONS) and _has_channels_first(inputs):
        return found | CHANNELS_FIRST
    is_narrow = found in (Precision.FLOAT16, Precision.BFLOAT16)
    if is_narrow and name.startswith(_PRODUCTS) and not all(map(_is_aligned, (*inputs, *outputs))):
        return found | UNALIGNED
    return found


def _has_channels_first(inputs: Sequence[Tensor]) -> bool:
    """Return whether a convolution of all channels gets images whose rows are contiguous, not their channels.

    `inputs` end with images and weights, and a bias forward. Convolutions in groups have their own kernels.
    """
    planes = [each for each in inputs if each.dim() == 4]
    if len(planes) < 2:
        return False
    image, weight = planes[-2:]
    return weight.shape[1] == image.shape[1] > 1 and image.stride(1) > 1


def _is_aligned(matrix: Tensor) -> bool:
    """Return whether consecutive rows, or columns of a transposed matrix, start at multiples of 16 bytes."""
    if matrix.dim() < 2:
        return True
    pitch = max(matrix.stride()[-2:])
    return pitch * matrix.element_size() % _ALIGNED_BYTES == 0


def _uses_tf32(name: str) -> bool:
    """Return whether float32 products of this op run in TF32 where the device has it."""
    # cuDNN's convolutions and recurrent layers do by default, cuBLAS's products on request only.
    # Source: docs/source/notes/cuda.rst, "TensorFloat-32 (TF32) on Ampere (and later) devices".
    cudnn: Any = torch.backends.cudnn
    if any(part in name for part in _CONVOLUTION):
        return _is_tf32(getattr(cudnn, "conv", None), cudnn)
    if any(part in name for part in _RECURRENT):
        return _is_tf32(getattr(cudnn, "rnn", None), cudnn)
    matmul = accelerator.float32_products()
    return _is_tf32(matmul, matmul)


def _is_tf32(setting: Any, legacy: Any) -> bool:
    """Return the setting of the present interface, or of the one before torch 2.9."""
    precision = getattr(setting, "fp32_precision", None)
    return bool(precision == "tf32" if precision in ("tf32", "ieee") else legacy.allow_tf32)
