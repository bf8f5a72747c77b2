"""Parameter offload: blocks are loaded before use and freed after it, gradients offloaded when ready.

An offloader is composed of parts with one idea each:

- which memory a unit has on the device and between uses: `block_units`, pages, experts (`Units`);
- how gradients reach the host: `block_gradients`;
- which blocks are updated before `optimizer.step()`, and when: `BlockUpdates`; without it, none;
- in which order: `ParameterOffloader` (a step is a sequence of moments, one for each use of a block in
  forward and in backward, and a `Residency` lists the units to free and to load at each), or packs
  (`offload.layer_major`).

Order of a moment (`ParameterOffloader._begin_moment`), which the pass `parameter_offload_pass` follows op by
op: wait for the gradients in D2H copies, free units, wait for the copy stream, load what the moment uses,
prefetch what the residency lists, update the block whose gradients are complete.

- A unit that is used but not resident is loaded synchronously, so any order of calls is correct.
- Each block is updated inside backward once `Tuned.step` or `Tuned.micro_batch` has announced the last
  micro-batch; in other loops `optimizer.step()` updates all. If nothing outside of the blocks is trained, it
  updates the last block of backward in every loop.
- With `Overlap` (STRONGHOLD, Sun et al. 2022, SC 22) gradients up to a block's bytes may be in D2H copies at
  once. Those of a block have all arrived when the moment after its own ends, or backward does; the block is
  then updated on a thread, within the bound of `PendingUpdates`, so the previous block's update has ended.
- Updates of deferred blocks start in `optimizer.step()`, which does not wait for them
  (`offload.optimizer.deferred_updates`); the next forward loads a block after its own update only. Between
  two steps the host holds gradients of these blocks, and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from memtune import refusals
from memtune.errors import ApplyError
from memtune.offload.core import room_bytes, set_own_grad
from memtune.offload.optimizer import HostOptimizer
from memtune.offload.parameters.block_gradients import BlockGradients
from memtune.offload.parameters.block_units import BlockUnits, OffloadedBlocks, Prefetched
from memtune.offload.parameters.moments_pass import Overlap
from memtune.program import Residency, order_of_use
from memtune.runtime import (
    BackwardEnd,
    BetweenGraphs,
    Context,
    EarlyUpdates,
    UncopiedHook,
    after_step,
    before_step,
    local,
    weakly,
)


class Units(Protocol):
    """Memory of the blocks' parameters, by units."""

    prefetched: Prefetched
    """Units in copies."""
    loaded_bytes: int
    """Since the start of training."""
    moment: int
    """The moment of the step that runs, or that ran last."""

    @property
    def resident(self) -> Collection[int]:
        """Units on the device."""

    @property
    def of_block(self) -> Sequence[tuple[int, ...]]:
        """The units of each block."""

    def load_block(self, block: int) -> None:
        """Make the units of `block` resident for the compute stream."""

    def prefetch(self, units: Iterable[int]) -> None:
        """Load `units`; the caller has begun `prefetched.loading`."""

    def free(self, units: Iterable[int]) -> None:
        """Free `units`."""

    def read_ahead(self) -> None:
        """Start reading values that later moments load, when the loads of `moment` have started."""

    def step_begins(self) -> None:
        """Free all units, and take what the user has written, before the optimizer changes the weights."""

    def resident_bytes(self) -> int:
        """Return the bytes of weights on the device that are freed between two steps."""


class Updates(Protocol):
    """Updates parameters on the host: at once, or overlapped with later computation."""

    def update(self, parameters: Iterable[nn.Parameter], *, at_once: bool = True) -> None:
        """Update these from the gradients of the optimizer's parameters, which are freed."""


class BlockUpdates:
    """Updates of blocks before `optimizer.step()`, once their gradients are complete.

    Args:
        context: Of the model.
        optimizer: Makes the updates.
        blocks: The parameters.
        gradients: Of the blocks.
        overlap: Updates overlap with later computation, and those of some blocks with the next step's
            forward; None: each is made at once.
        units: Of the blocks; loads of those whose updates are deferred wait for them. Used with `overlap`.
    """

    def __init__(
        self,
        context: Context,
        optimizer: Updates,
        blocks: OffloadedBlocks,
        gradients: BlockGradients,
        overlap: Overlap | None = None,
        units: BlockUnits | None = None,
    ) -> None:
        self._optimizer, self._blocks, self._gradients = optimizer, blocks, gradients
        self.early = gradients.early = EarlyUpdates(context, "block")
        self.overlaps = overlap is not None
        self._copying: int | None = None  # its gradients are ready, the last ones still in D2H copies
        self._left: Collection[int] = ()
        """Blocks that `optimizer.step()` updates, or starts to."""
        self._host: HostOptimizer | None = None
        self._units: BlockUnits | None = None
        if overlap is not None:
            assert units is not None
            assert isinstance(optimizer, HostOptimizer)
            self._host, self._units = optimizer, units
            self._left = range(len(blocks)) if overlap.at_end else overlap.deferred
            units.deferred = optimizer.defer(context, {i: blocks.of_block[i] for i in overlap.deferred})
            if overlap.deferred and not units.deferred.is_fake:
                after_step(context.optimizer, lambda *_: self._expect_values())

    def begin(self) -> None:
        """Begin a micro-batch: updates that the last step has deferred start, unless they are running.

        Raises:
            ApplyError: An earlier step has updated blocks and was not ended.
        """
        self._start_deferred()
        self.early.step_begins()

    def _start_deferred(self) -> None:
        if self._host is not None:
            self._host.start_deferred()

    def complete(self, block: int | None, *, is_end: bool) -> None:
        """Update `block`, whose gradients were all ready in the moment before; None: no block is complete."""
        # Overlapped, one moment later: by then the block's last copies have ended too.
        arrived = [block]
        if self.overlaps:
            arrived, self._copying = [self._copying], block
        if is_end:
            arrived, self._copying = [*arrived, self._copying], None
        for each in arrived:
            if each is not None:
                self.update([each])

    def update(self, blocks: Iterable[int]) -> None:
        """Update `blocks`, whose gradients are on the host, except those that the step updates."""
        ready = [each for each in blocks if each not in self._left]
        self._gradients.use_in_backward([each for each in blocks if each in self._left])
        used = self._gradients.use_in_backward(ready)
        if ready:
            # Recorded before the update: if it raises half way, the step counts as one that cannot be undone.
            self.early.add(ready, used)
            parameters = [each for block in ready for each in self._blocks.of_block[block]]
            self._optimizer.update(parameters, at_once=not self.overlaps)
            for each in used:
                # Still on the device where user code assigned it and this backward did not accumulate
                # (`torch.autograd.grad`): code that reads it from now on raises, as for the others.
                set_own_grad(each, None)

    def raised(self) -> None:
        """Refuse the step if its backward, which has raised, has updated blocks."""
        self.early.raised()
        self._copying = None

    def fill_next(self, block: int) -> None:
        """Load the values of the block after `block`, whose kernels are queued: the host may wait now."""
        if self._units is not None and block + 1 in self._units.unfilled:
            with self._units.prefetched.loading((block + 1,)):
                self._units.fill(block + 1)

    def _expect_values(self) -> None:
        """Have accesses to deferred blocks' parameters wait for their updates; post-step hook."""
        assert self._units is not None
        for block in self._units.deferred.unfinished():
            for piece in self._units.pieces[block]:
                for each in piece.of:
                    each.expect_values(self._finish)

    def _finish(self) -> None:
        """Finish all deferred updates, because the user reads or writes a parameter."""
        assert self._units is not None
        self._start_deferred()
        self._units.deferred.finish_all()
        for each in self._units.owners:
            each.settle()

    def facts(self) -> dict[str, Any]:
        """Return the number of deferred blocks and the largest bytes of their gradients, for the audit."""
        if self._units is None:
            return {}
        deferred = self._units.deferred
        return {"deferred_blocks": deferred.blocks, "deferred_bytes": deferred.max_deferred_bytes}


class ParameterOffloader:
    """Loads and frees the blocks' parameters of `context` as a residency lists.

    Args:
        context: Its model; hooks are registered on its blocks and their parameters.
        residency: Units to free and load at each moment.
        blocks: The parameters.
        units: Their memory.
        gradients: Their gradients.
        updates: Of blocks in backward; None: `optimizer.step()` updates all.
        check: Returns facts about the optimizer, for the audit.
    """

    def __init__(
        self,
        context: Context,
        residency: Residency,
        blocks: OffloadedBlocks,
        units: Units,
        gradients: BlockGradients,
        updates: BlockUpdates | None,
        check: Callable[[], dict[str, Any]],
    ) -> None:
        self.units, self._gradients, self._updates, self._check = units, gradients, updates, check
        self._blocks, self._residency = blocks, residency
        units.moment = self._end = len(residency.drops) - 1
        is_gathered = blocks.gathered is not None
        self._uses = order_of_use(len(blocks), gathered=is_gathered)
        self._is_last = False
        self._backward_end = BackwardEnd(self._backward_ends, self._backward_raised, is_last=is_gathered)
        self._updated_in_step = _kept_for_step(blocks)
        between_graphs = BetweenGraphs("whose weights memtune offloads")
        for index, block in enumerate(blocks.modules):
            context.undo.callback(between_graphs.keep_out(f"block {index}", block))
            # Before FSDP2's own hooks: its all-gather reads the rows that a moment loads.
            block.register_forward_pre_hook(
                UncopiedHook(partial(self._before_forward, index)), prepend=is_gathered
            )
            block.register_forward_hook(
                UncopiedHook(partial(self._after_forward, index), with_args=True), prepend=is_gathered
            )
        for parameter in blocks.outside if gradients.when_ready else ():
            context.undo.callback(
                parameter.register_post_accumulate_grad_hook(weakly(self._on_outside_grad_ready)).remove
            )
        # DDP's `no_sync`, or another mechanism's context, runs inside this one.
        self._outer_sync = context.loop.sync
        if updates is not None:
            context.loop.sync = self.sync
        before_step(context.optimizer, self._step_begins)
        context.events.weights_loaded.subscribe(self._backward_end.settle)
        # Last: the steps above read and copy values on the device.
        units.free(units.resident)

    @contextmanager
    def sync(self, last: bool) -> Iterator[None]:
        """Return the context of a micro-batch; in the last one's backward blocks are updated.

        Raises:
            ApplyError: A backward with updates has raised, and no state dict has been loaded since.
        """
        assert self._updates is not None
        # A micro-batch after a backward that raised: its gradients are dropped before new ones are added.
        self._backward_end.settle()
        self._updates.begin()
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
            self.units.load_block(index)

    def _after_forward(self, index: int, module: Any, args: Any, output: Any) -> None:
        """Hook the block's outputs, so that its moment of backward begins when one has its gradient."""
        if not torch.is_grad_enabled():
            # Without autograd (evaluation) no backward follows, and no moment begins.
            self.units.free(self.units.of_block[index])
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
        if self._updates is not None:
            self._updates.fill_next(index)

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
        if self.units.moment == self._end:
            # Of an earlier backward through the same forward (`retain_graph`).
            self._gradients.offloaded.hide()
        self._begin_moment(moment)

    def _on_outside_grad_ready(self, parameter: Tensor) -> None:
        """Expect the end of a backward that may run no block (a penalty on the head); grad-ready hook."""
        self._backward_end.expect()

    def _backward_ends(self) -> None:
        """Begin the last moment, which frees the first block, and show the gradients."""
        lacking = self._gradients.finish_averages()
        self._begin_moment(self._end)
        self._gradients.show_to_user(lacking)
        if self._updates is not None:
            self._updates.early.backward_ends()

    def _begin_moment(self, moment: int) -> None:
        """Begin a moment: finish copies, free, load, prefetch, update."""
        units, gradients, updates = self.units, self._gradients, self._updates
        self._backward_end.settle()
        # Inside backward (recompute of the first block) gradients are changing anyway.
        if not self._backward_end.is_near:
            gradients.offloaded.hide()
            if moment == 0:
                gradients.offloaded.require_unchanged()
        if moment == units.moment:
            # The same block again. If the forward that began this moment has raised, its units are freed.
            self._load_used(moment)
            return
        before, units.moment = units.moment, moment
        # Gradients first, then weights, then loads: each frees memory that the next one may reuse.
        overlaps = updates is not None and updates.overlaps and moment < self._end
        gradients.offloaded.finish_moment(overlaps=overlaps)
        # An unexpected order of calls frees everything, so the residency holds again from here.
        units.free(units.resident if before + 1 != moment else self._residency.drops[moment])
        # The compute stream reads the units that were prefetched on the copy stream.
        units.prefetched.wait()
        # A hit in most moments; the first block of a step, and a miss, are loaded on the compute stream.
        self._load_used(moment)
        loads = self._residency.loads[moment]
        with units.prefetched.loading(loads):
            units.prefetch(loads)
        if updates is not None:
            # Backward of block b is moment 2 * blocks - 1 - b; all of its gradients are ready when the next
            # begins.
            block = self._end - 1 - before
            is_used = (
                self._is_last and len(self._blocks) <= before < self._end and block != self._updated_in_step
            )
            updates.complete(block if is_used else None, is_end=moment == self._end)
        # After the moment's own loads, which must not wait for reads of later ones.
        units.read_ahead()

    def _load_used(self, moment: int) -> None:
        """Load the block that the moment uses, if any."""
        if moment < self._end and (used := self._uses[moment]) >= 0:
            self.units.load_block(used)

    # -- a backward that raised, and the step ----------------------------------------------------------------

    def _backward_raised(self) -> None:
        """Drop gradients of a backward that raised; refuse the step if it has updated blocks."""
        if self._updates is not None:
            self._updates.raised()
        self._gradients.abandon()

    def _step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._backward_end.settle()
        if self._updates is not None:
            self._updates.early.step_goes_on()
        self._gradients.offloaded.hide()
        self.units.step_begins()
        self._gradients.offloaded.require_unchanged()
        self._gradients.offloaded.forget()
        if self._updates is not None:
            self._updates.early.forget()

    def check(self) -> dict[str, Any]:
        """Return facts about the blocks' parameters.

        Raises:
            ApplyError: Some are on the device between two steps.
        """
        if (left := self.units.resident_bytes()) and self.units.moment == self._end:
            raise refusals.error_of(refusals.resident_between_steps(left))
        on_host = sum(map(bool, self._blocks.of_block))
        facts = {"blocks_on_host": on_host, "loaded_bytes": self.units.loaded_bytes}
        return self._check() | facts | ({} if self._updates is None else self._updates.facts())


def _kept_for_step(blocks: OffloadedBlocks) -> int | None:
    """Return the block that only `optimizer.step()` updates, where all trained parameters are in blocks."""
    # Without any gradient left, changes of gradients between backward and the step would be lost unseen. The
    # block is the last one of backward that has gradients: its update has little to overlap with.
    trained = (
        index for index, block in enumerate(blocks.of_block) if not blocks.trained.keys().isdisjoint(block)
    )
    return None if blocks.outside else next(trained, None)


def largest_block_bytes(context: Context, blocks: OffloadedBlocks) -> int:
    """Return the largest bytes of a block's trained parameters, or of this rank's rows of them."""
    params = [[context.placement.optimizer_param(each) for each in block] for block in blocks.of_block]
    mine = [(local(each).nbytes, i) for i, block in enumerate(params) for each in block if each.requires_grad]
    return room_bytes([n_bytes for n_bytes, _ in mine], [index for _, index in mine])
