"""FSDP2 on the stages of a pipeline, each stage's units over the ranks that hold a copy of it.

Four rules:

1. The root, what a stage holds in no block, is gathered in each forward and in each backward, as its blocks are: between the two
   come forwards of other micro-batches. A stage ends the user's code between blocks, before the model has returned, so the
   root's end of a forward is called then, with what the stage passes on for the model's output.
2. Each backward ends as a whole model's does: gradients are reduced and added to the shards of the micro-batches before.
3. Where units stay gathered after forward, they do so from the first forward of a step to the last backward: in between there
   is always a micro-batch that needs them.
4. What stands in the place of other stages' parameters is not divided.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from memtune.runtime.context import Context


def shard_stage(context: Context, sharers: dist.ProcessGroup, *, keeps: bool) -> None:
    """Have the stage of this rank, whose units FSDP2 divides among `sharers`, run as the rules say.

    Args:
        context: Its pipeline is told.
        sharers: The ranks that divide the stage.
        keeps: Units stay gathered after forward (rule 3).
    """
    pipeline: Any = context.pipeline
    model: Any = context.model
    pipeline.divided_among(sharers)
    pipeline.run.ended = lambda output: _end_forward(model, output)
    if keeps:
        pipeline.before_backward = lambda last: _frees(model, last)


def _end_forward(model: Any, output: Tensor) -> Tensor:
    """Rule 1."""
    state = model._get_fsdp_state()
    found: Tensor = state._post_forward(model, (), output)
    return found


def _frees(model: Any, last: bool) -> None:
    """Rule 3."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_reshard_after_backward(last, recurse=False)
