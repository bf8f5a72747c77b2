"""How torch's caching allocator cuts and keeps device memory: reserved bytes against allocated ones."""

from __future__ import annotations

import os

from memtune.technique import Reason, Target

NO_EFFECT_ON_CPU = "allocator settings have no effect on CPU"
_REGISTERS = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"


def not_remapped(target: Target) -> Reason | None:
    """Why torch's memory cannot be mapped by the driver behind addresses of its own, as `expandable_segments`
    and `async` do.

    The other things that do not go with it cannot come up here: CUDA graphs, which memtune never captures,
    and pools inside a pluggable allocator, which is another technique of the same slot. Sharing CUDA tensors
    between processes by legacy IPC handles is the user's own doing and cannot be seen; torch raises then.
    """
    if target.device == "cpu":
        return Reason(NO_EFFECT_ON_CPU)
    if target.ranks > 1 and os.environ.get(_REGISTERS, "").lower() in ("1", "t", "true", "y", "yes"):
        why = f"NCCL registers torch's segments ({_REGISTERS} is set) and needs those of cudaMalloc"
        return Reason(why, f"unset {_REGISTERS}")
    return None


def environment(options: dict[str, object]) -> dict[str, str]:
    """What carries allocator `options` into torch before CUDA starts; empty for no options.

    Both names are set: torch before 2.9 reads only the second, and a leftover of either must not win over the
    other.
    """
    text = ",".join(f"{name}:{value}" for name, value in options.items())
    return {"PYTORCH_ALLOC_CONF": text, "PYTORCH_CUDA_ALLOC_CONF": text} if text else {}
