"""Parameter offload: block parameters on the host, loaded before use and freed after it; gradients offloaded
when ready.

`HostParameters` loads and frees units (a block, or a chunk) and offloads gradients; `ParameterOffloader`
decides when. A step is a sequence of moments, one for each use of a block in forward and in backward; a
`Residency` lists the units to free and to load at each. States of a unit:

    freed --take, H2D copy--> resident --give_back--> freed

Order of a moment (`ParameterOffloader._begin`), which the pass `parameter_offload_pass` follows op by op:
wait for the gradients in D2H copies, free units, wait for the copy stream, load what the moment uses,
prefetch what the residency lists, update the block whose gradients are complete.

- Memory is freed and allocated in place (`untyped_storage().resize_`), as FSDP2 does: saved tensors,
  recompute and offloaded activations keep working, because views keep their storage.
- Loads preserve version counters: a reload is no change that autograd should see.
- Each block is updated inside backward once `Tuned.step` or `Tuned.micro_batch` has announced the last
  micro-batch; in other loops `optimizer.step()` updates all.
- A unit that is used but not resident is loaded synchronously, so any order of calls is correct.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

import memtune.runtime.seam  # noqa: F401  (defines torch.ops.memtune)
from memtune.errors import ApplyError
from memtune.offload.core import (
    Chunks,
    GatheredBlocks,
    Pages,
    PendingUpdates,
    Piece,
    guard_module,
    in_chunks,
    is_gathered,
    sharded_like,
    to_host_now,
)
from memtune.offload.gradients import WatchedGradients
from memtune.offload.optimizer import add_gradient
from memtune.parallel.replicas import require_all_averaged
from memtune.program import Residency, Units, order_of_use
from memtune.runtime import (
    HOST,
    BackwardEnd,
    Context,
    EarlyUpdates,
    ReplacedForward,
    before_step,
    local,
    mark,
    transfer,
    weakly,
)


class HostCopies(Protocol):
    """Holds the host copies of offloaded parameters, and updates them."""

    def leave_down(self, parameters: Iterable[nn.Parameter]) -> None:
        """Leave these to the offloader, which loads their weights and offloads their gradients."""

    def update(self, parameters: Iterable[nn.Parameter]) -> None:
        """Update these now, from the gradients of the optimizer's parameters, which are freed."""

    def check(self) -> dict[str, Any]:
        """Return facts for the audit."""


class HostParameters:
    """The parameters of the blocks of `context` with host copies; all are on the device at first.

    Args:
        context: Its model.
        optimizer: Holds the host copies, and updates them.
        chunks: Layout of the blocks' parameters; none: each block is a unit.
        only: Blocks whose parameters are offloaded; None: all.
        when_ready: Gradients are offloaded when ready. Otherwise another mechanism or the optimizer's step
            offloads them.
        copy: Copies a parameter's values from the host.
        members: Of each block, the offloaded parameters; none: all.
        averages: Ranks are replicas, and average each gradient before it is offloaded.
        room_bytes: Bound of gradients in D2H copies at once; 0: one gradient.

    Raises:
        ApplyError: A block's parameter is used outside of it, or gradients are offloaded and no parameter
            outside of the
            blocks is trained.
    """

    def __init__(
        self,
        context: Context,
        optimizer: HostCopies,
        chunks: Chunks | Pages | None = None,
        *,
        only: Container[int] | None = None,
        landing: bool = True,
        copy: Callable[[Tensor, Tensor], None] | None = None,
        members: list[list[nn.Parameter]] | None = None,
        averages: bool = False,
        room_bytes: int = 0,
    ) -> None:
        placement = context.placement
        self._group = dist.group.WORLD if averages and placement.world_size > 1 else None
        self._optimizer, self._device = optimizer, context.device
        self._before_grad_use = context.events.before_grad_use
        self._modules = [context.model.get_submodule(name) for name in context.blocks]
        self._gathered = GatheredBlocks(context) if is_gathered(context.model) else None
        _refuse_schedules(context.model)
        self._blocks = [list(block.parameters()) for block in self._modules] if members is None else members
        mine = [parameter for block in self._blocks for parameter in block]
        self._landing, self._copy = landing, copy or _copied
        self._outside = _outside(context.model, mine, landing)
        self._hosts = self._kept(context, mine)
        self._trained = {p: placement.optimizer_params[p] for p in mine if p in placement.optimizer_params}
        goes = [block if only is None or index in only else [] for index, block in enumerate(self._blocks)]
        optimizer.leave_down(parameter for block in goes for parameter in block)
        self.blocks_on_host = sum(map(bool, goes))
        if chunks is None:
            self._units = [[self._piece(parameter) for parameter in block] for block in goes]
            self._of_block: Sequence[Sequence[int]] = [(index,) for index in range(len(self._blocks))]
        else:
            self._units, self._of_block = self._put_into(context, mine, chunks), chunks.of_block
        self._there: set[int] = set(range(len(self._units)))
        self._on_the_way: PendingUpdates[tuple[nn.Parameter, Tensor, Tensor]] = PendingUpdates(room_bytes)
        stay, leave = (self._outside, list(self._trained.values())) if landing else ([], [])
        self._watched = WatchedGradients(
            context, stay, leave, "offload: {states: {kind: optimizer_cpu}}, or no clipping"
        )
        self._averaged: set[nn.Parameter] = set()
        self._averaged_there = self._stays(context, set(mine)) if self._group is not None and landing else []
        self._loading: dict[
            int, nn.Module
        ] = {}  # by block: itself or the part of it that a state dict is loaded into
        self.loaded_bytes = 0
        context.undo.callback(self._bring_all)
        if self._gathered is not None:
            for index in range(len(self._blocks)):
                self._bring_for_gathers(self._gathered, index)

    def _stays(self, context: Context, leave: set[nn.Parameter]) -> list[nn.Parameter]:
        """What is trained of the blocks and not among `leave`: replicas average its gradients where
        they are.
        """
        found = [
            each
            for block in self._modules
            for each in block.parameters()
            if each.requires_grad and each not in leave
        ]
        for parameter in found:
            context.undo.callback(parameter.register_post_accumulate_grad_hook(weakly(self._average)).remove)
        return found

    def _kept(self, context: Context, mine: list[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """Return the memory of the values of `mine` while they are freed on the device."""
        held = context.placement.optimizer_params
        return {p: held[p].detach() if p in held else copy_of(p) for p in mine}

    def _piece(self, parameter: nn.Parameter) -> Piece:
        """Return the memory of a parameter that is in no chunk."""
        host = self._hosts[parameter]
        if self._gathered is None:
            return Piece(parameter.detach(), host, of=(parameter,))
        rows = local(parameter.detach())
        return Piece(rows, host, padded_bytes=self._gathered.rows_of(parameter).nbytes, of=(parameter,))

    def _put_into(
        self, context: Context, mine: list[nn.Parameter], chunks: Chunks | Pages
    ) -> list[list[Piece]]:
        """Move the parameters `mine` to their layout; return the units."""
        assert isinstance(chunks, Chunks)
        return [[piece] for piece in in_chunks(context, mine, self._hosts, chunks, self._gathered)]

    def _watch_block(self, context: Context, index: int) -> None:
        """Register the grad-ready hooks of the block, and the hooks of state dicts."""
        block = self._modules[index]
        for module in block.modules():
            guard_module(module)
            module.register_state_dict_post_hook(
                lambda *seen: self._into_state_dict(*seen)
            )  # torch marks the function
            module.register_load_state_dict_pre_hook(lambda module, *_: self._load_begins(index, module))
            module.register_load_state_dict_post_hook(lambda module, _: self._load_ends(index, module))
        if index == 0:
            guard_module(context.model)
        for parameter in self._blocks[index]:
            if parameter.requires_grad and self._landing:
                context.undo.callback(
                    parameter.register_post_accumulate_grad_hook(weakly(self._landed)).remove
                )

    def _bring_for_gathers(self, gathered: GatheredBlocks, index: int) -> None:
        units = self._of_block[index]
        gathered.before_gathers(
            index,
            lambda: self._fetch_units(units),
            lambda: [piece.there for unit in units for piece in self._units[unit]],
        )

    def _fetch_block(self, block: int) -> None:
        self._fetch_units(self._of_block[block])

    def _fetch_units(self, units: Iterable[int]) -> None:
        for index in units:
            self._fetch(index)

    def _fetch_whole(self, block: int) -> None:
        """Load the whole block, into which new values are loaded."""
        self._fetch_block(block)

    @torch.no_grad()
    def _fetch(self, index: int) -> None:
        if index in self._there:
            return
        self._there.add(index)
        self._bring_pieces(self._units[index])

    def _bring_pieces(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            piece.take()
            with _unsafe_preserve_version_counter(piece.there):  # Rule 3
                self._copy(piece.there.detach(), piece.host)
            self.loaded_bytes += piece.host.nbytes

    def _release(self, units: Any) -> None:
        for index in list(units):
            if index in self._there:
                self._there.discard(index)
                for piece in self._units[index]:
                    piece.give_back()

    def _bring_all(self) -> None:
        for index, pieces in enumerate(self._units):
            if any(piece.there.untyped_storage().nbytes() == 0 for piece in pieces):
                self._there.discard(index)
            self._fetch(index)

    # -- gradients -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _landed(self, parameter: Tensor) -> None:
        """Average the gradient among replicas and start its D2H copy; grad-ready hook."""
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        self._average(parameter)
        source, parameter.grad = parameter.grad, None
        self._leaves(parameter, source)

    def _leaves(self, parameter: nn.Parameter, source: Tensor) -> None:
        n_bytes = local(source).nbytes
        self._arrive_all(self._on_the_way.let_go(n_bytes))
        host = torch.ops.memtune.to_host(local(source))
        mark(host, HOST)
        self._on_the_way.put((parameter, source, host), n_bytes)

    @torch.no_grad()
    def _average(self, parameter: nn.Parameter) -> None:
        if self._group is not None:
            self._averaged.add(parameter)
            assert parameter.grad is not None
            torch.ops.memtune.all_reduce_(parameter.grad, self._group.group_name, self._group.size(), "avg")

    def _show(self, parameters: Iterable[nn.Parameter]) -> None:
        """Notify listeners of gradients that are used, and freed, inside backward."""
        for parameter in parameters:
            if parameter in self._trained and (gradient := self._trained[parameter].grad) is not None:
                self._before_grad_use.emit(parameter, gradient)

    @torch.no_grad()
    def _arrive(self, keep: int = 0) -> None:
        """Wait for all D2H copies but the newest `keep` bytes' worth of gradients."""
        self._arrive_all(self._on_the_way.rest(keep))

    def _arrive_all(self, turns: Iterator[tuple[nn.Parameter, Tensor, Tensor]]) -> None:
        for turn in turns:
            parameter, source, host = turn
            transfer.finish(host)
            del source, turn
            self._arrived(parameter, host)

    def _arrived(self, parameter: nn.Parameter, host: Tensor) -> None:
        """Add the gradient, which is on the host, to the sum of micro-batches."""
        add_gradient(self._trained[parameter], host)

    def _forget_landed(self) -> None:
        """A backward, or a step, has raised: what is on its way is part of no gradient."""
        for _, _, host in self._on_the_way.rest():
            transfer.abandon(host)
        self._watched.forget()
        self._averaged = set()

    def _note_versions(self) -> None:
        """Note the gradients' versions at the end of backward, so that later changes are found."""
        self._require_all_averaged()
        self._watched.note()

    def _require_all_averaged(self) -> None:
        averaged, self._averaged = self._averaged, set()
        if self._group is not None and self._landing:
            require_all_averaged(
                [each for each in (*self._trained, *self._averaged_there) if each not in averaged]
            )

    def _step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Free all units before the weights change, and check that gradients are those of backward."""
        self._release(list(self._there))
        self._watched.require_unchanged()
        self._watched.forget()

    # -- checkpoints -----------------------------------------------------------------------------------------

    def _into_state_dict(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            if prefix + name in state and parameter in self._hosts:
                state[prefix + name] = sharded_like(parameter, self._hosts[parameter])

    def _load_begins(self, index: int, module: nn.Module) -> None:
        self._loading.setdefault(index, module)
        self._fetch_whole(index)

    def _load_ends(self, index: int, module: nn.Module) -> None:
        """Copy the loaded values of `module` to the host; the outermost module's hook runs last and frees the
        block.
        """
        self._keep([each for each in module._parameters.values() if each is not None and each in self._hosts])
        if self._loading.get(index) is module:
            del self._loading[index]
            self._release(self._of_block[index])

    @torch.no_grad()
    def _keep(self, loaded: list[nn.Parameter]) -> None:
        """Copy the new values on the device to the host copies."""
        for parameter in loaded:
            self._hosts[parameter].copy_(local(parameter))

    def _left_bytes(self) -> int:
        """Return the bytes of the blocks' parameters that are on the device."""
        return sum(piece.there.untyped_storage().nbytes() for unit in self._units for piece in unit)


def _refuse_schedules(model: nn.Module) -> None:
    owner = getattr(vars(model).get("forward"), "__self__", None)
    if isinstance(owner, ReplacedForward):
        raise ApplyError(
            "A schedule takes the place of the model's code, so its blocks are not called and cannot come"
            " and go.",
            fix="recompute: {kind: full}",
            code="MT364",
        )


def _copied(there: Tensor, host: Tensor) -> None:
    torch.ops.memtune.copy_to_device_(there, host)


def _outside(model: nn.Module, mine: list[nn.Parameter], landing: bool) -> list[nn.Parameter]:
    """Return the trained parameters outside of the blocks.

    Raises:
        ApplyError: A block's parameter is used outside of it as well, or shares memory, or gradients are
            offloaded and
            there are none.
    """
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    inside = {id(parameter) for parameter in mine}
    if len(inside) != len(mine) or any(owners[id(parameter)] > 1 for parameter in mine):
        raise ApplyError(
            "A parameter of a block is shared with another module, so it cannot come and go with its block.",
            fix="offload: {states: {kind: optimizer_cpu}}",
            code="MT364",
        )
    refuse_shared_memory(model, mine)
    outside = [p for p in model.parameters() if p.requires_grad and id(p) not in inside]
    if landing and not outside:
        raise ApplyError(
            "Nothing outside of the blocks is trained, so clipping by norm could not be noticed.",
            fix="offload: {states: {kind: optimizer_cpu}}",
            code="MT364",
        )
    return outside


def refuse_shared_memory(model: nn.Module, mine: Iterable[nn.Parameter]) -> None:
    """Check that each of `mine`, parameters of `model`, fills its storage, which is freed as a whole.

    Raises:
        ApplyError: One is a part of a larger tensor, or repeats memory.
    """
    whole = [each for each in mine if not isinstance(each, DTensor)]  # a shard's memory is FSDP2's own
    wrong = {id(each) for each in whole if each.untyped_storage().nbytes() != each.nbytes}
    if wrong:
        name = next(name for name, each in model.named_parameters() if id(each) in wrong)
        raise ApplyError(
            f"{name} shares its memory with something else, so it cannot come and go.",
            fix="offload: {states: {kind: optimizer_cpu}}",
            code="MT364",
        )


def copy_of(parameter: nn.Parameter) -> Tensor:
    """Return a copy of `parameter` in host memory."""
    host = to_host_now(local(parameter))
    mark(host, HOST)
    return host


# Parameters of the blocks on the host, on the device only while a residency says so; gradients leave as they
# land.
class ParameterOffloader(HostParameters):
    """Offloads the blocks' parameters of `context` as a residency lists.

    Args:
        context: Its model; hooks are registered on its blocks and their parameters.
        residency: Units to free and load at each moment.
        optimizer: Holds the host copies, and updates them.
        chunks: Layout of the blocks' parameters; none: each block is a unit.
        early: Blocks are updated in backward, natively.
        only: As in `HostParameters`.
        when_ready: As there.
        copy: As there.
        members: As there.
        room_bytes: As there.

    Raises:
        ApplyError: A block's parameter is used outside of it, or gradients are offloaded and no parameter
            outside of the
            blocks is trained.
    """

    def __init__(
        self,
        context: Context,
        residency: Residency,
        optimizer: HostCopies,
        *,
        chunks: Chunks | Pages | None = None,
        early: bool = True,
        only: Container[int] | None = None,
        landing: bool = True,
        copy: Callable[[Tensor, Tensor], None] | None = None,
        members: list[list[nn.Parameter]] | None = None,
        room_bytes: int = 0,
    ) -> None:
        averages = (
            context.placement.offload.averages == "blocks" and context.loop.runner is not None
        )  # DDP's, which has left them out
        super().__init__(
            context,
            optimizer,
            chunks,
            only=only,
            landing=landing,
            copy=copy,
            members=members,
            averages=averages,
            room_bytes=room_bytes,
        )
        if (
            landing
            and members is None
            and context.placement.world_size > 1
            and self._gathered is None
            and not averages
        ):
            raise ApplyError(
                "Gradients that leave as they land would not be averaged among ranks.",
                fix="sharding: {states: {kind: fsdp}}",
                code="MT364",
            )
        self._residency = residency
        self._moment = self._end = len(residency.drops) - 1
        self._uses = order_of_use(len(self._blocks), gathered=self._gathered is not None)
        self._is_last = False
        self._at_end = BackwardEnd(self._backward_ends, self._backward_raised)
        self._updated = EarlyUpdates(context, "block")
        for index in range(len(self._modules)):
            self._watch(context, index)
        for parameter in self._outside if landing else ():
            context.undo.callback(
                parameter.register_post_accumulate_grad_hook(weakly(self._outside_landed)).remove
            )
        self._outer = context.loop.sync
        if early:
            context.loop.sync = self.sync
        before_step(context.optimizer, self._step_begins)
        context.events.weights_loaded.subscribe(self._at_end.settle)
        self._release(list(self._there))

    def _watch(self, context: Context, index: int) -> None:
        block, first = self._modules[index], self._gathered is not None  # before FSDP2's own hooks
        block.register_forward_pre_hook(
            lambda module, args: self._begin(index) if torch.is_grad_enabled() else self._fetch_block(index),
            prepend=first,
        )
        block.register_forward_hook(
            lambda module, args, output: self._returned(index, args, output), prepend=first
        )
        self._watch_block(context, index)

    @contextmanager
    def sync(self, last: bool) -> Iterator[None]:
        """Return the context of a micro-batch; in the last one's backward blocks are updated.

        Raises:
            ApplyError: A backward with updates has raised, and no state dict has been loaded since.
        """
        self._at_end.settle()
        self._updated.step_begins()
        self._is_last = last
        try:
            with nullcontext() if self._outer is None else self._outer(last):
                yield
        finally:
            self._is_last = False

    # -- moments ---------------------------------------------------------------------------------------------

    def _returned(self, index: int, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            self._release(self._of_block[index])
            return
        moment = self._end - 1 - index
        given = {
            id(each) for each in tree_leaves(args)
        }  # passed on as it is, its gradient says that the block before is next
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad and id(tensor) not in given:
                tensor.register_hook(lambda _: self._backward(moment))

    def _backward(self, moment: int) -> None:
        self._at_end.expect()
        self._begin(moment)

    def _outside_landed(self, parameter: Tensor) -> None:
        """A backward may run no block (a penalty on the head): its end is the last moment all the same."""
        self._at_end.expect()

    def _backward_ends(self) -> None:
        self._begin(self._end)
        self._note_versions()

    def _begin(self, moment: int) -> None:
        """Begin a moment: wait, free, load, prefetch, update, in the order of the module's docstring."""
        self._at_end.settle()
        if moment == 0 and not self._at_end.is_near:
            self._watched.require_unchanged()
        if moment == self._moment:
            self._fetch_used(
                moment
            )  # the forward in which it began may have raised, and all have been let go since
            return
        before, self._moment = self._moment, moment
        self._arrive_before(moment)
        self._release(self._there if before + 1 != moment else self._residency.drops[moment])
        transfer.wait_prefetched(self._device)
        self._fetch_used(moment)  # the first that comes in, or Rule 6
        with transfer.prefetching(self._device):
            self._bring_ahead(self._residency.loads[moment])
        is_used = self._is_last and len(self._blocks) <= before < self._end
        self._update_after(moment, self._end - 1 - before if is_used else None)

    def _fetch_used(self, moment: int) -> None:
        if moment < self._end and (used := self._uses[moment]) >= 0:
            self._fetch_block(used)

    def _arrive_before(self, moment: int) -> None:
        self._arrive()

    def _bring_ahead(self, units: Units) -> None:
        self._fetch_units(units)

    def _update_after(self, moment: int, block: int | None) -> None:
        """Update `block`, whose gradients were all ready in the moment before; None: no block is complete."""
        if block is not None:
            self._show(self._blocks[block])
            self._updated.add([block])
            self._optimizer.update(self._blocks[block])

    # -- a backward that raised ------------------------------------------------------------------------------

    def _backward_raised(self) -> None:
        """Forget gradients of a backward that raised; refuse the step if it has updated blocks."""
        self._updated.raised()
        self._forget_landed()

    def _step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._at_end.settle()
        self._updated.step_goes_on()
        super()._step_begins(optimizer, args, kwargs)
        self._updated.forget()

    # -- proof -----------------------------------------------------------------------------------------------

    def check(self) -> dict[str, Any]:
        """Return facts about the blocks' parameters.

        Raises:
            ApplyError: Some are on the device between two steps.
        """
        left = self._left_bytes()
        if left and self._moment == self._end:
            raise ApplyError(
                f"{left} bytes of the blocks' parameters are on the device between two steps.", code="MT309"
            )
        facts = self._optimizer.check()
        return facts | {"blocks_on_host": self.blocks_on_host, "loaded_bytes": self.loaded_bytes}
