"""Parameters of the blocks on the host, on the device only while a residency says so; gradients leave as they land.

What comes and goes is a *unit*: a block, a chunk that holds parameters of one or several blocks side by side, or a page.

Six rules, which the pass `passes.stream` follows op by op:

Rule 1. A moment begins when a block is called, or when backward has the gradient of what a block returned; the last one of a step
        when backward ends. A block's use ends where the next moment begins.
Rule 2. When a moment begins, the gradient on its way is finished, then units are let go, then others come in, then the block of
        the moment before is updated. So its update runs beside the device's work on the next block.
Rule 3. A unit's memory is given back and taken anew in place (the storage is resized, as FSDP2 does), so what autograd saved
        of a weight finds the values that it saved: they do not change within a step. A page's memory is a frame, which stays:
        what comes to it takes the place of another page, and each page always comes to the same one.
Rule 4. A gradient's copy to the host starts when autograd has put it in place; the device lets go of it when the next one lands,
        or when the next moment begins. The host adds up micro-batches.
Rule 5. Updates in backward need to know that the micro-batch is the last one: `Tuned.step` or `Tuned.micro_batch` says so. In
        any other loop all blocks are updated in `optimizer.step()`.
Rule 6. What is not there when it is asked for comes in late: a loop that uses blocks in another order is slower, not wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._pytree import tree_leaves

import memtune.ops  # noqa: F401  (defines torch.ops.memtune)
from memtune.chunks import Chunks
from memtune.errors import ApplyError
from memtune.pages import Pages
from memtune.residency import Residency
from memtune.runtime import transfer
from memtune.runtime.chunks import Piece, in_chunks
from memtune.runtime.context import Context
from memtune.runtime.host_optimizer import HostOptimizer, add_gradient, before_step, to_host_now
from memtune.runtime.pages import InFrames, in_frames
from memtune.runtime.replaced_forward import ReplacedForward
from memtune.runtime.tiers import HOST, mark


class ParameterStore:
    """Makes the blocks' parameters of `context` come and go.

    Args:
        context: Its model; hooks are put on its blocks and their parameters.
        residency: Which unit is there when.
        optimizer: Holds the host copies, and updates them.
        chunks: Where the blocks' parameters lie; none: each block is a unit.
        early: Blocks are updated in backward, natively.
        stays: Parameters of blocks that neither come nor go.

    Raises:
        ApplyError: A block's parameter is used outside of it, or nothing outside of the blocks is trained.
    """

    def __init__(
        self,
        context: Context,
        residency: Residency,
        optimizer: HostOptimizer,
        *,
        chunks: Chunks | Pages | None = None,
        early: bool = True,
        stays: Collection[nn.Parameter] = (),
    ) -> None:
        self._residency, self._optimizer, self._device = residency, optimizer, context.device
        blocks = [context.model.get_submodule(name) for name in context.blocks]
        _refuse_schedules(context.model)
        self._blocks = [[p for p in block.parameters() if p not in stays] for block in blocks]
        mine = [parameter for block in self._blocks for parameter in block]
        self._outside = _outside(context.model, mine)
        self._hosts = {p: context.represented[p].detach() if p in context.represented else _copy_of(p) for p in mine}
        self._trained = {p: context.represented[p] for p in mine if p in context.represented}
        optimizer.leave_down(mine)
        self._in_frames: InFrames | None = None
        self._units: list[list[Piece]] = []
        self._in_frame: dict[int, int] = {}  # the page that came last to each frame
        if chunks is None:
            self._units = [[Piece(parameter, self._hosts[parameter]) for parameter in block] for block in self._blocks]
        elif isinstance(chunks, Pages):
            self._take(in_frames(context, mine, self._hosts, chunks))
        else:
            self._units = [[piece] for piece in in_chunks(context, mine, self._hosts, chunks)]
        self._of_block = [(index,) for index in range(len(blocks))] if chunks is None else chunks.of_block
        self._there: set[int] = set(range(len(self._units)))  # of pages none
        self._moment = self._end = len(residency.drops) - 1
        self._on_the_way: tuple[nn.Parameter, Tensor, Tensor] | None = None
        self._is_last = False
        self._queued = False
        self._versions: dict[nn.Parameter, int] = {}
        self.loaded_bytes = 0
        context.undo.callback(self._bring_all)
        for index, block in enumerate(blocks):
            self._watch(context, index, block)
        if early:
            context.sync = self.sync
        before_step(context.optimizer, self._step_begins)
        self._release(list(self._there))

    def _take(self, found: InFrames) -> None:
        self._in_frames, self._hosts = found, found.hosts

    def double(self) -> dict[nn.Parameter, Tensor]:
        """Second host memory for the pages, which `swap` changes over: each trained parameter's place there, by its host copy."""
        assert self._in_frames is not None
        self._spare = self._in_frames.twin()
        return {held: self._spare.hosts[parameter] for parameter, held in self._trained.items()}

    def swap(self) -> None:
        """From now on pages come from the other memory."""
        assert self._in_frames is not None
        self._there.clear()
        spare, self._spare = self._spare, self._in_frames
        self._take(spare)

    def _watch(self, context: Context, index: int, block: nn.Module) -> None:
        block.register_forward_pre_hook(
            lambda module, args: self._begin(index) if torch.is_grad_enabled() else self._fetch_block(index)
        )
        block.register_forward_hook(lambda module, args, output: self._returned(index, output))
        for parameter in self._blocks[index]:
            if parameter.requires_grad:
                context.undo.callback(parameter.register_post_accumulate_grad_hook(self._landed).remove)
        block.register_state_dict_post_hook(lambda *seen: self._into_state_dict(*seen))  # torch marks the function
        block.register_load_state_dict_pre_hook(lambda module, *_: self._fetch_block(index))
        block.register_load_state_dict_post_hook(lambda module, _: self._loaded(index))

    @contextmanager
    def sync(self, last: bool) -> Iterator[None]:
        """The context of a micro-batch: after the last one's backward each block is updated (Rule 5)."""
        self._is_last = last
        try:
            yield
        finally:
            self._is_last = False

    # -- moments ---------------------------------------------------------------------------------------------------------

    def _returned(self, index: int, output: Any) -> None:
        if not torch.is_grad_enabled():
            self._release(self._of_block[index])
            return
        moment = self._end - 1 - index
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: self._backward(moment))

    def _backward(self, moment: int) -> None:
        if not self._queued:
            self._queued = True
            Variable._execution_engine.queue_callback(self._backward_ends)
        self._begin(moment)

    def _backward_ends(self) -> None:
        self._queued = False
        self._begin(self._end)
        self._versions = {p: p.grad._version for p in self._outside if p.grad is not None}

    def _begin(self, moment: int) -> None:
        """Rules 1 and 2."""
        if moment == self._moment:
            return
        before, self._moment = self._moment, moment
        self._arrive()
        blocks = len(self._blocks)
        self._release(self._there if before + 1 != moment else self._residency.drops[moment])
        transfer.caught_up(self._device)
        if moment < self._end:
            self._fetch_block(moment if moment < blocks else self._end - 1 - moment)  # the first that comes in, or Rule 6
        with transfer.ahead(self._device):
            self._fetch(self._residency.loads[moment])
        if self._is_last and blocks <= before < self._end:
            self._optimizer.update(self._blocks[self._end - 1 - before])

    def _fetch_block(self, block: int) -> None:
        self._fetch(self._of_block[block])

    @torch.no_grad()
    def _fetch(self, units: Sequence[int]) -> None:
        missing = [unit for unit in units if unit not in self._there]
        for piece in self._pieces(missing):
            piece.take()
            with _unsafe_preserve_version_counter(piece.there):  # Rule 3
                torch.ops.memtune.copy_to_device_(piece.there.detach(), piece.host)
            self.loaded_bytes += piece.host.nbytes
        self._there.update(missing)

    def _pieces(self, units: list[int]) -> list[Piece]:
        if self._in_frames is None:
            return [piece for unit in units for piece in self._units[unit]]
        for page in units:
            frame = self._in_frames.pages.frame[page]
            self._there.discard(self._in_frame.get(frame, page))
            self._in_frame[frame] = page
        return self._in_frames.pieces(units)

    def _release(self, units: Any) -> None:
        for index in list(units):
            if index in self._there:
                self._there.discard(index)
                for piece in self._units[index] if self._in_frames is None else ():
                    piece.give_back()

    def _bring_all(self) -> None:
        for index, pieces in enumerate(self._units):  # frames are not enough for all pages
            if any(piece.there.untyped_storage().nbytes() == 0 for piece in pieces):
                self._there.discard(index)
        self._fetch(range(len(self._units)))

    # -- gradients -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _landed(self, parameter: Tensor) -> None:
        """Rule 4."""
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        self._arrive()
        source, parameter.grad = parameter.grad, None
        host = torch.ops.memtune.to_host(source)
        mark(host, HOST)
        self._on_the_way = parameter, source, host

    @torch.no_grad()
    def _arrive(self) -> None:
        if self._on_the_way is None:
            return
        (parameter, source, host), self._on_the_way = self._on_the_way, None
        transfer.finish(host)
        del source
        add_gradient(self._trained[parameter], host)

    def _step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """All are let go before the weights change, and gradients must be those that backward left."""
        self._release(list(self._there))
        changed = [p for p, version in self._versions.items() if p.grad is not None and p.grad._version != version]
        self._versions = {}
        if changed:
            raise ApplyError(
                f"{len(changed)} gradients were changed between backward and the optimizer's step, as clipping by norm does.",
                evidence="Gradients of the blocks have left the device by then, so their part of the norm is missing.",
                fix="offload: {states: {kind: optimizer_cpu}}, or no clipping", code="MT364",
            )  # fmt: skip

    # -- checkpoints and proof -------------------------------------------------------------------------------------------

    def _into_state_dict(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if prefix + name in state and parameter in self._hosts:
                state[prefix + name] = self._hosts[parameter]

    @torch.no_grad()
    def _loaded(self, index: int) -> None:
        for parameter in self._blocks[index]:
            self._hosts[parameter].copy_(parameter)
        self._release(self._of_block[index])

    def check(self) -> dict[str, Any]:
        """Where the blocks' parameters are.

        Raises:
            ApplyError: Some are on the device between two steps.
        """
        left = sum(piece.there.untyped_storage().nbytes() for unit in self._units for piece in unit)
        if self._in_frames is not None:
            frames = self._in_frames.frames.untyped_storage()._cdata
            left = sum(p.nbytes for p in self._hosts if p.untyped_storage()._cdata != frames)
        if left and self._moment == self._end:
            raise ApplyError(f"{left} bytes of the blocks' parameters are on the device between two steps.", code="MT309")
        facts = self._optimizer.check()
        return facts | {"blocks_on_host": len(self._blocks), "loaded_bytes": self.loaded_bytes}


def _refuse_schedules(model: nn.Module) -> None:
    owner = getattr(vars(model).get("forward"), "__self__", None)
    if isinstance(owner, ReplacedForward):
        raise ApplyError(
            "A schedule takes the place of the model's code, so its blocks are not called and cannot come and go.",
            fix="recompute: {kind: full}", code="MT364",
        )  # fmt: skip


def _outside(model: nn.Module, mine: list[nn.Parameter]) -> list[nn.Parameter]:
    """Trained parameters that stay on the device.

    Raises:
        ApplyError: There are none, or a block's parameter is used elsewhere as well.
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
    outside = [p for p in model.parameters() if p.requires_grad and id(p) not in inside]
    if not outside:
        raise ApplyError(
            "Nothing outside of the blocks is trained, so clipping by norm could not be noticed.",
            fix="offload: {states: {kind: optimizer_cpu}}", code="MT364",
        )  # fmt: skip
    return outside


def _copy_of(parameter: nn.Parameter) -> Tensor:
    host = to_host_now(parameter)
    mark(host, HOST)
    return host
