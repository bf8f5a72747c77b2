"""What techniques that cut layers over ranks have in common: recorded steps, groups of ranks, plans that name
the layers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from memtune.effects import Effects
from memtune.errors import ApplyError
from memtune.parallel.model import Sharing, share, sum_shards
from memtune.program import Program, RankClass, Resource, accumulate_gradients, remembered
from memtune.runtime import Context
from memtune.search_spaces._support import active, conflict
from memtune.technique import CutRecording, Exactness, PassStage, Plan, Reason, Rewrite, Target, Technique
from memtune.workload import Pair, find_pairs


def divides_states(target: Target) -> bool:
    """Whether something divides or replicates model states, and averages gradients."""
    return active(target, "sharding.states") is not None


class PairsPlan(Plan):
    """The layers that a group of ranks shares."""

    degree: Annotated[int, Field(ge=2)]
    """Ranks of a group."""
    pairs: Annotated[tuple[Pair, ...], Field(min_length=1)]
    """Pairs of linear layers, each with columns, row, and whether it is of attention."""


class Shared(Technique):
    """Layers that a group of ranks has together, as a recording with them really divided shows that it
    may.
    """

    slot: ClassVar[str] = "sharding.parallel"
    exactness: ClassVar[Exactness] = Exactness.REORDERED
    effects: ClassVar[Effects] = Effects(layers="shared", eager_only="graphs are made of whole layers")

    degree: Annotated[int, Field(ge=2)] | None = None
    """Ranks that share layers, all of them by default; a divisor of the ranks and of what is divided."""

    @abstractmethod
    def asked(self, target: Target) -> str:
        """What is divided, as `autotune.record_parallel.sharded_recording` knows it."""

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs two ranks, a degree that divides them and the layers, plain layers, and nothing else that
        divides the model.
        """
        degree = self.degree or target.ranks
        if target.ranks < 2:
            return Reason("there is only one rank to share layers with", "--gpus or --workers 2 and more")
        if target.compiled:
            return Reason(self.effects.eager_only, "execution.compile: false")
        if target.ranks % degree:
            return Reason(
                f"degree={degree} does not divide the {target.ranks} ranks", "a divisor of the ranks"
            )
        if target.cut is None:
            return Reason(
                "each degree must be recorded, which is done when the slot is asked for",
                "--axes sharding.parallel,recompute",
            )
        if (reason := conflict(self, target, "offload.states")) is not None:
            return reason
        states = active(target, "sharding.states")
        if states is not None and (reason := self._not_beside(states, target)) is not None:
            return reason
        found = target.cut(degree, self.asked(target), target.ranks)
        return found if isinstance(found, Reason) else None

    def _not_beside(self, states: Technique, target: Target) -> Reason | None:
        """Why `states`, which divides or replicates the model's states, cannot do so here."""
        text = f"sharding.states: {states.kind} does not work on layers that ranks share"
        return Reason(text, "sharding.states: {kind: none}")

    def plan(self, program: Program, target: Target) -> Plan:
        """Which layers are divided, as the recording has shown that they may be."""
        return self.plan_types[0](**self._recorded(target).fields)

    def choices_on(self, target: Target) -> dict[str, tuple[Any, ...]]:
        """All ranks and the sizes of a node, a part of it or several."""
        return {"degree": (None, *target.group_sizes()), **self.choices()}

    def _recorded(self, target: Target) -> CutRecording:
        found = (
            target.cut(self.degree or target.ranks, self.asked(target), target.ranks)
            if target.cut is not None
            else None
        )
        assert isinstance(found, CutRecording), "fits refuses what was not recorded"
        return found


class InParts(Shared):
    """Layers of which each rank of a group has a part; states are divided among the ranks that hold the same
    part.
    """

    def ranks_of_a_copy(self, ranks: int) -> int:
        """Those of a group."""
        return self.degree or ranks

    def divides_parameters(self, ranks: int, plan: Any) -> bool:
        """Those of the layers that are shared."""
        return True

    def _not_beside(self, states: Technique, target: Target) -> Reason | None:
        degree = self.degree or target.ranks
        if degree == target.ranks:
            text = (
                f"all {degree} ranks share layers: sharding.states: {states.kind} has no copies of a part to"
                " work on"
            )
            return Reason(text, "a smaller degree, or sharding.states: {kind: none}")
        if not states.effects.among_copies:
            return super()._not_beside(states, target)
        if not isinstance(getattr(states, "reshard_after_forward", True), bool):
            text = (
                f"sharding.states: {states.kind} keeps parts of units over ranks that are neighbours, which"
                " share layers here"
            )
            return Reason(text, "reshard_after_forward: true")
        return None


class TakingTurns(Shared):
    """A group of ranks that works on one micro-batch at a time."""

    def summed(self, program: Program, plan: Any) -> frozenset[str]:
        """Parameters whose gradients are summed over a group; no one's where every rank has all of them."""
        return frozenset()

    def rewrite(self, program: Program, plan: Any, target: Target) -> Program:
        """The step as recorded with the layers cut, batches sent round, gradients averaged between the
        groups.

        What divides or replicates states averages gradients itself; `_sum_in_group` sums inside a group after
        that.
        """
        degree, node = self.degree or target.ranks, target.hardware.local_ranks(target.ranks)
        accumulate = program.accumulate * degree
        between = Resource.INTER_LINK if degree % node == 0 else Resource.INTRA_LINK
        alone = not divides_states(target)
        copies, summed = (
            (target.ranks // degree, self.summed(program, plan)) if alone else (1, frozenset[str]())
        )
        return _taking_turns(
            program,
            self._recorded(target),
            Sharing(degree, copies, between, accumulate, summed, self._inside(target)),
        )

    def _inside(self, target: Target) -> Resource:
        """The link inside a group."""
        return Resource.INTER_LINK if target.hardware.local_ranks(target.ranks) == 1 else Resource.INTRA_LINK

    def passes(self) -> Mapping[PassStage, Rewrite]:
        """The rewrite, and sums inside a group after the states' own reductions."""
        return {**super().passes(), PassStage.WHOLE_STEP: self._sum_in_group}

    def _sum_in_group(self, program: Program, plan: Any, target: Target) -> Program | Reason:
        """What is summed inside a group, where each rank has a part of it left, after the states' own
        reductions.
        """
        degree = self.ranks_of_a_copy(target.ranks)
        if degree == 1 or not divides_states(target):
            return program  # who averages over all ranks averages over the group's as well
        summed = self.summed(program, plan)
        if not summed:
            return program
        how = Sharing(degree, 1, Resource.NOTHING, program.accumulate, summed, self._inside(target))
        return program.with_step(sum_shards(program.step, how))


@remembered
def _taking_turns(program: Program, recorded: CutRecording, how: Sharing) -> Program:
    """One object for all states that the same copies hold: what other passes make of it is shared as well."""
    step = share(accumulate_gradients(recorded.recording.at(program.micro_batch)), how)
    ranks = (RankClass(program.ranks, step),)
    return Program(ranks, program.micro_batch, how.accumulate, program.notes, sharers=how.ranks)


class CutLayers(InParts, TakingTurns):
    """Layers that a group of ranks has in parts, and computes with together."""

    plan_types: ClassVar[tuple[type[Plan], ...]] = (PairsPlan,)

    @abstractmethod
    def cut_live(self, context: Context, pairs: Sequence[Pair], degree: int) -> None:
        """Cut `pairs` of the live model."""

    def apply(self, context: Context, plan: PairsPlan) -> None:
        """Cut the layers that the plan names."""
        degree = self.degree or context.placement.world_size
        self.cut_live(context, planned(self.kind, context, plan, degree), degree)

    def explain(self, plan: PairsPlan) -> tuple[str, ...]:
        """How many layers of which sort are shared by how many ranks."""
        heads = sum(pair.attention for pair in plan.pairs)
        return (
            f"{plan.degree} ranks share {heads} attentions and {len(plan.pairs) - heads} MLPs",
            "each rank brings its own micro-batches, and they take turns",
        )


def planned(kind: str, context: Context, plan: PairsPlan, degree: int) -> tuple[Pair, ...]:
    """The pairs of `plan` for a technique of this kind, checked against the model.

    Raises:
        ApplyError: The plan was made for another degree or model.
    """
    shapes = [(name, tuple(p.shape)) for name, p in context.model.named_parameters()]
    known = find_pairs(shapes, context.blocks).found
    strange = [pair.row for pair in plan.pairs if pair not in known]
    if strange or plan.degree != degree:
        raise of_another(
            kind,
            (
                f"{strange[0]} is not a pair here."
                if strange
                else f"It is for groups of {plan.degree}, here of {degree}."
            ),
        )
    return plan.pairs


def of_another(kind: str, evidence: str) -> ApplyError:
    """The error that says that a plan is not this model's."""
    return ApplyError(
        f"the plan of sharding.parallel: {{kind: {kind}}} was made for another model or degree.",
        evidence=evidence,
        fix="search again",
        code="MT393",
    )
