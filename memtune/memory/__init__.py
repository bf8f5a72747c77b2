"""Device memory on CPU and CUDA: ledgers, the CPU allocator, kernel workspaces, arenas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.memory import arena as arena
    from memtune.memory import cpu_allocator as cpu_allocator
    from memtune.memory.arena_settings import VARIABLE, ArenaSettings
    from memtune.memory.cpu_allocator import cache_dir
    from memtune.memory.dispatch_ledger import ModeLedger
    from memtune.memory.ledger import Ledger
    from memtune.memory.workspace import (
        FAKE_DEVICE,
        RealOutputs,
        SignatureCollector,
        WorkspaceTable,
        op_of,
        signature,
    )
else:
    __getattr__ = open_door(__name__)

__all__ = [
    "FAKE_DEVICE",
    "VARIABLE",
    "ArenaSettings",
    "Ledger",
    "ModeLedger",
    "RealOutputs",
    "SignatureCollector",
    "WorkspaceTable",
    "arena",
    "cache_dir",
    "cpu_allocator",
    "op_of",
    "signature",
]
