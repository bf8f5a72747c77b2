"""Parameter offload: block parameters on the host or SSD, loaded before use and freed after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.offload.parameters.link_coordination import (
        Orchestrated as Orchestrated,
        place_of as place_of,
        swapped_blocks as swapped_blocks,
    )
    from memtune.offload.parameters.moments_pass import Overlap as Overlap, in_blocks as in_blocks
    from memtune.offload.parameters.offloader import (
        HostCopies as HostCopies,
        ParameterOffloader as ParameterOffloader,
        host_copy as host_copy,
    )
    from memtune.offload.parameters.overlapped_offloader import (
        DeferredBlocks as DeferredBlocks,
        OverlappedOffloader as OverlappedOffloader,
    )
    from memtune.offload.parameters.parameter_offload_pass import (
        bytes_without_chunks as bytes_without_chunks,
        first_ops as first_ops,
        moment_of_ops as moment_of_ops,
        native_update_bytes as native_update_bytes,
        not_in_layers as not_in_layers,
        sizes_in_blocks as sizes_in_blocks,
        state_bytes as state_bytes,
        stream_parameters as stream_parameters,
        stream_weights as stream_weights,
        streamed_parameters as streamed_parameters,
    )
else:
    __getattr__ = open_door(__name__)
