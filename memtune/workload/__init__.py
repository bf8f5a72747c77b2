"""The user's `model.py`: loads it, checks it, and finds repeated blocks, linear pairs and experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.workload.batches import map_leaves, map_tensors, split_batch, tensors_of, to_device
    from memtune.workload.expert_modules import (
        Expert,
        experts_in,
        experts_of,
        frozen_expert_parameter,
    )
    from memtune.workload.linear_pairs import Pair, find_pairs, sharding_error, unsharded_in_blocks
    from memtune.workload.model_file import (
        OPTIONAL,
        REQUIRED,
        check_source,
        load_user_file,
        split_target,
        summary,
        user_line,
    )
    from memtune.workload.output_structure import (
        LONE,
        not_one_tensor,
        require_structures,
        structure_of,
        the_tensor,
        wrap_tensor,
    )
    from memtune.workload.repeated_blocks import compress, expand, find_blocks
    from memtune.workload.workload import Workload, autocast_cache
else:
    __getattr__ = open_door(__name__)

__all__ = [
    "LONE",
    "OPTIONAL",
    "REQUIRED",
    "Expert",
    "Pair",
    "Workload",
    "autocast_cache",
    "check_source",
    "compress",
    "expand",
    "experts_in",
    "experts_of",
    "find_blocks",
    "find_pairs",
    "frozen_expert_parameter",
    "load_user_file",
    "map_leaves",
    "map_tensors",
    "not_one_tensor",
    "require_structures",
    "sharding_error",
    "split_batch",
    "split_target",
    "structure_of",
    "summary",
    "tensors_of",
    "the_tensor",
    "to_device",
    "unsharded_in_blocks",
    "user_line",
    "wrap_tensor",
]
