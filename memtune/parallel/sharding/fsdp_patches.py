"""Patches of FSDP2 for models in which the used parameters depend on the samples, such as experts.

FSDP2 reduces the gradients that a rank has of a unit in one message: if ranks have gradients of different
parameters, it adds the gradient of one parameter to that of another, silently if shapes match. Two rules:

1. For experts, ranks exchange before each unit's reduction which gradients they have, and send zeros for
  those that only others have. A parameter without a gradient on any rank keeps none, as on one rank. Routing
  synchronizes with the device anyway: one more sync costs little.
2. For all other parameters ranks must have the same gradients. This is checked in the 1st, 2nd, 4th, 8th …
  backward, since it synchronizes with the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from memtune.errors import ApplyError
from memtune.parallel.ranks import inconsistent_indices, missing_indices, same_part_group
from memtune.runtime import HOST, BackwardEnd, Context, UncopiedHook, local, tier
from memtune.workload import experts_of


def reduce_same_parameters(context: Context, units: Iterable[Any]) -> None:
    """Make every rank reduce gradients of the same parameters.

    Args:
        context: Model and blocks.
        units: FSDP2's modules of that model.
    """
    named = list(context.model.named_parameters())
    experts = {named[i][0] for expert in experts_of(context.model, context.blocks) for i in expert.parameters}
    names = {id(parameter): name for name, parameter in named}
    with tier(HOST):  # a mesh is no memory of the device's
        ranks = same_part_group(context)
    for unit in units:
        group: Any = unit._get_fsdp_state()._fsdp_param_group
        if group is not None:
            trained = {
                names[id(each.sharded_param)]: each
                for each in group.fsdp_params
                if each.sharded_param.requires_grad
            }
            group.post_backward = _Reduction(group, trained, experts, ranks)


class _Reduction:
    """Replacement for FSDP2's post-backward of a unit; FSDP2 calls it after the unit's backward and again at
    the end of backward, when nothing is left to do.

    Args:
        group: FSDP2's parameter group of the unit.
        trained: Its trainable parameters, by name.
        experts: Names of all expert parameters, of this unit and others.
        ranks: Group that averages these gradients.
    """

    def __init__(
        self, group: Any, trained: dict[str, Any], experts: set[str], ranks: dist.ProcessGroup
    ) -> None:
        self._group, self._reduce, self._ranks = group, group.post_backward, ranks
        self._experts = [each for name, each in trained.items() if name in experts]
        self._others = {name: each for name, each in trained.items() if name not in experts}
        self._count = 0

    def __call__(self, *unused: Any) -> None:
        """Reduce the same parameters on all ranks.

        Raises:
            ApplyError: Ranks have gradients of different parameters (rule 2).
        """
        if self._group.reduce_grads and self._group._training_state.name == "PRE_BACKWARD":
            self._count += 1
            if self._count & (self._count - 1) == 0:
                self._compare()
            self._fill_up()
        self._reduce(*unused)

    @torch.no_grad()
    def _fill_up(self) -> None:
        """Add zero gradients for expert parameters that only other ranks used (rule 1)."""
        if self._experts:
            for place in missing_indices(
                _has_grad(self._experts), self._ranks, self._experts[0].sharded_param
            ):
                parameter = self._experts[place].unsharded_param
                parameter.grad = torch.zeros_like(parameter)

    def _compare(self) -> None:
        held = {
            name: each for name, each in self._others.items() if each in self._group.fsdp_params
        }  # not weights in tiles
        if not held:
            return
        names, others = list(held), list(held.values())
        found = inconsistent_indices(_has_grad(others), self._ranks, others[0].sharded_param)
        if found:
            raise ApplyError(
                f"{names[found[0]]} got a gradient on some ranks and none on others.",
                evidence=(
                    "FSDP2 would average what each rank has of a block, one parameter's gradients with"
                    " another's."
                ),
                fix="sharding: {states: {kind: zero2}}, or {kind: ddp, find_unused_parameters: true}",
                code="MT346",
            )


def _has_grad(held: Sequence[Any]) -> list[bool]:
    return [
        each.unsharded_accumulated_grad is not None or each.unsharded_param.grad is not None for each in held
    ]


# The second hop of MiCS: sums of gradient shards averaged between the copies of the model, once a step.
Unit = tuple[nn.Parameter, ...]
"""Sharded parameters that are reduced together."""


class OncePerStep:
    """Averages gradient shards over the ranks that hold the same ones, in the last micro-batch of a step.

    Args:
        group: The ranks that hold the same shard, one of each copy.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._averages = True
        self._waiting: Unit = ()
        self._at_end = BackwardEnd(self._average, self._give_up)

    def hook(self, unit: Unit) -> Callable[[Tensor], None]:
        """Return the hook that FSDP2 calls when `unit` has been reduced; the shard passed to it is not added
        to the sums yet.
        """
        return lambda shard: self._reduced(unit)

    @contextmanager
    def sync(self, last: bool) -> Iterator[None]:
        """Return the context of a micro-batch: only the last one averages."""
        self._averages = last
        try:
            yield
        finally:
            self._averages = True

    def at_end(self, units: Iterable[Unit]) -> Callable[[], None]:
        """Turn off averaging by hooks; return a function that averages the sums of all `units`."""
        self._averages, all_units = False, tuple(units)

        def average() -> None:
            for unit in all_units:
                self._waiting = unit
                self._average()

        return average

    def _reduced(self, unit: Unit) -> None:
        if not self._averages:
            return
        # Runs after FSDP2's callback for the end of backward, which was queued before any unit is reduced.
        self._at_end.expect()
        self._average()  # rule 2
        self._waiting = unit

    def _give_up(self) -> None:
        """Drop the waiting unit of a backward that raised."""
        self._waiting = ()

    @torch.no_grad()
    def _average(self) -> None:
        unit, self._waiting = self._waiting, ()
        for sums in _storages(unit):
            torch.ops.memtune.all_reduce_(sums, self._group.group_name, self._group.size(), "avg")
            # The sums belong to another stream, which would reuse their memory while the all-reduce reads
            # them.
            if sums.is_cuda:
                sums.record_stream(torch.cuda.current_stream())


def _storages(unit: Unit) -> list[Tensor]:
    """Return the storages of the unit's sums, each once and flat (rule 1)."""
    found: dict[int, Tensor] = {}
    for parameter in unit:
        if parameter.grad is not None:
            shard = local(parameter.grad)
            storage = shard.untyped_storage()
            found.setdefault(
                storage._cdata, shard.as_strided((storage.nbytes() // shard.element_size(),), (1,), 0)
            )
    return list(found.values())


def go_on_after_errors(context: Context) -> None:
    """Reset FSDP2's state in the model of `context` after an exception. Forward raises ApplyError where torch
    cannot recover.
    """
    model: Any = context.model

    def forward_begins() -> None:
        state = model._get_fsdp_state()._state_ctx
        raised = state.post_backward_final_callback_queued or state.iter_forward_root is not None
        if not raised or torch._C._current_graph_task_id() != -1:
            return
        if not hasattr(model, "reset_iter_state"):
            raise ApplyError(
                "A forward or a backward has raised, and FSDP2 of this torch cannot go on after it.",
                evidence=f"torch {torch.__version__} keeps what it was to do at the end of that backward.",
                fix="torch 2.13 or later; or begin again, from the last checkpoint",
                code="MT368",
            )
        for each in (each for one in state.all_states for each in _parameters(one)):
            if hasattr(each, "_unsharded_param"):
                each._unsharded_param.grad = None
        model.reset_iter_state()

    context.undo.callback(model.register_forward_pre_hook(UncopiedHook(forward_begins), prepend=True).remove)


def _parameters(state: Any) -> list[Any]:
    return [] if state._fsdp_param_group is None else state._fsdp_param_group.fsdp_params
