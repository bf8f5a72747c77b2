"""Allocation of device memory: how much more is reserved than allocated."""

from __future__ import annotations

import os

from memtune.technique import Reason, Target

NO_EFFECT_ON_CPU = "allocator settings have no effect on CPU"
_REGISTERS = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"


def not_remapped(target: Target) -> Reason | None:
    """Return why the driver cannot remap torch's memory behind fixed addresses, if it cannot."""
    # Two other conflicts cannot occur: memtune never captures CUDA graphs, and pools inside a pluggable
    # allocator are another technique of the same slot. Sharing CUDA tensors between processes by legacy
    # IPC handles cannot be detected; torch raises then.
    if target.device == "cpu":
        return Reason(NO_EFFECT_ON_CPU)
    if target.ranks > 1 and os.environ.get(_REGISTERS, "").lower() in ("1", "t", "true", "y", "yes"):
        why = f"NCCL registers torch's segments ({_REGISTERS} is set) and needs those of cudaMalloc"
        return Reason(why, f"unset {_REGISTERS}")
    return None


def environment(options: dict[str, object]) -> dict[str, str]:
    """Return the environment variables that set allocator `options` before CUDA starts."""
    # Torch before 2.9 reads only the second name, and a leftover of either must not override the other.
    text = ",".join(f"{name}:{value}" for name, value in options.items())
    return {"PYTORCH_ALLOC_CONF": text, "PYTORCH_CUDA_ALLOC_CONF": text} if text else {}
