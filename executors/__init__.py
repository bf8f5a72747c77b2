"""Run trials in fresh processes: on this machine or on a Ray cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.executors.base import (
        CAPACITY_ERRORS as CAPACITY_ERRORS,
        Executor as Executor,
        Progress as Progress,
        Trial as Trial,
        TrialResult as TrialResult,
    )
    from memtune.executors.core_wait import core_wait_s as core_wait_s
    from memtune.executors.gradient_record import largest_difference as largest_difference
    from memtune.executors.local import LocalExecutor as LocalExecutor
    from memtune.executors.merge_results import last_line as last_line
    from memtune.executors.monitor import (
        SILENCE_S as SILENCE_S,
        Event as Event,
        RankLost as RankLost,
        run_monitored as run_monitored,
    )
    from memtune.executors.preflight import Probing as Probing, probe as probe, probing as probing
    from memtune.executors.rank_group import (
        CLOSE_S as CLOSE_S,
        WORKER as WORKER,
        LocalRanks as LocalRanks,
        Place as Place,
        end_supervisor as end_supervisor,
        make_log_dir as make_log_dir,
        start_supervisor as start_supervisor,
    )
    from memtune.executors.secret_values import masked as masked
    from memtune.executors.slot_pool import PoolExecutor as PoolExecutor
    from memtune.executors.supervisor import descendants as descendants
    from memtune.executors.trial_room import (
        check_gpus as check_gpus,
        local_slots as local_slots,
        visible_gpu_ids as visible_gpu_ids,
    )
else:
    __getattr__ = open_door(__name__)
