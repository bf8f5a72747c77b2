"""Saved activations to the host while other micro-batches pass through a pipeline's stage, as few as fit (Yuan)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from memtune.program import Program
from memtune.runtime.come_ahead import Ahead
from memtune.runtime.context import Context
from memtune.runtime.slots import Slots
from memtune.search_spaces.offload.activations._in_slots import (
    GRAIN,
    Ratios,
    by_stage,
    bytes_by_stage,
    moved,
    of_a_block,
    shares,
    smallest,
    waiting,
)
from memtune.search_spaces.offload.activations._shares import needs_plan, of_all, of_runs, to_runs
from memtune.search_spaces.recompute._budget import later_techniques
from memtune.technique import Exactness, Plan, Reason, Target, Technique
from memtune.units import format_bytes

_MOST_AHEAD = 4096


class Pipelined(Technique):
    """Trades copies over the host link, made while a stage works on other micro-batches, for what waits there for its backward.

    Under 1F1B stage i of p holds up to p - i micro-batches, each for p - i - 1 forwards and as many backwards of others.
    What a stage saves for a micro-batch leaves during its forward and the slot after it, and comes back in the slot before its
    backward, so a direction of the link has the time of a forward and a backward for a ratio r of A bytes: nothing is waited for
    while r·A ≤ B·(t_F + t_B). The device holds (1 - r)·(p - i)·A + 2·r·A, and stages in which fewer than two slots lie in between
    (the last two under 1F1B) keep everything.

    r is decided by rank, earlier stages hold more: the smallest in eighths under which the rank stays within the budget. Where
    there is no pipeline the slots are layers: an equal share of all blocks but the last goes while the next block runs, and comes
    back while the block after it runs backward; r is given, or the smallest within `budget_bytes` after every later pass.

    Distinguishing test (`test_copies_keep_to_the_slots_of_the_schedule`): every tensor has arrived a slot after its forward's and
    comes back in the slot before its backward, each stage sends m·r·A, and the peak is the formula's; without slots it is not.
    """

    kind: Literal["pipelined"] = "pipelined"
    slot: ClassVar[str] = "offload.activations"
    title: ClassVar[str] = "Saved activations to the host in the slots of a pipeline"
    source: ClassVar[str] = (
        "Yuan et al. 2024, Accelerating the Training of Large Language Models using Efficient Activation Rematerialization "
        "and Optimal Hybrid Parallelism, USENIX ATC 24, section 4"
    )
    exactness: ClassVar[Exactness] = Exactness.BITWISE
    eager_only: ClassVar[str] = "which tensors come back together is seen in the eager step"

    ratio: Annotated[float, Field(gt=0, le=1)] | None = None
    """The same on every stage that can use it; left out: the smallest that fits, by rank. Larger frees more and copies more."""
    budget_bytes: Annotated[int, Field(gt=0)] | None = None
    """Peak to stay within where no ratio is given; left out: in a pipeline all the memory that the target gives."""
    min_bytes: Annotated[int, Field(ge=0)] = 1 << 20
    """Smaller tensors stay: a copy has a fixed cost."""

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs a budget that the step exceeds and some ratio meets, and, in a pipeline, stages where micro-batches wait."""
        if not program.step.blocks:
            return Reason("the model has no blocks whose activations could move", "def blocks(model) in model.py")
        if target.compiled:
            return Reason(self.eager_only, "execution.compile: false")
        stages, budget = program.stages, self._budget(program, target)
        if self.ratio is None and budget is None:
            return Reason(
                "there is no budget to plan for: without a pipeline it is planned for one of its own",
                "offload.activations: {kind: pipelined, budget_bytes: 20000000000}, or ratio: 0.5, or tsplit",
            )
        if stages is not None and not any(waiting(stages, program.accumulate)):
            return Reason(
                f"no micro-batch waits for two slots on any of {len(stages.starts)} stages under {stages.schedule}",
                "more stages or micro-batches, or offload.activations: {kind: copy_out}",
            )
        saved = program.step.save_storage[program.step.save_block >= 0]
        if not (program.step.bytes[saved] >= max(self.min_bytes, 1)).any():
            return Reason(f"no saved activation has {self.min_bytes} bytes", "a smaller min_bytes")
        return None if self.ratio is not None else self._misses(self._smallest(program, target), int(budget or 0))

    def _misses(self, found: Ratios, budget_bytes: int) -> Reason | None:
        if max(found.plain_bytes) <= budget_bytes:
            return Reason("everything fits into the budget as it is", "offload.activations: {kind: none}")
        if max(found.peak_bytes) > budget_bytes:
            return Reason(
                f"no ratio stays within {format_bytes(budget_bytes)}: the most gives {format_bytes(max(found.peak_bytes))}",
                "a smaller micro-batch, recompute, or sharding or offload of what is not an activation",
            )
        return None

    def _smallest(self, program: Program, target: Target) -> Ratios:
        run = program.ranks, program.micro_batch, program.accumulate
        later = later_techniques(target, self.slot)
        budget = self._budget(program, target) or 0
        how = self.min_bytes, self._ahead(program, target)
        return smallest(program.step, program.stages, run, how, budget, later, target.hardware)

    def _budget(self, program: Program, target: Target) -> int | None:
        """The target's counts on the stages of a pipeline alone: elsewhere `tsplit` and `copy_out` are what searches look at."""
        return self.budget_bytes or (target.budget_bytes if program.stages is not None else None)

    def _ahead(self, program: Program, target: Target) -> int:
        """Blocks that run again ask for what they kept in an order of their own, so nothing comes ahead of that."""
        recompute = target.chosen.get("recompute")
        again = recompute is not None and recompute.kind != "none"
        return 0 if again or program.stages is not None else of_a_block(program.step, self.min_bytes)

    def plan(self, program: Program, target: Target) -> Plan:
        """How much of each block moves, and what that leaves on the device."""
        ranks = program.stages.ranks if program.stages else 1
        told: dict[str, Any] = {}
        if self.ratio is not None:
            ratios = by_stage(program, [self.ratio] * ranks)
        else:
            found = self._smallest(program, target)
            ratios = by_stage(program, [each / GRAIN for each in found.eighths])
            told = {"peak_bytes": max(found.peak_bytes), "plain_bytes": max(found.plain_bytes)}
        each = shares(program, ratios, self.min_bytes)
        return Plan(decisions={
            "ratios": ratios, "shares": to_runs(program, each), "ahead": self._ahead(program, target),
            "told": {**told, "moved_bytes": bytes_by_stage(program, each, self.min_bytes)},
        })  # fmt: skip

    def rewrite(self, program: Program, plan: Plan, target: Target) -> Program:
        """Copies out after each save and back before the backward of a block or stage; a pipeline's pass puts them into slots."""
        return moved(program, of_all(plan.decisions["shares"]), self.min_bytes, plan.decisions["ahead"])

    def apply(self, context: Context, plan: Plan) -> None:
        """Claim the blocks' shares in the activation table, which follows the slots from here on.

        Raises:
            ApplyError: There is no plan, or it was made for another model.
        """
        table = context.activations
        n_stages, each, ahead = _decided(plan, table.stages or [0] * len(table.regions))
        if (context.pipeline is None) != (n_stages == 1):
            raise needs_plan("pipelined", f"The config's is for {n_stages} stages.")
        if context.pipeline is None:
            table.ahead = Ahead(ahead)
        else:
            table.slots = slots = Slots()
            context.checks[self.slot] = lambda: {"moments": len(slots.trace)}
        for region, share in zip(table.regions, each, strict=True):
            if share > 0:
                table.claim_move(region.index, share, self.min_bytes)

    def explain(self, plan: Plan) -> tuple[str, ...]:
        """The ratio of each rank, and what moves."""
        try:
            ratios = ", ".join(f"{each:g}" for each in plan.decisions["ratios"])
            sent = ", ".join(format_bytes(each) for each in plan.decisions["told"]["moved_bytes"])
        except (KeyError, TypeError, ValueError):
            return ()
        return (f"ratio {ratios} by stage; {sent} leave for each micro-batch, and come back",)

    def record(self, target: Target) -> dict[str, Any]:
        """What decides how much moves, and by what slots."""
        how = self.ratio if self.ratio is not None else {"budget": self.budget_bytes or target.budget_bytes}
        return {"activations.move": {"tier": "host", "in_slots": True, "ratio": how, "min_bytes": self.min_bytes}}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        """The smallest ratio that fits."""
        return {"ratio": (None,)}


def _decided(plan: Plan, stages: list[int]) -> tuple[int, list[float], int]:
    """For how many stages `plan` is, the shares of blocks of these stages, and how many tensors come ahead; checked."""
    runs, ahead = plan.decisions.get("shares"), plan.decisions.get("ahead")
    if not (isinstance(runs, list) and isinstance(ahead, int) and 0 <= ahead <= _MOST_AHEAD):
        raise needs_plan("pipelined", "The config has none, or it is damaged.")
    try:
        return len(runs), of_runs(runs, stages), ahead
    except ValueError as error:
        raise needs_plan("pipelined", f"It has {error}.") from error
