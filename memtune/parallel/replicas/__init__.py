"""Data parallelism: replicates the model and averages gradients, as DistributedDataParallel does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.parallel.replicas.complete_grads import average_now as average_now, sum_now as sum_now
    from memtune.parallel.replicas.data_parallel import Replicas as Replicas
    from memtune.parallel.replicas.ddp_pass import (
        BUCKET_CAP_MB as BUCKET_CAP_MB,
        Replication as Replication,
        replicate as replicate,
    )
    from memtune.parallel.replicas.grad_all_reduce import AllReduceGrads as AllReduceGrads
    from memtune.parallel.replicas.grad_buckets import Buckets as Buckets, GradBuckets as GradBuckets
    from memtune.parallel.replicas.gradient_reducer import GradientReducer as GradientReducer
else:
    __getattr__ = open_door(__name__)
