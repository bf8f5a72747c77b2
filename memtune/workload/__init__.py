"""The user's `model.py`: loads it, checks it, and finds repeated blocks, linear pairs and experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.workload.batches import (
        map_leaves as map_leaves,
        map_tensors as map_tensors,
        split_batch as split_batch,
        tensors_of as tensors_of,
        to_device as to_device,
    )
    from memtune.workload.expert_modules import (
        Expert as Expert,
        experts_in as experts_in,
        experts_of as experts_of,
        frozen_expert_parameter as frozen_expert_parameter,
    )
    from memtune.workload.linear_pairs import (
        Pair as Pair,
        find_pairs as find_pairs,
        sharding_error as sharding_error,
        unsharded_in_blocks as unsharded_in_blocks,
    )
    from memtune.workload.model_file import (
        OPTIONAL as OPTIONAL,
        REQUIRED as REQUIRED,
        check_source as check_source,
        load_user_file as load_user_file,
        split_target as split_target,
        summary as summary,
        user_line as user_line,
    )
    from memtune.workload.output_structure import (
        LONE as LONE,
        not_one_tensor as not_one_tensor,
        require_structures as require_structures,
        structure_of as structure_of,
        the_tensor as the_tensor,
        wrap_tensor as wrap_tensor,
    )
    from memtune.workload.repeated_blocks import (
        compress as compress,
        expand as expand,
        find_blocks as find_blocks,
    )
    from memtune.workload.workload import (
        DRAWS as DRAWS,
        DrawnBatches as DrawnBatches,
        Workload as Workload,
        autocast_cache as autocast_cache,
    )
else:
    __getattr__ = open_door(__name__)
