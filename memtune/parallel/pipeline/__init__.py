"""Pipeline parallelism: stages of consecutive blocks on consecutive ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.parallel.pipeline.pipeline_parallel import Layout, pipe
    from memtune.parallel.pipeline.pipeline_pass import (
        Parts,
        PipelineSettings,
        declare,
        hold_batches_on_host,
        piped,
        pipelined,
        upload,
    )
    from memtune.parallel.pipeline.remote_parameters import keep_own
    from memtune.parallel.pipeline.stage import Run, become_pieces, shared_batch_form
    from memtune.parallel.pipeline.stage_cuts_pattern import Chain, batch_on_host, chain_of
    from memtune.parallel.pipeline.stage_planner import balanced
else:
    __getattr__ = open_door(__name__)

__all__ = [
    "Chain",
    "Layout",
    "Parts",
    "PipelineSettings",
    "Run",
    "balanced",
    "batch_on_host",
    "become_pieces",
    "chain_of",
    "declare",
    "hold_batches_on_host",
    "keep_own",
    "pipe",
    "piped",
    "pipelined",
    "shared_batch_form",
    "upload",
]
