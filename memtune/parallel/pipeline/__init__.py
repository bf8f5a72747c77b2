"""Pipeline parallelism: stages of consecutive blocks on consecutive ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.parallel.pipeline.pipeline_parallel import Layout as Layout, pipe as pipe
    from memtune.parallel.pipeline.pipeline_pass import (
        Parts as Parts,
        PipelineSettings as PipelineSettings,
        declare as declare,
        hold_batches_on_host as hold_batches_on_host,
        piped as piped,
        pipelined as pipelined,
        upload as upload,
    )
    from memtune.parallel.pipeline.stage import (
        Run as Run,
        become_pieces as become_pieces,
        shared_batch_form as shared_batch_form,
        total_loss as total_loss,
    )
    from memtune.parallel.pipeline.stage_cuts_pattern import (
        Chain as Chain,
        batch_on_host as batch_on_host,
        chain_of as chain_of,
    )
    from memtune.parallel.pipeline.stage_planner import balanced as balanced
else:
    __getattr__ = open_door(__name__)
