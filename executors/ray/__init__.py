"""Trials on a Ray cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.executors.ray.cluster import check_reachable as check_reachable
    from memtune.executors.ray.executor import RayExecutor as RayExecutor
else:
    __getattr__ = open_door(__name__)
