"""Blocks in stages, one after the other on several ranks, with micro-batches on their way through them (pipeline parallelism)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from memtune.block_outputs import outputs_in
from memtune.edit import accumulate_gradients
from memtune.errors import ApplyError
from memtune.op_costs import op_costs
from memtune.parameters import columns_of
from memtune.passes.pipeline import Piped, piped
from memtune.passes.stages import Chain, chain_of
from memtune.pipeline_order import Stages, idle_share
from memtune.planners.stages import balanced
from memtune.program import Program, RankClass, Step
from memtune.runtime.context import Context
from memtune.search_spaces._passes import steps_of_stages
from memtune.search_spaces.sharding.parallel._layers import needs_plan, of_another
from memtune.technique import Exactness, Plan, Reason, Target, Technique
from memtune.units import format_bytes

if TYPE_CHECKING:
    from memtune.runtime.pipeline import Layout

_ALONE = ("sharding.communication", "offload.states", "split", "execution.order")
_STATES = ("ddp", "zero1", "zero2", "zero3", "fsdp", "mics")
"""What divides or replicates states among the copies of a stage."""
_BESIDE = ("none", "full", "selective")
"""What else may be done to the blocks: what is decided block by block, without a plan for the whole model's memory."""
_MOVING = ("none", "copy_out", "pipelined")
"""What may move their activations."""


class Pipeline(Technique):
    """Trades ranks that wait while the first and the last micro-batches pass for one message of activations per stage boundary.

    A rank holds the weights, gradients and optimizer state of its stages alone: 1/degree of the model's with equal stages. The
    embedding and all else before the blocks is the first stage's, what follows them and the loss the last one's. What crosses a
    boundary is one block's output forwards and its gradient backwards, once per micro-batch. Stage s of S holds the activations
    of at most S - s micro-batches (1F1B); of all of them under `gpipe`.

    Each rank brings its own micro-batches and all ranks of a pipeline work on them together, so m = degree · accumulate are on
    their way, and a rank waits (degree - 1) / (v · m) of the time that it works, v stages on each rank.

    Pipelines beside each other hold copies of the same stages: what divides or replicates states does so among these, in every
    forward and backward of a stage where it gathers or reduces in each micro-batch.

    Reordered: a micro-batch's gradients are the plain ones to the bit and are added in the plain order; a weight that the first
    and the last stage both use gets its two parts added up at the end, and pipelines beside each other average their sums. Random
    numbers are drawn by stage.

    Distinguishing test: each rank sends boundaries · m · bytes of a block's output, and holds no weight of another stage.
    """

    kind: Literal["pipeline"] = "pipeline"
    slot: ClassVar[str] = "sharding.parallel"
    title: ClassVar[str] = "Blocks in stages on several ranks"
    source: ClassVar[str] = "Narayanan et al. 2021, arXiv:2104.04473, section 2.2; Huang et al. 2019, GPipe, arXiv:1811.06965"
    exactness: ClassVar[Exactness] = Exactness.REORDERED
    eager_only: ClassVar[str] = "a stage stops the user's code between blocks, compiled or not"

    degree: Annotated[int, Field(ge=2)] | None = None
    """Ranks of a pipeline, all of them by default; a divisor of the ranks."""
    schedule: Literal["1f1b", "interleaved_1f1b", "gpipe"] = "1f1b"
    """One forward, one backward; the same with several stages on each rank; or all forwards first."""
    stages_per_rank: Annotated[int, Field(ge=2)] = 2
    """Of `interleaved_1f1b`; the others have one."""

    def _count(self, ranks: int) -> int:
        return (self.degree or ranks) * (self.stages_per_rank if self.schedule == "interleaved_1f1b" else 1)

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs two ranks, a degree that divides them, blocks in a chain with enough cuts, and nothing that moves state."""
        degree = self.degree or target.ranks
        if target.ranks < 2:
            return Reason("there is only one rank to put a stage on", "--gpus or --workers 2 and more")
        if target.ranks % degree:
            return Reason(f"degree={degree} does not divide the {target.ranks} ranks", "a divisor of the ranks")
        if target.cut is None:
            return Reason("stages are looked at when the slot is asked for", "--axes sharding.parallel")
        for slot in _ALONE:
            other = target.chosen.get(slot)
            if other is not None and other.kind not in ("none", "program"):
                return Reason(f"{slot}: {other.kind} does not work on the stages of a pipeline", f"{slot}: {{kind: none}}")
        wrong = self._wrong_states(program.step, target)
        if wrong is not None:
            return wrong
        recompute = target.chosen.get("recompute")
        if recompute is not None and recompute.kind not in _BESIDE:
            return Reason(f"recompute: {recompute.kind} is planned for a rank that has all blocks", "recompute: {kind: full}")
        moving = target.chosen.get("offload.activations")
        if moving is not None and moving.kind not in _MOVING:
            return Reason(
                f"offload.activations: {moving.kind} is planned for a rank that has all blocks",
                "offload.activations: {kind: pipelined}",
            )
        if target.compiled:
            return Reason("a stage stops the user's code between blocks, compiled or not", "execution.compile: false")
        return self._uncut(program.step, self._count(target.ranks))

    def _wrong_states(self, step: Step, target: Target) -> Reason | None:
        """Why model states cannot be divided as asked for among the ranks of other pipelines that have the same stages."""
        states, degree = target.chosen.get("sharding.states"), self.degree or target.ranks
        if states is None or states.kind == "none":
            return None
        asked, fix = f"sharding.states: {states.kind}", "sharding.states: {kind: none}, or zero1"
        if states.kind not in _STATES:
            return Reason(f"{asked} does not work on the stages of a pipeline", fix)
        if degree == target.ranks:
            one = "with one pipeline there is one copy of each stage"
            return Reason(f"{asked}: {one}", "sharding.states: {kind: none}, or pipelines of a smaller degree")
        if not states.every_micro_batch:
            return None
        moving, chain = target.chosen.get("offload.activations"), chain_of(step)
        if self.schedule == "interleaved_1f1b":
            return Reason(f"{asked} works on one stage of a rank", "schedule: 1f1b, or sharding.states: zero1")
        if moving is not None and moving.kind == "pipelined":
            return Reason(f"{asked} does not work where copies follow the schedule", "offload.activations: {kind: copy_out}")
        if isinstance(chain, Chain) and set(chain.first) & set(chain.last):
            tied = sorted(set(chain.first) & set(chain.last))[0]
            return Reason(f"{asked}: the first and the last stage both have {tied}", "sharding.states: zero1")
        if getattr(states, "blocks_per_unit", 1) > 1:
            return Reason("a unit of several blocks may lie in two stages", "blocks_per_unit: 1")
        if not isinstance(getattr(states, "reshard_after_forward", True), bool):
            return Reason("units in smaller groups do not work on stages", "reshard_after_forward: true, or false")
        return None

    def ranks_of_a_copy(self, ranks: int) -> int:
        """Those of a pipeline."""
        return self.degree or ranks

    def divides_parameters(self, ranks: int, plan: Plan) -> bool:
        """By stages."""
        return True

    def _uncut(self, step: Step, count: int) -> Reason | None:
        """Why the blocks of `step` cannot be put into `count` stages."""
        chain = chain_of(step)
        if isinstance(chain, str):
            return Reason(f"the blocks are no chain: {chain}", "parallel: {kind: none}")
        if len(step.blocks) < count:
            return Reason(f"{len(step.blocks)} blocks are fewer than {count} stages", "a smaller degree")
        if len(chain.cuts) < count - 1:
            text = f"the blocks can be cut in {len(chain.cuts)} places for {count} stages"
            return Reason(f"{text}: {chain.obstacle}", "a smaller degree, or parallel: {kind: none}")
        return None

    def plan(self, program: Program, target: Target) -> Plan:
        """Which blocks each stage has: the slowest as fast as can be, then the fullest as empty."""
        step, degree = program.step, self.degree or target.ranks
        chain = chain_of(step)
        assert isinstance(chain, Chain), "fits refuses others"
        count = self._count(target.ranks)
        seconds, n_bytes = _costs(step, chain, target, count, program.accumulate * degree)
        starts = balanced(seconds, n_bytes, chain.cuts, count)
        assert starts is not None, "fits refuses too few cuts"
        ends = (*starts[1:], len(step.blocks))
        stages = [list(step.blocks[first:end]) for first, end in zip(starts, ends, strict=True)]
        first, last = list(chain.first), list(chain.last)
        return Plan(decisions={
            "degree": degree, "stages": stages, "first": first, "last": last, "passed_bytes": chain.passed_bytes,
            **({"outputs": list(chain.outputs)} if chain.outputs else {}),
        })  # fmt: skip

    def rewrite(self, program: Program, plan: Plan, target: Target) -> Program:
        """The step of a later micro-batch, of which each pipeline has those of all its ranks; `finish` puts it into stages."""
        degree = self.degree or target.ranks
        step = program.step if program.accumulate > 1 else accumulate_gradients(program.step)
        blocks = {name: index for index, name in enumerate(step.blocks)}
        stages = Stages(tuple(blocks[stage[0]] for stage in plan.decisions["stages"]), degree, self.schedule)
        ranks = (RankClass(program.ranks, step),)
        accumulate = program.accumulate * degree
        return Program(ranks, program.micro_batch, accumulate, program.notes, sharers=degree, stages=stages)

    def finish(self, program: Program, plan: Plan, target: Target) -> Program | Reason:
        """The step of each rank of a pipeline, all micro-batches in it; the fullest one first."""
        how, times = piped(program, target.hardware)
        kinds = _kinds(program.step, how, target)
        try:
            steps = steps_of_stages(program, target, list(kinds))
        except ValueError as error:
            return Reason(f"the blocks are no chain: {error}", "parallel: {kind: none}")
        classes = [
            RankClass(how.copies * len(mine), step, tuple(copy * how.ranks + rank for copy in range(how.copies) for rank in mine))
            for mine, step in zip(kinds.values(), steps, strict=True)
        ]
        classes.sort(key=lambda each: each.step.peak_bytes(), reverse=True)
        return Program(
            tuple(classes), program.micro_batch, times, program.notes, sharers=how.ranks, unrolled=how.micro_batches,
            idle=idle_share(how.ranks, how.stages_per_rank, program.accumulate),
        )  # fmt: skip

    def apply(self, context: Context, plan: Plan) -> None:
        """Keep this rank's stages, as the plan has them."""
        from memtune.runtime.pipeline import pipe  # a second and a half to import, which no search needs

        pipe(context, _layout(self, context, plan))

    def explain(self, plan: Plan) -> tuple[str, ...]:
        """How many blocks each stage has, and what passes between them."""
        stages, passed = plan.decisions.get("stages"), plan.decisions.get("passed_bytes")
        if not stages or not passed:
            return ()
        sizes = ", ".join(str(len(stage)) for stage in stages)
        return (
            f"{len(stages)} stages of {sizes} blocks on {plan.decisions.get('degree')} ranks",
            f"{format_bytes(passed)} pass from stage to stage for each micro-batch, and as much back",
            "each rank brings its own micro-batches, and tuned.step runs them all",
        )

    def record(self, target: Target) -> dict[str, Any]:
        """How many stages on how many ranks, and in which order they run."""
        degree = self.degree or target.ranks
        stages = self._count(target.ranks) // degree
        return {"parallel.pipeline": {"degree": degree, "schedule": self.schedule, "stages_per_rank": stages}}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        """One stage on each rank or two; `gpipe` takes as long as `1f1b` and holds more."""
        return {"schedule": ("1f1b", "interleaved_1f1b")}

    def choices_on(self, target: Target) -> dict[str, tuple[Any, ...]]:
        """All ranks, and the sizes of a node, a part of it or several."""
        return {"degree": (None, *target.group_sizes()), **self.choices()}


def _kinds(step: Step, how: Piped, target: Target) -> dict[int, list[int]]:
    """The ranks of a pipeline whose steps are written down, and those that each stands for.

    The first, the second and the last; of those between, which have fewer micro-batches on the way than the second, whichever
    holds most and whichever takes longest stand for themselves, the second for the others.
    """
    chain = chain_of(step)
    assert isinstance(chain, Chain), "fits refuses others"
    seconds, n_bytes = _costs(step, chain, target, len(how.starts), how.micro_batches)
    held, taken = np.zeros(how.ranks), np.zeros(how.ranks)
    for stage, (first, end) in enumerate(zip(how.starts, (*how.starts[1:], len(step.blocks)), strict=True)):
        held[stage % how.ranks] += n_bytes[stage, first:end].sum()
        taken[stage % how.ranks] += seconds[first:end].sum()
    chosen = sorted({0, min(1, how.ranks - 1), how.ranks - 1, int(held.argmax()), int(taken.argmax())})
    others = sorted({chosen[1], *range(how.ranks)} - {*chosen[:1], *chosen[2:]})
    return {rank: others if rank == chosen[1] else [rank] for rank in chosen}


def _costs(step: Step, chain: Chain, target: Target, count: int, micro_batches: int) -> tuple[Any, Any]:
    """(blocks,) seconds of forward and backward, (stages, blocks) bytes of weights and what autograd holds of them."""
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
    on_the_way = np.minimum(np.arange(count, 0, -1), micro_batches)
    return seconds, held + on_the_way[:, None] * saved


def _state_bytes(step: Step) -> Any:
    """(parameters,) bytes of each weight, its gradient and its optimizer state."""
    columns = columns_of(step.parameters)
    found = step.bytes[columns.storage].astype(np.float64)
    found += np.where(columns.trainable, found, 0.0)
    state = (step.owner >= 0) & (step.producer < 0) & (step.kind == 2)
    np.add.at(found, step.owner[state], step.bytes[state])
    return found


def _layout(technique: Pipeline, context: Context, plan: Plan) -> Layout:
    """What `plan` says, checked.

    Raises:
        ApplyError: There is no plan, or it was made for another degree or model.
    """
    from memtune.runtime.pipeline import Layout

    degree, found = technique.degree or context.ranks, plan.decisions
    stages, first, last = found.get("stages"), found.get("first"), found.get("last")
    if not (isinstance(stages, list) and stages and isinstance(first, list) and isinstance(last, list)):
        raise needs_plan("pipeline", "Whether the code between the blocks allows it is seen by recording a step.")
    if found.get("degree") != degree or len(stages) != technique._count(context.ranks):
        raise of_another("pipeline", f"It is for {len(stages)} stages on {found.get('degree')} ranks.")
    names = [*first, *last, *(name for stage in stages for name in (stage if isinstance(stage, list) else [None]))]
    damaged = ApplyError("the plan of sharding.parallel: {kind: pipeline} is damaged.", fix="search again", code="MT393")
    if not all(stages) or not all(isinstance(name, str) for name in names):
        raise damaged
    try:
        outputs = outputs_in(found.get("outputs"), sum(map(len, stages)))
    except ValueError:
        raise damaged from None
    return Layout(tuple(map(tuple, stages)), frozenset(first), frozenset(last), degree, technique.schedule, outputs)
