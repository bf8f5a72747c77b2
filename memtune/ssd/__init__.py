"""Tensors on SSD: the offload directory, its file, state records, and the manifest that resumes a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.ssd import offload_dir as offload_dir
    from memtune.ssd import ssd_tensors as ssd_tensors
    from memtune.ssd.last_step import (
        DeadRun,
        Durable,
        LastStep,
        Manifest,
        Piece,
        RecordSlots,
        coded,
    )
    from memtune.ssd.offload_dir import RunFolder, allowed_dirs, flush
    from memtune.ssd.ssd_file import TENSORS, WRITE_PRIORITY, Extent, SsdFile, Ticket, cores_of_drive
else:
    __getattr__ = open_door(__name__)

__all__ = [
    "TENSORS",
    "WRITE_PRIORITY",
    "DeadRun",
    "Durable",
    "Extent",
    "LastStep",
    "Manifest",
    "Piece",
    "RecordSlots",
    "RunFolder",
    "SsdFile",
    "Ticket",
    "allowed_dirs",
    "coded",
    "cores_of_drive",
    "flush",
    "offload_dir",
    "ssd_tensors",
]
