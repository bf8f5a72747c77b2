"""Device memory on CPU and CUDA: ledgers, the CPU allocator, kernel workspaces, arenas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.memory import arena as arena, cpu_allocator as cpu_allocator
    from memtune.memory.arena_settings import VARIABLE as VARIABLE, ArenaSettings as ArenaSettings
    from memtune.memory.cpu_allocator import cache_dir as cache_dir
    from memtune.memory.dispatch_ledger import ModeLedger as ModeLedger
    from memtune.memory.kernel_layouts import with_kernel_layout as with_kernel_layout
    from memtune.memory.ledger import Ledger as Ledger
    from memtune.memory.workspace import (
        FAKE_DEVICE as FAKE_DEVICE,
        RealOutputs as RealOutputs,
        SignatureCollector as SignatureCollector,
        WorkspaceTable as WorkspaceTable,
        op_of as op_of,
        signature as signature,
    )
else:
    __getattr__ = open_door(__name__)
