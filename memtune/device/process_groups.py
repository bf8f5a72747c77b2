"""The process-group backend of a device."""

from __future__ import annotations

import torch.distributed as dist

from memtune.device.accelerator import platform_of, require_type


def backend_of(device_type: str) -> str:
    """Return torch's default backend for tensors of a device type: `nccl` for `cuda`, `gloo` for `cpu`; that
    of an out-of-tree type is what its package registered.
    """
    kind = require_type(device_type)
    return dist.Backend.default_device_backend_map.get(kind) or platform_of(kind).backend or "gloo"


def backends_of(device_type: str) -> str:
    """Return the backends for tensors of the host and of `device_type` in the form of `init_process_group`:
    `cpu:gloo,cuda:nccl`.
    """
    return ",".join(dict.fromkeys(f"{kind}:{backend_of(kind)}" for kind in ("cpu", device_type)))
