"""Parameter offload: block parameters on the host or SSD, loaded before use and freed after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.offload.parameters.block_gradients import BlockGradients as BlockGradients
    from memtune.offload.parameters.block_units import (
        BlockUnits as BlockUnits,
        OffloadedBlocks as OffloadedBlocks,
        Prefetched as Prefetched,
        bytes_of as bytes_of,
        copy_together as copy_together,
        host_copy as host_copy,
        piece_of as piece_of,
    )
    from memtune.offload.parameters.link_coordination import (
        Orchestrated as Orchestrated,
        place_of as place_of,
        swapped_blocks as swapped_blocks,
    )
    from memtune.offload.parameters.moments_pass import Overlap as Overlap, in_blocks as in_blocks
    from memtune.offload.parameters.offloader import (
        BlockUpdates as BlockUpdates,
        ParameterOffloader as ParameterOffloader,
        largest_block_bytes as largest_block_bytes,
    )
    from memtune.offload.parameters.parameter_offload_pass import (
        bytes_without_chunks as bytes_without_chunks,
        first_ops as first_ops,
        moment_of_ops as moment_of_ops,
        native_update_bytes as native_update_bytes,
        not_in_layers as not_in_layers,
        replicas as replicas,
        sizes_in_blocks as sizes_in_blocks,
        state_bytes as state_bytes,
        stream_parameters as stream_parameters,
        stream_weights as stream_weights,
        streamed_parameters as streamed_parameters,
        window_of as window_of,
    )
    from memtune.offload.parameters.ssd_values import (
        Mappings as Mappings,
        SsdGradients as SsdGradients,
        SsdValues as SsdValues,
        on_ssd as on_ssd,
    )
else:
    __getattr__ = open_door(__name__)
