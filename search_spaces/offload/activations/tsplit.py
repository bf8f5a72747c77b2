"""Move saved tensors to the host one by one or part by part, as few as a byte budget asks for (TSPLIT)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from memtune.activations.offload import Prefetcher
from memtune.activations.tiling import install_tiled_modules, position_wise
from memtune.effects import DISPATCH_MODE, Effects
from memtune.errors import ApplyError
from memtune.program import Program, Step, split_calls
from memtune.runtime import Context
from memtune.search_spaces._support import active
from memtune.search_spaces.offload.activations._tsplit_plan import (
    Decided,
    How,
    Solved,
    TsplitPlan,
    rewritten,
    solved,
)
from memtune.search_spaces.recompute._block_planner import later_techniques
from memtune.technique import Exactness, Plan, Reason, Target, Technique
from memtune.units import format_bytes, format_seconds

_WHOLE_BATCH = ("batch_norm", "instance_norm", "group_norm")

_MOST = 1200
"""Saved tensors of which a plan is made: the greedy planner's time grows with their square, under hundreds of
candidates.
"""


class TSplit(Technique):
    """Trades as few copies over the host link as a budget asks for: at the peak the tensor with the least
    time per byte goes.

    Every saved tensor of the blocks has its own action: it stays, it moves to the host, or its module is
    *split*: an MLP (products with weights, norms and element-wise ops between them) runs over p parts of the
    tokens, each of which saves micro-tensors of its own. They leave while the next part computes, so the
    whole is never on the device, and nothing runs twice. A greedy planner walks the recorded memory timeline:
    at the current peak it takes the action with the least added time per byte freed, updates the timeline,
    and goes on until the peak is below the budget. A transfer costs what compute does not hide, one at a time
    on the link. Recomputation, TSPLIT's third action, is the recompute slot's; a block that runs again is not
    split, but what it keeps may move. What mixes tokens or samples (attention, BatchNorm) is never split.

    Reordered where a module is split: a weight's gradient is the sum of p parts, each rounded once. Where
    tensors only move (`parts: 1`), bitwise.

    Distinguishing test (`test_each_tensor_has_its_own_action` and `test_large_tensors_leave_in_parts`): at
    one budget fewer bytes cross the link than with one action for all tensors, and with whole tensors only
    the smallest budget cannot be met.
    """

    kind: Literal["tsplit"] = "tsplit"
    slot: ClassVar[str] = "offload.activations"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (TsplitPlan,)
    title: ClassVar[str] = "Saved tensors to the host, whole or in parts, by budget"
    source: ClassVar[str] = (
        "Nie et al. 2022, TSPLIT: Fine-grained GPU Memory Management for Efficient DNN Training via Tensor"
        " Splitting, ICDE 2022"
    )
    exactness: ClassVar[Exactness] = Exactness.REORDERED
    effects: ClassVar[Effects] = Effects(activations="tensor", eager_only=DISPATCH_MODE)

    budget_bytes: Annotated[int, Field(gt=0)] | None = None
    """Peak to stay within; less moves more. Left out: all the memory that the target gives."""
    share: Annotated[float, Field(ge=0, le=1)] | None = None
    """In place of bytes: 0 is the smallest peak that the planner reaches, 1 the peak without any action."""
    spare: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Part of a budget in bytes that stays free for what no recording shows, such as a kernel's scratch; more
    is safer.
    """
    parts: Literal[1, 2, 4, 8, 16] = 8
    """Most parts that a module is split into; powers of two up to it are tried. 1 splits nothing, so
    gradients stay bitwise.
    """
    min_bytes: Annotated[int, Field(ge=1)] = 65536
    """Smaller tensors, and parts of tensors, stay: a copy has a fixed cost."""
    ahead: Annotated[int, Field(ge=0, le=16)] = 1
    """Tensors that come back before backward asks for them, beside compute; each takes its bytes. 0 waits for
    each.
    """

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs a budget that the step exceeds and that some plan meets, and blocks whose tensors have
        addresses.
        """
        if (reason := self._cannot(program.step, target)) is not None:
            return reason
        found = self._solved(program, target)
        if found.plain_bytes <= found.budget_bytes:
            return Reason("everything fits into the budget as it is", "offload.activations: {kind: none}")
        if not found.is_within:
            least = "any needs at least" if found.is_floor else "the smallest that was found needs"
            return Reason(
                f"no plan stays within {format_bytes(found.budget_bytes)}: {least}"
                f" {format_bytes(found.peak_bytes)}{self._not_split(program.step)}",
                "a smaller micro-batch, recompute, or sharding or offload of what is not an activation",
            )
        return None

    def _cannot(self, step: Step, target: Target) -> Reason | None:
        """What needs no look at the tensors."""
        if not step.blocks:
            return Reason(
                "the model has no blocks whose activations could move", "def blocks(model) in model.py"
            )
        if target.compiled:
            return Reason(self.effects.eager_only, "execution.compile: false")
        if self.budget_bytes is not None and self.share is not None:
            return Reason("budget_bytes and share both say what the budget is", "give one of them")
        if self._budget(target) is None and self.share is None:
            return Reason(
                "there is no budget to plan for",
                "--max-memory 20GiB, or offload.activations: {kind: tsplit, share: 0.5}",
            )
        if (count := int(np.count_nonzero(step.saves.block >= 0))) > _MOST:
            return Reason(
                f"blocks save {count} tensors, and a plan that looks at each is made for up to {_MOST}",
                "offload.activations: {kind: copy_out}",
            )
        if split_calls(step) is not step:
            return Reason(
                "a block runs several times, and its tensors have no addresses",
                "offload.activations: {kind: copy_out}",
            )
        return None

    def _not_split(self, step: Step) -> str:
        """Why nothing was split, where it was asked for: which op of the blocks mixes what parts would
        separate.
        """
        if self.parts == 1 or position_wise(step):
            return ""
        inside = np.unique(step.ops.name[step.ops.block >= 0]).tolist()
        mixing = sorted(step.names[i] for i in inside if any(each in step.names[i] for each in _WHOLE_BATCH))
        why = (
            f"{mixing[0]} looks at the whole batch"
            if mixing
            else "no module of the blocks treats every token alike"
        )
        return f"; nothing can be split: {why}"

    def plan(self, program: Program, target: Target) -> TsplitPlan:
        """Which modules are split, and which calls' tensors move."""
        if self.share is None and self._budget(target) is None:
            raise ApplyError(
                "offload.activations: {kind: tsplit} has no budget to plan for.",
                fix="give budget_bytes or share",
                code="MT316",
            )
        return self._solved(program, target).plan

    def rewrite(self, program: Program, plan: TsplitPlan, target: Target) -> Program:
        """Modules in parts; copies out after each save, copies back before each first use."""
        decided = Decided.of(plan, len(program.step.blocks))
        return program.with_step(rewritten(program.step, decided, self.min_bytes))

    def apply(self, context: Context, plan: TsplitPlan) -> None:
        """Split the modules, and claim the calls in the activation table."""
        table = context.activations
        decided = Decided.of(plan, len(table.regions))
        table.ahead = Prefetcher(decided.ahead)
        if decided.split:
            install_tiled_modules(context, decided.split, check="offload.activations", again=False)
        for region, calls in zip(table.regions, decided.moved, strict=True):
            if calls:
                table.claim_move(region.index, 1.0, self.min_bytes, calls)

    def explain(self, plan: TsplitPlan) -> tuple[str, ...]:
        """The peak, what moves and what that costs."""
        told, split = plan.told, plan.split
        if told is None:
            return ()
        peak, plain, moved = (
            format_bytes(each) for each in (told.peak_bytes, told.plain_bytes, told.moved_bytes)
        )
        line = (
            f"peak {peak} (without: {plain}); {moved} of tensors move, {format_seconds(told.added_s)} more a"
            " micro-batch"
        )
        parts = sorted(set(split.values()))
        return (
            (line, f"{len(split)} modules run in {' or '.join(map(str, parts))} parts") if split else (line,)
        )

    def record(self, target: Target) -> dict[str, Any]:
        """The budget that decides all else."""
        budget = f"share {self.share}" if self.share is not None else self._budget(target)
        how = {
            "planned": budget,
            "parts": self.parts,
            "min_bytes": self.min_bytes,
            "ahead": self.ahead,
            "tier": "host",
        }
        return {"activations.move": how}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        """With and without splits."""
        return {"parts": (8, 1)}

    def exactly(self) -> Exactness:
        """Bitwise where nothing is split."""
        return Exactness.BITWISE if self.parts == 1 else Exactness.REORDERED

    def _budget(self, target: Target) -> int | None:
        n_bytes = self.budget_bytes or target.budget_bytes
        return None if n_bytes is None else int(n_bytes * (1 - self.spare))

    def _solved(self, program: Program, target: Target) -> Solved:
        how = self._how(again=active(target, "recompute") is not None)
        run = (program.ranks, program.micro_batch, program.accumulate)
        later = later_techniques(target, "offload.activations")
        budget = None if self.share is not None else self._budget(target)
        return solved(program.step, later, target.hardware, *run, budget, self.share, how)

    def _how(self, *, again: bool) -> How:
        """Blocks that run again are not split, and ask for what they kept in an order of their own, so
        nothing comes ahead.
        """
        if again:
            return How((), self.min_bytes, 0)
        return How(tuple(each for each in (2, 4, 8, 16) if each <= self.parts), self.min_bytes, self.ahead)
