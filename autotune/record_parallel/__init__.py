"""Record the step of one rank of a model that is partitioned over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.autotune.record_parallel.fake_process_group import fake_ranks as fake_ranks
    from memtune.autotune.record_parallel.sharded_recording import ShardedRecordings as ShardedRecordings
else:
    __getattr__ = open_door(__name__)
