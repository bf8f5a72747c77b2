"""Seeded defects of `rewrite` and `apply` (mutation testing): the suite must fail under each of them.

A mutation patches a mechanism or a technique while its context is entered, and names the check that must
fail.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
from torch.utils._python_dispatch import _disable_current_modes

from memtune.activations.offload import offloaded_tensor
from memtune.activations.recompute import ActivationTable, Keep, RegionRun, activation_table
from memtune.activations.schedules import codegen, region_of, run_schedule, scheduled_region
from memtune.activations.tiling import tiled_loss
from memtune.program import FOREVER, Kind, OpAddresses, Program, Step, Tier, plain_schedule
from memtune.runtime import Context, Snapshot, local, rng_state, transfer
from memtune.search_spaces.recompute._block_planner import claims as planned_claims
from memtune.technique import Plan, Target, Technique

Check = Literal["drift", "training", "untouched"]


@dataclass(frozen=True)
class Mutation:
    """One seeded defect."""

    name: str
    shown_by: Check
    seed: Callable[[type[Technique]], AbstractContextManager[Any]]
    """Returns the context in which the technique has the defect."""
    needs: str = ""
    """Model of the suite that shows it; '' for any."""

    def __str__(self) -> str:
        """Return the name."""
        return self.name


def mutations(technique: type[Technique]) -> list[Mutation]:
    """Return the defects that the suite of `technique` must find."""
    found = [
        Mutation("rewrite frees a tensor one op too late", "drift", _delayed_free),
        Mutation("rewrite loses an op", "drift", _lost_op),
    ]
    if _is_null(technique):
        return [*found, Mutation("apply recomputes a block", "drift", _claims)]
    found += [
        Mutation("apply does nothing", "drift", _no_apply),
        Mutation("rewrite does nothing", "drift", _no_rewrite),
        Mutation(
            "a failed apply is not undone",
            "untouched",
            lambda _: patch.object(Snapshot, "restore", lambda self: None),
        ),
    ]
    of_slot = _BY_SLOT.get(technique.slot)
    return found if of_slot is None else found + of_slot(technique)


def _is_null(technique: type[Technique]) -> bool:
    from memtune.search_spaces import NULL_KINDS

    return technique.__module__.rpartition(".")[2] == NULL_KINDS[technique.slot]


# -- of any technique ----------------------------------------------------------------------------------------


def _rewrites(change: Callable[[Step], Step]) -> Callable[[type[Technique]], AbstractContextManager[Any]]:
    """Return a seed that applies `change` after the technique's rewrite."""

    def seed(technique: type[Technique]) -> AbstractContextManager[Any]:
        original = technique.rewrite

        def rewrite(self: Technique, program: Program, plan: Any, target: Any) -> Program:
            done = original(self, program, plan, target)
            return done.with_step(change(done.step))

        return patch.object(technique, "rewrite", rewrite)

    return seed


def _one_op_delayed(step: Step) -> Step:
    mine = np.flatnonzero(
        (step.storages.kind == Kind.TEMPORARY)
        & (step.storages.tier == Tier.DEVICE)
        & (step.freed_after < step.ops.n - 1)
    )
    longest = mine[np.argmax(step.storages.bytes[mine])]
    held = step.storages.held_until.copy()
    held[longest] = step.freed_after[longest] + 1
    return step.with_storages(held_until=held)


def _without_last_op(step: Step) -> Step:
    last, uses = step.ops.n - 1, step.uses.op < step.ops.n - 1
    held = np.where(
        step.storages.held_until == FOREVER, FOREVER, np.minimum(step.storages.held_until, last - 1)
    ).astype(np.int32)
    cut = replace(step, ops=step.ops.rows(slice(last)), uses=step.uses.rows(uses)).with_storages(
        held_until=held
    )
    return cut.with_saves(held_until=np.minimum(step.saves.held_until, last - 1))


_delayed_free, _lost_op = _rewrites(_one_op_delayed), _rewrites(_without_last_op)


def _no_rewrite(technique: type[Technique]) -> AbstractContextManager[Any]:
    return patch.object(technique, "rewrite", lambda self, program, plan, target: program)


def _no_apply(technique: type[Technique]) -> AbstractContextManager[Any]:
    return patch.object(technique, "apply", lambda self, context, plan: None)


def _claims(technique: type[Technique]) -> AbstractContextManager[Any]:
    def apply(self: Technique, context: Context, plan: Any) -> None:
        table = ActivationTable(context.model, context.blocks)
        table.claim_recompute(0)
        table.install()

    return patch.object(technique, "apply", apply)


# -- of the activation table ---------------------------------------------------------------------------------


def _dropped_claim(verb: str) -> Callable[[type[Technique]], AbstractContextManager[Any]]:
    """Return a seed that drops the first block's claim."""

    def seed(technique: type[Technique]) -> AbstractContextManager[Any]:
        original = getattr(ActivationTable, verb)

        def claim(self: ActivationTable, index: int, *args: Any, **kwargs: Any) -> None:
            if index > 0:
                original(self, index, *args, **kwargs)

        return patch.object(ActivationTable, verb, claim)

    return seed


def _keeps_too_much(technique: type[Technique]) -> AbstractContextManager[Any]:
    original = ActivationTable.claim_recompute

    def claim(self: ActivationTable, index: int, keep: Keep | None = None) -> None:
        if isinstance(keep, OpAddresses):
            norm = ("aten.native_layer_norm.default", 0)
            original(self, index, replace(keep, kept=keep.kept ^ {norm}, skipped=keep.skipped - {norm}))
        else:
            original(self, index, lambda op: "layer_norm" in str(op) or (keep is not None and keep(op)))

    return patch.object(ActivationTable, "claim_recompute", claim)


def _one_block_less(technique: type[Technique]) -> AbstractContextManager[Any]:
    module: Any = sys.modules[technique.__module__]
    module = module if hasattr(module, "recompute_blocks") else planned_claims
    original = module.recompute_blocks
    return patch.object(
        module, "recompute_blocks", lambda step, blocks, *keep: original(step, blocks[:-1], *keep)
    )


def _replay_mixes_up(technique: type[Technique]) -> AbstractContextManager[Any]:
    """Add one to the first recomputed tensor."""
    original = activation_table._Frame.keep_back

    def keep_back(self: Any, n: int, tensor: Any) -> None:
        with _disable_current_modes():  # so that no mode counts the addition
            original(self, n, tensor + 1 if n == 0 and tensor.is_floating_point() else tensor)

    return patch.object(activation_table._Frame, "keep_back", keep_back)


def _no_random_state(technique: type[Technique]) -> AbstractContextManager[Any]:
    return patch.object(rng_state.RandomState, "_set", lambda self: None)


def _buffers_not_freed(technique: type[Technique]) -> AbstractContextManager[Any]:
    return patch.object(RegionRun, "_buffers_as_found", lambda self: nullcontext())


def _frames_not_freed(technique: type[Technique]) -> AbstractContextManager[Any]:
    """Never free the saved tensors for a block's second run."""
    leaked: list[Any] = []
    original = activation_table._Frame.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        leaked.append(self)

    return patch.object(activation_table._Frame, "__init__", __init__)


def _source_not_freed(technique: type[Technique]) -> AbstractContextManager[Any]:
    def complete_offload(self: Any) -> None:
        transfer.wait(self._host)

    return patch.object(offloaded_tensor.SavedStorage, "complete_offload", complete_offload)


# -- of copies -----------------------------------------------------------------------------------------------


@contextmanager
def _skipped_copy(technique: type[Technique]) -> Iterator[None]:
    """Count the bytes of a copy, but leave the host memory as allocated."""

    def start(host: Any, x: Any) -> None:
        host.fill_(1)

    def together(xs: Any) -> Any:
        hosts = original(xs)
        transfer.finish_all(hosts)
        for host in hosts:
            host.fill_(1)
        return hosts

    original = transfer.to_host_together
    with (
        patch.object(transfer, "_start", start),
        patch.object(transfer, "to_host", lambda x: together([x])[0]),
        patch.object(transfer, "to_host_together", together),
    ):
        yield


@contextmanager
def _weights_not_reloaded(technique: type[Technique]) -> Iterator[None]:
    from memtune.offload.experts import ExpertUnits
    from memtune.offload.near_storage import Updaters
    from memtune.offload.optimizer import HostOptimizer
    from memtune.offload.ssd_states import SsdOptimizer

    original = HostOptimizer._copy_weights_to_device

    def copy_weights(self: Any, optimizer: Any, args: Any, kwargs: Any) -> None:
        pairs, self._copied = self._copied, self._copied[1:]
        original(self, optimizer, args, kwargs)
        self._copied = pairs
        if pairs:
            pairs[0][1].grad = None

    def keep_first(self: Any, piece: Any, host: Any, seed: int) -> Any:
        if seed:  # other pieces may not be resident
            return on_ssd(self, piece, host, seed)
        before = local(piece.device).clone()
        on_ssd(self, piece, host, seed)
        local(piece.device).copy_(before)
        return None

    def keep_one(self: Any, domain: int, *args: Any) -> None:
        before = self._parameters[0].device.clone()
        from_updater(self, domain, *args)
        self._parameters[0].device.copy_(before)

    def zero_others(self: Any, expert: int) -> None:
        bring(self, expert)
        if expert:
            self._optimizer.pieces[expert][0].device.data.zero_()

    on_ssd, from_updater, bring = SsdOptimizer._update, Updaters._reload_weights, ExpertUnits._load_expert
    patches = (
        patch.object(HostOptimizer, "_copy_weights_to_device", copy_weights),
        patch.object(SsdOptimizer, "_update", keep_first),
        patch.object(Updaters, "_reload_weights", keep_one),
        patch.object(ExpertUnits, "_load_expert", zero_others),
    )
    with patches[0], patches[1], patches[2], patches[3]:
        yield


@contextmanager
def _gradient_not_freed(technique: type[Technique]) -> Iterator[None]:
    from memtune.offload.near_storage import Updaters
    from memtune.offload.optimizer import HostOptimizer
    from memtune.offload.parameters import BlockGradients
    from memtune.offload.ssd_states import SsdOptimizer

    kept: list[Any] = []
    original = HostOptimizer._finish_copies

    def finish_copies(self: Any, pairs: Any) -> None:
        kept.extend(parameter.grad for parameter, _ in pairs)
        original(self, pairs)

    def update(self: Any, piece: Any, host: Any, seed: int) -> Any:
        kept.append(piece.device.grad)
        return on_ssd(self, piece, host, seed)

    def down(self: Any, *args: Any) -> None:
        kept.extend(each.held.grad for each in self._parameters)
        to_updater(self, *args)

    def offload(self: Any, parameter: Any) -> None:
        kept.append(parameter.grad)
        on_grad_ready(self, parameter)

    on_ssd = SsdOptimizer._update
    to_updater = Updaters._offload_gradients
    on_grad_ready = BlockGradients._on_grad_ready
    patches = (
        patch.object(HostOptimizer, "_finish_copies", finish_copies),
        patch.object(SsdOptimizer, "_update", update),
        patch.object(Updaters, "_offload_gradients", down),
        patch.object(BlockGradients, "_on_grad_ready", offload),
    )
    with patches[0], patches[1], patches[2], patches[3]:
        yield


def _state_on_device(step: Step) -> Step:
    tier = step.storages.tier.copy()
    tier[step.storages.kind == Kind.OPTIMIZER] = Tier.DEVICE
    return step.with_storages(tier=tier)


# -- of schedules --------------------------------------------------------------------------------------------


def _schedule_loses_repetitions(technique: type[Technique]) -> AbstractContextManager[Any]:
    def rewrite(self: Technique, program: Program, plan: Plan, target: Target) -> Program:
        region = region_of(program.step)
        assert not isinstance(region, str), region
        return program.with_step(run_schedule(program.step, region, plain_schedule(region.graph)))

    return patch.object(technique, "rewrite", rewrite)  # `plan` is unchanged


def _nothing_is_freed(technique: type[Technique]) -> AbstractContextManager[Any]:
    original = codegen.generate

    def generate(*args: Any, **kwargs: Any) -> Any:
        with patch.object(codegen._Writer, "_drop", lambda self, name: self._there.pop(name)):
            return original(*args, **kwargs)

    return patch.object(scheduled_region, "generate", generate)


def _gradient_is_wrong(technique: type[Technique]) -> AbstractContextManager[Any]:
    original = scheduled_region.ScheduledRun._run_on

    def run_on(self: Any) -> Any:
        found = original(self)
        self._ready[:] = [gradient + 1 for gradient in self._ready]
        return found

    return patch.object(scheduled_region.ScheduledRun, "_run_on", run_on)


def _statistics_twice(technique: type[Technique]) -> AbstractContextManager[Any]:
    return patch.object(codegen, "BATCH_NORMS", frozenset())


def _of_schedule() -> list[Mutation]:
    return [
        Mutation("rewrite recomputes nothing", "drift", _schedule_loses_repetitions),
        Mutation("a schedule's values are not freed", "drift", _nothing_is_freed),
        Mutation("a gradient is wrong", "training", _gradient_is_wrong),
        Mutation("the random state is not restored", "training", _no_random_state, needs="gpt"),
        Mutation("BatchNorm's statistics are updated twice", "training", _statistics_twice, needs="cnn_bn"),
    ]


def _of_recompute(technique: type[Technique]) -> list[Mutation]:
    if technique(kind=technique.model_fields["kind"].default).effects.calls == "schedule":
        return _of_schedule()
    return [
        Mutation("apply drops a claim", "drift", _dropped_claim("claim_recompute")),
        Mutation("rewrite recomputes one block less", "drift", _one_block_less),
        Mutation("apply keeps an op that is recomputed", "drift", _keeps_too_much, needs="gpt"),
        Mutation("saved tensors of a second run are never freed", "drift", _frames_not_freed),
        Mutation("a recomputed tensor is wrong", "training", _replay_mixes_up),
        Mutation("the random state is not restored", "training", _no_random_state, needs="gpt"),
        Mutation("BatchNorm's statistics are not restored", "training", _buffers_not_freed, needs="cnn_bn"),
    ]


def _lost_part(technique: type[Technique]) -> AbstractContextManager[Any]:
    """Drop the gradients of the first rows."""
    original = tiled_loss._Gradients.add

    def add(self: Any, gradient: Any, x: Any, weight: Any, rows: slice) -> None:
        original(self, gradient * 0 if rows.start == 0 else gradient, x, weight, rows)

    return patch.object(tiled_loss._Gradients, "add", add)


def _unscaled(technique: type[Technique]) -> AbstractContextManager[Any]:
    """Ignore the incoming gradient's scale in backward."""
    return patch.object(
        tiled_loss._Gradients, "scaled", lambda self, scale: (self._x, self._weight, self._bias)
    )


_BY_SLOT: dict[str, Callable[[type[Technique]], list[Mutation]]] = {
    "recompute": _of_recompute,
    "split": lambda _: [
        Mutation("a part of the gradient is lost", "training", _lost_part),
        Mutation("gradients are not scaled", "training", _unscaled),
    ],
    "offload.activations": lambda _: [
        Mutation("apply drops a claim", "drift", _dropped_claim("claim_move")),
        Mutation("the source of a copy is not freed", "drift", _source_not_freed),
        Mutation("a copy is skipped", "training", _skipped_copy),
    ],
    "offload.states": lambda _: [
        Mutation("rewrite leaves the state on the device", "drift", _rewrites(_state_on_device)),
        Mutation("offloaded gradients are not freed", "drift", _gradient_not_freed),
        Mutation("one weight is not reloaded", "training", _weights_not_reloaded),
        Mutation("a copy is skipped", "training", _skipped_copy),
    ],
}
