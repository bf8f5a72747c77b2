"""How torch's caching allocator cuts and keeps device memory: reserved bytes against allocated ones."""

from __future__ import annotations

NO_EFFECT_ON_CPU = "allocator settings have no effect on CPU"


def environment(options: dict[str, object]) -> dict[str, str]:
    """What carries allocator `options` into torch before CUDA starts; empty for no options.

    Both names are set: torch before 2.9 reads only the second, and a leftover of either must not win over the other.
    """
    text = ",".join(f"{name}:{value}" for name, value in options.items())
    return {"PYTORCH_ALLOC_CONF": text, "PYTORCH_CUDA_ALLOC_CONF": text} if text else {}
