"""Blocks in stages on several ranks, with micro-batches in flight between them (pipeline parallelism)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from memtune import refusals
from memtune.effects import Effects
from memtune.hardware import op_costs
from memtune.parallel.pipeline import Chain, PipelineSettings, balanced, chain_of, piped
from memtune.program import (
    Kind,
    Program,
    RankClass,
    Stages,
    Step,
    accumulate_gradients,
    columns_of,
    idle_share,
)
from memtune.runtime import Context
from memtune.search_spaces import active
from memtune.search_spaces._stage_steps import steps_of_stages
from memtune.search_spaces._support import conflict
from memtune.technique import Exactness, PassStage, Plan, Reason, Rewrite, Target, Technique
from memtune.units import format_bytes, format_ranks
from memtune.workload import require_structures

if TYPE_CHECKING:
    from memtune.parallel.pipeline import Layout


class PipelinePlan(Plan):
    """Blocks of each stage, and the bytes between stages."""

    degree: Annotated[int, Field(ge=2)]
    """Ranks of a pipeline."""
    stages: Annotated[tuple[Annotated[tuple[str, ...], Field(min_length=1)], ...], Field(min_length=1)]
    """(stages,) names of the blocks of each stage."""
    first: tuple[str, ...]
    """Parameters that are used before the first block."""
    last: tuple[str, ...]
    """Parameters that are used after the last block."""
    passed_bytes: Annotated[int, Field(ge=0)]
    """Bytes sent from stage to stage for each micro-batch."""
    outputs: tuple[str, ...] = ()
    """(blocks,) structure of each block's output (`memtune.workload.output_structure`); none if every block
    returns a tensor.
    """

    @model_validator(mode="after")
    def _has_forms(self) -> Self:
        require_structures(self.outputs, sum(map(len, self.stages)))
        return self


class Pipeline(Technique):
    """Trades idle ranks during the first and last micro-batches for one message of activations per stage
    boundary.

    A rank holds the weights, gradients and optimizer state of its stages only: 1/degree of the model's with
    equal stages. The first stage has the embedding and all else before the blocks, the last one everything
    after the blocks and the loss. A boundary is crossed by one block's output in forward and its gradient in
    backward, once per micro-batch. Stage s of S holds the activations of at most S - s micro-batches (1F1B),
    or of all of them under `gpipe`.

    Each rank provides its own micro-batches and all ranks of a pipeline compute them together, so m = degree
    · accumulate are in flight, and a rank is idle for (degree - 1) / (v · m) of its busy time, with v stages
    on each rank.

    Parallel pipelines are replicas: techniques of `sharding.states` work among the ranks with the same
    stages, in every forward and backward of a stage if they gather or reduce in each micro-batch.

    Reordered: a micro-batch's gradients are the plain ones to the bit and are added in the plain order; a
    weight that the first and the last stage both use gets its two parts added at the end, and parallel
    pipelines average their sums. Random numbers are drawn by stage.
    """

    kind: Literal["pipeline"] = "pipeline"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (PipelinePlan,)
    title: ClassVar[str] = "Blocks in stages on several ranks"
    source: ClassVar[str] = (
        "Narayanan et al. 2021, arXiv:2104.04473, section 2.2; Huang et al. 2019, GPipe, arXiv:1811.06965"
    )
    paper: ClassVar[str] = "Narayanan et al. 2021"
    exactness: ClassVar[Exactness] = Exactness.REORDERED
    effects: ClassVar[Effects] = Effects(
        layers="stages", eager_only="a stage stops the user's code between blocks, compiled or not"
    )

    degree: Annotated[int, Field(ge=2)] | None = None
    """Ranks of a pipeline, a divisor of the ranks. Default: all."""
    schedule: Literal["1f1b", "interleaved_1f1b", "gpipe"] = "1f1b"
    """One forward, one backward; the same with several stages on each rank; or all forwards first."""
    stages_per_rank: Annotated[int, Field(ge=2)] = 2
    """Stages on each rank, with `interleaved_1f1b`; other schedules have one."""

    def sentence(self) -> str:
        """Return the setting as one clause."""
        names = {"1f1b": "one forward, one backward", "gpipe": "all forwards first"}
        order = names.get(self.schedule, f"{self.stages_per_rank} stages on each rank")
        return f"runs the blocks as pipeline stages on {format_ranks(self.degree)}, {order}"

    def _count(self, ranks: int) -> int:
        return (self.degree or ranks) * (self.stages_per_rank if self.schedule == "interleaved_1f1b" else 1)

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Require ranks, a degree that divides them, a chain with enough cuts, and no conflict."""
        degree = self.degree or target.ranks
        if target.ranks < 2:
            return refusals.one_rank(" to put a stage on")
        if (reason := refusals.uneven_groups("degree", degree, target.ranks)) is not None:
            return reason
        if not target.plans_parallel(self.kind):
            return Reason("stages are planned only when the slot is searched", "--axes sharding.parallel")
        reason = conflict(
            self,
            target,
            "sharding.communication",
            "offload.states",
            "split",
            "execution.order",
            "sharding.states",
        )
        reason = reason or self._wrong_states(program.step, target)
        reason = reason or conflict(self, target, "recompute", "offload.activations")
        if reason is not None:
            return reason
        if target.compiled:
            return Reason(self.effects.eager_only, "execution.compile: false")
        return self._cannot_cut(program.step, self._count(target.ranks))

    def _wrong_states(self, step: Step, target: Target) -> Reason | None:
        """Return why model states cannot be sharded among parallel pipelines' ranks with the same stages."""
        states, degree = active(target, "sharding.states"), self.degree or target.ranks
        if states is None:
            return None
        asked = f"sharding.states: {states.kind}"
        if degree == target.ranks:
            one = "with one pipeline there is one copy of each stage"
            return Reason(
                f"{asked}: {one}", "sharding.states: {kind: none}, or pipelines of a smaller degree"
            )
        if not states.effects.every_micro_batch:
            return None
        moving, chain = target.chosen.get("offload.activations"), chain_of(step)
        if self.schedule == "interleaved_1f1b":
            return refusals.several_stages(states.kind)
        if moving is not None and moving.effects.activations == "stage":
            return refusals.copies_follow_schedule(states.kind)
        if isinstance(chain, Chain) and set(chain.first) & set(chain.last):
            tied = sorted(set(chain.first) & set(chain.last))[0]
            return refusals.tied_stages(states.kind, tied)
        if getattr(states, "blocks_per_unit", 1) > 1:
            return Reason("a unit of several blocks may lie in two stages", "blocks_per_unit: 1")
        if not isinstance(getattr(states, "reshard_after_forward", True), bool):
            return Reason(
                "units in smaller groups do not work on stages", "reshard_after_forward: true, or false"
            )
        return None

    def ranks_of_a_copy(self, ranks: int) -> int:
        return self.degree or ranks

    def divides_parameters(self, ranks: int, plan: PipelinePlan) -> bool:
        return True

    def _cannot_cut(self, step: Step, count: int) -> Reason | None:
        """Return why the blocks of `step` cannot be divided into `count` stages."""
        chain = chain_of(step)
        if isinstance(chain, str):
            return refusals.no_chain(chain, "parallel: {kind: none}")
        if len(step.blocks) < count:
            return refusals.few_blocks_for_stages(len(step.blocks), count, "a smaller degree")
        if len(chain.cuts) < count - 1:
            text = f"the blocks can be cut in {len(chain.cuts)} places for {count} stages"
            return Reason(f"{text}: {chain.obstacle}", "a smaller degree, or parallel: {kind: none}")
        return None

    def plan(self, program: Program, target: Target) -> PipelinePlan:
        step, degree = program.step, self.degree or target.ranks
        chain = chain_of(step)
        assert isinstance(chain, Chain), "fits refuses others"
        count = self._count(target.ranks)
        seconds, n_bytes = _costs(step, chain, target, count, program.accumulate * degree)
        starts = balanced(seconds, n_bytes, chain.cuts, count)
        assert starts is not None, "fits refuses too few cuts"
        ends = (*starts[1:], len(step.blocks))
        return PipelinePlan(
            degree=degree,
            stages=tuple(step.blocks[first:end] for first, end in zip(starts, ends, strict=True)),
            first=chain.first,
            last=chain.last,
            passed_bytes=chain.passed_bytes,
            outputs=chain.outputs,
        )

    def rewrite(self, program: Program, plan: PipelinePlan, target: Target) -> Program:
        """Return the step of a later micro-batch with those of all ranks of a pipeline, not yet divided."""
        degree = self.degree or target.ranks
        step = program.step if program.accumulate > 1 else accumulate_gradients(program.step)
        blocks = {name: index for index, name in enumerate(step.blocks)}
        stages = Stages(tuple(blocks[stage[0]] for stage in plan.stages), degree, self.schedule)
        ranks = (RankClass(program.ranks, step),)
        accumulate = program.accumulate * degree
        return Program(ranks, program.micro_batch, accumulate, program.notes, sharers=degree, stages=stages)

    def passes(self) -> Mapping[PassStage, Rewrite]:
        # A pipeline is cut into stages once every other pass has run on the complete step.
        return {**super().passes(), PassStage.WHOLE_STEP: self._into_stages}

    def _into_stages(self, program: Program, plan: PipelinePlan, target: Target) -> Program | Reason:
        """Return the step of each pipeline rank with all micro-batches, the rank of highest peak first."""
        settings, times = piped(program, target.hardware)
        representatives = _representatives(program.step, settings, target)
        try:
            steps = steps_of_stages(program, target, list(representatives))
        except ValueError as error:
            return refusals.no_chain(error, "parallel: {kind: none}")
        classes = [
            RankClass(
                settings.copies * len(mine),
                step,
                tuple(copy * settings.ranks + rank for copy in range(settings.copies) for rank in mine),
            )
            for mine, step in zip(representatives.values(), steps, strict=True)
        ]
        classes.sort(key=lambda each: each.step.peak_bytes(), reverse=True)
        return Program(
            tuple(classes),
            program.micro_batch,
            times,
            program.notes,
            sharers=settings.ranks,
            unrolled=settings.micro_batches,
            idle=idle_share(settings.ranks, settings.stages_per_rank, program.accumulate),
        )

    def apply(self, context: Context, plan: PipelinePlan) -> None:
        """Keep this rank's stages of the plan."""
        from memtune.parallel.pipeline import pipe  # a second and a half to import, which no search needs

        pipe(context, _layout(self, context, plan))

    def explain(self, plan: PipelinePlan) -> tuple[str, ...]:
        sizes = ", ".join(str(len(stage)) for stage in plan.stages)
        return (
            f"{len(plan.stages)} stages of {sizes} blocks on {plan.degree} ranks",
            (
                f"{format_bytes(plan.passed_bytes)} pass from stage to stage for each micro-batch, and as"
                " much back"
            ),
            "each rank provides its own micro-batches, and tuned.step runs them all",
        )

    def record(self, target: Target) -> dict[str, Any]:
        degree = self.degree or target.ranks
        stages = self._count(target.ranks) // degree
        return {"parallel.pipeline": {"degree": degree, "schedule": self.schedule, "stages_per_rank": stages}}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        # `gpipe` takes as long as `1f1b` and holds more.
        return {"schedule": ("1f1b", "interleaved_1f1b")}

    def choices_on(self, target: Target) -> dict[str, tuple[Any, ...]]:
        """Return all ranks, and the sizes of a node, a part of it or several."""
        return {"degree": (None, *target.group_sizes()), **self.choices()}


def _representatives(step: Step, settings: PipelineSettings, target: Target) -> dict[int, list[int]]:
    """Return the ranks of a pipeline whose steps are simulated → the ranks that each represents."""
    # These are the first, the second and the last rank. Those between them have fewer micro-batches in
    # flight than the second; the one that holds most and the slowest represent themselves, and the
    # second all others.
    chain = chain_of(step)
    assert isinstance(chain, Chain), "fits refuses others"
    seconds, n_bytes = _costs(step, chain, target, len(settings.starts), settings.micro_batches)
    held, taken = np.zeros(settings.ranks), np.zeros(settings.ranks)
    for stage, (first, end) in enumerate(
        zip(settings.starts, (*settings.starts[1:], len(step.blocks)), strict=True)
    ):
        held[stage % settings.ranks] += n_bytes[stage, first:end].sum()
        taken[stage % settings.ranks] += seconds[first:end].sum()
    chosen = sorted(
        {0, min(1, settings.ranks - 1), settings.ranks - 1, int(held.argmax()), int(taken.argmax())}
    )
    others = sorted({chosen[1], *range(settings.ranks)} - {*chosen[:1], *chosen[2:]})
    return {rank: others if rank == chosen[1] else [rank] for rank in chosen}


def _costs(step: Step, chain: Chain, target: Target, count: int, micro_batches: int) -> tuple[Any, Any]:
    """Return (blocks,) seconds of both passes, and (stages, blocks) bytes of weights and saved tensors."""
    n_blocks = len(step.blocks)
    op_s = op_costs(step, target.hardware, ranks=target.ranks).op_s
    mine = chain.place >= 0
    at = np.clip((chain.place[mine] - 1) // 2, 0, n_blocks - 1)
    seconds = np.bincount(at, op_s[mine], n_blocks)
    columns, held = columns_of(step.parameters), np.zeros(n_blocks)
    first, last = (np.isin(columns.names, names) for names in (chain.first, chain.last))
    for rows, block in ((columns.block >= 0, columns.block), (first, 0), (last & ~first, n_blocks - 1)):
        np.add.at(held, np.broadcast_to(block, len(columns))[rows], _state_bytes(step)[rows])
    saved = np.array([step.saved_bytes(block) for block in range(n_blocks)], np.float64)
    # 1F1B: stage s of S holds the activations of S - s micro-batches, if there are that many.
    in_flight = np.minimum(np.arange(count, 0, -1), micro_batches)
    return seconds, held + in_flight[:, None] * saved


def _state_bytes(step: Step) -> Any:
    """Return (parameters,) bytes of each weight, its gradient and its optimizer state."""
    columns = columns_of(step.parameters)
    found = step.storages.bytes[columns.storage].astype(np.float64)
    found += np.where(columns.trainable, found, 0.0)
    state = (step.storages.owner >= 0) & (step.storages.producer < 0) & (step.storages.kind == Kind.OPTIMIZER)
    np.add.at(found, step.storages.owner[state], step.storages.bytes[state])
    return found


def _layout(technique: Pipeline, context: Context, plan: PipelinePlan) -> Layout:
    """Return the layout of `plan` for the current ranks.

    Raises:
        ApplyError: The plan was made for another degree or number of stages.
    """
    from memtune.parallel.pipeline import Layout

    degree = technique.degree or context.placement.world_size
    if plan.degree != degree or len(plan.stages) != technique._count(context.placement.world_size):
        raise refusals.plan_of_other_model(
            "sharding.parallel: {kind: pipeline}",
            f"It is for {len(plan.stages)} stages on {plan.degree} ranks.",
        )
    return Layout(
        plan.stages, frozenset(plan.first), frozenset(plan.last), degree, technique.schedule, plan.outputs
    )
