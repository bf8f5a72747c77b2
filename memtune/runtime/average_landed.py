"""Replicas that average each gradient as it lands, so that it may leave the device at once: `ddp` beside gradients that go down.

Three rules, which the pass `passes.gradients_down` follows:

Rule 1. A gradient that autograd has put in place is averaged over all ranks, one message each, and is then what `Context.lands`
        promises. In every micro-batch, since the sums of micro-batches are on the host; what stays on the device and has been
        averaged before is the same on all ranks, so averaging it once more with what is new changes nothing of it.
Rule 2. Every rank must have every gradient, in each backward: else ranks would average others with others.
Rule 3. Buffers follow the first rank's, as under DistributedDataParallel (`runtime.follow_first`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import memtune.ops  # noqa: F401  (defines torch.ops.memtune)
from memtune.errors import ApplyError
from memtune.runtime.backward_end import BackwardEnd
from memtune.runtime.context import Context, Landed
from memtune.runtime.follow_first import FollowFirst
from memtune.runtime.hooks import weakly
from memtune.runtime.ranks import require_ranks


class AverageLanded:
    """Averages the gradients of the model in `context` one by one, and says when each is there.

    Args:
        context: Gets `lands`, a `sync` and a check.
        find_unused_parameters: As `ddp` has it.

    Raises:
        ApplyError: There is no process group, the ranks' weights differ, or ranks may use other parameters than others.
    """

    def __init__(self, context: Context, *, find_unused_parameters: bool) -> None:
        require_ranks(context, "ddp")
        if find_unused_parameters:
            raise ApplyError(
                "find_unused_parameters does not work where gradients leave the device as they land.",
                evidence="Ranks average them one by one, so every rank must have each of them.",
                fix="find_unused_parameters: false, or sharding: {states: {kind: fsdp}}", code="MT315",
            )  # fmt: skip
        group = dist.distributed_c10d._get_default_group()
        self._name, self._ranks = group.group_name, group.size()
        self._model = context.model
        self._parameters = _trained(context.model)
        self._missing: set[nn.Parameter] = set()
        self._at_end, self._listeners = BackwardEnd(self._ends), list[Landed]()
        self._averaged_bytes = 0
        self._buffers = FollowFirst(context, group)
        for parameter in self._parameters:
            context.undo.callback(parameter.register_post_accumulate_grad_hook(weakly(self._arrived)).remove)
        context.lands, context.sync, context.averaged = self._listeners.append, self._sync, True
        context.checks["sharding.states"] = self._check

    @contextmanager
    def _sync(self, last: bool) -> Iterator[None]:
        yield
        if last:
            self._buffers.step_ends()

    @torch.no_grad()
    def _arrived(self, parameter: Tensor) -> None:
        """Rule 1."""
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        if self._at_end.expect():
            self._missing = set(self._parameters)
        self._missing.discard(parameter)
        self._averaged_bytes += parameter.grad.nbytes
        torch.ops.memtune.all_reduce_(parameter.grad, self._name, self._ranks, "avg")
        for landed in self._listeners:
            landed(parameter)

    def _ends(self) -> None:
        """Rule 2."""
        missing, self._missing = self._missing, set()
        require_all_averaged(missing)

    def _check(self) -> dict[str, Any]:
        if _trained(self._model) != self._parameters:
            raise ApplyError("the model's parameters are no longer those whose gradients are averaged.", code="MT324")
        return {"ranks": self._ranks, "averaged_bytes": self._averaged_bytes}


def require_all_averaged(missing: Collection[nn.Parameter]) -> None:
    """Rule 2: a rank that lacks a gradient would have averaged others with others.

    Args:
        missing: Parameters whose gradients were not averaged in this backward.

    Raises:
        ApplyError: There are some.
    """
    if missing:
        raise ApplyError(
            f"{len(missing)} parameters got no gradient in this backward.",
            evidence="Ranks average gradients one by one as they land, so every rank must have each of them, every time.",
            fix="sharding: {states: {kind: fsdp}}, or a model whose ranks use the same parameters", code="MT346",
        )  # fmt: skip


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
