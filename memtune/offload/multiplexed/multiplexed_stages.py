"""More stages than ranks: each rank takes its own in turn, over all micro-batches, and passes on what they
make.

Six rules, which the pass `offload.multiplexed.multiplexed_stages_pass` follows row by row:

Rule 1. A rank holds weights, gradients and optimizer state of its stages alone, the blocks' on its host; what
comes before the
        blocks belongs to the first stage, what comes after them to the last one. The user's code runs past
        the blocks of other stages (`parallel.pipeline.stage`).
Rule 2. Stages run forward in order, each over all micro-batches, with autograd looking on and nothing saved.
The last one, the
        turn, runs forward and backward at once; the others then run forward again and backward, from last to
        first.
Rule 3. What passes between stages does so by way of the hosts (`offload.multiplexed.host_p2p`). What a stage
starts from waits there for its
        backward, and comes to the device for each of the two; or, with `boundaries` "device", comes once and
        waits there.
Rule 4. The stage that a rank uses next comes in while one computes (`packs.OnRanks`), a part with each
micro-batch; gradients
        leave once, with the last micro-batch, and the host updates a stage when its backward is done, or
        beside the next step (`offload.layer_major.pack_offloader`).
Rule 5. Each rank brings its own micro-batches, and all ranks work on all of them in one order
(`parallel.ranks.micro_batch_rotation`), so each weight's
        gradient is the plain step's sum, to the bit. A micro-batch draws the same random numbers in a stage
        each time.
Rule 6. A weight before the blocks and after them has a sum in each of the two stages. They are added up at
the end, where the
        stages are on two ranks; on one, autograd does so.

Source: Feng et al. 2023, Mobius (ASPLOS 23), section 3.1; Li et al. 2022, Harmony (VLDB), section 3
(Harmony-PP).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from memtune.errors import ApplyError
from memtune.offload.layer_major import BoundaryTier, OnRanks, PackStore, Use, nothing_saved
from memtune.offload.multiplexed.host_p2p import Messages
from memtune.offload.optimizer import HostOptimizer
from memtune.parallel.pipeline import Run, become_pieces, keep_own, one_form
from memtune.parallel.ranks import MicroBatchRotation, require_ranks
from memtune.runtime import Context, LossFunction


class StagesInTurn:
    """One rank's part.

    Args:
        context: The model and optimizer, changed already; its blocks are this rank's.
        store: Where their parameters are.
        layout: Which stage is where.
        run: What the blocks ask.
        group: All ranks, with host memory to send from.
        tied: The ranks of first and last stage, where they are two and share a weight; None elsewhere.
        shared: Names of such weights.
        boundaries: Where what stages start from waits for backward.
    """

    def __init__(
        self,
        context: Context,
        store: PackStore,
        layout: OnRanks,
        run: Run,
        group: dist.ProcessGroup,
        tied: dist.ProcessGroup | None,
        shared: frozenset[str],
        boundaries: BoundaryTier = "host",
    ) -> None:
        self._context, self._store, self._layout, self._run = context, store, layout, run
        self._tied, self._shared = tied, [p for name, p in context.model.named_parameters() if name in shared]
        self.turns = MicroBatchRotation(group)
        self._rank, self._last = context.placement.rank, len(layout.stages) - 1
        self._messages = Messages(group, self._sent)
        self._group, self._waits_on_host = group, boundaries == "host"
        spans, first = {}, 0
        for stage in layout.mine(self._rank):
            spans[stage] = first, first + len(layout.blocks(stage))
            first = spans[stage][1]
        self._spans = spans
        """Of each stage here, its blocks among those that are here."""
        self._given: dict[tuple[int, int], Tensor] = {}
        """By stage and micro-batch: what it starts from, where that waits."""
        self.sent_bytes = 0
        self.order: list[tuple[str, int, int]] = []
        """What the last step ran, when: kind of use, stage, micro-batch."""

    def __call__(self, model: nn.Module, loss_function: LossFunction, batches: Iterable[Any]) -> Tensor:
        """Forward and backward over the micro-batches of all ranks; leaves the mean gradient, but for blocks'
        that are used.

        Returns:
            The mean loss over all of them, equal on every rank, detached.

        Raises:
            ApplyError: Ranks bring different numbers of micro-batches, or ones of different shapes.
        """
        turns, losses = self.turns.of(batches), list[Tensor]()
        self.order = []
        self._store.step_starts()
        try:
            with self.turns.own_numbers(self._context.device):
                here = [self.turns.upload(turn, self._context.device) for turn in turns]
                one_form(here)
                step = _Step(model, loss_function, here, [turn.seed for turn in turns])
                like = self._run.probe(model, loss_function, here[0])
                uses = self._layout.uses(self._rank)
                for number, use in enumerate(uses):
                    self._use(step, use, number, like, losses)
                self._messages.step_ends()
        except BaseException:
            self._messages.abandon()
            self._given.clear()
            self._store.abandon()
            raise
        finally:
            self._store.is_stepping = self._store.is_last = False
        self._add_tied()
        self._store.step_ends()
        return self._total(losses)

    def _use(self, step: _Step, use: Use, number: int, like: Tensor, losses: list[Tensor]) -> None:
        """All micro-batches of one use."""
        uses, count = self._layout.uses(self._rank), len(step.batches)
        ahead = (
            self._spans[uses[number + 1].stage] if self._layout.prefetch and number + 1 < len(uses) else None
        )
        for index in range(count):
            self._post(use, like, index, count)
        self._store.begin(self._spans[use.stage], ahead, count)
        for index in range(count):
            self.order.append((use.kind, use.stage, index))
            self._store.is_last = use.kind != "forward" and index == count - 1
            if use.kind == "forward":
                self._forward(step, use.stage, index)
            else:
                self._backward(step, use, index, losses)
        self._store.is_last = False
        self._messages.use_ends()
        back = use.kind != "forward"
        self._store.end(self._spans[use.stage], update=back, stays=self._layout.stays(self._rank, number))

    def _post(self, use: Use, like: Tensor, index: int, count: int) -> None:
        """Receives of what the use needs from its neighbours."""
        if use.kind == "backward":
            self._messages.post(
                like, self._layout.ranks[use.stage + 1], self._tag(use.stage + 1, index, count, backward=True)
            )
        elif use.stage > 0:
            self._messages.post(
                like, self._layout.ranks[use.stage - 1], self._tag(use.stage, index, count, backward=False)
            )

    def _tag(self, stage: int, index: int, count: int, *, backward: bool) -> int:
        """Of what `stage` is given in a micro-batch, or of its gradient."""
        return (2 * stage + backward) * count + index

    def _start(self, use: Use, index: int, count: int) -> Tensor | None:
        """What the stage starts from, on the device; None: the model's own input."""
        if use.stage == 0:
            return None
        key = use.stage, index
        if use.kind == "backward":
            return self._on_device(self._given.pop(key))
        host = self._messages.received(self._tag(use.stage, index, count, backward=False))
        given = self._on_device(host)
        if use.kind == "forward":
            self._given[key] = host if self._waits_on_host else given
        return given

    def _on_device(self, given: Tensor) -> Tensor:
        """What a stage starts from, from where it waits."""
        there = given if given.requires_grad else torch.ops.memtune.to_device(given, self._context.device)
        return there.requires_grad_()

    def _stage(self, step: _Step, stage: int, index: int, given: Tensor | None) -> Tensor:
        """The stage's output of a micro-batch, or its loss."""
        torch.manual_seed(step.seeds[index] + stage)
        blocks = self._layout.blocks(stage)
        batch = step.batches[index]
        return self._run.of(blocks[0], blocks[-1], given, lambda: step.loss_function(step.model, batch))

    def _forward(self, step: _Step, stage: int, index: int) -> None:
        """Rule 2."""
        count = len(step.batches)
        given = self._start(Use(stage, "forward"), index, count)
        self._store.go_on()
        with nothing_saved():
            output = self._stage(step, stage, index, given)
        tag = self._tag(stage + 1, index, count, backward=False)
        self._messages.send(output.detach(), self._layout.ranks[stage + 1], tag)

    def _backward(self, step: _Step, use: Use, index: int, losses: list[Tensor]) -> None:
        """Rule 2."""
        count = len(step.batches)
        given = self._start(use, index, count)
        self._store.go_on()
        output, gradient = self._stage(step, use.stage, index, given), None
        if use.kind == "turn":
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

    def _sent(self, n_bytes: int) -> None:
        self.sent_bytes += n_bytes

    @torch.no_grad()
    def _add_tied(self) -> None:
        """Rule 6."""
        if self._tied is not None:
            for parameter in self._shared:
                if not parameter.requires_grad:
                    continue
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                torch.ops.memtune.all_reduce_(gradient, self._tied.group_name, self._tied.size(), "sum")
                parameter.grad = gradient

    @torch.no_grad()
    def _total(self, losses: list[Tensor]) -> Tensor:
        """The sum of the last stage's losses, in the order of the micro-batches, on every rank."""
        total = sum(losses[1:], losses[0]) if losses else torch.zeros(())
        total = total.to(self._context.device, torch.float64)  # other stages do not know its type
        dist.broadcast(total, src=self._layout.ranks[-1])
        return total.to(torch.get_default_dtype())


class _Step(NamedTuple):
    """What a step runs."""

    model: nn.Module
    loss_function: LossFunction
    batches: list[Any]
    """Micro-batches of all ranks, on the device."""
    seeds: list[int]
    """Of what is drawn in each."""


def stages_in_turn(
    context: Context,
    layout: OnRanks,
    first: frozenset[str],
    last: frozenset[str],
    kind: str,
    boundaries: BoundaryTier = "host",
    outputs: Sequence[str] = (),
) -> None:
    """Leave this rank's stages in the model of `context`, on its host, and have `Tuned.step` run them.

    Args:
        context: Changed in place; its `blocks` are those of this rank from here on.
        layout: Which stage is where.
        first: Parameters outside of the blocks that run before them, by their plain names.
        last: The same of those that run after them; a tied weight is in both.
        kind: The technique, for errors.
        boundaries: Where what stages start from waits for backward.
        outputs: What each block returns (`block_outputs`); empty where all return a lone tensor.

    Raises:
        ApplyError: There is no process group, the ranks' weights differ, or the layout is not one of this
            model.
    """
    placement = context.placement
    require_ranks(context, kind)
    names, rank = context.blocks, placement.rank
    if set(layout.ranks) != set(range(placement.world_size)) or layout.stages[-1][1] != len(names):
        raise ApplyError(
            f"the plan of offload.states: {{kind: {kind}}} was made for other ranks, or another model.",
            evidence=(
                f"{len(layout.stages)} stages of {layout.stages[-1][1]} blocks on {len(set(layout.ranks))}"
                f" ranks; here are {len(names)} blocks and {placement.world_size} ranks."
            ),
            fix="search again",
            code="MT393",
        )
    owners = _Owners(names, layout, first, last)
    everything = {name: owners.of(name) for name in context.model.state_dict(keep_vars=True)}
    before = dict(context.model.named_parameters())
    ends = layout.ranks[0], layout.ranks[-1]
    shared = first & last
    tied = dist.new_group(sorted(ends)) if shared and ends[0] != ends[1] else None  # all ranks make it
    world = dist.group.WORLD
    assert world is not None
    keep_own(context, everything, [rank], placement.world_size, world)
    run = Run(len(names), outputs)
    become_pieces(context, names, run, first, before)
    mine = [block for stage in layout.mine(rank) for block in layout.blocks(stage)]
    context.blocks = [names[block] for block in mine]
    absent = [p for name, p in context.model.named_parameters() if rank not in everything[name]]
    optimizer = HostOptimizer(context, "native")
    optimizer.leave_down(absent)  # of one value, which nobody uses
    late = frozenset(here for here, block in enumerate(mine) if block in layout.late)
    room_bytes = _most_bytes(context, layout, rank) if layout.prefetch else 0
    store = PackStore(context, optimizer, averages=False, late=late, room_bytes=room_bytes)
    group = world if context.device.type == "cpu" else dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    here = StagesInTurn(
        context, store, layout, run, group, tied if rank in ends else None, shared, boundaries
    )
    context.loop.pipeline, context.loop.rotation = here, here.turns
    context.checks["offload.states"] = lambda: (
        store.check() | {"stages": len(layout.stages), "mine": list(layout.mine(rank))}
    )


def _most_bytes(context: Context, layout: OnRanks, rank: int) -> int:
    """Of the trained parameters of a stage of this rank."""
    blocks, sizes = iter(context.blocks), list[int]()
    for stage in layout.mine(rank):
        modules = [context.model.get_submodule(next(blocks)) for _ in layout.blocks(stage)]
        sizes.append(sum(p.nbytes for module in modules for p in module.parameters() if p.requires_grad))
    return max(sizes)


class _Owners:
    """The ranks that hold each parameter or buffer, the one that answers for it first."""

    def __init__(
        self, names: Sequence[str], layout: OnRanks, first: frozenset[str], last: frozenset[str]
    ) -> None:
        self._first, self._last, self._ends = first, last, (layout.ranks[0], layout.ranks[-1])
        self._inside = {
            f"{names[block]}.": layout.ranks[stage]
            for stage in range(len(layout.stages))
            for block in layout.blocks(stage)
        }

    def of(self, name: str) -> list[int]:
        """Of `name`, as in the plain model."""
        inside = next((rank for block, rank in self._inside.items() if name.startswith(block)), None)
        if inside is not None:
            return [inside]
        found = [self._ends[0]] if name in self._first or name not in self._last else []
        return list(dict.fromkeys([*found, self._ends[1]] if name in self._last else found))
