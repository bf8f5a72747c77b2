"""Parameter offload: block parameters on the host or SSD, loaded before use and freed after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.offload.parameters.link_coordination import Orchestrated, place_of, swapped_blocks
    from memtune.offload.parameters.offloader import HostCopies, ParameterOffloader, host_copy
    from memtune.offload.parameters.overlap_pass import Overlap
    from memtune.offload.parameters.overlapped_offloader import DeferredBlocks, OverlappedOffloader
    from memtune.offload.parameters.parameter_offload_pass import (
        bytes_without_chunks,
        first_ops,
        moment_of_ops,
        native_update_bytes,
        not_in_layers,
        sizes_in_blocks,
        state_bytes,
        stream_parameters,
        stream_weights,
        streamed_parameters,
        whole_state,
    )
    from memtune.offload.parameters.unit_layout_pass import in_blocks
else:
    __getattr__ = open_door(__name__)

__all__ = [
    "DeferredBlocks",
    "HostCopies",
    "Orchestrated",
    "Overlap",
    "OverlappedOffloader",
    "ParameterOffloader",
    "bytes_without_chunks",
    "first_ops",
    "host_copy",
    "in_blocks",
    "moment_of_ops",
    "native_update_bytes",
    "not_in_layers",
    "place_of",
    "sizes_in_blocks",
    "state_bytes",
    "stream_parameters",
    "stream_weights",
    "streamed_parameters",
    "swapped_blocks",
    "whole_state",
]
