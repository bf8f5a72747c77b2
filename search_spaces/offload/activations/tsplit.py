"""Offload saved tensors one by one or part by part, as few as a byte budget needs (TSPLIT)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from memtune import refusals
from memtune.activations.offload import Prefetcher
from memtune.activations.tiling import install_tiled_modules
from memtune.effects import DISPATCH_MODE, Effects
from memtune.program import Program, Step, split_calls
from memtune.runtime import Context
from memtune.search_spaces import active
from memtune.search_spaces.offload.activations._tsplit_options import tileable
from memtune.search_spaces.offload.activations._tsplit_plan import (
    Decided,
    TsplitLimits,
    TsplitPlan,
    TsplitSolution,
    rewrite_step,
    solve_tsplit,
)
from memtune.search_spaces.recompute._block_planner.budget import later_techniques
from memtune.technique import Exactness, Plan, Reason, Target, Technique
from memtune.units import format_budget, format_bytes, format_seconds

_WHOLE_BATCH = ("batch_norm", "instance_norm")

_MOST = 1200
"""Most saved tensors for a plan: the greedy planner's time grows with their square."""


class TSplit(Technique):
    """Trades copies over the host link, as few as a budget needs, for the device bytes of saved tensors.

    Every saved tensor of the blocks has its own action: it is resident, it is offloaded, or its module is
    *split*. An MLP (products with weights, norms and element-wise ops between them) runs over p parts of the
    tokens, any other module whose ops compute each sample alone, such as attention or convolutions, over p
    parts of the samples. Each part saves micro-tensors of its own, which are offloaded while the next part
    computes, so the full tensor is never on the device; or it saves its input, and the module runs again in
    backward, part by part or at once.

    A greedy planner walks the recorded memory timeline: at the current peak it takes the action with the
    least added time per byte freed, updates the timeline, and continues until the peak is below the budget. A
    copy costs the time that compute does not hide, with one copy at a time on the link. A block that the
    recompute slot recomputes is not split, but its kept tensors may be offloaded. Modules that mix samples
    (BatchNorm) are never split; the first call of one that is compares its output for two samples together
    and alone.

    Reordered if a module is split: a weight's gradient is the sum of p parts, each rounded once. If tensors
    are only offloaded (`parts: 1`), bitwise.
    """

    kind: Literal["tsplit"] = "tsplit"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (TsplitPlan,)
    title: ClassVar[str] = "Saved tensors to the host, whole or in parts, by budget"
    source: ClassVar[str] = (
        "Nie et al. 2022, TSPLIT: Fine-grained GPU Memory Management for Efficient DNN Training via Tensor"
        " Splitting, ICDE 2022"
    )
    paper: ClassVar[str] = "TSPLIT"
    exactness: ClassVar[Exactness] = Exactness.REORDERED
    by_budget: ClassVar[bool] = True
    effects: ClassVar[Effects] = Effects(activations="tensor", eager_only=DISPATCH_MODE)

    budget_bytes: Annotated[int, Field(gt=0)] | None = None
    """Peak to stay within; a smaller one offloads more. Default: all memory of the target."""
    share: Annotated[float, Field(ge=0, le=1)] | None = None
    """Budget as a share instead of bytes: 0 is the smallest peak that the planner reaches, 1 the peak without
    any action.
    """
    headroom: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Part of a budget in bytes reserved for memory that no recording shows, such as a kernel's workspace;
    more is safer.
    """
    parts: Literal[1, 2, 4, 8, 16] = 8
    """Most parts of a module; powers of two up to it are tried. 1: nothing is split, bitwise gradients."""
    min_bytes: Annotated[int, Field(ge=1)] = 65536
    """Smaller tensors, and parts of tensors, are resident: a copy has a fixed cost."""
    prefetch: Annotated[int, Field(ge=0, le=16)] = 1
    """Tensors prefetched before backward needs them; each takes its bytes. 0: each is waited for."""

    def sentence(self) -> str:
        """Return the setting as one clause."""
        needed = format_budget(self.budget_bytes, self.share)
        return f"moves as few saved activations to host memory as needed {needed}"

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Require a budget that the step exceeds and some plan meets, and tensors with addresses."""
        if (reason := self._cannot_plan(program.step, target)) is not None:
            return reason
        solution = self._solution(program, target)
        if solution.plain_bytes <= solution.budget_bytes:
            return refusals.fits_already("offload.activations: {kind: none}")
        if not solution.is_within:
            why = self._unsplit(program, target)
            least = "any needs at least" if solution.is_floor else "the smallest that was found needs"
            return Reason(
                f"no plan stays within {format_bytes(solution.budget_bytes)}: {least}"
                f" {format_bytes(solution.peak_bytes)}{'; nothing can be split: ' * bool(why)}{why}",
                "a smaller micro-batch, recompute, or sharding or offload of states",
            )
        return None

    def _cannot_plan(self, step: Step, target: Target) -> Reason | None:
        """Return why no plan can be made, from the config and the step's sizes alone."""
        if not step.blocks:
            return refusals.no_blocks_to_offload()
        if target.compiled:
            return Reason(self.effects.eager_only, "execution.compile: false")
        if self.budget_bytes is not None and self.share is not None:
            return refusals.two_budgets()
        if self._budget(target) is None and self.share is None:
            return refusals.no_budget(
                "--max-memory 20GiB, or offload.activations: {kind: tsplit, share: 0.5}"
            )
        if (count := int(np.count_nonzero(step.saves.block >= 0))) > _MOST:
            return Reason(
                f"blocks save {count} tensors, and a plan for each tensor is made for up to {_MOST}",
                "offload.activations: {kind: copy_out}",
            )
        if split_calls(step) is not step:
            return refusals.block_runs_again("offload.activations: {kind: copy_out}")
        return None

    def _unsplit(self, program: Program, target: Target) -> str:
        """Return why no module can be split although the config allows it; "" if one can."""
        if self.parts == 1:
            return ""
        if active(target, "recompute") is not None:
            return "blocks are recomputed"
        if tileable(program.step, program.micro_batch):
            return ""
        step = program.step
        inside = np.unique(step.ops.name[step.ops.block >= 0]).tolist()
        mixing = sorted(step.names[i] for i in inside if any(each in step.names[i] for each in _WHOLE_BATCH))
        return (
            f"{mixing[0]} reads the whole batch"
            if mixing
            else "no submodule of the blocks computes each token or each of several samples alone"
        )

    def plan(self, program: Program, target: Target) -> TsplitPlan:
        if self.share is None and self._budget(target) is None:
            raise refusals.no_budget_to_plan(self)
        why = self._unsplit(program, target)
        return self._solution(program, target).plan.model_copy(update={"unsplit": why})

    def rewrite(self, program: Program, plan: TsplitPlan, target: Target) -> Program:
        """Split modules, and add D2H copies after each save and H2D copies before each first use."""
        decided = Decided.from_plan(plan, len(program.step.blocks))
        return program.with_step(rewrite_step(program, decided, self.min_bytes))

    def apply(self, context: Context, plan: TsplitPlan) -> None:
        """Split the modules, and claim the calls in the activation table."""
        table = context.activations
        decided = Decided.from_plan(plan, len(context.all_blocks))
        table.prefetcher = Prefetcher(decided.prefetch)
        if decided.split:
            install_tiled_modules(context, decided.split, check="offload.activations")
        for region, calls in zip(table.regions, context.of_own_blocks(decided.offloaded), strict=True):
            if calls:
                table.claim_move(region.index, 1.0, self.min_bytes, calls)

    def explain(self, plan: TsplitPlan) -> tuple[str, ...]:
        outcome, split = plan.predicted, plan.split
        if outcome is None:
            return self.unmet(plan)
        peak, plain, moved = (
            format_bytes(each) for each in (outcome.peak_bytes, outcome.plain_bytes, outcome.offloaded_bytes)
        )
        line = (
            f"peak {peak} (without: {plain}); {moved} of tensors are offloaded,"
            f" {format_seconds(outcome.added_s)} more per micro-batch"
        )
        parts = sorted(set(split.values()))
        if split:
            again = f", {len(plan.again)} of them again in backward" if plan.again else ""
            return line, f"{len(split)} modules run in {' or '.join(map(str, parts))} parts{again}"
        return line, *self.unmet(plan)

    def unmet(self, plan: TsplitPlan) -> tuple[str, ...]:
        return (f"tsplit splits nothing: {plan.unsplit}",) if plan.unsplit else ()

    def record(self, target: Target) -> dict[str, Any]:
        budget = f"share {self.share}" if self.share is not None else self._budget(target)
        limits = {
            "planned": budget,
            "parts": self.parts,
            "min_bytes": self.min_bytes,
            "prefetch": self.prefetch,
            "tier": "host",
        }
        return {"activations.move": limits}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        return {"parts": (8, 1)}

    def exactly(self) -> Exactness:
        return Exactness.BITWISE if self.parts == 1 else Exactness.REORDERED

    def _budget(self, target: Target) -> int | None:
        n_bytes = self.budget_bytes or target.budget_bytes
        return None if n_bytes is None else int(n_bytes * (1 - self.headroom))

    def _solution(self, program: Program, target: Target) -> TsplitSolution:
        limits = self._limits(again=active(target, "recompute") is not None)
        run = (program.ranks, program.micro_batch, program.accumulate)
        later = later_techniques(target, "offload.activations")
        budget = None if self.share is not None else self._budget(target)
        return solve_tsplit(program.step, later, target.hardware, *run, budget, self.share, limits)

    def _limits(self, *, again: bool) -> TsplitLimits:
        """Return the planner's freedom."""
        # A recomputed block is not split, and reads its kept tensors in an order of its own, which the order
        # of saves does not predict.
        if again:
            return TsplitLimits((), self.min_bytes, 0, again=False)
        return TsplitLimits(
            tuple(each for each in (2, 4, 8, 16) if each <= self.parts),
            self.min_bytes,
            self.prefetch,
            again=self.parts > 1,
        )
