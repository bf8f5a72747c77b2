"""Process groups, node topology, rank checks and errors that all ranks raise together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.parallel.ranks import replica_groups as replica_groups, shutdown as shutdown
    from memtune.parallel.ranks.error_propagation import share_first_failure as share_first_failure
    from memtune.parallel.ranks.micro_batch_rotation import MicroBatchRotation as MicroBatchRotation
    from memtune.parallel.ranks.missing_gradients import (
        fill_missing as fill_missing,
        inconsistent_indices as inconsistent_indices,
        message_device as message_device,
        missing_here as missing_here,
        missing_indices as missing_indices,
    )
    from memtune.parallel.ranks.rank_checks import (
        gather_descriptions as gather_descriptions,
        has_real_peers as has_real_peers,
        require_groups as require_groups,
        require_plain as require_plain,
        require_ranks as require_ranks,
        require_same_config as require_same_config,
        require_whole_layers as require_whole_layers,
        require_whole_parameters as require_whole_parameters,
    )
    from memtune.parallel.ranks.remote_parameters import (
        SharedNorms as SharedNorms,
        keep_own as keep_own,
        put_placeholders as put_placeholders,
    )
    from memtune.parallel.ranks.replica_groups import (
        PARTS as PARTS,
        FullParameter as FullParameter,
        ShardMeshes as ShardMeshes,
        allow_nested_collectives as allow_nested_collectives,
        rows_like as rows_like,
        same_part_group as same_part_group,
        set_full_specs as set_full_specs,
        shard_like as shard_like,
        shard_meshes as shard_meshes,
        unwrap_dtensors as unwrap_dtensors,
    )
    from memtune.parallel.ranks.ring import (
        Hop as Hop,
        Ring as Ring,
        RingRound as RingRound,
        RingSums as RingSums,
    )
else:
    __getattr__ = open_door(__name__)
