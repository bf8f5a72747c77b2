"""Near-storage updates: one updater process per storage domain (Smart-Infinity)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.offload.near_storage.update_workers import Updaters as Updaters
    from memtune.offload.near_storage.update_workers_pass import (
        UpdatersSpec as UpdatersSpec,
        optimizer_on_updaters as optimizer_on_updaters,
    )
else:
    __getattr__ = open_door(__name__)
