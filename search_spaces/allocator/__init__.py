"""How torch's caching allocator cuts and keeps device memory: reserved bytes against allocated ones."""

from __future__ import annotations

from memtune.technique import Reason, Target

NO_EFFECT_ON_CPU = "allocator settings have no effect on CPU"


def environment(options: dict[str, object]) -> dict[str, str]:
    """What carries allocator `options` into torch before CUDA starts; empty for no options.

    Both names are set: torch before 2.9 reads only the second, and a leftover of either must not win over the other.
    """
    text = ",".join(f"{name}:{value}" for name, value in options.items())
    return {"PYTORCH_ALLOC_CONF": text, "PYTORCH_CUDA_ALLOC_CONF": text} if text else {}


def why_no_arena(target: Target) -> Reason | None:
    """Why memtune's own allocator is not searched on `target`.

    A config that names one still trains on CPU: it is what tests and benchmarks compare with.
    """
    if target.device == "cpu":
        return Reason("malloc loses nothing to fragmentation that a budget on CPU counts", "a config may still name it")
    return Reason("memtune's own allocator has not been run on a GPU yet", "allocator: {kind: expandable_segments}")
