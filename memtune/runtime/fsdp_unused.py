"""FSDP2 where samples choose which parameters are used, so that ranks use others than others do.

FSDP2 reduces the gradients that a rank has of a unit in one message: ranks that have others would add up the gradient of one
parameter with that of another, silently where they have one shape. Two rules:

1. Of experts, ranks tell each other before a unit is reduced which they have gradients of, and send zeros for what others have.
   What no rank has keeps no gradient, as on one rank. Routing reads the device anyway: one more look at it costs little.
2. Of all else ranks must have the same. That is compared in the 1st, 2nd, 4th, 8th … backward, since it waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from memtune.errors import ApplyError
from memtune.experts import experts_of
from memtune.runtime.context import Context
from memtune.runtime.missing import apart, lacking
from memtune.runtime.parts import same_part
from memtune.runtime.tiers import HOST, tier


def reduce_alike(context: Context, units: Iterable[Any]) -> None:
    """Have every rank reduce gradients of the same parameters.

    Args:
        context: Model and blocks.
        units: FSDP2's modules of that model.
    """
    named = list(context.model.named_parameters())
    experts = {named[i][0] for expert in experts_of(context.model, context.blocks) for i in expert.parameters}
    names = {id(parameter): name for name, parameter in named}
    with tier(HOST):  # a mesh is no memory of the device's
        ranks = same_part(context)
    for unit in units:
        group: Any = unit._get_fsdp_state()._fsdp_param_group
        if group is not None:
            trained = {names[id(each.sharded_param)]: each for each in group.fsdp_params if each.sharded_param.requires_grad}
            group.post_backward = _Reduction(group, trained, experts, ranks)


class _Reduction:
    """What FSDP2 calls when backward has passed a unit, and once more at the end of backward, when nothing is left to do.

    Args:
        group: FSDP2's parameters of the unit.
        trained: Those that are trained, by name.
        experts: Names of parameters of experts, of this unit and others.
        ranks: Who averages these gradients.
    """

    def __init__(self, group: Any, trained: dict[str, Any], experts: set[str], ranks: dist.ProcessGroup) -> None:
        self._group, self._reduce, self._ranks = group, group.post_backward, ranks
        self._experts = [each for name, each in trained.items() if name in experts]
        self._others = {name: each for name, each in trained.items() if name not in experts}
        self._count = 0

    def __call__(self, *unused: Any) -> None:
        """Reduce, alike on all ranks.

        Raises:
            ApplyError: Rule 2.
        """
        if self._group.reduce_grads and self._group._training_state.name == "PRE_BACKWARD":
            self._count += 1
            if self._count & (self._count - 1) == 0:
                self._compare()
            self._fill_up()
        self._reduce(*unused)

    @torch.no_grad()
    def _fill_up(self) -> None:
        """Rule 1."""
        if self._experts:
            for place in lacking(_there(self._experts), self._ranks, self._experts[0].sharded_param):
                parameter = self._experts[place].unsharded_param
                parameter.grad = torch.zeros_like(parameter)

    def _compare(self) -> None:
        held = {name: each for name, each in self._others.items() if each in self._group.fsdp_params}  # not weights in tiles
        if not held:
            return
        names, others = list(held), list(held.values())
        found = apart(_there(others), self._ranks, others[0].sharded_param)
        if found:
            raise ApplyError(
                f"{names[found[0]]} got a gradient on some ranks and none on others.",
                evidence="FSDP2 would average what each rank has of a block, one parameter's gradients with another's.",
                fix="sharding: {states: {kind: zero2}}, or {kind: ddp, find_unused_parameters: true}", code="MT346",
            )  # fmt: skip


def _there(held: Sequence[Any]) -> list[bool]:
    return [each.unsharded_accumulated_grad is not None or each.unsharded_param.grad is not None for each in held]
