"""Pipeline parallelism: each rank runs some consecutive blocks, and activations pass from rank to rank.

Six rules:

1. The user's code runs unchanged on every rank, with that rank's micro-batch data. Blocks of earlier stages
  return a tensor without memory (`parallel.pipeline.stage`), the stage's first block gets the activation
  received from the rank before, and its last block ends the run. Masks and rotary tables, which depend on no
  weight, are therefore computed on every stage, and the last stage computes the loss.
2. A rank holds the weights of its stages. Each other parameter is replaced by a placeholder of one value, so
  that parameter groups, their order and the numbering of the optimizer's state are those of the plain model.
3. The schedule, the sends and the receives are those of torch.distributed.pipelining, on buffers that live
  only while they are used. Each micro-batch's loss is divided as in plain accumulation, and gradients are
  accumulated in the order of the micro-batches.
4. Each rank provides its own micro-batches (`parallel.ranks.micro_batch_rotation`), and all ranks of a
  pipeline work on each of them.
5. After the last backward, a weight shared by the first and the last stage gets the sum of their gradients;
  parallel pipelines average theirs; and each placeholder gets a gradient of the norm of the real one, so that
  a norm over all parameters (p = 2, others are refused), and clipping by it, equals the full model's on every
  rank.
6. If optimizer state is sharded over parallel pipelines (`zero1`), rule 5's average is instead a reduction to
  this rank's shard, when the last backward has ended (`parallel.sharding.nested_sharding`); with `zero2`, and
  under FSDP2 (`fsdp_sharding.shard_stage`), in every backward.

Source: Huang et al. 2019, GPipe; Narayanan et al. 2021, Efficient Large-Scale Language Model Training,
section 2.2 (1F1B, interleaved).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from memtune.activations.offload import OwnOutputs
from memtune.activations.recompute import ActivationTable
from memtune.device import is_out_of_memory
from memtune.errors import ApplyError, MemtuneError
from memtune.parallel.model import mix_plain_and_sharded
from memtune.parallel.pipeline.stage import (
    Run,
    Stage,
    StageModule,
    become_pieces,
    shared_batch_form,
    total_loss,
)
from memtune.parallel.ranks import (
    MicroBatchRotation,
    SharedNorms,
    has_real_peers,
    keep_own,
    require_groups,
    require_ranks,
)
from memtune.parallel.replicas import average_now, sum_now
from memtune.parallel.sharding import meshes
from memtune.program import PipelineSchedule, StageAction, stage_actions
from memtune.refusals import (
    copies_follow_schedule,
    error_of,
    plan_of_other_model,
    several_stages,
    tied_stages,
)
from memtune.runtime import Context, LossFunction, RemoteParameters


@dataclass(frozen=True)
class Layout:
    """Assignment of blocks and parameters to stages; stage s runs on rank s % degree of a pipeline."""

    stages: tuple[tuple[str, ...], ...]
    """Names of each stage's blocks, in the order in which they run."""
    first: frozenset[str]
    """Parameters outside of the blocks that run before them, by their plain names."""
    last: frozenset[str]
    """The same for parameters that run after the blocks; a tied weight is in both."""
    degree: int
    schedule: PipelineSchedule
    outputs: tuple[str, ...] = ()
    """Output structure of each block (`block_outputs`); empty if all return a single tensor."""

    @property
    def blocks(self) -> list[str]:
        """Names of all blocks."""
        return [name for stage in self.stages for name in stage]

    @property
    def last_rank(self) -> int:
        """Rank in the pipeline that has the last stage."""
        return (len(self.stages) - 1) % self.degree

    def owners(self, name: str) -> list[int]:
        """Return the stages with the parameter or buffer `name`; the first is its owner in state dicts."""
        for index, stage in enumerate(self.stages):
            if any(name.startswith(f"{block}.") for block in stage):
                return [index]
        # A parameter that no op uses belongs to the first stage, so that it has one owner.
        found = [0] if name in self.first else []
        return [*found, len(self.stages) - 1] if name in self.last else found or [0]


class Pipeline:
    """One rank's part of a pipeline.

    Args:
        context: Model and optimizer, already reduced to this rank's stages.
        layout: Assignment of blocks to stages.
        group: The ranks of this pipeline.
        copies: The ranks of other pipelines that hold the same stages; None if there is one pipeline.
        tied: The ranks of the first and the last stage; None if they share no weight, or this rank is
            neither.
    """

    def __init__(
        self,
        context: Context,
        layout: Layout,
        group: dist.ProcessGroup,
        copies: dist.ProcessGroup | None,
        tied: dist.ProcessGroup | None,
    ) -> None:
        self._context = context
        self._layout = layout
        self._group = group
        self._copies = copies
        self._tied = tied
        self.rotation = MicroBatchRotation(group)
        self.run = Run(len(layout.blocks), layout.outputs)
        """Decides for each block whether it runs, is skipped or ends the run."""
        self._made_for: Any = None
        self._owners = {name: layout.owners(name) for name, _ in context.model.named_parameters()}
        self.sent_bytes = 0
        self.reduce: Callable[[], None] | None = None
        """Reduces or averages the sums of gradients over pipelines when the last backward has ended."""
        self.before_backward: Callable[[bool], None] | None = None
        """Called before each backward, with True for the last one of a step."""
        self._norms = SharedNorms(context, group)

    def require_divisible(self, kind: str) -> None:
        """Refuse the stages whose gradients `kind` cannot reduce in each backward.

        Raises:
            ApplyError: A rank has several stages, or first and last stage share a weight.
        """
        layout = self._layout
        if self._context.activations.slots is not None:
            raise error_of(copies_follow_schedule(kind))
        if len(layout.stages) > layout.degree:
            raise error_of(several_stages(kind), f"A rank has {len(layout.stages) // layout.degree} stages.")
        if tied := sorted(layout.first & layout.last):
            raise error_of(tied_stages(kind, tied[0]))

    def divided_among(self, sharers: dist.ProcessGroup) -> None:
        """Declare that gradients of this rank's stages are sharded over `sharers`: norms sum over them."""
        self._norms.sharers = sharers
        mix_plain_and_sharded()

    def __call__(self, model: nn.Module, loss_function: LossFunction, batches: Iterable[Any]) -> Tensor:
        """Run forward and backward over the micro-batches of all ranks of the pipeline; accumulates the mean
        gradient.

        Returns:
            The mean loss over all micro-batches of all pipelines, equal on every rank, detached.

        Raises:
            ApplyError: Ranks provide different numbers of micro-batches, or of different shapes; or too few.
        """
        micro_batches = self.rotation.gather(batches)
        with self.rotation.own_numbers(self._context.device):
            here: list[Any] = [self.rotation.upload(each, self._context.device) for each in micro_batches]
            losses: list[Tensor] = []
            schedule, stages = self._schedule(model, loss_function, here)
            slots = self._context.activations.slots
            if slots is not None:
                slots.follow(self._actions(len(micro_batches)))
            for stage in stages:
                stage.begin(model, loss_function, here, [each.seed for each in micro_batches])
            try:
                # torch splits a target among the micro-batches; the loss is the last stage's output, so its
                # values are unused.
                schedule.step(target=torch.zeros(len(micro_batches)), losses=losses, return_outputs=False)
            except RuntimeError as error:  # torch wraps whatever a stage raises
                # Users get the error of their own code, or out of memory, not torch's wrapper.
                own = _original_error(error)
                if own is None:
                    raise
                raise own from None
            finally:
                for stage in stages:
                    stage.end()
                if slots is not None:
                    slots.stop()
        with torch.no_grad():
            self._finish_gradients()
            return self._total([loss.detach() for loss in losses])

    def _schedule(
        self, model: nn.Module, loss_function: LossFunction, batches: Sequence[Any]
    ) -> tuple[Any, list[StageModule]]:
        """Return torch's schedule for `batches` and its stage modules, reused while shapes are equal."""
        form = shared_batch_form(batches)
        if self._is_new(len(batches), form):
            self._made = self._make(self.run.probe(model, loss_function, batches[0]), len(batches))
            self._made_for = len(batches), form
        return self._made

    def _is_new(self, count: int, form: Any) -> bool:
        """Return True if a new schedule is needed."""
        # A probe gathers parameters that FSDP2 shards over pipelines, so all pipelines probe if one does.
        # torch's schedule depends on the number of micro-batches, its buffers on their shape.
        new: bool = self._made_for != (count, form)
        if self.run.ended is None or self._norms.sharers is None or not has_real_peers(self._context.model):
            return new
        # One message for both questions: the maximum of -count is minus the smallest count.
        extremes = torch.tensor([int(new), count, -count], device=self._context.device)
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self._norms.sharers)
        any_new, most, least = extremes.tolist()
        if most != -least:
            raise ApplyError(
                f"Pipelines that divide each other's stages bring {-least} to {most} micro-batches.",
                fix="the same number on all ranks",
                code="MT391",
            )
        return bool(any_new)

    def _make(self, like: Tensor, count: int) -> tuple[Any, list[StageModule]]:
        """Return torch's schedule for the stages of this rank, and their modules."""
        layout, rank = self._layout, self._group.rank()
        n_stages = len(layout.stages)
        stages, modules, first = list[Stage](), list[StageModule](), 0
        for index, blocks in enumerate(layout.stages):
            if index % layout.degree == rank:
                # The rank's last stage: no later forward of this rank reads the micro-batch.
                frees_batch = index + layout.degree >= n_stages
                module = StageModule(self.run, first, first + len(blocks) - 1, index, n_stages, frees_batch)
                device, group, slots = self._context.device, self._group, self._context.activations.slots
                modules.append(module)
                each = Stage(
                    module, index, n_stages, device, like, like, group=group, count=self._sent, slots=slots
                )
                each.before_backward = self.before_backward
                stages.append(each)
            first += len(blocks)
        try:
            return scheduled(layout.schedule, stages, count), modules
        except ValueError as error:
            raise ApplyError(
                f"{count} micro-batches of the {layout.degree} ranks of a pipeline cannot be scheduled as"
                f" {layout.schedule}.",
                evidence=str(error),
                fix="more micro-batches per step (execution.accumulate)",
                code="MT396",
            ) from None

    def _actions(self, count: int) -> list[StageAction]:
        """Return this rank's actions for `count` micro-batches."""
        layout = self._layout
        return stage_actions(
            layout.schedule, self._group.rank(), layout.degree, len(layout.stages) // layout.degree, count
        )

    def _sent(self, n_bytes: int) -> None:
        self.sent_bytes += n_bytes

    def _total(self, losses: list[Tensor]) -> Tensor:
        """Return the sum of the last stage's losses, in the order of the micro-batches, on every rank."""
        total = total_loss(losses, self._context.device, self._group, self._layout.last_rank)
        if self._copies is not None:
            torch.ops.memtune.all_reduce_(total, self._copies.group_name, self._copies.size(), "avg")
        return total.to(torch.get_default_dtype())

    def _finish_gradients(self) -> None:
        """Reduce gradients after the last backward (rule 5)."""
        held = self._context.placement.remote_parameters
        assert held is not None
        trained = self._norms.trained()
        # Sums over stages first, so that pipelines average complete gradients; norms of the results last.
        self._sum_between(held, trained)
        if self.reduce is not None:
            self.reduce()
        self._norms.share()

    def _sum_between(self, held: RemoteParameters, trained: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Sum gradients over stages that share a weight, average over pipelines; no gradient is kept."""
        own = [(name, p) for name, p in trained if name not in held.absent]
        if self._tied is not None:
            # Both ends take part in the all-reduce, whichever of them has a gradient.
            sum_now([each for name, each in own if len(self._owners[name]) > 1], self._tied)
        if self._copies is not None and not self._context.placement.states_average_grads:
            average_now([each for _, each in own], self._copies)


def scheduled(kind: str, stages: Sequence[Any], count: int) -> Any:
    """Return torch's schedule of this kind; its loss is the output of the last stage."""
    # Not scaled: the last stage's loss is divided by the number of micro-batches already.
    options: dict[str, Any] = {"loss_fn": _identity_loss, "scale_grads": False}
    if kind == "interleaved_1f1b":
        return ScheduleInterleaved1F1B(list(stages), count, **options)
    single = ScheduleGPipe if kind == "gpipe" else Schedule1F1B
    return single(stages[0], count, **options)


def _identity_loss(output: Tensor, target: Tensor) -> Tensor:
    return output


def _original_error(error: BaseException) -> BaseException | None:
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, MemtuneError) or is_out_of_memory(cause)):
        cause = cause.__cause__
    return cause


def pipe(context: Context, layout: Layout) -> None:
    """Reduce the model of `context` to this rank's stages, and make `Tuned.step` run the schedule.

    Args:
        context: Changed in place; its `blocks` become those of this rank.
        layout: Assignment of blocks to stages.

    Raises:
        ApplyError: There is no process group, the degree does not divide it, the ranks' weights differ, or
            the layout is not one of this model.
    """
    require_ranks(context, "a pipeline")
    _require_layout(context, layout)
    mesh = meshes(context.device.type, layout.degree)
    copies, group = mesh[0], mesh[1].get_group()
    mine = [index for index in range(len(layout.stages)) if index % layout.degree == group.rank()]
    # Making groups is collective, so it comes before anything that may raise on one rank.
    tied = _tied_group(context, layout)
    everything = {name: layout.owners(name) for name in context.model.state_dict(keep_vars=True)}
    before = dict(context.model.named_parameters())
    keep_own(context, everything, mine, layout.degree, group)
    pipeline = Pipeline(context, layout, group, None if copies is None else copies.get_group(), tied)
    become_pieces(context, layout.blocks, pipeline.run, layout.first, before)
    # From here on recompute and offload claim this rank's blocks only.
    context.blocks = [name for index in mine for name in layout.stages[index]]
    context.activations = table = ActivationTable(context.model, context.blocks)
    table.own = OwnOutputs()
    table.stages = [s for s in mine for _ in layout.stages[s]]
    pipeline.run.activations = table
    table.last = {n for n, (stage, after) in enumerate(pairwise([*table.stages, -1])) if stage != after}
    context.loop.pipeline = pipeline
    context.loop.rotation = pipeline.rotation
    context.placement.model_parallel_size = layout.degree
    context.checks["sharding.parallel"] = lambda: _check(context, layout, mine)


def _require_layout(context: Context, layout: Layout) -> None:
    require_groups(context, layout.degree)
    outside = {
        n
        for n, _ in context.model.named_parameters()
        if not any(n.startswith(f"{b}.") for b in layout.blocks)
    }
    strange = sorted((set(layout.blocks) ^ set(context.blocks)) | ((layout.first | layout.last) - outside))
    if strange or len(layout.stages) % layout.degree:
        odd = (
            f"{strange[0]} is not among its blocks and weights on both sides."
            if strange
            else "Its stages do not divide."
        )
        raise plan_of_other_model("sharding.parallel: {kind: pipeline}", odd)


def _tied_group(context: Context, layout: Layout) -> dist.ProcessGroup | None:
    """Return the ranks of the first and last stage if they share a weight; collective."""
    if not layout.first & layout.last:
        return None
    found = None
    for start in range(0, context.placement.world_size, layout.degree):
        ends = [start, start + layout.last_rank]
        made = dist.new_group(ends)
        if context.placement.rank in ends:
            found = made
    return found


def _check(context: Context, layout: Layout, mine: Sequence[int]) -> dict[str, Any]:
    held, pipeline = context.placement.remote_parameters, context.loop.pipeline
    own = [name for index in mine for name in layout.stages[index]]
    if held is None or not isinstance(pipeline, Pipeline) or context.blocks != own:
        raise ApplyError("the stages of this rank are not those of the plan.", code="MT392")
    parameters = dict(context.model.named_parameters())
    large = [name for name in held.absent if name in parameters and parameters[name].numel() > 1]
    if large:
        raise ApplyError(
            "weights of other stages are still here.", evidence=f"First: {large[0]}.", code="MT392"
        )
    own_bytes = sum(p.nbytes for name, p in parameters.items() if name not in held.absent)
    return {"degree": layout.degree, "stages": len(layout.stages), "blocks": len(own), "own_bytes": own_bytes}
