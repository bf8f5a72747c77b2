"""Move saved tensors to the host one by one or part by part, as few as a byte budget asks for (TSPLIT)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from memtune.calls import INPUTS, Call, by_name, from_names
from memtune.errors import ApplyError
from memtune.hardware import Hardware
from memtune.passes.calls import split_calls
from memtune.passes.move import MoveClaim, move_activations
from memtune.passes.position_wise import PositionWise, position_wise
from memtune.passes.split_region import split_regions
from memtune.planners.tsplit import Found, Problem, solve
from memtune.program import I64, Program, RankClass, Step
from memtune.runtime.context import Context
from memtune.runtime.tiled_region import install_tiled_modules
from memtune.search_spaces.offload.activations._micro_tensors import Decisions, Split, calls_in_parts, decisions
from memtune.search_spaces.recompute._budget import after_later, later_techniques
from memtune.search_spaces.recompute._levels import live_bytes, windows
from memtune.technique import Exactness, Plan, Reason, Target, Technique
from memtune.units import format_bytes, format_seconds

_TRIES = 6
"""Plans that are rewritten in search of one whose true peak is within the budget."""
_WHOLE_BATCH = ("batch_norm", "instance_norm", "group_norm")


class TSplit(Technique):
    """Trades as few copies over the host link as a budget asks for: at the peak the tensor with the least time per byte goes.

    Every saved tensor of the blocks has its own action: it stays, it moves to the host, or its module is *split*: an MLP
    (products with weights, norms and element-wise ops between them) runs over p parts of the tokens, each of which saves
    micro-tensors of its own. They leave while the next part computes, so the whole is never on the device, and nothing runs
    twice. A greedy planner walks the recorded memory timeline: at the current peak it takes the action with the least added time
    per byte freed, updates the timeline, and goes on until the peak is below the budget. A transfer costs what compute does not
    hide, one at a time on the link. Recomputation, TSPLIT's third action, is the recompute slot's; a block that runs again is not
    split, but what it keeps may move. What mixes tokens or samples (attention, BatchNorm) is never split.

    Reordered where a module is split: a weight's gradient is the sum of p parts, each rounded once. Where tensors only move
    (`parts: 1`), bitwise.

    Distinguishing test (`test_each_tensor_has_its_own_action` and `test_large_tensors_leave_in_parts`): at one budget fewer bytes
    cross the link than with one action for all tensors, and with whole tensors only the smallest budget cannot be met.
    """

    kind: Literal["tsplit"] = "tsplit"
    slot: ClassVar[str] = "offload.activations"
    title: ClassVar[str] = "Saved tensors to the host, whole or in parts, by budget"
    source: ClassVar[str] = (
        "Nie et al. 2022, TSPLIT: Fine-grained GPU Memory Management for Efficient DNN Training via Tensor Splitting, ICDE 2022"
    )
    exactness: ClassVar[Exactness] = Exactness.REORDERED
    eager_only: ClassVar[str] = "it sees which op runs through a dispatch mode"

    budget_bytes: Annotated[int, Field(gt=0)] | None = None
    """Peak to stay within; less moves more. Left out: all the memory that the target gives."""
    share: Annotated[float, Field(ge=0, le=1)] | None = None
    """In place of bytes: 0 is the smallest peak that the planner reaches, 1 the peak without any action."""
    spare: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Part of a budget in bytes that stays free for what no recording shows, such as a kernel's scratch; more is safer."""
    parts: Literal[1, 2, 4, 8, 16] = 8
    """Most parts that a module is split into; powers of two up to it are tried. 1 splits nothing, so gradients stay bitwise."""
    min_bytes: Annotated[int, Field(ge=1)] = 65536
    """Smaller tensors, and parts of tensors, stay: a copy has a fixed cost."""

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs a budget that the step exceeds and that some plan meets, and blocks whose tensors have addresses."""
        if (reason := self._cannot(program.step, target)) is not None:
            return reason
        solved = self._solved(program, target)
        if self.share is None and solved.plain_bytes <= solved.budget_bytes:
            return Reason("everything fits into the budget as it is", "offload.activations: {kind: none}")
        if not solved.found.is_within:
            return Reason(
                f"no plan stays within {format_bytes(solved.budget_bytes)}: the smallest that was found needs "
                f"{format_bytes(solved.peak_bytes)}{self._not_split(program.step)}",
                "a smaller micro-batch, recompute, or sharding or offload of what is not an activation",
            )
        return None

    def _cannot(self, step: Step, target: Target) -> Reason | None:
        """What needs no look at the tensors."""
        if not step.blocks:
            return Reason("the model has no blocks whose activations could move", "def blocks(model) in model.py")
        if target.compiled:
            return Reason(self.eager_only, "execution.compile: false")
        if self.budget_bytes is not None and self.share is not None:
            return Reason("budget_bytes and share both say what the budget is", "give one of them")
        if self._budget(target) is None and self.share is None:
            return Reason(
                "there is no budget to plan for", "--max-memory 20GiB, or offload.activations: {kind: tsplit, share: 0.5}"
            )
        if split_calls(step) is not step:
            return Reason(
                "a block runs several times, and its tensors have no addresses", "offload.activations: {kind: copy_out}"
            )
        return None

    def _not_split(self, step: Step) -> str:
        """Why nothing was split, where it was asked for: which op of the blocks mixes what parts would separate."""
        if self.parts == 1 or position_wise(step):
            return ""
        inside = np.unique(step.op_name[step.op_block >= 0]).tolist()
        mixing = sorted(step.names[i] for i in inside if any(each in step.names[i] for each in _WHOLE_BATCH))
        why = f"{mixing[0]} looks at the whole batch" if mixing else "no module of the blocks treats every token alike"
        return f"; nothing can be split: {why}"

    def plan(self, program: Program, target: Target) -> Plan:
        """Which modules are split, and which calls' tensors move."""
        if self.share is None and self._budget(target) is None:
            raise ApplyError(
                "offload.activations: {kind: tsplit} has no budget to plan for.", fix="give budget_bytes or share", code="MT316"
            )
        return self._solved(program, target).plan

    def rewrite(self, program: Program, plan: Plan, target: Target) -> Program:
        """Modules in parts; copies out after each save, copies back before each first use."""
        return program.with_step(_rewritten(program.step, plan, self.min_bytes))

    def apply(self, context: Context, plan: Plan) -> None:
        """Split the modules, and claim the calls in the activation table."""
        table = context.activations
        moved, split = _decided(plan, len(table.regions))
        if split:
            install_tiled_modules(context, split, check="offload.activations", again=False)
        for region, calls in zip(table.regions, moved, strict=True):
            if calls:
                table.claim_move(region.index, 1.0, self.min_bytes, calls)

    def explain(self, plan: Plan) -> tuple[str, ...]:
        """The peak, what moves and what that costs."""
        try:
            told = plan.decisions["told"]
            peak, plain, moved = (format_bytes(told[key]) for key in ("peak_bytes", "plain_bytes", "moved_bytes"))
            split = plan.decisions["split"]
            line = (
                f"peak {peak} (without: {plain}); {moved} of tensors move, {format_seconds(told['added_s'])} more a micro-batch"
            )
            parts = sorted(set(split.values()))
        except (KeyError, ValueError, TypeError, AttributeError):
            return ()
        return (line, f"{len(split)} modules run in {' or '.join(map(str, parts))} parts") if split else (line,)

    def record(self, target: Target) -> dict[str, Any]:
        """The budget that decides all else."""
        budget = f"share {self.share}" if self.share is not None else self._budget(target)
        how = {"planned": budget, "parts": self.parts, "min_bytes": self.min_bytes, "tier": "host"}
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

    def _solved(self, program: Program, target: Target) -> _Solved:
        again = target.chosen.get("recompute")
        splits = self.parts if again is None or again.kind == "none" else 1
        parts = tuple(each for each in (2, 4, 8, 16) if each <= splits)
        run = (program.ranks, program.micro_batch, program.accumulate)
        later = later_techniques(target, "offload.activations")
        budget = None if self.share is not None else self._budget(target)
        return _solve(program.step, later, target.hardware, *run, budget, self.share, parts, self.min_bytes)


@dataclass(frozen=True, eq=False)
class _Solved:
    plan: Plan
    found: Found
    peak_bytes: int
    """Of the whole program after every later pass."""
    plain_bytes: int
    budget_bytes: int


@lru_cache(maxsize=64)
def _solve(
    step: Step, later: tuple[Technique, ...], hardware: Hardware, ranks: int, micro_batch: int, accumulate: int,
    budget_bytes: int | None, share: float | None, parts: tuple[int, ...], min_bytes: int,
) -> _Solved:  # fmt: skip
    """The plan; `fits` and `plan` both ask for it.

    The planner prices moments, the passes have the last word: where the rewritten program, after every later pass, is above the
    budget, the planner is given as much less.
    """
    run = _Run(step, later, hardware, Program((RankClass(ranks, step),), micro_batch, accumulate), parts, min_bytes)
    plain = run.plain_bytes
    if budget_bytes is None:
        smallest = run.solved(0, 0)
        budget_bytes = smallest.peak_bytes + round((plain - smallest.peak_bytes) * (share or 0.0))
        if not share:
            return _within(smallest, budget_bytes)
    if plain <= budget_bytes:
        nothing = Found((), plain, 0.0, is_within=True)
        return _Solved(_plan([frozenset()] * len(step.blocks), {}, nothing, plain, plain, 0), nothing, plain, plain, budget_bytes)
    aim, best = budget_bytes, None
    for _ in range(_TRIES):
        best = run.solved(aim, budget_bytes)
        if best.peak_bytes <= budget_bytes or not best.found.is_within:
            break
        aim -= best.peak_bytes - budget_bytes
    assert best is not None
    return _within(best, budget_bytes)


def _within(solved: _Solved, budget_bytes: int) -> _Solved:
    found = Found(solved.found.choice, solved.found.peak_bytes, solved.found.added_s, solved.peak_bytes <= budget_bytes)
    return _Solved(solved.plan, found, solved.peak_bytes, solved.plain_bytes, budget_bytes)


class _Run:
    """One step under one set of later techniques."""

    def __init__(
        self,
        step: Step,
        later: tuple[Technique, ...],
        hardware: Hardware,
        program: Program,
        parts: tuple[int, ...],
        min_bytes: int,
    ) -> None:
        self.step, self.hardware, self._later, self._program, self._min_bytes = step, hardware, later, program, min_bytes
        self._parts, self._target = parts, Target(hardware, program.ranks, None, {each.slot: each for each in later})
        self._after_plain = self._after(step)
        self.plain_bytes = int(live_bytes(self._after_plain, hardware).max(initial=0))

    @cached_property
    def _decisions(self) -> Decisions:
        return decisions(self.step, self.hardware, self._program.ranks, self._min_bytes, self._parts)

    @cached_property
    def _problem(self) -> Problem:
        return self._decisions.problem(self._timeline())

    def peak_bytes(self, step: Step) -> int:
        """Of `step` after every later pass."""
        return int(live_bytes(self._after(step), self.hardware).max(initial=0))

    def solved(self, aim_bytes: int, budget_bytes: int) -> _Solved:
        """What the planner finds for a budget, and its true peak."""
        found = solve(self._problem, aim_bytes)
        moved, split = _chosen(self.step, self._decisions, found)
        told = _plan(moved, split, found, 0, 0, 0)
        new = _rewritten(self.step, told, self._min_bytes)
        peak, down = self.peak_bytes(new), _moved_bytes(new)
        return _Solved(_plan(moved, split, found, peak, self.plain_bytes, down), found, peak, self.plain_bytes, budget_bytes)

    def _after(self, step: Step) -> Step:
        return after_later(self._program.with_step(step), self._later, self._target).step

    def _timeline(self) -> I64:
        """(n,) live bytes, in every window between blocks as much more as later passes make its most."""
        live, after = live_bytes(self.step, self.hardware), self._after_plain
        if after is self.step:
            return live
        order = np.arange(len(self.step.blocks), dtype=np.int32)
        mine, theirs = windows(self.step, order), windows(after, order)
        more = np.maximum.reduceat(live_bytes(after, self.hardware), theirs) - np.maximum.reduceat(live, mine)
        found: I64 = live + np.repeat(more, np.diff(np.append(mine, self.step.n_ops)))
        return found


def _moved_bytes(step: Step) -> int:
    copies = np.asarray([name == "memtune.to_host.default" for name in step.names], bool)[step.op_name]
    return int(step.op_traffic_bytes[copies].sum())


def _chosen(step: Step, made: Decisions, found: Found) -> tuple[list[frozenset[Call]], dict[str, int]]:
    """Calls that move, by block, and modules that are split, from the planner's choice."""
    taken = [(each, number) for each, number in zip(made.of, found.choice, strict=True) if number]
    split = [(each.region, each.parts[number - 1]) for each, number in taken if isinstance(each, Split)]
    calls: list[frozenset[Call]] = []
    for block in range(len(step.blocks)):
        mine = {region.forward[0]: (region, parts) for region, parts in split if step.op_block[region.forward[0]] == block}
        ops = {each.op for each, _ in taken if not isinstance(each, Split) and each.block == block}
        for region, _ in mine.values():
            ops |= set(region.forward) & _saving(step, region)
        address = calls_in_parts(step, block, mine) if ops else {}
        calls.append(frozenset().union(*(frozenset([INPUTS]) if op < 0 else address[op] for op in ops)))
    return calls, {region.module: parts for region, parts in split}


def _saving(step: Step, region: PositionWise) -> set[int]:
    """Ops whose outputs the module saves."""
    return set(step.producer[step.save_storage[list(region.saves)]].tolist())


def _plan(
    moved: list[frozenset[Call]], split: dict[str, int], found: Found, peak_bytes: int, plain_bytes: int, moved_bytes: int
) -> Plan:
    different = list(dict.fromkeys(moved))
    told = {"peak_bytes": peak_bytes, "plain_bytes": plain_bytes, "moved_bytes": moved_bytes, "added_s": round(found.added_s, 9)}
    return Plan(
        decisions={
            "moved": [by_name(each) for each in different],
            "blocks": [different.index(each) for each in moved],
            "split": split,
            "told": told,
        }
    )


def _decided(plan: Plan, blocks: int) -> tuple[list[frozenset[Call]], dict[str, int]]:
    """Calls that move, by block, and modules that are split.

    Raises:
        ApplyError: The plan is missing, malformed, or for another number of blocks.
    """
    try:
        different = [from_names(each) for each in plan.decisions["moved"]]
        moved = [different[i] for i in plan.decisions["blocks"]]
        split = {str(name): int(parts) for name, parts in plan.decisions["split"].items()}
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise _no_plan("The config has none, or it is damaged.") from error
    if len(moved) != blocks:
        raise _no_plan(f"The config's is for {len(moved)} blocks, the model has {blocks}.")
    if any(not 1 < parts <= 16 for parts in split.values()):
        raise _no_plan(f"It splits modules into {sorted(set(split.values()))} parts; 2 to 16 are known.")
    return moved, split


def _no_plan(evidence: str) -> ApplyError:
    return ApplyError(
        "offload.activations: {kind: tsplit} needs a plan of which tensors move.",
        evidence=evidence,
        fix="memtune search  writes it with the config; or choose copy_out",
        code="MT316",
    )


def _rewritten(step: Step, plan: Plan, min_bytes: int) -> Step:
    moved, split = _decided(plan, len(step.blocks))
    if split:
        regions = [each for each in position_wise(step) if each.module in split]
        step = split_regions(step, regions, [split[each.module] for each in regions])
    return move_activations(step, [MoveClaim(i, 1.0, min_bytes, calls) for i, calls in enumerate(moved) if calls])
