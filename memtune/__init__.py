"""memtune: find how to train a PyTorch model fast inside the memory of its GPU, and apply it with one line.

`__all__` is the public API. The names load at first use: `import memtune` takes milliseconds and touches no
device, and training needs none of the packages that only the search uses.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memtune.api import Tuned, apply
    from memtune.config.tuned_config import TunedConfig, load_config
    from memtune.deferred_init.deferred_init import deferred
    from memtune.interactive.calls import plan, search
    from memtune.interactive.results import PlanResult, SearchResult
    from memtune.technique import Technique
    from memtune.workload.workload import Workload

    __version__: str

__all__ = [
    "PlanResult",
    "SearchResult",
    "Technique",
    "Tuned",
    "TunedConfig",
    "Workload",
    "__version__",
    "apply",
    "deferred",
    "load_config",
    "plan",
    "search",
]

_HOME = {
    "PlanResult": "memtune.interactive.results",
    "SearchResult": "memtune.interactive.results",
    "Technique": "memtune.technique",
    "Tuned": "memtune.api",
    "TunedConfig": "memtune.config.tuned_config",
    "Workload": "memtune.workload.workload",
    "apply": "memtune.api",
    "deferred": "memtune.deferred_init.deferred_init",
    "load_config": "memtune.config.tuned_config",
    "plan": "memtune.interactive.calls",
    "search": "memtune.interactive.calls",
}


# torch accepts another CUDA allocator only until CUDA starts, so this cannot wait for `apply`.
if "MEMTUNE_ALLOCATOR" in os.environ:
    importlib.import_module("memtune.memory.cuda_arena").install_from_environment()


def __getattr__(name: str) -> Any:
    """Load a public name from its module at first use and keep it here."""
    value: Any
    if name == "__version__":
        from importlib.metadata import version

        value = version("memtune")
    elif name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module 'memtune' has no attribute {name!r}; it has {', '.join(__all__)}")
    globals()[name] = value  # later uses find the name without this function
    return value


def __dir__() -> list[str]:
    """Return the public names, loaded or not."""
    return sorted(__all__)
