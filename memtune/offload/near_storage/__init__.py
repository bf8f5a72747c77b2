"""Update worker processes, one per storage domain (Smart-Infinity)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.offload.near_storage.update_workers import Updaters
    from memtune.offload.near_storage.update_workers_pass import How, optimizer_with_updaters
else:
    __getattr__ = open_door(__name__)

__all__ = ["How", "Updaters", "optimizer_with_updaters"]
