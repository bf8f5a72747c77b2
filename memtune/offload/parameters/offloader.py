"""Parameter offload: blocks are loaded before use and freed after it, gradients offloaded when ready.

`HostParameters` loads and frees units (a block, or a chunk) and offloads gradients; `ParameterOffloader`
decides when. A step is a sequence of moments, one for each use of a block in forward and in backward; a
`Residency` lists the units to free and to load at each. `offload.core.offloaded_parameter` has the states of
a parameter; a unit's parameters change state together.

Order of a moment (`ParameterOffloader._begin_moment`), which the pass `parameter_offload_pass` follows op by
op: wait for the gradients in D2H copies, free units, wait for the copy stream, load what the moment uses,
prefetch what the residency lists, update the block whose gradients are complete.

- Memory is freed and allocated in place (`untyped_storage().resize_`), as FSDP2 does: saved tensors,
  recompute and offloaded activations keep working, because views keep their storage.
- Loads preserve version counters: a reload is no change that autograd should see.
- Each block is updated inside backward once `Tuned.step` or `Tuned.micro_batch` has announced the last
  micro-batch; in other loops `optimizer.step()` updates all. If nothing outside of the blocks is trained, it
  updates the last block of backward in every loop.
- A unit that is used but not resident is loaded synchronously, so any order of calls is correct.
- Between uses a parameter shows its host copy, so state dicts, loads and copies of the model need no hooks.
  From the end of backward to the next forward or step its `grad` is the host sum, which the user may change.

One file: `HostParameters` and `ParameterOffloader` change the states of the same units, in the order above.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

import memtune.runtime.seam  # noqa: F401  (defines torch.ops.memtune)
from memtune import refusals
from memtune.errors import ApplyError
from memtune.offload.core import (
    Chunks,
    GatheredBlocks,
    OffloadedParameter,
    Pages,
    PendingUpdates,
    Piece,
    adopt_together,
    allocate_together,
    free_together,
    freed_memory,
    host_values,
    in_chunks,
    is_gathered,
    own_grad,
    restore_together,
    set_own_grad,
    sharded_like,
    to_host_now,
)
from memtune.offload.gradients import WatchedGradients
from memtune.offload.optimizer import add_gradient
from memtune.parallel.replicas import GradientReducer
from memtune.program import Residency, Units, order_of_use
from memtune.runtime import (
    HOST,
    BackwardEnd,
    Context,
    EarlyUpdates,
    ReplacedForward,
    UncopiedHook,
    before_step,
    copy_to_device_together,
    groups,
    hide_grad_of,
    local,
    mark,
    run_last,
    show_grad_of,
    to_host_together,
    transfer,
    weakly,
    without_grad,
)


class HostCopies(Protocol):
    """Holds the host copies of offloaded parameters, and updates them."""

    def leave_to_offloader(self, parameters: Iterable[nn.Parameter]) -> None:
        """Leave these to the offloader, which loads their weights and offloads their gradients."""

    def update(self, parameters: Iterable[nn.Parameter]) -> None:
        """Update these now, from the gradients of the optimizer's parameters, which are freed."""

    def check(self) -> dict[str, Any]:
        """Return facts for the audit."""


class HostParameters:
    """The parameters of the blocks of `context` with host copies; at first all are on the device, or at rest.

    Args:
        context: Its model.
        optimizer: Holds the host copies, and updates them.
        chunks: Layout of the blocks' parameters; none: each block is a unit.
        when_ready: Gradients are offloaded when ready. Otherwise another mechanism or the optimizer's step
            offloads them.
        copy: Copies a parameter's values from the host.
        members: Of each block, the offloaded parameters, which may be none; None: all.
        averages: Ranks are replicas, and average gradients before they are offloaded, a block at once.
        room_bytes: Bound of gradients in D2H copies at once; 0: one gradient.

    Raises:
        ApplyError: A block's parameter is used outside of it.
    """

    def __init__(
        self,
        context: Context,
        optimizer: HostCopies,
        chunks: Chunks | Pages | None = None,
        *,
        when_ready: bool = True,
        copy: Callable[[Tensor, Tensor], None] | None = None,
        members: list[list[nn.Parameter]] | None = None,
        averages: bool = False,
        room_bytes: int = 0,
    ) -> None:
        placement = context.placement
        self._optimizer, self._device = optimizer, context.device
        self._before_grad_use = context.events.before_grad_use
        self._modules = [context.model.get_submodule(name) for name in context.blocks]
        # Under FSDP2 a block's parameters are this rank's rows; the all-gather, not the module, reads them
        # first.
        self._gathered = GatheredBlocks(context) if is_gathered(context.model) else None
        _refuse_schedules(context.model)
        self._blocks = [list(block.parameters()) for block in self._modules] if members is None else members
        mine = [parameter for block in self._blocks for parameter in block]
        self._when_ready, self._copy = when_ready, copy
        self._outside = _outside(context.model, mine)
        self._were_at_rest = not context.placement.at_rest.isdisjoint(mine)
        self._hosts = self._host_values(context, mine)
        self._trained = {p: placement.optimizer_params[p] for p in mine if p in placement.optimizer_params}
        optimizer.leave_to_offloader(mine)
        self.blocks_on_host = sum(map(bool, self._blocks))
        if chunks is None:
            self._units = [[self._piece_of(context, each) for each in block] for block in self._blocks]
            self._of_block: Sequence[Sequence[int]] = [(index,) for index in range(len(self._blocks))]
        else:
            self._units, self._of_block = self._apply_layout(context, mine, chunks), chunks.of_block
        self._resident: set[int] = set(range(len(self._units)))
        self._prefetched: set[int] = set()  # since the compute stream last waited for the copy stream
        # D2H copies: (parameter, its gradient on the device, the host copy).
        self._in_flight: PendingUpdates[tuple[nn.Parameter, Tensor, Tensor]] = PendingUpdates(room_bytes)
        resident, offloaded_grads = (self._outside, list(self._trained.values())) if when_ready else ([], [])
        self._version_check = WatchedGradients(
            context, resident, offloaded_grads, "offload: {states: {kind: optimizer_cpu}}, or no clipping"
        )
        # Experts' gradients are averaged in the step only.
        self._shows = when_ready and not (
            placement.offload.averages == "experts" and placement.world_size > 1 and self._gathered is None
        )
        self._shown: set[nn.Parameter] = set()
        self._grad_hooks: list[RemovableHandle] = []
        self._reducer = self._reducer_of(context, set(mine)) if averages and when_ready else None
        self.loaded_bytes = 0
        context.undo.callback(self._load_all)
        if self._gathered is not None:
            for index in range(len(self._blocks)):
                self._load_before_gathers(self._gathered, index)

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        return self._device

    def _reducer_of(self, context: Context, offloaded: set[nn.Parameter]) -> GradientReducer | None:
        """Return the reducer of the blocks' gradients; None on one rank.

        The gradients of a block in `offloaded` are a bucket. The others are averaged in place: as sums of all
        micro-batches so far, which are equal on all ranks up to the last one.
        """
        group = dist.group.WORLD
        if context.placement.world_size == 1 or group is None:
            return None
        resident = [
            each
            for block in self._modules
            for each in block.parameters()
            if each.requires_grad and each not in offloaded
        ]
        buckets = [self._offloaded_when_ready(block) for block in reversed(self._blocks)]
        buckets += [[each] for each in resident]
        reducer = GradientReducer(group, buckets, self._on_averaged, context.device)
        for parameter in resident:
            context.undo.callback(parameter.register_post_accumulate_grad_hook(weakly(self._average)).remove)
        return reducer

    def _offloaded_when_ready(self, block: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return those of `block` whose gradients autograd accumulates and the offloader takes."""
        return [each for each in block if each in self._trained]

    def _host_values(self, context: Context, mine: list[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """Return the memory of the values of `mine` while they are freed on the device."""
        held = context.placement.optimizer_params
        # A trained parameter's host copy is the optimizer's own parameter, so an update needs no further
        # copy.
        return {p: held[p].detach() if p in held else host_values(context, p) for p in mine}

    def _piece_of(self, context: Context, parameter: nn.Parameter) -> Piece:
        """Return the memory of a parameter that is in no chunk."""
        freed = freed_memory(context, parameter, self._gathered)
        each = OffloadedParameter(parameter, self._hosts[parameter], freed, keeps=not self._when_ready)
        padded = 0 if self._gathered is None else self._gathered.rows_of(parameter).nbytes
        return Piece(each.device, each.host, padded_bytes=padded, of=(each,))

    def _apply_layout(
        self, context: Context, mine: list[nn.Parameter], chunks: Chunks | Pages
    ) -> list[list[Piece]]:
        """Move the parameters `mine` to their layout; return the units."""
        assert isinstance(chunks, Chunks)
        return [[piece] for piece in in_chunks(context, mine, self._hosts, chunks, self._gathered)]

    def _hook_block(self, context: Context, index: int) -> None:
        """Register the grad-ready hooks of the block's parameters."""
        for module in self._modules[index].modules() if self._gathered is not None else ():
            # A lambda: torch sets an attribute on the hook, which a bound method does not accept.
            module.register_state_dict_post_hook(lambda *args: self._into_state_dict(*args))
        for parameter in self._blocks[index]:
            if parameter.requires_grad and self._when_ready:
                handle = parameter.register_post_accumulate_grad_hook(weakly(self._on_grad_ready))
                context.undo.callback(handle.remove)
                self._grad_hooks.append(handle)

    def _load_before_gathers(self, gathered: GatheredBlocks, index: int) -> None:
        """Have FSDP2 load the rows of a block before the all-gather that reads them."""
        units = self._of_block[index]
        gathered.before_gathers(
            index,
            lambda: self._load_block(index),
            lambda: [piece.memory for unit in units for piece in self._units[unit]],
        )

    @contextmanager
    def _prefetching(self, units: Iterable[int]) -> Iterator[None]:
        """Return a context that loads `units` on the copy stream."""
        with transfer.prefetching(self._device):
            yield
        self._prefetched.update(units)

    def _wait_prefetched(self) -> None:
        """Have the compute stream wait for all prefetched units."""
        transfer.wait_prefetched(self._device)
        self._prefetched.clear()

    def _load_block(self, block: int) -> None:
        """Make the block's units resident for the compute stream, in whatever order blocks are called."""
        units = self._of_block[block]
        # A missing unit waits as well: its frame may be the target of a copy in flight.
        if self._prefetched and any(each in self._prefetched or each not in self._resident for each in units):
            self._wait_prefetched()
        self._load_units(units)

    def _load_units(self, units: Iterable[int]) -> None:
        for index in units:
            self._load_unit(index)

    @torch.no_grad()
    def _load_unit(self, index: int) -> None:
        if index in self._resident:
            return
        self._resident.add(index)
        self._load_pieces(self._units[index])

    def _load_pieces(self, pieces: Iterable[Piece]) -> None:
        every = list(pieces)
        self._adopt([each for piece in every for each in piece.of])
        hosts = [piece.host for piece in every]
        for part in groups(hosts):
            mine = every[part]
            allocate_together(mine)
            memories = [piece.memory for piece in mine]
            # A counted write would make backward raise for the saved weight, whose values have not changed.
            with _unsafe_preserve_version_counter(tuple(memories)):
                if self._copy is None:
                    copy_to_device_together(memories, hosts[part])
                else:
                    for memory, host in zip(memories, hosts[part], strict=True):
                        self._copy(memory.detach(), host)
        restore_together([each for piece in every for each in piece.of])
        self.loaded_bytes += sum([host.nbytes for host in hosts])

    def _adopt(self, parameters: Iterable[OffloadedParameter]) -> None:
        """Copy what the user has assigned to parameters between uses to their host copies."""
        adopt_together(parameters)

    def _offloaded(self) -> Iterator[OffloadedParameter]:
        return (each for unit in self._units for piece in unit for each in piece.of)

    def _free_units(self, units: Any) -> None:
        # A copy of `units`: callers pass `_resident` itself, which shrinks inside the loop.
        for index in list(units):
            if index in self._resident:
                self._resident.discard(index)
                free_together(self._units[index])
                for each in () if self._when_ready else self._units[index]:
                    each.of[0].expect_values(partial(self._load_unit, index))

    def _load_all(self) -> None:
        """Make all units resident when the config is undone, unless the parameters were at rest before."""
        if self._were_at_rest:
            for each in self._offloaded():
                each.settle()
            return
        for index, pieces in enumerate(self._units):
            # Memory, not `_resident`, decides: `apply` may have raised between the two.
            if any(piece.memory.untyped_storage().nbytes() == 0 for piece in pieces):
                self._resident.discard(index)
            self._load_unit(index)

    # -- gradients -------------------------------------------------------------------------------------------

    def _on_grad_ready(self, parameter: Any) -> None:
        """Offload the gradient, of replicas when its bucket is averaged; grad-ready hook."""
        if torch.is_grad_enabled():  # backward with `create_graph`
            with torch.no_grad():
                self._on_grad_ready(parameter)
        else:
            if self._shown and parameter in self._shown:
                self._add_to_shown(parameter)
            elif parameter.grad is None:
                pass  # the user's hook has used and freed it
            elif self._reducer is not None:
                self._reducer.add(parameter)
            else:
                self._offload_gradient(parameter)

    def _on_averaged(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Offload an averaged gradient; one of a parameter that is not offloaded remains on the device."""
        parameter.grad = gradient
        del gradient
        if parameter in self._trained:
            self._offload_gradient(parameter)

    def _offload_gradient(self, parameter: nn.Parameter) -> None:
        """Start the D2H copy of the gradient of `parameter`, which is averaged."""
        assert parameter.grad is not None
        # `_in_flight` has the only reference, so the gradient is freed when its copy has finished.
        source, parameter.grad = parameter.grad, None
        self._start_copy(parameter, source)

    def _start_copy(self, parameter: nn.Parameter, source: Tensor) -> None:
        """Start the D2H copy of the gradient `source`, after enough earlier copies have finished."""
        here = local(source)
        n_bytes = here.nbytes
        self._finish_and_sum(self._in_flight.make_room(n_bytes))
        (host,) = to_host_together([here])
        self._in_flight.put((parameter, source, host), n_bytes)

    def _average(self, parameter: nn.Parameter) -> None:
        """Average the gradient of a parameter that is not offloaded, if ranks are replicas."""
        if self._reducer is not None:
            with without_grad():
                self._reducer.add(parameter)

    def _emit_grad_use(self, parameters: Iterable[nn.Parameter]) -> None:
        """Notify listeners of gradients that are used, and freed, inside backward."""
        for parameter in parameters:
            if parameter in self._trained and (gradient := self._trained[parameter].grad) is not None:
                self._before_grad_use.emit(parameter, gradient)

    @torch.no_grad()
    def _finish_copies(self, keep: int = 0) -> None:
        """Wait for the D2H copies of all gradients but the newest `keep`, and add them to their sums."""
        self._finish_and_sum(self._in_flight.drain(keep))

    def _finish_and_sum(self, copies: Iterator[tuple[nn.Parameter, Tensor, Tensor]]) -> None:
        for copy in copies:
            parameter, source, host = copy
            transfer.finish(host)
            # The last references: the device memory is free before the host adds, as the pass predicts.
            del source, copy
            self._add_to_sum(parameter, host)

    def _add_to_sum(self, parameter: nn.Parameter, host: Tensor) -> None:
        """Add a gradient that is on the host to the sum of micro-batches."""
        add_gradient(self._trained[parameter], host)

    def _abandon_gradients(self) -> None:
        """Drop gradients in D2H copies: their backward, or the step, has raised."""
        # Awaited, not forgotten: the copy engine still writes this pinned memory, which is reused next.
        for _, _, host in self._in_flight.drain():
            transfer.abandon(host)
        self._version_check.forget()
        if self._reducer is not None:
            self._reducer.abandon()

    def _finish_averages(self) -> int:
        """Average the remaining buckets at the end of backward; return the number of missing gradients."""
        return 0 if self._reducer is None else len(self._reducer.finish())

    def _show_gradients(self, lacking: int) -> None:
        """Show the offloaded gradients to the user at the end of backward.

        A step that has used some inside backward cannot follow a change of the others, nor one whose ranks
        average them later: their versions are noted, so that changes are found.

        Args:
            lacking: Number of gradients that this rank lacks.

        Raises:
            ApplyError: This rank has skipped parameters, which other ranks average.
        """
        if lacking:
            raise refusals.not_averaged(lacking)
        if self._shows:
            for each in self._offloaded():
                held = self._trained.get(each.parameter)
                if held is not None and own_grad(held) is not None:
                    self._show_gradient(each.parameter)
        if not self._shows or self._version_check.are_used:
            self._version_check.note()

    def _take_gradients(self) -> None:
        """Show the gradients no longer: the host sums are what the user has made of them."""
        while self._shown:
            self._take_gradient(self._shown.pop())

    def _show_gradient(self, parameter: nn.Parameter) -> None:
        show_grad_of(parameter, self._trained[parameter])
        self._shown.add(parameter)

    def _take_gradient(self, parameter: nn.Parameter) -> None:
        hide_grad_of(parameter)

    def _add_to_shown(self, parameter: nn.Parameter) -> None:
        """Add a gradient to the sum that is shown: of a penalty on a weight between uses, on the host."""
        gradient = own_grad(parameter)
        set_own_grad(parameter, None)
        self._take_gradient(parameter)
        if gradient is not None:
            self._add_at_once(parameter, local(gradient))
        self._show_gradient(parameter)

    def _add_at_once(self, parameter: nn.Parameter, host: Tensor) -> None:
        """Add a gradient that is on the host to the sum, which is complete when this returns."""
        self._add_to_sum(parameter, host)

    def _step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Free all units before the weights change, and take what the user has made of the gradients."""
        self._take_gradients()
        # Before the update: it changes the host copies, and a unit that is still resident would be used as it
        # was.
        self._free_units(list(self._resident))
        self._adopt(self._offloaded())
        self._version_check.require_unchanged()
        self._version_check.forget()

    # -- checkpoints -----------------------------------------------------------------------------------------

    def _into_state_dict(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Put rows into a state dict as FSDP2 shows them, on the mesh's device."""
        for name, parameter in module.named_parameters(recurse=False):
            if prefix + name in state and parameter in self._hosts:
                state[prefix + name] = sharded_like(parameter, self._hosts[parameter])

    def _resident_bytes(self) -> int:
        """Return the bytes of the blocks' parameters that are on the device."""
        return sum(piece.memory.untyped_storage().nbytes() for unit in self._units for piece in unit)


def _refuse_schedules(model: nn.Module) -> None:
    """Refuse a model whose forward a schedule replaces: module hooks of its blocks would never run."""
    owner = getattr(vars(model).get("forward"), "__self__", None)
    if isinstance(owner, ReplacedForward):
        raise ApplyError(
            "A schedule replaces the model's code, so blocks are not called and cannot be loaded before use.",
            fix="recompute: {kind: full}",
            code="MT364",
        )


def _outside(model: nn.Module, mine: list[nn.Parameter]) -> list[nn.Parameter]:
    """Return the trained parameters outside of the blocks.

    Raises:
        ApplyError: A block's parameter is used outside of it as well, or shares memory.
    """
    # `parameters()` reports a shared parameter once, so owners are counted module by module.
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    inside = {id(parameter) for parameter in mine}
    if len(inside) != len(mine) or any(owners[id(parameter)] > 1 for parameter in mine):
        raise ApplyError(
            "A parameter of a block is shared with another module, so it cannot be offloaded with its block.",
            fix="offload: {states: {kind: optimizer_cpu}}",
            code="MT364",
        )
    refuse_shared_memory(model, mine)
    return [p for p in model.parameters() if p.requires_grad and id(p) not in inside]


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
            f"{name} shares its storage with another tensor, so it cannot be offloaded.",
            fix="offload: {states: {kind: optimizer_cpu}}",
            code="MT364",
        )


def host_copy(parameter: nn.Parameter) -> Tensor:
    """Return a copy of `parameter` in host memory."""
    host = to_host_now(local(parameter))
    mark(host, HOST)
    return host


class ParameterOffloader(HostParameters):
    """Offloads the blocks' parameters of `context` as a residency lists.

    Args:
        context: Its model; hooks are registered on its blocks and their parameters.
        residency: Units to free and load at each moment.
        optimizer: Holds the host copies, and updates them.
        chunks: Layout of the blocks' parameters; none: each block is a unit.
        early: Blocks are updated in backward, natively.
        when_ready: As in `HostParameters`.
        copy: As there.
        members: As there.
        room_bytes: As there.

    Raises:
        ApplyError: A block's parameter is used outside of it.
    """

    def __init__(
        self,
        context: Context,
        residency: Residency,
        optimizer: HostCopies,
        *,
        chunks: Chunks | Pages | None = None,
        early: bool = True,
        when_ready: bool = True,
        copy: Callable[[Tensor, Tensor], None] | None = None,
        members: list[list[nn.Parameter]] | None = None,
        room_bytes: int = 0,
    ) -> None:
        # DDP's runner skips the blocks' gradients, which are averaged here before they are offloaded.
        averages = context.placement.offload.averages == "blocks" and context.loop.runner is not None
        super().__init__(
            context,
            optimizer,
            chunks,
            when_ready=when_ready,
            copy=copy,
            members=members,
            averages=averages,
            room_bytes=room_bytes,
        )
        if (
            when_ready
            and members is None
            and context.placement.world_size > 1
            and self._gathered is None
            and not averages
        ):
            raise ApplyError(
                "Gradients that are offloaded when ready would not be averaged among ranks.",
                fix="sharding: {states: {kind: fsdp}}",
                code="MT364",
            )
        self._residency = residency
        self._moment = self._end = len(residency.drops) - 1
        self._uses = order_of_use(len(self._blocks), gathered=self._gathered is not None)
        self._is_last = False
        self._backward_end = BackwardEnd(
            self._backward_ends, self._backward_raised, is_last=self._gathered is not None
        )
        self._early_updates = EarlyUpdates(context, "block")
        self._updated_in_step = self._kept_for_step()
        for index in range(len(self._modules)):
            self._hook_moments(context, index)
        for parameter in self._outside if when_ready else ():
            context.undo.callback(
                parameter.register_post_accumulate_grad_hook(weakly(self._on_outside_grad_ready)).remove
            )
        # DDP's `no_sync`, or another mechanism's context, runs inside this one.
        self._outer_sync = context.loop.sync
        if early:
            context.loop.sync = self.sync
        before_step(context.optimizer, self._step_begins)
        context.events.weights_loaded.subscribe(self._backward_end.settle)
        # Last: the steps above read and copy values on the device.
        self._free_units(list(self._resident))

    def _kept_for_step(self) -> int | None:
        """Return the block that only `optimizer.step()` updates, where all trained parameters are in blocks.

        Without any gradient left, changes of gradients between backward and the step would be lost unseen.
        The block is the last one of backward that has gradients: its update has little to overlap with.
        """
        trained = (
            index for index, block in enumerate(self._blocks) if not self._trained.keys().isdisjoint(block)
        )
        return None if self._outside else next(trained, None)

    def _hook_moments(self, context: Context, index: int) -> None:
        """Register the module hooks that begin the block's moments."""
        # Before FSDP2's own hooks: its all-gather reads the rows that a moment loads.
        block, first = self._modules[index], self._gathered is not None
        block.register_forward_pre_hook(UncopiedHook(partial(self._before_forward, index)), prepend=first)
        block.register_forward_hook(
            UncopiedHook(
                lambda module, args, output: self._after_forward(index, args, output), with_args=True
            ),
            prepend=first,
        )
        self._hook_block(context, index)

    @contextmanager
    def sync(self, last: bool) -> Iterator[None]:
        """Return the context of a micro-batch; in the last one's backward blocks are updated.

        Raises:
            ApplyError: A backward with updates has raised, and no state dict has been loaded since.
        """
        # A micro-batch after a backward that raised: its gradients are dropped before new ones are added.
        self._backward_end.settle()
        self._early_updates.step_begins()
        self._is_last = last
        try:
            with nullcontext() if self._outer_sync is None else self._outer_sync(last):
                yield
        finally:
            self._is_last = False

    # -- moments ---------------------------------------------------------------------------------------------

    def _before_forward(self, index: int) -> None:
        """Begin the block's moment; without autograd only load it."""
        if torch.is_grad_enabled():
            self._begin_moment(index)
        else:
            self._load_block(index)

    def _after_forward(self, index: int, args: Any, output: Any) -> None:
        """Hook the block's outputs, so that its moment of backward begins when one has its gradient."""
        if not torch.is_grad_enabled():
            # Without autograd (evaluation) no backward follows, and no moment begins.
            self._free_units(self._of_block[index])
            return
        moment = self._end - 1 - index
        # An input that is returned as it is has its gradient when the previous block's backward begins, not
        # this one's.
        given = {id(each) for each in tree_leaves(args)}
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad and id(tensor) not in given:
                # A gradient of an output reaches a tensor hook before the block's own backward runs, so the
                # weights are loaded in time.
                tensor.register_hook(lambda _: self._backward(moment))

    def _backward(self, moment: int) -> None:
        if torch.is_grad_enabled():
            raise ApplyError(
                "A backward ran with create_graph=True, and blocks' weights are freed after their backward.",
                evidence="A second backward would read weights that are not on the device.",
                fix="offload: {states: {kind: zero_offload}}, under which weights stay on the device",
                code="MT364",
            )
        # Again in every moment: `expect` queues one callback per backward and ignores the later calls.
        self._backward_end.expect()
        if self._moment == self._end:
            self._take_gradients()  # of an earlier backward through the same forward (`retain_graph`)
        self._begin_moment(moment)

    def _on_outside_grad_ready(self, parameter: Tensor) -> None:
        """Expect the end of a backward that may run no block (a penalty on the head); grad-ready hook."""
        self._backward_end.expect()

    def _backward_ends(self) -> None:
        """Begin the last moment, which frees the first block, and note gradients' versions."""
        lacking = self._finish_averages()
        self._begin_moment(self._end)
        self._show_gradients(lacking)
        self._early_updates.backward_ends()

    def _begin_moment(self, moment: int) -> None:
        """Begin a moment: finish copies, free, load, prefetch, update."""
        self._backward_end.settle()
        # Inside backward (recompute of the first block) gradients are changing anyway.
        if not self._backward_end.is_near:
            self._take_gradients()
            if moment == 0:
                run_last(self._grad_hooks)
                self._version_check.require_unchanged()
        if moment == self._moment:
            # The same block again. If the forward that began this moment has raised, its units are freed.
            self._load_used(moment)
            return
        before, self._moment = self._moment, moment
        # Gradients first, then weights, then loads: each frees memory that the next one may reuse.
        self._finish_copies_before(moment)
        # An unexpected order of calls frees everything, so the residency holds again from here.
        self._free_units(self._resident if before + 1 != moment else self._residency.drops[moment])
        # The compute stream reads the units that were prefetched on the copy stream.
        self._wait_prefetched()
        # A hit in most moments; the first block of a step, and a miss, are loaded on the compute stream.
        self._load_used(moment)
        units = self._residency.loads[moment]
        with self._prefetching(units):
            self._prefetch(units)
        # Backward of block b is moment 2 * blocks - 1 - b; all of its gradients are ready when the next
        # begins.
        block = self._end - 1 - before
        is_used = self._is_last and len(self._blocks) <= before < self._end and block != self._updated_in_step
        self._update_after(moment, block if is_used else None)

    def _load_used(self, moment: int) -> None:
        """Load the block that the moment uses, if any."""
        if moment < self._end and (used := self._uses[moment]) >= 0:
            self._load_block(used)

    def _finish_copies_before(self, moment: int) -> None:
        """Wait for D2H copies that must end before `moment`; here all of them."""
        self._finish_copies()

    def _prefetch(self, units: Units) -> None:
        """Load units on the copy stream."""
        self._load_units(units)

    def _update_after(self, moment: int, block: int | None) -> None:
        """Update `block`, whose gradients were all ready in the moment before; None: no block is complete."""
        if block is not None:
            self._emit_grad_use(self._blocks[block])
            # Recorded before the update: if it raises half way, the step counts as one that cannot be undone.
            self._early_updates.add([block], self._with_gradients(block))
            self._optimizer.update(self._blocks[block])

    def _with_gradients(self, block: int) -> list[nn.Parameter]:
        """Return the parameters of `block` whose gradients have arrived."""
        trained = self._trained
        return [each for each in self._blocks[block] if each in trained and trained[each].grad is not None]

    def _on_grad_ready(self, parameter: Any) -> None:
        self._early_updates.require_first(parameter)
        super()._on_grad_ready(parameter)

    # -- a backward that raised ------------------------------------------------------------------------------

    def _backward_raised(self) -> None:
        """Drop gradients of a backward that raised; refuse the step if it has updated blocks."""
        self._early_updates.raised()
        self._abandon_gradients()

    def _step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._backward_end.settle()
        self._early_updates.step_goes_on()
        super()._step_begins(optimizer, args, kwargs)
        self._early_updates.forget()

    # -- audit -----------------------------------------------------------------------------------------------

    def check(self) -> dict[str, Any]:
        """Return facts about the blocks' parameters.

        Raises:
            ApplyError: Some are on the device between two steps.
        """
        left = self._resident_bytes()
        if left and self._moment == self._end:
            raise refusals.error_of(refusals.resident_between_steps(left))
        facts = self._optimizer.check()
        return facts | {"blocks_on_host": self.blocks_on_host, "loaded_bytes": self.loaded_bytes}
