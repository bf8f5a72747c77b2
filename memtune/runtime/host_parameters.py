"""Blocks' parameters on the host: brought in, let go, and their gradients sent down. Who does so when is a subclass's business.

Memory is given back and taken anew in place, see Rule 3 of `runtime.store`. A unit is what comes and goes: a block, or a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.tensor import DTensor

import memtune.ops  # noqa: F401  (defines torch.ops.memtune)
from memtune.chunks import Chunks
from memtune.early_updates import Waiting
from memtune.errors import ApplyError
from memtune.pages import Pages
from memtune.runtime import transfer
from memtune.runtime.average_landed import require_all_averaged
from memtune.runtime.chunks import Piece, in_chunks
from memtune.runtime.context import Context
from memtune.runtime.gathered_rows import GatheredBlocks, divided_like, is_gathered
from memtune.runtime.hooks import weakly
from memtune.runtime.host_copies import to_host_now
from memtune.runtime.host_optimizer import add_gradient
from memtune.runtime.let_go import guard_module
from memtune.runtime.replaced_forward import ReplacedForward
from memtune.runtime.tiers import HOST, mark
from memtune.runtime.tree import local
from memtune.runtime.watched_gradients import WatchedGradients


class HostCopies(Protocol):
    """What holds the host copies of parameters that come and go, and updates them."""

    def leave_down(self, parameters: Iterable[nn.Parameter]) -> None:
        """Somebody else brings these up when they are used, and their gradients down."""

    def update(self, parameters: Iterable[nn.Parameter]) -> None:
        """Update these now, from the gradients of what the optimizer holds in their place, which are let go."""

    def check(self) -> dict[str, Any]:
        """Facts for the audit."""


class HostParameters:
    """The parameters of the blocks of `context` with a copy of each in host memory; all are on the device at first.

    Args:
        context: Its model.
        optimizer: Holds the host copies, and updates them.
        chunks: Where the blocks' parameters lie; none: each block is a unit.
        only: Blocks whose parameters come and go; those of others stay. None: all.
        landing: Gradients leave as they land. Else they are another mechanism's, and the optimizer's step takes them down.
        copy: How a parameter's values come in from the host.
        members: Of each block, what comes and goes; none: all its parameters.
        averages: Ranks that have all weights average each gradient before it leaves.
        room_bytes: Of gradients on their way at once; 0: one.

    Raises:
        ApplyError: A block's parameter is used outside of it, or gradients leave and nothing outside of the blocks is trained.
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
        self._group = dist.group.WORLD if averages and context.ranks > 1 else None
        self._optimizer, self._device = optimizer, context.device
        self._before_use = context.before_use
        self._modules = [context.model.get_submodule(name) for name in context.blocks]
        self._gathered = GatheredBlocks(context) if is_gathered(context.model) else None
        _refuse_schedules(context.model)
        self._blocks = [list(block.parameters()) for block in self._modules] if members is None else members
        mine = [parameter for block in self._blocks for parameter in block]
        self._landing, self._copy = landing, copy or _copied
        self._outside = _outside(context.model, mine, landing)
        self._hosts = self._kept(context, mine)
        self._trained = {p: context.represented[p] for p in mine if p in context.represented}
        goes = [block if only is None or index in only else [] for index, block in enumerate(self._blocks)]
        optimizer.leave_down(parameter for block in goes for parameter in block)
        self.blocks_on_host = sum(map(bool, goes))
        if chunks is None:
            self._units = [[self._piece(parameter) for parameter in block] for block in goes]
            self._of_block: Sequence[Sequence[int]] = [(index,) for index in range(len(self._blocks))]
        else:
            self._units, self._of_block = self._put_into(context, mine, chunks), chunks.of_block
        self._there: set[int] = set(range(len(self._units)))
        self._on_the_way: Waiting[tuple[nn.Parameter, Tensor, Tensor]] = Waiting(room_bytes)
        stay, leave = (self._outside, list(self._trained.values())) if landing else ([], [])
        self._watched = WatchedGradients(context, stay, leave, "offload: {states: {kind: optimizer_cpu}}, or no clipping")
        self._averaged: set[nn.Parameter] = set()
        self._averaged_there = self._stays(context, set(mine)) if self._group is not None and landing else []
        self._loading: dict[int, nn.Module] = {}  # by block: itself or the part of it that a state dict is loaded into
        self.loaded_bytes = 0
        context.undo.callback(self._bring_all)
        if self._gathered is not None:
            for index in range(len(self._blocks)):
                self._bring_for_gathers(self._gathered, index)

    def _stays(self, context: Context, leave: set[nn.Parameter]) -> list[nn.Parameter]:
        """What is trained of the blocks and not among `leave`: replicas average its gradients where they are."""
        found = [each for block in self._modules for each in block.parameters() if each.requires_grad and each not in leave]
        for parameter in found:
            context.undo.callback(parameter.register_post_accumulate_grad_hook(weakly(self._average)).remove)
        return found

    def _kept(self, context: Context, mine: list[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """Where the values of the parameters `mine` are while they are not on the device."""
        return {p: context.represented[p].detach() if p in context.represented else copy_of(p) for p in mine}

    def _piece(self, parameter: nn.Parameter) -> Piece:
        """What comes and goes of a parameter that is in no chunk."""
        host = self._hosts[parameter]
        if self._gathered is None:
            return Piece(parameter.detach(), host, of=(parameter,))
        rows = local(parameter.detach())
        return Piece(rows, host, padded_bytes=self._gathered.rows_of(parameter).nbytes, of=(parameter,))

    def _put_into(self, context: Context, mine: list[nn.Parameter], chunks: Chunks | Pages) -> list[list[Piece]]:
        """Move the parameters `mine` to where they lie together; returns the units."""
        assert isinstance(chunks, Chunks)
        return [[piece] for piece in in_chunks(context, mine, self._hosts, chunks, self._gathered)]

    def _watch_block(self, context: Context, index: int) -> None:
        """Gradients of the block land here, and checkpoints find its weights."""
        block = self._modules[index]
        for module in block.modules():
            guard_module(module)
            module.register_state_dict_post_hook(lambda *seen: self._into_state_dict(*seen))  # torch marks the function
            module.register_load_state_dict_pre_hook(lambda module, *_: self._load_begins(index, module))
            module.register_load_state_dict_post_hook(lambda module, _: self._load_ends(index, module))
        if index == 0:
            guard_module(context.model)
        for parameter in self._blocks[index]:
            if parameter.requires_grad and self._landing:
                context.undo.callback(parameter.register_post_accumulate_grad_hook(weakly(self._landed)).remove)

    def _bring_for_gathers(self, gathered: GatheredBlocks, index: int) -> None:
        units = self._of_block[index]
        gathered.before_gathers(
            index, lambda: self._fetch_units(units), lambda: [piece.there for unit in units for piece in self._units[unit]]
        )

    def _fetch_block(self, block: int) -> None:
        self._fetch_units(self._of_block[block])

    def _fetch_units(self, units: Iterable[int]) -> None:
        for index in units:
            self._fetch(index)

    def _fetch_whole(self, block: int) -> None:
        """All of it, since new values are loaded."""
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

    # -- gradients -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _landed(self, parameter: Tensor) -> None:
        """Rule 4."""
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
        """To whoever looks at gradients that are used, and let go, inside backward."""
        for parameter in parameters:
            if parameter in self._trained and (gradient := self._trained[parameter].grad) is not None:
                for look in self._before_use:
                    look(parameter, gradient)

    @torch.no_grad()
    def _arrive(self, keep: int = 0) -> None:
        """All gradients on their way but the newest `keep`."""
        self._arrive_all(self._on_the_way.rest(keep))

    def _arrive_all(self, turns: Iterator[tuple[nn.Parameter, Tensor, Tensor]]) -> None:
        for turn in turns:
            parameter, source, host = turn
            transfer.finish(host)
            del source, turn
            self._arrived(parameter, host)

    def _arrived(self, parameter: nn.Parameter, host: Tensor) -> None:
        """Its gradient is on the host, where micro-batches are added up."""
        add_gradient(self._trained[parameter], host)

    def _forget_landed(self) -> None:
        """A backward, or a step, has raised: what is on its way is part of no gradient."""
        for _, _, host in self._on_the_way.rest():
            transfer.abandon(host)
        self._watched.forget()
        self._averaged = set()

    def _note_versions(self) -> None:
        """Backward has ended: gradients that are changed from here on are noticed."""
        self._require_all_averaged()
        self._watched.note()

    def _require_all_averaged(self) -> None:
        averaged, self._averaged = self._averaged, set()
        if self._group is not None and self._landing:
            require_all_averaged([each for each in (*self._trained, *self._averaged_there) if each not in averaged])

    def _step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """All are let go before the weights change, and gradients must be those that backward left."""
        self._release(list(self._there))
        self._watched.require_unchanged()
        self._watched.forget()

    # -- checkpoints -----------------------------------------------------------------------------------------------------

    def _into_state_dict(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            if prefix + name in state and parameter in self._hosts:
                state[prefix + name] = divided_like(parameter, self._hosts[parameter])

    def _load_begins(self, index: int, module: nn.Module) -> None:
        self._loading.setdefault(index, module)
        self._fetch_whole(index)

    def _load_ends(self, index: int, module: nn.Module) -> None:
        """Of the block, or the part of it that is loaded, and before that of each module within."""
        self._keep([each for each in module._parameters.values() if each is not None and each in self._hosts])
        if self._loading.get(index) is module:
            del self._loading[index]
            self._release(self._of_block[index])

    @torch.no_grad()
    def _keep(self, loaded: list[nn.Parameter]) -> None:
        """These have new values on the device."""
        for parameter in loaded:
            self._hosts[parameter].copy_(local(parameter))

    def _left_bytes(self) -> int:
        """Bytes of the blocks' parameters that are on the device."""
        return sum(piece.there.untyped_storage().nbytes() for unit in self._units for piece in unit)


def _refuse_schedules(model: nn.Module) -> None:
    owner = getattr(vars(model).get("forward"), "__self__", None)
    if isinstance(owner, ReplacedForward):
        raise ApplyError(
            "A schedule takes the place of the model's code, so its blocks are not called and cannot come and go.",
            fix="recompute: {kind: full}", code="MT364",
        )  # fmt: skip


def _copied(there: Tensor, host: Tensor) -> None:
    torch.ops.memtune.copy_to_device_(there, host)


def _outside(model: nn.Module, mine: list[nn.Parameter], landing: bool) -> list[nn.Parameter]:
    """Trained parameters that stay on the device.

    Raises:
        ApplyError: A block's parameter is used elsewhere as well, or shares its memory, or with gradients that leave there are
            none.
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
            fix="offload: {states: {kind: optimizer_cpu}}", code="MT364",
        )  # fmt: skip
    refuse_shared_memory(model, mine)
    outside = [p for p in model.parameters() if p.requires_grad and id(p) not in inside]
    if landing and not outside:
        raise ApplyError(
            "Nothing outside of the blocks is trained, so clipping by norm could not be noticed.",
            fix="offload: {states: {kind: optimizer_cpu}}", code="MT364",
        )  # fmt: skip
    return outside


def refuse_shared_memory(model: nn.Module, mine: Iterable[nn.Parameter]) -> None:
    """Check that each of `mine`, parameters of `model`, fills its memory: what is given back and taken anew is all of it.

    Raises:
        ApplyError: One is part of a larger tensor, or several times the same memory; says which.
    """
    whole = [each for each in mine if not isinstance(each, DTensor)]  # a shard's memory is FSDP2's own
    wrong = {id(each) for each in whole if each.untyped_storage().nbytes() != each.nbytes}
    if wrong:
        name = next(name for name, each in model.named_parameters() if id(each) in wrong)
        raise ApplyError(
            f"{name} shares its memory with something else, so it cannot come and go.",
            fix="offload: {states: {kind: optimizer_cpu}}", code="MT364",
        )  # fmt: skip


def copy_of(parameter: nn.Parameter) -> Tensor:
    """A copy in host memory."""
    host = to_host_now(local(parameter))
    mark(host, HOST)
    return host
