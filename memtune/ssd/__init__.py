"""Tensors on SSD: the offload directory, its file, state records, and the manifest that resumes a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.ssd import offload_dir as offload_dir, ssd_tensors as ssd_tensors
    from memtune.ssd.last_step import (
        DeadRun as DeadRun,
        Durable as Durable,
        LastStep as LastStep,
        Manifest as Manifest,
        Piece as Piece,
        RecordSlots as RecordSlots,
        coded as coded,
    )
    from memtune.ssd.offload_dir import RunFolder as RunFolder, allowed_dirs as allowed_dirs, flush as flush
    from memtune.ssd.ssd_file import (
        TENSORS as TENSORS,
        WRITE_PRIORITY as WRITE_PRIORITY,
        Extent as Extent,
        SsdFile as SsdFile,
        Ticket as Ticket,
        cores_of_drive as cores_of_drive,
    )
else:
    __getattr__ = open_door(__name__)
