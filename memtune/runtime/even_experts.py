"""FSDP2's units of blocks with experts, of which ranks use others in one micro-batch.

FSDP2 reduces the gradients that a rank has of a unit in one message: ranks whose samples went to other experts would add up the
gradient of one with that of another, silently where they have one shape. So before such a unit is reduced, ranks tell each other
of which experts they have gradients, and send zeros for what others have. What no rank has keeps no gradient, as on one rank.
Routing reads the device anyway, so that one more look at it, on a rank that lacks one, costs little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from memtune.experts import experts_of
from memtune.runtime.context import Context
from memtune.runtime.missing import lacking
from memtune.runtime.parts import same_part


def even_experts(context: Context, units: Iterable[Any]) -> None:
    """Have every rank reduce gradients of the same experts.

    Args:
        context: Model and blocks.
        units: FSDP2's modules of that model.
    """
    parameters = list(context.model.parameters())
    experts = {parameters[i] for expert in experts_of(context.model, context.blocks) for i in expert.parameters}
    if not experts:
        return
    ranks = same_part(context)  # which all ranks make together, be there experts in their stage or not
    for unit in units:
        group: Any = unit._get_fsdp_state()._fsdp_param_group
        held = [each for each in group.fsdp_params if each.sharded_param in experts] if group is not None else []
        held = [each for each in held if each.sharded_param.requires_grad]
        if held:
            group.post_backward = partial(_reduce, group, group.post_backward, held, ranks)


def _reduce(group: Any, reduce: Callable[..., None], held: Sequence[Any], ranks: dist.ProcessGroup, *unused: Any) -> None:
    """What FSDP2 calls when backward has passed a unit; once more at the end of backward, when nothing is left to do."""
    if group.reduce_grads and group._training_state.name == "PRE_BACKWARD":
        there = [each.unsharded_accumulated_grad is not None or each.unsharded_param.grad is not None for each in held]
        with torch.no_grad():
            for place in lacking(there, ranks, held[0].sharded_param):
                held[place].unsharded_param.grad = torch.zeros_like(held[place].unsharded_param)
    reduce(*unused)
