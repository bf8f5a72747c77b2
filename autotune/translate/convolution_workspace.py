"""Workspace of convolutions on NVIDIA's cards, estimated where it was not measured on the device.

Kernels on tensor cores read and write images with channels last; for other images cuDNN makes copies of the
operands in its workspace, which torch takes from the caching allocator and gives back after the kernel
(NVIDIA, Convolutional Layers User's Guide, "Tensor Layouts In Memory: NCHW vs NHWC"; torch
aten/src/ATen/native/cudnn/Conv_v8.cpp `run_conv_plan`). A forward, a gradient of the input and one of the
weight each read two operands and write the third, so each copies all three. Other algorithms (Winograd, split
sums, FFT) need less or more: the estimate is the middle of a range from nothing to twice as much.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from memtune.program import I32, I64, UNALIGNED, Hints, Precision, Step

_FORWARD, _BACKWARD = "aten.convolution.default", "aten.convolution_backward.default"
_ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}
_LOAD_BYTES = 16
"""Channels are padded to loads of this width (same guide, "Channels In And Out")."""
_TENSOR_CORES = {"float16": 70, "bfloat16": 80, "float32": 80}
"""First compute capability × 10 with tensor cores for a type; float32 as TF32."""


def estimated_workspaces(step: Step, hints: Hints, architecture: str) -> tuple[I32, I64]:
    """Return the convolutions of a CPU recording that need a workspace on `architecture`, and its bytes."""
    named = [i for i, name in enumerate(step.names) if name in (_FORWARD, _BACKWARD)]
    if not named or not architecture.startswith("sm"):
        return np.empty(0, np.int32), np.empty(0, np.int64)
    capability = int(architecture.removeprefix("sm"))
    ops, sizes = [], []
    for op in np.flatnonzero(np.isin(step.ops.name, named)).tolist():
        if op >= len(hints.signatures) or not hints.signatures[op]:
            continue
        is_tf32 = int(step.ops.precision[op]) % UNALIGNED == Precision.TF32
        name, arguments = json.loads(hints.signatures[op])[:2]
        n_bytes = _workspace_bytes(str(name), arguments, capability, is_tf32=is_tf32)
        if n_bytes:
            ops.append(op)
            sizes.append(n_bytes)
    return np.asarray(ops, np.int32), np.asarray(sizes, np.int64)


def _workspace_bytes(name: str, arguments: Sequence[Any], capability: int, *, is_tf32: bool) -> int:
    backward = name == _BACKWARD
    image, weight = (arguments[backward + place]["t"] for place in range(2))
    stride, padding, dilation, transposed, more, groups = arguments[3 + backward : 9 + backward]
    dtype, shape, strides = image
    if capability < _TENSOR_CORES.get(dtype, 999) or (dtype == "float32" and not is_tf32):
        return 0
    channels, is_last = shape[1], strides[1] == 1 and shape[1] > 1
    if is_last or (groups == channels > 1):  # torch's own kernel for depthwise convolutions needs none
        return 0
    sizes = zip(shape[2:], weight[1][2:], stride, padding, dilation, more, strict=False)
    if transposed:
        out = [(n - 1) * s - 2 * p + d * (k - 1) + m + 1 for n, k, s, p, d, m in sizes]
        filters = weight[1][1] * groups
    else:
        out = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d, _ in sizes]
        filters = weight[1][0]
    itemsize = _ITEMSIZE[dtype]
    wide = _LOAD_BYTES // itemsize
    values: int = shape[0] * (
        _up(channels, wide) * math.prod(shape[2:]) + _up(filters, wide) * math.prod(out)
    ) + math.prod(weight[1])
    return itemsize * values


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
