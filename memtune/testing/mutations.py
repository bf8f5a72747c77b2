"""Seeded defects of `rewrite` and `apply`: a suite that does not fail under each of them proves nothing.

A mutation changes a mechanism or a technique while its context is entered, and says which check of the suite shows it.
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

from memtune.calls import Calls
from memtune.passes.region import region_of
from memtune.passes.schedule import run_schedule
from memtune.program import FOREVER, Kind, Program, Step, Tier
from memtune.runtime import activations, call_text, frozen, frozen_code, moved, random_state, tiled_loss, transfer
from memtune.runtime.activations import ActivationTable
from memtune.runtime.context import Context, Snapshot
from memtune.runtime.kept import Keep
from memtune.runtime.tree import local
from memtune.schedule import plain_schedule
from memtune.search_spaces.recompute import _claims as planned_claims
from memtune.technique import Plan, Target, Technique

Check = Literal["drift", "training", "untouched"]


@dataclass(frozen=True)
class Mutation:
    """One defect."""

    name: str
    shown_by: Check
    seed: Callable[[type[Technique]], AbstractContextManager[Any]]
    """Context in which the defect is there, given the technique that is tested."""
    needs: str = ""
    """Model of the suite that it takes to show it; '' for any."""

    def __str__(self) -> str:
        """The name."""
        return self.name


def mutations(technique: type[Technique]) -> list[Mutation]:
    """The defects that the suite of `technique` must notice."""
    found = [Mutation("rewrite frees a tensor one op late", "drift", _late), Mutation("rewrite loses an op", "drift", _lost_op)]
    if _is_null(technique):
        return [*found, Mutation("apply recomputes a block", "drift", _claims)]
    found += [
        Mutation("apply does nothing", "drift", _no_apply),
        Mutation("rewrite does nothing", "drift", _no_rewrite),
        Mutation("a failed apply is not undone", "untouched", lambda _: patch.object(Snapshot, "restore", lambda self: None)),
    ]
    of_slot = _BY_SLOT.get(technique.slot)
    return found if of_slot is None else found + of_slot(technique)


def _is_null(technique: type[Technique]) -> bool:
    from memtune.search_spaces import NULL_KINDS

    return technique.__module__.rpartition(".")[2] == NULL_KINDS[technique.slot]


# -- of any technique -------------------------------------------------------------------------------------------------------


def _rewrites(change: Callable[[Step], Step]) -> Callable[[type[Technique]], AbstractContextManager[Any]]:
    """Every rewrite of the technique is followed by `change`."""

    def seed(technique: type[Technique]) -> AbstractContextManager[Any]:
        original = technique.rewrite

        def rewrite(self: Technique, program: Program, plan: Any, target: Any) -> Program:
            done = original(self, program, plan, target)
            return done.with_step(change(done.step))

        return patch.object(technique, "rewrite", rewrite)

    return seed


def _one_op_late(step: Step) -> Step:
    mine = np.flatnonzero((step.kind == Kind.TEMPORARY) & (step.tier == Tier.DEVICE) & (step.end < step.n_ops - 1))
    longest = mine[np.argmax(step.bytes[mine])]
    held = step.held_until.copy()
    held[longest] = step.end[longest] + 1
    return replace(step, held_until=held)


def _without_last_op(step: Step) -> Step:
    last, uses = step.n_ops - 1, step.use_op < step.n_ops - 1
    columns = {name: column[:last] for name, column in step.columns("op_").items()}
    held = np.where(step.held_until == FOREVER, FOREVER, np.minimum(step.held_until, last - 1)).astype(np.int32)
    uses_left = {name: getattr(step, name)[uses] for name in ("use_op", "use_storage", "use_mutates")}
    return replace(step, **columns, **uses_left, held_until=held, save_until=np.minimum(step.save_until, last - 1))


_late, _lost_op = _rewrites(_one_op_late), _rewrites(_without_last_op)


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


# -- of the activation table ------------------------------------------------------------------------------------------------


def _dropped_claim(verb: str) -> Callable[[type[Technique]], AbstractContextManager[Any]]:
    """The first block's claim is lost."""

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
        if isinstance(keep, Calls):
            norm = ("aten.native_layer_norm.default", 0)
            original(self, index, replace(keep, kept=keep.kept ^ {norm}, left_out=keep.left_out - {norm}))
        else:
            original(self, index, lambda op: "layer_norm" in str(op) or (keep is not None and keep(op)))

    return patch.object(ActivationTable, "claim_recompute", claim)


def _one_block_less(technique: type[Technique]) -> AbstractContextManager[Any]:
    module: Any = sys.modules[technique.__module__]
    module = module if hasattr(module, "recompute_blocks") else planned_claims
    original = module.recompute_blocks
    return patch.object(module, "recompute_blocks", lambda step, blocks, *keep: original(step, blocks[:-1], *keep))


def _replay_mixes_up(technique: type[Technique]) -> AbstractContextManager[Any]:
    """The first tensor that is handed out is one too large."""
    original = activations._Frame.keep_back

    def keep_back(self: Any, n: int, tensor: Any) -> None:
        with _disable_current_modes():  # not one of the calls that are counted
            original(self, n, tensor + 1 if n == 0 and tensor.is_floating_point() else tensor)

    return patch.object(activations._Frame, "keep_back", keep_back)


def _no_random_state(technique: type[Technique]) -> AbstractContextManager[Any]:
    return patch.object(random_state.RandomState, "_set", lambda self: None)


def _buffers_stay(technique: type[Technique]) -> AbstractContextManager[Any]:
    return patch.object(activations._Frame, "_put_back_buffers", lambda self: nullcontext())


def _frames_stay(technique: type[Technique]) -> AbstractContextManager[Any]:
    """What a block needs for its second run is never let go."""
    leaked: list[Any] = []
    original = activations._Frame.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        leaked.append(self)

    return patch.object(activations._Frame, "__init__", __init__)


def _source_stays(technique: type[Technique]) -> AbstractContextManager[Any]:
    def arrive(self: Any) -> None:
        transfer.wait(self._host)

    return patch.object(moved.Entry, "arrive", arrive)


# -- of copies ---------------------------------------------------------------------------------------------------------------


def _skipped_copy(technique: type[Technique]) -> AbstractContextManager[Any]:
    """Bytes are said to have left, but the host memory is as it was made."""

    def start(host: Any, x: Any) -> None:
        host.fill_(1)

    return patch.object(transfer, "_start", start)


@contextmanager
def _weights_stay_down(technique: type[Technique]) -> Iterator[None]:
    from memtune.runtime.experts import ExpertStore
    from memtune.runtime.host_optimizer import HostOptimizer
    from memtune.runtime.ssd_optimizer import SsdOptimizer
    from memtune.runtime.updaters import Updaters

    original = HostOptimizer._weights_up

    def up(self: Any, optimizer: Any, args: Any, kwargs: Any) -> None:
        pairs, self._pairs = self._pairs, self._pairs[1:]
        original(self, optimizer, args, kwargs)
        self._pairs = pairs
        pairs[0][1].grad = None

    def stays(self: Any, piece: Any, host: Any, seed: int) -> Any:
        if seed:  # others may not be there
            return on_ssd(self, piece, host, seed)
        before = local(piece.device).clone()
        on_ssd(self, piece, host, seed)
        local(piece.device).copy_(before)
        return None

    def one_stays(self: Any, domain: int, *args: Any) -> None:
        before = self._parameters[0].device.clone()
        from_updater(self, domain, *args)
        self._parameters[0].device.copy_(before)

    def others_stay(self: Any, expert: int) -> None:
        bring(self, expert)
        if expert:
            self._held_by.pieces[expert][0].device.data.zero_()

    on_ssd, from_updater, bring = SsdOptimizer._update, Updaters._up, ExpertStore._bring
    patches = (
        patch.object(HostOptimizer, "_weights_up", up),
        patch.object(SsdOptimizer, "_update", stays),
        patch.object(Updaters, "_up", one_stays),
        patch.object(ExpertStore, "_bring", others_stay),
    )
    with patches[0], patches[1], patches[2], patches[3]:
        yield


@contextmanager
def _gradient_stays(technique: type[Technique]) -> Iterator[None]:
    from memtune.runtime.host_optimizer import HostOptimizer
    from memtune.runtime.ssd_optimizer import SsdOptimizer
    from memtune.runtime.store import ParameterStore
    from memtune.runtime.updaters import Updaters

    kept: list[Any] = []
    original = HostOptimizer._arrived

    def arrived(self: Any, host: Any) -> None:
        kept.append(self._source.grad)
        original(self, host)

    def update(self: Any, piece: Any, host: Any, seed: int) -> Any:
        kept.append(piece.device.grad)
        return on_ssd(self, piece, host, seed)

    def down(self: Any, *args: Any) -> None:
        kept.extend(each.held.grad for each in self._parameters)
        to_updater(self, *args)

    def land(self: Any, parameter: Any) -> None:
        kept.append(parameter.grad)
        landed(self, parameter)

    on_ssd, to_updater, landed = SsdOptimizer._update, Updaters._down, ParameterStore._landed
    patches = (
        patch.object(HostOptimizer, "_arrived", arrived),
        patch.object(SsdOptimizer, "_update", update),
        patch.object(Updaters, "_down", down),
        patch.object(ParameterStore, "_landed", land),
    )
    with patches[0], patches[1], patches[2], patches[3]:
        yield


def _state_on_device(step: Step) -> Step:
    tier = step.tier.copy()
    tier[step.kind == Kind.OPTIMIZER] = Tier.DEVICE
    return replace(step, tier=tier)


# -- of frozen schedules -----------------------------------------------------------------------------------------------------


def _schedule_loses_repetitions(technique: type[Technique]) -> AbstractContextManager[Any]:
    def rewrite(self: Technique, program: Program, plan: Plan, target: Target) -> Program:
        region = region_of(program.step)
        assert not isinstance(region, str), region
        return program.with_step(run_schedule(program.step, region, plain_schedule(region.graph)))

    return patch.object(technique, "rewrite", rewrite)  # the plan is made as ever


def _nothing_is_let_go(technique: type[Technique]) -> AbstractContextManager[Any]:
    original = frozen_code.generate

    def generate(*args: Any, **kwargs: Any) -> Any:
        with patch.object(frozen_code._Writer, "_drop", lambda self, name: self._there.pop(name)):
            return original(*args, **kwargs)

    return patch.object(frozen, "generate", generate)


def _gradient_is_wrong(technique: type[Technique]) -> AbstractContextManager[Any]:
    original = frozen.FrozenRun._run_on

    def run_on(self: Any) -> Any:
        found = original(self)
        self._landed[:] = [gradient + 1 for gradient in self._landed]
        return found

    return patch.object(frozen.FrozenRun, "_run_on", run_on)


def _statistics_twice(technique: type[Technique]) -> AbstractContextManager[Any]:
    return patch.object(call_text, "BATCH_NORMS", frozenset())


def _of_schedule() -> list[Mutation]:
    return [
        Mutation("rewrite runs nothing again", "drift", _schedule_loses_repetitions),
        Mutation("a schedule's values are not let go", "drift", _nothing_is_let_go),
        Mutation("a gradient is wrong", "training", _gradient_is_wrong),
        Mutation("the random state is not put back", "training", _no_random_state, needs="gpt"),
        Mutation("BatchNorm's statistics are updated twice", "training", _statistics_twice, needs="cnn_bn"),
    ]


def _of_recompute(technique: type[Technique]) -> list[Mutation]:
    if technique.eager_only.startswith(("a frozen schedule", "a schedule")):
        return _of_schedule()
    return [
        Mutation("apply drops a claim", "drift", _dropped_claim("claim_recompute")),
        Mutation("rewrite recomputes one block less", "drift", _one_block_less),
        Mutation("apply keeps an op that is recomputed", "drift", _keeps_too_much, needs="gpt"),
        Mutation("what a second run needs is never let go", "drift", _frames_stay),
        Mutation("a recomputed tensor is wrong", "training", _replay_mixes_up),
        Mutation("the random state is not put back", "training", _no_random_state, needs="gpt"),
        Mutation("BatchNorm's statistics are not put back", "training", _buffers_stay, needs="cnn_bn"),
    ]


def _lost_part(technique: type[Technique]) -> AbstractContextManager[Any]:
    """The gradients of the first rows are not added."""
    original = tiled_loss._Gradients.add

    def add(self: Any, gradient: Any, x: Any, weight: Any, rows: slice) -> None:
        original(self, gradient * 0 if rows.start == 0 else gradient, x, weight, rows)

    return patch.object(tiled_loss._Gradients, "add", add)


def _unscaled(technique: type[Technique]) -> AbstractContextManager[Any]:
    """What backward hands in is forgotten."""
    return patch.object(tiled_loss._Gradients, "scaled", lambda self, scale: (self._x, self._weight, self._bias))


_BY_SLOT: dict[str, Callable[[type[Technique]], list[Mutation]]] = {
    "recompute": _of_recompute,
    "split": lambda _: [
        Mutation("a part of the gradient is lost", "training", _lost_part),
        Mutation("gradients are not scaled", "training", _unscaled),
    ],
    "offload.activations": lambda _: [
        Mutation("apply drops a claim", "drift", _dropped_claim("claim_move")),
        Mutation("the source is not let go", "drift", _source_stays),
        Mutation("a copy is skipped", "training", _skipped_copy),
    ],
    "offload.states": lambda _: [
        Mutation("rewrite leaves the state on the device", "drift", _rewrites(_state_on_device)),
        Mutation("gradients are not let go", "drift", _gradient_stays),
        Mutation("one weight does not come back", "training", _weights_stay_down),
        Mutation("a copy is skipped", "training", _skipped_copy),
    ],
}
