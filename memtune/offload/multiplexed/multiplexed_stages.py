"""Multiplexed pipeline stages: each rank loads its stages one after the other and runs each over all
micro-batches.

Rules, which the pass `offload.multiplexed.multiplexed_stages_pass` follows op by op:

Rule 1. A rank holds weights, gradients and optimizer state of its stages only, those of blocks on its host.
  Code before the blocks belongs to the first stage, code after them to the last; the user's code skips the
  blocks of other stages (`parallel.pipeline.stage`).
Rule 2. Stages run forward in order, each over all micro-batches, with saved tensors dropped. The last stage,
  the turnaround, runs forward and backward at once; the others then run forward again and backward, from last
  to first.
Rule 3. Activations and gradients between stages are sent between hosts (`HostMessages`). A
  stage's arguments remain on its host until its backward and are copied to the device for each run; with
  `boundaries` "device" they are copied once and remain there.
Rule 4. The next stage of a rank is prefetched while one computes, a part with each micro-batch. Gradients are
  offloaded once, with the last micro-batch; the host updates a stage after its backward, or deferred to the
  next step (`offload.layer_major.pack_offloader`).
Rule 5. Each rank provides its own micro-batches, and all ranks process all of them in one order
  (`parallel.ranks.micro_batch_rotation`), so each weight's gradient is the plain step's sum, to the bit. A
  micro-batch draws the same random numbers in each run of a stage.
Rule 6. A tied weight, used before and after the blocks, has a gradient sum in two stages. If these are on two
  ranks, the sums are all-reduced at the end; on one rank autograd adds them.

Source: Feng et al. 2023, Mobius (ASPLOS 23), section 3.1; Li et al. 2022, Harmony (VLDB), section 3
(Harmony-PP).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import memtune.runtime.seam  # noqa: F401  (defines torch.ops.memtune)
from memtune import refusals
from memtune.device import accelerator
from memtune.errors import ApplyError
from memtune.offload.layer_major import (
    BoundaryTier,
    PackOffloader,
    StageLayout,
    StageUse,
    discard_saved,
    not_chain_error,
)
from memtune.offload.optimizer import HostOptimizer
from memtune.parallel.pipeline import Run, become_pieces, shared_batch_form, total_loss
from memtune.parallel.ranks import MicroBatchRotation, keep_own, require_ranks
from memtune.parallel.replicas import sum_now
from memtune.runtime import (
    HOST,
    Context,
    LossFunction,
    PythonDraws,
    count_collective,
    mark,
    page_locked,
    seed_generators,
    tier,
    transfer,
)


class HostMessages:
    """Point-to-point messages of one rank, through host memory, where a stage's arguments wait for backward
    anyway: devices of a commodity server cannot reach each other.

    Args:
        group: Process group whose backend sends host memory.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._in_flight: tuple[Tensor, Tensor, int, int] | None = None
        """(device tensor, host tensor, destination rank, tag) of the D2H copy in flight."""
        self._sent: list[tuple[dist.Work | None, Tensor]] = []
        self._sent_before: list[tuple[dist.Work | None, Tensor]] = []
        self._posted: dict[int, tuple[dist.Work | None, Tensor]] = {}
        self._left: list[tuple[dist.Work | None, Tensor]] = []

    def post(self, like: Tensor, rank: int, tag: int) -> None:
        """Post a receive of a tensor like `like` from `rank`."""
        with tier(HOST):
            host = page_locked(
                lambda locked: torch.empty(like.shape, dtype=like.dtype, pin_memory=locked),
                # Pinned, so that the H2D copy that follows is asynchronous.
                wanted=accelerator.is_present(),
            )
        self._posted[tag] = dist.irecv(host, group=self._group, group_src=rank, tag=tag), host

    def received(self, tag: int) -> Tensor:
        """Wait for the message `tag` and return it, in host memory."""
        work, host = self._posted.pop(tag)
        if work is not None:
            work.wait()
        return host

    def send(self, tensor: Tensor, rank: int, tag: int) -> None:
        """Start sending `tensor`, on the device, to `rank`."""
        # One copy at a time: the device tensor of the last message is freed, and that message sent, first.
        self.finish_copy()
        host = torch.ops.memtune.to_host(tensor)
        mark(host, HOST)
        self._in_flight = tensor, host, rank, tag

    def finish_copy(self) -> None:
        """Finish the D2H copy in flight and send it."""
        if self._in_flight is None:
            return
        (_, host, rank, tag), self._in_flight = self._in_flight, None
        transfer.finish(host)
        count_collective(self._group, host.nbytes)
        # Sends keep their host memory in this list; freed earlier, the message would be overwritten.
        self._sent.append((dist.isend(host, group=self._group, group_dst=rank, tag=tag), host))

    def end_use(self) -> None:
        """Finish a use: wait for the messages of the use before it."""
        self.finish_copy()
        # No wait in practice: what this rank has run since depends on the messages of the use before.
        _wait(self._sent_before)
        self._sent_before, self._sent = self._sent, []

    def end_step(self) -> None:
        """Wait for all messages."""
        _wait(self._sent_before)
        _wait(self._sent)
        self._sent_before, self._sent = [], []

    def abandon(self) -> None:
        """Forget all messages, after a step failed on any rank."""
        self._in_flight, self._sent, self._sent_before, self._posted = None, [], [], {}

    def leave_sent(self) -> None:
        """Let neighbours have what is sent, although this rank ends here; no step may follow."""
        # A message that is freed before it is received never arrives, and its receiver would wait for ever.
        self._left += [*self._sent_before, *self._sent]


def _draws_error() -> ApplyError:
    return not_chain_error("the model draws random numbers in Python, and blocks run twice")


def _wait(sent: list[tuple[dist.Work | None, Tensor]]) -> None:
    for work, _ in sent:
        if work is not None:
            work.wait()


class MultiplexedStages:
    """One rank's part of a step: its stages, in order of use.

    Args:
        context: The model and optimizer, already reduced to this rank's stages.
        store: Loads and frees the blocks' parameters.
        layout: The stages and their ranks.
        run: Decides which blocks run.
        world: All ranks, with a backend that sends what is on the device.
        group: The same, with a backend that sends host memory.
        tied: The ranks of first and last stage, if they are two and share a weight; otherwise None.
        shared: Names of such weights.
        boundaries: Tier of a stage's arguments until its backward.
    """

    def __init__(
        self,
        context: Context,
        store: PackOffloader,
        layout: StageLayout,
        run: Run,
        world: dist.ProcessGroup,
        group: dist.ProcessGroup,
        tied: dist.ProcessGroup | None,
        shared: frozenset[str],
        boundaries: BoundaryTier = "host",
    ) -> None:
        self._context, self._store, self._layout, self._run = context, store, layout, run
        self._tied, self._shared = tied, [p for name, p in context.model.named_parameters() if name in shared]
        self.rotation = MicroBatchRotation(world)
        self._rank = context.placement.rank
        self._messages = HostMessages(group)
        self._world, self._waits_on_host = world, boundaries == "host"
        spans, first = {}, 0
        for stage in layout.stages_of(self._rank):
            spans[stage] = first, first + len(layout.blocks(stage))
            first = spans[stage][1]
        self._spans = spans
        """Blocks of each stage here, as indices among the blocks here."""
        self._saved_starts: dict[tuple[int, int], Tensor] = {}
        """Arguments of a stage, by stage and micro-batch."""
        self.order: list[tuple[str, int, int]] = []
        """Runs of the last step, in order: kind of use, stage, micro-batch."""
        self._is_refused = False
        """A step was refused because blocks here draw random numbers in Python."""

    def __call__(self, model: nn.Module, loss_function: LossFunction, batches: Iterable[Any]) -> Tensor:
        """Run forward and backward over the micro-batches of all ranks.

        Leaves the mean gradients of parameters outside of the blocks; those of blocks are already applied or
        offloaded.

        Returns:
            The mean loss over all of them, equal on every rank, detached.

        Raises:
            ApplyError: Ranks provide different numbers of micro-batches, or micro-batches of different
                shapes.
        """
        if self._is_refused:  # messages of the refused step may still be in flight
            raise _draws_error()
        items, losses = self.rotation.gather(batches), list[Tensor]()
        self.order = []
        self._store.begin_step()
        draws = PythonDraws(self._context.model)
        try:
            with self.rotation.own_numbers(self._context.device):
                # Of all ranks: the user's code before the blocks reads the batch wherever the first stage
                # runs.
                here = [self.rotation.upload(item, self._context.device) for item in items]
                # Receives are posted with one shape, so all micro-batches must have the same.
                shared_batch_form(here)
                step = _Step(model, loss_function, here, [item.seed for item in items])
                # A message has the shape and dtype of a block's output, found on the first micro-batch.
                like = self._run.probe(model, loss_function, here[0])
                uses = self._layout.uses(self._rank)
                for number, use in enumerate(uses):
                    self._use(step, use, number, like, losses)
                    # Torch's generators have a seed for each run of a stage, these have none.
                    if draws.some():
                        # Neighbours find the draws of their own blocks after they have received.
                        self._messages.leave_sent()
                        self._is_refused = True
                        raise _draws_error()
                self._messages.end_step()
        except BaseException:
            self._messages.abandon()
            self._saved_starts.clear()
            self._store.abandon()
            raise
        finally:
            # Evaluation between steps loads blocks by their own calls again.
            self._store.is_stepping = self._store.gradients.is_taken = False
        self._add_tied()
        self._store.end_step()
        # Losses are detached, and of the last stage: other ranks have none.
        total = total_loss(losses, self._context.device, self._world, self._layout.ranks[-1])
        return total.to(torch.get_default_dtype())

    def _use(self, step: _Step, use: StageUse, number: int, like: Tensor, losses: list[Tensor]) -> None:
        """Run all micro-batches of one use."""
        uses, count = self._layout.uses(self._rank), len(step.batches)
        following = (
            self._spans[uses[number + 1].stage] if self._layout.prefetch and number + 1 < len(uses) else None
        )
        for index in range(count):
            # Posted before the loads below, so that a neighbour's send never waits for them.
            self._post(use, like, index, count)
        self._store.begin(self._spans[use.stage], following, count)
        for index in range(count):
            self.order.append((use.kind, use.stage, index))
            self._store.gradients.is_taken = use.kind != "forward" and index == count - 1
            if use.kind == "forward":
                self._forward(step, use.stage, index)
            else:
                self._backward(step, use, index, losses)
        self._store.gradients.is_taken = False
        self._messages.end_use()
        back = use.kind != "forward"
        self._store.end(
            self._spans[use.stage], update=back, resident=self._layout.resident(self._rank, number)
        )

    def _post(self, use: StageUse, like: Tensor, index: int, count: int) -> None:
        """Post the receives that the use needs from neighbour stages."""
        if use.kind == "backward":
            self._messages.post(
                like, self._layout.ranks[use.stage + 1], self._tag(use.stage + 1, index, count, backward=True)
            )
        elif use.stage > 0:
            self._messages.post(
                like, self._layout.ranks[use.stage - 1], self._tag(use.stage, index, count, backward=False)
            )

    def _tag(self, stage: int, index: int, count: int, *, backward: bool) -> int:
        """Return the tag of the message with a stage's arguments in a micro-batch, or with their gradient."""
        return (2 * stage + backward) * count + index

    def _start(self, use: StageUse, index: int, count: int) -> Tensor | None:
        """Return the stage's arguments on the device; None for the first stage, which has the input."""
        if use.stage == 0:
            return None
        key = use.stage, index
        if use.kind == "backward":
            return self._on_device(self._saved_starts.pop(key))
        host = self._messages.received(self._tag(use.stage, index, count, backward=False))
        given = self._on_device(host)
        if use.kind == "forward":
            self._saved_starts[key] = host if self._waits_on_host else given
        return given

    def _on_device(self, given: Tensor) -> Tensor:
        """Copy a stage's arguments to the device, if they are not there."""
        on_device = given if given.requires_grad else torch.ops.memtune.to_device(given, self._context.device)
        # A leaf: backward of the stage ends here, and its gradient is what the stage before needs.
        return on_device.requires_grad_()

    def _stage(self, step: _Step, stage: int, index: int, given: Tensor | None) -> Tensor:
        """Run the stage for a micro-batch; return its output, or its loss."""
        # The second forward of a stage must draw the numbers of the first (Rule 5).
        seed_generators(step.seeds[index] + stage)
        blocks = self._layout.blocks(stage)
        batch = step.batches[index]
        return self._run.output_of(
            blocks[0], blocks[-1], given, lambda: step.loss_function(step.model, batch)
        )

    def _forward(self, step: _Step, stage: int, index: int) -> None:
        """Run a stage forward without saved tensors and send its output (Rule 2)."""
        count = len(step.batches)
        # The wait for the message comes first: copies of the next stage must not delay its H2D copy.
        given = self._start(StageUse(stage, "forward"), index, count)
        self._store.next_micro_batch()
        with discard_saved():
            output = self._stage(step, stage, index, given)
        tag = self._tag(stage + 1, index, count, backward=False)
        self._messages.send(output.detach(), self._layout.ranks[stage + 1], tag)

    def _backward(self, step: _Step, use: StageUse, index: int, losses: list[Tensor]) -> None:
        """Run a stage forward and backward and send the gradient of its arguments (Rule 2)."""
        count = len(step.batches)
        given = self._start(use, index, count)
        self._store.next_micro_batch()
        output, gradient = self._stage(step, use.stage, index, given), None
        if use.kind == "turnaround":
            # As the plain step scales the loss: gradients then sum to the mean over micro-batches.
            output = output / count if count > 1 else output
            losses.append(output.detach())
        else:
            tag = self._tag(use.stage + 1, index, count, backward=True)
            gradient = torch.ops.memtune.to_device(self._messages.received(tag), self._context.device)
        torch.autograd.backward(output, gradient)
        if given is not None:
            assert given.grad is not None
            tag = self._tag(use.stage, index, count, backward=True)
            self._messages.send(given.grad, self._layout.ranks[use.stage - 1], tag)

    def _add_tied(self) -> None:
        """All-reduce gradients of tied weights over the ranks of first and last stage (Rule 6)."""
        if self._tied is not None:
            # Both ranks must enter the collective, also one without a gradient.
            sum_now([each for each in self._shared if each.requires_grad], self._tied)


class _Step(NamedTuple):
    """The inputs of a step."""

    model: nn.Module
    loss_function: LossFunction
    batches: list[Any]
    """Micro-batches of all ranks, on the device."""
    seeds: list[int]
    """Seed of each micro-batch's random numbers."""


def apply_multiplexed_stages(
    context: Context,
    layout: StageLayout,
    first: frozenset[str],
    last: frozenset[str],
    kind: str,
    boundaries: BoundaryTier = "host",
    outputs: Sequence[str] = (),
) -> None:
    """Reduce the model of `context` to this rank's stages, on its host, and let `Tuned.step` run them.

    Args:
        context: Changed in place; its `blocks` become those of this rank.
        layout: The stages and their ranks.
        first: Parameters used before the blocks, by their plain names.
        last: Parameters used after the blocks; a tied weight is in both.
        kind: The technique, for errors.
        boundaries: Tier of a stage's arguments until its backward.
        outputs: Structure of each block's output (`block_outputs`); empty if all return one tensor.

    Raises:
        ApplyError: There is no process group, the ranks' weights differ, or the layout is for another model.
    """
    placement = context.placement
    require_ranks(context, kind)
    names, rank = context.blocks, placement.rank
    _require_layout_of(context, layout, kind)
    owners = _Owners(names, layout, first, last)
    everything = {name: owners.ranks_of(name) for name in context.model.state_dict(keep_vars=True)}
    before = dict(context.model.named_parameters())
    ends = layout.ranks[0], layout.ranks[-1]
    shared = first & last
    # A collective: all ranks must call it, also those that are not in the group.
    tied = dist.new_group(sorted(ends)) if shared and ends[0] != ends[1] else None
    world = dist.group.WORLD
    assert world is not None
    keep_own(context, everything, [rank], placement.world_size, world)
    run = Run(len(names), outputs)
    become_pieces(context, names, run, first, before)
    own_blocks = [block for stage in layout.stages_of(rank) for block in layout.blocks(stage)]
    context.blocks = [names[block] for block in own_blocks]
    absent = [p for name, p in context.model.named_parameters() if rank not in everything[name]]
    deferred = frozenset(index for index, block in enumerate(own_blocks) if block in layout.deferred)
    store = _offload_stages(context, layout, absent, deferred)
    # NCCL sends device memory only; messages are in host memory.
    group = world if context.device.type == "cpu" else dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    stages = MultiplexedStages(
        context=context,
        store=store,
        layout=layout,
        run=run,
        world=world,
        group=group,
        tied=tied if rank in ends else None,
        shared=shared,
        boundaries=boundaries,
    )
    context.loop.pipeline, context.loop.rotation = stages, stages.rotation
    context.checks["offload.states"] = lambda: (
        store.check() | {"stages": len(layout.stages), "own_stages": list(layout.stages_of(rank))}
    )


def _require_layout_of(context: Context, layout: StageLayout, kind: str) -> None:
    """Refuse a layout for other blocks or another number of ranks.

    Raises:
        ApplyError: It is one.
    """
    n_blocks, n_ranks = len(context.blocks), context.placement.world_size
    if set(layout.ranks) != set(range(n_ranks)) or layout.stages[-1][1] != n_blocks:
        raise refusals.plan_of_other_model(
            f"offload.states: {{kind: {kind}}}",
            f"It has {len(layout.stages)} stages of {layout.stages[-1][1]} blocks on {len(set(layout.ranks))}"
            f" ranks; here are {n_blocks} blocks and {n_ranks} ranks.",
        )


def _offload_stages(
    context: Context, layout: StageLayout, absent: list[nn.Parameter], deferred: frozenset[int]
) -> PackOffloader:
    """Move the optimizer to the host, then the rank's stages, but for placeholders of `absent` weights."""
    optimizer = HostOptimizer(context, "native")
    optimizer.leave_to_offloader(absent)
    room_bytes = _most_bytes(context, layout, context.placement.rank) if layout.prefetch else 0
    return PackOffloader(context, optimizer, averages=False, deferred=deferred, room_bytes=room_bytes)


def _most_bytes(context: Context, layout: StageLayout, rank: int) -> int:
    """Return the largest bytes of trained parameters of a stage on this rank."""
    blocks, sizes = iter(context.blocks), list[int]()
    for stage in layout.stages_of(rank):
        modules = [context.model.get_submodule(next(blocks)) for _ in layout.blocks(stage)]
        sizes.append(sum(p.nbytes for module in modules for p in module.parameters() if p.requires_grad))
    return max(sizes)


class _Owners:
    """The ranks that hold each parameter or buffer, its owner first."""

    def __init__(
        self, names: Sequence[str], layout: StageLayout, first: frozenset[str], last: frozenset[str]
    ) -> None:
        self._first, self._last, self._ends = first, last, (layout.ranks[0], layout.ranks[-1])
        self._inside = {
            f"{names[block]}.": layout.ranks[stage]
            for stage in range(len(layout.stages))
            for block in layout.blocks(stage)
        }

    def ranks_of(self, name: str) -> list[int]:
        """Return the ranks of `name`, a name in the plain model."""
        inside = next((rank for block, rank in self._inside.items() if name.startswith(block)), None)
        if inside is not None:
            return [inside]
        found = [self._ends[0]] if name in self._first or name not in self._last else []
        return list(dict.fromkeys([*found, self._ends[1]] if name in self._last else found))
