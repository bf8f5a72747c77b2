"""Run trials in fresh processes: on this machine or on a Ray cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.executors.base import CAPACITY_ERRORS, Executor, Progress, Trial, TrialResult
    from memtune.executors.core_wait import core_wait_s
    from memtune.executors.gradient_record import largest_difference
    from memtune.executors.local import LocalExecutor
    from memtune.executors.merge_results import last_line
    from memtune.executors.monitor import SILENCE_S, Event, RankLost, run_monitored
    from memtune.executors.preflight import Probing, probe, probing
    from memtune.executors.rank_group import (
        CLOSE_S,
        WORKER,
        LocalRanks,
        Place,
        end_supervisor,
        make_log_dir,
        start_supervisor,
    )
    from memtune.executors.secret_values import masked
    from memtune.executors.slot_pool import PoolExecutor
    from memtune.executors.supervisor import descendants
    from memtune.executors.trial_room import check_gpus, local_slots, visible_gpu_ids
else:
    __getattr__ = open_door(__name__)

__all__ = [
    "CAPACITY_ERRORS",
    "CLOSE_S",
    "SILENCE_S",
    "WORKER",
    "Event",
    "Executor",
    "LocalExecutor",
    "LocalRanks",
    "Place",
    "PoolExecutor",
    "Probing",
    "Progress",
    "RankLost",
    "Trial",
    "TrialResult",
    "check_gpus",
    "core_wait_s",
    "descendants",
    "end_supervisor",
    "largest_difference",
    "last_line",
    "local_slots",
    "make_log_dir",
    "masked",
    "probe",
    "probing",
    "run_monitored",
    "start_supervisor",
    "visible_gpu_ids",
]
